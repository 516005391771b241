"""Values as the command line takes them (hydra)."""

from __future__ import annotations

from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Quote, QuotedString
from hydra.errors import HydraException

from zero.base.keys import shown
from zero.config.files import literal


def override_value(value: Any) -> str:
    r"""A value in the syntax of Hydra's overrides.

    >>> override_value([{"index": "a.index", "weight": 0.7}]), override_value("a, b"), override_value("1_1b")
    ('[{index:a.index,weight:0.7}]', "'a, b'", '1_1b')
    >>> print(override_value("${oc.env:HOME}"))
    '\${oc.env:HOME}'
    """
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{override_value(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(override_value, value)) + "]"
    if not isinstance(value, str):
        return shown(value)
    try:
        is_plain = OverridesParser.create().parse_override(f"key={value}").value() == literal(value)
    except HydraException:
        is_plain = False
    if is_plain:
        return value
    return QuotedString(literal(value), Quote.single).with_quotes()
