"""The identity of stored scores, so that none is mistaken for another: DPO references, lines of `evaluate.follow`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from zero.training.sharded_gpt import ShardedGPT


def score_identity(keys: Mapping[str, Any], model: ShardedGPT) -> dict[str, Any]:
    """Everything that the scores of a text under given weights depend on, as JSON; the caller adds weights and texts.

    Args:
      keys: the values of the keys that change scores (`zero.base.keys.values_in_scores`).
    """
    return {"model": asdict(model.config), "keys": {**keys}, "arithmetic": model.arithmetic}
