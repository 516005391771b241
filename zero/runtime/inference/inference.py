"""A trained model in use: its losses over whole texts, and texts that it writes."""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import jax
import numpy as np
from tqdm import tqdm

from zero.models.gpt import GPTConfig
from zero.partition.collectives import Axis
from zero.partition.layout import PyTree
from zero.partition.state import from_global
from zero.runtime.build import make_model
from zero.runtime.checkpoints.checkpoints import Checkpoints
from zero.runtime.config.configuration import Config, index_files
from zero.runtime.data.loader import Loader, prefetch
from zero.runtime.data.shards import row_tokens
from zero.runtime.errors import UserError
from zero.runtime.hosts import distributed
from zero.runtime.run import runs
from zero.runtime.tokenizers import Tokenizer, load_tokenizer
from zero.training.inference import Sampling
from zero.training.programs import Inference, make_inference
from zero.training.step import ShardedGPT

log = logging.getLogger(__name__)

RESULT_FILE = "evaluation.json"
TEXTS_FILE = "samples.jsonl"
STREAMED = 16  # tokens between two looks at a text in the making


class Opened(NamedTuple):
    """A model of a run, on all devices."""

    model: ShardedGPT
    params: PyTree
    tokenizer: Tokenizer
    step: int
    host: int


def open_model(config: Config, size: GPTConfig, rows: int) -> Opened:
    """The weights of a checkpoint of the run `model.model_path`, for `rows` rows at a time.

    Sharded as `zero.stage` says; or whole on every device that has a row, where `zero.replicate` says so or they fit.
    """
    host, hosts = distributed.start(**dataclasses.asdict(config.distributed))
    model = make_model(config, size)
    whole = model.layout.whole().bytes_per_device()
    if config.zero.replicate or (config.zero.replicate is None and 2 * whole <= distributed.device_memory()):
        devices = min(rows, jax.device_count()) if hosts == 1 else jax.device_count()
        model = dataclasses.replace(model, axis=Axis("zero", (1, devices)), stage=0)
    log.info(
        "%s bytes of weights, %s %d devices",
        f"{whole:,}",
        "sharded over" if model.stage else "whole on",
        model.axis.size,
    )
    params, step = load_weights(Path(str(config.model.model_path)), model, config.data.resume_step)
    return Opened(model, params, load_tokenizer(config.data.tokenizer), step, host)


def load_weights(run: Path, model: ShardedGPT, step: int | None) -> tuple[PyTree, int]:
    """Shards of a run's parameters for these devices, and the step they are of; None is the newest.

    Raises:
      UserError: the run holds no such checkpoint, or one of another model.
    """
    saved = runs.saved_config(run)
    directory = runs.checkpoint_directory(run, saved.data.bucket_path, saved.data.checkpoint_directory)
    with Checkpoints(directory, keep=None) as checkpoints:
        step = checkpoints.choose(step)
        params = checkpoints.restore(step, model.layout, model.axis, within="params")
    log.info("weights from step %d of %s", step, directory)
    return from_global(params, model.layout, model.axis, donate=True), step


# ---- losses ----------------------------------------------------------------------------------------------------------


class Passage(NamedTuple):
    """Tokens of which those from `first` on are scored, each given all before it."""

    tokens: np.ndarray
    first: int


class Score(NamedTuple):
    """Of the scored tokens of a passage: losses in nats, and whether each was the likeliest."""

    losses: np.ndarray
    is_greedy: np.ndarray


@distributed.ending_together()
def evaluate(config: Config, size: GPTConfig, run_directory: Path) -> int:
    """Scores the whole validation set and the files of `evaluate.tasks`; writes `evaluation.json`, and prints it."""
    opened = open_model(config, size, rows=config.training.batch_size)
    context = config.evaluate.context or config.data.max_context
    if not size.alibi_attn and context > size.block_size:
        raise UserError(
            f"evaluate.context={context}: expected at most {size.block_size}, the learned positions of the model"
        )
    scorer = Scorer(opened, context, config.training.batch_size)
    result: dict[str, Any] = {"run": str(config.model.model_path), "step": opened.step, "context": context}
    if config.evaluate.validation:
        result |= _evaluate_set(scorer, opened.tokenizer, config, context)
    for path in config.evaluate.tasks:
        result.setdefault("tasks", {})[Path(path).stem] = _evaluate_task(scorer, opened.tokenizer, Path(path), context)
    if config.evaluate.harness:
        result["harness"] = _harness().run(_in_harness(scorer, context), config.evaluate.harness)
    if opened.host == 0:
        text = json.dumps(result, indent=2)
        (run_directory / RESULT_FILE).write_text(text + "\n")
        print(text)
        log.info("written to %s", run_directory / RESULT_FILE)
    return 0


