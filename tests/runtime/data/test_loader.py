"""The loader: one order for any number of hosts, exact after any cursor, and a name for whatever is wrong."""

import io
import itertools
import json
import tarfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from zero.runtime.data.loader import Loader, _Corpus, prefetch
from zero.runtime.data.shards import count_rows, read_index, samples
from zero.runtime.errors import UserError

CONTEXT = 4
VOCAB = 60_000


def npy(array: np.ndarray, **options: Any) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array, **options)
    return buffer.getvalue()


def write_tar(path: Path, members: dict[str, bytes]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as archive:
        for name, data in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return path


def write_corpus(
    directory: Path, counts: list[int], rows_per_member: int = 3, counted: bool = True, first: int = 0
) -> Path:
    """Shards of rows that all begin with their number: row i reads i, i + 1, i + 2, ..., from `first` on."""
    lines = []
    for number, count in enumerate(counts):
        rows = (np.arange(first, first + count)[:, None] + np.arange(CONTEXT + 1)).astype(np.uint16)
        starts = range(0, count, rows_per_member)
        members = {f"{first + i:06}.input_id.npy": npy(rows[i : i + rows_per_member]) for i in starts}
        write_tar(directory / f"shard-{number}.tar", members)
        lines.append(f"shard-{number}.tar" + (f" # {count} rows" if counted else ""))
        first += count
    (directory / "it.index").write_text("\n".join(["# a corpus", "", *lines]) + "\n")
    return directory / "it.index"


def loader(index: Any, **options: Any) -> Loader:
    return Loader(index, **({"global_rows": 4, "context": CONTEXT, "vocab_size": VOCAB} | options))


def first_tokens(batches: Iterator, count: int | None = None) -> list[list[int]]:
    return [batch.tokens[:, 0].tolist() for batch in itertools.islice(batches, count)]


def flat(lists: Iterable[list]) -> list:
    return list(itertools.chain.from_iterable(lists))


PATIENT = settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])
COUNTS = st.lists(st.integers(1, 12), min_size=1, max_size=9)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Callable[[list[int]], Path]:
    """Index file of a corpus with these rows a shard; made once."""
    made: dict[tuple[int, ...], Path] = {}
    root = tmp_path_factory.mktemp("corpora")

    def get(counts: list[int]) -> Path:
        key = tuple(counts)
        if key not in made:
            made[key] = write_corpus(root / "-".join(map(str, key)), counts)
        return made[key]

    return get


# ---- the order -------------------------------------------------------------------------------------------------------


