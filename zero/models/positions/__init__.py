"""Positions of a transformer: a table of kinds, a file for each.

A new kind is a file with a `PositionKind`, and an entry of `KINDS`; if it has keys, they are those of a part in its
file, which `Positions` then reads as well.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from zero.base.keys import key, one_of
from zero.models.part import ATTENTION
from zero.models.positions.kind import PositionKind
from zero.models.positions.learned import LEARNED
from zero.models.positions.rotary import ROTARY, Rotary
from zero.models.positions.sinusoidal import SINUSOIDAL, Sinusoidal
from zero.models.positions.t5 import T5

KINDS = {
    "alibi": PositionKind(has_alibi=True),  # biases are made where scores are; chosen by its own key, `alibi_attn`
    "learned": LEARNED,
    "rotary": ROTARY,
    "t5": T5,
    "sinusoidal": SINUSOIDAL,
    "none": PositionKind(),
}


@dataclass(frozen=True)
class Positions(Rotary, Sinusoidal):
    """The keys that choose positions."""

    # arXiv 2108.12409
    alibi_attn: bool = key(True, None, "true: ALiBi position biases; false: the key positions chooses")
    positions: str = key(
        "learned",
        one_of(*(name for name in KINDS if name != "alibi")),
        "learned, rotary, t5 (in each layer a bias for each of 32 buckets of distance), sinusoidal, or none; "
        "all but learned need alibi_attn: false",
    )

    def mistakes(self) -> Iterator[str]:
        """Two kinds at once, a kind that no mixer reads, and the mistakes of the chosen kind."""
        if self.alibi_attn and self.positions != "learned":
            yield f"positions {self.positions!r} need alibi_attn: false"
        if self.kind_of_positions.is_in_attention:
            chosen = {"alibi_attn": True} if self.alibi_attn else {"positions": self.positions}
            yield from self.unread(chosen, ATTENTION)
        yield from self.kind_of_positions.mistakes(self)

    @property
    def position_kind(self) -> str:
        """The name of the kind: one of `positions`, or "alibi"."""
        return "alibi" if self.alibi_attn else self.positions

    @property
    def kind_of_positions(self) -> PositionKind:
        """The kind itself."""
        return KINDS[self.position_kind]

    @property
    def has_learned_positions(self) -> bool:
        """Whether contexts are limited to `block_size` positions."""
        return self.kind_of_positions.limits_context
