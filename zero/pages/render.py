"""Pages from their templates (jinja2): one file each, without a server and without a network."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

SHARED = Path(__file__).parent / "parts"  # the style, macros and scripts that all pages have


def part(name: str, folder: Path = SHARED) -> Markup:
    """A script or a style sheet, as it is."""
    return Markup((folder / name).read_text(encoding="utf-8"))


def data_island(data: Any) -> Markup:
    r"""JSON inside a script element, which a `</script>` in a text cannot end.

    >>> print(data_island({"name": "</script>"}))
    {"name":"\u003c/script>"}
    """
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    return Markup(text.replace("<", "\\u003c"))


def render(template: Path, values: dict[str, Any]) -> str:
    """The page that a template makes of these values; all text in them is escaped. It may import shared macros."""
    return _environment(template.parent).get_template(template.name).render(values)


@cache
def _environment(folder: Path) -> Environment:
    return Environment(
        loader=FileSystemLoader([folder, SHARED]), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
