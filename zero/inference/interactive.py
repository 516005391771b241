"""`sample.interactive`: one prompt per input line, streamed texts; and code shared with other sampling (omegaconf)."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any, TextIO

import jax
import numpy as np
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from zero.base.errors import UserError
from zero.inference.config import Sample
from zero.inference.generate import generate, until_end
from zero.inference.trained_model import TrainedModel
from zero.training.inference import Sampling
from zero.training.programs import Inference, make_inference

STREAM_CHUNK = 16  # tokens between two updates of a streamed text
# Keys of the section `sample` that a line such as "/temperature 0.7" changes.
SETTINGS = ("tokens", "seed", *(field.name for field in dataclasses.fields(Sampling)))


def sampling_of(options: Sample) -> Sampling:
    """How tokens are drawn, from section `sample`."""
    return Sampling(**{field.name: getattr(options, field.name) for field in dataclasses.fields(Sampling)})


def converse(trained: TrainedModel, options: Sample, encode: Callable[[str], np.ndarray]) -> None:
    """Continues each line of standard input; a line that begins with a slash changes a setting.

    Raises:
      UserError: there are several hosts, which have no terminal in common.
    """
    if jax.process_count() > 1:
        raise UserError(f"sample.interactive=true: expected one host, got {jax.process_count()}")

    @lru_cache(maxsize=8)  # each sampling has its own program
    def programs_of(sampling: Sampling) -> Inference:
        return make_inference(trained.model, sampling)

    print(f"one prompt per line; /NAME VALUE sets one of {', '.join(SETTINGS)}; Ctrl-D ends", file=sys.stderr)
    for line in sys.stdin:
        if line.startswith("/"):
            try:
                options = _changed(options, line[1:].strip())
            except UserError as error:
                print(f"error: {error}", file=sys.stderr)
            continue
        prompt = line.rstrip("\n")
        encoded = encode(prompt)
        longest = len(encoded) + options.tokens
        size = trained.model.config
        if size.has_learned_positions and longest > size.block_size:
            print(f"error: {longest} tokens, but the model has only {size.block_size} positions", file=sys.stderr)
            continue
        shown = ""
        step = partial(generate, programs_of(sampling_of(options)), trained.params, [encoded], options.tokens)
        for tokens in step(seed=options.seed, chunk=STREAM_CHUNK):
            written = tokens[0, len(encoded) :][: options.tokens]
            text = until_end(written, trained.tokenizer.special.ends)
            shown = stream(sys.stdout, shown, trained.tokenizer.decode(text))
            if len(text) < len(written):
                break
        print(flush=True)


def _changed(options: Sample, command: str) -> Sample:
    """The options after a command such as "temperature 0.7".

    Raises:
      UserError: there is no such setting, or its value is wrong.
    """
    name, _, text = command.partition(" ")
    if name not in SETTINGS:
        raise UserError(f"/{name}: expected one of {', '.join(SETTINGS)}")
    (field,) = (field for field in dataclasses.fields(Sample) if field.name == name)
    holds, expected = field.metadata["check"]
    section = OmegaConf.structured(options)
    OmegaConf.set_readonly(section, False)  # the class is frozen
    try:
        section[name] = OmegaConf.create(f"value: {text}").value
        value: Any = section[name]
        if not (value is None or holds(value)):
            raise UserError(f"/{name} {text}: expected {expected}")
    except OmegaConfBaseException as error:
        raise UserError(f"/{name} {text}: {str(error).splitlines()[0]}") from error
    return dataclasses.replace(options, **{name: value})


def stream(screen: TextIO, shown: str, text: str) -> str:
    """Writes the new text, except an incomplete last character; returns all text written so far."""
    whole = text.rstrip("\ufffd")
    screen.write(whole[len(shown) :])
    screen.flush()
    return whole if len(whole) > len(shown) else shown
