"""The keys of attention, and the form of scores that they choose."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from zero.base.keys import fraction_below_one, key, one_of, positive
from zero.models.attention.kernel import missing_in
from zero.models.attention.scores import Form
from zero.models.parametrization import Parametrization
from zero.models.part import ATTENTION, LINEAR
from zero.models.positions import Positions
from zero.partition.model_parallel import WHOLE, ModelParallel

# From the head dimension to the divisor of scores; None for its root.
SCALES: dict[str, Callable[[int], float | None]] = {
    "sqrt": lambda width: None,
    "linear": lambda width: width,
    "none": lambda width: 1.0,
}


@dataclass(frozen=True)
class Attention(Positions, Parametrization):
    """The keys of attention."""

    attention_scale: Any = key(
        None,
        None,
        "scores are divided by the root of head_dim (sqrt), by head_dim (linear), or not (none); or a number "
        "that they are multiplied by",
        none="sqrt; linear in mup",
    )
    # Gemma 2, arXiv 2408.00118, section 2
    attention_cap: float | None = key(None, positive(), "soft cap of scores: cap * tanh(score / cap)")
    # learned: attention sinks of gpt-oss, arXiv 2508.10925
    extra_logit: bool | str = key(
        False,
        one_of(False, True, "learned"),
        "a further logit of 0 in every softmax of attention; learned: one that each head learns",
    )
    qkv_bias: bool = key(True, None, "biases of the products that make queries, keys and values")
    out_bias: bool = key(True, None, "bias of the output of attention")
    # Gated Attention, arXiv 2505.06708
    attention_gate: bool = key(
        False, None, "the output of attention is multiplied by the sigmoid of a product with its input"
    )
    attention_dropout: float | None = key(
        None, fraction_below_one(), "dropout of attention probabilities", none="dropout"
    )

    def derived(self) -> Iterator[tuple[str, Any]]:
        """The scale that the parametrization has."""
        if self.attention_scale is None:
            yield "attention_scale", "linear" if self.is_mup else "sqrt"

    def mistakes(self) -> Iterator[str]:
        """A scale that is invalid or that muP excludes, and keys that conflict or that no mixer reads."""
        scale = self.attention_scale
        if scale not in SCALES and not (type(scale) in (int, float) and scale > 0):
            yield f"attention_scale must be {', '.join(SCALES)} or a number above 0, got {scale!r}"
        if self.is_mup and scale in ("sqrt", "none"):
            yield f"parametrization: {self.parametrization} needs attention_scale: linear, got {scale}"
        if self.extra_logit == "learned" and self.attention_cap is not None:
            yield f"extra_logit: learned needs attention_cap: null, got {self.attention_cap}"
        of_attention = {
            "attention_scale": None if scale == "sqrt" else scale,
            "attention_cap": self.attention_cap,
            "extra_logit": self.extra_logit,
            "attention_gate": self.attention_gate,
            "attention_dropout": self.attention_dropout,
        }
        yield from self.unread(of_attention, ATTENTION)
        yield from self.unread({"qkv_bias": self.qkv_bias, "out_bias": self.out_bias}, ATTENTION, LINEAR)

    @property
    def attention_drop_rate(self) -> float:
        """`attention_dropout`, or its default."""
        if self.attention_dropout is None:
            return self.dropout
        return self.attention_dropout

    @property
    def widest_window(self) -> int:
        """The window of the layers whose queries see most; 0, all positions, if there are such layers."""
        return 0 if 0 in self.windows else max(self.windows)

    @property
    def attention_bias(self) -> bool:
        """Whether the four products of attention have biases; if they differ, whether queries, keys and values have."""
        return self.qkv_bias

    @property
    def linear_bias(self) -> bool:
        """Whether all products of a layer have biases; if they differ, whether queries, keys and values have."""
        return self.qkv_bias

    @property
    def score_multiplier(self) -> float:
        """The factor of scores where `attention_scale` is "sqrt" or a number."""
        if isinstance(self.attention_scale, str):
            return self.head_width**-0.5
        return float(self.attention_scale)

    @property
    def score_width(self) -> int:
        """The number by whose square root scores are then divided, K by default."""
        if isinstance(self.attention_scale, str):
            return self.head_width
        return round(self.score_multiplier**-2)


def attention_form(config: Attention, window: int, row_group: ModelParallel = WHOLE) -> Form:
    """The form of attention scores in a layer with this window."""
    scale = config.attention_scale
    return Form(
        has_alibi=config.kind_of_positions.has_alibi,
        window=window,
        divisor=SCALES[scale](config.head_width) if isinstance(scale, str) else 1 / scale,
        cap=config.attention_cap,
        has_extra_logit=bool(config.extra_logit),
        dropout_rate=config.attention_drop_rate,
        row_group=row_group,
    )


def missing_in_kernel(
    kernel: str | None, config: Attention, row_group: ModelParallel, positions: int, *, has_segments: bool
) -> str | None:
    """The first feature of a model's attention that the kernel lacks in training; arguments as for `missing_in`."""
    swap = row_group.head_swap(config.num_head, config.key_heads)
    return missing_in(
        kernel,
        attention_form(config, config.widest_window, row_group if swap is None else swap.row_group),
        positions=positions,
        width=config.head_width,
        drops=config.attention_drop_rate > 0,
        has_bias=config.kind_of_positions.bias is not None,
        has_segments=has_segments,
    )
