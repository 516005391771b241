"""The training run, from top to bottom."""

from __future__ import annotations

import json
import logging
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import Any

import jax
import numpy as np
import optax
from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

from zero.models.gpt import GPTConfig
from zero.partition.state import memory
from zero.runtime import storage
from zero.runtime.build import make_job
from zero.runtime.checkpoints.checkpoints import Checkpoints
from zero.runtime.config.configuration import Config, index_files
from zero.runtime.corpus.corpus import prepare
from zero.runtime.data.cache import Cache
from zero.runtime.data.loader import Loader, prefetch
from zero.runtime.errors import UserError
from zero.runtime.hosts import distributed, preemption
from zero.runtime.inference.inference import generate
from zero.runtime.run import runs
from zero.runtime.run.progress import Position, Progress, restore
from zero.runtime.tokenizers import Tokenizer, load_tokenizer
from zero.runtime.tracking.html_report import PAGE_FILE, write_page
from zero.runtime.tracking.plot import draw_run
from zero.runtime.tracking.tracking import METRICS_FILE, Tracker, read_metrics
from zero.runtime.weights.interchange import warm_start
from zero.training.programs import Inference, Programs, make_inference
from zero.training.schedules import Context
from zero.training.step import Batch, ShardedGPT, TrainState, state_layout

log = logging.getLogger(__name__)


