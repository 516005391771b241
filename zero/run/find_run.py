"""Finds the run to resume or to use: this job's, the newest, or the one named by the arguments (hydra, omegaconf)."""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, Quote, QuotedString
from omegaconf import OmegaConf
from yaml import YAMLError

from zero.base.errors import UserError
from zero.config.saved_config import groups_of
from zero.corpus.reading.keys import SetKeys
from zero.files import storage
from zero.files.parsing import MALFORMED, reading
from zero.record.run_files import (
    COMMAND_FILE,
    CONFIG_FILE,
    LAYOUT_FILE,
    WAIT_SECONDS,
    CheckpointDirectoryKeys,
    DamagedRun,
    checkpoint_directory,
    committed_steps,
    fetch_config,
    mirror_path,
    rebuild,
    saved_checkpoint_directory,
    saved_config,
    saved_steps,
    split_step,
)
from zero.record.starts import number_of

log = logging.getLogger(__name__)

DEFAULT_ROOT = Path("runs")
SWEEPS = DEFAULT_ROOT / "multirun"
SWEEP_COMMAND_FILE = "multirun.yaml"  # Hydra's
OF_A_MACHINE = ("hydra.", "distributed.", "data.cache_directory", "zero.emergency_directory")  # keys begin so


def newest_run(root: Path, checkpoint_path: Path | str | None = None) -> Path | None:
    """The last started or resumed run under `root` that has a checkpoint (in `checkpoint_path`, if given).

    Raises:
      UserError: a bucket denies access or does not answer, so its run might be the newest.
    """
    return _newest(runs_in(root), checkpoint_path)


def _newest(runs: Iterable[Path], checkpoint_path: Path | str | None) -> Path | None:
    """The last started of these runs that has a checkpoint; as `newest_run`."""
    return next((run for run, steps in _by_start(runs, checkpoint_path) if steps), None)


def _by_start(runs: Iterable[Path], checkpoint_path: Path | str | None = None) -> Iterator[tuple[Path, list[int]]]:
    """Each of these runs with the steps of its checkpoints, the last started first; raises like `newest_run`.

    Damaged runs, and runs whose bucket is gone, are skipped with a warning.
    """
    for run in sorted(runs, key=_last_started, reverse=True):
        try:
            if checkpoint_path not in (None, saved_checkpoint_directory(run)):
                continue
            steps = saved_steps(run)
        except (DamagedRun, storage.NoSuchBucket) as error:
            log.warning("skipped: %s", error)
            continue
        yield run, steps


def runs_in(root: Path) -> list[Path]:
    """The run directories below this one. It does not look inside a run, whose checkpoints have thousands of files."""
    runs = []
    for folder, folders, files in os.walk(root, followlinks=False):
        if LAYOUT_FILE in files:  # W&B also has files called config.yaml
            runs.append(Path(folder))
            folders.clear()
    return runs


def _last_started(run: Path) -> tuple[int, int]:
    """The sort key of runs: the number of the last start; between copies of one run, the time of the configuration."""
    config = run / CONFIG_FILE
    return number_of(run), config.stat().st_mtime_ns if config.exists() else 0


def _say_which(run: Path, runs: Iterable[Path], flag: str) -> None:
    """Logs which of several runs a flag continues, and why."""
    numbers = {path: number_of(path) for path in runs}
    copies = [str(path) for path, number in numbers.items() if number == numbers.get(run) and path != run]
    if copies:
        names = ", ".join(copies)
        log.warning("%s continues %s: its files are newer than in its copies, %s", flag, run, names)
    elif len(numbers) > 1 and flag == "--resume":
        log.warning("%s continues %s, the most recently started of %d runs", flag, run, len(numbers))


def trained_run(path_or_url: str | None, wait: bool = False) -> Path:
    """The run directory to evaluate or sample: this path, the run of the checkpoints at this URL, or the newest.

    With `wait` it returns once a run has started there.

    Raises:
      UserError: there is no run with a checkpoint.
    """
    if path_or_url is None:
        run = newest_run(DEFAULT_ROOT)
        if run is None:
            raise UserError(f"{DEFAULT_ROOT} has no run with a checkpoint; set model.model_path to one")
        return run
    while True:
        run = _copied(path_or_url.rstrip("/")) if "://" in path_or_url else Path(path_or_url)
        if run is not None and (not wait or (run / CONFIG_FILE).is_file()):
            return run
        if not wait:
            missing = mirror_path(path_or_url.rstrip("/"), CONFIG_FILE)
            raise UserError(f"model.model_path={path_or_url}: no run has its checkpoints here; {missing} is missing")
        log.info("%s: waiting for a run to start here", path_or_url)
        time.sleep(WAIT_SECONDS)


