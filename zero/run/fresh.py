"""The state of a fresh start."""

from __future__ import annotations

from pathlib import Path

import jax
import numpy as np

from zero.exchange import warm_start
from zero.exchange.peft_folder import read_peft
from zero.exchange.warm_start import described_folder
from zero.job.job import Job
from zero.partition.layout import PyTree
from zero.run.frozen_base import fit_to_base
from zero.run.restore import TrainingPosition
from zero.training import tuning
from zero.training.parts import TrainState
from zero.training.tuning import Adapted


def new_state(
    seed: int, weights: warm_start.Keys, adapted: tuning.Keys, job: Job, frozen: PyTree, position: TrainingPosition
) -> TrainState:
    """The state of a fresh start, created in shards on the devices, with random weights or those of a warm start.

    The position records the dtype and architecture of the Hugging Face folder of a warm start.
    """
    programs = job.programs
    model = job.model
    place = str(weights.model_path)
    if weights.warm_start or model.tuning is not None:
        position.brought = described_folder(place)
    if isinstance(adapted, Adapted) and adapted.adapter is not None:
        return programs.start(read_peft(Path(adapted.adapter), model))
    if weights.warm_start and model.tuning is None:
        return programs.start(warm_start.warm_start(place, model, ema=weights.starts_from_average))
    if model.tuning is None:
        return programs.fresh(np.full(jax.local_device_count(), seed, np.uint32))
    key = np.asarray(jax.random.key_data(jax.random.key(seed)))
    new = programs.init(np.stack([key] * jax.local_device_count()))
    return programs.start(fit_to_base(new, frozen, model))
