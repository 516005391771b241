"""config.json of a Hugging Face folder: from an architecture of `transformers` to the choices of a model, and back."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from zero.base.errors import UserError
from zero.exchange.architecture import SEVERAL, Architecture
from zero.exchange.architecture_table import ARCHITECTURES, MISSING, OTHER_TYPES
from zero.exchange.codings import QUANTIZATION
from zero.exchange.config_keys import ROPE_KEYS, check_keys
from zero.files.parsing import reading
from zero.models.config import GPTConfig
from zero.models.part import ATTENTION, DELTA, shortest_pattern

_MISSING = object()
# Attributes of a model that no shape or name of a tensor shows, and that its weights were trained with.
UNSEEN = (
    *("num_head", "norm_epsilon", "positions"),
    *(
        "rotary_dim",
        "rotary_interleaved",
        "rotary_base",
        "rotary_fraction",
        "rotary_scaling",
        "local_rotary_base",
        "unrotated_every",
    ),
    *("norm", "windows", "attention_scale", "attention_cap", "extra_logit", "parallel_residual", "activation"),
    *("experts_per_token", "experts_every", "first_dense", "normalize_router", "tied"),
    *("router", "router_scale", "router_groups", "router_groups_per_token"),
    *("scale_embedding", "scale_output", "embedding_multiplier", "residual_multiplier", "output_scale", "logit_cap"),
    *("layer", "vq_block", "mixers", "delta_key_heads", "delta_value_heads", "attention_gate"),
)


def read_architecture(origin: str, config: Mapping[str, Any]) -> Architecture:
    """The architecture of a config.json.

    Raises:
      UserError: no model of zero equals it; `origin` begins the message.
    """
    model_type = config.get("model_type")
    if isinstance(model_type, str) and model_type in MISSING:
        raise UserError(f"{origin}: model_type {model_type!r} has {MISSING[model_type]}, which zero does not support")
    model_type = OTHER_TYPES.get(str(model_type), model_type)
    if not isinstance(model_type, str) or model_type not in ARCHITECTURES:
        raise UserError(f"{origin}: model_type {model_type!r}: expected one of {', '.join(map(repr, ARCHITECTURES))}")
    architecture = ARCHITECTURES[model_type]
    for key, value in architecture.fixed.items():
        if config.get(key, value) not in (value, architecture.legacy.get(key, value)):
            raise UserError(f"{origin}: {key} is {config[key]!r}; zero supports only {value!r}")
    architecture = architecture.of_queries(config.get("q_lora_rank", architecture.absent.get("q_lora_rank")))
    architecture = architecture.of_scores(_read_outputs(origin, config))
    if not architecture.delta:
        return architecture
    with reading(f"{origin}: the keys of mixers cannot be read"):
        return architecture.of_mixers(_read_mixers(origin, config, int(config[architecture.layers_key])))


_WITH_SCORES = "ForSequenceClassification"  # ends the names of classes with a head of scores


def _read_outputs(origin: str, config: Mapping[str, Any]) -> int | None:
    """The outputs of the head of scores, one for each label, of which transformers has 2 by default; None: no head."""
    names = config.get("architectures") or [""]
    if not str(names[0]).endswith(_WITH_SCORES):
        return None
    with reading(f"{origin}: id2label has an unexpected form"):
        return len(dict(config.get("id2label") or {"0": "LABEL_0", "1": "LABEL_1"}))


def read_choices(origin: str, config: Mapping[str, Any], architecture: Architecture, layers: int) -> dict[str, Any]:
    """The attributes in `UNSEEN` of the model that a config.json describes, with this many layers.

    Raises:
      UserError: one of them cannot be read, or no model of zero has it; `origin` begins the message.
    """
    check_keys(origin, config, architecture, layers)
    choices = architecture.choices()
    for key, name in architecture.keys.items():
        value = config.get(key, config.get(architecture.aliases.get(key, ""), architecture.absent.get(key, _MISSING)))
        if value is None and name not in _MAY_BE_NULL and type(choices.get(name)) in (int, float):
            raise UserError(f"{origin}: {key} is null; expected a number")
        if value is not _MISSING:
            choices[name] = value
        elif name in UNSEEN:
            raise UserError(f"{origin}: {key} is missing")
    if architecture.rotary is not None:
        with reading(f"{origin}: the keys of rotary positions cannot be read"):
            choices |= _read_rotary(origin, config, architecture)
    if architecture.windows:
        with reading(f"{origin}: the keys of windows cannot be read"):
            choices["windows"] = _read_windows(origin, {**architecture.absent, **config}, architecture, layers)
    if architecture.delta:
        with reading(f"{origin}: the keys of mixers cannot be read"):
            choices["mixers"] = _read_mixers(origin, config, layers)
    if architecture.unrotated:
        with reading(f"{origin}: no_rope_layers has an unexpected form"):
            choices["unrotated_every"] = _read_unrotated(origin, config, architecture.unrotated, layers)
    if "score_width" in choices or "score_multiplier" in choices:
        with reading(f"{origin}: the scale of scores has an unexpected form"):
            width = choices.get("head_width") or choices["embedding_dim"] // choices["num_head"]
            multiplier = float(choices.get("score_multiplier") or choices["score_width"] ** -0.5)
            choices["attention_scale"] = "sqrt" if multiplier == width**-0.5 else multiplier
    if architecture.scales_scores:
        with reading(f"{origin}: the scale of scores has an unexpected form"):
            width = int(choices["unrotated_width"]) + int(choices["rotary_dim"])
            choices["attention_scale"] = _read_scale(config, width)
    if "logit_divisor" in choices:
        with reading(f"{origin}: logits_scaling is not a number"):
            choices["output_scale"] = 1 / float(choices["logit_divisor"])
    stated = config.get(architecture.layers_key, config.get(architecture.aliases.get(architecture.layers_key, "")))
    if stated != layers:
        stated = "missing" if stated is None else stated
        raise UserError(f"{origin}: {architecture.layers_key} is {stated}, the files hold {layers} layers")
    return {name: choices[name] for name in UNSEEN}


_MAY_BE_NULL = ("query_latent_dim",)  # where null says something else than that the key is missing
# Attributes of `GPTConfig` whose values config.json has under another name.
_FIELDS = {
    "key_heads": "kv_heads",
    "head_width": "head_dim",
    "mlp_width": "mlp_dim",
    "dense_width": "dense_dim",
    "value_width": "value_dim",
    "attention_drop_rate": "attention_dropout",
    "residual_drop_rate": "residual_dropout",
}
_DERIVED = (
    "score_width",
    "score_multiplier",
    "logit_divisor",
    "shared_experts",
    "unrotated_width",
)  # which `read_choices` turns into attributes


def read_size(origin: str, config: Mapping[str, Any], architecture: Architecture, layers: int) -> GPTConfig:
    """The whole model that a config.json describes, with this many layers.

    Raises:
      UserError: a size is missing, or it describes no possible model; `origin` begins the message.
    """
    attributes: dict[str, Any] = {}
    for key, name in architecture.keys.items():
        value = config.get(key, config.get(architecture.aliases.get(key, ""), architecture.absent.get(key)))
        if name not in _DERIVED and (value is not None or name in _MAY_BE_NULL):
            attributes |= dict.fromkeys(SEVERAL.get(name, (_FIELDS.get(name, name),)), value)
    if "shared_experts" in architecture.keys.values():
        attributes["shared_dim"] = _read_shared(origin, config, architecture, attributes)
    if "unrotated_width" in architecture.keys.values():
        with reading(f"{origin}: the widths of heads are no numbers"):
            unrotated = config.get("qk_nope_head_dim", architecture.absent["qk_nope_head_dim"])
            attributes["head_dim"] = int(unrotated) + int(attributes["rotary_dim"])
    choices = architecture.choices()
    defaults = {name: value for name, value in choices.items() if value is not dataclasses.MISSING}
    attributes = {
        **defaults,
        "dropout": 0.0,
        **attributes,
        **read_choices(origin, config, architecture, layers),
        "N": layers,
        "score_outputs": architecture.outputs,
    }
    required = {*choices} - {*defaults} - {*attributes}  # those that no key has set
    missing = [key for key, name in architecture.keys.items() if _FIELDS.get(name, name) in required]
    if missing:
        raise UserError(f"{origin}: {missing[0]} is missing")
    with reading(f"{origin}: expected the configuration of a model"):
        return GPTConfig(**attributes)


def _read_shared(
    origin: str, config: Mapping[str, Any], architecture: Architecture, attributes: Mapping[str, Any]
) -> int | None:
    """The width of the MLP beside experts, from its number of expert widths."""
    key = next(key for key, name in architecture.keys.items() if name == "shared_experts")
    count = config.get(key, architecture.absent.get(key))
    with reading(f"{origin}: {key} is no number of experts"):
        return int(count) * int(attributes["mlp_dim"]) or None


def write_config(architecture: Architecture, model_config: GPTConfig) -> dict[str, Any]:
    """The content of config.json for a model that equals this architecture, without its tokenizer's keys."""
    keys = {key: getattr(model_config, name) for key, name in architecture.keys.items()}
    names = {"architectures": [architecture.class_name], "model_type": architecture.model_type, "dtype": "float32"}
    of_servers = {key: getattr(model_config, name) for key, name in architecture.of_servers.items()}
    content = {**names, **keys, **architecture.fixed, **architecture.written, **of_servers}
    if architecture.unrotated:
        every = model_config.unrotated_every or model_config.N + 1
        content |= {"no_rope_layer_interval": every, "no_rope_layers": _rotated(every, model_config.N)}
    if architecture.delta:
        types = {mixer: name for name, mixer in _MIXERS.items()}
        content["layer_types"] = [types[mixer] for mixer in model_config.mixers] * (
            model_config.N // len(model_config.mixers)
        )
    return content | _write_rotary(architecture, model_config) | _write_windows(architecture.windows, model_config)


