"""Bytes on disks and in buckets, and what is parsed from them; knows no run."""
