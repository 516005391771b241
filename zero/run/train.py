"""`mode=train`: opens what a run needs and trains; after each step, the features that are due act."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, replace
from pathlib import Path
from signal import Signals

import jax

from zero.base.keys import values_in_scores
from zero.config.check import values_on_all_hosts
from zero.corpus.text.tokenizers import Tokenizer, load_tokenizer
from zero.hosts import agreement, signals, startup
from zero.hosts.same_configuration import check_same_configuration
from zero.hosts.speeds import peak_flops
from zero.hosts.watchdog import ending_together
from zero.job.job import Job, make_job, place_model
from zero.models.config import GPTConfig
from zero.record.metrics_file import Line
from zero.record.run_files import saved_config
from zero.run.columns import open_columns
from zero.run.config import TrainConfig
from zero.run.data import (
    Prepare,
    check_batch,
    column_inputs,
    last_step,
    open_data,
    resolve_data,
    share_of_batch,
    start_of,
)
from zero.run.directory import RunDirectory, open_directory
from zero.run.feature import Feature, Moment, Stopped
from zero.run.feature_table import open_features
from zero.run.fresh import new_state, warn_of_high_rate
from zero.run.frozen_base import load_base
from zero.run.identity import check_identity
from zero.run.past import Past, warn_of_changes, warn_of_remat
from zero.run.pending import pending_actions, still_pending
from zero.run.requests import STOP, Requests
from zero.run.restore import TrainingPosition
from zero.run.resume import Joined, is_durable, join_run_directory, resume_state, resumed_clock
from zero.run.run import Run
from zero.run.step_metrics import StepMetrics
from zero.run.step_programs import StepPrograms

log = logging.getLogger(__name__)


@ending_together()
def train(config: TrainConfig, model_config: GPTConfig, run_directory: Path, prepare: Prepare | None = None) -> int:
    """Trains until the schedule or the data ends, or until a signal arrives.

    Args:
      prepare: prepares the corpus of `data.corpus` if its index files are missing; None if they exist.

    Returns:
      The exit status: 0 when finished, 75 when stopped after a saved checkpoint.

    Raises:
      UserError: the configuration, the data or a checkpoint is wrong.
      KeyboardInterrupt: a signal arrived before there was anything to save.
    """
    began = startup.begin_run()
    _, hosts = startup.start(
        **asdict(config.distributed),
        overlap_gathers=config.zero.overlap_gathers,
        in_groups=config.zero.in_groups,
    )
    joined = join_run_directory(run_directory, config.resume)
    check_same_configuration(values_on_all_hosts(config), asdict(model_config))
    backend = jax.default_backend()
    log.info("%d %s devices, %d of this host; %s", jax.device_count(), backend, jax.local_device_count(), joined.path)
    placed = place_model(config, model_config)  # fails on impossible devices or batches before a corpus is prepared
    tokenizer = load_tokenizer(config.data.tokenizer)
    batch_size = config.training.batch_size
    fresh = TrainingPosition(batch_size * hosts, config.batch.global_stages(batch_size, hosts))
    example = config.objective.objective().example
    if config.resume is None:
        start = start_of(fresh, placed.steps_per_batch, example.texts * config.data.max_context)
        share_of_batch(start, config.training, config.zero)
    has_rows = config.resume is None and not example.is_whole
    loss_on = config.training.loss_on
    resolved = replace(
        config,
        data=resolve_data(
            config.data, tokenizer, model_config, str(config.model), has_rows=has_rows, loss_on=loss_on, prepare=prepare
        ),
    )
    job = make_job(resolved, placed.with_last_target(bool(resolved.data.last_target)))
    in_flight = 0 if backend == "cpu" else 1  # on CPU the host's cores are the devices
    with ExitStack() as stack:
        directory = stack.enter_context(
            open_directory(
                joined.path, resolved.data, resolved.zero, job, resume=resolved.resume, is_fork=joined.is_fork
            )
        )
        run = _open_run(resolved, job, tokenizer, joined, directory, fresh, began, in_flight)
        if run is None:
            return 0
        features = stack.enter_context(open_features(resolved, run))
        directory.begin_lineage()
        run.requests.signals = stack.enter_context(signals.stop_requests())  # before this, a signal interrupts
        with run.clock.phase("steps"):
            is_finished = loop(run, StepPrograms(resolved.profile, in_flight), features)
        directory.checkpoints.wait()
        if not is_finished:
            by = run.requests.signals
            reason = Signals(by[0]).name if by else "another host"
            log.info("stopped by %s; step %d is saved; continue with --resume", reason, run.position.step)
            return signals.PREEMPTED
        directory.mirror()
        log.info("finished at step %d; run directory: %s", run.position.step, joined.path)
        return 0


def _open_run(
    config: TrainConfig,
    job: Job,
    tokenizer: Tokenizer,
    joined: Joined,
    directory: RunDirectory,
    fresh: TrainingPosition,
    began: float,
    in_flight: int,
) -> Run | None:
    """The run at its start or at the checkpoint that it resumes; None if nothing is left to do.

    Args:
      fresh: the position of a run that starts.
      began: when this start did, on the monotonic clock.
      in_flight: steps that are dispatched before an earlier one has ended.
    """
    training = config.training
    row_tokens = job.objective.example.texts * config.data.max_context
    position = fresh
    restored = None
    if config.resume is not None:
        restored = resume_state(
            config.resume,
            config.data.resume_step,
            config.optimizer,
            job,
            joined,
            checkpoints=directory.checkpoints,
            emergency=directory.emergency,
            check=lambda at: check_batch(start_of(at, job.steps_per_batch, row_tokens).schedule, training, config.zero),
        )
        position = restored.position
        if agreement.is_host_0():
            now = Past(training, config.schedule, training, config.data.max_context)
            warn_of_changes(saved_config(Path(config.resume)), now, position.step)
    warn_of_remat(position.remat, job.model.remat, position.step)
    position.remat = job.model.remat
    start = start_of(position, job.steps_per_batch, row_tokens)
    share = share_of_batch(start, training, config.zero)
    has_sets = training.maximum_evaluation_steps > 0
    inputs = column_inputs(config.data, config.model, values_in_scores(config), has_sets)
    data = open_data(
        job,
        tokenizer,
        start.schedule,
        open_columns(inputs, job, position),
        config.data,
        training,
        seed=config.seed,
        evaluation_batches=training.maximum_evaluation_steps,
    )
    last = last_step(training.total_steps, training, data.training, start)
    origin = Path(str(config.resume)) if joined.is_fork else joined.path
    position.pending = still_pending(position, origin, last, is_durable(directory.emergency))
    if position.step >= last and position.pending is None:
        log.info("nothing to do: the run is at step %d of %d", position.step, last)
        return None
    check_identity(position, data.tokenizer, data.training, data.validation)
    frozen = load_base(config.seed, config.model, job.model, position)
    if restored is None:
        warn_of_high_rate(config.optimizer.name, training.peak_learning_rate, config.model, config.tuning)
        state = new_state(config.seed, config.model, config.tuning, job, frozen, position)
    else:
        state = restored.state
    clock = resumed_clock(began, joined.path, position.step, is_new=config.resume is None or joined.is_fork)
    record = asdict(config)
    record["training"]["batch_size"] = share
    directory.write_start(record, job, position.step)
    metrics = StepMetrics(
        jax.device_count(),
        config.profile.peak_flops or peak_flops(jax.local_devices()[0]),
        clock,
        start.schedule.steps_per_batch,
        job.objective.metrics_of_steps,
    )
    return Run(
        job=job,
        data=data,
        directory=directory,
        requests=Requests(lag=in_flight),
        clock=clock,
        metrics=metrics,
        state=state,
        frozen=frozen,
        position=position,
        start=start,
        last_step=last,
        evaluation_frequency=training.evaluation_frequency,
        config=record,
    )


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
            due = [feature for feature in features if is_due(feature, now)]
            if not due:
                continue
            makes_line = any(feature.makes_line for feature in due)
            if not act(run, features, now, run.read_line() if makes_line else {}):
                return False
            if makes_line:
                run.metrics.restart()
    if run.is_last:
        return True
    return act(run, features, Moment(run.position.step, False, False, frozenset([STOP])), run.read_line())


def catch_up(run: Run, features: Sequence[Feature]) -> bool:
    """Does the actions that an earlier process left undone; False if the run has to stop."""
    pending = run.position.pending
    if pending is None:
        return True
    requested = frozenset(pending["features"])
    acting = [feature for feature in features if feature.acts_on_every_line or feature.name in requested]
    return act(run, acting, Moment(run.position.step, False, run.is_last, requested), dict(pending["line"]))


def act(run: Run, features: Sequence[Feature], now: Moment, line: Line) -> bool:
    """Runs the features that are due, in the order of the table; False if the run has to stop.

    At a stop, the actions that may wait become pending. In the state saved meanwhile, so do all later actions until
    they are done.
    """
    waiting: list[str] = []
    for number, feature in enumerate(features):
        is_acting = bool(line) if feature.acts_on_every_line else is_due(feature, now)
        if not is_acting:
            continue
        if now.is_stop and feature.is_deferrable:
            waiting.append(feature.name)
            continue
        rest = features[number + 1 :]
        later = [feature.name for feature in rest if feature.is_deferrable and is_due(feature, now)]
        run.position.pending = pending_actions(line, waiting + later)
        try:
            with run.clock.phase(feature.phase):
                feature.do(run, now, line)
        except Stopped:
            waiting.append(feature.name)
            now = now._replace(requested=now.requested | {STOP})
    run.position.pending = pending_actions(line, waiting)
    return not now.is_stop


def is_due(feature: Feature, now: Moment) -> bool:
    """Whether a feature acts now, by its own rule or on request."""
    return feature.name in now.requested or feature.due(now)
