"""What the first screen of report.html says: did the run go well, what did it cost, what did it write, what next."""

from __future__ import annotations

import os
import shlex
from dataclasses import dataclass
from pathlib import Path

from zero.base.errors import trainer
from zero.config.command_line import override_value
from zero.pages.facts import Fact
from zero.record.run_files import METRICS_FILE, SAMPLES_FILE
from zero.record.run_record import RunRecord
from zero.tracking.goodput import PHASES
from zero.tracking.progress import GIB, clock


@dataclass(frozen=True)
class Command:
    """A command to copy."""

    purpose: str
    words: tuple[str, ...]  # as a shell takes them


def loss_text(loss: float | None) -> str:
    if loss is None:
        return "–"
    return f"{loss:.4f}"


def state(run: RunRecord) -> Fact:
    """How far the run is."""
    step = run.last["step"]
    total = run.total_steps
    if run.ends_with_data:
        epochs = run.config["training.max_epochs"]
        return Fact("state", "finished", f"at step {step:,}, where training.max_epochs={epochs} ends the data", "good")
    if run.is_finished:
        return Fact("state", "finished", f"at step {step:,}", "good")
    at_most = "at most " if run.config.get("training.max_epochs", "null") != "null" else ""
    return Fact("state", f"step {step:,} of {at_most}{total:,}", f"{step / total:.0%}")


def outcome(run: RunRecord) -> list[Fact]:
    """Did it go well?"""
    facts = [state(run)]
    validation = run.values("validation/loss")
    best = run.best("validation/loss")
    if best is not None:
        step, loss = validation[-1]
        facts.append(Fact("validation loss", loss_text(loss), f"nats per token, at step {step:,}"))
        is_best = best[0] == step
        note = f"at step {best[0]:,}" + ("" if is_best else f"; the last loss is {loss - best[1]:.4f} higher")
        facts.append(Fact("best validation loss", loss_text(best[1]), note, "good" if is_best else "bad"))
    training = run.values("train/loss")
    if training:
        step, loss = training[-1]
        facts.append(Fact("training loss", loss_text(loss), f"mean since the previous line, at step {step:,}"))
    not_finite = run.history.null_losses
    if not_finite:
        facts.append(Fact("losses that are not finite", f"{not_finite}", "of the logged lines", "bad"))
    if "skipped_steps" in run.last:
        skipped = run.last["skipped_steps"]
        spikes = run.last.get("skipped_spikes", 0)
        note = f"of which {spikes} spikes" if spikes else ""
        facts.append(Fact("skipped steps", f"{skipped:,}", note, "bad" if skipped else "good"))
    if run.last.get("skipped_rows"):
        facts.append(Fact("skipped rows", f"{run.last['skipped_rows']:,}", "of the data", "bad"))
    if run.history.resumes:
        times = "once" if len(run.history.resumes) == 1 else f"{len(run.history.resumes)} times"
        facts.append(Fact("resumed", times, f"most recently from step {run.history.resumes[-1]:,}"))
    return facts


def cost(run: RunRecord) -> list[Fact]:
    """What did it cost?"""
    last = run.last
    facts = []
    if "wall_time" in last:
        facts.append(Fact("wall clock", clock(last["wall_time"]), "over all starts"))
        shares = {name: last[f"goodput/{phase}"] for phase, name in PHASES.items()}
        others = sorted(((share, name) for name, share in shares.items() if name != "steps"), reverse=True)
        note = ", ".join(f"{name} {share:.1%}" for share, name in others[:3] if share >= 0.0005)
        facts.append(Fact("goodput", f"{shares['steps']:.1%}", f"in steps; {note}" if note else "in steps"))
    if "tokens_seen" in last:
        facts.append(Fact("tokens", f"{last['tokens_seen']:,}", epochs_text(run)))
    speeds = run.values("tokens_per_second")
    if speeds:
        speed = speeds[-1][1]
        device_speed = dict(run.values("tokens_per_second_per_device")).get(speeds[-1][0])
        note = "" if device_speed is None else f"{device_speed:,.0f} per device, {round(speed / device_speed)} devices"
        facts.append(Fact("tokens per second", f"{speed:,.0f}", note))
        if device_speed is not None and "wall_time" in last:
            hours = round(speed / device_speed) * last["wall_time"] / 3600
            facts.append(Fact("device hours", f"{hours:,.2f}"))
    for metric, name, form, unit in (
        ("mfu", "model FLOPs utilization", "{:.1%}", 1),
        ("predicted_speed", "of the predicted speed", "{:.0%}", 1),
        ("peak_memory", "peak memory", "{:.2f} GiB per device", GIB),
    ):
        values = run.values(metric)
        if values:
            facts.append(Fact(name, form.format(values[-1][1] / unit)))
    return facts


