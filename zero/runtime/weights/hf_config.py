"""config.json of a Hugging Face folder: from an architecture of `transformers` to the choices of a model, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zero.models.config import GPTConfig
from zero.runtime.errors import UserError
from zero.runtime.parsing import reading
from zero.runtime.weights.architecture import Architecture
from zero.runtime.weights.architecture_table import ARCHITECTURES

_MISSING = object()
_LLAMA3 = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
# Attributes of a model that no shape or name of a tensor shows, and that its weights were trained with.
UNSEEN = (
    "num_head",
    "norm_epsilon",
    "positions",
    "rotary_base",
    "rotary_fraction",
    "rotary_scaling",
    "norm",
    "windows",
    "attention_scale",
    "attention_cap",
    "extra_logit",
    "parallel_residual",
    "activation",
    "experts_per_token",
    "experts_every",
    "normalise_router",
    "tied",
    "scale_embedding",
    "scale_output",
    "logit_cap",
    "layer",
    "vq_block",
)


def read_architecture(origin: str, config: Mapping[str, Any]) -> Architecture:
    """The architecture of a config.json.

    Raises:
      UserError: no model of zero equals it; `origin` begins the message.
    """
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in ARCHITECTURES:
        raise UserError(f"{origin}: model_type {model_type!r}: expected one of {', '.join(map(repr, ARCHITECTURES))}")
    architecture = ARCHITECTURES[model_type]
    for key, value in architecture.fixed.items():
        if config.get(key, value) != value:
            raise UserError(f"{origin}: {key} is {config[key]!r}, a GPT of zero has {value!r}")
    scalar, width = config.get("query_pre_attn_scalar"), config.get("head_dim")
    if model_type == "gemma2" and scalar != width:
        raise UserError(f"{origin}: query_pre_attn_scalar is {scalar}, a GPT of zero has head_dim, here {width}")
    return architecture


def read_choices(origin: str, config: Mapping[str, Any], architecture: Architecture, layers: int) -> dict[str, Any]:
    """The attributes in `UNSEEN` of the model that a config.json describes, with this many layers.

    Raises:
      UserError: one of them cannot be read, or no model of zero has it; `origin` begins the message.
    """
    found = architecture.choices()
    for key, name in architecture.keys.items():
        value = config.get(key, config.get(architecture.aliases.get(key, ""), architecture.absent.get(key, _MISSING)))
        if value is not _MISSING:
            found[name] = value
        elif name in UNSEEN:
            raise UserError(f"{origin}: {key} is missing")
    if architecture.rotary is not None:
        with reading(f"{origin}: the keys of rotary positions hold something else"):
            found |= _read_rotary(origin, config, architecture)
    if architecture.windows:
        with reading(f"{origin}: the keys of windows hold something else"):
            found["windows"] = _read_windows(origin, {**architecture.absent, **config}, architecture.windows, layers)
    if config.get(architecture.layers_key) != layers:
        stated = config.get(architecture.layers_key, "missing")
        raise UserError(f"{origin}: {architecture.layers_key} is {stated}, the files hold {layers} layers")
    return {name: found[name] for name in UNSEEN}


def write_config(architecture: Architecture, size: GPTConfig) -> dict[str, Any]:
    """The content of config.json for a model that equals this architecture, without its tokenizer's keys."""
    keys = {key: getattr(size, name) for key, name in architecture.keys.items()}
    names = {"architectures": [architecture.class_name], "model_type": architecture.model_type, "dtype": "float32"}
    content = {**names, **keys, **architecture.fixed, **architecture.written}
    if architecture.rotary is not None:
        base, fraction = architecture.rotary
        content[base] = size.rotary_base
        if fraction is not None:
            content[fraction] = size.rotary_fraction
        if size.rotary_scaling is not None:
            content["rope_scaling"] = {"rope_type": "llama3", **dict(zip(_LLAMA3, size.rotary_scaling, strict=True))}
    return content | _write_windows(architecture.windows, size)


def _read_rotary(origin: str, config: Mapping[str, Any], architecture: Architecture) -> dict[str, Any]:
    """The base and scaling of rotary positions, read like `transformers`: `rope_scaling` replaces `rope_parameters`."""
    assert architecture.rotary is not None
    base, fraction = architecture.rotary
    name = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    parameters = config.get(name) or {}
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind not in ("default", "llama3"):
        raise UserError(
            f"{origin}: {name} has rope_type {kind!r}, with which these weights were trained; "
            "zero computes 'default' and 'llama3'"
        )
    found = {"rotary_base": float(parameters.get("rope_theta", config.get(base, architecture.absent[base])))}
    scaling = None
    if kind == "llama3":
        if missing := [key for key in _LLAMA3 if key not in parameters]:
            raise UserError(f"{origin}: {missing[0]} of rope_type 'llama3' is missing")
        scaling = tuple(float(parameters[key]) for key in _LLAMA3)
    if fraction is not None:
        otherwise = config.get(fraction, architecture.absent[fraction])
        found["rotary_fraction"] = float(parameters.get("partial_rotary_factor", otherwise))
    return found | {"rotary_scaling": scaling}


def _read_windows(origin: str, config: Mapping[str, Any], kind: str, layers: int) -> tuple[int, ...]:
    """The shortest pattern that gives the windows of all layers."""
    window = int(config.get("window_size" if kind == "attention_types" else "sliding_window") or 0)
    if kind == "sliding_window":
        return (window,)
    if kind == "attention_types":
        parts = config.get("attention_types") or []
        names = [name for part, times in parts for name in part * min(times, layers + 1)]  # not any number of times
        local = "local"
    else:
        alternating = ["sliding_attention", "full_attention"] * layers
        names, local = list(config.get("layer_types") or alternating[:layers]), "sliding_attention"
    if len(names) != layers:
        raise UserError(f"{origin}: {kind} names {len(names)} layers, the weights have {layers}")
    windows = [window if name == local else 0 for name in names]
    periods = (period for period in range(1, layers + 1) if windows == windows[:period] * (layers // period))
    return tuple(windows[: next(periods)])


def _write_windows(kind: str, size: GPTConfig) -> dict[str, Any]:
    window, periods = max(size.windows), size.N // len(size.windows)
    match kind:
        case "sliding_window":
            return {"sliding_window": window or None}
        case "attention_types":
            names = ["local" if window else "global" for window in size.windows]
            return {"attention_types": [[names, periods]], "window_size": window or 256}
        case "layer_types":
            names = ["sliding_attention" if window else "full_attention" for window in size.windows]
            return {"layer_types": names * periods, "sliding_window": window or None}
    return {}
