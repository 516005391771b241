"""What is set before the devices start."""

import os

import pytest

from zero.runtime.hosts.startup import set_overlap


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("", "--xla_enable_async_all_gather=false"),
        ("--xla_other=1", "--xla_other=1 --xla_enable_async_all_gather=false"),
        ("--xla_enable_async_all_gather=true", "--xla_enable_async_all_gather=true"),
    ],
)
def test_overlap_can_be_overridden(before: str, after: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The overlap of gathers is an option that users can override."""
    monkeypatch.setenv("LIBTPU_INIT_ARGS", before)
    set_overlap(overlap_gathers=False)
    assert os.environ["LIBTPU_INIT_ARGS"] == after
