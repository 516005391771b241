"""How well the order of the data mixes a corpus: by arithmetic alone, no file is read.

    python benchmarks/order.py

For each `shuffle_shards` three figures of an epoch of 64 shards of 1,024 rows:

- apart: how far apart in the order two rows come that are neighbors in the corpus, as a share of the epoch (at random
  0.333).
- in corpus: the other way round, how far apart in the corpus two rows are that are neighbors in the order. It depends
  on the batch, in which the rows of one stream stand together, and says little: a step does not see that order.
- spread: the standard deviation of a batch's mean of a property that a row has, over that of batches of rows drawn
  independently, for a property that differs only between shards (sites of a crawl), and for one that is half noise.
"""

from __future__ import annotations

import argparse

import numpy as np

from zero.corpus.reading.order import Order, permutation

SHARDS, ROWS = 64, 1024


def order_of(shuffle_shards: int, batch: int) -> np.ndarray:
    """The number in the corpus of each row, `(batches, batch)`, of one epoch."""
    streams = max(count for count in range(1, min(shuffle_shards, SHARDS) + 1) if batch % count == 0)
    order = Order((ROWS,) * SHARDS, streams, max(1, shuffle_shards // streams), seed=0, epochs=1)
    of_streams = []
    for stream in range(streams):
        buffers = []
        for buffer in order.buffers(stream, 0):
            rows = np.concatenate([part.shard * ROWS + np.arange(part.start, part.stop) for part in buffer.ranges])
            permuted = np.empty_like(rows)
            permuted[permutation(len(rows), *buffer.key)] = rows
            buffers.append(permuted)
        of_streams.append(np.concatenate(buffers))
    batches = SHARDS * ROWS // batch
    of_batch = [rows[: batches * (batch // streams)].reshape(batches, -1) for rows in of_streams]
    return np.concatenate(of_batch, axis=1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=256)
    batch = parser.parse_args().batch
    noise = np.random.default_rng(0)
    of_shard = np.repeat(noise.standard_normal(SHARDS), ROWS)
    half_noise = (of_shard + noise.standard_normal(SHARDS * ROWS)) / np.sqrt(2)
    print(f"batch {batch}\nshuffle_shards  apart  in corpus  spread, sites  spread, half noise")
    for shuffle_shards in (1, 4, 16, 32, 64):
        rows = order_of(shuffle_shards, batch)
        place = np.empty(rows.size)
        place[rows.ravel()] = np.arange(rows.size) / rows.size
        apart = np.abs(np.diff(place)).mean()
        in_corpus = np.abs(np.diff(rows.ravel())).mean() / rows.size
        spreads = [
            values[rows].mean(axis=1).std() / (values.std() / np.sqrt(batch)) for values in (of_shard, half_noise)
        ]
        print(f"{shuffle_shards:14}  {apart:5.3f}  {in_corpus:9.3f}  {spreads[0]:13.2f}  {spreads[1]:18.2f}")


if __name__ == "__main__":
    main()