def results_in_run(arguments: Sequence[str]) -> list[str]:
    """The arguments with a directory for the results of an evaluation, a sampling or a plan, unless they name one.

    It is inside the run in use, RUN/evaluate/DATE_TIME. For a bucket, a Hugging Face folder, a model on the hub and a
    plan it is MODE/DATE_TIME in the current directory. Starts within the same second get separate directories.
    """
    values = {override.key_or_group: override.value() for override in parsed_overrides(arguments)}
    mode = values.get("mode")
    if mode not in ("evaluate", "sample", "plan") or "hydra.run.dir" in values or _is_sweep(arguments):
        return list(arguments)
    place = values.get("model.model_path")
    if mode == "plan":
        run = None
    elif place is None:
        run = newest_run(DEFAULT_ROOT)
    else:
        run = Path(split_step(str(place))[0])
    root = run if run is not None and (run / CONFIG_FILE).is_file() else Path()
    quoted = str(root / str(mode)).replace('"', '\\"')  # for OmegaConf, and then for Hydra
    directory = f'${{new_directory:"{quoted}/${{now:%Y-%m-%d_%H-%M-%S}}"}}'.replace("'", "\\'")
    # Next to the mode, because argparse only takes overrides that stand together.
    modes = [index for index, argument in enumerate(arguments) if argument.lstrip("+").startswith("mode=")]
    mode_at = modes[0] if modes else len(arguments)
    return [*arguments[:mode_at], f"hydra.run.dir='{directory}'", *arguments[mode_at:]]


def _is_sweep(arguments: Sequence[str]) -> bool:
    return any(argument == "-m" or ("--multirun".startswith(argument) and len(argument) > 2) for argument in arguments)


def _copied(url: str) -> Path | None:
    """A local directory with the configuration of the run whose checkpoints are at this URL; None if there is none.

    It is not the directory in which `--resume` would continue the run, because that run may be training on this
    machine.
    """
    run = DEFAULT_ROOT / "evaluated" / url.partition("://")[2]
    return run if fetch_config(run, url) else None


def resume_overrides(arguments: Sequence[str]) -> list[str]:
    """Replaces `--resume` and `--resume=auto` in command-line arguments by overrides that Hydra understands.

    They resume the run in `hydra.run.dir` if given, else the newest run; `--resume=auto` only if that run belongs to
    this job. With `data.bucket_path` it is the run whose checkpoints are in that bucket, and its directory is rebuilt
    from there if this machine lacks it. A `data.resume_step` that is not the newest starts a new run directory.

    Jobs of a sweep (`--multirun`) find their own checkpoints (sweeps.py) in `hydra.sweep.dir`, or else in the newest
    sweep of the same command. They fork from the run in `hydra.run.dir`, or, with `data.resume_step`, from the newest
    run.

    Raises:
      UserError: `--resume` without a checkpoint; `--resume=auto` from a fixed step; or an argument that merely
        resembles `--resume`.
    """
    flags = [argument for argument in arguments if argument.startswith("--resume")]
    rest = [argument for argument in arguments if argument not in flags]
    if not flags:
        return rest
    if flags[-1] not in ("--resume", "--resume=auto"):
        directory = flags[-1].partition("=")[2]
        way = f"; to resume the run in a directory, use --resume hydra.run.dir={directory}" if directory else ""
        raise UserError(f"{flags[-1]}: expected --resume or --resume=auto{way}")
    values = {override.key_or_group: override.value() for override in parsed_overrides(rest)}
    is_auto = flags[-1] == "--resume=auto"
    if is_auto and "data.resume_step" in values:
        raise UserError(
            "data.resume_step: expected --resume, used once; a launcher that repeats --resume=auto would go back to "
            "that step at every start"
        )
    is_sweep = _is_sweep(rest)
    resumes_sweep = is_sweep and not values.keys() & {"hydra.run.dir", "data.resume_step"}
    if resumes_sweep:
        run, searched = _sweep_to_resume(values, command(rest), is_auto)
    else:
        run, searched = _run_to_resume(values, command(rest) if is_auto else None)
    if run is None:
        if is_auto:
            return rest
        remedy = "start without it, or set hydra.run.dir to a run"
        raise UserError(f"--resume: {searched} has no checkpoint{_elsewhere(values)}; {remedy}")
    run_path = QuotedString(os.path.abspath(run), Quote.single).with_quotes()
    if resumes_sweep:
        return [
            *(argument for argument in rest if not argument.startswith("hydra.sweep.dir=")),
            f"hydra.sweep.dir={run_path}",
        ]
    rest = [argument for argument in rest if not argument.startswith("hydra.run.dir=")]
    step = values.get("data.resume_step")
    is_fork = step is not None and step != _steps_of(run, values)[-1]
    return [*rest, f"resume={run_path}", *([] if is_fork or is_sweep else [f"hydra.run.dir={run_path}"])]