# Keys of a config.json that concern its folder, not the model, or name files beside it.
_OF_FOLDER = {"architectures", "model_type", "auto_map", "_name_or_path", "_commit_hash", QUANTIZATION}


def write_config_as(architecture: Architecture, model_config: GPTConfig, source: Mapping[str, Any]) -> dict[str, Any]:
    """The same for a model that began as the folder with the config.json `source`, which it repeats key by key.

    Keys that the training has changed are those of `write_config`, and so are all where `source` is of another
    architecture, or repeated keys would describe another model.
    """
    written = write_config(architecture, model_config)
    origin = "the config.json that the run started from"
    source_architecture = read_architecture(origin, source)
    if source_architecture.model_type != architecture.model_type:
        return written
    layers_key = architecture.layers_key
    layers = int(source.get(layers_key, source.get(architecture.aliases.get(layers_key, ""), 0)))
    before = write_config(source_architecture, read_size(origin, source, source_architecture, layers))
    changed = {key: value for key, value in written.items() if before.get(key, _MISSING) != value}
    gone = {*_OF_FOLDER, *(before.keys() - written.keys()), *(architecture.aliases.get(key, "") for key in changed)}
    if architecture.further is not None:  # layers that the folder does not hold
        gone |= {architecture.further.key, architecture.aliases.get(architecture.further.key, "")}
    gone.add(architecture.counts_unread or "")
    positions = {*ROPE_KEYS, *filter(None, architecture.rotary or ())}
    if positions & {*changed, *gone}:
        changed |= {key: value for key, value in written.items() if key in positions}
        gone |= positions
    kept = {key: value for key, value in source.items() if key not in gone}
    content = {**kept, **changed, **{key: written[key] for key in ("architectures", "model_type")}}
    again = write_config(architecture, read_size(origin, content, architecture, model_config.N))
    return content if again == written else written


