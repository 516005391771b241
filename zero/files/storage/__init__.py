"""Files on local disks and in buckets, by path or URL."""

from zero.files.storage.failures import AccessDenied, NoSuchBucket, is_outage
from zero.files.storage.files import (
    RangeReader,
    blocks_of,
    exists,
    list_files,
    list_stats,
    move,
    open_reader,
    read_bytes,
    read_object,
    remove,
    remove_unfinished,
    replacing,
    stat,
    unfinished_directory,
    write,
    write_blocks,
)
from zero.files.storage.fsspec_store import DEADLINE, deadline_of
from zero.files.storage.urls import bucket, is_remote, is_root, join, parent, relative, scheme

__all__ = [
    "DEADLINE",
    "AccessDenied",
    "NoSuchBucket",
    "RangeReader",
    "blocks_of",
    "bucket",
    "deadline_of",
    "exists",
    "is_outage",
    "is_remote",
    "is_root",
    "join",
    "list_files",
    "list_stats",
    "move",
    "open_reader",
    "parent",
    "read_bytes",
    "read_object",
    "relative",
    "remove",
    "remove_unfinished",
    "replacing",
    "scheme",
    "stat",
    "unfinished_directory",
    "write",
    "write_blocks",
]
