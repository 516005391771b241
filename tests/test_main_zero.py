"""main_zero.py from the outside: every mistake is one clear line and a status, and nothing is overwritten."""

import ast
import errno
import gzip
import io
import json
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from docs.print_reference import all_metrics
from tests.helpers import cli
from tests.helpers.events import scalars
from zero.base.errors import Unavailable, UserError
from zero.checkpoints.metadata import META_CHECKSUM, meta_checksum
from zero.commands.cli import errors_in_lines
from zero.config.saved_config import flat_config
from zero.hosts import hardware
from zero.record.metrics_file import read_metrics
from zero.record.ownership import locked, owned
from zero.record.run_files import saved_steps
from zero.report.html_report import write_report
from zero.run.config import default_config


@pytest.fixture(scope="module")
def workplace(workplace: Path) -> Path:
    """With index files and shards that are damaged."""
    bad = workplace / "bad"
    bad.mkdir()
    (bad / "empty.index").write_text("# nothing\n\n")
    (bad / "lost.index").write_text("lost.tar # 32 rows\n")
    shard = next((workplace / "corpus" / "tiny").glob("train-*.tar")).read_bytes()
    (bad / "cut.tar").write_bytes(shard[: len(shard) // 2])
    (bad / "cut.index").write_text("cut.tar # 900 rows\n")
    rows = np.full((32, cli.CONTEXT), 7, np.uint16)
    rows[5, 9] = 300
    array = io.BytesIO()
    np.save(array, rows)
    with tarfile.open(bad / "big.tar", "w") as tar:
        member = tarfile.TarInfo("007.input_id.npy")
        member.size = len(array.getvalue())
        tar.addfile(member, io.BytesIO(array.getvalue()))
    (bad / "big.index").write_text("big.tar\n")
    return workplace


@pytest.fixture(scope="module")
def finished(workplace: Path) -> Path:
    """A run that ended, in a directory whose name a careless program would take apart."""
    place = "runs/it's a run, a=b"
    quoted = place.replace("'", "\\'")
    watched = ("data.tensorboard=true", "profile.steps=[8,9]", "profile.peak_flops=1e12")
    done = cli.run(
        workplace,
        *cli.TINY,
        "training.sample_tokens=5",
        *watched,
        f"hydra.run.dir='{quoted}'",
        "data.wandb_project=zero",
    )
    assert done.returncode == 0, done.stderr
    assert f"run directory: {workplace / place}" in done.stderr
    return workplace / place


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["model.sizee=test"], ["model.sizee", "did you mean model.size?"]),
        (["--resume"], ["--resume", "runs has no checkpoint"]),
    ],
    ids=["misspelled key", "nothing to resume"],
)
def test_mistake_in_an_empty_directory(arguments: list[str], named: list[str], tmp_path: Path) -> None:
    cli.check_refusal(cli.Lasting(tmp_path).run(*arguments), *named)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["train"], ["train: expected key=value, such as mode=train"]),
        (["-x"], ["-x: no such option", "key=value"]),
        (["runs/a"], ["runs/a: expected key=value"]),
    ],
)
def test_arguments_that_are_no_keys(arguments: list[str], named: list[str], tmp_path: Path) -> None:
    cli.check_refusal(cli.Lasting(tmp_path).run(*arguments), *named)


