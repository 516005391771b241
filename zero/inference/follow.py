"""`evaluate.follow=true`: scores each new checkpoint of a run, possibly on another machine, until the run ends.

The results go to a separate file beside the run's metrics (`evaluations_file.py`) and to a separate W&B run, so that no
file has two writers. A restart continues after the last line of the file.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from itertools import count
from pathlib import Path
from typing import Any

from zero.checkpoints.damage import DamagedCheckpoint, MissingCheckpoint
from zero.checkpoints.manager import Checkpoints
from zero.files import storage
from zero.files.parsing import MALFORMED
from zero.hosts import agreement, watchdog
from zero.inference.harness_tasks import numbers_of
from zero.inference.scoring import Scorer
from zero.inference.trained_model import load_weights
from zero.record.evaluations_file import PREFIX, append_evaluation, identity_of, read_lines_of
from zero.record.metrics_file import Log
from zero.record.run_files import WAIT_SECONDS, WANDB_ID_FILE, saved_checkpoint_directory, saved_steps, shared_file
from zero.tracking import tracker
from zero.tracking.tracker import TrackerKeys

log = logging.getLogger(__name__)


def wait_for_checkpoint(run: Path) -> None:
    """Returns once a run has a checkpoint."""
    while not saved_steps(run):
        log.info("%s: waiting for its first checkpoint", run)
        time.sleep(WAIT_SECONDS)


def follow(
    run: Path,
    scorer: Scorer,
    ema: bool,
    evaluate: Callable[[], dict[str, Any]],
    identity: Mapping[str, Any],
    open_tracker: Callable[[str], AbstractContextManager[Log]],
) -> None:
    """Scores the checkpoints of a run in order, each once, up to the last step of the run.

    Args:
      scorer: the scorer of `evaluate`; each checkpoint's weights replace its own.
      identity: everything except the weights that the scores depend on, as JSON. A line with the same step but another
        identity or other weights belongs to another evaluation.
      open_tracker: `follower_tracker` of a digest of the identity.

    Raises:
      UserError: the newest checkpoint cannot be read.
    """
    identity = json.loads(json.dumps(identity))  # as in a line of the file
    done: set[int] = set()
    with ExitStack() as stack:
        send = None
        if agreement.is_host_0():
            send = stack.enter_context(open_tracker(_digest(identity)))
        for number in count():
            watchdog.progress()
            # The list is read again before each one: others in the previous list may have been deleted.
            steps, left = _on_host_0(f"follow {number}", lambda: _steps(run, done, identity))
            step = next(iter(left), None)
            if step is None and steps and _is_last(run, steps[-1]):
                log.info("the run has ended at step %d", steps[-1])
                return
            if step is None:
                time.sleep(WAIT_SECONDS)
                continue
            done.add(step)
            scorer.trained = scorer.trained._replace(params=None)  # two copies may not fit
            weights = _weights(run, step) if send is not None else None
            try:
                params, _ = load_weights(run, scorer.trained.model, step, ema)
            except DamagedCheckpoint as error:
                if _on_host_0(f"newest {number}", lambda: saved_steps(run)[-1]) == step:
                    raise
                log.warning("skipped: %s", error)
                continue
            scorer.trained = scorer.trained._replace(params=params, step=step)
            line = metrics_of(evaluate())
            if send is not None:
                # First, so that after a kill here it is not evaluated again.
                append_evaluation(run, line | {"scored": {**identity, "weights": weights}})
                send(line)
                print(json.dumps(line), flush=True)


def _steps(run: Path, done: set[int], identity: Mapping[str, Any]) -> tuple[list[int], list[int]]:
    """The steps of the run's current checkpoints, and those that are neither done nor have a line."""
    steps = saved_steps(run)
    done.intersection_update(steps)  # a step that comes back has other weights
    lines = [line for line in read_lines_of(run) if identity_of(line) == identity]
    weights = {line["step"]: line["scored"]["weights"] for line in lines}
    done.update(step for step in steps if step in weights.keys() - done and weights[step] == _weights(run, step))
    return steps, [step for step in steps if step not in done]


def _weights(run: Path, step: int) -> str | None:
    """A digest of the weights of a checkpoint, from its metadata; None if these cannot be read."""
    file = storage.join(saved_checkpoint_directory(run), f"{step}/meta/metadata")
    try:
        meta = json.loads(storage.read_bytes(file))
        base = meta.get("base")
        return _digest([meta["checksums"], base and base["checksum"], meta["config"]["tuning"]])
    except (FileNotFoundError, *MALFORMED):
        return None


def _digest(facts: Any) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:8]


def metrics_of(result: dict[str, Any]) -> dict[str, Any]:
    """A result of `mode=evaluate` as a line of metrics.

    >>> metrics_of({"step": 6, "loss": 2.5, "sets": {"web": {"loss": 2.0}}, "harness": {"task": {"acc,none": 1}}})
    {'step': 6, 'evaluation/loss': 2.5, 'evaluation/web/loss': 2.0, 'evaluation/harness/task/acc': 1}
    """
    line = {"step": result["step"]}
    _add_means(line, PREFIX, result)
    for name, means in result.get("sets", {}).items():
        _add_means(line, f"{PREFIX}{name}/", means)
    return line | {f"{PREFIX}{name}": value for name, value in numbers_of(result.get("harness", {})).items()}


def _add_means(line: dict[str, Any], prefix: str, means: Mapping[str, Any]) -> None:
    for key in ("loss", "perplexity", "bits_per_byte"):
        if means.get(key) is not None:
            line[prefix + key] = means[key]


def _on_host_0(name: str, compute: Callable[[], Any]) -> Any:
    """The result of host 0 on all hosts, after a round trip through JSON."""
    return json.loads(agreement.broadcast(name, json.dumps(compute()) if agreement.is_host_0() else ""))


def _is_last(run: Path, step: int) -> bool:
    """Whether this checkpoint, which was the newest, is the run's last. All hosts call it."""
    with Checkpoints(saved_checkpoint_directory(run), keep=None) as checkpoints:
        try:
            return bool(step >= checkpoints.meta(step)["last_step"])
        except MissingCheckpoint:  # a newer one exists by now
            return False


def follower_tracker(
    run: Path, run_directory: Path, destinations: TrackerKeys, record: dict[str, Any], digest: str
) -> AbstractContextManager[Log]:
    """A separate tracker. A restart continues its W&B run, which is named after the training run and what is scored."""
    trained = shared_file(run, saved_checkpoint_directory(run), WANDB_ID_FILE)
    if storage.exists(trained):
        storage.write(run_directory / WANDB_ID_FILE, storage.read_bytes(trained) + f"-evaluation-{digest}".encode())
    return tracker.open_tracker(
        run_directory,
        project=destinations.wandb_project,
        tensorboard=destinations.tensorboard,
        config=record,
        resumed_from=None,
    )
