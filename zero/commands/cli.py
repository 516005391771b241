"""The command line (hydra): checks the configuration and hands over to train, evaluate, sample or plan."""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from zero.base.errors import FULL_DISK, WRONG_PATH, UserError, file_error
from zero.commands.arguments import check_form, take_text_literally
from zero.commands.early_messages import EarlyMessages
from zero.commands.modes import MODES, check, describe
from zero.commands.origins import filled, keys_of, sizes_of
from zero.config.files import conf_directory
from zero.config.saved_config import with_groups
from zero.corpus.preparing.prepare_if_missing import corpus_name, prepare_if_missing
from zero.hosts.hardware import check_slice
from zero.hosts.signals import SIGNALS, IgnoreBrokenPipe, exit_immediately, unanswered
from zero.models.config import GPTConfig
from zero.record.ownership import discarding_unused, new_directory
from zero.record.run_files import describe_full_disk, saved_config
from zero.run.find_run import parsed_overrides, results_in_run, resume_overrides
from zero.run.sweeps import check_places, continue_job, swept_keys, write_table

EARLY_MESSAGES = EarlyMessages()  # about the run that a command continues
QUOTE = "'"  # around a value on the command line
OmegaConf.register_new_resolver("new_directory", new_directory, use_cache=True)  # for hydra.run.dir in conf/config.yaml
OmegaConf.register_new_resolver("corpus_name", corpus_name)  # for index files in conf/tune


def main() -> None:
    """Runs the command line in `sys.argv`. Exit status: see docs/reference/exit-statuses.md."""
    os.environ["HYDRA_FULL_ERROR"] = "1"  # otherwise Hydra prints what it catches, over many lines
    logging.getLogger("absl").setLevel(logging.CRITICAL)  # orbax's threads would log after the last line
    sys.stdout = IgnoreBrokenPipe(sys.stdout)
    with errors_in_lines():
        for number in SIGNALS:
            signal.signal(number, interrupt)
        try:
            check_form(sys.argv[1:])
            sys.argv[1:] = take_text_literally(sys.argv[1:])
            check_names(sys.argv[1:])
            with EARLY_MESSAGES:
                sys.argv[1:] = results_in_run(with_groups_of_run(resume_overrides(sys.argv[1:])))
            run()
        except (HydraException, OmegaConfBaseException) as error:  # the latter: an interpolation in a key of Hydra's
            raise UserError("\n".join(all_mistakes(sys.argv[1:], error))) from error


def with_groups_of_run(arguments: list[str]) -> list[str]:
    """The arguments of a resume with the choices of its run, such as optimizer=lion, whose keys they may set."""
    run = next(
        (override.value() for override in parsed_overrides(arguments) if override.key_or_group == "resume"), None
    )
    if run is None:
        return arguments
    saved: Any = OmegaConf.to_container(saved_config(Path(str(run))))
    return with_groups(arguments, saved)


@hydra.main(version_base="1.3", config_path=str(conf_directory()), config_name="config")
def run(config: DictConfig) -> None:
    hydra_config = HydraConfig.get()
    # As written: an interpolation in an override refers to the keys of the run, not to those of Hydra.
    overrides: Any = OmegaConf.to_container(hydra_config.overrides.task, resolve=False)
    run_directory = Path(hydra_config.runtime.output_dir)
    EARLY_MESSAGES.show()
    with errors_in_lines(), discarding_unused(run_directory):
        is_job = hydra_config.mode == RunMode.MULTIRUN and config.mode == "train"
        if is_job:
            keys = swept_keys(sys.argv[1:], overrides)
            check_places(config, run_directory, keys)
            continue_job(config, run_directory, keys, lambda job: check(job, sizes_of(job)))
        checked, size = resolve(config, overrides)
        if checked.mode != "plan":
            runs_on_cpu = any(override.startswith("distributed.cpu_devices=") for override in overrides)
            check_slice(hydra_config.runtime.choices.get("slice"), runs_on_cpu)
        start = program(checked.mode)
        if not gc.isenabled():  # by zero.commands.start; what is imported stays, and is not looked at again
            gc.freeze()
            gc.set_threshold(100_000, 20, 20)  # passes over a trace, which is live, take a fifth of its time
            gc.enable()
        status = start(checked, size, run_directory)
        if is_job and not status:
            write_table(run_directory.parent, keys)
    if status:
        exit_immediately(status)  # a status of 0 returns, so that --multirun continues


def resolve(config: DictConfig, overrides: list[str]) -> tuple[Any, GPTConfig]:
    """The checked configuration, merged with that of the run that it resumes or uses, and the size of its model.

    Raises:
      UserError: a line for each mistake.
    """
    check_names(overrides)
    try:
        config, sizes = filled(config, overrides)
    except OmegaConfBaseException as error:  # one of these keys is missing or no value
        raise UserError(describe(error)) from error
    checked = check(config, sizes, keys_of(overrides))
    return checked, sizes.chosen(checked.model)


