"""`mode=sample`: a trained model continues prompts."""

from __future__ import annotations

import io
import json
import logging
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from zero.base.errors import UserError
from zero.config.check import values_on_all_hosts
from zero.corpus.text.chat_template import load_chat_template
from zero.corpus.text.tokenizers import FileTokenizer, Tokenizer, encode_prompt
from zero.files import storage
from zero.files.parsing import reading
from zero.hosts import startup, watchdog
from zero.hosts.agreement import is_host_0
from zero.hosts.same_configuration import check_same_configuration
from zero.hosts.watchdog import ending_together
from zero.inference.config import Sample, SampleConfig
from zero.inference.generate import generate, until_end
from zero.inference.interactive import STREAM_CHUNK, converse, sampling_of, stream
from zero.inference.scoring import Passage, Scorer
from zero.inference.trained_model import open_model, place_model
from zero.models.config import GPTConfig
from zero.tracking.progress import Stage
from zero.training.programs import make_inference

log = logging.getLogger(__name__)

TEXTS_FILE = "samples.jsonl"


@ending_together()
def sample(config: SampleConfig, model_config: GPTConfig, run_directory: Path) -> int:
    """Continues each prompt; writes to `samples.jsonl` and to the terminal, where a single text is streamed.

    Returns:
      The exit status, 0.

    Raises:
      UserError: there is no such run or prompt, or the text is longer than the model's positions.
    """
    options = config.sample
    prompts = [] if options.interactive else repeated(_prompts(options), options.copies)
    startup.start(**asdict(config.distributed), overlap_gathers=config.zero.overlap_gathers)
    check_same_configuration(values_on_all_hosts(config), asdict(model_config))
    rows = 1 if options.interactive else len(prompts)
    model = place_model(model_config, rows, config.model, config.data, config.zero, options)
    trained = open_model(model, config.model, config.data, options.ema)
    watchdog.wait_without_limit()
    tokenizer = trained.tokenizer
    encode = (
        _chat_encoder(config.data.tokenizer, tokenizer, options.template_variables)
        if options.chat
        else partial(encode_prompt, tokenizer)
    )
    if options.interactive:
        converse(trained, options, encode)
        return 0
    ends = tokenizer.special.ends
    encoded = [encode(prompt) for prompt in prompts]
    longest = max(map(len, encoded)) + options.tokens
    if model_config.has_learned_positions and longest > model_config.block_size:
        raise UserError(
            f"sample.tokens={options.tokens}: prompt and text are {longest} tokens, but the model has only "
            f"{model_config.block_size} learned positions"
        )
    line_break = "\n" if options.chat else ""
    screen = sys.stdout if is_host_0() and len(prompts) == 1 else None
    if screen:
        screen.write(prompts[0] + line_break)
    shown, drawn = "", 0
    programs = make_inference(trained.model, sampling_of(options))
    if is_host_0():
        log.info("compiling the sampler, or reading it from the cache")
    steps = generate(programs, trained.params, encoded, options.tokens, seed=options.seed, chunk=STREAM_CHUNK)
    chunks = -(-(longest - min(map(len, encoded))) // STREAM_CHUNK)
    with Stage("chunks of text", chunks, is_shown=screen is None and is_host_0()) as stage:
        for tokens in stage.counted(steps):
            written = [row[len(prompt) :][: options.tokens] for row, prompt in zip(tokens, encoded, strict=True)]
            texts = [until_end(row, ends) for row in written]
            if drawn == 0:
                started = time.monotonic()  # compilation is not counted
                first = sum(map(len, texts))
            drawn = sum(map(len, texts))
            if screen:
                shown = stream(screen, shown, tokenizer.decode(texts[0]))
            if all(
                len(text) < len(row) or len(row) == options.tokens for text, row in zip(texts, written, strict=True)
            ):
                break
    seconds = time.monotonic() - started
    more: list[dict[str, Any]] = [{} for _ in texts]
    if options.log_probabilities:
        whole = [np.concatenate(pair) for pair in zip(encoded, texts, strict=True)]
        passages = [Passage(row, len(prompt)) for row, prompt in zip(whole, encoded, strict=True)]
        scores = Scorer(trained, max(map(len, whole)), len(whole)).scores(passages)
        more = [{"log_probabilities": (-score.losses).tolist()} for score in scores]
    if is_host_0():
        decoded = [tokenizer.decode(text) for text in texts]
        if screen:
            screen.write("\n")
        else:
            for number, (prompt, text) in enumerate(zip(prompts, decoded, strict=True)):
                print(f"--- {number}\n{prompt}{line_break}{text}")
        lines = []
        for prompt, text, facts in zip(prompts, decoded, more, strict=True):
            lines.append(json.dumps({"prompt": prompt, "text": text, **facts}) + "\n")
        storage.write(run_directory / TEXTS_FILE, "".join(lines).encode())
        speed = f"{(drawn - first) / seconds:,.0f} tokens/s" if drawn > first else "too few to time"
        log.info("%d tokens, %s; written to %s", drawn, speed, run_directory / TEXTS_FILE)
    return 0


def _chat_encoder(path: str, tokenizer: Tokenizer, variables: dict[str, Any]) -> Callable[[str], np.ndarray]:
    """Encodes a user's message up to the beginning of the answer; the template writes the beginning of the text."""
    is_file = isinstance(tokenizer, FileTokenizer)
    template = load_chat_template(path, time.time()) if is_file else None
    if template is None:
        raise UserError(f"sample.chat=true: data.tokenizer={path} has no chat template beside it")
    chats = template.with_variables(variables)

    def encode(prompt: str) -> np.ndarray:
        text = chats.render([{"role": "user", "content": prompt}], add_generation_prompt=True)
        return tokenizer.encode_whole(text, adds_begin=False).astype(np.int32)

    return encode


def repeated(prompts: Sequence[str], copies: int) -> list[str]:
    """Each prompt `copies` times in a row.

    >>> repeated(["to", "be"], 2)
    ['to', 'to', 'be', 'be']
    """
    return list(chain.from_iterable([prompt] * copies for prompt in prompts))


def _prompt_of(line: Any) -> str:
    return str(line["prompt"]) if isinstance(line, dict) else str(line)


def _prompts(options: Sample) -> list[str]:
    prompt = options.prompt
    if prompt is not None:
        if not isinstance(prompt, str):
            return prompt
        return [prompt]
    if options.prompt_file is None:
        return [""]
    if options.prompt_file == "-":
        data = sys.stdin.buffer.read()
    else:
        path = Path(options.prompt_file)
        if not path.is_file():
            raise UserError(
                f"sample.prompt_file={path}: no such file; expected one prompt per line, or - for standard input"
            )
        data = path.read_bytes()
    with reading(f"sample.prompt_file={options.prompt_file} is not UTF-8 text"):
        lines = io.StringIO(data.decode("utf-8"), newline=None).readlines()  # splitlines() also cuts at U+2028
    if not lines:
        raise UserError(f"sample.prompt_file={options.prompt_file}: no prompts; expected one per line")
    if options.prompt_file.endswith(".jsonl"):
        with reading(f"sample.prompt_file={options.prompt_file}: expected JSON strings or objects with a prompt"):
            return [_prompt_of(json.loads(line)) for line in lines]
    return [line.rstrip("\n") for line in lines]