_MIXERS = {"linear_attention": DELTA, "full_attention": ATTENTION}  # by their names in layer_types


def _read_mixers(origin: str, config: Mapping[str, Any], layers: int) -> tuple[str, ...]:
    """The shortest pattern that gives the mixers of all layers."""
    every = int(config.get("full_attention_interval", 4))
    by_default = ["linear_attention" if (layer + 1) % every else "full_attention" for layer in range(layers)]
    names = list(config.get("layer_types") or by_default)
    if others := sorted({*names} - {*_MIXERS}):
        raise UserError(f"{origin}: layer_types names {others[0]!r}; expected {' and '.join(map(repr, _MIXERS))}")
    if len(names) != layers:
        raise UserError(f"{origin}: layer_types names {len(names)} layers, the weights have {layers}")
    mixers = tuple(_MIXERS[name] for name in names)
    pattern = shortest_pattern(mixers)
    return mixers if layers % len(pattern) else pattern


def _read_rotary(origin: str, config: Mapping[str, Any], architecture: Architecture) -> dict[str, Any]:
    """The bases and scaling of rotary positions, read like `transformers`: `rope_scaling` replaces `rope_parameters`.

    Where layers with windows have a base of their own, `rope_parameters` are by type of layer and `rope_scaling` is
    that of the others.
    """
    assert architecture.rotary is not None
    base, fraction = architecture.rotary
    name = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    attributes = dict[str, Any]()
    parameters = config.get(name) or architecture.absent.get("rope_parameters") or {}
    if architecture.local_rotary is not None:
        by_type = config.get("rope_parameters") or {}
        default_type = {"rope_type": "default"}  # which transformers fills in before it reads rope_scaling
        parameters = {**(by_type.get("full_attention") or default_type), **(config.get("rope_scaling") or {})}
        local = by_type.get("sliding_attention") or {}
        key, default = architecture.local_rotary
        if (kind := _rope_type(f"{origin}: rope_parameters", local)) != "default":
            raise UserError(f"{origin}: rope_type of sliding_attention is {kind!r}; zero supports only 'default'")
        attributes["local_rotary_base"] = float(local.get("rope_theta", config.get(key, default)))
    kind = _rope_type(f"{origin}: {name}", parameters)
    kind = architecture.scaling_aliases.get(kind, kind)
    known = ("default", *architecture.scalings)
    if kind not in known:
        raise UserError(
            f"{origin}: {name} has rope_type {kind!r}, which these weights were trained with; zero supports "
            f"{', '.join(map(repr, known))}"
        )
    attributes["rotary_base"] = float(parameters.get("rope_theta", config.get(base, architecture.absent[base])))
    attributes["rotary_scaling"] = _read_scaling(origin, kind, parameters, config)
    if fraction is not None:
        otherwise = config.get(fraction, architecture.absent[fraction])
        attributes["rotary_fraction"] = float(parameters.get("partial_rotary_factor", otherwise))
    return attributes