def check_names(overrides: Sequence[str]) -> None:
    """Raises UserError for keys that are chosen as groups, and for groups without a choice."""
    lines = []
    for override in overrides:
        name, _, value = override.lstrip("+~").partition("=")
        instead = MODES.chosen(name, value)
        choices = MODES.choices().get(name)
        if instead is not None:
            lines.append(instead)
        elif choices is not None and value.strip(QUOTE) in ("", "null", "???"):
            lines.append(f"{name}={value.strip(QUOTE)}: expected one of {', '.join(choices)}")
    if lines:
        raise UserError("\n".join(lines))


def composed(overrides: list[str]) -> DictConfig:
    """The configuration of a fresh run with these overrides, as Hydra composes it, unchecked."""
    with hydra.initialize_config_dir(str(conf_directory()), version_base="1.3"):
        return hydra.compose("config", overrides)


def compose(overrides: list[str]) -> tuple[Any, GPTConfig]:
    """The checked configuration of a fresh run with these overrides, and the size of its model; nothing is run.

    The class of the configuration is that of its mode.

    Raises:
      UserError: a line for each mistake.
    """
    overrides = take_text_literally(overrides)
    check_names(overrides)
    try:
        return resolve(composed(overrides), overrides)
    except (HydraException, OmegaConfBaseException) as error:
        raise UserError("\n".join(all_mistakes(overrides, error))) from error


def program(mode: str) -> Callable[[Any, GPTConfig, Path], int]:
    """The function of a mode, imported after the check of the configuration, because the import takes seconds."""
    if mode == "plan":
        from zero.planning.plan import plan

        return plan
    if mode == "evaluate":
        from zero.inference.evaluate import evaluate

        return evaluate
    if mode == "sample":
        from zero.inference.sample import sample

        return sample
    from zero.run.train import train

    return partial(train, prepare=prepare_if_missing)


def _is_key(override: str) -> bool:
    """Whether an override sets a key, and does not choose a mode, a group or a file of settings.

    >>> _is_key("mode=sample"), _is_key("+preset=v3-8"), _is_key("sample.tokens=3")
    (False, False, True)
    """
    return "." in override.partition("=")[0]


def all_mistakes(arguments: Sequence[str], first: HydraException | OmegaConfBaseException) -> list[str]:
    """A line for each mistake in the overrides, composed one by one, because Hydra reports only the first mistake."""
    if any(argument.startswith("-") for argument in arguments):  # Hydra's own options: not all arguments are overrides
        return [describe(first)]
    mistakes = []
    right: list[str] = []
    with hydra.initialize_config_dir(str(conf_directory()), version_base="1.3"):
        for override in sorted(arguments, key=_is_key):  # choices such as mode=sample first, as they bring keys
            try:
                hydra.compose("config", [*right, override])
                right.append(override)
            except HydraException as error:
                message = describe(error)
                is_named = override.partition("=")[0].lstrip("+~") in message
                mistakes.append(message if is_named else f"{override}: {message}")
        try:
            resolve(hydra.compose("config", right), right)
        except HydraException as error:
            mistakes.append(describe(error))
        except UserError as error:
            mistakes += str(error).splitlines()
    return mistakes or [describe(first)]


def interrupt(number: int, frame: FrameType | None) -> None:
    """Interrupts the program, even if the exception is lost, as in a callback of the garbage collector."""
    timer = threading.Timer(5, report_interrupt, [number])
    timer.daemon = True
    unanswered.append((number, timer))
    timer.start()
    raise KeyboardInterrupt(number)


def report_interrupt(number: int) -> None:
    print("error: interrupted", file=sys.stderr, flush=True)
    os._exit(128 + number)  # Python's own exit waits for threads that compile, and crashes some of them


@contextmanager
def errors_in_lines() -> Iterator[None]:
    """Ends the program with a line for each mistake, without a traceback, and with the status of the error."""
    try:
        yield
    except BaseException as error:
        if unanswered:  # nothing to save yet, or a model in use; a library may have made its own error of it
            report_interrupt(unanswered[0][0])
        if isinstance(error, UserError):
            end(str(error), error.status)
        for cause in (error, error.__cause__):  # logging has an error of its own where it cannot open its file
            if isinstance(cause, OSError) and cause.errno in WRONG_PATH | FULL_DISK:  # of the run directory
                message = describe_full_disk(cause) if cause.errno in FULL_DISK else str(cause)
                end(message, file_error(message, cause).status)
        raise


def end(message: str, status: int) -> None:
    for line in message.splitlines():
        print(f"error: {line}", file=sys.stderr)
    exit_immediately(status)  # threads of libraries would continue and log after the last line