def test_a_slice_on_this_machine(tmp_path: Path) -> None:
    """Settings for TPUs do not train on a CPU that nobody asked for; JAX_PLATFORMS of the tests asks for it."""
    environment = {name: value for name, value in cli.environment().items() if name != "JAX_PLATFORMS"}
    command = [sys.executable, str(cli.MAIN), "+slice=v5e-8", "data.index_path_train=a", "data.index_path_validation=b"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    if hardware.accelerator() is None:
        cli.check_refusal(done, "slice=v5e-8: this machine has no TPU")


@pytest.mark.parametrize(
    ("code", "problem"),
    [("pass", "does not have zero's packages"), ("sys.version_info = (3, 8, 10, 'final', 0)", "is too old")],
)
def test_outside_the_environment(code: str, problem: str, tmp_path: Path) -> None:
    """A Python without the packages, or too old a Python, names what sets zero up; it reads no annotation."""
    start = f"import runpy, sys; {code}; runpy.run_path({str(cli.MAIN)!r}, run_name='__main__')"
    command = [sys.executable, "-I", "-S", "-c", start]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    cli.check_refusal(done, problem, "./prepareTPUVM.sh", ".venv/bin/python main_zero.py")
    tree = ast.parse(cli.MAIN.read_text(), feature_version=(3, 8))
    assert isinstance(tree.body[1], ast.ImportFrom) and tree.body[1].module == "__future__"


def test_mistake_in_a_real_process(tmp_path: Path) -> None:
    """It ends after the imports of training and their threads."""
    cli.check_refusal(cli.run(tmp_path, *cli.TINY, "data.index_path_train=none.index"), "none.index")


def test_a_refused_start_leaves_no_directory(forks: cli.Forks) -> None:
    """Neither an empty log nor a directory; one that was there, with something in it, stays."""
    place = forks.workplace / "refused"
    cli.check_refusal(forks.run(*cli.TINY, "training.total_steps=0", "hydra.run.dir=refused"), "training.total_steps")
    assert not place.exists()
    place.mkdir()
    (place / "notes.txt").write_text("kept")
    cli.check_refusal(forks.run(*cli.TINY, "training.total_steps=0", "hydra.run.dir=refused"), "training.total_steps")
    assert (place / "notes.txt").read_text() == "kept"
    missing = "data.index_path_train=none.index"  # refused after a line of the log, which says how far it came
    cli.check_refusal(forks.run(*cli.TINY, missing, "hydra.run.dir=logged"), "none.index")
    assert "8 cpu devices" in (forks.workplace / "logged" / "main_zero.log").read_text()


LATER = ("fsspec", "google.cloud", "matplotlib", "orbax", "tensorstore", "tokenizers", "torch", "wandb")
AT_THE_FIRST_STEP = f"""
import gc, logging, os, sys

def report(record):
    if record.msg.startswith("first step with"):
        imported = [name for name in {LATER} if name in sys.modules]
        print("imported:", imported, "garbage is collected:", gc.isenabled(), file=sys.stderr, flush=True)
        os._exit(0)
    return True

logging.getLogger("zero.run.step_programs").addFilter(report)
"""


@pytest.mark.wide
def test_first_step_waits_for_nothing_else(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the first step two programs are compiled, for the state and the step, and only its libraries imported.

    Garbage is collected again, which the imports do without.
    """
    monkeypatch.setenv("JAX_LOG_COMPILES", "1")
    monkeypatch.setenv("NETRC", str(workplace / "absent"))  # no login of W&B
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    with cli.customized(AT_THE_FIRST_STEP):
        done = cli.run(workplace, *cli.TINY, "data.wandb_project=zero", "hydra.run.dir=first_step")
    assert done.stderr.splitlines()[-1] == "imported: [] garbage is collected: True", done.stderr
    assert done.stderr.count("Finished XLA compilation of") == 2, done.stderr


def test_every_mistake_has_a_line(lasting: cli.Lasting) -> None:
    """Those that Hydra refuses one at a time, and those that the check finds in what is left."""
    done = lasting.run("model.sizee=test", "training.total_steps=many", "zero.stage=7", "seed=-1")
    named = [
        "model.sizee",
        "seed=-1",
        "training.total_steps",
        "zero.stage=7",
    ]
    check_lines(done, named)


def check_lines(done: subprocess.CompletedProcess[str], named: list[str]) -> None:
    lines = done.stderr.splitlines()
    assert done.returncode == 2 and len(lines) == len(named), done.stderr
    for line, name in zip(lines, named, strict=True):
        assert line.startswith("error: ") and name in line


def test_mistakes_of_a_resume(forks: cli.Forks, finished: Path) -> None:
    """Every mistake of a resume is reported in one line; misspelled keys alone are, before anything is read."""
    done = forks.run("--resume", hydra_quoted(finished), "+preset=v3-8", "zero.stage=7", "seed=1")
    check_lines(done, ["zero.stage=7", "seed=1: expected 0"])
    done = forks.run("--resume", hydra_quoted(finished), "model.sizee=2", "seed=1")
    check_lines(done, ["model.sizee: no such key; did you mean model.size?"])


def test_exit_status(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The exit status tells whether a repeat may succeed."""
    monkeypatch.setattr("zero.commands.cli.exit_immediately", sys.exit)
    for error, status in (
        (OSError(errno.ENOSPC, "No space left on device", "runs/new/config.yaml"), 1),
        (PermissionError(errno.EACCES, "no"), 2),
        (Unavailable("the bucket does not answer"), 1),
        (UserError("one\ntwo"), 2),
    ):
        with pytest.raises(SystemExit) as ended, errors_in_lines():
            raise error
        assert ended.value.code == status
    printed = capsys.readouterr().err
    assert printed.startswith(
        "error: runs/new/config.yaml (the configuration, which a resume needs): No space left on device. Earlier "
        "checkpoints are intact: free some space and repeat the command with --resume=auto\n"
    )
    assert printed.endswith("error: the bucket does not answer\nerror: one\nerror: two\n")


IN_UNITS = pytest.mark.slow  # test_check.py and test_index_files.py have them without a process


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        pytest.param(["+trainig.total_steps=5"], ["trainig", "expected one of mode"], marks=IN_UNITS),
        (
            ["training.batch_size=12", "data.index_path_train=absent.index", "data.corpus=absent"],
            ["training.batch_size", "12", "8 devices", "gradient_accumulation_steps=2", "16"],
        ),
        (["zero.context_shards=16"], ["zero.context_shards=16", "a divisor of 8, the number of devices"]),
        pytest.param(["data.resume_step=5"], ["data.resume_step=5", "--resume"], marks=IN_UNITS),
        (["data.tokenizer=none.json"], ["none.json"]),
        (["data.index_path_validation=none.index"], ["none.index"]),
        pytest.param(["data.index_path_train=bad/empty.index"], ["bad/empty.index", "no shards"], marks=IN_UNITS),
        (["data.index_path_train=bad/lost.index"], ["bad/lost.index", "lost.tar", "missing"]),
        (["data.index_path_train=bad/cut.index"], ["cut.tar", "truncated"]),
        (["data.index_path_train=bad/big.index"], ["big.tar", "sample 007", "token 300", "vocabulary of 257"]),
        (["data.max_context=64"], [".tar", "rows of 32 tokens", "reads 64"]),
        (["training.max_epochs=1", "data.train_samples=15"], ["15 rows", "16"]),
        (
            ["data.corpus=nowhere", "data.index_path_train=bad/not_yet.index"],
            ["bad/not_yet.index", "no such file", "data.corpus=nowhere"],
        ),
        (["model.warm_start=true", "model.model_path=nowhere"], ["nowhere", "Hugging Face folder"]),
        (["export.folder=exported"], ["export.folder=exported", "no architecture of transformers equals this model"]),
        pytest.param(
            ["training.max_skipped_in_a_row=0", "training.peak_learning_rate=1e30"],
            ["not finite", "training.max_skipped_in_a_row=0"],
            marks=pytest.mark.slow,  # that compiles; tests/run/test_features.py shows it without
        ),
        (["hydra.run.dir=text/0.txt"], ["text/0.txt"]),
        (["hydra.run.dir=/dev/null/run"], ["/dev/null"]),
    ],
    ids=lambda value: value[-1] if isinstance(value, list) else None,
)
def test_mistake_is_one_line(lasting: cli.Lasting, overrides: list[str], named: list[str]) -> None:
    cli.check_refusal(lasting.run(*cli.TINY, *overrides), *named)


