"""From a configuration to a run that is ready for its next step: hosts, data, model, checkpoint, trackers."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

from zero import run_directory as run_files
from zero.checkpoints.emergency import EmergencyCheckpoints
from zero.checkpoints.manager import Checkpoints
from zero.checkpoints.retention import Retention
from zero.config.same_configuration import check_same_configuration
from zero.config.schema import Config
from zero.corpus.preparing.manifest import check_end_of_text
from zero.corpus.preparing.prepare_if_missing import prepare_if_missing
from zero.corpus.reading.cache import ShardCache
from zero.corpus.reading.index_files import index_paths, named_sets
from zero.corpus.reading.loader import Loader
from zero.corpus.reading.synthetic import SYNTHETIC, AnyLoader, SyntheticLoader
from zero.corpus.text.tokenizers import Tokenizer, load_tokenizer
from zero.errors import UserError
from zero.exchange.peft_folder import read_peft
from zero.exchange.warm_start import warm_start
from zero.files import storage
from zero.hosts import agreement, signals, startup
from zero.hosts.speeds import peak_flops
from zero.job import Job, make_job
from zero.models.config import GPTConfig
from zero.partition.layout import PyTree
from zero.partition.memory import memory
from zero.run.active_run import ActiveRun
from zero.run.frozen_base import fit_to_base, load_base
from zero.run.profiling import Profiler
from zero.run.reference import load_references
from zero.run.restore import TrainingPosition
from zero.run.resume import (
    check_unused,
    is_durable,
    is_evaluated,
    join_run_directory,
    line_of,
    resume_state,
    write_command,
    write_lineage,
)
from zero.run.statistics import StatisticsRecorder
from zero.run.step_metrics import StepMetrics
from zero.run.validation import uncovered
from zero.run.verification import Verifier
from zero.tracking.goodput import Goodput
from zero.tracking.metrics_file import read_metrics
from zero.tracking.tracker import open_tracker
from zero.training.parts import TrainState
from zero.training.programs import make_inference
from zero.training.schedules import SequenceLengths

log = logging.getLogger(__name__)


@contextmanager
def open_run(config: Config, size: GPTConfig, run_directory: Path) -> Iterator[ActiveRun | None]:
    """Opens all that training needs, from the hosts to the loaders; closed in reverse order at the end.

    Yields:
      The run, or None where it is complete already.

    Raises:
      UserError: the configuration, the data or a checkpoint is wrong.
    """
    host, hosts = startup.start(**asdict(config.distributed), overlap_gathers=config.zero.overlap_gathers)
    run_directory, is_fork = join_run_directory(run_directory, config.resume)
    check_same_configuration(config, size)
    count, backend = jax.device_count(), jax.default_backend()
    log.info("%d %s devices, %d of this host; %s", count, backend, jax.local_device_count(), run_directory)
    job = make_job(config, size)  # what devices or batches refuse is known before a corpus is prepared
    model = job.model
    if config.resume is None:
        with_global_batch(config, config.training.batch_size * hosts)
    tokenizer = _load_tokenizer(config, size)
    config = _prepare_corpus(config, tokenizer)

    with ExitStack() as stack:
        if host == 0:
            stack.enter_context(run_files.locked(run_directory))
        place = run_files.checkpoint_directory(run_directory, config.data.bucket_path, config.data.checkpoint_directory)
        agreement.check_shared("data.checkpoint_directory", place)
        emergency = None  # opened before the durable checkpoints, so that it is closed after their last save
        if config.zero.emergency_steps is not None:
            directory = Path(config.zero.emergency_directory)
            durable_steps = partial(run_files.committed_steps, place)
            emergency = EmergencyCheckpoints(directory, place, durable_steps, asdict(size), job.layout, model.axis)
            stack.enter_context(emergency)
        data = config.data
        retention = Retention(data.keep_checkpoints, data.keep_every, data.keep_every_hours)
        checkpoints = stack.enter_context(Checkpoints(place, retention))
        if config.resume is None:
            check_unused(run_directory, checkpoints)
        position, state = TrainingPosition(global_rows=config.training.batch_size * hosts), None
        if config.resume is not None:
            position, state = resume_state(config, job, run_directory, is_fork, checkpoints, emergency)
        config = with_global_batch(config, position.global_rows)
        reference = load_references(config, job, position)
        loader, validation = _loaders(config, job, tokenizer, position.global_rows, reference)
        last_step = _last_step(config, loader)
        if position.unevaluated is not None and is_evaluated(run_directory, position.step):
            position.unevaluated = None
        if position.step >= last_step and position.unevaluated is None and is_durable(emergency):
            log.info("nothing left to do: the run is at step %d of %d", position.step, last_step)
            yield None
            return
        frozen = load_base(config, model, position)
        if state is None:
            state = _new_state(config, job, frozen)
        tracker, goodput = None, Goodput(startup.process_age())
        if host == 0:
            if config.resume is not None and not is_fork:
                goodput = Goodput(startup.process_age(), line_of(run_directory, position.step))
            write_command(run_directory, config.resume)
            _write_run_files(run_directory, config, job, forked_at=position.step if is_fork else None)
            opened = open_tracker(
                run_directory,
                project=config.data.wandb_project,
                tensorboard=config.data.tensorboard,
                config=asdict(config),
                resumed_from=None if config.resume is None else position.step,
            )
            tracker = stack.enter_context(opened)
            write_lineage(run_directory, emergency)
            run_files.mirror(run_directory, place)
        if emergency is not None:
            emergency.remove_earlier()
        stop_requests = stack.enter_context(signals.stop_requests())
        bar = stack.enter_context(_progress_bar(position.step, last_step))
        stack.enter_context(logging_redirect_tqdm())
        profiler = Profiler(config.profile.steps, run_directory)
        stack.callback(profiler.stop)
        # Steps dispatched before the metrics of the oldest are read; on CPU the host's cores are the devices.
        in_flight = 0 if backend == "cpu" else 1
        peak = config.profile.peak_flops or peak_flops(jax.local_devices()[0])
        yield ActiveRun(
            config=config,
            job=job,
            directory=run_directory,
            tokenizer=tokenizer,
            loader=loader,
            validation=validation,
            checkpoints=checkpoints,
            emergency=emergency,
            tracker=tracker,
            stop_requests=stop_requests,
            any_host=agreement.AnyHost(lag=in_flight),
            bar=bar,
            goodput=goodput,
            metrics=StepMetrics(
                position.global_rows * job.objective.rows * config.data.max_context, count, peak, goodput
            ),
            profiler=profiler,
            verifier=Verifier(job.programs.verify, job.model.axis, config.training.verify_every),
            statistics=StatisticsRecorder(job.programs, config.training.statistics),
            state=state,
            frozen=frozen,
            position=position,
            last_step=last_step,
            in_flight=in_flight,
            context=staged_context(config),
            inference=make_inference(model),
        )


def _load_tokenizer(config: Config, size: GPTConfig) -> Tokenizer:
    tokenizer = load_tokenizer(config.data.tokenizer)
    if tokenizer.vocab_size > size.vocab_size:
        raise UserError(
            f"model.size={config.model.size}: its vocab_size {size.vocab_size} is smaller than the "
            f"{tokenizer.vocab_size} tokens of data.tokenizer={config.data.tokenizer}"
        )
    return tokenizer


def _prepare_corpus(config: Config, tokenizer: Tokenizer) -> Config:
    """Prepares the corpus if its index files are missing: the default job needs nothing but this machine.

    Returns:
      The configuration with the index files of the corpus that fits.
    """
    data, is_first = config.data, jax.process_index() == 0
    if data.corpus in SYNTHETIC:
        return config
    train = index_paths(data.index_path_train, data.bucket_path)
    sets = named_sets(data.index_path_validation, data.bucket_path)
    paths = [path for index in (train, *sets.values()) for path in ([index] if isinstance(index, str) else index)]
    for is_turn in (is_first, not is_first):  # hosts that share a disk find the corpus of the first one
        if is_turn and data.corpus:
            used = prepare_if_missing(data.corpus, paths, tokenizer, data.max_context)
            if used:
                log.info("data.corpus=%s has shorter rows: %s in place of it", data.corpus, ", ".join(used.values()))
                single = {"index_path_train": train, "index_path_validation": sets.get("")}
                new: dict[str, Any] = {key: used[path] for key, path in single.items() if isinstance(path, str)}
                config = replace(config, data=replace(data, **new))
        agreement.wait_for_all()
    return config


def with_global_batch(config: Config, global_rows: int) -> Config:
    """The configuration with this host's share of the global batch, which the first checkpoint of a run fixes.

    Raises:
      UserError: the global batch does not divide into the micro-batches of all devices.
    """
    training, hosts = config.training, jax.process_count()
    group = config.zero.tensor_shards * config.zero.context_shards
    groups, unit = jax.local_device_count() // group, "devices" if group == 1 else f"groups of {group} devices"
    parts = hosts * groups * training.gradient_accumulation_steps
    if global_rows % parts:
        raise UserError(
            f"training.batch_size: a global batch of {global_rows} sequences does not divide into {hosts} hosts x "
            f"{groups} {unit} x training.gradient_accumulation_steps={training.gradient_accumulation_steps} = "
            f"{parts} parts"
        )
    share = global_rows // hosts
    if share == training.batch_size:
        return config
    log.warning(
        "training.batch_size=%d instead of %d on %d hosts: the global batch keeps the %d sequences of the first "
        "checkpoint of the run",
        share,
        training.batch_size,
        hosts,
        global_rows,
    )
    return replace(config, training=replace(training, batch_size=share))


def staged_context(config: Config) -> SequenceLengths:
    training, full = config.training, config.data.max_context
    if training.context_stages == "linear":
        return SequenceLengths.linear(full, training.warmup_train_context, training.staged_warmup_steps)
    return SequenceLengths(full, training.stages())


def _loaders(
    config: Config, job: Job, tokenizer: Tokenizer, global_rows: int, reference: dict[str, np.ndarray] | None
) -> tuple[AnyLoader, dict[str, Loader]]:
    """The loaders of the training set and of each validation set; with `load_references`, if there are any.

    Raises:
      UserError: the data does not fit the configuration.
    """
    data, vocab_size = config.data, job.model.config.vocab_size
    host, hosts = jax.process_index(), jax.process_count()
    if data.corpus is not None and data.corpus in SYNTHETIC:
        shape = (global_rows, data.max_context, vocab_size, config.seed)
        return SyntheticLoader(data.corpus, *shape, host, hosts), {}
    cache = ShardCache(Path(data.cache_directory), data.cache_bytes) if data.cache_directory else None
    pairs = job.objective.rows == 2
    shared: dict[str, Any] = {
        "global_rows": global_rows,
        "context": data.max_context,
        "vocab_size": vocab_size,
        "host": host,
        "hosts": hosts,
        "cache": cache,
        "only_completions": pairs or config.training.loss_on == "completion",
        "pairs": pairs,
        "reference": reference,
    }
    training = Loader(
        index_paths(data.index_path_train, data.bucket_path),
        seed=config.seed,
        max_epochs=config.training.max_epochs,
        train_samples=data.train_samples,
        shuffle_shards=data.shuffle_shards,
        skip_bad=data.max_skipped_rows > 0,
        crop=data.crop,
        **shared,
    )
    is_validated = config.has_validation_set and config.training.maximum_evaluation_steps
    sets = named_sets(data.index_path_validation, data.bucket_path) if is_validated else {}
    crop = "first" if data.crop == "first" else "all"  # not at random: evaluations are compared
    validation = {name: Loader(index, shuffle=False, max_epochs=1, crop=crop, **shared) for name, index in sets.items()}
    if names := uncovered(validation, config.training.maximum_evaluation_steps, global_rows):
        log.warning(
            "training.maximum_evaluation_steps=%d, counted over all sets one after the other, ends before %s: "
            "validation/loss is without them, and so is the choice of the best checkpoint",
            config.training.maximum_evaluation_steps,
            ", ".join(names),
        )
    if data.isolate_documents:
        corpora = [corpus for loader in (training, *validation.values()) for corpus in loader.corpora]
        check_end_of_text([shard.path for corpus in corpora for shard, _ in corpus.shards], tokenizer)
    return training, validation


def _last_step(config: Config, loader: AnyLoader) -> int:
    """The last step of the schedule, or of the data if that ends earlier."""
    training = config.training
    if loader.total_batches is None or loader.total_batches >= training.total_steps:
        return training.total_steps
    log.warning(
        "training.max_epochs=%s ends the data at step %d, before training.total_steps=%d",
        training.max_epochs,
        loader.total_batches,
        training.total_steps,
    )
    return loader.total_batches


def _new_state(config: Config, job: Job, frozen: PyTree) -> TrainState:
    """The state of a fresh start, made on the devices, in shards; its weights are random or those of a warm start."""
    programs = job.programs
    if config.tuning.adapter is not None:
        return programs.start(read_peft(Path(config.tuning.adapter), job.model))
    if config.model.warm_start and job.model.tuning is None:
        return programs.start(warm_start(str(config.model.model_path), job.model, ema=config.model.ema))
    if job.model.tuning is None:
        return programs.fresh(np.full(jax.local_device_count(), config.seed, np.uint32))
    key = np.asarray(jax.random.key_data(jax.random.key(config.seed)))
    new = programs.init(np.stack([key] * jax.local_device_count()))
    return programs.start(fit_to_base(new, frozen, job.model))


def _write_run_files(run_directory: Path, config: Config, job: Job, forked_at: int | None) -> None:
    """Writes the configuration, the layout with its memory table, and for a fork the metrics up to its first step."""
    if forked_at is not None:
        lines = read_metrics(Path(str(config.resume)) / run_files.METRICS_FILE)
        inherited = [json.dumps(line) + "\n" for line in lines if line["step"] <= forked_at]
        storage.write(run_directory / run_files.METRICS_FILE, "".join(inherited).encode())
    run_files.save_config(run_directory, config)
    model, tx = job.model, job.tx
    shapes, shards = model.sharded_layout.shapes(), model.axis.shards
    if config.training.ema is not None:  # counted as optimizer state
        tx = optax.GradientTransformation(lambda params, init=tx.init: (init(params), params), tx.update)
    table = memory(shapes, tx, shards, compute_dtypes=[model.compute_dtype], **model.layout_options)
    frozen = "" if model.tuning is None else f"frozen: {model.frozen_layout}\n\n"
    (run_directory / run_files.LAYOUT_FILE).write_text(
        f"{model.layout}\n\n{frozen}bytes per device without activations, of parameters that are trained; this run is "
        f"at stage {model.stage}\n{table}\n"
    )


def _progress_bar(step: int, last_step: int) -> tqdm:
    return tqdm(
        total=last_step,
        initial=step,
        unit="step",
        disable=jax.process_index() != 0,
        dynamic_ncols=True,
        file=signals.IgnoreBrokenPipe(sys.stderr),
    )