def _rope_type(place: str, parameters: Mapping[str, Any]) -> Any:
    """The kind of rotary positions, under either of its names; raises UserError if both are there and differ."""
    kinds = [parameters[key] for key in ("rope_type", "type") if key in parameters]
    if len(kinds) == 2 and kinds[0] != kinds[1]:
        raise UserError(f"{place} has rope_type {kinds[0]!r} and type {kinds[1]!r}, two names for the same setting")
    if not kinds:
        return "default"
    return kinds[0]


def _read_scaling(
    origin: str, kind: str, parameters: Mapping[str, Any], config: Mapping[str, Any]
) -> tuple[Any, ...] | None:
    if kind == "default":
        return None
    if kind == "longrope":
        return _read_longrope(origin, parameters, config)
    if kind == "yarn":
        parameters = _yarn_parameters(parameters, config)
    if kind == "dynamic":  # transformers reads its original context here, whatever other keys there are
        parameters = {**parameters, _CONTEXT: config.get(_CONTEXT)}
    keys = _KEYS[kind]
    if missing := [key for key in keys if parameters.get(key) is None]:
        raise UserError(f"{origin}: {missing[0]} of rope_type {kind!r} is missing")
    numbers = tuple(float(parameters[key]) for key in keys)
    if kind == "llama3":
        return numbers
    return ("yarn_unrounded" if kind == "yarn" and not parameters.get("truncate", True) else kind, *numbers)


