"""`python main_zero.py` with a corpus that lies in a bucket."""

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import bucket, cli, s3
from zero.files import storage
from zero.record.metrics_file import read_metrics

JOB = (*cli.TINY, "hydra.run.dir=run")
PLACE = f"{bucket.BUCKET}/training"
Run = Callable[..., Any]


@pytest.fixture
def run(server: str, workplace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs in a place where nothing lies, with the workplace's corpus in the bucket."""
    bucket.use(monkeypatch, server)
    bucket.upload(workplace / "corpus", f"gs://{PLACE}/corpus")

    def run(*arguments: str) -> Any:
        checkpoints = f"data.checkpoint_directory={tmp_path}/checkpoints"
        return cli.Forks(tmp_path).run(*JOB, f"data.bucket_path={PLACE}", checkpoints, *arguments)

    return run


@pytest.fixture(scope="module")
def calm(workplace: Path) -> list[float]:
    """The losses of the same run from disk."""
    return cli.losses(cli.Lasting(workplace).train("run", *cli.TINY))


@pytest.mark.slow
def test_bucket_run_equals_disk_run(run: Run, calm: list[float], tmp_path: Path) -> None:
    """A run from a bucket is the run from disk."""
    there = run()
    assert there.returncode == 0, there.stderr
    assert cli.losses(tmp_path / "run") == calm
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["checkpoints", "checkpoints-run", "run"]  # nothing was downloaded


@pytest.mark.slow
def test_s3_run_equals_disk_run(
    s3_server: str, workplace: Path, calm: list[float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run with index files and shards on S3 is the run from disk; checkpoints are refused there."""
    s3.use(monkeypatch, s3_server)
    bucket.upload(workplace / "corpus", f"s3://{PLACE}/corpus")
    job = (*JOB, f"data.bucket_path=s3://{PLACE}")
    cli.check_refusal(cli.Forks(tmp_path).run(*job), "data.checkpoint_directory", f"save to s3://{PLACE}/checkpoints")
    cli.Forks(tmp_path).check(*job, f"data.checkpoint_directory={tmp_path}/checkpoints")
    assert cli.losses(tmp_path / "run") == calm


@pytest.mark.slow
def test_follower_on_another_machine(run: Run, calm: list[float], tmp_path: Path) -> None:
    """A follower that has only the bucket, killed and started again, scores each checkpoint once."""
    place = f"gs://{PLACE}/followed"
    own = ("mode=evaluate", f"model.model_path={place}", "evaluate.follow=true", "distributed.cpu_devices=2")
    followers = tmp_path / "follower"
    followers.mkdir()
    follower = cli.start(followers, *own)
    trainer = cli.start(tmp_path, *JOB, f"data.bucket_path={PLACE}", "data.checkpoint_directory=followed")
    assert follower.stdout is not None
    assert json.loads(follower.stdout.readline())["step"] == 6
    follower.kill()
    follower.communicate()
    done = cli.run(followers, *own)
    assert done.returncode == 0, done.stderr
    assert [json.loads(line)["step"] for line in done.stdout.splitlines()] == [12]
    trained = cli.finish(trainer)
    assert trained.returncode == 0, trained.stderr
    assert cli.losses(tmp_path / "run") == calm
    lines = [json.loads(line) for line in storage.read_bytes(f"{place}-run/evaluations.jsonl").splitlines()]
    assert [line["step"] for line in lines] == [6, 12] and lines[1]["evaluation/loss"] < lines[0]["evaluation/loss"]
    found = cli.Forks(followers).evaluate("once", f"model.model_path={place}", "distributed.cpu_devices=2")
    assert found["loss"] == lines[1]["evaluation/loss"]


@pytest.mark.slow
def test_counts_of_a_mixture(run: Run, tmp_path: Path) -> None:
    """A mixture counts its tokens and the rows that it skips, and continues both after a resume."""
    place = f"gs://{PLACE}/corpus"
    (shard,) = (url for url in storage.list_files(place) if "train-" in url)
    lines = storage.read_bytes(f"{place}/index/tiny_train.index").decode()
    storage.write(f"{place}/index/bad.index", (lines + lines.replace("train-00000", "gone")).encode())
    assert lines.count("train-00000") == 1 and shard.endswith("train-00000.tar")
    mixture = (
        "data.index_path_train=[{index: corpus/index/tiny_train.index, weight: 0.75},"
        "{index: corpus/index/bad.index, weight: 0.25}]"
    )
    names = ("tokens_seen", "tokens_seen/tiny_train", "tokens_seen/bad", "skipped_rows", "train/loss")

    def counted() -> list[list[float]]:
        return [[line[name] for name in names] for line in read_metrics(tmp_path / "run" / "metrics.jsonl")]

    whole = run(mixture, "data.max_skipped_rows=1000")
    assert whole.returncode == 0, whole.stderr
    assert "skipped: shard gs://" in whole.stderr and "gone.tar is missing" in whole.stderr
    uninterrupted = counted()
    shutil.rmtree(tmp_path / "checkpoints" / "12")
    resumed = run(mixture, "data.max_skipped_rows=1000", "--resume")
    assert resumed.returncode == 0 and "resumed from step 6" in resumed.stderr, resumed.stderr
    assert counted() == uninterrupted
    seen, first_corpus, second_corpus, skipped, _ = uninterrupted[-1]
    assert seen == first_corpus + second_corpus == 12 * 16 * cli.CONTEXT
    assert abs(second_corpus - seen / 4) <= 4 * cli.CONTEXT and 0 < skipped < 12 * 16 / 4

    shutil.rmtree(tmp_path / "checkpoints" / "12")  # the budget is the run's, resumes included
    over = run(mixture, f"data.max_skipped_rows={skipped - 1}", "--resume")
    assert over.returncode == 2
    assert over.stderr.splitlines()[-1].startswith("error: step ") and "Traceback" not in over.stderr
    assert f"rows of the data were skipped, but data.max_skipped_rows={skipped - 1}" in over.stderr


def test_errors_are_one_line(run: Run) -> None:
    """An error in a bucket is reported in one line."""
    done = run("data.index_path_train=corpus/none.index")
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith(f"error: index file gs://{PLACE}/corpus/none.index: no such file")
    assert "Traceback" not in done.stderr


@pytest.mark.usefixtures("run")
def test_replaced_machine(tmp_path: Path) -> None:
    """A machine that was replaced continues from the bucket, of the newest checkpoint that is whole."""
    kept = f"gs://{PLACE}/kept"
    lasting = cli.Lasting(tmp_path)
    job = (*JOB[:-1], f"data.bucket_path={PLACE}", "--resume=auto", "data.checkpoint_directory=kept")
    often = ("training.evaluation_frequency=4",)
    lasting.check(*job, *often, "hydra.run.dir=run")
    calm = cli.losses(tmp_path / "run")
    lose_machine(kept, tmp_path / "run")
    resumed = lasting.check(*job, *often, "hydra.run.dir=another")
    check_replaced(resumed.stderr, kept, tmp_path / "another")
    assert cli.losses(tmp_path / "another") == calm and not (tmp_path / "run").exists()


def lose_machine(kept: str, run: Path) -> None:
    """Of the checkpoints in a bucket the last one was being written when the machine was lost, one is damaged."""
    for url in storage.list_files(f"{kept}/12"):
        storage.remove(url)
    storage.write(f"{kept}/12/_CHECKPOINT_METADATA", b"{}")  # none
    storage.write(f"{kept}/8/meta/metadata", b"")  # set aside, and saved again
    shutil.rmtree(run)


def check_replaced(said: str, kept: str, run: Path) -> None:
    """A run on another machine has continued from what `lose_machine` left."""
    assert "resumed from step 4" in said, said
    assert f"moved checkpoint 8 aside to {kept}/8.damaged" in said
    standing = {url.removeprefix(f"{kept}/").split("/")[0] for url in storage.list_files(kept)}
    assert standing == {"4", "8", "8.damaged", "12"}


@pytest.mark.wide  # corpus/reading/test_loader_of_buckets.py and files/storage/test_stores.py have outages
def test_outage_and_replaced_machine(
    run: Run, calm: list[float], server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bucket that answers 503 for a while costs only time; a machine that was replaced continues from the bucket."""
    saved = ("data.checkpoint_directory=kept", "training.evaluation_frequency=4")
    launcher = ("--resume=auto", "data.wandb_project=zero", *saved)
    proxy = bucket.Proxy(server, budget=10**9, rate=0.0, faults=("503",))
    with bucket.disturbed(proxy) as address:
        bucket.use(monkeypatch, address)
        process = cli.Forks(tmp_path).start(*JOB, f"data.bucket_path={PLACE}", *launcher)
        metrics = tmp_path / "run" / "metrics.jsonl"
        while process.poll() is None and not (metrics.exists() and '"step": 2' in metrics.read_text()):
            time.sleep(0.01)
        proxy.rate = 1.0  # before the first checkpoint
        time.sleep(5)
        refused = proxy.injected["503"]
        proxy.rate = 0.0
        done = process.finish()
    assert done.returncode == 0 and refused > 0, done.stderr
    assert all(f"checkpoint {step} saved" in done.stderr for step in (4, 8, 12))
    assert cli.losses(tmp_path / "run") == calm
    assert not list(tmp_path.rglob("kept"))

    bucket.use(monkeypatch, server)
    run_id = (tmp_path / "run" / "wandb_run_id").read_text()
    kept = f"gs://{PLACE}/kept"
    lose_machine(kept, tmp_path / "run")
    resumed = run(*launcher, "hydra.run.dir=another")
    assert resumed.returncode == 0, resumed.stderr
    check_replaced(resumed.stderr, kept, tmp_path / "another")
    assert cli.losses(tmp_path / "another") == calm
    assert (tmp_path / "another" / "wandb_run_id").read_text() == run_id
    assert not (tmp_path / "run").exists()
