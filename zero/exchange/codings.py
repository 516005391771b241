"""How folders of quantized models store their weights: a table of what can be decoded while it is read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from zero.base.errors import UserError
from zero.exchange import mxfp4, scaled_blocks
from zero.exchange.stored_tensor import Stored

QUANTIZATION = "quantization_config"  # of config.json


class Coding(NamedTuple):
    """How weights are stored.

    Attributes:
      decoded: from unread tensors by name and the `quantization_config`, unread tensors as a model has them.
      mistakes: what a `quantization_config` asks for that `decoded` cannot read.
    """

    decoded: Callable[[Mapping[str, Stored], Mapping[str, Any]], dict[str, Stored]]
    mistakes: Callable[[Mapping[str, Any]], Iterator[str]]


# By the `quant_method` of a config.json.
CODINGS = {
    "fp8": Coding(scaled_blocks.decoded, scaled_blocks.mistakes),
    "mxfp4": Coding(mxfp4.decoded, lambda config: iter(())),
}


def coding_of(origin: str, config: Mapping[str, Any]) -> Coding | None:
    """The coding of a folder by its config.json; None if its weights are stored as they are.

    Raises:
      UserError: it is in no table; `origin` begins the message.
    """
    value = config.get(QUANTIZATION)
    if not value:
        return None
    method = value.get("quant_method") if isinstance(value, dict) else None
    remedy = "save the model dequantized (transformers: dequantize()), without this key"
    if method not in CODINGS:
        raise UserError(
            f"{origin}: {QUANTIZATION} has quant_method {method!r}; expected one of {', '.join(CODINGS)}. For another "
            f"one, {remedy}"
        )
    for mistake in CODINGS[method].mistakes(value):
        raise UserError(f"{origin}: {QUANTIZATION} has {mistake}. For another form, {remedy}")
    return CODINGS[method]
