"""Log messages from before the configuration is composed, which Hydra's logging does not show yet."""

from __future__ import annotations

import logging
from types import TracebackType


class EarlyMessages(logging.Handler):
    """Holds back what is logged in a `with` block until `show`, or until the block raises.

    So a command with a misspelled key says that alone, and not what the right one would do as well.
    """

    def __init__(self) -> None:
        super().__init__()
        self._records: list[logging.LogRecord] = []
        self._handlers: list[logging.Handler] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keeps the record."""
        self._records.append(record)

    def __enter__(self) -> None:
        root = logging.getLogger()
        self._handlers = root.handlers[:]
        root.handlers[:] = [self]

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        logging.getLogger().handlers[:] = self._handlers
        if error is not None:
            self.show()

    def show(self) -> None:
        """Logs what was held back, once."""
        for record in self._records:
            logging.getLogger(record.name).handle(record)
        self._records.clear()
