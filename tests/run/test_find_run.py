"""Where runs lie: which one a resume finds, and what its command line becomes."""

import json
import os
import re
import shutil
import sys
import tracemalloc
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import hydra
import pytest
from omegaconf import DictConfig, OmegaConf

import zero.commands.modes  # noqa: F401  tells Hydra the keys
from tests.helpers import bucket, hosts
from zero.base.errors import UserError
from zero.commands.cli import errors_in_lines
from zero.files import storage
from zero.record.run_files import (
    CONFIG_FILE,
    LAYOUT_FILE,
    checkpoint_directory,
    mirror,
    rebuild,
    remove_unfinished,
    saved_config,
    saved_steps,
)
from zero.record.starts import note_start, start_now
from zero.run.find_run import (
    DEFAULT_ROOT,
    SWEEPS,
    newest_run,
    results_in_run,
    resume_overrides,
    runs_in,
    saved_command,
    write_command,
)
from zero.run.resume import last_lineages, write_lineage

CONF = Path(__file__).parents[2] / "conf"
ODD_NAMES = [
    "my run",
    "it's",
    "a='b', c",
    'say "so"',
    "back\\slash",
    "trailing\\",
    "{a: 1}",
    "a,b",
    "#1",
    "(x)",
    "ü",
    "$x",
]
AMONG_THEM = ("it's", "a='b', c", "trailing\\", "{a: 1}")
MOST_ODD = [name if name in AMONG_THEM else pytest.param(name, marks=pytest.mark.wide) for name in ODD_NAMES]


@pytest.fixture(autouse=True)
def in_tmp_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def make_run(
    place: Path, steps: list[int], checkpoints: str = "checkpoints", bucket_path: str = "null", last: int | None = None
) -> Path:
    """A run with checkpoints of these steps; `last` is the last one that it was to train."""
    place.mkdir(parents=True)
    (place / CONFIG_FILE).write_text(f"data:\n  bucket_path: {bucket_path}\n  checkpoint_directory: {checkpoints}\n")
    (place / LAYOUT_FILE).write_text("1 element\n")
    for step in steps:
        (place / checkpoints / str(step) / "meta").mkdir(parents=True)
        if last is not None:
            (place / checkpoints / str(step) / "meta" / "metadata").write_text(json.dumps({"last_step": last}))
    return place


def make_sweep(place: Path, *arguments: str) -> None:
    """What Hydra writes before the first job of a sweep."""
    place.mkdir(parents=True, exist_ok=True)
    config = {"hydra": {"overrides": {"task": list(arguments)}, "job": {"num": "???"}, "now": "${now:%Y}"}}
    OmegaConf.save(OmegaConf.create(config), place / "multirun.yaml")


def hydra_reads(overrides: list[str]) -> tuple[str, str]:
    """The run to resume and the run directory, as a program gets them."""
    with hydra.initialize_config_dir(str(CONF), version_base="1.3"):
        config = hydra.compose("config", overrides, return_hydra_config=True)
    return config.resume, config.hydra.run.dir


def test_without_a_flag_nothing_changes() -> None:
    make_run(DEFAULT_ROOT / "a", [5])
    assert resume_overrides(["seed=1", "--cfg", "job"]) == ["seed=1", "--cfg", "job"]


@pytest.mark.parametrize("flag", ["--resume", "--resume=auto"])
def test_resume_finds_the_last_run(flag: str, in_tmp_path: Path) -> None:
    """A resume finds the run that was started last and continues in its directory."""
    make_run(DEFAULT_ROOT / "b", [5])
    make_run(DEFAULT_ROOT / "2030-01-01" / "a", [5, 10])
    make_run(DEFAULT_ROOT / "c", [])
    overrides = resume_overrides(["seed=1", flag])
    assert overrides[0] == "seed=1"
    assert hydra_reads(overrides) == (str(in_tmp_path / "runs/2030-01-01/a"),) * 2


