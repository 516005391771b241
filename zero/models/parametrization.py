"""Initial weights and learning rates as functions of the width: as in GPT-2, or by muP.

The maximal update parametrization (muP) for Adam and Lion, with w = width / base width:

  leaf                             initial standard deviation    learning rate
  embedding, learned positions     1                             1
  matrices of layers               fan-in^-1/2                   1 / w
  head                             width^-1                      1 / w
  gains and biases                 (1 and 0)                     1

Absolute muP is the same with a base width of 1, and 1 / fan-in for mlp_out: learning rates are as at width 1.
Products of queries and keys are divided by the head dimension. A tied table would need the first and the third line.
Source: Yang et al., Tensor Programs V, arXiv 2203.03466, table 3 and definition 4.1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import flax.linen as nn

from zero.base.keys import Check, at_least, key, one_of
from zero.models.axes import MLP, Axes, Role, map_axes, of_axes
from zero.models.part import HEAD, Sizes
from zero.models.vocabulary import Vocabulary

_GPT2_STDDEV = 0.02
_ZEROED = (Role.QUERY, Role.RESIDUAL_OUT)  # by `zero_init: true` (arXiv 2203.03466, section D.2)
_FORMERLY_TRUE = ("query", "attention_out", "mlp_out")  # as which earlier versions saved it, for any model


@dataclass(frozen=True)
class Parametrization(Sizes):
    """The keys that make initial weights, learning rates and the scale of attention functions of the width."""

    parametrization: str = key(
        "standard",
        one_of("standard", "mup", "mup_absolute"),
        "of initial weights and learning rates: standard, or mup, with which a peak_learning_rate found at a "
        "small width is right at a large one (docs/explanation/mup.md); mup needs mup_base_width, tied: "
        "false, and optimizer=adamw or lion; mup_absolute: learning rates of matrices are divided by their "
        "fan-in",
    )
    mup_base_width: int | None = key(
        None,
        at_least(1),
        "the embedding_dim at which all learning rates are as given; at w times this width, learning rates of "
        "matrices are divided by w",
    )

    def mistakes(self) -> Iterator[str]:
        """A base width that has no effect, or a missing one that is needed."""
        kind = self.parametrization
        base = self.mup_base_width
        if kind == "standard" and base is not None:
            yield f"mup_base_width must be null without parametrization: mup, got {base}"
        if kind == "mup" and base is None:
            yield "parametrization: mup needs mup_base_width, the embedding_dim of its learning rates"
        if kind == "mup_absolute" and base is not None:
            yield f"parametrization: mup_absolute needs mup_base_width: null, got {base}"

    @property
    def is_mup(self) -> bool:
        """Whether it is one of muP."""
        return self.parametrization != "standard"


class Start(NamedTuple):
    """Initial weights: an entry of `INITS`.

    Attributes:
      kernel: `(configuration, axes of a matrix)` to its initializer.
      table: `(configuration, "vocabulary" or "head")` to the deviation of this table.
      positions: the deviation of the table of positions.
      bucket_bias: the same for the biases of T5's buckets of distance, from `(configuration, buckets)`.
    """

    kernel: Callable[[Initial, Axes], nn.initializers.Initializer]
    table: Callable[[Initial, str], float]
    positions: float
    bucket_bias: Callable[[Initial, int], float]


def _gpt2(config: Initial, axes: Axes) -> nn.initializers.Initializer:
    # Each of the 2 N residual outputs adds variance, so their initial weights are smaller.
    return nn.initializers.normal(_GPT2_STDDEV / (math.sqrt(2 * config.N) if axes.role is Role.RESIDUAL_OUT else 1))


def _fan_in(config: Initial, axes: Axes) -> nn.initializers.Initializer:
    return nn.initializers.variance_scaling(1.0, "fan_in", "normal")


def _with_scaled_queries(config: Initial, axes: Axes) -> nn.initializers.Initializer:
    """As by fan-in, but queries carry the scale of attention, so that scores are not divided."""
    if axes.role is Role.QUERY:
        return nn.initializers.normal(1 / math.sqrt(config.embedding_dim * config.head_width))
    return _fan_in(config, axes)


def _gpt_neo(config: Initial, axes: Axes) -> nn.initializers.Initializer:
    """Attention has the weights of Mesh TensorFlow, the MLP GPT-2's with one sum per layer."""
    if MLP not in axes.names:
        return _with_scaled_queries(config, axes)
    return nn.initializers.normal(_GPT2_STDDEV / (math.sqrt(config.N) if axes.role is Role.RESIDUAL_OUT else 1))


def _lingvo(config: Initial, axes: Axes) -> nn.initializers.Initializer:
    """Matrices of the MLP are uniform."""
    if MLP not in axes.names:
        return _with_scaled_queries(config, axes)
    return nn.initializers.variance_scaling(1.0, "fan_in", "uniform")


def _gpt2_table(config: Initial, name: str) -> float:
    return 1.0 if config.scale_output else _GPT2_STDDEV


def _table_of(tokens: float) -> Callable[[Initial, str], float]:
    """Embeddings of this deviation, and a head by fan-in."""
    return lambda config, name: 1 / math.sqrt(config.embedding_dim) if name == HEAD else tokens


def _gpt2_bias(config: Initial, buckets: int) -> float:
    return _GPT2_STDDEV


def _lingvo_bias(config: Initial, buckets: int) -> float:
    return 1 / math.sqrt(buckets * config.num_head)


