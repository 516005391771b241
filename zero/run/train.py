"""`mode=train`: opens what a run needs, and trains; after each step features act that are due."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict
from pathlib import Path

import jax

from zero.config.declared import keys_of
from zero.config.same_configuration import check_same_configuration
from zero.config.schema import Config
from zero.hosts import signals, startup
from zero.hosts.speeds import peak_flops
from zero.hosts.watchdog import ending_together
from zero.job import make_job
from zero.models.config import GPTConfig
from zero.record.metrics_file import Line
from zero.run.data import (
    fitting_tokenizer,
    last_step,
    open_data,
    prepare_corpus,
    start_of,
    with_global_batch,
    with_last_target,
)
from zero.run.directory import open_directory
from zero.run.feature import Feature, Moment, Stopped
from zero.run.features import FEATURES
from zero.run.fresh import new_state
from zero.run.frozen_base import load_base
from zero.run.identity import check_identity
from zero.run.pending import pending_actions, still_pending
from zero.run.requests import STOP, Requests
from zero.run.restore import TrainingPosition
from zero.run.resume import is_durable, join_run_directory, resume_state, resumed_clock
from zero.run.run import Run
from zero.run.step_metrics import StepMetrics
from zero.run.step_programs import StepPrograms

log = logging.getLogger(__name__)


@ending_together()
def train(config: Config, size: GPTConfig, run_directory: Path) -> int:
    """Trains until the schedule or the data ends, or until a signal arrives.

    Returns:
      The exit status: 0 when finished, 75 when stopped after a saved checkpoint.

    Raises:
      UserError: the configuration, the data or a checkpoint is wrong.
      KeyboardInterrupt: a signal arrived before there was anything to save.
    """
    _, hosts = startup.start(**asdict(config.distributed), overlap_gathers=config.zero.overlap_gathers)
    run_directory, is_fork = join_run_directory(run_directory, config.resume)
    check_same_configuration(config, size)
    count = jax.device_count()
    backend = jax.default_backend()
    log.info("%d %s devices, %d of this host; %s", count, backend, jax.local_device_count(), run_directory)
    job = make_job(config, size)  # what devices or batches refuse is known before a corpus is prepared
    position = TrainingPosition(global_rows=config.training.batch_size * hosts)
    if config.resume is None:
        with_global_batch(config, start_of(config, size, position).schedule)
    tokenizer = fitting_tokenizer(config, size)
    config = with_last_target(prepare_corpus(config, tokenizer), size)
    if config.data.last_target:
        job = make_job(config, size)
    with ExitStack() as stack:
        directory = stack.enter_context(open_directory(config, size, job, run_directory, is_fork))
        state = None
        if config.resume is not None:
            position, state = resume_state(
                config, job, run_directory, is_fork, directory.checkpoints, directory.emergency
            )
        start = start_of(config, size, position)
        config = with_global_batch(config, start.schedule)
        data = open_data(config, job, tokenizer, position, start.schedule)
        last = last_step(config, data.training, start)
        origin = Path(str(config.resume)) if is_fork else run_directory
        position.pending = still_pending(position, origin, last, is_durable(directory.emergency))
        if position.step >= last and position.pending is None:
            log.info("nothing left to do: the run is at step %d of %d", position.step, last)
            return 0
        check_identity(position, data.tokenizer, data.training, data.validation)
        frozen = load_base(config, job.model, position)
        if state is None:
            state = new_state(config, job, frozen, position)
        clock = resumed_clock(run_directory, position.step, is_new=config.resume is None or is_fork)
        directory.write_start(config, job, position.step)
        in_flight = 0 if backend == "cpu" else 1  # on CPU the host's cores are the devices
        metrics = StepMetrics(
            count,
            config.profile.peak_flops or peak_flops(jax.local_devices()[0]),
            clock,
            start.schedule.steps_per_batch,
            job.objective.names,
        )
        requests = Requests(lag=in_flight)
        frequency = config.training.evaluation_frequency
        run = Run(
            job,
            data,
            directory,
            requests,
            clock,
            metrics,
            state,
            frozen,
            position,
            start,
            last,
            frequency,
            asdict(config),
        )
        features = stack.enter_context(open_features(config, run))
        directory.begin_lineage()
        requests.signals = stack.enter_context(signals.stop_requests())  # until here a signal interrupts
        with clock.phase("steps"):
            is_finished = loop(run, StepPrograms(config.profile, in_flight), features)
        directory.checkpoints.wait()
        if not is_finished:
            reason = f"signal {requests.signals[0]}" if requests.signals else "another host"
            log.info("stopped by %s; step %d is saved, --resume continues", reason, position.step)
            return signals.PREEMPTED
        directory.mirror()
        log.info("finished at step %d; run directory: %s", position.step, run_directory)
        return 0


@contextmanager
def open_features(config: Config, run: Run) -> Iterator[list[Feature]]:
    """The features of a run in the order of their table; closed in reverse order."""
    with ExitStack() as stack:
        features: list[Feature] = []
        for kind in FEATURES:
            feature = kind(keys_of(config, kind.name, kind.Config), run)
            stack.callback(feature.close)
            features.append(feature)
        yield features


def loop(run: Run, steps: StepPrograms, features: Sequence[Feature]) -> bool:
    """Trains to the last step; False if the run was stopped earlier, with its state saved."""
    if not catch_up(run, features):
        return False
    with closing(run.batches()) as batches:
        for step, batch in batches:
            for feature in features:
                feature.before_step(run, step)
            per_device = steps.run(run, step, batch)
            if per_device is None:
                break
            with run.clock.phase("evaluation"):
                for feature in features:
                    feature.after_step(run, step, per_device)
            now = Moment(step, run.is_evaluation, run.is_last, run.requests.agree(step))
            if not any(is_due(feature, now) for feature in features):
                continue
            if not act(run, features, now, run.read_line()):
                return False
            run.metrics.restart()
    if run.is_last:
        return True
    return act(run, features, Moment(run.position.step, False, False, frozenset([STOP])), run.read_line())


def catch_up(run: Run, features: Sequence[Feature]) -> bool:
    """Does what was due in an earlier process, which ended before it was done; False if the run has to stop."""
    pending = run.position.pending
    if pending is None:
        return True
    asked = frozenset(pending["features"])
    acting = [feature for feature in features if feature.takes_every_line or feature.name in asked]
    return act(run, acting, Moment(run.position.step, False, run.is_last, asked), dict(pending["line"]))


def act(run: Run, features: Sequence[Feature], now: Moment, line: Line) -> bool:
    """Has the features act that are due, in the order of the table; False if the run has to stop.

    At a stop the actions that may wait become pending. So does, in the state that is saved meanwhile, every one that
    comes later, until it is done.
    """
    waiting: list[str] = []
    for number, feature in enumerate(features):
        is_acting = bool(line) if feature.takes_every_line else is_due(feature, now)
        if not is_acting:
            continue
        if now.is_stop and feature.may_wait:
            waiting.append(feature.name)
            continue
        rest = features[number + 1 :]
        later = [feature.name for feature in rest if feature.may_wait and is_due(feature, now)]
        run.position.pending = pending_actions(line, waiting + later)
        try:
            with run.clock.phase(feature.phase):
                feature.do(run, now, line)
        except Stopped:
            waiting.append(feature.name)
            now = now._replace(asked=now.asked | {STOP})
    run.position.pending = pending_actions(line, waiting)
    return not now.is_stop


def is_due(feature: Feature, now: Moment) -> bool:
    """Whether a feature acts now: by its own rule, or because it was asked to."""
    return feature.name in now.asked or feature.due(now)
