"""Versions of installed packages."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

NOT_INSTALLED = "(a checkout that is not installed)"


def version_of(package: str) -> str:
    """The version of a package; zero itself may be a checkout that Python was only pointed at.

    >>> version_of("no-such-package")
    '(a checkout that is not installed)'
    """
    try:
        return version(package)
    except PackageNotFoundError:
        return NOT_INSTALLED
