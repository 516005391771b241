"""What stored scores are known by, so that none is taken for another: DPO references and lines of `evaluate.follow`."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from zero.config.keys import values_in_scores
from zero.config.schema import Config
from zero.training.sharded_gpt import ShardedGPT


def score_identity(config: Config, model: ShardedGPT) -> dict[str, Any]:
    """All that the scores of a text under given weights depend on, as JSON; its caller adds weights and texts."""
    return {"model": asdict(model.config), "keys": values_in_scores(config), "arithmetic": model.arithmetic}
