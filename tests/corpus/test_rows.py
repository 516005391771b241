"""`zero.corpus.Rows`: the loader as a library, and its adapters."""

import gc
import json
import pickle
import re
import subprocess
import sys
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.helpers.corpora import make
from tests.helpers.loaders import open_loader
from tests.helpers.shards import flat, write_corpus
from zero.base.errors import UserError
from zero.corpus import Rows
from zero.corpus.adapters.webdataset_samples import samples
from zero.training.schedules import SequenceLengths

COUNTS = [12, 9, 15, 6, 12, 12]  # rows of 4 tokens in each shard
LIKE: dict[str, Any] = {"batch": 6, "context": 4, "seed": 3}


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("rows") / "c", COUNTS)


def taken(rows: Rows, count: int | None = None) -> list[Any]:
    return [tokens.tolist() for tokens in islice(rows, count)]


def test_batches_are_those_of_the_loader(index: Path):
    loader = open_loader(index, global_rows=6, context=4, vocab_size=1 << 20, seed=3, max_epochs=2)
    rows = Rows(index, epochs=2, **LIKE)
    assert taken(rows) == [batch.tokens.tolist() for batch in loader.batches()]
    assert rows.batches == loader.total_batches == 22
    tokens = next(iter(Rows(index, **LIKE)))
    assert tokens.dtype == np.int32 and tokens.shape == (6, 4)


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize(("before", "after"), [(1, 3), (3, 1), (2, 6), (6, 3)])
def test_any_number_of_hosts_continues(index: Path, before: int, after: int, prefetch: int):
    """The same global batches, and checksums that add up to the same sum."""
    alone = Rows(index, **LIKE)
    expected = taken(alone, 9)

    def of_hosts(hosts: int, count: int, state: dict[str, Any] | None) -> tuple[list[Any], list[Rows]]:
        options = LIKE | {"hosts": hosts, "state": state, "prefetch": prefetch}
        all_rows = [Rows(index, host=host, **options) for host in range(hosts)]
        parts = [taken(rows, count) for rows in all_rows]
        return [flat(batch) for batch in zip(*parts, strict=True)], all_rows

    first, left = of_hosts(before, 4, None)
    states = [json.loads(json.dumps(rows.state())) for rows in left]
    assert all(state == states[0] for state in states) and states[0]["batches"] == 4
    second, right = of_hosts(after, 5, states[0])
    assert first + second == expected
    assert sum(rows.checksum for rows in left + right) % 2**32 == alone.checksum


def test_a_loop_continues_where_it_stopped(index: Path):
    rows = Rows(index, epochs=1, **LIKE)
    whole = taken(Rows(index, epochs=1, **LIKE))
    found = taken(rows, 3) + taken(pickle.loads(pickle.dumps(rows)), 2)
    assert found == whole[:5]
    rows.restore(rows.state() | {"batches": 9})
    assert taken(rows) == whole[9:]


def test_states_of_something_else_are_refused(index: Path, tmp_path: Path):
    state = Rows(index, **LIKE).state()
    other = write_corpus(tmp_path / "other", [12, 9])
    for change, message in (
        ({"seed": 4}, "seed=3, not to seed=4"),
        ({"batch": 3}, "global_rows=6, not to global_rows=3"),
        ({"crop": "all"}, "crop"),
    ):
        with pytest.raises(UserError, match=f"the saved data cursor belongs to .*{message}"):
            Rows(index, state=state, **(LIKE | change))
    with pytest.raises(UserError, match="the saved data cursor belongs to other shards"):
        Rows(other, state=state, **LIKE)
    for wrong, message in (
        ({"host": 2, "hosts": 2}, "host=2: expected a number from 0 to 1"),
        ({"hosts": 4}, "cannot be split into 4 parts"),
        ({"crop": "last"}, "crop=last: expected one of first, all, random"),
        ({"stages": [(2, 3)]}, "sequences of 3 tokens do not evenly divide rows of 4"),
    ):
        with pytest.raises(UserError, match=message):
            Rows(index, **(LIKE | wrong))


def test_order_of_the_shards(index: Path):
    first_of_rows = [row[0] for tokens in Rows(index, epochs=1, **(LIKE | {"seed": None})) for row in tokens.tolist()]
    assert first_of_rows == sorted(first_of_rows) and len(first_of_rows) == sum(COUNTS)


@pytest.mark.parametrize("last_target", [False, True])
def test_staged_lengths_are_those_of_training(tmp_path: Path, last_target: bool):
    index = write_corpus(tmp_path / "c", COUNTS)
    stages = ((2, 1), (1, 2))
    lengths = SequenceLengths(4, stages, last_target)
    options = LIKE | {"last_target": last_target}
    plain = [tokens.copy() for tokens in islice(Rows(index, **options), 5)]
    staged = Rows(index, stages=stages, **options)
    for number, (whole, cut) in enumerate(zip(plain, staged, strict=False)):
        assert cut.tolist() == lengths.cut(whole, number).tolist()
        if number == 1:
            state = staged.state()
    continued = Rows(index, stages=stages, state=state, **options)
    assert next(iter(continued)).tolist() == lengths.cut(plain[2], 2).tolist()


