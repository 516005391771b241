"""Distillation on shards: the numbers of its formula on logits, and no array of all logits."""

import math
import re
from dataclasses import replace
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zero
from tests.helpers.preferences import DEVICES, SIZE, TENSOR, Formula, check_steps, pairs, programs_on
from zero.inference.outputs.top_tokens import top_tokens_program
from zero.models.gpt import GPT
from zero.training.batch import Batch
from zero.training.host_rows import split_rows
from zero.training.objectives.distillation import Distillation
from zero.training.sharded_gpt import ShardedGPT

CHUNKED = replace(SIZE, vocab_chunks=4)
COUNT = 5


@cache
def teacher_params() -> Any:
    init = jax.jit(partial(GPT(CHUNKED).init, method="hidden"))
    variables: Any = init(jax.random.key(3), jnp.zeros((1, 2), int), None)
    return jax.tree.map(lambda x: 3 * np.asarray(x), variables["params"])  # so that it is sure of some tokens


def log_softmax(params: Any, rows: Any) -> jax.Array:
    """Of all tokens after each position, `(rows, positions, vocabulary)`."""
    hidden, _ = GPT(CHUNKED).apply({"params": params}, jnp.maximum(rows, ~rows), None, method="hidden")
    table = params["head"]["table"].reshape(-1, CHUNKED.embedding_dim)[: CHUNKED.vocab_size]
    return jax.nn.log_softmax(hidden @ table.T)


@cache
def stored(step: int, count: int = COUNT) -> dict[str, np.ndarray]:
    values = np.asarray(jax.jit(log_softmax)(teacher_params(), pairs(step)))
    tokens = np.argsort(-values, axis=-1)[..., :count].astype(np.int32)
    return {
        "teacher/tokens": tokens,
        "teacher/log_probabilities": np.take_along_axis(values, tokens, axis=-1),
    }


@cache
def formula_of(weight: float, count: int = COUNT) -> Formula:
    """The divergence over tokens and the rest, from whole distributions."""
    of_teacher = teacher_params()

    def formula(params: Any, _: jax.Array, rows: np.ndarray) -> tuple[jax.Array, dict[str, jax.Array]]:
        teacher = jnp.exp(log_softmax(of_teacher, rows))
        model = jnp.exp(log_softmax(params, rows))
        is_top = teacher >= jnp.sort(teacher, axis=-1)[..., -count][..., None]
        of_top = jnp.where(is_top, teacher * jnp.log(teacher / model), 0).sum(-1)
        rest, model_rest = (jnp.where(is_top, 0, x).sum(-1) for x in (teacher, model))
        divergence = of_top + rest * jnp.log(rest / model_rest)
        is_scored = rows[:, 1:] >= 0
        targets = jnp.maximum(rows, ~rows)[:, 1:]
        nats = -jnp.log(jnp.take_along_axis(model[:, :-1], targets[..., None], axis=2)[..., 0])
        divergence, nats = (jnp.where(is_scored, x, 0).sum() / is_scored.sum() for x in (divergence[:, :-1], nats))
        metrics = {"divergence": divergence, "likelihood_loss": nats}
        return weight * divergence + (1 - weight) * nats, metrics

    return formula


@pytest.mark.parametrize(("devices", "stage", "options"), DEVICES)
def test_steps_equal_the_formula(devices: int, stage: int, options: dict[str, Any]) -> None:
    objective = Distillation(top_tokens=COUNT, weight=0.75).objective()
    check_steps(objective, formula_of(0.75), devices, stage, {**options, "size": CHUNKED}, stored)


@pytest.mark.wide
def test_all_tokens_are_the_whole_divergence() -> None:
    """With K of the size of the vocabulary no other token is left, and the loss is the divergence of both models."""
    objective = Distillation(top_tokens=CHUNKED.vocab_size).objective()
    one = programs_on(objective, 1, 0, size=CHUNKED)._replace(more=partial(stored, count=CHUNKED.vocab_size))
    (step,) = one.steps(one.start(), lambda step: None, count=1)
    rows = pairs(0)
    teacher, model = (log_softmax(params, rows) for params in (teacher_params(), whole_start(one)))
    is_scored = np.pad(rows[:, 1:] >= 0, ((0, 0), (0, 1)))
    divergence = jnp.where(is_scored, (jnp.exp(teacher) * (teacher - model)).sum(-1), 0).sum() / is_scored.sum()
    assert step["loss"] == pytest.approx(divergence.item(), rel=1e-5)


def whole_start(one: Any) -> Any:
    return zero.to_host(one.start().params, one.model.layout, one.model.axis)


def test_no_array_of_all_logits() -> None:
    """The largest array of the compiled step is the table of tokens, or a chunk's logits, and not all logits."""
    size = replace(CHUNKED, vocab_size=4096, vocab_chunks=16)
    rows = 2 * 48
    one = programs_on(Distillation(top_tokens=COUNT).objective(), 1, 0, size=size)
    tokens = one.rows(np.zeros((rows, SIZE.block_size), np.int32))
    extra = {
        name: one.rows(np.zeros(struct.shape, struct.dtype))
        for name, struct in one.objective.extra(rows, SIZE.block_size).items()
    }
    program = one.programs.step.lower(one.start(), Batch(tokens, np.zeros(1, np.int32), extra), None)
    text = program.compile().as_text()
    sizes = [math.prod(map(int, dims.split(","))) for dims in re.findall(r"[fsu]\d+\[([\d,]+)\]", text)]
    logits = tokens.size * size.vocab_size
    assert logits / 16 <= max(sizes) < logits / 4


def test_stored_tokens_are_those_of_all_logits() -> None:
    """What `evaluate.top_tokens` writes, where a group of devices shares the vocabulary and each has chunks of it."""
    model = ShardedGPT(CHUNKED, TENSOR, 3)
    whole = model.layout.map(lambda leaf, x: np.asarray(x, leaf.dtype), teacher_params())
    params = zero.to_devices(whole, model.layout, model.axis, jax.devices())
    rows = np.where(pairs(0) == -1, ~1, pairs(0))
    found = top_tokens_program(model, COUNT)(params, split_rows(rows, model.axis))
    values = np.asarray(jax.jit(log_softmax)(teacher_params(), rows))
    expected = np.argsort(-values, axis=-1)[..., :COUNT]
    np.testing.assert_array_equal(found[0], expected)
    np.testing.assert_allclose(found[1], np.take_along_axis(values, expected, axis=-1), atol=1e-4)
