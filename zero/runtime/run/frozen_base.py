"""Loads the frozen base of adapters at the start of a run."""

from __future__ import annotations

from functools import partial
from typing import Any

from zero.partition.layout import PyTree
from zero.partition.pmapped import pmap
from zero.runtime.config.schema import Config
from zero.runtime.run.restore import TrainingPosition
from zero.runtime.weights.warm_start import base_checksum, check_base, warm_start
from zero.training.sharded_gpt import ShardedGPT
from zero.training.tuning import hold_shards, measure_shards


def load_base(config: Config, model: ShardedGPT, position: TrainingPosition) -> PyTree:
    """Shards of the weights that a run does not train, as they are held; empty where it trains all.

    Per device, with the leading dimension of local devices. Their place and checksum are noted in the position, which
    enters every checkpoint.

    Raises:
      UserError: they are not those of the run before.
    """
    if model.tuning is None:
        return {}
    place, ema = str(config.model.model_path), config.model.ema if position.base is None else position.base["ema"]
    base = warm_start(place, model.base, ema=ema)
    checksum = base_checksum(base, model)
    check_base(f"model.model_path={place}", checksum, position.base)
    position.base = {"place": place, "ema": ema, "checksum": checksum}
    if not model.tuning.is_coded:
        return base
    layouts: Any = {"layout": model.base.layout, "held": model.frozen_layout}
    coded = partial(hold_shards, **layouts, axis=model.axis, form=model.tuning.base_dtype)
    return pmap(coded, model.axis.name)(base)


def fit_to_base(adapters: PyTree, frozen: PyTree, model: ShardedGPT) -> PyTree:
    """New adapters, which change nothing of this base: magnitudes are the norms of its columns."""
    if model.tuning is None or not model.tuning.adapters.has_magnitudes:
        return adapters
    layouts: Any = {"layout": model.base.layout, "held": model.frozen_layout, "low": model.layout}
    measure = partial(measure_shards, **layouts, axis=model.axis, tuning=model.tuning)
    return pmap(measure, model.axis.name)(frozen, adapters)
