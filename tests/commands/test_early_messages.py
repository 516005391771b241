"""Log messages that wait until the configuration is composed."""

import logging

import pytest

from zero.commands.early_messages import EarlyMessages


def test_messages_wait(caplog: pytest.LogCaptureFixture) -> None:
    """They are logged once, when they are shown, or at an error of the block that they belong to."""
    messages = EarlyMessages()
    log = logging.getLogger("zero.run.find_run")
    with messages:
        log.warning("continues %s", "runs/x")
    assert not caplog.messages
    messages.show()
    messages.show()
    assert caplog.messages == ["continues runs/x"]
    with pytest.raises(ValueError, match="no such run"), messages:
        log.warning("skipped")
        raise ValueError("no such run")
    assert caplog.messages == ["continues runs/x", "skipped"]
