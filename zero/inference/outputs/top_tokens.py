"""`evaluate.top_tokens`: stores the most likely next tokens of a corpus, from which another model is distilled."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np

from zero.base.keys import Mistakes, at_least, key
from zero.corpus.format.index_files import paths_of, read_index
from zero.corpus.format.shards import RowFormat
from zero.corpus.format.top_tokens import write_top_tokens
from zero.corpus.reading.contents import contents_of
from zero.corpus.reading.keys import SetKeys
from zero.corpus.reading.loader import ONCE, Batching, Loader
from zero.corpus.reading.prefetch import prefetch
from zero.hosts import agreement
from zero.hosts.watchdog import progress
from zero.inference.index_keys import IndexKeys
from zero.inference.output import Output
from zero.inference.scoring import Scorer
from zero.models.config import GPTConfig
from zero.partition.layout import PyTree
from zero.partition.pmapped import pmap
from zero.tracking.progress import Stage
from zero.training.batch import document_starts, token_ids
from zero.training.inference import of_all_rows
from zero.training.programs import for_inference
from zero.training.sharded_gpt import ShardedGPT

log = logging.getLogger(__name__)


class TopTokens(Output):
    """Files beside the index files; nothing in evaluation.json."""

    key = "evaluate.top_tokens"
    is_of_one_model = True

    @dataclass(frozen=True)
    class Keys(IndexKeys):
        top_tokens: int | None = key(
            None,
            at_least(1),
            "Write this many most likely tokens of each position to files beside the index files, on which "
            "objective=distillation trains another model; null: none.",
        )

    def __init__(self, keys: Keys, data: SetKeys):
        self._count = keys.top_tokens
        self._sets = keys.sets(data)

    @property
    def is_asked(self) -> bool:
        return self._count is not None

    def mistakes(self, model_config: GPTConfig, model_label: str) -> Mistakes:
        if self._count is None:
            return
        if self._count > model_config.vocab_size:
            yield self.key, f"at most {model_config.vocab_size}, the vocabulary of {model_label}"
        if not self._sets:
            yield "evaluate.index", f"index files, beside which {self.key} are written"

    def evaluate(self, scorer: Scorer) -> dict[str, Any]:
        assert self._count is not None
        top_tokens = top_tokens_program(scorer.trained.model, self._count)
        for index in itertools.chain.from_iterable(map(paths_of, self._sets.values())):
            _store(scorer, top_tokens, index, self._count)
        return {}


def top_tokens_program(model: ShardedGPT, count: int) -> Callable[[PyTree, Any], tuple[jax.Array, jax.Array]]:
    """Of sharded weights and tokens `(devices, R, T)` to what `_top_tokens` gives; nothing is compiled yet."""
    model = for_inference(model)
    return pmap(partial(_top_tokens, model=model, count=count), model.axis.name, out_axes=None)


def _top_tokens(params: PyTree, tokens: jax.Array, *, model: ShardedGPT, count: int) -> tuple[jax.Array, jax.Array]:
    """The most likely next tokens of each position, and their log-probabilities in nats, the largest first.

    Per device: shards of parameters and int32 tokens `(R, T)` as in `Batch`. Out: int32 and float32
    `(N R, T, count)`, the rows of all devices in order, the same on every device. Call inside pmap.
    """
    full = model.gather_params(params)
    tokens = token_ids(tokens)
    starts = document_starts(tokens, model.separators)
    ids, log_probabilities = model.apply(full, tokens, starts, count, method="top_tokens")
    return of_all_rows(ids, model), of_all_rows(log_probabilities, model)


def _store(
    scorer: Scorer, top_tokens: Callable[[PyTree, Any], tuple[jax.Array, jax.Array]], index: str, count: int
) -> None:
    """Writes the `count` most likely tokens at each position of an index file's rows beside it.

    Host 0 writes. A row is read up to the context of the scorer.

    Raises:
      UserError: the rows are shorter than the context, or the files cannot be written.
    """
    vocab_size = scorer.trained.model.config.vocab_size
    loader = Loader(
        index, Batching(scorer.batch_rows), RowFormat(scorer.context, vocab_size), ONCE, on_one_host=agreement.on_host_0
    )
    shape = (loader.rows, scorer.context, count)
    shards = read_index(index, on_one_host=agreement.on_host_0)

    def batches() -> Iterator[tuple[np.ndarray, np.ndarray]]:
        left = loader.rows
        stage = Stage("rows of the teacher", -(-left // scorer.batch_rows), is_shown=jax.process_index() == 0)
        with closing(prefetch(loader.batches())) as read, stage:
            for batch in stage.counted(read):
                progress()
                tokens, log_probabilities = top_tokens(scorer.trained.params, scorer.split(batch.tokens))
                yield np.asarray(tokens)[:left], np.asarray(log_probabilities)[:left]
                left -= len(tokens)

    if agreement.is_host_0():
        write_top_tokens(*(index, shape, vocab_size, list(contents_of(shards)), batches()))
        log.info("the %d most likely tokens of %d rows are beside %s", count, loader.rows, index)
        return
    for _ in batches():
        pass
