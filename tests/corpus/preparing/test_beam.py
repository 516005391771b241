"""Parts on the workers of Apache Beam: its DirectRunner in several processes, from and to a bucket over HTTP.

Slow, and only where apache_beam is installed: `pip install -e '.[beam]'` in an environment of its own, because it needs
an older protobuf than constraints.txt has.
"""

import importlib.util
import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.helpers import bucket
from tests.helpers.corpora import COMMAND, REPOSITORY, call, make
from zero.corpus.preparing.verify import verify
from zero.errors import UserError
from zero.files import storage

HAS_BEAM = importlib.util.find_spec("apache_beam") is not None
RUNNER = ["--runner", "DirectRunner", "--direct_running_mode=multi_processing", "--direct_num_workers=2"]
SIZES = ["--row-tokens", "16", "--rows-per-member", "4", "--rows-per-shard", "8", "--part-bytes", "2500", "--name", "c"]


@pytest.fixture
def lines(tmp_path: Path) -> Path:
    root = tmp_path / "lines"
    root.mkdir()
    for file in range(4):
        texts = [f"line {number * (file + 1) % 97} of some length" for number in range(60)]
        (root / f"{file}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return root


def places(root: str | Path) -> list[str]:
    return ["--directory", f"{root}/corpus", "--index-directory", f"{root}/index"]


def start(source: str | Path, root: str | Path) -> "subprocess.Popen[str]":
    """The command on Beam, in a group of its own, so that a kill reaches its workers too."""
    return subprocess.Popen(
        [*COMMAND, str(source), *SIZES, *places(root), *RUNNER],
        cwd=REPOSITORY,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


@pytest.mark.skipif(HAS_BEAM, reason="apache_beam is installed")
def test_without_beam(lines: Path, tmp_path: Path):
    done = call(lines, *SIZES, *places(tmp_path), *RUNNER)
    assert done.returncode == 2 and "the apache_beam library is missing" in done.stderr
    with pytest.raises(UserError, match=r"is one part, which needs no --runner"):
        make(lines, tmp_path, "other", runner=RUNNER)


@pytest.mark.slow
@pytest.mark.skipif(not HAS_BEAM, reason="apache_beam is not installed")
def test_killed_and_called_again(lines: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Killed with -9 after the first part: only missing parts are made, and all bytes are those of a local corpus."""
    assert call(lines, *SIZES, *places(tmp_path), "--workers", "1").returncode == 0
    near = tmp_path / "corpus" / "c"
    with bucket.serving() as address:
        bucket.use(monkeypatch, address)
        root = f"gs://{bucket.BUCKET}/beam"
        bucket.upload(lines, f"{root}/lines")
        process = start(f"{root}/lines", root)
        while not [url for url in storage.list_files(f"{root}/corpus") if "/c/part-" in url and url.endswith(".json")]:
            assert process.poll() is None, process.communicate()
            time.sleep(0.02)
        os.killpg(process.pid, signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
        process.communicate()
        made = storage.list_stats(f"{root}/corpus/c")
        parts = [url for url in made if "/c/part-" in url and url.endswith(".json")]
        assert 1 <= len(parts) and f"{root}/corpus/c/manifest.json" not in made
        process = start(f"{root}/lines", root)
        _, said = process.communicate()
        assert process.returncode == 0, said
        now = storage.list_stats(f"{root}/corpus/c")
        assert [url for url in parts if now[url].version != made[url].version] == []
        assert {os.path.basename(url) for url in now} == {path.name for path in near.iterdir()}
        for path in near.glob("*.tar"):
            assert storage.read_bytes(f"{root}/corpus/c/{path.name}") == path.read_bytes(), path.name
        assert verify(f"{root}/index/c_train.index") == []


@pytest.mark.slow
@pytest.mark.skipif(not HAS_BEAM, reason="apache_beam is not installed")
def test_part_that_cannot_be_prepared(lines: Path, tmp_path: Path):
    """Its line names it, the status is that of the mistake, and the other parts are made."""
    path = lines / "2.jsonl"
    path.write_text(path.read_text()[:1000] + "\n{")
    process = start(lines, tmp_path)
    _, said = process.communicate()
    line = said.splitlines()[-1]
    assert process.returncode == 2 and line.startswith("error: part ") and "2.jsonl, line " in line, said
    assert len(list((tmp_path / "corpus" / "c").glob("part-*.json"))) >= 2
    assert not list(tmp_path.rglob("*.error")) and not list(tmp_path.rglob("*.index"))