def hydra_quoted(run: Path) -> str:
    return "hydra.run.dir='" + str(run).replace("'", "\\'") + "'"


def test_fresh_start_overwrites_nothing(forks: cli.Forks, finished: Path) -> None:
    """A fresh start where there are checkpoints overwrites nothing."""
    before = cli.contents(finished)
    done = forks.run(*cli.TINY, hydra_quoted(finished), "seed=5")
    cli.check_refusal(done, f"{finished}/checkpoints has checkpoints", "--resume", "hydra.run.dir")
    done = forks.run(
        *cli.TINY, hydra_quoted(finished / "checkpoints").replace("hydra.run.dir", "data.checkpoint_directory")
    )
    cli.check_refusal(done, f"{finished}/checkpoints has checkpoints", "--resume")
    assert cli.contents(finished) == before


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (["model.size=bytes"], ["model.size=bytes: expected test, the value of the run"]),
        (["seed=1"], ["seed=1: expected 0, the value of the run"]),
        (["data.max_context=16"], ["data.max_context=16: expected 32, the value of the run"]),
        (["data.resume_step=7"], ["data.resume_step=7", "holds steps 6, 12"]),
        (
            ["data.checkpoint_directory=elsewhere"],
            ["/elsewhere has no checkpoint; the checkpoints of the run are in ", "/checkpoints"],
        ),
        (["training.gradient_accumulation_steps=3"], ["global batch of 16", "gradient_accumulation_steps=3"]),
        pytest.param(  # tests/run/test_data.py has it without a run
            ["distributed.cpu_devices=3"], ["global batch of 16", "3 devices"], marks=pytest.mark.wide
        ),
    ],
    ids=lambda value: value[-1] if isinstance(value, list) else None,
)
def test_wrong_resume_is_refused(
    forks: cli.Forks, lasting: cli.Lasting, finished: Path, overrides: list[str], named: list[str]
) -> None:
    """A resume that cannot be right is refused."""
    before = cli.contents(finished)
    runs = forks if "distributed.cpu_devices=3" in overrides else lasting  # which has eight devices
    cli.check_refusal(runs.run("--resume", hydra_quoted(finished), *overrides), *named)
    assert cli.contents(finished) == before


