"""A further layer that predicts the token after the next one, in training alone.

Its input at a position is a product of two normalized vectors: the embedding of the next token, and the output of the
model's last norm. Its output is normalized, and scored by the head of the model. So it sees what the model computes
anyway, and makes each position learn from two tokens.

The layer is like the model's last one. If that has experts, the router of the further layer balances its own as the
others do: by a bias of its own, and by a share of `balance_loss`, which is a mean over all layers with experts. Metrics
of routing are means over them as well.

Source: multi-token prediction of DeepSeek-V3, arXiv 2412.19437, section 2.2, of depth 1. Its equation 21 joins the two
vectors in the opposite order, and leaves open whether the last norm comes before. Both are here as in the published
weights, by a program that serves them (vLLM, deepseek_mtp.py).

Shapes are named by suffix: B rows, T positions, D embedding
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from zero.models.axes import EMBED, Axes
from zero.models.branch import Branch, Place
from zero.models.elements import Dense
from zero.models.experts import ResidualStream, no_routing
from zero.models.mtp_keys import MtpKeys
from zero.models.norms import Norms, make_norm
from zero.models.parametrization import Initial, kernel_init
from zero.models.part import MTP_BLOCKS
from zero.models.positions import Positions

MTP_JOIN, MTP_NORM = "predictor_join", "predictor_norm"


@dataclass(frozen=True)
class MtpRules(Positions, Norms, Initial, MtpKeys):
    """The rules of the further layer."""

    def mistakes(self) -> Iterator[str]:
        """Layers that differ, of which it could be several, and positions that an embedding has."""
        if not self.predictor:
            return
        for name in ("windows", "mixers"):
            if len(getattr(self, name)) > 1:
                yield f"predictor: true needs one entry in {name}, got {list(getattr(self, name))}"
        if self.unrotated_every is not None:
            yield f"predictor: true needs unrotated_every: null, got {self.unrotated_every}"
        if self.kind_of_positions.added is not None:
            yield f"predictor: true needs positions that no embedding has, got {self.position_kind}"
        if self.is_mup:
            yield f"predictor: true needs parametrization: standard, got {self.parametrization}"


class MtpInputs(NamedTuple):
    """What the further layer reads and predicts.

    Attributes:
      tokens_BT: the next token of each position.
      targets_BT: the token after it; negative where it is no target.
    """

    tokens_BT: jax.Array
    targets_BT: jax.Array


class MtpJoin(nn.Module):
    """The input of the further layer, `(B, T, D)`, from the output of the last norm and the next tokens' embeddings."""

    config: MtpRules
    dtype: DTypeLike

    @nn.compact
    def __call__(self, next_BTD: jax.Array, hidden_BTD: jax.Array) -> jax.Array:
        normed = [
            make_norm(self.config, self.dtype, "norm_next")(next_BTD),
            make_norm(self.config, self.dtype, "norm_hidden")(hidden_BTD),
        ]
        width = (self.config.embedding_dim,)
        product = Dense(
            width,
            False,
            self.dtype,
            kernel_init(self.config, "join", Axes(("joined", EMBED))),
            name="product",
        )
        return product(jnp.concatenate(normed, axis=-1))


class MtpBranch(Branch):
    """The further layer: negative log-likelihoods in nats of tokens after the targets, `(B, T)`, from `MtpInputs`."""

    key = "predictor"
    noun = "predictor"
    subtrees = (MTP_JOIN, MTP_BLOCKS, MTP_NORM)
    stack = MTP_BLOCKS
    is_left_out = True
    words = "include the layer that predicts a further token (model.override.predictor), for speculative decoding"

    def modules(self, model: Any) -> Mapping[str, nn.Module]:
        config = model.config
        return {
            MTP_JOIN: model.lift(MtpJoin, MTP_JOIN)(config, model.dtype),
            MTP_BLOCKS: model.stack_of(MTP_BLOCKS),
            MTP_NORM: make_norm(config, model.dtype, MTP_NORM, model.lift),
        }

    def init(self, model: Any, hidden_BTD: jax.Array, place: Place) -> None:
        stream = model.predictor_join(hidden_BTD, hidden_BTD), no_routing(model.config, len(hidden_BTD))
        model.predictor_norm(model.run_stack(MTP_BLOCKS, stream, None, place)[0][0])

    def output(
        self, model: Any, stream: ResidualStream, inputs: MtpInputs, place: Place
    ) -> tuple[jax.Array, ResidualStream]:
        x_BTD, routing = stream
        next_BTD, _ = model.embedded(inputs.tokens_BT, place._replace(keys_B=None))
        further = model.predictor_join(next_BTD, model.norm(x_BTD)), routing
        (further_BTD, routing), _ = model.run_stack(MTP_BLOCKS, further, None, place)
        _, lse_BT, target_BT, _ = model.of_head(model.predictor_norm(further_BTD), inputs.targets_BT, None)
        return lse_BT - target_BT, (x_BTD, routing)

    def inputs_like(self, tokens_BT: jax.Array) -> MtpInputs:
        return MtpInputs(tokens_BT, tokens_BT)


MTP = MtpBranch()
