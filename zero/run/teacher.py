"""The teacher column: the teacher's most likely tokens at each position, stored by `mode=evaluate`."""

from __future__ import annotations

from collections.abc import Iterable

from zero.base.errors import UserError
from zero.corpus.format.index_files import read_index
from zero.corpus.format.top_tokens import LOG_PROBABILITIES, TOKENS, TopTokens, read_top_tokens
from zero.corpus.reading.contents import contents_on_one_host
from zero.hosts import agreement
from zero.job.job import Job
from zero.run.column import Column, ColumnInputs
from zero.run.restore import TrainingPosition


def teacher_column(inputs: ColumnInputs, job: Job, position: TrainingPosition) -> Column:
    """The tokens and log-probabilities stored beside each index file, `(rows, positions, K)`.

    Raises:
      UserError: there are none, or they belong to other rows, hold fewer tokens, or use a larger vocabulary.
    """
    (count,) = {entry.shape[0] for entry in job.objective.reads if entry.source == "teacher"}
    stored = {}
    digests = {}
    for index in inputs.indices:
        described, arrays = read_top_tokens(index)
        _check(index, described, inputs.context, count, job.model.config.vocab_size)
        stored[index] = {f"teacher/{name}": arrays[name].cut(count) for name in (TOKENS, LOG_PROBABILITIES)}
        digests[index] = described.sha256

    def identity(indices: Iterable[str]) -> str:
        return " ".join(sorted(digests[index] for index in indices))

    return Column(stored, identity=identity(inputs.training), sets_identity=identity(inputs.sets))


def _check(index: str, described: TopTokens, context: int, count: int, vocab_size: int) -> None:
    """Compares the stored values with the run."""
    place = f"the teacher's tokens beside {index}"
    shards = read_index(index, on_one_host=agreement.on_host_0)
    contents = contents_on_one_host(index, shards, agreement.on_host_0)
    if described.contents != list(contents):
        raise UserError(f"{place} are of other shards than it lists: write them again")
    if described.positions != context:
        raise UserError(f"data.max_context={context}: {place} are of {described.positions} positions of each row")
    if described.count < count:
        raise UserError(f"objective.top_tokens={count}: {place} are {described.count} of each position")
    if described.largest >= vocab_size:
        raise UserError(f"{place} hold token {described.largest}, outside the vocabulary of {vocab_size}")
