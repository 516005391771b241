"""The configuration of a model: its sizes and the variants of its parts."""

from __future__ import annotations

import dataclasses
from typing import Any

# Top-level subtrees of the parameters whose leaves have a leading dimension (layers, or chunks of the vocabulary). HEAD
# exists where the vocabulary is not tied.
STACK, VOCABULARY, HEAD = "blocks", "vocabulary", "head"
HEAD_BIAS = "head_bias"

_CHOICES: dict[str, tuple[str | bool | None, ...]] = {
    "positions": ("learned", "rotary", "t5", "sinusoidal", "none"),
    "norm": ("layer", "rms", "rms_biased", "rms_offset"),
    "norm_place": ("before", "after", "both"),
    "qk_norm_over": ("head", "projection"),
    "extra_logit": (False, True, "learned"),
    "activation": ("gelu", "gelu_exact", "relu", "squared_relu", "selu", "silu", "clamped_swiglu"),
    "parametrization": ("standard", "mup", "mup_absolute"),
    "init": ("gpt2", "gpt_neo", "fan_in", "lingvo"),
    "head_init": ("mup", "fan_in", "zero", None),
    "expert_priority": ("choice", "position"),
    "balance_choices": ("all", "first"),
    "layer": ("transformer", "gated_units"),
    "distance_limit": ("window", "block"),
}
_WIDTHS = ("embedding_dim", "kv_heads", "head_dim", "mlp_dim", "mup_base_width", "experts", "vq_block", "key_width")
_COUNTS = (
    *("vocab_size", "num_head", "block_size", "N", "experts_per_token", "experts_every", "unrotated_every"),
    "update_tokens",
)
_AT_LEAST_ONE = (*_WIDTHS, *_COUNTS)
_EXPERTS_ALONE = (
    *("experts_per_token", "experts_every", "expert_capacity", "expert_priority", "normalise_router"),
    *("balance_loss", "balance_choices", "router_z_loss"),
)
_GATED_UNITS_ALONE = (
    *("codes", "vq_block", "key_width", "cache_gradient", "commitment", "codebook_decay", "distance_base"),
    *("distance_dropout", "distance_width", "distance_limit", "layer_dropout", "update_tokens", "head_bias"),
)
# Matrices that may start at zero, and those that `zero_init: true` stands for (arXiv 2203.03466, section D.2).
MATRICES = ("query", "key", "value", "gate", "attention_out", "mlp_in", "mlp_gate", "mlp_out")
_ZEROED = ("query", "attention_out", "mlp_out")
_GATED_UNITS = {  # keys of a model of gated units
    *(*_GATED_UNITS_ALONE, "layer", "alibi_attn", "positions", "embedding_dim", "num_head", "block_size", "N"),
    *("vocab_size", "vocab_chunks", "embedding_norm", "norm", "norm_epsilon", "norm_gains", "tied", "scale_embedding"),
    *("scale_output", "logit_cap", "z_loss", "dropout", "embedding_dropout", "residual_dropout"),
    *("output_scale", "final_norm", "init", "head_init"),
}


def _is_scaling(scaling: tuple[Any, ...]) -> bool:
    kind, numbers = (scaling[0], scaling[1:]) if scaling and isinstance(scaling[0], str) else ("llama3", scaling)
    if not all(isinstance(x, int | float) and x > 0 for x in numbers):
        return False
    return {
        "linear": len(numbers) == 1,
        "llama3": len(numbers) == 4 and numbers[1:2] < numbers[2:3],
        "yarn": len(numbers) == 5 and numbers[3:4] < numbers[2:3],
        "yarn_unrounded": len(numbers) == 5 and numbers[3:4] < numbers[2:3],
        "dynamic": len(numbers) == 2,
        "longrope": len(numbers) >= 4 and len(numbers) % 2 == 0,
    }.get(kind, False)


