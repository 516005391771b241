"""A list of hosts and pages whose documents are left out: a line each, as in published block lists."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar
from urllib.parse import urlsplit

from zero.base.errors import UserError
from zero.corpus.format import directory
from zero.corpus.preparing.documents import Document, field_of

URL = "url"  # the field that holds a document's own


@dataclass(frozen=True)
class ListedUrls:
    """Leaves out documents of these hosts, those below them, and these pages.

    >>> judge = ListedUrls(frozenset(["bad.org", "good.org/page"]))
    >>> urls = ["https://www.bad.org/any", "http://notbad.org", "https://good.org/page", "https://good.org/other"]
    >>> [judge(Document("text", fields={"url": url})) for url in urls]
    [True, False, True, False]
    """

    listed: frozenset[str]

    fields: ClassVar[tuple[str, ...]] = (URL,)

    def __call__(self, document: Document) -> bool:
        parts = urlsplit(field_of(document, URL))
        host = (parts.hostname or "").removeprefix("www.")
        labels = host.split(".")
        hosts = {".".join(labels[first:]) for first in range(len(labels))}
        return bool(self.listed & (hosts | {host + parts.path.rstrip("/")}))


def listed_urls(value: str) -> ListedUrls:
    lines = directory.read(value).decode("utf-8", "replace").splitlines()
    entries = [line.strip().rstrip("/") for line in lines if line.strip() and not line.startswith("#")]
    if not entries:
        raise UserError("the list is empty; expected a host or a page in each line")
    without_scheme = [entry.partition("://")[2] if "://" in entry else entry for entry in entries]
    return ListedUrls(frozenset(entry.removeprefix("www.") for entry in without_scheme))
