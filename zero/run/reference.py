"""Log-probabilities by a reference model, computed once per corpus and stored beside its index file.

The reference is the model that training starts from. A file holds float32 `(rows, texts)`, in the order of the shards,
and ends with its SHA-256. Its name contains a digest of everything that the values depend on: the contents of weights,
model and shards, and the keys declared to change scores.
"""

from __future__ import annotations

import hashlib
import io
import json
import logging
import os
from contextlib import closing
from functools import cache
from typing import Any

import numpy as np
from jax import lax

from zero.base.errors import UserError
from zero.corpus.format import directory
from zero.corpus.format.index_files import Shards, read_index
from zero.corpus.format.one_host import looked_up
from zero.corpus.format.shards import RowFormat
from zero.corpus.reading.contents import contents_on_one_host
from zero.corpus.reading.loader import ONCE, Batching, Loader
from zero.corpus.reading.prefetch import prefetch
from zero.files import storage
from zero.files.parsing import reading
from zero.hosts import agreement, watchdog
from zero.inference.score_identity import score_identity
from zero.job.job import Job
from zero.partition.layout import PyTree
from zero.partition.pmapped import pmap
from zero.run.column import Column, ColumnInputs
from zero.run.frozen_base import load_unchanged
from zero.run.restore import TrainingPosition
from zero.training.host_rows import HostRows
from zero.training.objectives.objective import REFERENCE

_REMEDY = "remove it to have it computed again"
_ROUNDING = 1e-3  # by which the logarithm of a probability may be more than 0
log = logging.getLogger(__name__)


def reference_column(inputs: ColumnInputs, job: Job, position: TrainingPosition) -> Column:
    """The log-probabilities for each index file of the run; missing ones are computed and stored. All hosts call it.

    If the reference is the frozen base of adapters, which is on the devices anyway, they are computed for each batch
    instead. The position, and with it every checkpoint, records the location and checksum of the reference.

    Raises:
      UserError: the reference has changed since the run began, or a file cannot be read or written.
    """
    if job.model.tuning is not None:
        return Column(compute=lambda frozen, tokens: {REFERENCE.name: job.programs.reference(frozen, tokens)})

    @cache  # read on first use
    def reference() -> PyTree:
        return load_unchanged(
            inputs.weights, inputs.ema, job.model, position, "the run has other weights as its reference"
        )

    if position.base is None:
        reference()
    assert position.base is not None
    values_by_index = {index: _index_values(index, inputs, job, position, reference) for index in inputs.indices}
    return Column({index: {REFERENCE.name: values} for index, values in values_by_index.items()})


def _index_values(index: str, inputs: ColumnInputs, job: Job, position: TrainingPosition, reference: Any) -> np.ndarray:
    """The values of one index file, float32 `(rows, texts)`."""
    texts = job.objective.example.texts
    shards = read_index(index, on_one_host=agreement.on_host_0)
    rows = int(shards.rows.sum())
    path = _place(index, shards, inputs, job, position)
    exists = looked_up(agreement.on_host_0, f"log-probabilities of {index}", [path], lambda: storage.exists(path))
    (absent,) = agreement.sum_over_hosts(int(not exists))
    if absent:
        log.info("computing the log-probabilities of %d rows of %s under the reference", rows, index)
        values = _computed(index, rows, inputs, job, reference(), position.global_rows)
        with agreement.host_0_first():
            if not storage.exists(path):
                storage.remove_unfinished(storage.parent(path), os.path.basename(path))
                directory.write(path, _encoded(values))
    stored = _decoded(path, storage.read_bytes(path))
    if stored.shape != (rows, texts) or not (np.isfinite(stored) & (stored <= _ROUNDING)).all():
        raise UserError(f"{path}: expected logarithms of probabilities, of the shape {(rows, texts)}; {_REMEDY}")
    return stored.astype(np.float32)


def _encoded(values: np.ndarray) -> bytes:
    """A .npy file that ends with its SHA-256, which numpy does not read."""
    file = io.BytesIO()
    np.save(file, values, allow_pickle=False)
    return file.getvalue() + hashlib.sha256(file.getvalue()).digest()


def _decoded(path: str, data: bytes) -> np.ndarray:
    """Raises UserError if it is not an array, or its SHA-256 differs."""
    file = io.BytesIO(data)
    with reading(f"{path} is not a complete .npy array; {_REMEDY}"):
        stored: np.ndarray = np.load(file, allow_pickle=False)
    recorded = data[file.tell() :]
    if not recorded:
        log.warning("%s is of an earlier version, which stored no SHA-256: damage is not noticed; %s", path, _REMEDY)
    elif hashlib.sha256(data[: file.tell()]).digest() != recorded:
        raise UserError(f"{path}: other values than were stored, by their SHA-256; {_REMEDY}")
    return stored


def _place(index: str, shards: Shards, inputs: ColumnInputs, job: Job, position: TrainingPosition) -> str:
    """The path of the values, with a digest of everything that they depend on."""
    assert position.base is not None
    pairs = contents_on_one_host(index, shards, agreement.on_host_0)
    facts = {"weights": position.base["checksum"], "pairs": pairs, **score_identity(inputs.scores, job.model)}
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]
    return f"{index.removesuffix('.index')}.reference-{digest}.npy"


def _computed(index: str, rows: int, inputs: ColumnInputs, job: Job, weights: PyTree, global_rows: int) -> np.ndarray:
    model = job.model
    host_rows = HostRows.here(model.axis)
    example = job.objective.example
    computed = []
    loader = Loader(
        index,
        Batching(global_rows, host_rows.groups, host_rows.count),
        RowFormat(inputs.context, model.config.vocab_size, only_completions=True, example=example),
        ONCE,
        on_one_host=agreement.on_host_0,
    )
    name = model.axis.name
    firsts = np.asarray([group[0] for group in model.axis.row_groups()])
    gather = pmap(lambda x: lax.all_gather(x, name)[firsts].reshape(-1), name, out_axes=None)
    with closing(prefetch(loader.batches())) as batches:
        for batch in batches:
            texts = batch.tokens.reshape(-1, inputs.context)
            values = gather(job.programs.reference(weights, host_rows.split(texts)))
            computed.append(np.asarray(values).reshape(-1, example.texts))
            watchdog.progress()
    return np.concatenate(computed)[:rows]