def _yarn_parameters(parameters: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters, with missing ones inferred as in transformers."""
    context = config.get(_CONTEXT)
    original = config.get(_ORIGINAL) or parameters.get(_ORIGINAL) or context
    factor = parameters.get("factor") or float(context or 0) / float(original or 1)
    scales = parameters.get("mscale"), parameters.get("mscale_all_dim")
    length = parameters.get("attention_factor")
    if length is None:
        over, under = scales if all(scales) else (1.0, 0.0)
        length = _yarn_length(float(factor), float(over or 1)) / _yarn_length(float(factor), float(under or 0))
    betas = {"beta_fast": parameters.get("beta_fast") or 32, "beta_slow": parameters.get("beta_slow") or 1}
    return {**parameters, **betas, "factor": factor, _ORIGINAL: original, "attention_factor": length}


def _read_scale(config: Mapping[str, Any], width: int) -> str | float:
    """The factor of scores of heads of this width, of a class that multiplies it by the square of YaRN's mscale."""
    parameters = config.get("rope_scaling") or config.get("rope_parameters") or {}
    under = parameters.get("mscale_all_dim")
    if not under or _rope_type("", parameters) == "default":
        return "sqrt"
    return float(width**-0.5 * _yarn_length(float(parameters["factor"]), float(under)) ** 2)


def _write_scale(model_config: GPTConfig, scaling: dict[str, Any]) -> dict[str, Any]:
    """The inverse of `_read_scale`: `scaling` with the numbers whose scales scores and rotations have, as DeepSeek's.

    Servers read `mscale` there, and no `attention_factor`.
    """
    if isinstance(model_config.attention_scale, str):
        return scaling
    factor = model_config.rotary_numbers[0]
    length = math.sqrt(model_config.score_multiplier * math.sqrt(model_config.head_width))
    under = _yarn_scale(factor, length)
    scaled = {**scaling, "mscale_all_dim": under}
    if "attention_factor" not in scaling:
        return scaled
    over = _yarn_scale(factor, scaling["attention_factor"] * _yarn_length(factor, under))
    if over and _yarn_length(factor, over) / _yarn_length(factor, under) == scaling["attention_factor"]:
        del scaled["attention_factor"]
        scaled["mscale"] = over
    return scaled


def _yarn_scale(factor: float, length: float) -> float:
    """The number of which `_yarn_length` makes this length."""
    return round((length - 1) / (0.1 * math.log(factor)), 9)


def _read_longrope(origin: str, parameters: Mapping[str, Any], config: Mapping[str, Any]) -> tuple[Any, ...]:
    context = config.get(_CONTEXT)
    original = float(config.get(_ORIGINAL) or parameters.get(_ORIGINAL) or context or 0)
    length = parameters.get("attention_factor")
    if length is None:  # as transformers infers it
        factor = float(parameters.get("factor") or float(context or 0) / (original or 1))
        length = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    divisors = [float(x) for key in _DIVISORS for x in parameters.get(key) or ()]
    if not divisors or len(parameters[_DIVISORS[0]]) != len(parameters[_DIVISORS[1]]):
        raise UserError(f"{origin}: rope_type 'longrope' expects as many numbers in short_factor as in long_factor")
    return ("longrope", original, float(length), *divisors)


def _yarn_length(factor: float, scale: float) -> float:
    """YaRN, arXiv 2309.00071, equation 22."""
    if factor <= 1:
        return 1.0
    return 0.1 * scale * math.log(factor) + 1.0


_ORIGINAL, _CONTEXT = "original_max_position_embeddings", "max_position_embeddings"
_DIVISORS = ("short_factor", "long_factor")
_KEYS = {  # of the numbers of `rotary_scaling`, in their order
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", _ORIGINAL),
    "yarn": ("factor", _ORIGINAL, "beta_fast", "beta_slow", "attention_factor"),
    "dynamic": ("factor", _CONTEXT),
}


def _write_rotary(architecture: Architecture, model_config: GPTConfig) -> dict[str, Any]:
    if architecture.rotary is None:
        return {}
    scaling = _scaling_keys(model_config)
    if architecture.scales_scores:
        scaling = _write_scale(model_config, scaling)
    beside = {_CONTEXT: scaling.pop(_CONTEXT)} if _CONTEXT in scaling else {}
    if model_config.rotary_kind == "longrope":  # Phi-3's classes read it here only
        beside[_ORIGINAL] = scaling[_ORIGINAL]
    base, fraction = architecture.rotary
    if architecture.local_rotary is not None:
        full = {"rope_type": "default", "rope_theta": model_config.rotary_base, **scaling}
        local = {"rope_type": "default", "rope_theta": model_config.local_rotary_base}
        return {"rope_parameters": {"full_attention": full, "sliding_attention": local}, **beside}
    content = {base: model_config.rotary_base} | ({} if fraction is None else {fraction: model_config.rotary_fraction})
    if not scaling and "rope_parameters" in architecture.absent:  # else the class would scale
        return content | {"rope_parameters": {"rope_type": "default", "rope_theta": model_config.rotary_base}}
    return content | ({"rope_scaling": scaling} if scaling else {}) | beside


def _scaling_keys(model_config: GPTConfig) -> dict[str, Any]:
    """The keys of `rotary_scaling` in a config.json; empty without one."""
    if model_config.rotary_scaling is None:
        return {}
    kind = str(model_config.rotary_kind)
    numbers = model_config.rotary_numbers
    if kind == "longrope":
        original, length, *divisors = numbers
        pairs = len(divisors) // 2
        by_length = dict(zip(_DIVISORS, (divisors[:pairs], divisors[pairs:]), strict=True))
        return {"rope_type": kind, _ORIGINAL: int(original), "attention_factor": length, **by_length}
    scaling: dict[str, Any] = {"rope_type": kind}
    if kind == "yarn_unrounded":
        kind = "yarn"
        scaling = {"rope_type": "yarn", "truncate": False}
    scaling |= zip(_KEYS[kind], numbers, strict=True)
    if kind == "yarn" and scaling["attention_factor"] == _yarn_length(scaling["factor"], 1.0):
        del scaling["attention_factor"]  # what it is without the key
    return scaling | {key: int(scaling[key]) for key in (_ORIGINAL, _CONTEXT) if key in scaling}


def _rotated(every: int, layers: int) -> list[int]:
    """As `no_rope_layers` lists them: 0 for a layer without rotary positions."""
    return [int((layer + 1) % every != 0) for layer in range(layers)]


def _read_unrotated(origin: str, config: Mapping[str, Any], default: int, layers: int) -> int | None:
    listed = config.get("no_rope_layers")
    if listed is None:
        listed = _rotated(int(config.get("no_rope_layer_interval", default)), layers)
    listed = [int(bool(is_rotated)) for is_rotated in listed[:layers]]
    for every in range(1, layers + 1):
        if listed == _rotated(every, layers) and layers % every == 0:
            return every
    if listed != [1] * layers:
        raise UserError(
            f"{origin}: no_rope_layers is {listed}; zero supports only a regular pattern, in which the last of every n "
            "layers has none"
        )
    return None


def _read_windows(origin: str, config: Mapping[str, Any], architecture: Architecture, layers: int) -> tuple[int, ...]:
    """The shortest pattern that gives the windows of all layers."""
    kind = architecture.windows
    window = int(config.get("window_size" if kind == "attention_types" else "sliding_window") or 0)
    if kind == "sliding_window":
        expected = ["sliding_attention" if window else "full_attention"] * layers
        if config.get("layer_types") not in (None, expected):
            raise UserError(f"{origin}: layer_types is {config['layer_types']}; zero supports only {expected}")
        return (window,)
    if kind == "attention_types":
        parts = config.get("attention_types") or []
        names = [name for part, times in parts for name in part * min(times, layers + 1)]  # not any number of times
        if others := sorted({*names} - {"global", "local"}):
            raise UserError(f"{origin}: attention_types names {others[0]!r}; expected 'global' and 'local'")
        if config.get("attention_layers") not in (None, names):
            raise UserError(f"{origin}: attention_layers is not what attention_types makes, {names}")
        local = "local"
    else:
        local = "sliding_attention"
        every = int(config.get("sliding_window_pattern", architecture.window_period))
        by_default = [local if (layer + 1) % every else "full_attention" for layer in range(layers)]
        names = list(config.get("layer_types") or by_default)
        if others := sorted({*names} - {local, "full_attention"}):
            raise UserError(f"{origin}: layer_types names {others[0]!r}; expected {local!r} and 'full_attention'")
    if len(names) != layers:
        raise UserError(f"{origin}: {kind} names {len(names)} layers, the weights have {layers}")
    windows = tuple(window if name == local else 0 for name in names)
    pattern = shortest_pattern(windows)
    return windows if layers % len(pattern) else pattern


def _write_windows(kind: str, model_config: GPTConfig) -> dict[str, Any]:
    window = max(model_config.windows)
    periods = model_config.N // len(model_config.windows)
    match kind:
        case "sliding_window":
            return {"sliding_window": window or None}
        case "attention_types":
            names = ["local" if window else "global" for window in model_config.windows]
            return {"attention_types": [[names, periods]], "window_size": window or 256}
        case "layer_types":
            names = ["sliding_attention" if window else "full_attention" for window in model_config.windows]
            return {"layer_types": names * periods, "sliding_window": window or None}
    return {}
