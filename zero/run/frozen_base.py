"""Loads weights that a run never changes: the frozen base of adapters, or the reference of an objective."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from zero.base.errors import UserError
from zero.checkpoints.damage import MissingCheckpoint
from zero.corpus.text.hub import PREFIX
from zero.exchange.hub_model import is_folder, open_hf_config
from zero.exchange.warm_start import OTHER_BASE, WarmStartKeys, base_checksum, check_base, read_weights
from zero.models.adapters import COPY
from zero.models.config import HEAD, VOCABULARY
from zero.partition.layout import PyTree
from zero.partition.pmapped import pmap
from zero.record.run_files import split_step
from zero.run.restore import TrainingPosition
from zero.training.sharded_gpt import ShardedGPT
from zero.training.tuning import neutral_shards, quantize_shards


def load_unchanged(
    named: str,
    from_average: bool,
    model: ShardedGPT,
    position: TrainingPosition,
    otherwise: str = OTHER_BASE,
    seed: int | None = None,
) -> PyTree:
    """The weights at a `model.model_path`, in shards for a pmap of the model without adapters.

    The position, and with it every checkpoint, records their location with the step or commit, and their checksum. A
    resume reads the same step, even if the source has trained further.

    Args:
      from_average: whether a fresh run takes the moving average of these weights.
      seed: of fresh parts that they lack, as for `warm_start`.

    Raises:
      UserError: the weights have changed since the run began, or are gone; the message includes `otherwise`.
    """
    known = position.base
    source = named if known is None else _known_place(named, known)
    ema = from_average if known is None else known["ema"]
    try:
        weights, source = read_weights(source, model.base, ema=ema, seed=seed)
    except MissingCheckpoint as error:
        raise UserError(f"model.model_path={source}: {error}") from error
    checksum = base_checksum(weights, model)
    check_base(f"model.model_path={source}", checksum, known, otherwise)
    position.base = {"named": named, "place": source, "ema": ema, "checksum": checksum}
    return weights


def _known_place(named: str, known: Mapping[str, Any]) -> str:
    """The location that the run began with; if the location has a new name, the same step there.

    >>> known = {"named": "runs/base", "place": "runs/base@4"}
    >>> _known_place("runs/base", known), _known_place("moved/base", known), _known_place("moved/base@6", known)
    ('runs/base@4', 'moved/base@4', 'moved/base@6')
    """
    if named == known["named"]:
        return str(known["place"])
    _, step = split_step(known["place"])
    is_of_steps = not named.startswith(PREFIX) and not is_folder(Path(named))
    if is_of_steps and step is not None and split_step(named)[1] is None:
        return f"{named}@{step}"
    return named


def load_base(seed: int, weights: WarmStartKeys, model: ShardedGPT, position: TrainingPosition) -> PyTree:
    """Shards of the weights that a run does not train, in the dtype in which they are held; empty if it trains all.

    Leaves have a leading dimension of local devices. Raises like `load_unchanged`.
    """
    if model.tuning is None:
        return {}
    _check_new_tokens(str(weights.model_path), model, model.tuning.adapters.tables)
    base = load_unchanged(str(weights.model_path), weights.starts_from_average, model, position, seed=seed)
    if not model.tuning.is_quantized:
        return base
    layouts: Any = {"layout": model.base.layout, "quantized": model.frozen_layout}
    quantize = partial(quantize_shards, **layouts, axis=model.axis, codec=model.tuning.base_dtype)
    return pmap(quantize, model.axis.name)(base)


def _check_new_tokens(source: str, model: ShardedGPT, tables: Sequence[str]) -> None:
    """Raises UserError if the model has tokens that its base lacks and whose rows would not be trained."""
    folder = open_hf_config(source)
    missing = {VOCABULARY} if model.config.tied else {VOCABULARY, HEAD}
    if folder is None or model.config.vocab_size <= folder.size.vocab_size or missing <= {*tables}:
        return
    raise UserError(
        f"tuning.modules_to_save: expected [{', '.join(sorted(missing, reverse=True))}], as the model has "
        f"{model.config.vocab_size - folder.size.vocab_size} tokens that its base lacks, and adapters train none"
    )


def fit_to_base(adapters: PyTree, frozen: PyTree, model: ShardedGPT) -> PyTree:
    """New adapters that change nothing of the base, with its magnitudes and copies of what they train whole."""
    if model.tuning is None:
        return adapters
    has_copies = any(leaf.path[-1].startswith(COPY) for leaf in model.layout.leaves)
    if not (model.tuning.adapters.has_magnitudes or has_copies):
        return adapters
    layouts: Any = {"layout": model.base.layout, "quantized": model.frozen_layout, "low": model.layout}
    fit = partial(neutral_shards, **layouts, axis=model.axis, tuning=model.tuning)
    return pmap(fit, model.axis.name)(frozen, adapters)
