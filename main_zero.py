"""Trains a GPT with ZeRO on `jax.pmap`: `python main_zero.py [key=value ...] [--resume]`.

Checks the configuration and hands over. Exit status: 0 when finished, 75 when preempted after a saved checkpoint,
others on error.
"""

import errno
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType


def interrupt(number: int, frame: FrameType | None) -> None:
    """Ends what is under way; also where the exception gets lost, as in a callback of the garbage collector."""
    late = threading.Timer(5, say_interrupted, [number])
    late.daemon = True
    unanswered.append((number, late))
    late.start()
    raise KeyboardInterrupt(number)


def say_interrupted(number: int) -> None:
    print("error: interrupted", file=sys.stderr, flush=True)
    os._exit(128 + number)  # Python's own way out waits for threads that compile, and crashes some of them


if __name__ == "__main__":
    # Importing what follows takes seconds, in which a person may change their mind.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, frame: say_interrupted(number))

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from omegaconf import DictConfig

from zero.models.gpt import GPTConfig
from zero.runtime.config.configuration import Config, check, describe, load_sizes, merge_resumed
from zero.runtime.errors import UserError
from zero.runtime.hosts.signals import SIGNALS, exit_immediately, unanswered
from zero.runtime.run.resume import resume_overrides, trained_run
from zero.runtime.run_directory import saved_config

CONF = Path(__file__).parent / "conf"
# A run directory that cannot be written, or a disk that is full.
BAD_PLACE = {errno.EACCES, errno.EEXIST, errno.EISDIR, errno.ENAMETOOLONG, errno.ENOENT, errno.ENOTDIR, errno.EPERM}
BAD_PLACE |= {errno.EDQUOT, errno.ENOSPC, errno.EROFS}


@hydra.main(version_base="1.3", config_path="conf", config_name="config")
def run(config: DictConfig) -> None:
    hydra_config = HydraConfig.get()
    with one_line_errors():
        overrides = list(hydra_config.overrides.task)
        if config.resume is not None:
            config = merge_resumed(saved_config(Path(config.resume)), config, overrides)
        elif config.mode in ("evaluate", "sample"):
            config.model.model_path = str(trained_run(config.model.model_path))
            saved = saved_config(Path(config.model.model_path))
            config = merge_resumed(saved, config, [*overrides, "model.model_path"])
        sizes = load_sizes(CONF / "model_config.yaml")
        checked = check(config, sizes)
        if checked.plan.largest is None:
            given = [override.lstrip("+").split("=")[0] for override in overrides]
            checked.plan.largest = "model.size" not in given and "preset" not in given
        status = program(checked.mode)(checked, sizes[checked.model.size], Path(hydra_config.runtime.output_dir))
    if status:
        exit_immediately(status)  # a status of 0 returns, so that --multirun goes on


def program(mode: str) -> Callable[[Config, GPTConfig, Path], int]:
    """What a mode runs. Imported here: that takes seconds, and what was misspelt is answered by now."""
    if mode == "plan":
        from zero.runtime.planning.planning import plan

        return plan
    if mode == "evaluate":
        from zero.runtime.inference.evaluate import evaluate

        return evaluate
    if mode == "sample":
        from zero.runtime.inference.sample import sample

        return sample
    from zero.runtime.train import train

    return train


@contextmanager
def one_line_errors() -> Iterator[None]:
    try:
        yield
    except UserError as error:
        sys.exit(f"error: {error}")
    except HydraException as error:
        sys.exit(f"error: {describe(error)}")
    except OSError as error:
        if error.errno not in BAD_PLACE:
            raise
        sys.exit(f"error: {error}")
    except KeyboardInterrupt as error:  # when there is nothing to save yet, or a model is only used
        say_interrupted(error.args[0])


if __name__ == "__main__":
    os.environ["HYDRA_FULL_ERROR"] = "1"  # else Hydra prints what it caught itself, over many lines
    with one_line_errors():
        for number in SIGNALS:
            signal.signal(number, interrupt)
        sys.argv[1:] = resume_overrides(sys.argv[1:])
        run()
