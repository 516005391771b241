"""The table of branches, by the keys that make them."""

from __future__ import annotations

from typing import Any

from zero.models.branch import Branch
from zero.models.mtp import MTP
from zero.models.score_head import HEAD_OF_SCORES

BRANCHES: tuple[Branch, ...] = (MTP, HEAD_OF_SCORES)

LEFT_OUT = tuple(branch for branch in BRANCHES if branch.is_left_out)


def branches_of(config: Any) -> tuple[Branch, ...]:
    """The branches of a model."""
    return tuple(branch for branch in BRANCHES if getattr(config, branch.key))
