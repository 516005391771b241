"""A linear head on the last norm that scores texts: their reward, or their classes.

A text is scored at its last token, so the objective chooses the position. In transformers a model with this head is one
`ForSequenceClassification`.

Source: the reward model of Ouyang et al., arXiv 2203.02155, section 3.4.

Shapes are named by suffix: B rows, T positions, D embedding, C outputs
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from zero.base.keys import at_least, key
from zero.models.axes import EMBED, SCORES, named
from zero.models.branch import Branch, Place
from zero.models.experts import ResidualStream
from zero.models.parametrization import Parametrization
from zero.models.part import HEAD

SCORE_HEAD = "score_head"  # the subtree of its parameters
_SPREAD = 0.02  # of initial weights, initializer_range of transformers


@dataclass(frozen=True)
class ScoreKeys(Parametrization):
    """The key of a head that scores texts."""

    score_outputs: int | None = key(
        None,
        at_least(1),
        "outputs of a linear head that scores a text at its last token, 1 for objective=reward; sampling leaves it "
        "out; null: no such head",
    )

    def mistakes(self) -> Iterator[str]:
        """A parametrization that has no rate for the head."""
        if self.score_outputs is not None and self.is_mup:
            yield f"score_outputs: {self.score_outputs} needs parametrization: standard, got {self.parametrization}"


def replaced_by_scores(subtree: str, config: Any) -> bool:
    """Whether nothing reads the parameters of a subtree: the table of logits of a model that scores texts instead.

    Folders of transformers with a head of scores do not hold it.
    """
    return subtree == HEAD and config.score_outputs is not None


class Linear(nn.Module):
    """`(B, T, D)` to float32 `(B, T, C)`, without a bias."""

    outputs: int

    @nn.compact
    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        shape = (x_BTD.shape[-1], self.outputs)
        kernel_DC = self.param("kernel", named(nn.initializers.normal(_SPREAD), EMBED, SCORES), shape)
        return x_BTD.astype(jnp.float32) @ kernel_DC.astype(jnp.float32)


class ScoreHead(Branch):
    """The head: its outputs at each position, `(B, T, C)`."""

    key = "score_outputs"
    noun = "head of scores"
    example = "1"
    subtrees = (SCORE_HEAD,)

    def modules(self, model: Any) -> Mapping[str, nn.Module]:
        return {SCORE_HEAD: model.lift(Linear, SCORE_HEAD)(model.config.score_outputs)}

    def init(self, model: Any, hidden_BTD: jax.Array, place: Place) -> None:
        model.score_head(hidden_BTD)

    def output(self, model: Any, stream: ResidualStream, inputs: Any, place: Place) -> tuple[jax.Array, ResidualStream]:
        return model.score_head(place.row_group.gather_positions(model.norm(stream[0]))), stream

    def inputs_like(self, tokens_BT: jax.Array) -> Any:
        return ()


HEAD_OF_SCORES = ScoreHead()