@distributed.ending_together()
def train(config: Config, size: GPTConfig, run_directory: Path) -> int:
    """Trains until the schedule or the data ends, or until told to stop.

    Returns:
      The exit status: 0 when finished, 75 when stopped after a saved checkpoint.

    Raises:
      UserError: what the configuration, the data or a checkpoint has wrong.
      KeyboardInterrupt: told to stop before there was anything to save.
    """
    training, data = config.training, config.data
    host, hosts = distributed.start(**asdict(config.distributed))
    run_directory, is_fork = _agree_on(run_directory, config.resume)
    devices, local_devices = jax.device_count(), jax.local_device_count()
    log.info(
        "%d %s devices, %d of this host; run directory %s", devices, jax.default_backend(), local_devices, run_directory
    )
    tokenizer = load_tokenizer(data.tokenizer)
    if tokenizer.vocab_size > size.vocab_size:
        raise UserError(
            f"model.size={config.model.size}: its vocab_size {size.vocab_size} does not hold the "
            f"{tokenizer.vocab_size} tokens of data.tokenizer={data.tokenizer}"
        )
    train_index = index_files(data.index_path_train, data.bucket_path)
    validation_index = index_files(data.index_path_validation, data.bucket_path)
    for is_turn in (host == 0, host != 0):  # hosts that share a disk find what the first one has made
        if is_turn and data.corpus and not all(map(storage.exists, _local_paths(train_index, validation_index))):
            _prepare_corpus(config, tokenizer)
        distributed.wait_for_all()

    model, tx, programs = make_job(config, size)
    axis, layout = model.axis, state_layout(model, tx)
    inference = make_inference(model)
    context = Context(data.max_context, training.warmup_train_context, training.staged_warmup_steps)

    with ExitStack() as stack:
        # Where to start: at the beginning, or at a checkpoint of this run or of the one that it forks from.
        if host == 0:
            stack.enter_context(runs.locked(run_directory))
        place = runs.checkpoint_directory(run_directory, data.bucket_path, data.checkpoint_directory)
        distributed.check_shared("data.checkpoint_directory", place)
        origin = _origin(config, run_directory, place) if is_fork else None
        checkpoints = stack.enter_context(Checkpoints(place, data.keep_checkpoints))
        at, state = Position(training.batch_size * hosts), None
        if config.resume is not None:
            source = checkpoints if origin is None else stack.enter_context(Checkpoints(origin, keep=None))
            at, state = restore(source, data.resume_step, layout, axis, is_own=origin is None)
            log.info("resumed from step %d of %s", at.step, source.directory)
        elif checkpoints.steps():
            raise UserError(
                f"{checkpoints.directory} holds checkpoints; --resume continues, another hydra.run.dir starts afresh"
            )
        _check_division(at.global_rows, hosts, local_devices, training.gradient_accumulation_steps)

        cache = Cache(Path(data.cache_directory), data.cache_bytes) if data.cache_directory else None
        loader = Loader(
            train_index,
            global_rows=at.global_rows,
            context=data.max_context,
            vocab_size=size.vocab_size,
            seed=config.seed,
            max_epochs=training.max_epochs,
            train_samples=data.train_samples,
            host=host,
            hosts=hosts,
            window=data.window,
            skip_bad=data.max_skipped_rows > 0,
            cache=cache,
        )
        last_step = training.total_steps
        if loader.total_batches is not None and loader.total_batches < last_step:
            last_step = loader.total_batches
            log.warning(
                "training.max_epochs=%s ends the data at step %d, before training.total_steps=%d",
                training.max_epochs,
                last_step,
                training.total_steps,
            )
        if at.unevaluated is not None and _is_evaluated(run_directory, at.step):
            at.unevaluated = None
        if at.step >= last_step and at.unevaluated is None:
            log.info("nothing left to do: the run stands at step %d of %d", at.step, last_step)
            return 0
        validation = Loader(
            validation_index,
            global_rows=at.global_rows,
            context=data.max_context,
            vocab_size=size.vocab_size,
            shuffle=False,
            max_epochs=1,
            host=host,
            hosts=hosts,
            cache=cache,
        )
        if state is None:
            state = _new_state(programs, config, model)
        tracker = None
        if host == 0:
            _write_down(run_directory, config, model, tx, forked_at=None if origin is None else at.step)
            resumed_from = None if config.resume is None else at.step
            tracker = stack.enter_context(
                Tracker(run_directory, project=data.wandb_project, config=asdict(config), resumed_from=resumed_from)
            )
            runs.mirror(run_directory, place)
        # Virtual CPU devices hang in a collective when a step is dispatched while another runs (distributed.start).
        in_flight = 0 if jax.default_backend() == "cpu" else 1
        stop_requests = stack.enter_context(preemption.stop_requests())
        agreement = distributed.Agreement(lag=in_flight)
        run = Progress(
            config, size, run_directory, checkpoints, tracker, layout, axis, stop_requests, agreement, state, at
        )
        del state
        bar = stack.enter_context(
            tqdm(
                total=last_step,
                initial=at.step,
                unit="step",
                disable=host != 0,
                dynamic_ncols=True,
                file=preemption.Outliving(sys.stderr),
            )
        )
        stack.enter_context(logging_redirect_tqdm())
        text = ""
        if at.unevaluated is not None:
            line = at.unevaluated
            if not _evaluate(run, line, programs, validation):
                return run.stop()
            text = _show(run, line, inference, tokenizer)
        alone = stop_requests if hosts == 1 else ()  # several have to agree first
        batches = stack.enter_context(closing(prefetch(loader.batches(at.cursor), stop=alone)))
        window = _Window()
        steps: dict[int, Callable[..., Any]] = {}  # programs, by the length of a sequence
        for step, batch in zip(range(at.step + 1, last_step + 1), window.timed(batches), strict=False):
            tokens = context.cut(batch.tokens, step - 1)
            rows, sequence_length = _for_devices(tokens, host), tokens.shape[1]
            is_first = sequence_length not in steps
            if is_first:
                began, cache_hits = time.monotonic(), distributed.compilation_cache_hits()
                program = programs.step
                if hosts == 1:
                    program = preemption.compiled_unless(stop_requests, program, run.state, rows)
                    if program is None:
                        return _stop_between_steps(run, window, loader, context)
                steps[sequence_length] = program
            run.state, metrics = steps[sequence_length](run.state, rows)
            run.count(step, batch, first_row=host * len(batch.tokens))
            window.add(metrics, leave=0 if is_first else in_flight)
            if is_first:
                own, age = time.monotonic() - began, distributed.age()
                window.leave_out(own)
                if len(steps) == 1:
                    window.once = {"seconds_to_first_step": age}
                log.info(
                    "first step of %d tokens a sequence: %.1f s after the start, %.1f s of them its own, %s",
                    sequence_length,
                    age,
                    own,
                    "from the cache" if distributed.compilation_cache_hits() > cache_hits else "compiled",
                )
            bar.update()

            is_evaluation = step % training.evaluation_frequency == 0 or step == last_step
            is_stop, is_due = run.asked()  # once a step: a signal that comes while it is saved is the next one's
            if not (is_evaluation or is_stop or is_due or step % training.log_frequency == 0):
                continue
            checkpoints.check()
            line = _metrics_line(run, window, loader, context)
            _refuse_to_go_on(config, line, window.skipped_in_a_row)
            if is_stop or not is_evaluation:
                at.unevaluated = line if is_evaluation else None
                run.log(line)
            else:
                is_stop = not _evaluate(run, line, programs, validation)
            bar.set_postfix_str(_summary(line))
            if is_stop:
                return run.stop()
            if is_evaluation or is_due:
                run.save(line.get("validation/loss"))
            if is_evaluation:
                text = _show(run, line, inference, tokenizer)
            window.restart()
        if at.step < last_step:  # told to stop while it waited for data
            return _stop_between_steps(run, window, loader, context)
        checkpoints.wait()
        if host == 0:
            runs.mirror(run_directory, place)
            log.info("a page about this run: %s", write_page([run_directory], run_directory / PAGE_FILE))
        log.info("finished at step %d; the model writes:\n%s", at.step, text)
        log.info("run directory: %s", run_directory)
        return 0


