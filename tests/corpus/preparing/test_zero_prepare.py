"""The command zero-prepare, and data/prepare.py, which calls it."""

import json
import shlex
from pathlib import Path

import pytest

from tests.config.composing import compose
from tests.helpers import bucket
from tests.helpers.corpora import call, documents_of, run
from zero.commands.modes import check
from zero.corpus.format.index_files import read_index
from zero.files import storage
from zero.job.sizes import load_sizes


def test_the_command(folder: Path, tmp_path: Path):
    options = ["--name", "mine", "--row-tokens", "16"]
    options += ["--directory", str(tmp_path / "corpus"), "--index-directory", str(tmp_path / "index")]
    done = run(folder, *options, check=True)
    assert "mine_train.index: " in done.stdout and (tmp_path / "corpus/mine/train-00000.tar").is_file()
    assert call(folder, *options).stdout == done.stdout  # the second call finds it finished
    assert call(tmp_path / "corpus/mine", "--verify").stdout == f"{tmp_path}/corpus/mine matches its manifest\n"
    (tmp_path / "file").touch()
    mistakes: list[tuple[int, list[str | Path]]] = [
        (2, [folder, *options, "--row-tokens", "8"]),
        (2, [folder, *options, "--workers", "0"]),
        (2, [folder, *options, "--name", "a/b"]),
        (2, [folder, *options, "--tokenizer", "nowhere.json"]),
        (2, [folder, *options, "--index-directory", "gs://bucket/index"]),
        (2, [folder, *options, "--directory", "/proc/nowhere"]),
        (2, [folder, *options, "--directory", tmp_path / "file" / "corpus"]),
        (2, [tmp_path / "nowhere", "--verify"]),
        (2, [folder, *options, "--row-tokens", "many"]),
        (2, [folder, *options, "--unknown"]),
        (2, [folder, *options, "--tokenizer", "bytes", "--train-tokenizer", "300"]),
        (2, []),
    ]
    for status, arguments in mistakes:
        bad = call(*arguments)
        assert bad.returncode == status and bad.stdout == ""
        assert bad.stderr.startswith("error: ") and bad.stderr.count("\n") == 1 and "Errno" not in bad.stderr


@pytest.mark.parametrize("options", [["--row-tokens", "48"], ["--row-tokens", "64", "--train-tokenizer", "300"]])
def test_it_ends_with_the_command_that_trains(folder: Path, tmp_path: Path, monkeypatch, options: list[str]):
    """The command composes to a configuration that reads this corpus whole, with a model for its rows and tokens."""
    monkeypatch.chdir(tmp_path)
    done = call(folder, "--name", "mine", "--directory", "it's here", "--index-directory", "index files", *options)
    assert done.returncode == 0, done.stderr
    *_, introduction, command = done.stdout.splitlines()
    program, *overrides = shlex.split(command)
    assert (introduction, program) == ("Train on it:", "zero-train")
    config = check(compose(*overrides), load_sizes())
    assert config.data.index_path_train == "index files/mine_train.index" and config.data.corpus is None
    assert all(Path(str(path)).is_file() for path in (config.data.index_path_train, config.data.index_path_validation))
    size = load_sizes().chosen(config.model)
    assert (config.data.max_context, size.block_size) == (int(options[1]), int(options[1]))
    has_tokenizer = len(options) > 2
    assert size.vocab_size == (300 if has_tokenizer else 256)
    expected = "it's here/mine/tokenizer.json" if has_tokenizer else "bytes"
    assert config.data.tokenizer == expected


def test_writes_below_the_current_directory(folder: Path, tmp_path: Path, monkeypatch):
    """Without options zero-prepare writes below the current directory.

    As a wheel in any directory does: where the default index paths of a run look.
    """
    monkeypatch.chdir(tmp_path)
    assert call(folder, "--row-tokens", "16").returncode == 0
    assert (tmp_path / "data/corpus/text/train-00000.tar").is_file()
    shards = read_index("data/index/text_train.index")
    assert shards[0].path == "data/index/../corpus/text/train-00000.tar"


def test_everything_at_the_top_of_a_bucket(monkeypatch: pytest.MonkeyPatch):
    """The source, the index files, and shards of somebody else."""
    with bucket.serving() as address:
        bucket.use(monkeypatch, address)
        root = f"gs://{bucket.BUCKET}"
        texts = [f"document {number}" for number in range(40)]
        for part in range(2):
            lines = [json.dumps({"text": text}) for text in texts[part::2]]
            storage.write(f"{root}/{part}.jsonl", "\n".join(lines).encode())
        options = ["--name", "c", "--row-tokens", "16", "--directory", root, "--index-directory", root]
        done = call(root, *options)
        assert done.returncode == 0, done.stderr
        assert call(f"{root}/*.jsonl", *options, "--name", "d").returncode == 0
        found = {name: documents_of(f"{root}/{name}_train.index", 16) for name in "cd"}
        assert sorted(found["c"]) == sorted(found["d"]) and len(found["c"]) > 30
        shard = storage.read_bytes(f"{root}/c/train-00000.tar")
        storage.write(f"{root}/shard.tar", shard)
        storage.write(f"{root}/it.index", b"shard.tar\n")
        assert documents_of(f"{root}/it.index", 16) == found["c"]
