"""Bytes on disks and in buckets, and parsing; knows nothing about runs."""
