"""The kinds of buckets, by the scheme of a URL."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, NoReturn, Protocol

from zero.base.errors import UserError
from zero.files.storage import fsspec_store, gcs
from zero.files.storage.fsspec_store import FsspecStore
from zero.files.storage.objects import Checksum, ObjectStat


class Store(Protocol):
    """A kind of bucket: a module of functions, or an `FsspecStore`."""

    def stat(self, url: str | Path) -> ObjectStat: ...
    def list_stats(self, directory: str | Path, is_deep: bool) -> dict[str, ObjectStat]: ...
    def read(self, url: str | Path, known: ObjectStat) -> bytes: ...
    def read_range(self, url: str | Path, known: ObjectStat, start: int, stop: int) -> bytes: ...
    def write(self, url: str | Path, data: bytes) -> None: ...
    def copy(self, url: str | Path, target: str | Path) -> None: ...
    def remove(self, url: str | Path) -> None: ...


class S3(FsspecStore):
    """Amazon S3, and stores that speak its protocol (AWS_ENDPOINT_URL)."""

    package, extra = "s3fs", "s3"
    access = (
        "the credentials of an account with access to it (AWS_PROFILE, or AWS_ACCESS_KEY_ID and its secret), and "
        "AWS_REQUEST_PAYER=requester if it bills its readers"
    )

    def options(self) -> dict[str, Any]:
        from botocore.session import Session

        connect, read = fsspec_store.TIMEOUT
        # FsspecStore repeats requests, and stops after a time rather than after a number.
        config = {"connect_timeout": connect, "read_timeout": read, "retries": {"total_max_attempts": 1}}
        anonymous = Session().get_credentials() is None
        return {"config_kwargs": config, "anon": anonymous, "requester_pays": bool(_payer())}

    def info(self, files: Any, path: str) -> dict[str, Any]:
        """The answer to HEAD: unlike the `info` of s3fs it tells of encryption."""
        bucket, key, _ = files.split_path(path)
        answer = files.call_s3("head_object", Bucket=bucket, Key=key, **_payer())
        return answer | {"size": answer["ContentLength"]}

    def object_stat(self, info: dict[str, Any]) -> ObjectStat:
        """An ETag is the MD5 unless it was uploaded in parts, or encrypted with another key than the store's own."""
        tag = info["ETag"].strip('"')
        is_md5 = len(tag) == 32 and info.get("ServerSideEncryption", "AES256") == "AES256"
        return ObjectStat(info["size"], tag, Checksum("md5", tag) if is_md5 else None)


def _payer() -> dict[str, str]:
    """The argument of requests to a bucket that bills those who read it; the environment says whether to pay."""
    payer = os.environ.get("AWS_REQUEST_PAYER")
    if not payer:
        return {}
    return {"RequestPayer": payer}


class Azure(FsspecStore):
    """Azure Blob Storage."""

    package, extra = "adlfs", "azure"
    access = "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY, or AZURE_STORAGE_ANON=false after az login"

    def options(self) -> dict[str, Any]:
        connect, read = fsspec_store.TIMEOUT
        return {"connection_timeout": connect, "read_timeout": read}

    def object_stat(self, info: dict[str, Any]) -> ObjectStat:
        """Whether there is an MD5 depends on the program that uploaded the object."""
        md5 = (info.get("content_settings") or {}).get("content_md5")
        return ObjectStat(info["size"], info["etag"], Checksum("md5", bytes(md5).hex()) if md5 else None)


class Hub(FsspecStore):
    """Repositories of the Hugging Face hub, to be read only: each write would be a commit."""

    package, extra = "huggingface_hub", "hub"
    access = "HF_TOKEN of an account with access to it"
    is_threadsafe = False

    def options(self) -> dict[str, Any]:
        return {"endpoint": os.environ.get("HF_ENDPOINT")}

    def range_options(self) -> dict[str, Any]:
        return {"cache_type": "none"}  # else it reads ahead, and throws away what no later range shares

    def object_stat(self, info: dict[str, Any]) -> ObjectStat:
        if large := info.get("lfs"):
            return ObjectStat(info["size"], info["blob_id"], Checksum("sha256", large["sha256"]))
        return ObjectStat(info["size"], info["blob_id"], Checksum("sha1 of the git blob", info["blob_id"]))

    def write(self, url: str | Path, data: bytes) -> NoReturn:
        raise UserError(
            f"{url}: zero reads the hub but does not write to it, because each file would be a commit; use `hf upload` "
            "at the end"
        )

    def copy(self, url: str | Path, target: str | Path) -> NoReturn:
        self.write(target, b"")

    def remove(self, url: str | Path) -> NoReturn:
        self.write(url, b"")


STORES: dict[str, Store] = {"gs": gcs, "s3": S3(), "az": Azure(), "abfs": Azure(), "hf": Hub()}