class _Window:
    """The steps since the last line of metrics: their losses, and how long they and their data took."""

    def __init__(self) -> None:
        self.unread: list[dict[str, jax.Array]] = []
        self.skipped_in_a_row = 0
        self.once: dict[str, float] = {}  # for the next line alone
        self.restart()

    def restart(self) -> None:
        self.losses: list[float] = []
        self.untimed = 0
        self.waited = 0.0
        self.started = time.monotonic()

    @property
    def is_empty(self) -> bool:
        return not (self.unread or self.losses)

    def leave_out(self, seconds: float) -> None:
        """The newest step took so long because it was compiled: it does not count for the throughput."""
        self.untimed += 1
        self.started += seconds

    def timed(self, batches: Iterator[Any]) -> Iterator[Any]:
        """The same batches; the time spent waiting for them is kept."""
        while True:
            asked = time.monotonic()
            batch = next(batches, None)
            self.waited += time.monotonic() - asked
            if batch is None:
                return
            yield batch

    def add(self, metrics: dict[str, jax.Array], leave: int) -> None:
        """Takes the metrics of a step that was dispatched; all but the newest `leave` are waited for."""
        self.unread.append(metrics)
        while len(self.unread) > leave:
            self.newest = {name: x.item() for name, x in self.unread.pop(0).items()}
            self.losses.append(self.newest["loss"])

    def read_all(self, tokens_a_step: int) -> dict[str, float | int]:
        """One line of metrics: the mean loss, the newest of everything else."""
        while self.unread:
            self.add(self.unread.pop(0), leave=0)
        self.skipped_in_a_row = self.newest["skipped_in_a_row"]
        line = {
            "train/loss": fmean(self.losses),
            "learning_rate": self.newest["learning_rate"],
            "gradient_norm": self.newest["gradient_norm"],
            "skipped_steps": self.newest["skipped_steps"],
            "skipped_spikes": self.newest["skipped_spikes"],
            **self.once,
        }
        self.once = {}
        if steps := len(self.losses) - self.untimed:
            step_time = (time.monotonic() - self.started) / steps
            line |= {
                "step_time": step_time,
                "tokens_per_second": tokens_a_step / step_time,
                "data_wait": self.waited / (step_time * steps),
            }
        return line


def _metrics_line(run: Progress, window: _Window, loader: Loader, context: Context) -> dict[str, Any]:
    """Of the steps since the last line; all hosts make it at the same step."""
    run.sum_up()
    at, row_tokens = run.at, context.full
    assert at.cursor is not None
    line = {
        "step": at.step,
        **window.read_all(tokens_a_step=at.global_rows * row_tokens),
        "sequence_length": context.at(at.step - 1),
        "tokens_seen": at.step * at.global_rows * row_tokens,
        "samples_checksum": at.samples_checksum,
    }
    for corpus, rows_seen in loader.rows_seen(at.cursor["batches"]).items():
        line[f"tokens_seen/{corpus}"] = rows_seen * row_tokens
    if run.config.data.max_skipped_rows:
        line["skipped_rows"] = at.skipped_rows
    return line


