"""Loads the weights that a run needs unchanged: the frozen base of adapters, or the reference of an objective."""

from __future__ import annotations

from functools import partial
from typing import Any

from zero.config.schema import Config
from zero.exchange.warm_start import OTHER_BASE, base_checksum, check_base, warm_start
from zero.partition.layout import PyTree
from zero.partition.pmapped import pmap
from zero.run.restore import TrainingPosition
from zero.training.sharded_gpt import ShardedGPT
from zero.training.tuning import hold_shards, neutral_shards


def load_unchanged(
    config: Config, model: ShardedGPT, position: TrainingPosition, otherwise: str = OTHER_BASE
) -> PyTree:
    """The weights `model.model_path`, in shards for a pmap of the model without adapters.

    Their place and checksum are noted in the position, which enters every checkpoint.

    Raises:
      UserError: they are not those of the run before; the message has `otherwise`.
    """
    place = str(config.model.model_path)
    ema = config.model.starts_from_average if position.base is None else position.base["ema"]
    weights = warm_start(place, model.base, ema=ema)
    checksum = base_checksum(weights, model)
    check_base(f"model.model_path={place}", checksum, position.base, otherwise)
    position.base = {"place": place, "ema": ema, "checksum": checksum}
    return weights


def load_base(config: Config, model: ShardedGPT, position: TrainingPosition) -> PyTree:
    """Shards of the weights that a run does not train, as they are held; empty where it trains all.

    Per device, with the leading dimension of local devices; raises as `load_unchanged`.
    """
    if model.tuning is None:
        return {}
    base = load_unchanged(config, model, position)
    if not model.tuning.is_coded:
        return base
    layouts: Any = {"layout": model.base.layout, "held": model.frozen_layout}
    coded = partial(hold_shards, **layouts, axis=model.axis, form=model.tuning.base_dtype)
    return pmap(coded, model.axis.name)(base)


def fit_to_base(adapters: PyTree, frozen: PyTree, model: ShardedGPT) -> PyTree:
    """New adapters, which change nothing of this base: its magnitudes, and copies of its tables."""
    if model.tuning is None or not (model.tuning.adapters.has_magnitudes or model.tuning.adapters.tables):
        return adapters
    layouts: Any = {"layout": model.base.layout, "held": model.frozen_layout, "low": model.layout}
    fit = partial(neutral_shards, **layouts, axis=model.axis, tuning=model.tuning)
    return pmap(fit, model.axis.name)(frozen, adapters)