def test_mixtures_with_weights_over_time(index: Path, tmp_path: Path):
    other = write_corpus(tmp_path / "other", [30, 30], first=10_000).rename(tmp_path / "other" / "other.index")
    rows = Rows({str(index): 1, str(other): [[0, 0], [2, 1]]}, **LIKE)
    batches = list(islice(rows, 6))
    of_other = [int((tokens[:, 0] >= 10_000).sum()) for tokens in batches]
    assert of_other[:2] == [0, 0] and sum(of_other) == 12
    assert rows.rows_seen() == {"it": 24, "other": 12}


def test_rows_that_cannot_be_read_are_counted(index: Path, tmp_path: Path):
    damaged = write_corpus(tmp_path / "c", COUNTS)
    (damaged.parent / "shard-3.tar").unlink()
    with pytest.raises(UserError, match=r"shard-3\.tar is missing"):
        Rows(damaged, **LIKE)
    rows = Rows(damaged, epochs=1, skip=6, **LIKE)
    batches = list(rows)
    assert rows.skipped == 6 and sum(int((tokens == -1).all(1).sum()) for tokens in batches) == 6
    assert rows.state()["skipped"] == 6
    with pytest.raises(UserError, match=r"rows could not be read, more than skip=5"):
        list(Rows(damaged, epochs=1, skip=5, **LIKE))


def test_it_needs_neither_jax_nor_webdataset_nor_torch(index: Path):
    """And preparing text does not import the loader."""
    program = f"""if True:
        import sys
        import zero.corpus
        assert "zero.corpus.rows" not in sys.modules
        from zero.corpus import Rows
        next(iter(Rows({str(index)!r}, batch=6, context=4)))
        print(*({{"jax", "torch", "webdataset", "braceexpand", "tokenizers", "grain"}} & {{*sys.modules}}))
    """
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "\n", done.stdout + done.stderr


def test_a_pipeline_of_webdataset(index: Path):
    import webdataset as wds

    rows = Rows(index, epochs=1, **LIKE)
    pipeline = wds.DataPipeline(samples(rows), wds.to_tuple("__key__", "input_id.npy"))
    found = list(pipeline)
    assert [row.tolist() for _, row in found] == flat(taken(Rows(index, epochs=1, **LIKE)))
    assert (found[0][0], found[7][0]) == ("000000000-00000", "000000001-00001")


@pytest.mark.slow  # it imports torch, 500 MiB
def test_a_dataset_of_pytorch(index: Path):
    from torch.utils.data import DataLoader

    from zero.corpus.adapters.torch_dataset import TorchRows

    expected = taken(Rows(index, **LIKE), 6)
    dataset = TorchRows(Rows(index, **LIKE))
    loader = DataLoader(dataset, batch_size=None)
    assert [tokens.tolist() for tokens in islice(loader, 3)] == expected[:3]
    again = TorchRows(Rows(index, **LIKE))
    again.load_state_dict(json.loads(json.dumps(dataset.state_dict())))
    assert [tokens.tolist() for tokens in islice(DataLoader(again, batch_size=None, num_workers=1), 3)] == expected[3:]
    with pytest.raises(UserError, match="num_workers=2: expected 0 or 1"):
        next(iter(DataLoader(TorchRows(Rows(index, **LIKE)), batch_size=None, num_workers=2)))


def test_a_dataset_of_grain(index: Path):
    pytest.importorskip("grain")
    from zero.corpus.adapters.grain_dataset import GrainRows

    expected = taken(Rows(index, **LIKE), 6)
    iterator = iter(GrainRows(Rows(index, **LIKE)).map(lambda tokens: tokens + 1))
    assert [(next(iterator) - 1).tolist() for _ in range(3)] == expected[:3]
    state = json.loads(json.dumps(iterator.get_state()))
    other = iter(GrainRows(Rows(index, **LIKE)).map(lambda tokens: tokens + 1))
    other.set_state(state)
    assert [(next(other) - 1).tolist() for _ in range(3)] == expected[3:]


@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")  # which webdataset leaves
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_webdataset_reads_the_shards_of_zero(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The lines of data/README.md, as they stand there, and a DataPipeline: all rows, padding included."""
    import webdataset as wds

    (tmp_path / "text").mkdir()
    for number in range(40):
        (tmp_path / "text" / f"{number}.txt").write_text(f"document {number} " * 4)
    corpus = make(tmp_path / "text", tmp_path, "mine", rows_per_shard=32)
    shards = sorted(path.name for path in Path(corpus.directory).glob("train-*.tar"))
    assert shards[-1] == "train-00003.tar"
    page = Path("data/README.md").read_text(encoding="utf-8")
    (code,) = (block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "webdataset" in block)
    (tmp_path / "data").symlink_to(tmp_path)
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(code, names)
    expected = [row for tokens in Rows(corpus.train_index, batch=1, context=16, seed=None, epochs=1) for row in tokens]
    assert len(names["rows"]) == len(expected) == corpus.train.rows
    for row, tokens in zip(names["rows"], expected, strict=True):
        assert (row[: (tokens >= 0).sum()] == tokens[tokens >= 0]).all()
    urls = f"{corpus.directory}/train-{{00000..00003}}.tar"
    stages = (wds.SimpleShardList(urls), wds.tarfile_to_samples(), wds.decode(), wds.to_tuple("input_id.npy"))
    found = [row for (member,) in wds.DataPipeline(*stages) for row in member]
    assert (np.stack(found) == np.stack(names["rows"])).all()
    gc.collect()