def _stop_between_steps(run: Progress, window: _Window, loader: Loader, context: Context) -> int:
    if not window.is_empty:
        run.log(_metrics_line(run, window, loader, context))
    return run.stop()


def _local_paths(*indices: str | list[str] | dict[str, float]) -> list[str]:
    paths = [path for index in indices for path in ([index] if isinstance(index, str) else index)]
    return [path for path in paths if not storage.is_remote(path)]


def _prepare_corpus(config: Config, tokenizer: Tokenizer) -> None:
    """Makes the corpus where its index files are missing: the default job needs nothing but this machine."""
    name = str(config.data.corpus)
    corpus = prepare(
        name,
        name,
        directory=Path("data/corpus"),
        index_directory=Path("data/index"),
        tokenizer=tokenizer,
        row_tokens=config.data.max_context,
    )
    log.info("prepared corpus %s: %s", name, corpus)


def _agree_on(run_directory: Path, resume: str | None) -> tuple[Path, bool]:
    """The run directory of host 0, and whether it forks. Another host keeps its log there, and nothing else."""
    host = jax.process_index()
    is_fork = resume is not None and Path(resume) != run_directory
    said = json.dumps([str(run_directory), resume is not None, is_fork])
    there, is_resume, is_fork = json.loads(distributed.from_first_host("run", said))
    if is_resume != (resume is not None):
        raise UserError(
            f"host 0 {'resumes' if is_resume else 'starts afresh'} and host {host} does not: all hosts must see the "
            "same runs; name data.bucket_path, or a hydra.run.dir on a disk that they share"
        )
    if host == 0:
        return run_directory, is_fork
    for handler in logging.root.handlers:
        if isinstance(handler, logging.FileHandler):
            old = Path(handler.baseFilename)
            handler.close()
            handler.baseFilename = os.path.abspath(Path(there, f"{old.stem}.{host}{old.suffix}"))
            Path(there).mkdir(parents=True, exist_ok=True)
            if Path(there) != run_directory:
                old.unlink(missing_ok=True)
    if Path(there) != run_directory and run_directory.is_dir() and not any(run_directory.iterdir()):
        run_directory.rmdir()
    return Path(there), is_fork


def _is_evaluated(run_directory: Path, step: int) -> bool:
    """Whether an earlier start of this run has made up for the evaluation of its checkpoint, as host 0 knows."""
    found = False
    if jax.process_index() == 0 and (run_directory / METRICS_FILE).exists():
        lines = read_metrics(run_directory / METRICS_FILE)
        found = any(line["step"] == step and "validation/loss" in line for line in lines)
    return bool(distributed.from_first_host("evaluated", "yes" if found else ""))


def _refuse_to_go_on(config: Config, line: dict[str, Any], skipped_in_a_row: int) -> None:
    """Raises UserError where the run has passed a limit that the configuration sets."""
    training, data, step = config.training, config.data, line["step"]
    if data.max_skipped_rows and line["skipped_rows"] > data.max_skipped_rows:
        raise UserError(
            f"step {step}: {line['skipped_rows']} rows of the data had to be skipped, and "
            f"data.max_skipped_rows={data.max_skipped_rows}; the log names their shards and samples"
        )
    if skipped_in_a_row > training.max_skipped_in_a_row:
        spikes = f" or were spikes by training.skip_spikes={training.skip_spikes}" if training.skip_spikes else ""
        raise UserError(
            f"step {step}: {skipped_in_a_row} steps in a row had no finite gradient{spikes}; lower "
            "training.peak_learning_rate and --resume from a step before that (data.resume_step)"
        )
    if not training.skip_bad_steps and not math.isfinite(line["gradient_norm"]):
        raise UserError(
            f"step {step}: the gradient is not finite and training.skip_bad_steps=false; lower "
            "training.peak_learning_rate and --resume"
        )


def _origin(config: Config, run_directory: Path, place: Path | str) -> Path | str:
    """Where the checkpoints lie that a fork starts from."""
    before = Path(str(config.resume))
    saved = runs.saved_config(before).data
    origin = runs.checkpoint_directory(before, saved.bucket_path, saved.checkpoint_directory)
    if origin == place:
        raise UserError(
            f"data.resume_step={config.data.resume_step} forks the run into {run_directory}, but {place} holds the "
            f"checkpoints of the run itself; name another data.checkpoint_directory, and hydra.run.dir={before}"
        )
    return origin


