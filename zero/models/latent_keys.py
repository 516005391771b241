"""The keys of latent attention."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from zero.base.keys import at_least, key
from zero.models.attention_keys import Attention

# How keys and values are made: by a product each, or from one latent vector per position.
HEADS, LATENT = "heads", "latent"


@dataclass(frozen=True)
class Latent(Attention):
    """The keys of latent attention."""

    # R; DeepSeek-V2, arXiv 2405.04434
    latent_dim: int | None = key(
        None,
        at_least(1),
        "latent attention: width of a normalized vector of each position, from which a product makes the keys and "
        "values of all heads; sampling stores it, and rotary_dim numbers that all keys share; null: keys and values "
        "by products of their own",
    )
    query_latent_dim: int | None = key(
        None, at_least(1), "width of the normalized vector that queries are made of; null: of the layer's input"
    )
    # V
    value_dim: int | None = key(
        None, at_least(1), "width of the values of a head, at most the width of its keys", none="head_dim"
    )

    def mistakes(self) -> Iterator[str]:
        """Keys of latent attention in a model without it, and keys that conflict with it."""
        if self.latent_dim is None:
            for name in ("query_latent_dim", "value_dim"):
                if getattr(self, name) is not None:
                    yield f"{name} {getattr(self, name)} needs latent_dim"
            return
        needed = {
            "position_kind": ("rotary", "positions"),
            "key_heads": (self.num_head, "kv_heads"),
            "window_pattern": ((0,), "windows"),
            "qkv_bias": (False, "qkv_bias"),
            "extra_logit": (False, "extra_logit"),
            "attention_gate": (False, "attention_gate"),
            "qk_norm": (False, "qk_norm"),
            "local_rotary_base": (None, "local_rotary_base"),
            "parametrization": ("standard", "parametrization"),
        }
        for attribute, (value, name) in needed.items():
            if getattr(self, attribute) != value:
                yield f"latent_dim needs {name}: {str(value).lower()}, got {str(getattr(self, name)).lower()}"
        if self.rotary_dim is None or self.rotary_dim >= self.head_width:
            yield f"latent_dim needs a rotary_dim below head_dim {self.head_width}, got {self.rotary_dim}"
        if self.value_width > self.head_width:
            yield f"value_dim {self.value_dim} must be at most head_dim {self.head_width}"

    @property
    def source_of_keys(self) -> str:
        """How keys and values are made."""
        return HEADS if self.latent_dim is None else LATENT

    @property
    def unrotated_width(self) -> int:
        """The width of a head of queries and keys without its rotated part."""
        return self.head_width - self.rotated

    @property
    def value_width(self) -> int:
        """V."""
        return self.value_dim or self.head_width
