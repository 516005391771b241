"""Preparing and loading text beside the `datasets` library and Grain, in one run.

    pip install grain
    python benchmarks/corpora.py

Preparing: a file of JSON lines to rows of tokens on a disk, with one tokenizer. Loading: those rows as shuffled int32
batches, from a warm page cache, on all cores. Each peer is written as its documentation has it, with its own workers or
threads. Rounds take turns in a random order; ratios are medians over rounds. A peer that is not installed is left out.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

from benchmarks.prepare import collect
from zero.corpus.format.shards import RowFormat
from zero.corpus.preparing.options import CorpusOptions
from zero.corpus.preparing.prepare import prepare
from zero.corpus.reading.loader import Batching, Loader, RowOrder
from zero.corpus.text.tokenizers import FileTokenizer, train_tokenizer

ROW, BATCH, CORES = 1024, 32, os.cpu_count() or 1


def zero_prepare(source: Path, place: Path, tokenizer: FileTokenizer) -> None:
    prepare(
        source,
        "c",
        CorpusOptions(tokenizer, ROW, validation_fraction=0.001),
        directory=place,
        index_directory=place,
        progress=False,
    )


def zero_load(place: Path, tokenizer: FileTokenizer, passes: int) -> Iterator[np.ndarray]:
    form = RowFormat(ROW, tokenizer.vocab_size)
    for batch in Loader(str(place / "c_train.index"), Batching(BATCH), form, RowOrder(max_epochs=passes)).batches():
        yield batch.tokens


def datasets_prepare(source: Path, place: Path, tokenizer: FileTokenizer) -> None:
    """As transformers' run_clm.py: tokenize in batches, then join and cut, in a process per core."""
    import datasets

    datasets.disable_progress_bars()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    encoder = tokenizers.Tokenizer.from_buffer(tokenizer.data)
    end = tokenizer.end_of_text

    def rows(batch: dict[str, list[str]]) -> dict[str, list[np.ndarray]]:
        found = encoder.encode_batch_fast(batch["text"], add_special_tokens=False)
        joined = np.concatenate([np.array([*one.ids, end], np.uint16) for one in found])
        return {"tokens": list(joined[: len(joined) // ROW * ROW].reshape(-1, ROW))}

    features = datasets.Features({"tokens": datasets.Sequence(datasets.Value("uint16"), length=ROW)})
    data = datasets.load_dataset("json", data_files=str(source), split="train", cache_dir=str(place / "cache"))
    options: Any = {"batched": True, "remove_columns": ["text"], "features": features, "num_proc": CORES}
    data.map(rows, **options).save_to_disk(str(place / "rows"), num_proc=CORES)
    del os.environ["TOKENIZERS_PARALLELISM"]


def datasets_load(place: Path, tokenizer: FileTokenizer, passes: int) -> Iterator[np.ndarray]:
    import datasets

    data = datasets.load_from_disk(str(place / "rows")).to_iterable_dataset(num_shards=4 * CORES)
    data = data.shuffle(seed=0, buffer_size=2000).with_format("numpy")
    for epoch in range(passes):
        data.set_epoch(epoch)
        for batch in data.iter(batch_size=BATCH):
            yield np.asarray(batch["tokens"], np.int32)


def _joined(source: Path, tokenizer: FileTokenizer) -> Iterator[np.ndarray]:
    """Rows in order; the tokenizers library has a thread per core."""
    encoder = tokenizers.Tokenizer.from_buffer(tokenizer.data)
    rest = np.zeros(0, np.uint16)
    with source.open() as lines:
        texts = [json.loads(line)["text"] for line in lines]
    for first in range(0, len(texts), 256):
        found = encoder.encode_batch_fast(texts[first : first + 256], add_special_tokens=False)
        ids = [np.array([*one.ids, tokenizer.end_of_text], np.uint16) for one in found]
        joined = np.concatenate([rest, *ids])
        whole = len(joined) // ROW * ROW
        yield from joined[:whole].reshape(-1, ROW)
        rest = joined[whole:]


def grain_prepare(source: Path, place: Path, tokenizer: FileTokenizer) -> None:
    from array_record.python.array_record_module import ArrayRecordWriter

    place.mkdir(parents=True)
    writer = ArrayRecordWriter(str(place / "rows.array_record"), "group_size:1")
    for row in _joined(source, tokenizer):
        writer.write(row.tobytes())
    writer.close()


def grain_load(place: Path, tokenizer: FileTokenizer, passes: int) -> Iterator[np.ndarray]:
    import grain

    rows = grain.sources.ArrayRecordDataSource(str(place / "rows.array_record"))
    data = grain.MapDataset.source(rows).seed(0).shuffle().repeat(passes).map(lambda row: np.frombuffer(row, np.uint16))
    yield from data.batch(BATCH).map(lambda batch: batch.astype(np.int32)).to_iter_dataset()


CONTESTANTS: dict[str, tuple[Callable[..., None], Callable[..., Iterator[np.ndarray]]]] = {
    "zero": (zero_prepare, zero_load),
    "datasets": (datasets_prepare, datasets_load),
    "grain": (grain_prepare, grain_load),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=64)
    parser.add_argument("--vocabulary", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--passes", type=int, default=8, help="over the rows, in one round of loading (8)")
    options = parser.parse_args()
    present = [name for name in CONTESTANTS if name == "zero" or importlib.util.find_spec(name)]
    for name in set(CONTESTANTS) - set(present):
        print(f"{name} is left out: pip install {name}")
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        texts = collect(root / "text", options.megabytes * 1_000_000)
        size = sum(len(text.encode()) for text in texts)
        source = root / "source.jsonl"
        source.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        tokenizer = FileTokenizer("bpe.json", train_tokenizer(texts[: len(texts) // 16], options.vocabulary))
        preparing: dict[str, list[float]] = {name: [] for name in present}
        loading: dict[str, list[float]] = {name: [] for name in present}
        for number in range(options.rounds):
            for name in random.sample(present, len(present)):
                begin = time.perf_counter()
                CONTESTANTS[name][0](source, root / name / str(number), tokenizer)
                preparing[name].append(size / 1e6 / (time.perf_counter() - begin))
            for name in random.sample(present, len(present)):
                begin = time.perf_counter()
                batches = CONTESTANTS[name][1](root / name / str(number), tokenizer, options.passes)
                tokens = sum(batch.size for batch in batches)
                loading[name].append(tokens / 1e6 / (time.perf_counter() - begin))
    print(
        f"{size / 1e6:.0f} MB in {len(texts)} documents, {tokens / options.passes / 1e6:.1f}M tokens, {CORES} cores\n"
    )
    print("| | prepared, MB/s | zero's speed over it | loaded, M tokens/s | zero's speed over it |")
    print("|---|---|---|---|---|")
    for name in present:
        cells = []
        for speeds in (preparing, loading):
            ratio = statistics.median(own / other for own, other in zip(speeds["zero"], speeds[name], strict=True))
            cells.append(f"{statistics.median(speeds[name]):.1f} | {ratio:.2f}")
        print(f"| {name} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