def command(arguments: Iterable[str]) -> dict[str, str]:
    """The identity of a job: the keys that the arguments set, as Hydra writes their values, except keys of the machine.

    >>> command(["+preset=v3-8", "optimizer.b1=9e-1", "data.corpus=null", "seed=1,2", "distributed.process_id=1", "-m"])
    {'preset': 'v3-8', 'optimizer.b1': '0.9', 'data.corpus': 'null', 'seed': '1,2'}
    """
    return {
        override.key_or_group: _text(override)
        for override in parsed_overrides(arguments)
        if not f"{override.key_or_group}.".startswith(OF_A_MACHINE)
    }


def _text(override: Override) -> str:
    """The value of an override, with numbers normalized; the value of a sweep as given."""
    if override.is_sweep_override():
        return override.get_value_string()
    return override.get_value_element_as_str()


def saved_command(run: Path) -> dict[str, str]:
    """The merged results of `command` for all starts of a run; of two values the later holds. Empty without the file.

    Raises:
      UserError: the file is damaged.
    """
    path = run / COMMAND_FILE
    if not path.exists():
        return {}
    with reading(f"{path} is damaged: expected keys and values; delete it, or set hydra.run.dir to a run"):
        return {str(key): str(value) for key, value in json.loads(path.read_bytes()).items()}


def write_command(run: Path, earlier: Path | None, arguments: Iterable[str]) -> None:
    """Merges the keys of this start into those of the run that it continues or forks from."""
    known = {} if earlier is None else saved_command(earlier)
    keys = {key: value for key, value in command(arguments).items() if key not in ("resume", "data.resume_step")}
    if earlier is not None:  # a resume repeats the choices of its run, which were not typed
        saved: Any = OmegaConf.to_container(saved_config(earlier))
        choices = groups_of(saved)
        keys = {key: value for key, value in keys.items() if choices.get(key) != value or key in known}
    storage.write(run / COMMAND_FILE, json.dumps(known | keys, indent=1).encode())


def is_finished(run: Path, step: int) -> bool:
    """Whether a run has a checkpoint of its last step. A damaged one does not count: a resume will set it aside."""
    file = storage.join(saved_checkpoint_directory(run), f"{step}/meta/metadata")
    try:
        return bool(json.loads(storage.read_bytes(file))["last_step"] <= step)
    except (FileNotFoundError, *MALFORMED):
        return False


def _sweep_to_resume(given: dict[str, Any], job: dict[str, str], is_auto: bool) -> tuple[Path | None, Path | str]:
    """The last sweep that this command started, or the named one; and the directory that was searched.

    With `is_auto` it may be a sweep that ended before its first checkpoint.
    """
    named = given.get("hydra.sweep.dir")
    if named is not None:
        root = Path(str(named))
        return (None if newest_run(root) is None else root), root
    sweeps = sorted(SWEEPS.glob(f"*/{SWEEP_COMMAND_FILE}"), key=_last_sweep, reverse=True)
    for path in sweeps:
        try:
            is_same = _sweep_command(path) == job
        except DamagedRun as error:
            log.warning("skipped: %s", error)
            continue
        if is_same and (is_auto or newest_run(path.parent) is not None):
            return path.parent, SWEEPS
    if sweeps and is_auto:
        log.warning(
            "--resume=auto starts a new sweep: no sweep in %s has this command; hydra.sweep.dir selects one", SWEEPS
        )
    return None, f"{SWEEPS}: a sweep of this command"


def _last_sweep(path: Path) -> tuple[int, int]:
    """The sort key of sweeps: the number of the last start of a job, else the time at which Hydra wrote the command."""
    return max(map(number_of, runs_in(path.parent)), default=sys.maxsize), path.stat().st_mtime_ns


def _sweep_command(path: Path) -> dict[str, str]:
    """The result of `command` for the last start of a sweep, from the file that Hydra writes before the first job."""
    with reading(f"{path} is damaged: expected the configuration of a sweep", YAMLError, kind=DamagedRun):
        config: Any = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
        return command(config["hydra"]["overrides"]["task"])


