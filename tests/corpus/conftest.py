"""webdataset, which many of these tests import, without torch: else each process would take 510 MiB and 6 s more."""

import sys

import pytest


@pytest.fixture(scope="session", autouse=True)
def webdataset_without_torch() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "torch", None)
        import webdataset  # noqa: F401 -- once in a process