def epochs_text(run: RunRecord) -> str:
    epochs = {name.removeprefix("epochs/"): value for name, value in run.last.items() if name.startswith("epochs/")}
    return ", ".join(f"{value:.2f} epochs of {name}" for name, value in epochs.items())


def model(run: RunRecord) -> list[str]:
    """What is trained, on what."""
    config = run.config
    corpus = config["data.corpus"]
    if corpus == "null":
        corpus = config["data.index_path_train"]
    parts = [f"model {config['model.size']}"]
    if run.parameters is not None:
        parts.append(f"{run.parameters:,} parameters")
    parts.append(f"corpus {corpus}")
    parts.append(f"tokenizer {config['data.tokenizer']}")
    length = config["data.max_context"]
    length_note = "" if length == "null" else f" of {length} tokens"
    parts.append(f"{config['training.batch_size']} sequences{length_note} per host and step")
    parts.append(f"{config['optimizer.name']}, learning rate {config['training.peak_learning_rate']}")
    parts.append(f"stage {config['zero.stage']}")
    return parts


def files(run: RunRecord) -> list[Fact]:
    """What did it write?"""
    steps = run.saved_steps
    if steps is None:
        saved = "in a bucket"
    elif steps:
        saved = "of steps " + ", ".join(f"{step:,}" for step in steps)
    else:
        saved = "none yet"
    facts = [
        Fact("directory", path_text(run.directory)),
        Fact("checkpoints", path_text(run.checkpoints), saved),
        Fact("metrics", METRICS_FILE, f"{run.history.count:,} lines"),
    ]
    if run.samples.total:
        facts.append(Fact("samples", SAMPLES_FILE, f"{run.samples.total:,} texts"))
    return facts


def commands(run: RunRecord) -> list[Command]:
    """What next?"""
    directory = path_text(run.directory)
    program = trainer()
    resume = (*program, "--resume", shlex.quote(f"hydra.run.dir={override_value(directory)}"))
    path = shlex.quote(f"model.model_path={override_value(directory)}")
    exported = shlex.quote(f"{run.directory.name}-model")
    export: tuple[str, ...] = ("zero-weights", "export", shlex.quote(directory), exported)
    tuning = run.config.get("tuning.name", run.config.get("tuning.method"))
    if tuning in ("none", "all"):  # adapters are a folder of PEFT
        export += ("--with-code",)
    if run.ends_with_data:
        epochs = 2 * int(run.config["training.max_epochs"])
        first = Command("train longer", (*resume, f"training.max_epochs={epochs}"))
    elif run.is_finished:
        first = Command("train longer", (*resume, f"training.total_steps={2 * run.total_steps}"))
    else:
        first = Command("resume", resume)
    return [
        first,
        Command("sample", (*program, "mode=sample", path)),
        Command("evaluate", (*program, "mode=evaluate", path)),
        Command("export", export),
    ]


def path_text(path: Path | str) -> str:
    """A path from the directory of the process, where it is below, else the whole one."""
    if isinstance(path, str):
        return path
    relative = os.path.relpath(path)
    if not relative.startswith(".."):
        return relative
    return str(path.absolute())
