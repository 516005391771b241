"""Text sampled from the model after each evaluation."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from zero.config.constraints import at_least
from zero.config.keys import Mistakes, key
from zero.corpus.text.tokenizers import encode_prompt
from zero.files import storage
from zero.files.appending import append
from zero.hosts import agreement
from zero.inference.generate import generate, until_end
from zero.models.config import GPTConfig
from zero.record.metrics_file import Line
from zero.record.run_files import SAMPLES_FILE
from zero.run.feature import Feature, Moment
from zero.run.run import Run
from zero.training.programs import make_inference

log = logging.getLogger(__name__)


class Sample(Feature):
    """Appends at most `training.sample_tokens` tokens to RUN/samples.txt; all hosts sample, host 0 writes.

    A text ends at the tokenizer's end of text.

    A start drops the samples of steps after the one that it continues from, as it drops their metrics, because these
    steps are trained again. Training continues if the file cannot be written.
    """

    @dataclass(frozen=True)
    class Keys:
        sample_tokens: int = key(
            300,
            at_least(0),
            "Tokens to sample from the model at each evaluation; 0: off.",
        )

        def sample_mistakes(self, size: GPTConfig, of_model: str) -> Mistakes:
            name = "training.sample_tokens"
            if size.has_learned_positions and self.sample_tokens >= size.block_size:
                learned = f"one less than the learned positions of {of_model}"
                yield name, f"at most {size.block_size - 1}, {learned}"
            switch = size.rotary_switch
            if switch is not None and self.sample_tokens >= switch:
                yield name, f"less than {switch}, beyond which rotary frequencies depend on the length"

    name = "sample"
    phase = "evaluation"
    may_wait = True

    def __init__(self, keys: Keys, run: Run) -> None:
        self._count = keys.sample_tokens
        self._inference = make_inference(run.job.model)
        if agreement.is_host_0():
            drop_later(run.directory.path / SAMPLES_FILE, run.position.step)

    @classmethod
    def is_done(cls, run_directory: Path, now: Moment) -> bool:
        path = run_directory / SAMPLES_FILE
        return path.exists() and heading(now.step) in path.read_text(errors="replace").splitlines()

    def due(self, now: Moment) -> bool:
        return self._count > 0 and now.is_evaluation

    def do(self, run: Run, now: Moment, line: Line) -> None:
        tokenizer = run.data.tokenizer
        prompt = encode_prompt(tokenizer, "")
        chunks = generate(self._inference, run.weights, [prompt], self._count, seed=now.step, chunk=self._count)
        text = tokenizer.decode(until_end(next(chunks)[0, len(prompt) :], tokenizer.special.ends))
        if not agreement.is_host_0():
            return
        try:
            append(run.directory.path / SAMPLES_FILE, f"{heading(now.step)}\n{text}\n".encode())
        except OSError as error:
            log.warning("step %d: its sample could not be written: %s", now.step, error)
        if now.is_last:
            log.info("sample:\n%s", text)


def heading(step: int) -> str:
    """The line above the sample of a step.

    >>> heading(6)
    '--- step 6'
    """
    return f"--- step {step}"


def samples_after(samples: str, step: int) -> Iterator[tuple[int, str]]:
    r"""The samples written after a step, each with its own step.

    >>> list(samples_after("--- step 5\nto be\n--- step 10\nor not\n", 5))
    [(10, 'or not')]
    >>> list(samples_after("", 5))  # of a run resumed before its first sample
    []
    """
    heads = [*re.finditer(r"^--- step (\d+)\n", samples, re.MULTILINE)]
    for number, head in enumerate(heads):
        is_newest = number == len(heads) - 1
        end = len(samples) if is_newest else heads[number + 1].start()
        if int(head[1]) > step:
            yield int(head[1]), samples[head.end() : end].removesuffix("\n")


def drop_later(path: Path, step: int) -> None:
    """Removes the samples of steps after `step` from a file, if any."""
    written = path.read_bytes() if path.exists() else b""
    kept = until(written, step)
    if kept != written:
        try:
            storage.write(path, kept)
        except OSError as error:
            log.warning("%s: samples of steps after %d could not be removed: %s", path, step, error)


def until(samples: bytes, step: int) -> bytes:
    r"""The contents of the sample file at this step of the run.

    >>> until(b"--- step 5\nto be\n--- step 10\nor not\n", 5)
    b'--- step 5\nto be\n'
    """
    for head in re.finditer(rb"^--- step (\d+)$", samples, re.MULTILINE):
        if int(head[1]) > step:
            return samples[: head.start()]
    return samples
