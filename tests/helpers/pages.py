"""What a page says, read from its HTML.

- `facts`: the lines of its cards. `table`: the cells of a table. `plain`: the text of some HTML.
"""

import html
import re
from pathlib import Path


def facts(page: Path) -> dict[str, tuple[str, str]]:
    """The cards of a page: the value and the note of each name."""
    text = page.read_text(encoding="utf-8")
    found = re.findall(r"<dt>(.*?)</dt><dd><span[^>]*>(.*?)</span>(?: <small>(.*?)</small>)?</dd>", text)
    return {name: (plain(value), plain(note)) for name, value, note in found}


def table(page: Path, kind: str) -> list[list[str]]:
    """The cells of a table."""
    text = page.read_text(encoding="utf-8")
    (body,) = re.findall(rf'<table class="{kind}">.*?<tbody>(.*?)</tbody>', text, re.DOTALL)
    rows = re.findall(r"<tr[^>]*>(.*?)</tr>", body, re.DOTALL)
    return [[plain(cell) for cell in re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row)] for row in rows]


def plain(markup: str) -> str:
    """The text of some HTML."""
    return html.unescape(re.sub("<[^>]+>", "", markup))
