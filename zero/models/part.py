"""How a part of a model's configuration is declared, and the sizes that all parts share.

A part is a frozen dataclass beside the code that reads it. It derives from `Sizes`, and from each other part whose keys
that code reads as well. It declares each key once (`zero.base.keys.key`). Its
`mistakes` are the rules between its keys, its `derived` the values that follow from other keys. A module takes one
part, so that a type checker shows what it can read. A whole model, `zero.models.config.GPTConfig`, is all parts in one
record, whose keys are those that users write.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from zero.base.keys import REQUIRED, at_least, fraction_below_one, key, shown

# Top-level subtrees of the parameters whose leaves have a leading dimension (layers, or chunks of the vocabulary). HEAD
# exists where the vocabulary is not tied, FIRST where the first layers have no experts, MTP_BLOCKS where the model has
# the layer of multi-token prediction.
STACK, FIRST, MTP_BLOCKS, VOCABULARY, HEAD = "blocks", "first_blocks", "predictor_blocks", "vocabulary", "head"
STACKS = (STACK, FIRST, MTP_BLOCKS)  # those of layers


def layer_name(place: int) -> str:
    """The name of a layer within a period of several, whose parameters are an entry of the stack."""
    return f"layer_{place}"


# The mixers of a layer: entries of `zero.models.mixers.MIXERS`.
ATTENTION, DELTA, GATED_UNITS, LINEAR = "attention", "delta", "gated_units", "linear"
# The kinds of layers: this one has a mixer and an MLP; others are named as the mixer that makes them alone.
TRANSFORMER = "transformer"


class ConfigPart:
    """A part of a model's configuration; derived classes are frozen dataclasses.

    Raises:
      ValueError: a value breaks the check of its key or a rule; the message names the key.
    """

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):  # type: ignore[arg-type]  # every part is a dataclass
            value = getattr(self, field.name)
            if isinstance(value, list):  # as YAML and JSON have it
                object.__setattr__(self, field.name, tuple(value))
        for name, value in self._collected("derived"):
            object.__setattr__(self, name, value)
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            value = getattr(self, field.name)
            check = field.metadata["check"]
            if value is not None and check is not None and not check.holds(value):
                raise ValueError(f"{field.name} must be {check.expected}, got {value!r}")
        for mistake in self._collected("mistakes"):
            raise ValueError(mistake)

    def _collected(self, method: str) -> Iterator[Any]:
        """What the methods of this name yield: the record's own first, then its parts', lowest first."""
        record, *parts = type(self).__mro__
        for part in (record, *reversed(parts)):
            if method in vars(part):
                yield from vars(part)[method](self)


def own_keys(part: type[ConfigPart]) -> list[dataclasses.Field[Any]]:
    """The keys that a part declares, without the keys of the parts that it reads.

    >>> [field.name for field in own_keys(Sizes)][:3]
    ['embedding_dim', 'vocab_size', 'num_head']
    """
    names = inspect.get_annotations(part)
    return [field for field in dataclasses.fields(part) if field.name in names]  # type: ignore[arg-type]


def changed_keys(record: ConfigPart, part: type[ConfigPart]) -> dict[str, Any]:
    """The values of the keys that a part declares, where these are not the defaults."""
    values = {field.name: (getattr(record, field.name), field.default) for field in own_keys(part)}
    return {name: value for name, (value, default) in values.items() if value != default}


def shortest_pattern(values: tuple[Any, ...]) -> tuple[Any, ...]:
    """The shortest beginning that these values repeat, the last time perhaps not to its end.

    >>> shortest_pattern((4, 4, 0, 4, 4, 0, 4, 4)), shortest_pattern((4, 0, 0))
    ((4, 4, 0), (4, 0, 0))
    """
    for size in range(1, len(values)):
        if values[size:] == values[:-size]:  # each equals the one a period before
            return values[:size]
    return values


@dataclass(frozen=True)
class Sizes(ConfigPart):
    """The sizes of a model, with the letters that they have in shapes."""

    # D
    embedding_dim: int = key(REQUIRED, at_least(1), "width of the model")
    vocab_size: int = key(REQUIRED, at_least(1), "tokens of the vocabulary; a tokenizer with fewer fits as well")
    # H; divides D if head_dim is None
    num_head: int = key(
        REQUIRED,
        at_least(1),
        "attention heads per layer; divides embedding_dim; null, with head_dim: embedding_dim / head_dim",
    )
    # the longest T
    block_size: int = key(REQUIRED, at_least(1), "maximum context in tokens")
    dropout: float = key(
        REQUIRED,
        fraction_below_one(),
        "probability that an activation is dropped in training: of attention probabilities and residual outputs",
    )
    # L
    N: int = key(REQUIRED, at_least(1), "number of layers")
    # G
    kv_heads: int | None = key(
        None,
        at_least(1),
        "number of heads of keys and values, each shared by num_head / kv_heads heads of queries",
        none="num_head",
    )
    # K
    head_dim: int | None = key(None, at_least(1), "width of a head", none="embedding_dim / num_head")
    # F
    mlp_dim: int | None = key(None, at_least(1), "width of the MLP", none="4 * embedding_dim")
    windows: tuple[int, ...] = key(
        (0,), None, "for each layer of a repeating pattern, how many positions a token sees, itself included; 0: all"
    )

    # delta: Gated Delta Networks, arXiv 2412.06464; linear: arXiv 2006.16236
    mixers: tuple[str, ...] = key(
        (ATTENTION,),
        None,
        "for each layer of a repeating pattern, how its positions see each other: attention; or in linear time and "
        "with a state of constant size: delta, the gated delta rule, or linear, linear attention",
    )

    def mistakes(self) -> Iterator[str]:
        """Heads that do not divide, windows that are none, and keys that no mixer reads."""
        if self.head_dim is None and self.embedding_dim % self.num_head:
            yield f"embedding_dim {self.embedding_dim} does not divide into num_head {self.num_head} heads"
        if self.num_head % self.key_heads:
            yield f"num_head {self.num_head} does not divide into kv_heads {self.kv_heads} groups"
        if not self.windows or min(self.windows) < 0:
            yield f"windows must be a list of numbers of at least 0, got {list(self.windows)}"
        elif self.N % len(self.windows):
            yield f"N {self.N} must be a multiple of the {len(self.windows)} layers of windows"
        if not self.mixers or self.N % len(self.mixers):
            yield f"N {self.N} must be a multiple of the {len(self.mixers)} layers of mixers"
        elif len(self.mixers) > 1 and len(self.windows) > 1:
            yield f"mixers {list(self.mixers)} need one window, got {list(self.windows)}"
        if any(self.windows):
            yield from self.unread({"windows": list(self.windows)}, ATTENTION)
        yield from self.unread({"kv_heads": self.kv_heads}, ATTENTION, LINEAR)

    def unread(self, values: Mapping[str, Any], *mixers: str) -> Iterator[str]:
        """The mistakes of a model that sets keys of these mixers but has no layer with one of them.

        Families with layers of gated DeltaNet have keys of attention for their other layers. A part of such a model
        may have no such layer, so keys of attention are no mistakes there.

        Args:
          values: the keys, by name; None, False and 0 set nothing.

        >>> list(Sizes(8, 16, 2, 4, 0.0, N=2, mixers=(LINEAR,)).unread({"qk_norm": True}, ATTENTION))
        ['qk_norm true needs a layer with attention in mixers']
        """
        excusing = {*mixers, DELTA} if ATTENTION in mixers else {*mixers}
        if excusing.isdisjoint(self.mixers):
            for name, value in values.items():
                if value not in (None, False):
                    yield f"{name} {shown(value)} needs a layer with {' or '.join(mixers)} in mixers"

    @property
    def window_pattern(self) -> tuple[int, ...]:
        """The shortest pattern that the windows of all layers repeat, the last time perhaps not to its end.

        >>> Sizes(8, 16, 2, 4, 0.0, N=8, windows=(4, 4, 0, 4, 4, 0, 4, 4)).window_pattern
        (4, 4, 0)
        """
        return shortest_pattern(self.windows * (self.N // len(self.windows)))

    @property
    def key_heads(self) -> int:
        """G."""
        return self.kv_heads or self.num_head

    @property
    def head_width(self) -> int:
        """K."""
        return self.head_dim or self.embedding_dim // self.num_head

    @property
    def mlp_width(self) -> int:
        """F."""
        return self.mlp_dim or 4 * self.embedding_dim