# Sources: GPT-2; gpt_neo: `models/layers.py` of GPT-Neo and `transformer/attention.py` of Mesh TensorFlow; fan-in:
# LeCun et al., Efficient BackProp (1998); lingvo: `gshard_builder.py` of Lingvo.
INITS = {
    "gpt2": Start(_gpt2, _gpt2_table, _GPT2_STDDEV, _gpt2_bias),
    "gpt_neo": Start(_gpt_neo, _table_of(0.02), 0.01, _gpt2_bias),
    "fan_in": Start(_fan_in, _table_of(1.0), 1.0, _gpt2_bias),
    "lingvo": Start(_lingvo, _table_of(1.0), 1.0, _lingvo_bias),
}
# From the width to the deviation of an untied head.
_HEADS: dict[str, Callable[[int], float]] = {
    "mup": lambda width: 1 / width,
    "fan_in": lambda width: 1 / math.sqrt(width),
    "zero": lambda width: 0.0,
}


@dataclass(frozen=True)
class Initial(Parametrization, Vocabulary):
    """The keys of initial weights."""

    init: str | None = key(
        None,
        one_of(*INITS),
        "initial matrices: gpt2, deviation 0.02; fan_in, its root, embeddings with 1; lingvo, as fan_in with "
        "queries that carry the scale of attention, and uniform matrices in the MLP; or gpt_neo, with such "
        "queries and the MLP of gpt2. Only after the last two attention_scale: none begins with scores of "
        "deviation 1",
        none="gpt2; fan_in in mup",
    )
    # None: "mup" with a parametrization of muP, else as `init`
    head_init: str | None = key(
        None,
        one_of(*_HEADS, None),
        "deviation of an untied head: mup, 1 / embedding_dim (also null in mup); fan_in, its root; or zero; "
        "null: as init",
    )
    # arXiv 2203.03466, section D.2
    zero_init: Any = key(
        (),
        Check(lambda value: isinstance(value, bool | tuple), "a list of matrices, true or false"),
        "matrices of layers that start at zero, such as [query, mlp_out]; true: query, attention_out, mlp_out",
    )

    def derived(self) -> Iterator[tuple[str, Any]]:
        """What follows from the parametrization."""
        if self.init is None:
            yield "init", "fan_in" if self.is_mup else "gpt2"
        if self.head_init is None and self.is_mup:
            yield "head_init", "mup"
        if self.zero_init is False:
            yield "zero_init", ()
        elif self.zero_init == _FORMERLY_TRUE:
            yield "zero_init", True

    def mistakes(self) -> Iterator[str]:
        """A vocabulary that muP excludes."""
        # Embedding and head differ in initial weights and learning rates, and scaling by the root of the width would
        # add a dependence on it.
        for name in ("tied", "scale_embedding", "scale_output") if self.is_mup else ():
            if getattr(self, name):
                yield f"parametrization: {self.parametrization} needs {name}: false, got true"

    @property
    def start(self) -> Start:
        """The entry of `init`."""
        return INITS[str(self.init)]


def kernel_init(config: Initial, name: str, axes: Axes) -> nn.initializers.Initializer:
    """The initializer of the matrix `(fan-in, fan-out)` of this name, with its axes."""
    starts_at_zero = axes.role in _ZEROED if config.zero_init is True else name in config.zero_init
    return of_axes(nn.initializers.zeros if starts_at_zero else config.start.kernel(config, axes), axes)


def check_zero_init(config: Initial, axes: Mapping[str, Axes]) -> None:
    """Raises ValueError if a model with parameters of these axes has no matrix of a name in `zero_init`."""
    names = () if config.zero_init is True else config.zero_init
    matrices = {name.split("/")[-2] for name, own in axes.items() if own.is_product and own.is_of_layers}
    if not {*names} <= matrices:
        raise ValueError(f"zero_init must be a list of {', '.join(sorted(matrices))}, got {list(names)}")


def table_stddev(config: Initial, name: str) -> float:
    """The initial standard deviation of the table of vocabulary, positions or head.

    >>> config = Initial(128, 256, 2, 64, 0.0, 2, parametrization="mup", mup_base_width=32, tied=False)
    >>> [table_stddev(config, name) for name in ("vocabulary", "positions", "head")]
    [1.0, 1.0, 0.0078125]
    """
    if name == HEAD and config.head_init is not None:
        return _HEADS[config.head_init](config.embedding_dim)
    if name == "positions":
        return config.start.positions
    return config.start.table(config, name)


def multipliers_of(config: Parametrization, axes: Mapping[str, Axes]) -> Callable[[Any], Any] | None:
    """`rate_multipliers` of a model with parameters of these axes; None if all leaves have the same learning rate."""
    if not config.is_mup:
        return None
    return partial(rate_multipliers, config, axes)


def rate_multipliers(config: Parametrization, axes: Mapping[str, Axes], params: Any) -> Any:
    """The multiplier of each leaf's learning rate: a tree of floats, from any subtree of parameters or shards.

    >>> config = Parametrization(128, 256, 2, 64, 0.0, 2, parametrization="mup", mup_base_width=32)
    >>> axes = {"blocks/mlp_in/kernel": Axes(("layers", "embed", "mlp")), "blocks/mlp_in/bias": Axes(("layers", "mlp"))}
    >>> rate_multipliers(config, axes, {"blocks": {"mlp_in": {"kernel": 0, "bias": 0}}})
    {'blocks': {'mlp_in': {'bias': 1.0, 'kernel': 0.25}}}
    """
    width = config.embedding_dim
    base = {"standard": width, "mup": config.mup_base_width or width, "mup_absolute": 1}[config.parametrization]

    def multiplier(own: Axes) -> float:
        if not (own.is_product or own.role is Role.HEAD):
            return 1.0
        is_by_fan_in = config.parametrization == "mup_absolute" and own.own[0] == MLP
        return base / (config.mlp_width if is_by_fan_in else width)

    return map_axes(multiplier, axes, params)