def test_checkpoint_of_another_model_is_refused(lasting: cli.Lasting, finished: Path, workplace: Path) -> None:
    """A checkpoint of another model is refused with the name of a leaf."""
    other = workplace / "other"
    shutil.copytree(finished, other)
    config = (other / "config.yaml").read_text()
    assert "  size: test\n" in config
    (other / "config.yaml").write_text(config.replace("  size: test\n", "  size: bytes\n"))
    before = cli.contents(other)
    done = lasting.run("--resume", "hydra.run.dir=other", "training.total_steps=20")
    cli.check_refusal(done, "other/checkpoints, step 12, leaf params/", "holds (2,", "expects (4,")
    assert cli.contents(other) == before


def test_edited_size_is_refused(lasting: cli.Lasting, finished: Path, workplace: Path) -> None:
    """A checkpoint of a size that was edited is refused.

    What shows in no leaf; the metadata of the checkpoint is edited here, because the entry is this repository's.
    """
    edited = workplace / "edited"
    shutil.copytree(finished, edited)
    (meta_file,) = edited.glob("checkpoints/12/meta/metadata")
    meta = json.loads(meta_file.read_text())

    def run(*arguments: str, **changed: Any) -> subprocess.CompletedProcess[str]:
        edited = {**meta, "size": {**meta["size"], **changed}}
        meta_file.write_text(json.dumps({**edited, META_CHECKSUM: meta_checksum(edited)}))
        return lasting.run(*arguments)

    resume = ("--resume", "hydra.run.dir=edited")
    expected = "edited/checkpoints, step 12: norm_epsilon is 1e-05, this run expects 1e-06"
    for arguments in (resume, ("mode=sample", "model.model_path=edited")):
        cli.check_refusal(run(*arguments, norm_epsilon=1e-5), expected)
    for choice in ({"alibi_attn": False, "positions": "none"},):
        cli.check_refusal(
            run(*resume, **choice), f"{next(iter(choice))} is {next(iter(choice.values()))}, this run expects"
        )
    done = run(*resume, parametrization="mup", mup_base_width=16, tied=False, attention_scale="linear")
    cli.check_refusal(done, "parametrization is mup, this run expects standard")
    done = run(*resume, dropout=0.5)  # what only training sees may change
    assert done.returncode == 0 and "has changed since then: dropout from 0.5 to" in done.stderr


