"""The state of a fresh start."""

from __future__ import annotations

import logging
from pathlib import Path

import jax
import numpy as np

from zero.exchange import warm_start
from zero.exchange.peft_folder import read_peft
from zero.exchange.warm_start import WarmStartKeys, described_folder
from zero.job.job import Job
from zero.partition.layout import PyTree
from zero.run.frozen_base import fit_to_base
from zero.run.restore import TrainingPosition
from zero.training.parts import TrainState
from zero.training.tuning import Adapted, TuningKeys

log = logging.getLogger(__name__)
# Peak learning rates of conf/tune, by whether adapters are trained, and the optimizers whose steps they measure.
TUNING_RATES = {False: 3e-5, True: 2e-4}
_OF_ADAM = ("adamw", "ademamix", "lion")
_FAR = 10  # times such a rate


def warn_of_high_rate(optimizer: str, peak_rate: float, weights: WarmStartKeys, adapted: TuningKeys) -> None:
    """Warns if a warm start has the learning rate of pre-training: the loss falls while the model forgets."""
    is_adapted = isinstance(adapted, Adapted)
    usual = TUNING_RATES[is_adapted]
    if weights.warm_start and optimizer in _OF_ADAM and peak_rate > _FAR * usual:
        log.warning(
            "training.peak_learning_rate=%g is %.0f times the %g of +tune=%s: a pretrained model forgets at such rates",
            peak_rate,
            peak_rate / usual,
            usual,
            "lora" if is_adapted else "all",
        )


def new_state(
    seed: int, weights: WarmStartKeys, adapted: TuningKeys, job: Job, frozen: PyTree, position: TrainingPosition
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
        return programs.start(warm_start.warm_start(place, model, ema=weights.starts_from_average, seed=seed))
    if model.tuning is None:
        return programs.fresh(np.full(jax.local_device_count(), seed, np.uint32))
    key = np.asarray(jax.random.key_data(jax.random.key(seed)))
    new = programs.init(np.stack([key] * jax.local_device_count()))
    return programs.start(fit_to_base(new, frozen, model))
