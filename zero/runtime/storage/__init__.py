"""Files on local disks and in buckets, by path or gs:// URL."""

from zero.runtime.storage.files import exists, list_files, move, open_reader, read_bytes, remove, write
from zero.runtime.storage.gcs import DEADLINE, AccessDenied, NoSuchBucket, is_outage
from zero.runtime.storage.urls import bucket, is_remote, join, parent

__all__ = [
    "DEADLINE",
    "AccessDenied",
    "NoSuchBucket",
    "bucket",
    "exists",
    "is_outage",
    "is_remote",
    "join",
    "list_files",
    "move",
    "open_reader",
    "parent",
    "read_bytes",
    "remove",
    "write",
]
