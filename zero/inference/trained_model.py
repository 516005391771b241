"""A trained model, opened from the checkpoint of a run."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax

from zero.base.errors import UserError
from zero.base.keys import Mistakes, key, one_of
from zero.base.plural import counted
from zero.checkpoints.manager import CheckpointKeys, Checkpoints
from zero.corpus.text.tokenizers import Tokenizer, load_tokenizer
from zero.exchange.checkpoint_weights import SavedStep, read_step
from zero.exchange.hub_model import is_folder
from zero.exchange.warm_start import PathKeys, warm_start, weights_of_step
from zero.hosts import startup
from zero.job.devices import make_axis
from zero.job.model import AttentionKeys, RowKeys, make_model
from zero.job.sharding import WeightKeys
from zero.models.adapters import Adapters
from zero.models.config import GPTConfig
from zero.partition.collectives.axis import Axis
from zero.partition.layout import Layout, PyTree
from zero.partition.pmapped import pmap
from zero.partition.stages import gather
from zero.record.run_files import saved_checkpoint_directory
from zero.training.sharded_gpt import ShardedGPT
from zero.training.tuning import Tuning, quantize_shards

log = logging.getLogger(__name__)


IN_INT8 = Tuning(Adapters(1, 1.0, targets=()), "int8")  # trains nothing: all weights are a base, held in int8


@dataclass(frozen=True)
class HeldWeights:
    """How a trained model is held: keys of each mode that opens one."""

    ema: bool = key(False, None, "Use the moving average of the weights that training.ema has kept.", in_scores=True)
    replicate: bool | None = key(
        None,
        None,
        "true: whole weights on each device; false: sharded; null: true if two copies fit.",
        in_scores=True,
    )
    weight_dtype: str = key(
        "auto",
        one_of("auto", "int8"),
        "Dtype of the layers' weights on the devices: auto, zero.master_dtype; or int8 in blocks of 64 with a scale, "
        "with the vocabulary in bfloat16.",
        in_scores=True,
    )

    def mistakes(self, mode: str, model_config: GPTConfig, model_label: str, tensor_shards: int) -> Mistakes:
        """The models and keys that do not allow holding weights as codes."""
        if self.weight_dtype == "auto":
            return
        if model_config.alone is not None:
            yield f"{mode}.weight_dtype", f"auto, as {model_label} has {model_config.alone.noun}"
        if tensor_shards > 1:
            yield f"{mode}.weight_dtype", f"auto, as zero.tensor_shards={tensor_shards} cuts blocks of codes"


@dataclass(frozen=True)
class SavedData(RowKeys, CheckpointKeys):
    """The keys that define a run's rows, and which of its checkpoints is read."""


class TrainedModel(NamedTuple):
    """A model with its weights on the devices; step is None if they are not from a checkpoint."""

    model: ShardedGPT
    params: PyTree
    tokenizer: Tokenizer
    step: int | None


def open_model(model: ShardedGPT, path: PathKeys, data: SavedData, ema: bool) -> TrainedModel:
    """A placed model with the weights of a checkpoint, or of a folder, at `model.model_path`.

    Args:
      ema: whether to use the moving average of the weights.
    """
    tokenizer = load_tokenizer(data.tokenizer)
    place = Path(str(path.model_path))
    if is_folder(place):
        check_vocabulary(data.tokenizer, tokenizer, model.config)
        return TrainedModel(model, placed_weights(partial(warm_start, str(place)), model), tokenizer, None)
    params, step = load_weights(place, model, data.resume_step, ema, tokenizer)
    return TrainedModel(model, params, tokenizer, step)


def placed_weights(read: Callable[[ShardedGPT], PyTree], model: ShardedGPT) -> PyTree:
    """The weights as the model holds them, in shards for a pmap. `read` returns them for a given model.

    Weights to be held in int8 are read in bfloat16, in shards, at any stage.
    """
    if model.tuning is None:
        return read(model)
    sharded = replace(model, stage=3)
    layout = sharded.frozen_layout

    def hold(weights: PyTree) -> PyTree:
        params, collections = sharded.base.split(weights)
        coded = quantize_shards(params, layout=sharded.base.layout, quantized=layout, axis=model.axis, codec="int8")
        return {**(coded if model.stage else gather(coded, layout, model.axis)), **collections}

    return pmap(hold, model.axis.name)(read(sharded.base))


def _layout(model: ShardedGPT) -> Layout:
    """The layout of the weights as they are held."""
    return model.layout if model.tuning is None else model.frozen_layout


def check_vocabulary(name: str, tokenizer: Tokenizer, model_config: GPTConfig) -> None:
    """Raises UserError if a folder's tokenizer has more tokens than its model."""
    if tokenizer.vocab_size > model_config.vocab_size:
        raise UserError(
            f"data.tokenizer={name}: has {tokenizer.vocab_size} tokens, but the model has {model_config.vocab_size}; "
            "use its own tokenizer"
        )


def place_model(
    model_config: GPTConfig, rows: int, attention: AttentionKeys, data: RowKeys, zero: WeightKeys, held: HeldWeights
) -> ShardedGPT:
    """The model of `open_model` placed on the devices, for `rows` rows at a time.

    Sharded by `zero.stage`; or whole on every device that has a row, if `replicate` of the mode is true, or null and
    two copies fit.
    """
    alone = zero.alone()  # for the current number of devices
    model = make_model(model_config, make_axis(alone), alone, attention, data)
    if held.weight_dtype != "auto":
        model = replace(model, tuning=IN_INT8)
    whole = _layout(model).whole().bytes_per_device()
    if held.replicate or (held.replicate is None and 2 * whole <= startup.device_memory()):
        devices = min(rows, jax.device_count()) if jax.process_count() == 1 else jax.device_count()
        model = replace(model, axis=Axis("zero", (1, devices)), stage=0)
    place = "sharded over" if model.stage else "whole on"
    log.info("%s bytes of weights, %s %s", f"{whole:,}", place, counted(model.axis.size, "device"))
    return model


def load_weights(
    run: Path, model: ShardedGPT, step: int | None, ema: bool = False, tokenizer: Tokenizer | None = None
) -> tuple[PyTree, int]:
    """A run's weights for these devices, in shards, and their step; `step` None reads the newest.

    `ema` selects the moving average of the parameters.

    Raises:
      UserError: the run has no such checkpoint, no average, another model, or another tokenizer.
    """

    def read(saved: SavedStep) -> tuple[PyTree, int]:
        if tokenizer is not None:
            saved.tokenizer().check(saved.origin, tokenizer)
        weights = placed_weights(partial(weights_of_step, saved, within=saved.subtree(ema)), model)
        saved.check_size(model.config)
        return weights, saved.step

    directory = saved_checkpoint_directory(run)
    with Checkpoints(directory, keep=None) as checkpoints:
        if step is not None:
            checkpoints.choose(step)
        weights, step = read_step(checkpoints, step, read)
    log.info("weights from step %d of %s", step, directory)
    return weights, step
