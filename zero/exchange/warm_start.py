"""Starts training from the weights of a run or of a Hugging Face folder, also of a model with fewer layers.

The weights of a run that trained adapters are its base's, with the adapters merged.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import zlib
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from zero.base.errors import UserError
from zero.base.keys import Check, Mistakes, key, not_empty
from zero.checkpoints.damage import MissingCheckpoint
from zero.corpus.text.hub import PREFIX
from zero.exchange.checkpoint_weights import SavedStep, check_unseen, read_place
from zero.exchange.hf_folder import CONFIG_FILE, HuggingFaceFolder
from zero.exchange.hub_folder import hub_folder
from zero.exchange.text_part import has_images, text_config
from zero.files.parsing import json_object
from zero.models.score_head import replaced_by_scores
from zero.partition.checksums import checksums
from zero.partition.layout import PyTree
from zero.partition.pmapped import pmap
from zero.record.run_files import split_step
from zero.training.ema import EMA
from zero.training.programs import repeat_layers
from zero.training.sharded_gpt import ShardedGPT
from zero.training.tuning import merge_shards

OTHER_BASE = "the adapters were trained for other weights"
log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class PathKeys:
    """Which weights are read, in section `model`."""

    model_path: str | None = key(
        None,
        not_empty(),
        "Where to load weights from; null: in mode=evaluate and mode=sample, the newest run.",
        "A run directory, RUN@STEP for one of its steps, a local Hugging Face folder, or a model on the hub, "
        "hf:NAME@REVISION; with warm_start also a directory of checkpoints.",
    )


@dataclasses.dataclass(frozen=True)
class WarmStartKeys(PathKeys):
    """Which weights training starts from, in section `model`."""

    warm_start: Any = key(
        False,
        Check(lambda value: value is True or value is False or value == EMA, "true, false or ema"),
        "Start from the weights of model_path with a fresh optimizer; ema: from the moving average of the weights "
        "that training.ema kept there.",
    )

    @property
    def starts_from_average(self) -> bool:
        """Whether a warm start takes the moving average of the weights of its source."""
        return bool(self.warm_start == EMA)

    def mistakes(self) -> Mistakes:
        if self.warm_start and not self.model_path:
            places = "a run, a directory of checkpoints or a Hugging Face folder"
            yield "model.model_path", f"{places}, as model.warm_start=true"

    def without_effect(self) -> Mistakes:
        if not self.warm_start:
            yield "model.model_path", "model.warm_start=false"


def warm_start(source: str, model: ShardedGPT, *, ema: bool = False, seed: int | None = None) -> PyTree:
    """Weights in shards for a pmap, from a Hugging Face folder, a run directory, or a directory of checkpoints.

    The folder may be named as a model of the hub, `hf:NAME@REVISION` (`hub_folder`); of the others the newest step is
    read, or with `RUN@STEP` that one. A source with fewer layers is grown (`repeated_layers`). With `ema` a run's
    moving average of the weights is taken. With a seed, fresh parts that it does not hold start with random weights.

    Raises:
      UserError: it holds no weights, or they do not fit the model; the message names them.
    """
    return read_weights(source, model, ema=ema, seed=seed)[0]


def read_weights(source: str, model: ShardedGPT, *, ema: bool = False, seed: int | None = None) -> tuple[PyTree, str]:
    """The weights of `warm_start`, and the place with the step or the commit that was read; raises as `warm_start`."""
    path = source
    known_as = source
    if source.startswith(PREFIX):
        path = str(hub_folder(source))
        known_as = f"{source.partition('@')[0]}@{Path(path).name}"
    if (Path(path) / CONFIG_FILE).is_file():
        if ema:
            raise UserError(f"{source}: a Hugging Face folder has no moving average of the weights")
        with HuggingFaceFolder(Path(path)) as folder:
            return _grown(path, folder.size, partial(folder.params, seed=seed), model), known_as

    def read(saved: SavedStep) -> tuple[PyTree, str]:
        weights = partial(weights_of_step, saved, within=saved.subtree(ema), seed=seed)
        grown = _grown(saved.origin, dataclasses.asdict(saved.size()), weights, model)
        return grown, f"{split_step(source)[0]}@{saved.step}"

    return read_place(source, read)


def _grown(origin: str, size: Mapping[str, Any], read: Callable[[ShardedGPT], PyTree], model: ShardedGPT) -> PyTree:
    """The result of `read` for the model at this size's depth, with layers repeated if the model is deeper."""
    check_unseen(origin, size, model.config)
    config = model.config
    has_pattern = len(config.windows) > 1 or len(config.mixers) > 1 or config.experts_every > 1
    if size["N"] != model.config.N and (has_pattern or config.first_dense or config.unrotated_every):
        raise UserError(f"{origin}: N={size['N']} different layers cannot be grown to N={model.config.N}")
    order = repeated_layers(size["N"], model.config.N, origin)
    params = read(dataclasses.replace(model, config=dataclasses.replace(model.config, N=size["N"])))
    log.info("weights from %s", origin)
    if size["N"] < model.config.N:
        log.info("grew from %d layers to %d, which repeat layers %s", size["N"], model.config.N, order)
        params = repeat_layers(params, order, model.axis)
    return params


