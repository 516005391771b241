"""Parts on the workers of Apache Beam: its DirectRunner in several processes, from and to a bucket over HTTP.

Slow, and only where apache_beam is installed: `pip install -e '.[beam]'` in an environment of its own, because it needs
an older protobuf than constraints.txt has.
"""

import importlib.util
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import pytest

from tests.helpers import bucket
from tests.helpers.corpora import COMMAND, REPOSITORY, call, digest, kill_workers, make
from zero.base.errors import UserError
from zero.corpus.preparing.verify import verify
from zero.files import storage

HAS_BEAM = importlib.util.find_spec("apache_beam") is not None
needs_beam = pytest.mark.skipif(not HAS_BEAM, reason="apache_beam is not installed: pip install apache-beam")
RUNNER = ["--runner", "DirectRunner", "--direct_running_mode=multi_processing", "--direct_num_workers=2"]
IN_ONE_PROCESS = ["--runner", "DirectRunner", "--direct_running_mode=in_memory"]  # which starts in a tenth of the time
ALL_PARTS = ["--deduplicate", "--near-duplicates", "0.8", "--shuffle"]  # options that look at all of them
SIZES = ["--row-tokens", "16", "--rows-per-member", "4", "--rows-per-shard", "8", "--part-bytes", "2500", "--name", "c"]


def places(root: str | Path) -> list[str]:
    return ["--directory", f"{root}/corpus", "--index-directory", f"{root}/index"]


def start(
    source: str | Path, root: str | Path, options: Sequence[str] = (), runner: Sequence[str] = RUNNER
) -> "subprocess.Popen[str]":
    """The command on Beam, in a group of its own, so that a kill reaches its workers too."""
    return subprocess.Popen(
        [*COMMAND, str(source), *SIZES, *options, *places(root), *runner],
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
@needs_beam
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
@needs_beam
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


@pytest.mark.slow
@needs_beam
def test_options_that_look_at_all_parts(lines: Path, tmp_path: Path):
    """Duplicates, near duplicates and a shuffle: all files are those of a local corpus, the page and the lists too."""
    assert call(lines, *SIZES, *ALL_PARTS, *places(tmp_path / "near"), "--workers", "1").returncode == 0
    process = start(lines, tmp_path / "far", ALL_PARTS, IN_ONE_PROCESS)
    printed, said = process.communicate()
    assert process.returncode == 0, said
    assert digest(tmp_path / "far") == digest(tmp_path / "near")
    assert printed.count("needs about") == 3 and "documents equal to an earlier one" in printed


@pytest.mark.slow
@needs_beam
def test_job_service(lines: Path, tmp_path: Path):
    """By the job API, which Flink and Spark serve too: all files are those of a local corpus."""
    assert call(lines, *SIZES, *places(tmp_path / "near"), "--workers", "1").returncode == 0
    command = [sys.executable, "-m", "apache_beam.runners.portability.local_job_service_main"]
    port_file = tmp_path / "port"
    service = subprocess.Popen([*command, "--port_file", port_file, "--staging_dir", tmp_path / "staging"])
    try:
        while not port_file.exists() or not port_file.read_text():
            assert service.poll() is None
            time.sleep(0.1)
        endpoint = f"--job_endpoint=localhost:{port_file.read_text().strip()}"
        runner = ["--runner", "PortableRunner", endpoint, "--environment_type=LOOPBACK"]
        process = start(lines, tmp_path / "far", runner=runner)
        _, said = process.communicate()
    finally:
        service.terminate()
        service.wait()
    assert process.returncode == 0, said
    assert digest(tmp_path / "far") == digest(tmp_path / "near")


@pytest.mark.slow
@needs_beam
def test_killed_at_ten_instants(lines: Path, tmp_path: Path):
    """One corpus, whose call is killed with -9 ten times, in both passes and in the parts; the last one ends it."""
    options = ["--deduplicate"]
    assert call(lines, *SIZES, *options, *places(tmp_path / "near"), "--workers", "1").returncode == 0
    place = tmp_path / "far" / "corpus" / "c"
    for instant in (1, 4, 7, 9, 12, 16, 20, 2, 22, 13):  # files of this call: the passes write eight, a part ten or so
        began = time.time()
        process = start(lines, tmp_path / "far", options, IN_ONE_PROCESS)
        while written_since(place, began) < instant:
            assert process.poll() is None, process.communicate()
            time.sleep(0.01)
        os.killpg(process.pid, signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
        process.communicate()
        assert not (tmp_path / "far" / "index").exists()
    made = {path: path.stat().st_mtime_ns for path in place.glob("part-?????.json")}
    assert made
    process = start(lines, tmp_path / "far", options, IN_ONE_PROCESS)
    _, said = process.communicate()
    assert process.returncode == 0, said
    assert digest(tmp_path / "far") == digest(tmp_path / "near")
    assert {path: path.stat().st_mtime_ns for path in made} == made


def written_since(place: Path, began: float) -> int:
    """How many files are there that were written since then; some vanish while they are counted."""
    written = 0
    for path in place.rglob("[!.]*"):
        with suppress(FileNotFoundError):
            written += path.is_file() and path.stat().st_mtime > began
    return written


@pytest.mark.slow
@needs_beam
def test_worker_that_is_killed_again_and_again(lines: Path, tmp_path: Path):
    """The part is named, with status 1, and nothing waits."""
    process = start(lines, tmp_path, (), IN_ONE_PROCESS)
    killed = kill_workers(process)
    _, said = process.communicate()
    line = said.splitlines()[-1]
    assert process.returncode == 1 and "killed by signal 9, 3 times" in line and "error: part " in line, said
    assert killed >= 3
