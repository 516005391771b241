"""The state of a run that starts afresh."""

from __future__ import annotations

from pathlib import Path

import jax
import numpy as np

from zero.config.schema import Config
from zero.exchange.peft_folder import read_peft
from zero.exchange.warm_start import described_folder, warm_start
from zero.job import Job
from zero.partition.layout import PyTree
from zero.run.frozen_base import fit_to_base
from zero.run.restore import TrainingPosition
from zero.training.parts import TrainState
from zero.training.tuning import Adapted


def new_state(config: Config, job: Job, frozen: PyTree, position: TrainingPosition) -> TrainState:
    """The state of a fresh start, made on the devices, in shards; its weights are random or those of a warm start.

    Dtype and architecture of the Hugging Face folder of a warm start are noted in the position.
    """
    programs = job.programs
    if config.model.warm_start or job.model.tuning is not None:
        position.brought = described_folder(str(config.model.model_path))
    if isinstance(config.tuning, Adapted) and config.tuning.adapter is not None:
        return programs.start(read_peft(Path(config.tuning.adapter), job.model))
    if config.model.warm_start and job.model.tuning is None:
        return programs.start(warm_start(str(config.model.model_path), job.model, ema=config.model.starts_from_average))
    if job.model.tuning is None:
        return programs.fresh(np.full(jax.local_device_count(), config.seed, np.uint32))
    key = np.asarray(jax.random.key_data(jax.random.key(config.seed)))
    new = programs.init(np.stack([key] * jax.local_device_count()))
    return programs.start(fit_to_base(new, frozen, job.model))
