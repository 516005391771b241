"""The text model of a Hugging Face folder whose model also reads images: its keys and its tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zero.base.errors import UserError
from zero.exchange.codings import QUANTIZATION
from zero.files.parsing import reading

# The type of a model with images, and what its text has where `text_config` says nothing, as in transformers' classes.
_WITH_IMAGES: Mapping[str, Mapping[str, Any]] = {
    "gemma3": {
        "model_type": "gemma3_text",
        "tie_word_embeddings": True,
        "vocab_size": 262_208,
        "max_position_embeddings": 131_072,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-6,
    },
    "mistral3": {"model_type": "mistral", "rms_norm_eps": 1e-6},
    "qwen3_5": {"model_type": "qwen3_5_text", "vocab_size": 248_320, "max_position_embeddings": 32_768},
    "qwen3_5_moe": {"model_type": "qwen3_5_moe_text", "vocab_size": 248_320, "max_position_embeddings": 32_768},
}
_SCALED = "ministral3"  # Mistral with queries that are scaled from a position on
_BETA, _ORIGINAL, _CONTEXT = "llama_4_scaling_beta", "original_max_position_embeddings", "max_position_embeddings"
BESIDE_IMAGES = "model.language_model."  # how the names of a text model's modules begin in such a model
# How the names of a text model's tensors begin in such folders, and in a folder of the text alone.
_PREFIXES = {
    "language_model.model.": "model.",
    BESIDE_IMAGES: "model.",
    "language_model.lm_head.": "lm_head.",
}


def has_images(config: Mapping[str, Any]) -> bool:
    """Whether a config.json is of a model with images whose text is read."""
    model_type = config.get("model_type")
    return isinstance(model_type, str) and model_type in _WITH_IMAGES


def text_config(origin: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """The config.json of the text model: the whole file if the model has no images.

    Ministral 3 scales its queries from `original_max_position_embeddings` on: up to there it is Mistral, and this is
    the longest context.

    Raises:
      UserError: `text_config` has an unexpected form; `origin` begins the message.
    """
    with reading(f"{origin}: text_config has an unexpected form"):
        text = dict(config)
        if has_images(config):
            text = {**_WITH_IMAGES[config["model_type"]], **dict(config["text_config"])}
            # Those of the whole model replace the text's.
            text |= {key: config[key] for key in ("tie_word_embeddings", QUANTIZATION) if key in config}
        if text.get("model_type") != _SCALED:
            return text
        rope = dict(text["rope_parameters"])
        rope.pop(_BETA, None)
        rope.pop(_CONTEXT, None)
        original = int(rope[_ORIGINAL])
        context = min(int(text[_CONTEXT]), original)
        return {**text, "model_type": "mistral", "rope_parameters": rope, _CONTEXT: context}


def text_name(name: str) -> str | None:
    """The name of a text model's tensor in a folder of the text alone; None for one of images.

    >>> text_name("language_model.model.norm.weight"), text_name("lm_head.weight"), text_name("vision_tower.x")
    ('model.norm.weight', 'lm_head.weight', None)
    """
    for prefix, alone in _PREFIXES.items():
        if name.startswith(prefix):
            return alone + name.removeprefix(prefix)
    return name if name.startswith("lm_head.") else None


def name_beside_images(name: str) -> str:
    """The name that a text model's tensor has in transformers' model that also reads images.

    >>> name_beside_images("model.norm.weight"), name_beside_images("lm_head.weight")
    ('model.language_model.norm.weight', 'lm_head.weight')
    """
    if not name.startswith("model."):
        return name
    return f"{BESIDE_IMAGES}{name.removeprefix('model.')}"


def check_has_images(origin: str, config: Mapping[str, Any]) -> None:
    """Raises UserError for a config.json of a model without images; `origin` begins the message."""
    if not has_images(config):
        raise UserError(f"{origin}: model_type {config.get('model_type')!r} has no image part to keep beside its text")
