"""A file system in memory in place of Azure: it takes the arguments of adlfs, and tells of a file what adlfs tells."""

import hashlib
from typing import Any, ClassVar

import pytest
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.registry import _registry

from zero.files.storage import fsspec_store


class InMemory(MemoryFileSystem):
    protocol = "az"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]

    def __init__(self, connection_timeout: float, read_timeout: float, **options: Any) -> None:
        super().__init__(**options)

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return super()._strip_protocol(path.removeprefix("az://"))

    def info(self, path: str, **options: Any) -> dict[str, Any]:
        return self._completed(super().info(path, **options))

    def find(self, path: str, *args: Any, **options: Any) -> Any:
        return {name: self._completed(info) for name, info in super().find(path, *args, **options).items()}

    def ls(self, path: str, detail: bool = True, **options: Any) -> Any:
        entries = super().ls(path, detail=detail, **options)
        return [self._completed(info) for info in entries] if detail else entries

    def _completed(self, info: dict[str, Any]) -> dict[str, Any]:
        if info["type"] != "file":
            return info
        digest = hashlib.md5(self.store[info["name"]].getvalue(), usedforsecurity=False).digest()
        return info | {"etag": str(info["created"]), "content_settings": {"content_md5": bytearray(digest)}}


def use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(_registry, "az", InMemory)
    fsspec_store.file_system.cache_clear()
