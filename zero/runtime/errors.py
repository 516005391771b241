"""Mistakes of the person at the keyboard, as opposed to faults of the program."""


class UserError(Exception):
    """A mistake of the person at the keyboard: shown as one line, without a traceback."""