def _check_division(global_rows: int, hosts: int, local_devices: int, micro_batches: int) -> None:
    parts = hosts * local_devices * micro_batches
    if global_rows % parts:
        raise UserError(
            f"training.batch_size: a global batch of {global_rows} sequences does not divide into {hosts} hosts x "
            f"{local_devices} devices x training.gradient_accumulation_steps={micro_batches} = {parts} parts"
        )


def _new_state(programs: Programs, config: Config, model: ShardedGPT) -> TrainState:
    """Made on the devices, in shards; with `model.warm_start` the weights come from elsewhere."""
    key = np.asarray(jax.random.key_data(jax.random.key(config.seed)))
    if not config.model.warm_start:
        return programs.start(programs.init(np.stack([key] * jax.local_device_count())))
    return programs.start(warm_start(str(config.model.model_path), model))


def _write_down(
    run_directory: Path, config: Config, model: ShardedGPT, tx: optax.GradientTransformation, forked_at: int | None
) -> None:
    """What a person or a resume looks for in a run directory, before the first step."""
    if forked_at is not None:
        lines = read_metrics(Path(str(config.resume)) / METRICS_FILE)
        kept = [json.dumps(line) + "\n" for line in lines if line["step"] <= forked_at]
        storage.write(run_directory / METRICS_FILE, "".join(kept).encode())
    runs.save_config(run_directory, config)
    shapes, shards = model.sharded_layout.shapes(), model.axis.shards
    table = memory(shapes, tx, shards, stacked=("blocks", "vocabulary"), compute_dtypes=[model.compute_dtype])
    (run_directory / runs.LAYOUT_FILE).write_text(
        f"{model.layout}\n\nbytes a device without activations; this run is at stage {model.stage}\n{table}\n"
    )


def _for_devices(tokens: np.ndarray, host: int) -> Batch:
    """This host's rows `(rows, context)`, split over its devices."""
    devices = jax.local_device_count()
    rows = len(tokens) // devices
    first_rows = host * len(tokens) + rows * np.arange(devices, dtype=np.int32)
    return Batch(tokens.reshape(devices, rows, -1), first_rows.astype(np.int32))


def _evaluate(run: Progress, line: dict[str, Any], programs: Programs, validation: Loader) -> bool:
    """Logs the metrics with the mean loss of held-out tokens in nats; False where told to stop before that is known."""
    losses, scored = 0.0, 0
    with closing(prefetch(validation.batches())) as batches:
        for batch in islice(batches, run.config.training.maximum_evaluation_steps):
            loss, tokens = programs.evaluate(run.state.params, _for_devices(batch.tokens, 0).tokens)
            losses, scored = losses + loss.item(), scored + tokens.item()
            if run.asked()[0]:
                run.at.unevaluated = line
                run.log(line)
                return False
    run.at.unevaluated = None
    line["validation/loss"] = losses / scored
    run.log(line)
    return True


def _show(run: Progress, line: dict[str, Any], inference: Inference, tokenizer: Tokenizer) -> str:
    """Pictures and text for people, after an evaluation; all hosts sample, and the first one writes."""
    text = ""
    if count := run.config.training.sample_tokens:
        prompt = np.asarray([tokenizer.end_of_text], np.int32)
        tokens = next(generate(inference, run.state.params, [prompt], count, seed=run.at.step, chunk=count))
        text = tokenizer.decode(tokens[0, 1:])
    if run.tracker is not None:
        log.info("step %d: %s", run.at.step, _summary(line))
        draw_run(run.run_directory)
        with (run.run_directory / runs.SAMPLES_FILE).open("a") as file:
            file.write(f"--- step {run.at.step}\n{text}\n")
    return text


def _summary(line: dict[str, float | int]) -> str:
    names = {
        "train/loss": "loss {:.3f}",
        "validation/loss": "validation {:.3f}",
        "tokens_per_second": "{:,.0f} tokens/s",
    }
    return ", ".join(text.format(line[name]) for name, text in names.items() if name in line)