@dataclasses.dataclass(frozen=True)
class GPTConfig:
    """One model; the keys of an entry in `conf/model_config.yaml`, which says what each means.

    Comments name the letters of sizes in shapes, sources, and what follows from None.
    """

    embedding_dim: int  # D
    vocab_size: int
    num_head: int  # H; divides embedding_dim if head_dim is None
    block_size: int  # the longest T
    dropout: float
    N: int  # L
    alibi_attn: bool = True  # arXiv 2108.12409
    vocab_chunks: int = 1
    embedding_norm: bool = False  # as in BLOOM, arXiv 2211.05100, section 3.2.3
    norm_epsilon: float = 1e-6
    # Rotary: arXiv 2104.09864; T5: arXiv 1910.10683, section 2.1; sinusoidal, times a learned scale that starts at 0:
    # arXiv 2202.10447.
    positions: str = "learned"
    rotary_base: float = 10_000.0
    rotary_fraction: float = 1.0
    # Llama 3.1: arXiv 2407.21783; linear: arXiv 2306.15595; YaRN: arXiv 2309.00071, section 3; longrope: arXiv
    # 2402.13753. "dynamic" (NTK-aware) and "longrope" depend on the number of positions of a row, padding included.
    rotary_scaling: tuple[Any, ...] | None = None
    local_rotary_base: float | None = None  # None: layers with a window are as the others
    unrotated_every: int | None = None  # arXiv 2501.18795
    norm: str = "layer"  # RMSNorm: arXiv 1910.07467
    norm_gains: bool = True
    norm_place: str = "before"
    qk_norm: bool = False
    qk_norm_over: str = "head"  # over the projection: OLMo 2, arXiv 2501.00656, section 2
    kv_heads: int | None = None  # G; None: H
    head_dim: int | None = None  # K; None: D / H
    windows: tuple[int, ...] = (0,)
    attention_scale: Any = None  # None: "linear" with a parametrization of muP, else "sqrt"
    attention_cap: float | None = None  # Gemma 2, arXiv 2408.00118, section 2
    extra_logit: bool | str = False  # learned: attention sinks of gpt-oss, arXiv 2508.10925
    qkv_bias: bool = True
    out_bias: bool = True
    parallel_residual: bool = False  # GPT-J, GPT-NeoX
    mlp_dim: int | None = None  # F; None: 4 D
    activation: str = "gelu"  # clamped_swiglu: gpt-oss, arXiv 2508.10925
    gated: bool = False  # arXiv 2002.05202
    mlp_bias: bool = True
    experts: int | None = None  # E; GShard, arXiv 2006.16668
    experts_per_token: int = 1
    experts_every: int = 1
    expert_capacity: float | None = None
    expert_priority: str = "choice"
    normalise_router: bool = False  # Mixtral
    # E times the sum over experts of choices per token times mean probability (Switch, arXiv 2101.03961, eq. 4). It is
    # `experts_per_token` where all experts are chosen equally.
    balance_loss: float = 0.0
    balance_choices: str = "all"  # first: GShard, arXiv 2006.16668, algorithm 1
    router_z_loss: float = 0.0  # ST-MoE, arXiv 2202.08906, eq. 5
    tied: bool = True
    scale_embedding: bool = False
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    scale_output: bool = False
    output_scale: float = 1.0
    head_bias: bool = False
    final_norm: bool = True
    logit_cap: float | None = None
    z_loss: float = 0.0  # PaLM, arXiv 2204.02311, section 5
    parametrization: str = "standard"  # muP: arXiv 2203.03466, zero/models/parametrization.py
    mup_base_width: int | None = None
    init: str | None = None  # None: "fan_in" with a parametrization of muP, else "gpt2"
    head_init: str | None = None  # None: "mup" with a parametrization of muP, else as `init`
    zero_init: Any = ()  # arXiv 2203.03466, section D.2
    embedding_dropout: float = 0.0
    attention_dropout: float | None = None
    residual_dropout: float | None = None
    layer: str = "transformer"  # gated_units: zero/models/gated_unit.py, as are the next keys
    codes: int = 512  # S
    vq_block: int = 512  # C
    key_width: int = 128  # K
    cache_gradient: bool = True
    commitment: float = 1e-4
    codebook_decay: float = 0.99
    distance_base: float = 10_000.0
    distance_dropout: float = 0.0
    distance_width: int | None = None  # None: K
    distance_limit: str = "window"  # block: distances of more than C have no bias
    layer_dropout: float = 0.0
    update_tokens: int | None = None  # None: an update takes whole rows

    def __post_init__(self) -> None:
        is_mup = self.parametrization != "standard"
        derived = {"attention_scale": ("linear", "sqrt"), "init": ("fan_in", "gpt2"), "head_init": ("mup", None)}
        for name, (of_mup, of_standard) in derived.items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, of_mup if is_mup else of_standard)
        if isinstance(self.zero_init, bool):
            object.__setattr__(self, "zero_init", _ZEROED if self.zero_init else ())
        for name in ("windows", "rotary_scaling", "zero_init"):  # lists if read from YAML or JSON
            if getattr(self, name) is not None:
                object.__setattr__(self, name, tuple(getattr(self, name)))
        for name in (*_AT_LEAST_ONE, "vocab_chunks"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if (self.vocab_chunks - 1) * self.chunk_rows >= self.vocab_size:
            raise ValueError(f"vocab_chunks {self.vocab_chunks} leave one without any of vocab_size {self.vocab_size}")
        if self.head_dim is None and self.embedding_dim % self.num_head:
            raise ValueError(f"embedding_dim {self.embedding_dim} does not divide into num_head {self.num_head} heads")
        if self.num_head % self.key_heads:
            raise ValueError(f"num_head {self.num_head} does not divide into kv_heads {self.kv_heads} groups")
        for name in [field.name for field in dataclasses.fields(self) if field.name.endswith("dropout")]:
            if getattr(self, name) is not None and not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} must lie in [0, 1), got {getattr(self, name)}")
        positive = ("norm_epsilon", "rotary_base", "attention_cap", "logit_cap", "expert_capacity", "output_scale")
        for name in (*positive, "distance_base", "local_rotary_base", "embedding_multiplier", "residual_multiplier"):
            if getattr(self, name) is not None and getattr(self, name) <= 0:
                raise ValueError(f"{name} must be more than 0, got {getattr(self, name)}")
        for name in ("z_loss", "balance_loss", "router_z_loss", "commitment"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be at least 0, got {getattr(self, name)}")
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise ValueError(f"{name} must be one of {', '.join(map(str, choices))}, got {getattr(self, name)!r}")
        scale = self.attention_scale
        if scale not in ("sqrt", "linear", "none") and not (type(scale) in (int, float) and scale > 0):
            raise ValueError(f"attention_scale must be sqrt, linear, none or a number above 0, got {scale!r}")
        if not set(self.zero_init) <= set(MATRICES):
            raise ValueError(f"zero_init must be a list of {', '.join(MATRICES)}, got {list(self.zero_init)}")
        if not 0 < self.codebook_decay < 1:
            raise ValueError(f"codebook_decay must lie in (0, 1), got {self.codebook_decay}")
        if self.alibi_attn and self.positions != "learned":
            raise ValueError(f"positions {self.positions!r} need alibi_attn: false")
        if self.activation == "clamped_swiglu" and not self.gated:
            raise ValueError("activation: clamped_swiglu needs gated: true")
        if self.extra_logit == "learned" and self.attention_cap is not None:
            raise ValueError(f"extra_logit: learned needs attention_cap: null, got {self.attention_cap}")
        self._check_layer()
        self._check_rotary()
        self._check_parametrization()
        self._check_experts()
        if not self.windows or min(self.windows) < 0:
            raise ValueError(f"windows must be a list of numbers of at least 0, got {list(self.windows)}")
        if self.N % len(self.windows):
            raise ValueError(f"N {self.N} must be a multiple of the {len(self.windows)} layers of windows")

    def _check_layer(self) -> None:
        """Refuses keys of the other kind of layer that are not at their defaults."""
        is_gated = self.layer == "gated_units"
        has_own = self.alibi_attn or self.positions not in ("none", "sinusoidal")
        if is_gated and (has_own or self.num_head != 1):
            raise ValueError("layer: gated_units needs num_head: 1, alibi_attn: false and positions: none")
        if self.norm == "rms_biased" and not is_gated:
            raise ValueError("norm: rms_biased needs layer: gated_units")
        if self.codes < 0 or self.key_width % 2:
            raise ValueError(f"codes must be at least 0 and key_width even, got {self.codes} and {self.key_width}")
        if is_gated and self.update_tokens is not None and self.update_tokens % self.vq_block:
            raise ValueError(f"update_tokens {self.update_tokens} must be a multiple of vq_block {self.vq_block}")
        if self.distance_width is not None and (self.distance_width < 2 or self.distance_width % 2):
            raise ValueError(f"distance_width must be even and at least 2, or null, got {self.distance_width}")
        for field in dataclasses.fields(self):
            has_key = field.name in _GATED_UNITS if is_gated else field.name not in _GATED_UNITS_ALONE
            default = {"attention_scale": "sqrt", "init": "gpt2"}.get(field.name, field.default)
            if not has_key and getattr(self, field.name) != default:
                value, default = (str(x).lower() for x in (getattr(self, field.name), default))
                raise ValueError(f"layer: {self.layer} needs {field.name}: {default}, got {value}")

    def _check_rotary(self) -> None:
        rotated = self.rotary_fraction * self.head_width
        if not 0 < self.rotary_fraction <= 1:
            raise ValueError(f"rotary_fraction must lie in (0, 1], got {self.rotary_fraction}")
        if self.positions == "rotary" and (int(rotated) < 2 or int(rotated) % 2):
            raise ValueError(f"rotary_fraction {self.rotary_fraction} of {self.head_width} dimensions are not even")
        if self.rotary_scaling is not None and not _is_scaling(self.rotary_scaling):
            llama3 = "factor, low and high frequency factor, original context"
            yarn = "yarn, factor, original context, fast turns, slow turns, factor of cosines and sines"
            others = "dynamic, factor, original context], [longrope, original context, factor of cosines and sines, ..."
            raise ValueError(
                f"rotary_scaling must be [{llama3}], [linear, factor], [{yarn}] or [{others}], got "
                f"{list(self.rotary_scaling)}"
            )
        if self.rotary_kind == "longrope" and len(self.rotary_numbers) != 2 + 2 * (int(rotated) // 2):
            raise ValueError(
                f"rotary_scaling longrope must have 2 x {int(rotated) // 2} divisors, for the pairs of {int(rotated)} "
                f"rotated dimensions, got {len(self.rotary_numbers) - 2}"
            )
        if self.unrotated_every is not None and self.N % self.unrotated_every:
            raise ValueError(f"N {self.N} must be a multiple of unrotated_every {self.unrotated_every}")
        if self.qk_norm_over == "projection" and not (self.qk_norm and self.norm == "rms"):
            raise ValueError("qk_norm_over: projection needs qk_norm: true and norm: rms")

    def _check_parametrization(self) -> None:
        if self.parametrization == "standard":
            if self.mup_base_width is not None:
                raise ValueError(f"mup_base_width must be null without parametrization: mup, got {self.mup_base_width}")
            return
        kind = self.parametrization
        if kind == "mup" and self.mup_base_width is None:
            raise ValueError("parametrization: mup needs mup_base_width, the embedding_dim of its learning rates")
        if kind == "mup_absolute" and self.mup_base_width is not None:
            raise ValueError(f"parametrization: mup_absolute needs mup_base_width: null, got {self.mup_base_width}")
        # Embedding and head differ in initial weights and learning rates, and scaling by the root of the width would
        # add a dependence on it.
        needed: dict[str, Any] = {"tied": False, "scale_embedding": False, "scale_output": False}
        for name, needed_value in needed.items():
            value = getattr(self, name)
            if value != needed_value:
                expected = str(needed_value).lower()
                raise ValueError(f"parametrization: {kind} needs {name}: {expected}, got {str(value).lower()}")
        if self.attention_scale in ("sqrt", "none"):
            raise ValueError(f"parametrization: {kind} needs attention_scale: linear, got {self.attention_scale}")

    def _check_experts(self) -> None:
        if self.experts is None:
            for field in dataclasses.fields(self):
                if field.name in _EXPERTS_ALONE and getattr(self, field.name) != field.default:
                    raise ValueError(f"{field.name} {getattr(self, field.name)} needs experts")
            return
        if self.experts_per_token > self.experts:
            raise ValueError(f"experts_per_token {self.experts_per_token} must be at most experts {self.experts}")
        if self.experts_per_token == 1 and self.normalise_router:
            raise ValueError("normalise_router: true with experts_per_token 1 leaves the router without a gradient")
        if self.N % self.experts_every:
            raise ValueError(f"N {self.N} must be a multiple of experts_every {self.experts_every}")
        if self.experts_every > 1 and len(self.windows) > 1:
            raise ValueError(f"experts_every {self.experts_every} needs one window, got {list(self.windows)}")
        for name, needed in (("parametrization", "standard"), ("init", "gpt2")):
            if getattr(self, name) != needed:
                raise ValueError(f"experts need {name}: {needed}, got {getattr(self, name)}")

    @property
    def rotary_kind(self) -> str | None:
        """The name of `rotary_scaling`, which Llama 3.1's does not have; None without one."""
        if self.rotary_scaling is None:
            return None
        return self.rotary_scaling[0] if isinstance(self.rotary_scaling[0], str) else "llama3"

    @property
    def rotary_numbers(self) -> tuple[float, ...]:
        """`rotary_scaling` without its name."""
        scaling = self.rotary_scaling or ()
        return scaling[1:] if scaling and isinstance(scaling[0], str) else scaling

    @property
    def rotary_switch(self) -> int | None:
        """The number of positions beyond which the length of a row changes rotary frequencies; None for none."""
        index = {"dynamic": 1, "longrope": 0}.get(self.rotary_kind or "")
        return None if index is None else int(self.rotary_numbers[index])

    @property
    def scanned_layers(self) -> int:
        """Entries of the stack of layers: each has `experts_every` of them."""
        return self.N // self.experts_every

    @property
    def chunk_rows(self) -> int:
        return -(-self.vocab_size // self.vocab_chunks)

    @property
    def attention_drop_rate(self) -> float:
        """`attention_dropout`, or its default."""
        return self.dropout if self.attention_dropout is None else self.attention_dropout

    @property
    def residual_drop_rate(self) -> float:
        """`residual_dropout`, or its default."""
        return self.dropout if self.residual_dropout is None else self.residual_dropout

    @property
    def has_dropout(self) -> bool:
        """Whether training needs dropout keys."""
        of_units = (self.distance_dropout, self.layer_dropout)
        return max(self.embedding_dropout, self.attention_drop_rate, self.residual_drop_rate, *of_units) > 0

    @property
    def key_heads(self) -> int:
        """G."""
        return self.kv_heads or self.num_head

    @property
    def head_width(self) -> int:
        """K."""
        return self.head_dim or self.embedding_dim // self.num_head

    @property
    def score_multiplier(self) -> float:
        """The factor of scores where `attention_scale` is "sqrt" or a number."""
        return self.head_width**-0.5 if isinstance(self.attention_scale, str) else float(self.attention_scale)

    @property
    def score_width(self) -> int:
        """The number by whose root scores are then divided, if it is one: K, or another one."""
        return self.head_width if isinstance(self.attention_scale, str) else round(self.score_multiplier**-2)

    @property
    def logit_divisor(self) -> float:
        """What logits are divided by."""
        return 1 / self.output_scale

    @property
    def mlp_width(self) -> int:
        """F."""
        return self.mlp_dim or 4 * self.embedding_dim

    @property
    def has_learned_positions(self) -> bool:
        """Whether contexts are limited to `block_size` positions."""
        return self.position_kind == "learned"

    @property
    def position_kind(self) -> str:
        """One of `positions`, or "alibi"."""
        return "alibi" if self.alibi_attn else self.positions

    @property
    def has_codebook(self) -> bool:
        """Whether the model has a codebook, which the optimizer does not update."""
        return self.layer == "gated_units" and self.codes > 0

    @property
    def stacked(self) -> tuple[str, ...]:
        """Top-level subtrees of the parameters whose leaves have a leading dimension, of layers or chunks."""
        return (STACK, VOCABULARY) if self.tied else (STACK, VOCABULARY, HEAD)
