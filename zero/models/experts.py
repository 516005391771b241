"""A mixture of experts in place of one MLP: a router sends each token to a few of many MLPs.

Without a capacity the tokens of a device are sorted by expert and multiplied by `ragged_dot`. With a capacity an expert
has the same number of places in every row, so the dropped tokens depend only on the row, not on the number of devices
or micro-batches. Expert groups exchange these places between devices.

Shapes are named by suffix:
  B rows, T positions of a row, D embedding, E experts, K choices of a token, C places of an expert in a row,
  F width of an expert, L layers with experts, M choices of all tokens of all rows
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike

from zero.base.keys import at_least, key, one_of, positive, zero_or_more
from zero.models.axes import EMBED, EXPERT, Axes, Role, named
from zero.models.axes import MLP as MLP_AXIS
from zero.models.mlp import ACTIVATIONS, MLP, hidden_values
from zero.models.mtp_keys import MtpKeys
from zero.models.parametrization import Initial, kernel_init
from zero.models.part import own_keys
from zero.models.router import ROUTER_BIAS, ROUTERS, Router, chosen_experts, with_counts
from zero.models.stack import EXPERTS, MLP_GATE, MLP_IN
from zero.partition.model_parallel import ALONE, WHOLE, ExpertParallel, ModelParallel


@dataclass(frozen=True)
class Mixture(MLP, Router, Initial, MtpKeys):
    """The keys of experts."""

    experts_every: int = key(
        1, at_least(1), "the last of every so many layers has experts, the other layers have one MLP"
    )
    # DeepSeekMoE, arXiv 2401.06066
    first_dense: int = key(0, at_least(0), "the first layers that have one MLP instead of experts")
    dense_dim: int | None = key(
        None, at_least(1), "width of the MLP of layers without experts, where others have them", none="mlp_dim"
    )
    expert_capacity: float | None = key(
        None,
        positive(),
        "in training an expert takes expert_capacity * tokens * experts_per_token / experts choices of each "
        "row and drops the others; null: nothing is dropped, and zero.expert_shards must be 1",
    )
    expert_priority: str = key(
        "choice",
        one_of("choice", "position"),
        "who gets the places of an expert: first choices before second ones (choice), or earlier positions "
        "before later ones (position), with which no token depends on later ones",
    )
    # E times the sum over experts of choices per token times mean probability (Switch, arXiv 2101.03961, eq. 4). It is
    # `experts_per_token` where all experts are chosen equally.
    balance_loss: float = key(
        0.0,
        zero_or_more(),
        "weight of the load-balancing loss, a mean over layers, as router_aux_loss_coef of transformers; like "
        "router_z_loss, losses are reported without it",
    )
    # first: GShard, arXiv 2006.16668, algorithm 1
    balance_choices: str = key(
        "all",
        one_of("all", "first"),
        "choices whose frequency balance_loss counts: all, or first, those of the most likely expert",
    )
    # DeepSeekMoE, arXiv 2401.06066
    shared_dim: int | None = key(
        None, at_least(1), "width of an MLP beside the experts, which all tokens take; null: none"
    )
    # Qwen1.5-MoE
    shared_gate: bool = key(
        False, None, "the output of the MLP beside the experts is multiplied by the sigmoid of a product with its input"
    )
    # ST-MoE, arXiv 2202.08906, eq. 5
    router_z_loss: float = key(
        0.0, zero_or_more(), "weight of the mean squared log-sum-exp of the router's logits of each layer"
    )

    def mistakes(self) -> Iterator[str]:
        """Keys of experts in a model without experts, and keys that conflict with experts."""
        if self.experts is None:
            for field in own_keys(Mixture):
                if getattr(self, field.name) != field.default:
                    yield f"{field.name} {getattr(self, field.name)} needs experts"
            return
        if self.first_dense >= self.N:
            yield f"first_dense {self.first_dense} must be less than N {self.N}"
        if (self.N - self.first_dense) % self.experts_every:
            less = f" less first_dense {self.first_dense}" if self.first_dense else ""
            yield f"N {self.N}{less} must be a multiple of experts_every {self.experts_every}"
        for name in ("experts_every", "first_dense"):
            if getattr(self, name) > getattr(Mixture, name):
                if len(self.windows) > 1:
                    yield f"{name} {getattr(self, name)} needs one window, got {list(self.windows)}"
                if len(self.mixers) > 1:
                    yield f"{name} {getattr(self, name)} needs one mixer, got {list(self.mixers)}"
        if self.shared_gate and (self.shared_dim is None or self.mlp_bias):
            yield (
                "shared_gate: true needs a shared_dim and mlp_bias: false, "
                f"got {self.shared_dim} and {str(self.mlp_bias).lower()}"
            )
        if ACTIVATIONS[self.activation].scalars:
            yield f"experts need an activation without learned scalars, got {self.activation}"
        for name, needed in (("parametrization", "standard"), ("init", "gpt2")):
            if getattr(self, name) != needed:
                yield f"experts need {name}: {needed}, got {getattr(self, name)}"

    @property
    def scanned_layers(self) -> int:
        """Entries of the stack of layers after `first_dense`: each has a `period` of them."""
        return (self.N - self.first_dense) // self.period

    @property
    def period(self) -> int:
        """Layers until a layer with the same parameters follows."""
        return max(self.experts_every, len(self.mixers))

    @property
    def expert_layers(self) -> int:
        """Layers with experts, in a model that has them; the one of a predictor is the last."""
        return (self.N - self.first_dense) // self.experts_every + self.predictor

    @property
    def places_per_position(self) -> float:
        """Places of a position at all experts, in a model that has them."""
        return self.experts_per_token * (self.expert_capacity or 1.0)

    @property
    def hidden_width(self) -> float:
        """Hidden values per position of the MLP and the experts of a layer, averaged over layers."""
        if self.experts is None:
            return self.mlp_width
        expert_width = self.places_per_position * self.mlp_width + (self.shared_dim or 0)
        dense_layers = self.layer_count - self.expert_layers
        return (self.expert_layers * expert_width + dense_layers * self.dense_width) / self.layer_count

    @property
    def shared_experts(self) -> int | float:
        """Width of the MLP beside the experts, in widths of an expert; a float if it is not a multiple."""
        count, rest = divmod(self.shared_dim or 0, self.mlp_width)
        if not rest:
            return count
        return count + rest / self.mlp_width

    @property
    def chosen_width(self) -> int:
        """Width of all experts of a token together."""
        return self.mlp_width * self.experts_per_token

    @property
    def dense_width(self) -> int:
        """Width of the MLP of layers without experts."""
        return self.dense_dim or self.mlp_width


class Routing(NamedTuple):
    """Routing statistics and auxiliary losses, summed over layers.

    Attributes:
      penalty_B: weighted auxiliary losses of each row, summed over layers, float32.
      choices_LE: how often each expert was chosen in each layer, whether or not it had a place left, float32.
      dropped: choices for which there was no place left, in all layers, float32.
      entropy: entropy of the router's probabilities in nats, summed over positions and layers, float32.
    """

    penalty_B: jax.Array
    choices_LE: jax.Array
    dropped: jax.Array
    entropy: jax.Array


# The residual stream between layers, and the routing so far if there are experts.
ResidualStream = tuple[jax.Array, Routing | None]


def no_routing(config: Mixture, rows: int) -> Routing | None:
    """The zero of `Routing`; None for a model without experts."""
    if config.experts is None:
        return None
    choices_LE = jnp.zeros((config.expert_layers, config.experts), jnp.float32)
    return Routing(jnp.zeros(rows, jnp.float32), choices_LE, jnp.float32(0), jnp.float32(0))


METRICS = ("expert_share_max", "expert_share_min", "dropped_share", "router_entropy")


def routing_metrics(routing: Routing, positions: jax.Array | float) -> dict[str, jax.Array]:
    """Averages over layers: shares of the most and the least chosen expert, share of choices dropped, entropy in nats.

    `routing` and `positions` are sums over all rows.
    """
    choices_L1 = routing.choices_LE.sum(-1, keepdims=True)
    share_LE = routing.choices_LE / choices_L1
    share_max = share_LE.max(-1).mean()
    share_min = share_LE.min(-1).mean()
    dropped = routing.dropped / choices_L1.sum()
    entropy = routing.entropy / (positions * len(share_LE))
    return dict(zip(METRICS, (share_max, share_min, dropped, entropy), strict=True))


def capacity_of(config: Mixture, positions: int) -> int:
    """C, the places of an expert in a row of this many positions.

    >>> capacity_of(Mixture(8, 9, 2, 16, 0.0, 1, experts=4, expert_capacity=1.25, mlp_bias=False), 16)
    5
    """
    assert config.experts is not None and config.expert_capacity is not None
    places = math.ceil(config.expert_capacity * positions * config.experts_per_token / config.experts)
    return min(places, positions)  # a token chooses an expert at most once


class _Product(nn.Module):
    """Parameters `kernel` and `bias`, by which weight decay and learning rates select them; no bias is None."""

    config: Mixture
    shape: tuple[int, ...]
    axes: Axes

    @nn.compact
    def __call__(self) -> tuple[jax.Array, jax.Array | None]:
        kernel = self.param("kernel", kernel_init(self.config, str(self.name), self.axes), self.shape)
        if not self.config.mlp_bias:
            return kernel, None
        zeros = named(nn.initializers.zeros, *self.axes.names[:-2], self.axes.names[-1])
        return kernel, self.param("bias", zeros, (*self.shape[:-2], self.shape[-1]))


# Of each expert `(E, I, O)` and `(E, O)`.
Weights = dict[str, tuple[jax.Array, jax.Array | None]]


class Experts(nn.Module):
    """The experts of one layer and their router.

    Attributes:
      config: the model.
      dtype: dtype of the experts' products; the router computes in float32.
      row_group: which part of each expert's width this device computes.
      expert_group: the devices among which the experts are divided.
    """

    config: Mixture
    dtype: DTypeLike
    row_group: ModelParallel = WHOLE
    expert_group: ExpertParallel = ALONE

    @nn.compact
    def __call__(self, h_BTD: jax.Array, layer: jax.Array | int, *, drops: bool) -> tuple[jax.Array, Routing]:
        """`(B, T, D)` to this device's part of the sum over the experts' widths, and the routing.

        Args:
          h_BTD: all positions of the rows of this device.
          layer: number among the layers with experts.
          drops: whether the capacity applies, if the model has one. False for scoring and generation: a choice that
            has no place because of other tokens is not a property of the text before it.
        """
        config = self.config
        assert config.experts is not None
        kind = ROUTERS[config.router]
        logits_BTE = self._router_logits(h_BTD)
        scores_BTE = kind.of_logits(logits_BTE)
        bias_E = None
        if config.has_router_bias:
            bias_E = self.variable(ROUTER_BIAS, "bias", jnp.zeros, (config.experts,)).value
        chosen_BTK, gates_BTK = chosen_experts(config, scores_BTE, bias_E)
        if bias_E is not None:
            gates_BTK = with_counts(gates_BTK, bias_E, self._counted(chosen_BTK))

        width = config.mlp_width // self.row_group.size
        local_experts = config.experts // self.expert_group.size
        into = (local_experts, config.embedding_dim, width), Axes((EXPERT, EMBED, MLP_AXIS))
        out = (local_experts, width, config.embedding_dim), Axes((EXPERT, MLP_AXIS, EMBED), Role.RESIDUAL_OUT)
        kinds = {"mlp_in": into, "mlp_gate": into, "mlp_out": out}
        if not config.gated:
            del kinds["mlp_gate"]
        products = {name: _Product(config, *kind, name=name)() for name, kind in kinds.items()}
        weights: Weights = jax.tree.map(lambda x: x.astype(self.dtype), products)
        h_BTD = h_BTD.astype(self.dtype)
        dropped = jnp.float32(0)
        if self.expert_group.size == 1 and (config.expert_capacity is None or not drops):
            y_BTKD = self._sorted(h_BTD, chosen_BTK, weights)
        elif drops:
            y_BTKD, dropped = self._in_places(h_BTD, chosen_BTK, weights)
        else:
            y_BTKD = self._in_rounds(h_BTD, chosen_BTK, weights)
        y_BTD = jnp.einsum("BTKD,BTK->BTD", y_BTKD, gates_BTK.astype(self.dtype))
        return y_BTD, self._decided(logits_BTE, kind.shares(scores_BTE), chosen_BTK, dropped, layer)

    def _counted(self, chosen_BTK: jax.Array) -> jax.Array:
        """How many tokens have each expert, `(E,)`; each device of a group counts its share of their common tokens."""
        counted_BT = self.row_group.zero_if_duplicate(jnp.ones(chosen_BTK.shape[:2]))
        is_chosen_BTKE = jax.nn.one_hot(chosen_BTK, self.config.experts or 1)
        return jnp.einsum("BTKE,BT->E", is_chosen_BTKE, counted_BT, precision=lax.Precision.HIGHEST)

    def _router_logits(self, h_BTD: jax.Array) -> jax.Array:
        config = self.config
        assert config.experts is not None
        axes = Axes((EMBED, "choices"))
        kernel_DE, bias_E = _Product(config, (config.embedding_dim, config.experts), axes, name="router")()
        # In float32: rounded logits would change the chosen experts (Switch, arXiv 2101.03961, section 2.4).
        h_BTD = h_BTD.astype(jnp.float32)
        kernel_DE = kernel_DE.astype(jnp.float32)
        logits_BTE = jnp.einsum("BTD,DE->BTE", h_BTD, kernel_DE, precision=lax.Precision.HIGHEST)
        if bias_E is None:
            return logits_BTE
        return logits_BTE + bias_E.astype(jnp.float32)[None, None]

    def _decided(
        self,
        logits_BTE: jax.Array,
        probabilities_BTE: jax.Array,
        chosen_BTK: jax.Array,
        dropped: jax.Array,
        layer: jax.Array | int,
    ) -> Routing:
        config = self.config
        _, positions, experts = logits_BTE.shape
        lse_BT = jax.nn.logsumexp(logits_BTE, axis=-1)
        choices_BTKE = jax.nn.one_hot(chosen_BTK, experts)
        choices_BE = choices_BTKE.sum((1, 2))
        balanced_BE = choices_BTKE[:, :, 0].sum(1) if config.balance_choices == "first" else choices_BE
        balance_B = experts * jnp.sum(balanced_BE / positions * probabilities_BTE.mean(1), axis=-1)
        balance_B = balance_B / config.expert_layers  # the sum over layers becomes their mean
        penalty_B = config.balance_loss * balance_B + config.router_z_loss * jnp.mean(lse_BT**2, axis=-1)
        entropy = jnp.sum(jax.scipy.special.entr(probabilities_BTE))
        choices_LE = jnp.zeros((config.expert_layers, experts)).at[layer].set(choices_BE.sum(0))
        return Routing(penalty_B, choices_LE, dropped, lax.stop_gradient(entropy))

    def _sorted(self, h_BTD: jax.Array, chosen_BTK: jax.Array, weights: Weights) -> jax.Array:
        """Outputs of all choices, `(B, T, K, D)`, from tokens sorted by expert."""
        chosen_M = chosen_BTK.reshape(-1)
        order_M = jnp.argsort(chosen_M)
        sizes_E = jnp.zeros(self.config.experts, jnp.int32).at[chosen_M].add(1)
        order_M = checkpoint_name(order_M, EXPERTS)
        x_MD = checkpoint_name(lax.collapse(h_BTD, 0, 2)[order_M // self.config.experts_per_token], EXPERTS)
        product = partial(lax.ragged_dot, group_sizes=sizes_E)
        y_MD = self._mlp(x_MD, weights, product, lambda bias_EO: bias_EO[chosen_M[order_M]])
        return checkpoint_name(y_MD[jnp.argsort(order_M)], EXPERTS).reshape(*chosen_BTK.shape, -1)

    def _in_places(
        self, h_BTD: jax.Array, chosen_BTK: jax.Array, weights: Weights, first: jax.Array | int = 0
    ) -> tuple[jax.Array, jax.Array]:
        """Outputs of all choices, `(B, T, K, D)`, zero if dropped, and the number of dropped choices.

        An expert takes the choices from number `first` on.
        """
        rows, positions, embedding = h_BTD.shape
        experts = self.config.experts or 1
        places = capacity_of(self.config, positions)
        priority = self.config.expert_priority
        place_BTK = jax.vmap(lambda chosen_TK: assign_places(chosen_TK, experts, places, priority, first))(chosen_BTK)
        end = experts * places  # the index of dropped choices
        index_B = jnp.arange(rows)[:, None, None]
        place_BTK = checkpoint_name(place_BTK, EXPERTS)
        token_BS = jnp.full((rows, end), positions, jnp.int32)
        token_BS = token_BS.at[index_B, place_BTK].set(jnp.arange(positions)[None, :, None], mode="drop")
        x_BSD = jnp.take_along_axis(h_BTD, token_BS[..., None], axis=1, mode="fill", fill_value=0)
        x_BECD = self.expert_group.to_experts(x_BSD.reshape(rows, experts, places, embedding))
        x_BECD = checkpoint_name(x_BECD, EXPERTS)
        product = partial(jnp.einsum, "BECI,EIO->BECO")
        y_BECD = self._mlp(x_BECD, weights, product, lambda bias_EO: bias_EO[None, :, None])
        y_BSD = self.expert_group.from_experts(y_BECD).reshape(rows, end, embedding)
        chosen_BSD = y_BSD.at[index_B, place_BTK].get(mode="fill", fill_value=0)
        return checkpoint_name(chosen_BSD, EXPERTS), jnp.sum(place_BTK == end).astype(jnp.float32)

    def _in_rounds(self, h_BTD: jax.Array, chosen_BTK: jax.Array, weights: Weights) -> jax.Array:
        """Outputs of all choices, `(B, T, K, D)`, in as many rounds of places as the most chosen expert needs.

        In the memory of one round. Without a backward pass, because the number of rounds is not known before.
        """
        places = capacity_of(self.config, h_BTD.shape[1])
        most = jax.nn.one_hot(chosen_BTK, self.config.experts or 1, dtype=jnp.int32).sum((1, 2)).max()
        rounds = self.expert_group.most(-(-most // places))  # devices that exchange tokens take the same number

        def add(number: jax.Array, y_BTKD: jax.Array) -> jax.Array:
            return y_BTKD + self._in_places(h_BTD, chosen_BTK, weights, number * places)[0]

        y_BTKD = jnp.zeros((*chosen_BTK.shape, h_BTD.shape[-1]), self.dtype)
        return lax.fori_loop(0, rounds, add, y_BTKD)

    def _mlp(self, x: jax.Array, weights: Weights, product: Any, spread: Any) -> jax.Array:
        """The MLP of each expert, on its own tokens; `spread` gives each token the bias of its expert."""

        def of(name: str, x: jax.Array, parts: int = 1) -> jax.Array:
            kernel_EIO, bias_EO = weights[name]
            y = product(x, kernel_EIO)
            if bias_EO is None:
                return y
            return y + spread(bias_EO / parts)

        in_values = checkpoint_name(of("mlp_in", x), MLP_IN)
        gate_values = checkpoint_name(of("mlp_gate", x), MLP_GATE) if self.config.gated else None
        hidden = hidden_values(self.config, in_values, gate_values)
        return of("mlp_out", hidden, self.row_group.size)  # a bias for the sum over the parts of the width


def assign_places(
    chosen_TK: jax.Array, experts: int, places: int, priority: str = "choice", first: jax.Array | int = 0
) -> jax.Array:
    """For each choice of the tokens of one row its place, `expert * places + place`.

    With the priority "choice" first choices come before second ones, and earlier positions before later ones (GShard,
    arXiv 2006.16668, algorithm 1): a later token can displace the second choice of an earlier one. With "position" all
    choices of a position come before the next position's, so that a place depends only on earlier positions.
    An expert takes the choices from number `first` on. A dropped choice gets `experts * places`.

    >>> chosen = jnp.asarray([[0, 1], [0, 1], [1, 0]])
    >>> assign_places(chosen, experts=2, places=2).tolist()
    [[0, 3], [1, 4], [2, 4]]
    >>> assign_places(chosen, experts=2, places=2, priority="position").tolist()
    [[0, 2], [1, 3], [4, 4]]
    """
    chosen = chosen_TK.T if priority == "choice" else chosen_TK
    is_chosen_SE = jax.nn.one_hot(chosen.reshape(-1), experts, dtype=jnp.int32)
    before_SE = jnp.cumsum(is_chosen_SE, axis=0) - is_chosen_SE
    before = jnp.sum(before_SE * is_chosen_SE, axis=-1).reshape(chosen.shape) - first
    place = jnp.where((before >= 0) & (before < places), chosen * places + before, experts * places)
    return place.T if priority == "choice" else place
