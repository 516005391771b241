"""All that touches the world: files, networks, processes, the terminal. One outside library a file."""


class UserError(Exception):
    """A mistake of the person at the keyboard: shown as one line, without a traceback."""