def _run_of_job(job: dict[str, str], runs: Iterable[Path]) -> Path | None:
    """The run that `--resume=auto` continues in `DEFAULT_ROOT`; None, with a warning, if it has to start a new one.

    It is the newest run with a checkpoint, with two exceptions. If a newer run was started with the same keys, that run
    is this job's, and there is nothing to continue. A finished run that was started with other keys belongs to another
    job.
    """
    without_checkpoint = []
    for run, steps in _by_start(runs):
        known = saved_command(run)
        if not steps and known == job:
            log.warning("--resume=auto starts a new run: %s has the same command but no checkpoint", run)
            return None
        if not steps:
            without_checkpoint.append(str(run))
            continue
        changed = ", ".join(key for key, value in job.items() if known.get(key) != value)
        if changed and is_finished(run, steps[-1]):
            log.warning(
                "--resume=auto starts a new run: the newest with a checkpoint, %s, is finished and was started with "
                "other values of %s; hydra.run.dir=%s continues it",
                *(run, changed, run),
            )
            return None
        if without_checkpoint:
            newer = ", ".join(without_checkpoint)
            log.warning("--resume=auto continues %s: newer runs have no checkpoint: %s", run, newer)
        if changed:
            log.warning("--resume=auto continues %s, which was started with other values of %s", run, changed)
        return run
    return None


def _run_to_resume(given: dict[str, Any], job: dict[str, str] | None) -> tuple[Path | None, Path | str]:
    """The run, and the directory that was searched for it or its checkpoints; with `job`, that job's run."""
    shared = _shared_place(given)
    named = given.get("hydra.run.dir")
    runs = runs_in(DEFAULT_ROOT) if named is None else []  # a walk among all old runs takes time: once
    if named is not None:
        run: Path | None = Path(str(named))
    elif job is not None and shared is None:
        run = _run_of_job(job, runs)
    else:
        run = _newest(runs, shared)
    if named is None and run is not None:
        _say_which(run, runs, "--resume" if job is None else "--resume=auto")
    is_known = run is not None and (run / CONFIG_FILE).is_file()
    if run is None and shared is not None:
        run = DEFAULT_ROOT / str(shared).removeprefix("gs://").strip("/")
    looked_in = shared or run or DEFAULT_ROOT
    if run is None:
        return None, looked_in
    checkpoints = saved_checkpoint_directory(run) if is_known else shared
    if checkpoints is not None and shared in (None, checkpoints):  # another host may have taken the run further
        is_known = rebuild(run, checkpoints) or is_known
    return (run if is_known and _steps_of(run, given) else None), looked_in


def _steps_of(run: Path, given: dict[str, Any]) -> list[int]:
    """The steps of a run, in the directory that the arguments name: its checkpoints may have been moved there."""
    place = _shared_place(given)
    if place is None:
        return saved_steps(run)
    steps = committed_steps(place)
    is_fork = given.get("data.resume_step") is not None  # which may save elsewhere
    if is_fork and not steps:
        return saved_steps(run)
    return steps


def _elsewhere(given: dict[str, Any]) -> str:
    """The checkpoint directory of the named or newest run, if the arguments name one."""
    if not given.keys() & {"data.checkpoint_directory", "data.bucket_path"}:
        return ""
    named = given.get("hydra.run.dir")
    run = newest_run(DEFAULT_ROOT) if named is None else Path(str(named))
    if run is None or not (run / CONFIG_FILE).is_file() or not saved_steps(run):
        return ""
    return f"; the checkpoints of {run} are in {saved_checkpoint_directory(run)}"


def _shared_place(given: dict[str, Any]) -> Path | str | None:
    """The checkpoint directory that the arguments name, if it is outside any run directory."""
    bucket_path = given.get("data.bucket_path", SetKeys().bucket_path)
    directory = str(given.get("data.checkpoint_directory", CheckpointDirectoryKeys().checkpoint_directory))
    checkpoint_path = checkpoint_directory(Path(), bucket_path, directory)
    if not isinstance(checkpoint_path, Path) or checkpoint_path.is_absolute():
        return checkpoint_path
    return None


def parsed_overrides(arguments: Iterable[str]) -> list[Override]:
    """The overrides among the arguments, parsed by Hydra."""
    plain = [argument for argument in arguments if "=" in argument and not argument.startswith("-")]
    return OverridesParser.create().parse_overrides(plain)
