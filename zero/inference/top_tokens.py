"""`evaluate.top_tokens`: stores the most likely next tokens of a corpus, from which another model is distilled."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import closing

import jax
import numpy as np

from zero.corpus.format.index_files import read_index
from zero.corpus.format.shards import RowFormat
from zero.corpus.format.top_tokens import write_top_tokens
from zero.corpus.reading.contents import contents_of
from zero.corpus.reading.loader import ONCE, Batching, Loader
from zero.corpus.reading.prefetch import prefetch
from zero.hosts.agreement import is_host_0
from zero.inference.scoring import Scorer
from zero.tracking.progress import Stage

log = logging.getLogger(__name__)


def store_top_tokens(scorer: Scorer, index: str, count: int) -> None:
    """Writes the `count` most likely tokens at each position of an index file's rows beside it.

    All hosts call it, and host 0 writes. A row is read up to the context of the scorer.

    Raises:
      UserError: the rows are shorter than the context, or the files cannot be written.
    """
    vocab_size = scorer.trained.model.config.vocab_size
    loader = Loader(index, Batching(scorer.batch_rows), RowFormat(scorer.context, vocab_size), ONCE)
    shape = (loader.rows, scorer.context, count)
    shards = read_index(index)

    def batches() -> Iterator[tuple[np.ndarray, np.ndarray]]:
        left = loader.rows
        stage = Stage("rows of the teacher", -(-left // scorer.batch_rows), is_shown=jax.process_index() == 0)
        with closing(prefetch(loader.batches())) as read, stage:
            for batch in stage.counted(read):
                tokens, log_probabilities = scorer.top_tokens(batch.tokens, count)
                yield tokens[:left], log_probabilities[:left]
                left -= len(tokens)

    if is_host_0():
        write_top_tokens(
            *(index, shape, vocab_size, list(contents_of([(shard, shard.rows) for shard in shards])), batches())
        )
        log.info("the %d most likely tokens of %d rows are beside %s", count, loader.rows, index)
        return
    for _ in batches():
        pass