def described_folder(source: str) -> dict[str, Any] | None:
    """What the config.json of a Hugging Face folder says of its weights; None for another source.

    Their dtype, the model_type of the text model, whether the folder's model also reads images, and all keys of the
    text model, which exports keep.
    """
    if source.startswith(PREFIX):
        source = str(hub_folder(source))
    path = Path(source) / CONFIG_FILE
    if not path.is_file():
        return None
    config = json_object(path.read_bytes(), str(path))
    text = text_config(str(path), config)
    return {
        "dtype": config.get("dtype") or config.get("torch_dtype"),
        "model_type": text.get("model_type"),
        "has_images": has_images(config),
        "config": text,
    }


def weights_of_step(saved: SavedStep, model: ShardedGPT, within: str, seed: int | None = None) -> PyTree:
    """Weights in shards for a pmap from a checkpoint; adapters are merged into the base that they were trained for.

    Raises as `SavedStep.restore`, and:
      UserError: the base is not at its place, or has changed.
    """
    tuning = saved.tuning()
    if tuning is None:
        return saved.restore(model, within, seed)
    tuned = dataclasses.replace(model, tuning=tuning)
    base = base_of(saved, tuned.base)
    known = saved.base()
    check_base(f"model.model_path={known['place']}", base_checksum(base, tuned), known)
    return merged_weights(base, saved.restore(tuned, within), tuned, model)


def base_of(saved: SavedStep, model: ShardedGPT) -> PyTree:
    """The weights under the adapters of a checkpoint, as `warm_start` gives them.

    Raises:
      UserError: they are not at their place any more, or do not fit the model.
    """
    known = saved.base()
    try:
        return warm_start(known["place"], model, ema=known["ema"], seed=0)  # adapters have what is fresh
    except MissingCheckpoint as error:
        raise UserError(f"{saved.origin}: its adapters were trained for {known['place']}: {error}") from error


def merged_weights(base: PyTree, adapters: PyTree, tuned: ShardedGPT, model: ShardedGPT) -> PyTree:
    """Weights in shards for a pmap of `model`, which has no adapters, from the weights of `tuned`, which has."""
    assert tuned.tuning is not None
    layout = tuned.base.layout
    merge = partial(merge_shards, layout=layout, low=tuned.layout, axis=model.axis, tuning=tuned.tuning)

    def merged(base: PyTree, adapters: PyTree) -> PyTree:
        params, collections = model.split(merge(base, adapters))
        return {**model.layout.map(lambda leaf, x: x.astype(leaf.dtype), params), **collections}

    return pmap(merged, model.axis.name)(base, adapters)


def base_checksum(base: PyTree, model: ShardedGPT) -> int:
    """A checksum of the weights under adapters, before they are coded; the same for any number of devices."""
    params, _ = model.base.split(base)
    sums = checksums(params, model.base.layout, model.axis)
    new = {name for name, own in model.base.axes.items() if own.fresh}  # trained whole
    new |= {name for name in sums if replaced_by_scores(name.partition("/")[0], model.config)}
    sums = {name: number for name, number in sums.items() if name not in new}
    return zlib.crc32(json.dumps(sums, sort_keys=True).encode())


def check_base(origin: str, checksum: int, saved: Mapping[str, Any] | None, otherwise: str = OTHER_BASE) -> None:
    """Raises UserError if the weights are not those that a run began with; the message is `origin: otherwise, ...`."""
    if saved is not None and saved["checksum"] != checksum:
        raise UserError(
            f"{origin}: {otherwise}, those of {saved['place']} with checksum {saved['checksum']:08x}; "
            f"these have {checksum:08x}"
        )


def repeated_layers(layers: int, deeper: int, origin: str) -> list[int]:
    """The layer of a model that each layer of a deeper one repeats.

    Source: Gopher (Rae et al., arXiv 2112.11446), appendix G.3.3: at twice the depth each layer is repeated twice, at
    4/3 of the depth the first of every three is, as in ZeRO-transformer's `extend_params.py` (at 7dcf6f4).

    Raises:
      UserError: the depth is neither a multiple nor 4/3 of `layers`; `origin` begins the message.

    >>> repeated_layers(3, 6, ""), repeated_layers(3, 4, "")
    ([0, 0, 1, 1, 2, 2], [0, 0, 1, 2])
    """
    if deeper % layers and 3 * deeper != 4 * layers:
        raise UserError(
            f"{origin}: N={layers} layers cannot be grown to N={deeper}, only to a multiple or to 4/3 of {layers}"
        )
    return [i * layers // deeper for i in range(deeper)]
