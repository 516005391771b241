"""A hub of models on this machine, which speaks as much of the Hugging Face hub's protocol as a download needs.

- `serve(folder)`: a context manager that yields a `Hub`; the folders `OWNER/NAME/REVISION` in it are the models.
- `point_to(hub, cache, patch)`: has huggingface_hub use it, and a cache of its own.
- `Hub.commit(name, revision)`: the commit of a revision. `Hub.requests`: the paths asked for, in order.
"""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest


@dataclass
class Hub:
    folder: Path
    url: str = ""
    requests: list[str] = field(default_factory=list)

    def commit(self, name: str, revision: str) -> str:
        return hashlib.sha1(f"{name}@{revision}".encode()).hexdigest()

    def files(self, name: str, revision: str) -> dict[str, bytes] | None:
        """The files of a revision, which may be its commit; None for none."""
        for place in (self.folder / name).glob("*"):
            if revision in (place.name, self.commit(name, place.name)):
                return {str(path.relative_to(place)): path.read_bytes() for path in place.rglob("*") if path.is_file()}
        return None

    def answer(self, path: str) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and content for a path."""
        parts = path.strip("/").split("/")
        is_api = parts[:2] == ["api", "models"]
        owner, name, kind, revision, *rest = (parts[2:] if is_api else parts) + [""] * 4
        model = f"{owner}/{name}"
        if not (self.folder / model).is_dir():
            return 404, {"X-Error-Code": "RepoNotFound"}, b""
        files = self.files(model, revision)
        if files is None:
            return 404, {"X-Error-Code": "RevisionNotFound", "X-Error-Message": f"Invalid rev id: {revision}"}, b""
        known = [place.name for place in (self.folder / model).glob("*")]
        commit = next(c for r in known for c in [self.commit(model, r)] if revision in (r, c))
        if kind == "revision":
            content = {"id": model, "sha": commit, "siblings": [{"rfilename": file} for file in files]}
            return 200, {}, json.dumps(content).encode()
        if kind == "tree":
            folder = "/".join(part for part in rest if part)
            below = {f: x for f, x in files.items() if not folder or f.startswith(f"{folder}/")}
            if not below:
                return 404, {"X-Error-Code": "EntryNotFound"}, b""
            listed = [_listed(f, x) for f, x in below.items()]
            return 200, {}, json.dumps(listed).encode()
        data = files.get("/".join(part for part in rest if part))
        if data is None:
            return 404, {"X-Error-Code": "EntryNotFound"}, b""
        return 200, {"ETag": f'"{_sum(data)}"', "X-Repo-Commit": commit, "Accept-Ranges": "bytes"}, data


def _listed(file: str, data: bytes) -> dict[str, Any]:
    entry = {"type": "file", "path": file, "size": len(data), "oid": _sum(data)}
    if not file.endswith(".tar"):
        return entry
    sha256 = hashlib.sha256(data).hexdigest()
    return entry | {"oid": _sum(sha256.encode()), "lfs": {"oid": sha256, "size": len(data), "pointerSize": 134}}


def _sum(data: bytes) -> str:
    """The hash by which git names a file with these bytes."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


@contextmanager
def serve(folder: Path) -> Iterator[Hub]:
    hub = Hub(folder)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            path = urlsplit(self.path).path
            hub.requests.append(path)
            status, headers, data = hub.answer(path)
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(data)

        do_HEAD = do_GET

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    hub.url = "http://{}:{}".format(*server.server_address)
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def point_to(hub: Hub, cache: Path, patch: pytest.MonkeyPatch) -> None:
    """HF_ENDPOINT, and what HF_HUB_CACHE and HF_HUB_OFFLINE=0 say, which huggingface_hub read when it was imported."""
    from huggingface_hub import constants

    patch.setenv("HF_ENDPOINT", hub.url)
    patch.setattr(constants, "HF_HUB_CACHE", str(cache))
    patch.setattr(constants, "HF_HUB_OFFLINE", False)
