"""Text sampled from the model after each evaluation."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from zero.base.keys import Mistakes, at_least, key
from zero.corpus.text.tokenizers import encode_prompt
from zero.hosts import agreement
from zero.inference.generate import generate, until_end
from zero.models.config import GPTConfig
from zero.record.metrics_file import Line
from zero.record.run_files import SAMPLES_FILE
from zero.run.feature import Feature, Moment
from zero.run.growing_file import GrowingFile
from zero.run.run import Run
from zero.training.programs import make_inference

log = logging.getLogger(__name__)


class Sample(Feature):
    """Appends at most `training.sample_tokens` tokens to RUN/samples.txt; all hosts sample, host 0 writes.

    A text ends at the tokenizer's end of text.
    """

    @dataclass(frozen=True)
    class Keys:
        sample_tokens: int = key(
            300,
            at_least(0),
            "Tokens to sample from the model at each evaluation; 0: off. A model with score_outputs samples none.",
        )

        def sample_mistakes(self, model_config: GPTConfig, model_label: str) -> Mistakes:
            name = "training.sample_tokens"
            if model_config.has_learned_positions and self.sample_tokens >= model_config.block_size:
                learned = f"one less than the learned positions of {model_label}"
                yield name, f"at most {model_config.block_size - 1}, {learned}"
            switch = model_config.rotary_switch
            if switch is not None and self.sample_tokens >= switch:
                yield name, f"less than {switch}, beyond which rotary frequencies depend on the length"

    name = "sample"
    phase = "evaluation"
    is_deferrable = True

    def __init__(self, keys: Keys, run: Run) -> None:
        self._count = 0 if run.job.model.config.score_outputs is not None else keys.sample_tokens
        self._inference = make_inference(run.job.model)
        self._file = GrowingFile(run, SAMPLES_FILE, step_of)
        self._is_compiled = False

    @classmethod
    def is_done(cls, run_directory: Path, now: Moment) -> bool:
        path = run_directory / SAMPLES_FILE
        return path.exists() and heading(now.step) in path.read_text(errors="replace").splitlines()

    def due(self, now: Moment) -> bool:
        return self._count > 0 and now.is_evaluation

    def do(self, run: Run, now: Moment, line: Line) -> None:
        tokenizer = run.data.tokenizer
        prompt = encode_prompt(tokenizer, "")
        if not self._is_compiled and agreement.is_host_0():
            log.info("compiling the sampler, or reading it from the cache")
        self._is_compiled = True
        chunks = generate(self._inference, run.weights, [prompt], self._count, seed=now.step, chunk=self._count)
        text = tokenizer.decode(until_end(next(chunks)[0, len(prompt) :], tokenizer.special.ends))
        self._file.append(now.step, f"{heading(now.step)}\n{text}\n".encode())
        if now.is_last and agreement.is_host_0():
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


def step_of(line: bytes) -> int | None:
    """The step of the sample below this line; None if the line is no heading.

    >>> step_of(b"--- step 5"), step_of(b"to be")
    (5, None)
    """
    head = re.fullmatch(rb"--- step (\d+)", line)
    return None if head is None else int(head[1])
