"""A router: the experts of each token, and the factors of their outputs.

A token has a score for each expert. Scores with a bias choose the experts, scores without it are the factors. The bias
is not a parameter: `zero.models.router_bias` moves it after each step.

Sources: DeepSeek-V3, arXiv 2412.19437, section 2.1.2, equations 12 to 16; groups: DeepSeek-V2, arXiv 2405.04434,
section 2.2.2.

Shapes are named by suffix: B rows, T positions of a row, E experts, G groups of experts, K choices of a token
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from zero.base.keys import at_least, key, one_of, positive, zero_or_more
from zero.models.part import Sizes, own_keys


class Scores(NamedTuple):
    """A kind of scores: an entry of `ROUTERS`.

    Attributes:
      of_logits: from the router's logits to a score for each expert.
      shares: from scores to shares, whose sum over the experts is 1.
    """

    of_logits: Callable[[jax.Array], jax.Array]
    shares: Callable[[jax.Array], jax.Array]


ROUTERS = {
    "softmax": Scores(jax.nn.softmax, lambda scores: scores),
    "sigmoid": Scores(jax.nn.sigmoid, lambda scores: scores / scores.sum(-1, keepdims=True)),
}
ROUTER_BIAS = "router_bias"  # name of the collection of variables
_CHOICES_OF_GROUP = 2  # groups are chosen by the sum of this many of their highest scores


@dataclass(frozen=True)
class Router(Sizes):
    """The keys of a router."""

    # E; GShard, arXiv 2006.16668
    experts: int | None = key(
        None,
        at_least(1),
        "number of MLPs per layer among which a router sends each token to a few; null: one MLP for all "
        "tokens. mlp_dim is the width of each",
    )
    experts_per_token: int = key(
        1,
        at_least(1),
        "the experts with the highest scores, whose outputs are added, times these scores",
    )
    router: str = key(
        "softmax",
        one_of(*ROUTERS),
        "scores of the experts: softmax, or sigmoid of each expert's logit",
    )
    # Mixtral
    normalize_router: bool = key(False, None, "the scores of the chosen experts are divided by their sum")
    router_scale: float = key(1.0, positive(), "factor of the outputs of the chosen experts")
    router_groups: int = key(
        1,
        at_least(1),
        "groups of neighboring experts; a token chooses experts of router_groups_per_token of them only, those with "
        "the highest sums of two scores",
    )
    router_groups_per_token: int = key(1, at_least(1), "the groups among which a token chooses its experts")
    router_bias_rate: float | None = key(
        None,
        zero_or_more(),
        "a bias of each expert's score, which balances the experts without a loss: it counts where experts are "
        "chosen, and moves by router_bias_rate after each step, up if the expert had fewer tokens than the mean, else "
        "down; 0: it stays as it is; null: no bias",
    )

    def mistakes(self) -> Iterator[str]:
        """Keys of a router without experts, and choices that there are not."""
        if self.experts is None:
            for field in own_keys(Router):
                if getattr(self, field.name) != field.default:
                    yield f"{field.name} {getattr(self, field.name)} needs experts"
            return
        if self.experts_per_token > self.experts:
            yield f"experts_per_token {self.experts_per_token} must be at most experts {self.experts}"
        if self.experts_per_token == 1 and self.normalize_router:
            yield "normalize_router: true with experts_per_token 1 leaves the router without a gradient"
        if self.router_groups_per_token > self.router_groups:
            yield (
                f"router_groups_per_token {self.router_groups_per_token} must be at most router_groups "
                f"{self.router_groups}"
            )
        if self.router_groups == 1:
            return
        size = self.experts // self.router_groups
        if self.experts % self.router_groups or size < _CHOICES_OF_GROUP:
            yield f"experts {self.experts} do not make router_groups {self.router_groups} of at least 2 experts"
        elif self.experts_per_token > size * self.router_groups_per_token:
            yield (
                f"experts_per_token {self.experts_per_token} must be at most the {size * self.router_groups_per_token} "
                "experts of router_groups_per_token"
            )

    @property
    def has_router_bias(self) -> bool:
        """Whether scores have a bias where experts are chosen, which the optimizer does not update."""
        return self.router_bias_rate is not None


def chosen_experts(config: Router, scores_BTE: jax.Array, bias_E: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """The experts of each token, int32 `(B, T, K)`, and the factors of their outputs, `(B, T, K)`.

    >>> config = Router(8, 16, 2, 4, 0.0, 1, experts=4, experts_per_token=2, router_groups=2, router_scale=2.0)
    >>> scores = jnp.asarray([[[0.6, 0.1, 0.4, 0.5]]])  # the first has the highest score, and the worse group
    >>> chosen, factors = chosen_experts(config, scores, None)
    >>> chosen.tolist(), factors.tolist()
    ([[[3, 2]]], [[[1.0, 0.800000011920929]]])
    """
    biased_BTE = scores_BTE
    if bias_E is not None:
        biased_BTE = lax.stop_gradient(scores_BTE) + bias_E.astype(scores_BTE.dtype)[None, None]
    if config.router_groups > 1:
        biased_BTE = _in_chosen_groups(config, biased_BTE)
    factors_BTK, chosen_BTK = lax.top_k(biased_BTE, config.experts_per_token)
    if bias_E is not None:
        factors_BTK = jnp.take_along_axis(scores_BTE, chosen_BTK, axis=-1)
    if config.normalize_router:
        factors_BTK = factors_BTK / factors_BTK.sum(-1, keepdims=True)
    if config.router_scale != 1:
        factors_BTK = factors_BTK * config.router_scale
    return chosen_BTK, factors_BTK


def _in_chosen_groups(config: Router, scores_BTE: jax.Array) -> jax.Array:
    """The scores, minus infinity in the groups that a token does not choose."""
    scores_BTGX = scores_BTE.reshape(*scores_BTE.shape[:2], config.router_groups, -1)
    group_scores_BTG = lax.top_k(scores_BTGX, _CHOICES_OF_GROUP)[0].sum(-1)
    _, chosen_BTK = lax.top_k(group_scores_BTG, config.router_groups_per_token)
    is_chosen_BTG = jax.nn.one_hot(chosen_BTK, config.router_groups, dtype=jnp.bool_).any(2)
    return jnp.where(is_chosen_BTG[..., None], scores_BTGX, -jnp.inf).reshape(scores_BTE.shape)


@jax.custom_vjp
def with_counts(factors_BTK: jax.Array, bias_E: jax.Array, counts_E: jax.Array) -> jax.Array:
    """`factors_BTK`; the "gradient" of the bias is `counts_E`, the input of its rule.

    So micro-batches and rematerialized layers add counts up like gradients, each token once.

    >>> backward = jax.vjp(with_counts, jnp.ones((1, 1, 2)), jnp.zeros(2), jnp.asarray([3.0, 4.0]))[1]
    >>> [x.tolist() for x in backward(jnp.full((1, 1, 2), 7.0))]
    [[[[7.0, 7.0]]], [3.0, 4.0], [0.0, 0.0]]
    """
    return factors_BTK


def _forward(factors_BTK: jax.Array, bias_E: jax.Array, counts_E: jax.Array) -> tuple[jax.Array, jax.Array]:
    return factors_BTK, counts_E


def _backward(counts_E: jax.Array, grads_BTK: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    return grads_BTK, counts_E, jnp.zeros_like(counts_E)


with_counts.defvjp(_forward, _backward)
