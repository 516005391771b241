"""How a part of a model's configuration is declared, and the sizes that all parts share.

A part is a frozen dataclass beside the code that reads it. It derives from `Sizes`, and from each other part whose keys
that code reads as well. It declares each key once with `key`: default, check, and the kinds of layers that have it. Its
`mistakes` are the rules between its keys, its `derived` the values that follow from other keys. A module takes one
part, so that a type checker shows what it can read. A whole model, `zero.models.config.GPTConfig`, is all parts in one
record, whose keys are those that users write.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

# Top-level subtrees of the parameters whose leaves have a leading dimension (layers, or chunks of the vocabulary). HEAD
# exists where the vocabulary is not tied, FIRST where the first layers have no experts, PREDICTOR where a further layer
# looks ahead.
STACK, FIRST, PREDICTOR, VOCABULARY, HEAD = "blocks", "first_blocks", "predictor_blocks", "vocabulary", "head"
STACKS = (STACK, FIRST, PREDICTOR)  # those of layers


def layer_name(place: int) -> str:
    """The name of a layer within a period of several, whose parameters are an entry of the stack."""
    return f"layer_{place}"


# The kinds of layers whose models have a key.
TRANSFORMER, GATED_UNITS = "transformer", "gated_units"
BOTH = (TRANSFORMER, GATED_UNITS)

# The mixers of a layer: entries of `zero.models.mixers.MIXERS`.
ATTENTION, DELTA = "attention", "delta"


class Check(NamedTuple):
    """What a value must be, if it is not None; `text` is the rest of a sentence that begins with "NAME must "."""

    holds: Callable[[Any], bool]
    text: str
    shown: Callable[[Any], str] = str  # of a value that is wrong


AT_LEAST_ONE = Check(lambda value: value >= 1, "be at least 1")
POSITIVE = Check(lambda value: value > 0, "be more than 0")
NOT_NEGATIVE = Check(lambda value: value >= 0, "be at least 0")
RATE = Check(lambda value: 0 <= value < 1, "lie in [0, 1)")
FRACTION = Check(lambda value: 0 < value <= 1, "lie in (0, 1]")


def one_of(*choices: Any) -> Check:
    """The check of a key that chooses, often an entry of a table.

    >>> one_of("layer", "rms").text
    'be one of layer, rms'
    """
    return Check(lambda value: value in choices, f"be one of {', '.join(map(str, choices))}", repr)


def declared(
    check: Check | None, meaning: str, layers: tuple[str, ...] = (TRANSFORMER,), none: str = "null"
) -> Mapping[str, Any]:
    """The metadata of the field of a key, for one without a default; arguments as for `key`."""
    return {"check": check, "meaning": meaning, "layers": layers, "none": none}


def key(
    default: Any, check: Check | None, meaning: str, layers: tuple[str, ...] = (TRANSFORMER,), none: str = "null"
) -> Any:
    """A key of a part.

    Args:
      default: its value if none is given.
      check: what a value must satisfy; None: any value of its type.
      meaning: for the head of conf/model_config.yaml, which is printed from these declarations.
      layers: the kinds of layers whose models have it; a model with other layers keeps its default.
      none: what a default of None stands for.
    """
    return dataclasses.field(default=default, metadata=declared(check, meaning, layers, none))


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
        for name, value in self._of_all_parts("derived"):
            object.__setattr__(self, name, value)
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            value = getattr(self, field.name)
            check = field.metadata["check"]
            if value is not None and check is not None and not check.holds(value):
                raise ValueError(f"{field.name} must {check.text}, got {check.shown(value)}")
        for mistake in self._of_all_parts("mistakes"):
            raise ValueError(mistake)

    def _of_all_parts(self, method: str) -> Iterator[Any]:
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
    embedding_dim: int = dataclasses.field(metadata=declared(AT_LEAST_ONE, "width of the model", BOTH))
    vocab_size: int = dataclasses.field(
        metadata=declared(AT_LEAST_ONE, "tokens of the vocabulary; a tokenizer with fewer fits as well", BOTH)
    )
    # H; divides D if head_dim is None
    num_head: int = dataclasses.field(
        metadata=declared(
            AT_LEAST_ONE,
            "attention heads per layer; divides embedding_dim; null, with head_dim: embedding_dim / head_dim",
            BOTH,
        )
    )
    # the longest T
    block_size: int = dataclasses.field(metadata=declared(AT_LEAST_ONE, "maximum context in tokens", BOTH))
    dropout: float = dataclasses.field(
        metadata=declared(
            RATE,
            "probability that an activation is dropped in training: of attention probabilities and residual outputs",
            BOTH,
        )
    )
    # L
    N: int = dataclasses.field(metadata=declared(AT_LEAST_ONE, "number of layers", BOTH))
    # G
    kv_heads: int | None = key(
        None,
        AT_LEAST_ONE,
        "number of heads of keys and values, each shared by num_head / kv_heads heads of queries",
        none="num_head",
    )
    # K
    head_dim: int | None = key(None, AT_LEAST_ONE, "width of a head", none="embedding_dim / num_head")
    # F
    mlp_dim: int | None = key(None, AT_LEAST_ONE, "width of the MLP", none="4 * embedding_dim")
    windows: tuple[int, ...] = key(
        (0,), None, "for each layer of a repeating pattern, how many positions a token sees, itself included; 0: all"
    )

    # delta: Gated Delta Networks, arXiv 2412.06464
    mixers: tuple[str, ...] = key(
        (ATTENTION,),
        None,
        "for each layer of a repeating pattern, how its positions see each other: attention, or delta, the gated "
        "delta rule, in linear time and with a state of constant size",
    )

    def mistakes(self) -> Iterator[str]:
        """Heads that do not divide, and windows that are none."""
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
