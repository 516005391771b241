"""Checkpoints that any number of devices and hosts can read, on disk or in a bucket."""
