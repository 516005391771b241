"""Training steps on the parts of each row, one after the other, with the memory of gated units carried on."""

import dataclasses
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zero
from tests.training.small_gpt import CLIP, RATE, ROWS, SEED, VQ, batch, first_collections, first_params, named, setup
from zero.models.codebook import update_codebook, with_commitment
from zero.models.config import GPTConfig
from zero.models.gpt import GPT, empty_memory
from zero.training.parts import TrainState

PARTS = 2
DROPPING = dataclasses.replace(VQ, distance_dropout=0.2, layer_dropout=0.3, embedding_dropout=0.1)
LOCAL = dataclasses.replace(VQ, codes=0)
STILL = optax.set_to_zero()


def rows(step: int, length: int = 12) -> np.ndarray:
    """Some of them padded."""
    tokens = np.random.default_rng(step).integers(0, VQ.vocab_size, (ROWS, length), np.int32)
    tokens[np.arange(length) >= np.linspace(4, 2 * length, ROWS).astype(int)[:, None]] = -1
    return tokens


def losses_of_part(model: GPT, variables: Any, tokens: Any, number: Any, keys: Any, memory: Any) -> Any:
    inputs = jnp.where(tokens[:, :-1] < 0, ~tokens[:, :-1], tokens[:, :-1])
    position = number * inputs.shape[1]
    return model.apply(variables, inputs, tokens[:, 1:], keys, memory, position, method="scores_in_part")


@cache
def on_one_device(config: GPTConfig) -> tuple[list[float], dict[str, np.ndarray]]:
    """Losses and parameters after one row, in plain jax: `PARTS` updates, a memory between them that is a constant."""
    model = GPT(config)
    params = first_params(config)
    book = first_collections(config).get("codebook")
    no_decay = {"bias", "scale", "key_bias", "distance_bias"}
    mask = jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key not in no_decay, params)
    tx = optax.chain(CLIP, optax.adamw(RATE, b2=0.95, weight_decay=0.1, mask=mask))
    state = jax.jit(tx.init)(params)
    tokens = np.pad(rows(0), ((0, 0), (0, 1)), constant_values=-1)
    length = rows(0).shape[1] // PARTS
    memory = empty_memory(config, ROWS, jnp.float32)
    keys = jax.vmap(partial(jax.random.fold_in, jax.random.fold_in(jax.random.key(SEED), 0)))(jnp.arange(ROWS))

    @partial(jax.value_and_grad, argnums=(0, 1), has_aux=True)
    def loss(params: Any, book: Any, memory: Any, part: jax.Array, number: jax.Array) -> Any:
        variables = {"params": params}
        if book is not None:
            variables["codebook"] = with_commitment(config, book, ROWS * length)
        scores, memory = losses_of_part(model, variables, part, number, keys, memory)
        is_scored = part[:, 1:] >= 0
        return jnp.sum(scores.losses_BT * is_scored) / jnp.sum(is_scored), memory

    @jax.jit
    def step(params: Any, book: Any, state: Any, memory: Any, part: jax.Array, number: jax.Array) -> Any:
        (value, memory), (grads, found) = loss(params, book, memory, part, number)
        if book is not None:
            book = update_codebook(config, book, found, jax.random.fold_in(jax.random.key(SEED), number))
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), book, state, memory, value

    losses = []
    for number in range(PARTS):
        part = tokens[:, number * length : (number + 1) * length + 1]
        params, book, state, memory, value = step(params, book, state, memory, part, jnp.int32(number))
        losses.append(float(value))
    return losses, named(params)


TENSOR = zero.Axis.with_tensor_groups("zero", 4, 2)
SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("config", "stage", "options"),
    [
        pytest.param(DROPPING, 3, {"micro_batches": 2}, marks=pytest.mark.wide),
        pytest.param(VQ, 0, {}, marks=SLOW),
        pytest.param(VQ, 2, {"remat": "none"}, marks=SLOW),
        pytest.param(LOCAL, 3, {}, marks=SLOW),
        pytest.param(DROPPING, 3, {"axis": TENSOR}, marks=SLOW),
    ],
    ids=["dropouts-and-micro-batches", "stage-0", "stage-2", "local", "tensor-groups"],
)
def test_equals_one_device(config: GPTConfig, stage: int, options: dict[str, Any]) -> None:
    on = setup(4 if "axis" in options else 2, stage, config=config, parts=PARTS, **options)
    state, metrics = on.programs.step(on.start(), batch(on, 0, rows))
    losses, params = on_one_device(config)
    np.testing.assert_allclose(np.asarray(metrics["loss"]), losses, rtol=1e-6)
    assert metrics["learning_rate"].tolist() == [RATE(0).item(), RATE(1).item()]
    assert isinstance(state, TrainState) and np.asarray(state.clock).ravel().tolist() == [PARTS] * len(on.devices)
    whole = on.whole(state, on.layout)
    start = named(first_params(config))
    for name, x in params.items():
        moved = np.linalg.norm(x - start[name])
        assert np.linalg.norm(whole[f"params/{name}"] - x) < 1e-3 * moved, name


def test_parts_continue_a_row() -> None:
    """Where updates change nothing, each part has the loss of its positions in the whole row."""
    config = dataclasses.replace(LOCAL, dropout=0.0)
    on = setup(2, 3, 2, config=config, parts=PARTS, tx=STILL)
    _, metrics = on.programs.step(on.start(), batch(on, 0, rows))
    tokens = np.pad(rows(0), ((0, 0), (0, 1)), constant_values=-1)
    inputs, targets = np.maximum(tokens[:, :-1], ~tokens[:, :-1]), tokens[:, 1:]
    apply: Any = jax.jit(GPT(config).apply)
    losses = np.asarray(apply({"params": first_params(config)}, inputs, targets))
    parts = zip(np.split(losses, PARTS, 1), np.split(targets >= 0, PARTS, 1), strict=True)
    expected = [part[is_scored].mean() for part, is_scored in parts]
    np.testing.assert_allclose(np.asarray(metrics["loss"]), expected, rtol=1e-5)


@pytest.mark.wide  # tests/models/test_gated_unit.py has the memory
def test_parts_of_a_row_are_the_row() -> None:
    """The losses of all parts, with the same weights, are those of the whole row."""
    config = dataclasses.replace(VQ, dropout=0.0)
    model = GPT(config)
    variables = {"params": first_params(config), **first_collections(config)}
    tokens = np.abs(rows(0, 13))
    whole: Any = jax.jit(model.apply)(variables, tokens[:, :-1], tokens[:, 1:])
    memory = empty_memory(config, ROWS, jnp.float32)
    compiled = jax.jit(partial(losses_of_part, model, keys=None))
    for number in range(PARTS):
        part = tokens[:, 6 * number : 6 * number + 7]
        scores, memory = compiled(variables, part, jnp.int32(number), memory=memory)
        np.testing.assert_allclose(scores.losses_BT, whole[:, 6 * number : 6 * number + 6], atol=1e-5)


def test_whole_rows_are_needed() -> None:
    choices: list[dict[str, Any]] = [{"config": dataclasses.replace(LOCAL, dropout=0.0), "fused_update": True}, {}]
    for options in choices:
        with pytest.raises(ValueError, match="parts of rows need a model with memory, without fused_update"):
            setup(1, 3, parts=PARTS, **options)