def test_runs_are_ordered_by_their_starts(in_tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Neither a clock that was ahead nor a copy decides which run continues; a line says which one, and why."""
    runs = [make_run(DEFAULT_ROOT / name, [5]) for name in ("one", "two", "three")]
    for step, run in enumerate([runs[0], runs[1], runs[2], runs[1]]):
        note_start(run, start_now(step), runs_in(DEFAULT_ROOT))
    os.utime(runs[0] / CONFIG_FILE, (4e9, 4e9))
    assert hydra_reads(resume_overrides(["--resume"]))[0] == str(in_tmp_path / runs[1])
    assert f"--resume continues {runs[1]}, the most recently started of 3 runs" in caplog.text
    shutil.copytree(runs[1], DEFAULT_ROOT / "copy")
    os.utime(DEFAULT_ROOT / "copy" / CONFIG_FILE, (3e9, 3e9))
    for flag in ("--resume", "--resume=auto"):
        assert hydra_reads(resume_overrides([flag]))[0] == str(in_tmp_path / DEFAULT_ROOT / "copy")
        assert f"{flag} continues runs/copy: its files are newer than in its copies, runs/two" in caplog.text


def test_other_config_files() -> None:
    """Other files called config.yaml are not runs."""
    run = make_run(DEFAULT_ROOT / "a", [5])
    for other in ("wandb/offline-run/files", ".hydra", "checkpoints/5/meta"):
        (run / other).mkdir(parents=True, exist_ok=True)
        (run / other / CONFIG_FILE).write_text("data:\n  value: 3\n")
    assert newest_run(DEFAULT_ROOT) == run


@pytest.mark.parametrize("name", MOST_ODD)
@pytest.mark.parametrize("is_fork", [False, True])
def test_any_directory_name(name: str, is_fork: bool, in_tmp_path: Path) -> None:
    """Any name of a directory survives the way through Hydra."""
    run = make_run(DEFAULT_ROOT / name, [5, 10])
    step = ["data.resume_step=5"] if is_fork else []
    resumed, directory = hydra_reads(resume_overrides(["--resume", *step]))
    assert resumed == str(in_tmp_path / run)
    assert (directory == resumed) is not is_fork


@pytest.mark.parametrize(
    "given", ["elsewhere/my run", "'elsewhere/my run'", '"elsewhere/my run"', "./elsewhere/../elsewhere/my run"]
)
def test_run_can_be_named(given: str, in_tmp_path: Path) -> None:
    make_run(DEFAULT_ROOT / "newer", [5])
    run = make_run(Path("elsewhere/my run"), [5, 10])
    overrides = resume_overrides([f"hydra.run.dir={given}", "--resume"])
    assert hydra_reads(overrides) == (str(in_tmp_path / run),) * 2


def test_older_step_forks(in_tmp_path: Path) -> None:
    """A resume from an older step gets a new directory."""
    run = make_run(Path("mine"), [5, 10])
    for step, is_fork in (("5", True), ("10", False), ("null", False)):
        overrides = resume_overrides(["hydra.run.dir=mine", f"data.resume_step={step}", "--resume"])
        resumed, directory = hydra_reads(overrides)
        assert resumed == str(in_tmp_path / run)
        assert directory.startswith("runs/") if is_fork else directory == resumed


def test_nothing_to_resume() -> None:
    make_run(DEFAULT_ROOT / "a", [])
    make_run(Path("empty"), [])
    Path("other").mkdir()
    with pytest.raises(UserError, match="runs has no checkpoint"):
        resume_overrides(["--resume"])
    for place in ("empty", "other", "nowhere"):
        with pytest.raises(UserError, match=f"{place} has no checkpoint"):
            resume_overrides(["--resume", f"hydra.run.dir={place}"])
        assert resume_overrides(["--resume=auto", f"hydra.run.dir={place}"]) == [f"hydra.run.dir={place}"]
    assert resume_overrides(["--resume=auto", "seed=1"]) == ["seed=1"]


@pytest.mark.parametrize("option", ["-m", "--multirun"])
def test_sweep_directories(option: str, in_tmp_path: Path) -> None:
    """A sweep is continued in its directory, and no job in that of another."""
    make_run(DEFAULT_ROOT / "multirun" / "older" / "0", [5])
    make_run(DEFAULT_ROOT / "multirun" / "it's" / "1", [5])
    make_run(DEFAULT_ROOT / "no sweep", [5])
    make_run(Path("mine") / "a" / "0", [5])
    for name in ("older", "it's"):
        make_sweep(SWEEPS / name, "seed=1,2")
    for flag in ("--resume", "--resume=auto"):
        newest, given = resume_overrides([option, "seed=1,2", flag]), ("hydra.sweep.dir=mine",)
        assert newest == [option, "seed=1,2", f"hydra.sweep.dir='{in_tmp_path}/runs/multirun/it\\'s'"]
        named = resume_overrides([option, "seed=1,2", *given, flag])
        assert named == [option, "seed=1,2", f"hydra.sweep.dir='{in_tmp_path}/mine'"]
    with pytest.raises(UserError, match="none has no checkpoint"):
        resume_overrides([option, "--resume", "hydra.sweep.dir=none"])
    assert resume_overrides([option, "--resume=auto", "hydra.sweep.dir=none"]) == [option, "hydra.sweep.dir=none"]
    forks = resume_overrides([option, "--resume", "hydra.run.dir=mine/a/0", "seed=1,2"])
    assert forks == [option, "seed=1,2", f"resume='{in_tmp_path}/mine/a/0'"]


def test_sweep_of_the_same_command(in_tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A sweep is continued by its own command, also if a newer one of another command has checkpoints."""
    make_run(SWEEPS / "mine" / "0", [5])
    make_run(SWEEPS / "newer" / "0", [5])
    make_run(SWEEPS / "fork" / "0", [5])
    text = "data.checkpoint_directory=place/${hydra:job.num}"
    make_sweep(SWEEPS / "mine", "seed=1,2", "optimizer.b1=9e-1", text)
    make_sweep(SWEEPS / "newer", "seed=3,4")
    make_sweep(SWEEPS / "fork", "seed=1,2", "optimizer.b1=0.9", text, "resume='/run'")
    make_sweep(SWEEPS / "killed before its first job", "seed=5,6")
    (SWEEPS / "damaged").mkdir()
    (SWEEPS / "damaged" / "multirun.yaml").write_text("hydra: {")
    mine = ["optimizer.b1=0.90", "seed=1,2", text]
    for flag in ("--resume", "--resume=auto"):
        assert resume_overrides(["-m", *mine, flag])[-1] == f"hydra.sweep.dir='{in_tmp_path}/runs/multirun/mine'"
        assert f"skipped: {SWEEPS}/damaged/multirun.yaml is damaged" in caplog.text
    killed = resume_overrides(["-m", "seed=5,6", "--resume=auto"])
    assert killed[-1] == f"hydra.sweep.dir='{in_tmp_path}/runs/multirun/killed before its first job'"
    assert "starts a new sweep" not in caplog.text
    assert resume_overrides(["-m", "seed=1,2,3", "--resume=auto"]) == ["-m", "seed=1,2,3"]
    assert "--resume=auto starts a new sweep: no sweep in runs/multirun has this command" in caplog.text
    for command in ("seed=5,6", "seed=1,2,3"):
        with pytest.raises(UserError, match="--resume: runs/multirun: a sweep of this command has no checkpoint"):
            resume_overrides(["-m", command, "--resume"])


def compose_for_hydra(arguments: Sequence[str]) -> DictConfig:
    """The configuration of these arguments, with that of Hydra itself."""
    with hydra.initialize_config_dir(str(CONF), version_base="1.3"):
        return hydra.compose("config", list(arguments), return_hydra_config=True)


def test_results_lie_in_their_run(in_tmp_path: Path) -> None:
    """An evaluation, a sampling or a plan makes no directory beside runs, unless it names one."""
    run = make_run(DEFAULT_ROOT / "it's", [5])
    (run / CONFIG_FILE).touch()

    def directory(*arguments: str) -> str:
        """As Hydra makes it of the arguments."""
        return str(compose_for_hydra(results_in_run(arguments)).hydra.run.dir)

    stamp = r"/\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d"
    assert re.fullmatch(f"runs/it's/evaluate{stamp}", directory("mode=evaluate"))
    named = f"model.model_path='{run}@5'".replace("it's", "it\\'s")
    assert re.fullmatch(f"runs/it's/sample{stamp}", directory("mode=sample", named))
    assert re.fullmatch(f"sample{stamp}", directory("mode=sample", "model.model_path=hf:a/b"))
    assert directory("mode=evaluate", "hydra.run.dir=mine") == "mine"
    for source in ((), (named,)):
        assert re.fullmatch(f"plan{stamp}(-2)?", directory("mode=plan", *source))  # -2 within the same second
    assert results_in_run([]) == []


@pytest.mark.parametrize("name", MOST_ODD)
def test_results_of_one_second(name: str, in_tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two evaluations that start in the same second have directories of their own, whatever the name of the run is."""
    run = make_run(DEFAULT_ROOT / name, [5])
    monkeypatch.setattr("zero.run.find_run.newest_run", lambda _: run)
    (run / CONFIG_FILE).touch()
    arguments = [text.replace("${now:%Y-%m-%d_%H-%M-%S}", "now") for text in results_in_run(["mode=evaluate"])]
    found = [str(compose_for_hydra(arguments).hydra.run.dir) for _ in range(2)]
    assert found == [f"runs/{name}/evaluate/{directory}" for directory in ("now", "now-2")]
    assert all(Path(directory).is_dir() for directory in found)


def test_finished_run_of_another_job(in_tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """`--resume=auto` finishes a job of the same keys, and starts another one; `--resume` continues what it is told."""
    finished = make_run(DEFAULT_ROOT / "finished", [5, 10], last=10)
    write_command(finished, None, ["seed=1", "optimizer.b1=0.9", "resume=x", "distributed.process_id=1"])
    resumed = f"resume='{in_tmp_path}/runs/finished'"
    for same in ([], ["seed=1"], ["optimizer.b1=9e-1", "seed=1", "distributed.process_id=0"]):
        assert resumed in resume_overrides([*same, "--resume=auto"])
    assert caplog.text == ""
    for other in (["seed=2"], ["seed=1", "+preset=v3-8"]):
        caplog.clear()
        assert resume_overrides([*other, "--resume=auto"]) == other
        key = other[-1].lstrip("+").partition("=")[0]
        assert f"starts a new run: the newest with a checkpoint, {finished}, is finished" in caplog.text
        assert f"other values of {key}; hydra.run.dir={finished} continues it" in caplog.text
        for told in (["--resume"], ["--resume=auto", f"hydra.run.dir={finished}"]):
            assert resumed in resume_overrides([*other, *told])
    (finished / "checkpoints" / "10").rename(finished / "checkpoints" / "10.damaged")
    caplog.clear()
    assert resumed in resume_overrides(["seed=2", "--resume=auto"])  # it is not finished
    assert f"--resume=auto continues {finished}, which was started with other values of seed" in caplog.text


def test_killed_before_its_first_checkpoint(in_tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A job whose newest run has no checkpoint starts again; another job says which run it continues, and why."""
    older = make_run(DEFAULT_ROOT / "older", [5], last=10)
    write_command(older, None, ["seed=1"])
    killed = make_run(DEFAULT_ROOT / "killed", [])
    write_command(killed, None, ["seed=2"])
    assert resume_overrides(["seed=2", "--resume=auto"]) == ["seed=2"]
    assert f"starts a new run: {killed} has the same command but no checkpoint" in caplog.text
    caplog.clear()
    assert f"resume='{in_tmp_path / older}'" in resume_overrides(["seed=1", "--resume=auto"])
    assert f"--resume=auto continues {older}: newer runs have no checkpoint: {killed}" in caplog.text
    assert "other values" not in caplog.text


def test_command_of_a_run(in_tmp_path: Path) -> None:
    """The keys of all starts count, the later of two values; a damaged file is named."""
    run = make_run(DEFAULT_ROOT / "a", [5])
    assert saved_command(run) == {}
    write_command(run, None, ["seed=1", "zero.stage=1", "hydra.run.dir=x"])
    write_command(run, run, ["zero.stage=2", "data.resume_step=3"])
    assert saved_command(run) == {"seed": "1", "zero.stage": "2"}
    (run / "command.json").write_text("[")
    with pytest.raises(UserError, match=r"a/command\.json is damaged: expected keys and values; delete it"):
        resume_overrides(["--resume=auto"])
    assert resume_overrides(["--resume"])


@pytest.mark.parametrize("flag", ["--resume=yes", "--resume=", "--resume-auto", "--resumes"])
def test_misspelled_flag_is_refused(flag: str) -> None:
    make_run(DEFAULT_ROOT / "a", [5])
    with pytest.raises(UserError, match=f"{flag}: expected --resume or --resume=auto"):
        resume_overrides([flag])


def test_a_directory_to_resume_in_is_named_otherwise() -> None:
    with pytest.raises(UserError, match=r"to resume the run in a directory, use --resume hydra\.run\.dir=runs/a"):
        resume_overrides(["--resume=runs/a"])


@pytest.mark.parametrize("content", ["", "data: {", "seed: 1\n", "data: 5\n", "data:\n  corpus: null\n"])
def test_damaged_run(content: str, in_tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A damaged run is named and passed over."""
    good = make_run(DEFAULT_ROOT / "good", [5])
    damaged = make_run(DEFAULT_ROOT / "newer", [5])
    (damaged / CONFIG_FILE).write_text(content)
    assert f"resume='{in_tmp_path / good}'" in resume_overrides(["--resume"])
    assert f"skipped: {damaged}/{CONFIG_FILE} is damaged: " in caplog.text
    with pytest.raises(UserError, match=f"{damaged}/{CONFIG_FILE} is damaged: "):  # where it is the one that is named
        resume_overrides(["--resume=auto", f"hydra.run.dir={damaged}"])


def test_deleted_bucket(
    server: str, in_tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A deleted bucket is named and passed over."""
    bucket.use(monkeypatch, server)
    older = make_run(DEFAULT_ROOT / "older", [5])
    make_run(DEFAULT_ROOT / "newer", [], bucket_path="deleted")
    assert newest_run(DEFAULT_ROOT) == older
    assert "skipped: gs://deleted/checkpoints: no such bucket" in caplog.text


@pytest.mark.parametrize("flag", ["--resume", "--resume=auto"])
def test_silent_bucket_is_tried_again(
    flag: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A bucket that does not answer is tried again, and no older run is taken."""
    bucket.use(monkeypatch, f"http://127.0.0.1:{hosts.free_port()}", deadline=0.3)
    make_run(DEFAULT_ROOT / "older", [5])
    make_run(DEFAULT_ROOT / "newer", [], bucket_path="bucket")
    monkeypatch.setattr("zero.commands.cli.exit_immediately", sys.exit)
    with pytest.raises(SystemExit, match=r"^1$"), errors_in_lines():
        resume_overrides([flag])
    assert capsys.readouterr().err.startswith("error: gs://bucket/checkpoints: no answer within")


@pytest.mark.parametrize("flag", ["--resume", "--resume=auto"])
def test_one_walk_past_the_checkpoints(flag: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A resume looks for runs once, and not among the files of their checkpoints."""
    make_run(DEFAULT_ROOT / "older", [5])
    newest = make_run(DEFAULT_ROOT / "sweep" / "0", [5])
    walked: list[str] = []

    def count(root: Path, **options: Any) -> Iterator[tuple[str, list[str], list[str]]]:
        for place in walk(root, **options):
            walked.append(place[0])
            yield place

    walk = os.walk
    monkeypatch.setattr("zero.run.find_run.os.walk", count)
    assert hydra_reads(resume_overrides([flag]))[0] == str(newest.absolute())
    assert sorted(walked) == ["runs", "runs/older", "runs/sweep", "runs/sweep/0"]


def test_older_runs_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs older than the newest valid one are not examined."""
    make_run(DEFAULT_ROOT / "older", [5])
    newest = make_run(DEFAULT_ROOT / "newest", [5])
    examined: list[Path] = []

    def count(run: Path) -> list[int]:
        examined.append(run)
        return saved_steps(run)

    monkeypatch.setattr("zero.run.find_run.saved_steps", count)
    assert newest_run(DEFAULT_ROOT) == newest and examined == [newest]


def test_launcher_with_a_fixed_step() -> None:
    """A launcher that would go back at every start is refused."""
    make_run(DEFAULT_ROOT / "a", [5, 10])
    with pytest.raises(UserError, match=r"data\.resume_step: expected --resume, used once"):
        resume_overrides(["--resume=auto", "data.resume_step=5"])


def test_half_written_checkpoint_is_none() -> None:
    run = make_run(DEFAULT_ROOT / "a", [5])
    (run / "checkpoints" / "10.orbax-checkpoint-tmp").mkdir()
    (run / "checkpoints" / "11").touch()
    assert saved_steps(run) == [5]


def test_place_of_checkpoints(in_tmp_path: Path) -> None:
    assert checkpoint_directory(Path("run"), None, "checkpoints") == Path("run/checkpoints")
    assert checkpoint_directory(Path("run"), None, "/scratch/it") == Path("/scratch/it")
    assert checkpoint_directory(Path("run"), "gs://bucket/", "a/b/") == "gs://bucket/a/b"
    assert checkpoint_directory(Path("run"), "bucket", "/scratch/it") == Path("/scratch/it")
    run = make_run(Path("run"), [], checkpoints=str(in_tmp_path / "shared"))
    (in_tmp_path / "shared" / "7").mkdir(parents=True)
    assert saved_steps(run) == [7]


def test_directory_without_a_run() -> None:
    """A directory that is not a run is named."""
    with pytest.raises(UserError, match=r"nowhere: not a run directory, config\.yaml is missing"):
        saved_config(Path("nowhere"))


def test_lost_run_directory(in_tmp_path: Path) -> None:
    """A run directory that was lost is rebuilt from the copy beside its checkpoints."""
    place = in_tmp_path / "shared"
    run = make_run(Path("mine"), [5], checkpoints=str(place))
    (run / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n')
    mirror(run, place)
    kept = {path.name: path.read_bytes() for path in run.iterdir()}
    shutil.rmtree(run)
    for named in ([], ["hydra.run.dir=mine"], ["hydra.run.dir=elsewhere/other"]):
        overrides = resume_overrides(["--resume", f"data.checkpoint_directory={place}", *named])
        resumed, directory = hydra_reads([one for one in overrides if "checkpoint_directory" not in one])
        assert resumed == directory and Path(directory).is_relative_to(in_tmp_path)
        assert {path.name: path.read_bytes() for path in Path(directory).iterdir()} == kept

    # What this machine has written since stays; what another one has written since comes.
    (Path("mine") / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n')
    (Path("mine") / "samples.txt").write_text("")
    assert rebuild(Path("mine"), place)
    assert (Path("mine") / "metrics.jsonl").read_text().count("step") == 3
    (in_tmp_path / "shared-run" / "samples.txt").write_text("text")
    assert rebuild(Path("mine"), place)
    assert (Path("mine") / "samples.txt").read_text() == "text"
    (Path("mine") / "samples.txt").unlink()  # a new run has none, and shows none of the attempt before
    mirror(Path("mine"), place)
    assert not (in_tmp_path / "shared-run" / "samples.txt").exists()


def test_long_files_are_copied_in_blocks(in_tmp_path: Path) -> None:
    """Neither the mirror nor a rebuilt directory takes memory for the metrics of a long run."""
    place = in_tmp_path / "shared"
    run = make_run(Path("mine"), [5], checkpoints=str(place))
    text = b'{"step": 1}\n' * 800_000
    (run / "metrics.jsonl").write_bytes(text)
    tracemalloc.start()
    mirror(run, place)
    os.truncate(run / "metrics.jsonl", len(text) - 1)  # another machine has continued the run
    assert rebuild(run, place)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 4 * storage.files.BLOCK < len(text) / 2
    assert (run / "metrics.jsonl").read_bytes() == text == (in_tmp_path / "shared-run" / "metrics.jsonl").read_bytes()


def test_start_without_emergency_checkpoints(in_tmp_path: Path) -> None:
    """It ends the lineages of the start before in the mirror too, also on a machine with an older copy."""
    place = in_tmp_path / "shared"
    emergency: Any = SimpleNamespace(lineages=["b", "a"])
    make_run(Path("first"), [5], checkpoints=str(place))
    make_run(Path("second"), [], checkpoints=str(place))
    write_lineage(Path("first"), emergency)
    mirror(Path("first"), place)
    assert rebuild(Path("second"), place) and last_lineages(Path("second")) == ["b", "a"]
    write_lineage(Path("second"), None)
    mirror(Path("second"), place)
    assert rebuild(Path("first"), place) and last_lineages(Path("first")) == []


def test_what_killed_processes_have_left(in_tmp_path: Path) -> None:
    """Files that were being written are removed from the run, its mirror and beside its checkpoints."""
    place = in_tmp_path / "shared"
    run = make_run(Path("mine"), [], checkpoints=str(place))
    (place / "7").mkdir(parents=True)
    mirror(run, place)
    before = sorted(in_tmp_path.rglob("*"))
    for directory in (run, place, in_tmp_path / "shared-run"):
        (directory / ".config.yaml.0123abcd").write_text("data: ")
    remove_unfinished(run, place)
    assert sorted(in_tmp_path.rglob("*")) == before
    remove_unfinished(run, f"gs://{bucket.BUCKET}/of/this/run")  # nothing is asked of the bucket


def test_no_mirror_inside_the_run(in_tmp_path: Path) -> None:
    """Nothing is mirrored beside checkpoints that are inside the run directory."""
    run = make_run(in_tmp_path / "mine", [5])
    mirror(run, run / "checkpoints")
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["5"]
    assert not rebuild(run, run / "checkpoints")


def test_resume_from_named_checkpoints(in_tmp_path: Path) -> None:
    """A resume from named checkpoints takes no other run."""
    run = make_run(DEFAULT_ROOT / "a", [], checkpoints=str(in_tmp_path / "one"))
    (in_tmp_path / "one" / "7").mkdir(parents=True)
    make_run(DEFAULT_ROOT / "newer", [9])
    resumed, _ = hydra_reads(resume_overrides(["--resume", f"data.checkpoint_directory={in_tmp_path}/one"])[1:])
    assert resumed == str(in_tmp_path / run)
    elsewhere = f"data.checkpoint_directory={in_tmp_path}/two"
    with pytest.raises(UserError, match="two has no checkpoint; the checkpoints of runs/newer are in runs/newer/check"):
        resume_overrides(["--resume", elsewhere])
    with pytest.raises(UserError, match=f"two has no checkpoint; the checkpoints of runs/a are in {in_tmp_path}/one"):
        resume_overrides(["--resume", "hydra.run.dir=runs/a", elsewhere])
    (in_tmp_path / "one").rename(in_tmp_path / "two")
    resumed, _ = hydra_reads(resume_overrides(["--resume", "hydra.run.dir=runs/a", elsewhere])[1:])
    assert resumed == str(in_tmp_path / run)
