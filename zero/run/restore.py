"""Restores a checkpoint: the state and the training position."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from typing import Any, TypedDict

from zero.base.errors import UserError
from zero.checkpoints.damage import DamagedCheckpoint
from zero.checkpoints.manager import Checkpoints
from zero.corpus.reading.loader import Cursor
from zero.exchange.checkpoint_weights import UNSEEN_IN_CHECKPOINTS, check_unseen, saved_step
from zero.models.config import GPTConfig
from zero.partition.pmapped import pmap
from zero.training.optimizers.optimizer import convert_state
from zero.training.parts import TrainState
from zero.training.state_storage import OnDevices
from zero.training.updates_by_part import PART_KEY

log = logging.getLogger(__name__)


class Pending(TypedDict):
    """Actions after a step that were due and may not have been done.

    Attributes:
      features: names, in the order of the actions.
      line: the metrics of the step so far.
    """

    features: list[str]
    line: dict[str, Any]


@dataclass
class TrainingPosition:
    """The position in the data and the counters, between two steps; part of a checkpoint."""

    global_rows: int  # per batch over all hosts, after all stages; fixed by the first checkpoint
    batch_stages: list[list[int]] = field(default_factory=list)  # [[steps, rows over all hosts], ...]; fixed as well
    step: int = 0
    cursor: Cursor | None = None  # includes the identity of the data
    skipped_rows: int = 0
    samples_checksum: int = 0
    pending: Pending | None = None  # actions after this step that were due and may not have been done
    base: dict[str, Any] | None = None  # location and checksum of the weights that adapters belong to
    columns: dict[str, str] = field(default_factory=dict)  # the identity of their values, by source
    remat: str | None = None  # what `zero.remat` was or chose
    tokenizer: str | None = None  # its name, with a digest
    beside_tokenizer: dict[str, Any] | None = None  # settings from the files beside it (`TokenizerIdentity`)
    brought: dict[str, Any] | None = (
        None  # dtype and model_type of the folder that the run started from; exports keep them
    )
    validation: dict[str, list[Any]] | None = None  # by set, the contents of its index files


def restore(
    source: Checkpoints,
    step: int | None,
    model_config: GPTConfig,
    storage: OnDevices,
    is_own: bool,
    check: Callable[[TrainingPosition], None],
    **adam: float,
) -> tuple[TrainingPosition, TrainState]:
    """Restores the checkpoint of `step`, or the newest readable one. Damaged ones of this run are set aside.

    Args:
      source: the checkpoints of this run, or of the run that it forks from.
      model_config: the model's size; its entry in conf/model_config.yaml may have changed.
      storage: where the state is between steps.
      adam: decay rates and epsilon that differ from AdamW's defaults; 8-bit moments depend on them.
      check: raises UserError for a position that cannot be continued here, before the state is read.
      is_own: whether the checkpoints belong to this run; another run's stay unchanged.

    Raises:
      UserError: there is no such checkpoint, none can be read, or it belongs to another model; or its dtypes differ and
        part of the state is in host memory.
    """
    layout = storage.layout
    newest = source.choose(step)
    damaged = []
    for candidate in [newest] if step is not None else source.steps()[::-1]:
        try:
            checkpoint = saved_step(source, candidate)
            origin = checkpoint.origin
            meta = checkpoint.meta
            position = _position(origin, meta)
            check(position)
            trained = asdict(checkpoint.size())
            saved = source.as_saved(candidate, layout)
            saved_storage = replace(storage, layout=saved)
            saved_storage.check_conversion(layout, origin)
            whole = source.restore(candidate, saved, storage.axis, targets=saved_storage.targets())
            also = ("parametrization", "mup_base_width", PART_KEY, *UNSEEN_IN_CHECKPOINTS)
            check_unseen(origin, trained, model_config, also=also)
            state = saved_storage.from_global(whole)
            sums, _ = saved_storage.examine(state)
            bad = [name for name, saved in meta["checksums"].items() if sums[name] != saved]
            if bad:
                del state  # before the next one is read
                raise DamagedCheckpoint(f"checkpoint {origin}: {', '.join(bad)} differs from what was saved")
        except DamagedCheckpoint as error:
            if step is not None:
                raise
            log.error("%s; trying the previous one", error)
            damaged.append(candidate)
            continue
        for number in damaged if is_own else []:
            source.set_aside(number)
        log.info("resumed from step %d of %s", candidate, source.directory)
        if changed := [key for key, value in asdict(model_config).items() if value != trained[key]]:
            values = ", ".join(f"{key} from {trained[key]} to {getattr(model_config, key)}" for key in changed)
            log.warning("the model's entry in conf/model_config.yaml has changed since then: %s", values)
        if saved != layout:
            changes = {
                f"{old.path[0]} from {old.dtype.name} to {new.dtype.name}"
                for old, new in zip(saved.leaves, layout.leaves, strict=True)
                if old.dtype != new.dtype
            }
            log.info("the state is held in other dtypes from now on: %s", ", ".join(sorted(changes)))
            state = pmap(partial(convert_state, layout=layout, **adam), storage.axis.name, donate_argnums=0)(state)
        return position, state
    raise UserError(f"{source.directory}: no checkpoint can be read; see the lines above")


def _position(origin: str, meta: dict[str, Any]) -> TrainingPosition:
    known = {field.name for field in fields(TrainingPosition)}
    try:
        return TrainingPosition(**{key: value for key, value in meta.items() if key in known})
    except TypeError as error:
        raise DamagedCheckpoint(f"checkpoint {origin}: its metadata has no position: {error}") from error
