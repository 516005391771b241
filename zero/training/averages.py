"""Averages that follow the parameters, by name. A new average is a file and an entry of this dictionary."""

from __future__ import annotations

from zero.models.collections import Collection
from zero.training.ema import EMA, make_ema
from zero.training.parts import Average, StepOptions
from zero.training.sharded_gpt import ShardedGPT


def averages_of(model: ShardedGPT, options: StepOptions | None = None) -> dict[str, Average]:
    """The averages of the model's collections and of the options."""
    averages = {name: _follow(name, collection) for name, collection in model.collections.items()}
    if options is not None and options.ema_decay is not None:
        averages[EMA] = make_ema(options.ema_decay)
    return averages


def _follow(name: str, collection: Collection) -> Average:
    """An average that applies the update rule of one of the model's collections."""
    return Average(
        init=lambda params, collections: collections[name],
        update=lambda state, result, updates, key: collection.update(state, result.collection_gradients[name], key),
    )