def test_data_that_changed_is_refused(lasting: cli.Lasting, finished: Path, workplace: Path) -> None:
    other = workplace / "moved"
    shutil.copytree(finished, other)
    config = (other / "config.yaml").read_text()
    (other / "config.yaml").write_text(config.replace(cli.INDICES[0], cli.INDICES[1]))
    cli.check_refusal(lasting.run("--resume", "hydra.run.dir=moved", "training.total_steps=20"), "cursor", "shards")


def test_resume_of_a_finished_run(lasting: cli.Lasting, finished: Path) -> None:
    """The resume of a finished run changes nothing."""
    before = cli.contents(finished)
    named = ["--resume", hydra_quoted(finished)]
    again = ["--resume=auto", *named[1:]]
    for arguments in (["--resume=auto"], [*again, "+preset=v3-8"]):  # the newest is the only one here
        assert "nothing to do" in lasting.check(*arguments).stderr
        assert cli.contents(finished) == before


def test_second_process_is_refused(forks: cli.Forks, finished: Path) -> None:
    """A second process in one run is refused."""
    before = cli.contents(finished)
    with locked(finished, ""):
        cli.check_refusal(forks.run("--resume", hydra_quoted(finished)), "another process", "hydra.run.dir")
    with owned(finished / "checkpoints", ""):  # of a run in another directory
        cli.check_refusal(forks.run("--resume", hydra_quoted(finished)), "another process", "data.checkpoint_directory")
    assert cli.contents(finished) == before


def test_run_directory_tells_what_was_done(finished: Path, workplace: Path) -> None:
    names = {path.name for path in finished.iterdir()}
    assert {"metrics.jsonl", "config.yaml", "layout.txt", "run.png", "samples.txt", "main_zero.log"} <= names
    lines = read_metrics(finished / "metrics.jsonl")
    assert [line["step"] for line in lines] == list(range(1, 13))
    for line in lines:
        assert {"train/loss", "learning_rate", "sequence_length", "tokens_seen"} <= set(line)
        assert {"gradient_norm", "skipped_steps"} <= set(line)
        assert ("tokens_per_second" in line) == (line["step"] != 1)  # the steps that were compiled
        assert line["tokens_seen"] == line["step"] * 16 * 32
        assert line["sequence_length"] == 32
        assert ("validation/loss" in line) == (line["step"] in (6, 12))
    assert lines[-1]["train/loss"] < lines[0]["train/loss"] - 0.5
    text = (finished / "samples.txt").read_text()
    assert "--- step 6\n" in text and "--- step 12\n" in text
    assert 0 < lines[-1]["mfu"] < 1 and lines[-1]["tokens_per_second_per_device"] > 0
    assert scalars(finished, "train/loss") == pytest.approx({line["step"]: line["train/loss"] for line in lines})
    assert scalars(finished, "perf/mfu").keys() == {line["step"] for line in lines if "mfu" in line}
    assert scalars(finished, "samples_checksum") == scalars(finished, "train/samples_checksum") == {}
    assert scalars(finished, "samples/text_summary").keys() == {6, 12}
    (trace,) = (finished / "profile").rglob("perfetto_trace.json.gz")
    names = {event.get("name", "") for event in json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]}
    assert any("all_gather" in name for name in names) and any("reduce_scatter" in name for name in names)
    assert "mfu" in (finished / "report.html").read_text()
    (offline,) = (finished / "wandb").glob("offline-run-*")
    assert offline.name.endswith((finished / "wandb_run_id").read_text())
    assert {path.name for path in workplace.iterdir()} >= {"runs", "corpus"}


def test_reference_names_all_metrics_and_files(finished: Path) -> None:
    documented = {name for metric in all_metrics() for name in metric.names}
    written = {name for line in read_metrics(finished / "metrics.jsonl") for name in line}
    assert {re.sub(r"^goodput/.*", "goodput/PHASE", name) for name in written} <= documented
    files = (cli.MAIN.parent / "docs" / "reference" / "files.md").read_text()
    names = {f"{path.name}/" if path.is_dir() else path.name for path in finished.iterdir()}
    assert names <= set(re.findall(r"`([^`]*)`", files))