def watch_reads(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The pieces that loaders read from now on."""
    read, pieces = _Corpus._read, []

    def watch(corpus, piece, *rest):
        pieces.append(piece)
        return read(corpus, piece, *rest)

    monkeypatch.setattr(_Corpus, "_read", watch)
    return pieces


@PATIENT
@given(counts=COUNTS, rows=st.sampled_from([1, 2, 3, 4, 6, 8]), epochs=st.integers(1, 4), window=st.integers(1, 20))
def test_every_sample_once_an_epoch(corpus, counts: list[int], rows: int, epochs: int, window: int):
    total = sum(counts)
    if epochs * total < rows:
        return
    data = loader(corpus(counts), global_rows=rows, max_epochs=epochs, window=window)
    batches = list(data.batches())
    assert len(batches) == data.total_batches == epochs * total // rows
    seen = Counter(np.concatenate([batch.tokens[:, 0] for batch in batches]).tolist())
    assert sum(seen.values()) == epochs * total - epochs * total % rows  # only what fills no batch is dropped
    assert set(seen) <= set(range(total)) and max(seen.values()) <= epochs
    for batch in batches:  # and rows are whole
        assert (np.diff(batch.tokens) == 1).all()
    # Each stream finishes an epoch within a row of the others: no sample comes again before its epoch is over.
    early = flat(first_tokens(iter(batches), total // rows))
    assert len(early) == len(set(early))


@PATIENT
@given(counts=COUNTS, seed=st.integers(0, 3), window=st.integers(1, 20), position=st.integers(0, 40), data=st.data())
def test_resume_is_exact_at_any_position(corpus, counts, seed: int, window: int, position: int, data):
    options = {"seed": seed, "window": window, "global_rows": 4}
    batches = loader(corpus(counts), **options).batches()
    cursor = None
    for _ in range(position):
        cursor = json.loads(json.dumps(next(batches).cursor))
    expected = first_tokens(batches, 12)
    hosts = data.draw(st.sampled_from([1, 2, 4]))
    resumed = [
        first_tokens(loader(corpus(counts), **options, host=host, hosts=hosts).batches(cursor), 12)
        for host in range(hosts)
    ]
    assert [flat(parts) for parts in zip(*resumed, strict=True)] == expected


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("hosts", [2, 3, 4, 12])
def test_hosts_share_one_order(corpus, hosts: int, shuffle: bool):
    options = {"global_rows": 12, "max_epochs": 3, "shuffle": shuffle}
    index = corpus([7, 3, 12, 5, 9])
    whole = list(loader(index, **options).batches())
    parts = [list(loader(index, **options, host=host, hosts=hosts).batches()) for host in range(hosts)]
    for batch, *shares in zip(whole, *parts, strict=True):
        np.testing.assert_array_equal(np.concatenate([share.tokens for share in shares]), batch.tokens)
        assert {json.dumps(share.cursor) for share in shares} == {json.dumps(batch.cursor)}
        assert all(share.tokens.dtype == np.int32 for share in shares)


def test_a_host_opens_its_own_shards_only(corpus, monkeypatch):
    counts = [6] * 8
    index = corpus(counts)
    opened: list[list[str]] = []
    for host in range(4):
        data = loader(index, global_rows=8, host=host, hosts=4, max_epochs=1)
        pieces = watch_reads(monkeypatch)
        assert len(list(data.batches())) == 6
        opened.append([data.corpora[0].shards[piece.shard][0].path for piece in pieces])
    assert sorted(flat(opened)) == sorted(shard.path for shard in read_index(index))  # each by one host, once
    assert all(len(mine) == 2 for mine in opened)


def test_epochs_and_seeds_have_their_own_order(corpus):
    index = corpus([12] * 6)
    epochs = first_tokens(loader(index, max_epochs=2).batches())
    rows = flat(epochs)
    assert sorted(rows[:72]) == sorted(rows[72:]) == list(range(72))
    assert rows[:72] != rows[72:]
    assert epochs != first_tokens(loader(index, max_epochs=2, seed=1).batches())
    assert epochs == first_tokens(loader(index, max_epochs=2).batches())
    alone = flat(first_tokens(loader(index, max_epochs=2, window=1, global_rows=1).batches()))
    shards = [list(dict.fromkeys(row // 12 for row in part)) for part in (alone[:72], alone[72:])]
    assert sorted(shards[0]) == sorted(shards[1]) == list(range(6)) and shards[0] != shards[1]


def test_the_order_is_the_same_next_year(corpus):
    """Written down, because a resumed run must find the same order under any version of numpy."""
    rows = first_tokens(loader(corpus([7, 3, 12, 5]), seed=7).batches(), 3)
    assert rows == [[24, 6, 11, 21], [0, 2, 13, 9], [25, 3, 17, 8]]


def test_a_window_mixes_its_shards(corpus):
    order = np.array(flat(first_tokens(loader(corpus([12] * 8), global_rows=1, window=8, max_epochs=1).batches())))
    assert abs(np.corrcoef(order, np.arange(96))[0, 1]) < 0.3
    assert len(set((order[:24] // 12).tolist())) == 8  # a quarter of the epoch has met every shard


def test_resuming_reads_no_more_far_into_a_run(corpus, monkeypatch):
    index = corpus([12] * 8)
    reads = []
    for position in (0, 5, 10**9):
        data = loader(index, global_rows=8, window=8)
        cursor = None if position == 0 else {**next(data.batches()).cursor, "batches": position}
        pieces = watch_reads(monkeypatch)
        begin = time.monotonic()
        next(data.batches(cursor))
        assert time.monotonic() - begin < 2
        reads.append(len(pieces))
    assert max(reads) <= 16  # a window, and the next one ahead


def test_validation_is_in_order_and_filled_up(corpus):
    index = corpus([5, 4, 2])
    data = loader(index, shuffle=False, max_epochs=1, global_rows=4)
    assert data.total_batches == 3
    assert first_tokens(data.batches()) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, -1]]
    *_, last = data.batches()
    assert (last.tokens[3] == -1).all()
    share = loader(index, shuffle=False, max_epochs=1, global_rows=4, host=1, hosts=2)
    assert first_tokens(share.batches()) == [[2, 3], [6, 7], [10, -1]]


def test_train_samples_caps_an_epoch(corpus):
    index = corpus([5, 4, 2])
    batches = loader(index, train_samples=7, max_epochs=4, global_rows=7).batches()
    assert [sorted(rows) for rows in first_tokens(batches)] == [list(range(7))] * 4
    assert loader(index, train_samples=100).rows == 11


def test_what_is_not_used_is_not_read(tmp_path: Path):
    index = write_corpus(tmp_path, [12])
    data = bytearray((tmp_path / "shard-0.tar").read_bytes())
    data[3072:4096] = b"?" * 1024  # the fourth member
    (tmp_path / "shard-0.tar").write_bytes(data)
    (rows,) = first_tokens(loader(index, train_samples=4, max_epochs=1).batches())
    assert sorted(rows) == [0, 1, 2, 3]


def test_several_indices_count_as_one(corpus):
    indices = [corpus([5, 4]), corpus([3])]
    (rows,) = first_tokens(loader(indices, global_rows=12, max_epochs=1).batches())
    assert sorted(rows) == sorted([*range(9), *range(3)])


def test_what_is_dropped_is_said(corpus, caplog):
    with caplog.at_level("INFO"):
        list(loader(corpus([5, 4, 2]), max_epochs=1).batches())
    assert "the last 3 rows do not fill a batch" in caplog.text


def test_the_last_window_reads_nothing_beyond_the_end(corpus, monkeypatch):
    data = loader(corpus([5, 4, 2]), shuffle=False, max_epochs=1)
    pieces = watch_reads(monkeypatch)
    list(data.batches())
    assert len(pieces) == 3


# ---- shards of any make ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("counted", [True, False])
def test_rows_are_counted_where_the_index_does_not_say(tmp_path: Path, counted: bool):
    index = write_corpus(tmp_path, [700, 3, 1200], rows_per_member=300, counted=counted)
    assert [shard.rows for shard in read_index(index)] == [700, 3, 1200]
    (rows,) = first_tokens(loader(index, global_rows=1903, max_epochs=1).batches())
    assert sorted(rows) == list(range(1903))


def test_members_of_one_row_lengths_and_other_members(tmp_path: Path):
    members = {
        "a.txt": b"not for us",
        "a.input_id.npy": npy(np.arange(6)),
        "b.input_id.npy": npy(np.arange(10, 22, dtype=np.uint64).reshape(2, 6)),
        "b.length.npy": npy(np.array([2, 6])),
        "c.length.npy": npy(np.array(3)),
        "c.input_id.npy": npy(
            np.array([20, 21, 22, -9, 99_999], np.int32)
        ),  # what lies behind the end is not looked at
    }
    write_tar(tmp_path / "s.tar", members)
    (tmp_path / "it.index").write_text("  s.tar  \n")
    (batch,) = loader(tmp_path / "it.index", shuffle=False, max_epochs=1).batches()
    assert batch.tokens.tolist() == [[0, 1, 2, 3], [10, 11, -1, -1], [16, 17, 18, 19], [20, 21, 22, -1]]


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_tars_of_any_form(tmp_path: Path, form: int):
    """Long names, names outside ASCII, folders, links and marked members, as `tarfile` writes them."""
    names = ["a", "part/" + "b" * 80, "folder" * 16 + "/c", "é/dé"] + ["e" * 150] * (form != tarfile.USTAR_FORMAT)
    with tarfile.open(tmp_path / "s.tar", "w", format=form) as archive:
        for number, name in enumerate(["__not__/x", *names]):
            data = npy(np.arange(number, number + 4))
            member = tarfile.TarInfo(f"{name}.input_id.npy")
            member.size, member.mtime = len(data), 0.5 if form == tarfile.PAX_FORMAT else 0
            archive.addfile(member, io.BytesIO(data))
        for kind in (tarfile.DIRTYPE, tarfile.SYMTYPE):
            link = tarfile.TarInfo("z.input_id.npy")
            link.type, link.linkname = kind, "a.input_id.npy"
            archive.addfile(link)
    (tmp_path / "it.index").write_text("s.tar\n")
    shards = loader(tmp_path / "it.index", shuffle=False, max_epochs=1, global_rows=1)
    assert shards.rows == len(names)
    assert first_tokens(shards.batches()) == [[number + 1] for number in range(len(names))]
    with open(tmp_path / "s.tar", "rb") as stream:
        keys = [sample["__key__"] for sample in samples(shards.corpora[0].shards[0][0], stream)]
    assert keys == names


def test_names_with_spaces_and_sharps(tmp_path: Path):
    write_tar(tmp_path / "a #1.tar", {"a.input_id.npy": npy(np.arange(4))})
    write_tar(tmp_path / "a#1 b.tar", {"a.input_id.npy": npy(np.arange(4))})
    (tmp_path / "it.index").write_text("# 3 rows\na#1 b.tar\t# 1 rows, all of them\n")
    assert [(shard.name, shard.rows) for shard in read_index(tmp_path / "it.index")] == [
        (f"{tmp_path.name}/a#1 b.tar", 1)
    ]


# ---- what can be wrong -----------------------------------------------------------------------------------------------


def test_bad_index_files(tmp_path: Path, corpus):
    with pytest.raises(UserError, match=r"index file .*none\.index: no such file"):
        loader(tmp_path / "none.index")
    (tmp_path / "it.index").write_text("# nothing\n\n")
    with pytest.raises(UserError, match=r"it\.index lists no shards"):
        loader(tmp_path / "it.index")
    (tmp_path / "it.index").write_text("a/b.tar # 4 rows\n")
    with pytest.raises(UserError, match=r"it\.index: shard .*a/b\.tar is missing"):
        loader(tmp_path / "it.index")
    with pytest.raises(UserError, match="7 rows does not divide over 2 hosts"):
        loader(corpus([4]), global_rows=7, hosts=2)
    with pytest.raises(UserError, match="2 epochs of 4 rows do not fill one batch of 9"):
        loader(corpus([4]), global_rows=9, max_epochs=2)
    with pytest.raises(UserError, match="hold no samples"):
        loader(corpus([4]), train_samples=0)


def npz() -> bytes:
    buffer = io.BytesIO()
    np.savez(buffer, a=np.arange(4))
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ({"x.txt": b"text"}, r"sample x has no member input_id\.npy, only txt"),
        ({"x.input_id.npy": npy(np.ones(4))}, r"sample x: member input_id\.npy must hold integers, not float64"),
        ({"x.input_id.npy": npy(np.ones((1, 1, 4), int))}, r"sample x: input_id\.npy must have 1 or 2 dimensions"),
        ({"x.input_id.npy": npy(np.array(7))}, r"sample x: input_id\.npy must have 1 or 2 dimensions, not 0"),
        ({"x.input_id.npy": npy(np.arange(3))}, r"sample x holds rows of 3 tokens, and the model reads 4: prepare"),
        ({"x.input_id.npy": npy(np.array([0, 1, 60_000, 2]))}, r"sample x holds token 60000, outside the vocabulary"),
        ({"x.input_id.npy": npy(np.array([0, 1, -1, 2]))}, r"sample x holds token -1, outside the vocabulary of 60000"),
        (
            {"x.input_id.npy": npy(np.array([{}]), allow_pickle=True)},
            r"sample x: member input_id\.npy must hold integers, not object",
        ),
        ({"x.input_id.npy": npy(np.arange(4))[:-1]}, r"sample x: member input_id\.npy is not a whole \.npy"),
        ({"x.input_id.npy": b"PK\x03\x04 zip"}, r"sample x: member input_id\.npy is not a whole \.npy"),
        ({"x.input_id.npy": npz()}, r"sample x: member input_id\.npy is not a whole \.npy"),
        ({"x.input_id.npy": b""}, r"sample x: member input_id\.npy is not a whole \.npy"),
        (
            {"x.input_id.npy": npy(np.ones((2, 4), int)), "x.length.npy": npy(np.ones(3, int))},
            r"sample x: length\.npy must hold one length for each of 2 rows",
        ),
        ({"x.input_id.npy": npy(np.ones(4, int)), "x.length.npy": npy(np.array(-1))}, r"sample x: length\.npy must"),
    ],
)
def test_bad_samples_are_named(tmp_path: Path, members: dict[str, bytes], message: str):
    good = {f"{i}.input_id.npy": npy(np.arange(4)) for i in range(3)}
    write_tar(tmp_path / "s.tar", good | members)
    (tmp_path / "it.index").write_text("s.tar # 4 rows\n")
    with pytest.raises(UserError, match=r"^shard .*s\.tar, " + message) as caught:
        list(loader(tmp_path / "it.index", max_epochs=1).batches())
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("counted", [True, False])
def test_truncated_and_damaged_shards_are_named(tmp_path: Path, counted: bool):
    index = write_corpus(tmp_path, [9], counted=counted)
    path = tmp_path / "shard-0.tar"
    data = path.read_bytes()
    damaged = bytearray(data)
    damaged[1024:1060] = b"?" * 36
    cuts = [data[:size] for size in (0, 1, 512, 600, 1024, 1500, 2048, 2100)]
    causes = ["it ends too early"] * len(cuts) + ["header does not match its checksum", "this is no tar header"]
    for wrong, cause in zip([*cuts, bytes(damaged), b"plain text " * 200], causes, strict=True):
        path.write_bytes(wrong)
        with pytest.raises(UserError, match=rf"^shard .*shard-0\.tar is truncated or damaged: .*{cause}") as caught:
            list(loader(index, max_epochs=1).batches())
        assert "\n" not in str(caught.value)
        with pytest.raises(UserError, match="truncated or damaged"):
            count_rows(path)


def test_a_shard_that_is_not_what_the_index_says(tmp_path: Path):
    index = write_corpus(tmp_path, [9])
    for said in (8, 10):
        index.write_text(f"shard-0.tar # {said} rows\n")
        with pytest.raises(UserError, match=rf"shard-0\.tar holds 9 rows where the index file says {said}"):
            list(loader(index, max_epochs=1).batches())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": 1}, "seed=0, not to seed=1"),
        ({"global_rows": 2}, "global_rows=4, not to global_rows=2"),
        ({"window": 3}, "window=16, not to window=3"),
        ({"shuffle": False}, "shuffle=1, not to shuffle=0"),
        ({"train_samples": 5}, "other shards"),
    ],
)
def test_a_cursor_of_another_order_is_refused(corpus, change: dict[str, Any], message: str):
    cursor = next(loader(corpus([5, 4, 2])).batches()).cursor
    with pytest.raises(UserError, match=f"cursor belongs to {message}"):
        next(loader(corpus([5, 4, 2]), **change).batches(cursor))


def test_a_cursor_of_other_data_is_refused_and_of_moved_data_is_not(corpus, tmp_path: Path):
    cursor = next(loader(write_corpus(tmp_path / "here" / "mine", [5, 4, 2])).batches()).cursor
    next(loader(write_corpus(tmp_path / "there" / "mine", [5, 4, 2])).batches(cursor))
    for other in (tmp_path / "there" / "other", [5, 4, 2]), (tmp_path / "elsewhere" / "mine", [5, 4, 3]):
        with pytest.raises(UserError, match="cursor belongs to other shards"):
            next(loader(write_corpus(*other)).batches(cursor))


# ---- what is bad may be skipped --------------------------------------------------------------------------------------


def bad_corpus(directory: Path) -> Path:
    """Six shards of 9 rows in members of 3: one is missing, one cut in its third member, one has a bad second one."""
    index = write_corpus(directory, [9] * 6)
    (directory / "shard-1.tar").unlink()
    (directory / "shard-3.tar").write_bytes((directory / "shard-3.tar").read_bytes()[:2200])
    data = bytearray((directory / "shard-4.tar").read_bytes())
    data[1536:1544] = b"no array"
    (directory / "shard-4.tar").write_bytes(data)
    return index


LOST = {*range(9, 18), *range(30, 36), *range(39, 42)}  # a sample before a cut may miss a member: it is lost as well


@pytest.mark.parametrize("hosts", [1, 2, 4])
@pytest.mark.parametrize("position", [0, 3, 7])
def test_what_is_bad_is_skipped_alike_everywhere(tmp_path: Path, caplog, hosts: int, position: int):
    index = bad_corpus(tmp_path)
    options = {"skip_bad": True, "max_epochs": 2, "global_rows": 4}
    whole = list(loader(index, **options).batches())
    rows = np.concatenate([batch.tokens for batch in whole])
    seen = rows[rows[:, 0] >= 0]
    assert Counter(seen[:, 0].tolist()) == dict.fromkeys(set(range(54)) - LOST, 2) and (np.diff(seen) == 1).all()
    assert (rows == -1).all(axis=1).sum() == 2 * len(LOST)  # each keeps its place and holds nothing
    assert sum(batch.skipped for batch in whole) == 2 * len(LOST)
    for name in ("shard-1.tar is missing", "shard-3.tar is truncated", "shard-4.tar, sample 000039: member input_id"):
        assert f"skipped: shard {tmp_path}/{name}" in caplog.text
    cursor = whole[position - 1].cursor if position else None
    shares = [loader(index, **options, host=host, hosts=hosts).batches(cursor) for host in range(hosts)]
    for batch, *parts in zip(whole[position:], *shares, strict=True):
        np.testing.assert_array_equal(np.concatenate([part.tokens for part in parts]), batch.tokens)
        assert sum(part.skipped for part in parts) == batch.skipped


def test_nothing_is_skipped_unasked(tmp_path: Path):
    index = bad_corpus(tmp_path)
    with pytest.raises(UserError, match=r"it\.index: shard .*shard-1\.tar is missing"):
        loader(index)
    index.write_text(index.read_text().replace("shard-1.tar # 9 rows\n", ""))
    with pytest.raises(UserError, match=r"shard-3\.tar is truncated or damaged|sample 000039: member input_id\.npy"):
        list(loader(index, max_epochs=1).batches())


def test_a_shard_that_goes_missing_is_named(tmp_path: Path):
    data = loader(write_corpus(tmp_path, [9] * 2), max_epochs=1)
    (tmp_path / "shard-1.tar").unlink()
    with pytest.raises(UserError, match=r"^shard .*shard-1\.tar is missing$"):
        list(data.batches())


def test_what_is_skipped_must_be_counted_and_an_index_must_not_lie(tmp_path: Path):
    index = bad_corpus(tmp_path)
    index.write_text(index.read_text().replace("shard-1.tar # 9 rows", "shard-1.tar"))
    with pytest.raises(UserError, match=r"shard-1\.tar is missing, and the index file does not say how many rows"):
        loader(index, skip_bad=True)
    index.write_text("shard-0.tar # 8 rows\nshard-4.tar # 5 rows\n")
    for shard, rows in (("shard-0.tar", 9), ("shard-4.tar", 6)):
        index.write_text(f"{shard} # {rows - 1} rows\n")
        with pytest.raises(UserError, match=rf"{shard} holds {rows} rows where the index file says {rows - 1}"):
            list(loader(index, skip_bad=True, max_epochs=1).batches())


# ---- mixtures --------------------------------------------------------------------------------------------------------


BOUNDS = [0, 20_000, 40_000]


def mixed(batches: Iterable[Any], bounds: list[int]) -> np.ndarray:
    """Rows of each corpus in each batch, where rows of corpus c read from bounds[c] on."""
    first = np.concatenate([batch.tokens[:, :1].T for batch in batches])
    return np.stack([np.bincount(np.searchsorted(bounds, row, "right") - 1, minlength=len(bounds)) for row in first])


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Index files of three corpora, whose rows begin with 0, 20,000 and 40,000."""
    indices = []
    for number, counts in enumerate([[30] * 8, [25] * 3, [70]]):
        place = tmp_path_factory.mktemp("mixture")
        write_corpus(place, counts, first=BOUNDS[number]).rename(place / f"c{number}.index")
        indices.append(str(place / f"c{number}.index"))
    return indices


def test_a_mixture_keeps_its_weights_in_every_batch_and_in_the_long_run(three: list[str]):
    weights = dict(zip(three, (0.6, 0.3, 0.1), strict=True))
    data = loader(weights, global_rows=16)
    batches = list(itertools.islice(data.batches(), 50))
    counts = mixed(batches, BOUNDS)
    expected = 16 * np.array([0.6, 0.3, 0.1])
    assert (np.abs(counts - expected) <= 3).all()  # of one batch
    assert (np.abs(counts.sum(0) - 50 * expected) <= 9).all()  # of all, whatever their number: a row a stream at most
    assert data.rows_seen(50) == dict(zip(("c0", "c1", "c2"), counts.sum(0).tolist(), strict=True))
    assert data.rows_seen(0) == {"c0": 0, "c1": 0, "c2": 0}
    rows = np.concatenate([batch.tokens for batch in batches])
    assert (np.diff(rows) == 1).all()
    own = [rows[(rows[:, 0] >= low) & (rows[:, 0] < low + 20_000), 0] for low in BOUNDS]
    for first, total in zip(own, (240, 75, 70), strict=True):  # each corpus an epoch at a time
        early = first[: total - 8]
        assert len(set(early.tolist())) == len(early)


@PATIENT
@given(position=st.integers(0, 60), weights=st.lists(st.integers(1, 99), min_size=3, max_size=3), data=st.data())
def test_a_mixture_resumes_exactly_on_any_number_of_hosts(three: list[str], position: int, weights: list[int], data):
    mixture = {index: weight / 10 for index, weight in zip(three, weights, strict=True)}
    global_rows = data.draw(st.sampled_from([4, 8, 12]))
    batches = loader(mixture, global_rows=global_rows).batches()
    cursor = None
    for _ in range(position):
        cursor = next(batches).cursor
    expected = first_tokens(batches, 8)
    hosts = data.draw(st.sampled_from([1, 2, 4]))
    resumed = [
        first_tokens(loader(mixture, global_rows=global_rows, host=host, hosts=hosts).batches(cursor), 8)
        for host in range(hosts)
    ]
    assert [flat(parts) for parts in zip(*resumed, strict=True)] == expected


@pytest.mark.parametrize("epochs", [1, 2, 3])
def test_a_mixture_ends_before_a_corpus_is_read_too_often(three: list[str], epochs: int):
    data = loader(dict(zip(three, (0.2, 0.7, 0.1), strict=True)), max_epochs=epochs)
    rows = np.concatenate([batch.tokens[:, 0] for batch in data.batches()])
    most = Counter(rows.tolist())
    assert max(most.values()) == epochs
    second = sum(1 for row in rows if 20_000 <= row < 40_000)
    assert epochs * 75 - 16 <= second <= epochs * 75  # the one that ends first ends whole, but for part of a batch
    assert data.total_batches == len(rows) / 4


def test_one_corpus_of_any_weight_is_that_corpus(three: list[str]):
    alone = first_tokens(loader(three[0], max_epochs=2).batches())
    assert first_tokens(loader({three[0]: 7}, max_epochs=2).batches()) == alone


def test_a_mixture_far_into_a_run(three: list[str]):
    """Positions are exact where floating point is not: 10^13 rows."""
    data = loader(dict(zip(three, (0.7, 0.2, 0.1), strict=True)), global_rows=8)
    cursor = {**next(data.batches()).cursor, "batches": 10**12}
    batches = list(itertools.islice(data.batches(cursor), 10))
    before, after = data.rows_seen(10**12), data.rows_seen(10**12 + 10)
    assert mixed(batches, BOUNDS).sum(0).tolist() == [after[name] - before[name] for name in after]
    assert before["c0"] + before["c1"] + before["c2"] == 8 * 10**12 and abs(before["c0"] - 5.6e12) <= 8


def test_bad_mixtures(three: list[str]):
    cursor = next(loader({three[0]: 0.5, three[1]: 0.5}).batches()).cursor
    with pytest.raises(UserError, match="cursor belongs to other shards"):
        next(loader({three[0]: 0.6, three[1]: 0.4}).batches(cursor))
    next(loader({three[0]: 5, three[1]: 5}).batches(cursor))
    with pytest.raises(UserError, match="weights of a mixture must be positive, not 0"):
        loader({three[0]: 0, three[1]: 1})
    with pytest.raises(UserError, match="takes no train_samples"):
        loader({three[0]: 1}, train_samples=3)


# ---- prefetch --------------------------------------------------------------------------------------------------------


def test_prefetch_works_ahead_and_stops():
    made: list[int] = []
    closed = threading.Event()

    def numbers():
        try:
            for i in itertools.count():
                made.append(i)
                yield i
        finally:
            closed.set()

    source = numbers()
    ahead = prefetch(source, depth=3)
    assert next(ahead) == 0
    deadline = time.monotonic() + 5
    while len(made) < 4 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert [next(ahead), next(ahead)] == [1, 2]
    ahead.close()
    assert closed.is_set()
    assert len(made) <= 6
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("prefetch")]


def test_prefetch_hands_errors_on():
    def numbers():
        yield 1
        raise UserError("shard x is bad")

    ahead = prefetch(numbers())
    assert next(ahead) == 1
    with pytest.raises(UserError, match="shard x is bad"):
        next(ahead)


def test_loader_threads_end_with_the_consumer(corpus):
    before = set(threading.enumerate())
    ahead = prefetch(loader(corpus([5, 4, 2])).batches())
    next(ahead)
    assert len(threading.enumerate()) > len(before)
    ahead.close()
    assert set(threading.enumerate()) <= before


def test_prefetch_does_not_wait_where_it_is_told_to_stop() -> None:
    released = threading.Event()

    def slow() -> Iterator[int]:
        yield 1
        released.wait(60)
        yield 2

    stop: list[int] = []
    items = prefetch(slow(), stop=stop)
    assert next(items) == 1
    threading.Timer(0.3, stop.append, [15]).start()
    began = time.monotonic()
    assert list(items) == [] and time.monotonic() - began < 10
    released.set()
    for thread in threading.enumerate():
        if thread.name.startswith("prefetch"):
            thread.join()
