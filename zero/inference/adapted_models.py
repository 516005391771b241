"""Several sets of adapters for one base: the base is read once, and each set is merged into a copy of it in turn."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from zero.base.errors import UserError
from zero.corpus.text.tokenizers import Tokenizer, load_tokenizer
from zero.exchange.checkpoint_weights import SavedStep, open_checkpoints, read_place, read_step
from zero.exchange.hub_model import is_folder
from zero.exchange.peft_folder import CONFIG_FILE, peft_adapters, read_peft
from zero.exchange.warm_start import PathKeys, base_checksum, base_of, check_base, merged_weights, warm_start
from zero.inference.trained_model import SavedData, TrainedModel
from zero.partition.layout import PyTree
from zero.partition.pmapped import pmap
from zero.training.sharded_gpt import ShardedGPT
from zero.training.tuning import Tuning


def adapted_models(
    sources: Sequence[str], path: PathKeys, data: SavedData, model: ShardedGPT, ema: bool
) -> Iterator[tuple[str, TrainedModel]]:
    """Each source of adapters, a run or a PEFT folder, with the model that has its adapters merged.

    The base is the base of the run at `model.model_path`, or that run's weights if it trained all. The devices hold it
    beside the merged weights.

    Args:
      ema: whether the base is the moving average of the run's weights.

    Raises:
      UserError: a source has no adapters, or adapters for another base, or its tokenizer differs from the run's.
    """
    tokenizer = load_tokenizer(data.tokenizer)
    base = _base(str(path.model_path), data, ema, replace(model, master_dtype="float32"), tokenizer)
    for source in sources:
        read = _folder_adapters if (Path(source) / CONFIG_FILE).is_file() else _run_adapters
        params, step = read(source, base, model)
        yield source, TrainedModel(model, params, tokenizer, step)
        del params  # before the next set is merged


def _base(source: str, data: SavedData, ema: bool, model: ShardedGPT, tokenizer: Tokenizer) -> PyTree:
    """The weights that all adapters belong to, in float32."""
    if is_folder(Path(source)):
        return warm_start(source, model)

    def read(saved: SavedStep) -> PyTree:
        saved.tokenizer().check(saved.origin, tokenizer)
        saved.check_size(model.config)
        if saved.tuning() is None:
            return saved.restore(model, saved.subtree(ema))
        return base_of(saved, model)

    with open_checkpoints(source) as checkpoints:
        if data.resume_step is not None:
            checkpoints.choose(data.resume_step)
        return read_step(checkpoints, data.resume_step, read)


def _in_dtypes_of_run(base: PyTree, tuned: ShardedGPT) -> PyTree:
    """The base in the dtypes in which this run held it."""
    params, collections = tuned.base.split(base)
    layout = tuned.base.layout
    cast: Any = pmap(lambda params: layout.map(lambda leaf, x: x.astype(leaf.dtype), params), tuned.axis.name)
    return {**cast(params), **collections}


def _run_adapters(source: str, base: PyTree, model: ShardedGPT) -> tuple[PyTree, int | None]:
    def read(saved: SavedStep) -> tuple[PyTree, int]:
        tuning = saved.tuning()
        if tuning is None:
            raise UserError(f"evaluate.adapters: {source} trained all weights; expected a run of adapters, or a folder")
        saved.check_size(model.config)
        tuned = replace(model, tuning=tuning)
        base_of_run = _in_dtypes_of_run(base, tuned)
        check_base(f"evaluate.adapters={source}", base_checksum(base_of_run, tuned), saved.base())
        adapters = saved.restore(tuned, saved.subtree(ema=False))
        return merged_weights(base_of_run, adapters, tuned, model), saved.step

    return read_place(source, read)


def _folder_adapters(source: str, base: PyTree, model: ShardedGPT) -> tuple[PyTree, int | None]:
    tuned = replace(model, tuning=Tuning(peft_adapters(Path(source), model.config)))
    return merged_weights(_in_dtypes_of_run(base, tuned), read_peft(Path(source), tuned), tuned, model), None