def test_help_needs_no_device(forks: cli.Forks) -> None:
    """Help and the composed configuration need no device."""
    for arguments, text in (
        (["--help", "zero.stage"], "3: parameters"),
        (["--cfg", "job", "seed=3"], "seed: 3"),
    ):
        done = forks.run(*arguments)
        assert done.returncode == 0 and text in done.stdout, done.stderr
        assert "cpu devices" not in done.stderr


def test_warm_start(lasting: cli.Lasting, finished: Path) -> None:
    """A warm start takes the weights of another run."""
    before = cli.contents(finished)
    path = str(finished).replace("'", "\\'")
    warm = ("model.warm_start=true", f"model.model_path='{path}'")
    line = read_metrics(lasting.train("warm", *cli.TINY, *warm) / "metrics.jsonl")[0]
    assert line["train/loss"] < read_metrics(finished / "metrics.jsonl")[-1]["train/loss"] + 0.1
    assert line["learning_rate"] == pytest.approx(1e-3)  # a third of the way up: the schedule begins anew
    assert cli.contents(finished) == before


@pytest.mark.wide  # exchange/test_average.py has averages, and the test above starts from weights
def test_start_from_an_average(lasting: cli.Lasting, finished: Path, workplace: Path) -> None:
    """An average of checkpoints is a run to start from."""

    def weights(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "zero.exchange.zero_weights", *arguments]
        where = cli.environment() | {"PYTHONPATH": str(cli.MAIN.parent)}
        return subprocess.run(command, cwd=workplace, env=where, capture_output=True, text=True)

    before = cli.contents(finished)
    done = weights("average", str(finished), "averaged")
    assert done.returncode == 0 and "is in averaged" in done.stdout, done.stderr
    warm = ("model.warm_start=true", "model.model_path=averaged")
    done = lasting.check(*cli.TINY, *warm, "hydra.run.dir=from_averaged")
    assert "weights from" in done.stderr
    done = weights("export", "averaged", "exported")
    assert done.returncode == 2 and done.stdout == "" and len(done.stderr.splitlines()) == 1
    assert "bloom has embedding_norm=True, this model False" in done.stderr and not (workplace / "exported").exists()
    assert cli.contents(finished) == before


@pytest.mark.parametrize(
    ("diverging", "named"),
    [
        pytest.param(
            ("training.peak_learning_rate=1e3", "training.weight_decay=3e38"),
            ["params/", "not finite"],
            marks=pytest.mark.wide,
        ),
        pytest.param(
            ("training.peak_learning_rate=1e37",),
            ["validation/loss=nan not finite"],
            marks=pytest.mark.slow,  # tests/run/test_features.py shows it without a run
        ),
    ],
    ids=["weights", "loss"],
)
def test_diverged_run(diverging: tuple[str, ...], named: list[str], forks: cli.Forks, workplace: Path) -> None:
    """A run that has diverged is neither saved nor reported as finished.

    Before max_skipped_in_a_row steps were skipped, which would end it as well.
    """
    run = f"diverged-{len(diverging)}"
    done = forks.run(*cli.TINY, *diverging, f"hydra.run.dir={run}")
    assert done.returncode == 2, done.stderr
    last = done.stderr.splitlines()[-1]
    assert last.startswith("error: step 6: ") and [name for name in named if name not in last] == [], done.stderr
    assert "this state is not saved" in last and "Traceback" not in done.stderr
    assert saved_steps(workplace / run) == []


def test_end_of_data_finishes_the_run(lasting: cli.Lasting, workplace: Path) -> None:
    """A run whose data ends is finished, in its page too."""
    epochs = ("training.max_epochs=2", "data.train_samples=40", "training.evaluation_frequency=3")
    done = lasting.check(*cli.TINY, *epochs, "hydra.run.dir=epochs")
    assert "ends the data at step 5, before training.total_steps=12" in done.stderr
    assert saved_steps(workplace / "epochs") == [3, 5]
    page = write_report(
        [workplace / "epochs"], workplace / "epochs.html", flat_config(default_config())
    )  # runs of tests draw none
    assert "where training.max_epochs=2 ends the data" in page.read_text()
    done = lasting.check("--resume", "hydra.run.dir=epochs")
    assert "nothing to do: the run is at step 5 of 5" in done.stderr
