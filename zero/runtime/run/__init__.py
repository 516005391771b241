"""Runs in the file system: where they are, what one carries from step to step, and how one is resumed."""