class Scorer:
    """Scores passages of at most `context` tokens, batch by batch on all devices, in their order."""

    def __init__(self, opened: Opened, context: int, rows: int):
        self._opened, self._context = opened, context
        self._devices = opened.model.axis.size
        self._rows = -(-rows * jax.process_count() // self._devices)  # of a device
        self._score = make_inference(opened.model).score

    def scores(self, passages: Iterable[Passage]) -> Iterator[Score]:
        devices, local = self._devices, self._devices // jax.process_count()
        waiting: list[Passage] = []

        def flush() -> Iterator[Score]:
            tokens = np.full((devices * self._rows, self._context), -1, np.int32)
            for row, passage in zip(tokens, waiting, strict=False):
                row[: len(passage.tokens)] = passage.tokens
            mine = tokens.reshape(devices, self._rows, -1)[self._opened.host * local :][:local]
            losses, is_greedy = (np.asarray(x) for x in self._score(self._opened.params, mine))
            for row, (text, first) in enumerate(waiting):
                part = slice(first - 1, len(text) - 1)  # the loss of token t stands at t - 1
                yield Score(losses[row, part].astype(np.float64), is_greedy[row, part])
            waiting.clear()

        for passage in passages:
            waiting.append(passage)
            if len(waiting) == devices * self._rows:
                yield from flush()
        if waiting:
            yield from flush()


def windows(tokens: np.ndarray, context: int, stride: int) -> Iterator[Passage]:
    """Passages that score every token after the first once, each but in the first with `context - stride` before it.

    >>> [(len(tokens), first) for tokens, first in windows(np.arange(10), context=6, stride=3)]
    [(6, 1), (6, 3), (4, 3)]
    """
    scored = 1
    for start in range(0, len(tokens), stride):
        end = min(start + context, len(tokens))
        if end <= scored:
            return
        yield Passage(tokens[start:end], scored - start)
        scored = end


def _evaluate_set(scorer: Scorer, tokenizer: Tokenizer, config: Config, context: int) -> dict[str, Any]:
    stride = config.evaluate.stride or -(-context // 2)
    index = index_files(config.data.index_path_validation, config.data.bucket_path)
    assert not isinstance(index, dict)  # which the configuration's check sees to
    loader = Loader(
        index,
        global_rows=1,
        context=row_tokens(index),
        vocab_size=scorer._opened.model.config.vocab_size,
        shuffle=False,
        max_epochs=1,
    )
    lengths = tokenizer.byte_lengths()
    texts: deque[np.ndarray] = deque()

    def passages() -> Iterator[Passage]:
        with closing(prefetch(loader.batches())) as batches:
            for batch in tqdm(
                batches, total=loader.rows, unit="row", desc="validation", disable=scorer._opened.host != 0
            ):
                for passage in windows(batch.tokens[0][batch.tokens[0] >= 0], context, stride):
                    texts.append(passage.tokens[passage.first :])
                    yield passage

    nats, tokens, octets = 0.0, 0, 0
    for score in scorer.scores(passages()):
        scored = texts.popleft()
        nats, tokens, octets = nats + score.losses.sum(), tokens + len(scored), octets + int(lengths[scored].sum())
    return {
        "loss": nats / tokens,
        "perplexity": math.exp(nats / tokens),
        "bits_per_byte": nats / math.log(2) / octets,
        "tokens": tokens,
        "bytes": octets,
        "stride": stride,
    }


def _evaluate_task(scorer: Scorer, tokenizer: Tokenizer, path: Path, context: int) -> dict[str, Any]:
    """Multiple choice, or the last word of a text, scored as lm-evaluation-harness scores HellaSwag and LAMBADA."""
    items = list(_read_items(path))
    if not items:
        raise UserError(f"evaluate.tasks: {path} holds no items; expected one JSON object a line")
    requests = [(item.context, choice) for item in items for choice in item.choices]
    scores = scorer.scores(continuation(tokenizer, *request, context) for request in requests)
    taken = iter(tqdm(scores, total=len(requests), unit="text", desc=path.stem, disable=scorer._opened.host != 0))
    hits, normed, nats = [], [], []
    for item in items:
        answers = [next(taken) for _ in item.choices]
        totals = np.asarray([-score.losses.sum() for score in answers])
        if item.answer is None:
            hits.append(bool(answers[0].is_greedy.all()))
            nats.append(-totals[0])
        else:
            hits.append(totals.argmax() == item.answer)
            normed.append((totals / [len(choice.lstrip()) for choice in item.choices]).argmax() == item.answer)
    result = {"items": len(items), "accuracy": float(np.mean(hits))}
    if normed:
        result["accuracy_norm"] = float(np.mean(normed))
    if nats:
        result["perplexity"] = math.exp(np.mean(nats))
    return result


def _harness() -> Any:
    """The module that needs lm-eval, an extra, because it brings 40 packages."""
    try:
        from zero.runtime.inference import harness
    except ModuleNotFoundError as error:
        raise UserError(f"evaluate.harness: {error.name} is missing; pip install zero-pmap[lm-eval]") from error
    return harness


def _in_harness(scorer: Scorer, context: int) -> Any:
    """The model as lm-evaluation-harness asks for one."""
    opened = scorer._opened
    greedy = make_inference(opened.model, Sampling(temperature=0.0))

    def write(prompts: Sequence[np.ndarray], count: int) -> list[np.ndarray]:
        (*_, rows) = generate(greedy, opened.params, prompts, count, seed=0, chunk=count)
        return [row[len(prompt) :][:count] for row, prompt in zip(rows, prompts, strict=True)]

    def score(passages: Iterable[tuple[np.ndarray, int]]) -> Iterator[Score]:
        return scorer.scores(Passage(*one) for one in passages)

    return _harness().Harness(opened.tokenizer, context, score, write)


def continuation(tokenizer: Tokenizer, context: str, text: str, longest: int) -> Passage:
    """A text given what stands before it; the tokens of both together, blanks between them with the text."""
    blanks = len(context) - len(context.rstrip())
    context, text = context[: len(context) - blanks], context[len(context) - blanks :] + text
    before = len(tokenizer.encode(context)) if context else 0
    tokens = tokenizer.encode(context + text)
    if not before:  # a text of its own
        tokens, before = np.append(tokenizer.end_of_text, tokens), 1
    cut = max(0, len(tokens) - longest)
    return Passage(tokens[cut:], max(1, before - cut))


class _Item(NamedTuple):
    context: str
    choices: list[str]
    answer: int | None


def _read_items(path: Path) -> Iterator[_Item]:
    if not path.is_file():
        raise UserError(f"evaluate.tasks: {path}: no such file; expected a .jsonl")
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            fields = json.loads(line)
            if "choices" in fields:
                choices = [choice if choice[:1].isspace() else f" {choice}" for choice in fields["choices"]]
                yield _Item(fields["context"], choices, range(len(choices))[fields["answer"]])
            else:
                context, _, word = fields["text"].rstrip().rpartition(" ")
                yield _Item(context, [f" {word}"], None)
        except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
            raise UserError(
                f'{path}, line {number}: expected {{"context": ..., "choices": [...], "answer": 0}} or {{"text": ...}}'
            ) from error


# ---- texts -----------------------------------------------------------------------------------------------------------


@distributed.ending_together()
def sample(config: Config, size: GPTConfig, run_directory: Path) -> int:
    """Writes on from each prompt, into `samples.jsonl` and to the terminal: a single text as it comes."""
    asked = config.sample
    prompts = [prompt for prompt in _prompts(config) for _ in range(asked.copies)]
    opened = open_model(config, size, rows=len(prompts))
    sampling = Sampling(asked.repetition_penalty, asked.temperature, asked.top_k, asked.top_p, asked.typical_p)
    end = opened.tokenizer.end_of_text
    encoded = [np.append(end, opened.tokenizer.encode(prompt)).astype(np.int32) for prompt in prompts]
    longest = max(map(len, encoded)) + asked.tokens
    if not size.alibi_attn and longest > size.block_size:
        raise UserError(
            f"sample.tokens={asked.tokens}: prompt and text are {longest} tokens, and the model has learned "
            f"{size.block_size} positions"
        )
    screen = sys.stdout if opened.host == 0 and len(prompts) == 1 else None
    if screen:
        screen.write(prompts[0])
    started = time.monotonic()
    shown, drawn = "", 0
    programs = make_inference(opened.model, sampling)
    steps = generate(programs, opened.params, encoded, asked.tokens, seed=asked.seed, chunk=STREAMED)
    bar = tqdm(
        steps, total=-(-(longest - min(map(len, encoded))) // STREAMED), unit="chunk", disable=screen is not None
    )
    for tokens in bar:
        written = [row[len(prompt) :][: asked.tokens] for row, prompt in zip(tokens, encoded, strict=True)]
        texts = [_until_end(row, end) for row in written]
        if drawn == 0:
            started = time.monotonic()  # what came before was the compiler's
            first = sum(map(len, texts))
        drawn = sum(map(len, texts))
        if screen:
            shown = _show(screen, shown, opened.tokenizer.decode(texts[0]))
        if all(len(text) < len(row) or len(row) == asked.tokens for text, row in zip(texts, written, strict=True)):
            break
    seconds = time.monotonic() - started
    if opened.host == 0:
        decoded = [opened.tokenizer.decode(text) for text in texts]
        if screen:
            screen.write("\n")
        else:
            for number, (prompt, text) in enumerate(zip(prompts, decoded, strict=True)):
                print(f"--- {number}\n{prompt}{text}")
        lines = [json.dumps({"prompt": p, "text": t}) + "\n" for p, t in zip(prompts, decoded, strict=True)]
        (run_directory / TEXTS_FILE).write_text("".join(lines))
        speed = f"{(drawn - first) / seconds:,.0f} tokens/s" if drawn > first else "too few to time"
        log.info("%d tokens, %s; written to %s", drawn, speed, run_directory / TEXTS_FILE)
    return 0


def generate(
    programs: Inference, params: PyTree, prompts: Sequence[np.ndarray], count: int, *, seed: int, chunk: int
) -> Iterator[np.ndarray]:
    """All rows so far, int32 `(prompts, positions)`, every `chunk` tokens until each has `count` after its prompt.

    What is drawn depends on the seed, the row and the position, not on devices. Prompts hold at least one token.
    """
    local = len(jax.tree.leaves(params)[0])
    devices = local * jax.process_count()
    shortest, longest = min(map(len, prompts)), max(map(len, prompts))
    chunks = -(-(longest + count - shortest) // chunk)
    rows = -(-len(prompts) // devices)
    tokens = np.full((devices * rows, shortest + chunks * chunk), -1, np.int32)
    tokens[:, :shortest] = 0
    for row, prompt in zip(tokens, prompts, strict=False):
        row[: len(prompt)] = prompt
    keys = jax.random.key_data(jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(seed), np.arange(len(tokens))))

    def mine(x: Any) -> np.ndarray:
        x = np.asarray(x)
        return x.reshape(devices, rows, -1)[jax.process_index() * local :][:local]

    draft = programs.prefill(params, mine(tokens), shortest)
    for done in range(1, chunks + 1):
        draft, every = programs.extend(params, draft, mine(keys), chunk)
        yield np.asarray(every)[: len(prompts), : shortest + done * chunk]


def _until_end(tokens: np.ndarray, end_of_text: int) -> np.ndarray:
    ends = np.flatnonzero(tokens == end_of_text)
    return tokens[: ends[0]] if len(ends) else tokens


def _show(screen: TextIO, shown: str, text: str) -> str:
    """Writes what is new; a last character that is not whole yet waits."""
    whole = text.rstrip("\ufffd")
    screen.write(whole[len(shown) :])
    screen.flush()
    return whole if len(whole) > len(shown) else shown


def _prompts(config: Config) -> list[str]:
    given = config.sample.prompt
    if given is not None:
        return [given] if isinstance(given, str) else [str(prompt) for prompt in given]
    if config.sample.prompt_file is None:
        return [""]
    if config.sample.prompt_file == "-":
        lines = sys.stdin.read().splitlines()
    else:
        path = Path(config.sample.prompt_file)
        if not path.is_file():
            raise UserError(
                f"sample.prompt_file={path}: no such file; expected one prompt a line, or - for standard input"
            )
        lines = path.read_text(encoding="utf-8").splitlines()
    if not lines:
        raise UserError(f"sample.prompt_file={config.sample.prompt_file}: no prompt in it; expected one a line")
    return lines
