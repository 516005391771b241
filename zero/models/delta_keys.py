"""The keys of gated DeltaNet."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from zero.base.keys import at_least, key
from zero.models.parametrization import Parametrization
from zero.models.part import DELTA, changed_keys


@dataclass(frozen=True)
class Delta(Parametrization):
    """The keys of layers whose mixer is delta."""

    # G
    delta_key_heads: int | None = key(
        None,
        at_least(1),
        "heads of queries and keys of the mixer delta, each shared by several heads of values",
        none="num_head",
    )
    # H
    delta_value_heads: int | None = key(
        None, at_least(1), "its heads of values, each with a state of its own", none="delta_key_heads"
    )
    delta_key_dim: int | None = key(None, at_least(1), "width of its queries and keys", none="head_dim")
    delta_value_dim: int | None = key(None, at_least(1), "width of its values", none="delta_key_dim")
    delta_taps: int = key(4, at_least(1), "positions that the convolutions of its queries, keys and values see")

    def derived(self) -> Iterator[tuple[str, Any]]:
        """The sizes that are not given, in a model with such layers."""
        if DELTA in self.mixers:
            yield "delta_key_heads", self.delta_groups
            yield "delta_value_heads", self.delta_heads
            yield "delta_key_dim", self.delta_key_width
            yield "delta_value_dim", self.delta_value_width

    def mistakes(self) -> Iterator[str]:
        """Keys of a mixer that no layer has, and heads that do not divide."""
        yield from self.unread(changed_keys(self, Delta), DELTA)
        if DELTA in self.mixers and self.is_mup:
            yield f"{DELTA} in mixers needs parametrization: standard, got {self.parametrization}"
        if self.delta_heads % self.delta_groups:
            yield f"delta_value_heads {self.delta_heads} must be a multiple of delta_key_heads {self.delta_groups}"

    @property
    def delta_groups(self) -> int:
        """G."""
        return self.delta_key_heads or self.num_head

    @property
    def delta_heads(self) -> int:
        """H."""
        return self.delta_value_heads or self.delta_groups

    @property
    def delta_key_width(self) -> int:
        """K."""
        return self.delta_key_dim or self.head_width

    @property
    def delta_value_width(self) -> int:
        """V."""
        return self.delta_value_dim or self.delta_key_width
