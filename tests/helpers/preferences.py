"""Objectives on pairs of texts, sharded and in a loop on one device that uses nothing of zero but the model.

- `pairs`: rows of some steps. `log_probabilities`, `lengths`: of their answers. `references`: by another model.
- `plain`: losses, gradient norms and metrics of steps by a formula. `check_steps`: those of zero are the same.
- `scores_of_texts`: those of a head of scores.
- `DEVICES`: the numbers of devices and the stages on which both are compared.
"""

from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zero
from tests.training.small_gpt import CLIP, MAX_NORM, RATE, first_params
from zero.models.config import GPTConfig
from zero.models.families import FAMILIES
from zero.models.gpt import GPT
from zero.training.batch import Batch
from zero.training.host_rows import split_rows
from zero.training.objectives.objective import Objective
from zero.training.optimizers.optimizer import adamw
from zero.training.parts import StepOptions
from zero.training.programs import Programs, make_programs
from zero.training.sharded_gpt import ShardedGPT
from zero.training.tuning import Tuning

PAIRS, CONTEXT = 24, 12
LLAMA: dict[str, Any] = {**FAMILIES["llama"], "kv_heads": 2, "mlp_dim": 48}
SIZE = GPTConfig(embedding_dim=32, vocab_size=101, num_head=4, block_size=CONTEXT, dropout=0.0, N=2, **LLAMA)
REFERENCE_SEED = 3
NOT_READ = [1, 2]
READ = np.setdiff1d(np.arange(PAIRS), NOT_READ)
LABELS = (np.random.default_rng(9).random(PAIRS) < 0.5).astype(np.int32)  # of objectives that read one of each pair
TENSOR, CONTEXTS = zero.Axis.with_tensor_groups("zero", 8, 2, 1), zero.Axis("zero", (2, 4), context=2)
_WIDE = pytest.mark.wide
DEVICES = [
    pytest.param(1, 0, {}, marks=_WIDE),
    pytest.param(1, 3, {}, marks=_WIDE),
    pytest.param(3, 0, {"micro_batches": 4}, marks=_WIDE),
    pytest.param(3, 3, {}, marks=_WIDE),
    pytest.param(8, 0, {}, marks=_WIDE),
    (8, 3, {"axis": TENSOR, "micro_batches": 2}),
    pytest.param(8, 3, {"axis": CONTEXTS}, marks=_WIDE),
]


def pairs(step: int) -> np.ndarray:
    """Rows `(2 PAIRS, CONTEXT)`, chosen and rejected in turn: one prompt, then the answer 7 or the answer 8.

    Lengths differ, and some of the pairs of the first devices were not read, so that a mean of means would be wrong.
    """
    rng = np.random.default_rng(step)
    rows = np.full((PAIRS, 2, CONTEXT), -1, np.int32)
    for pair in rows:
        prompt = rng.integers(10, SIZE.vocab_size, rng.integers(2, 6))
        for text, answer in zip(pair, (7, 8), strict=True):
            length = rng.integers(1, 6)
            text[: len(prompt)] = ~prompt
            text[len(prompt) : len(prompt) + length] = rng.integers(10, SIZE.vocab_size, length)
            text[len(prompt)] = answer
    rows[NOT_READ] = -1
    return rows.reshape(-1, CONTEXT)


def log_probabilities(params: Any, rows: np.ndarray) -> jax.Array:
    """`(rows,)`: of the completions, as TRL's trainers compute them from logits, labels and their mask."""
    ids = jnp.maximum(rows, ~rows)
    hidden, _ = GPT(SIZE).apply({"params": params}, ids, None, method="hidden")
    table = params["head"]["table"].reshape(-1, SIZE.embedding_dim)[: SIZE.vocab_size]
    logits, labels, mask = (hidden @ table.T)[:, :-1], ids[:, 1:], rows[:, 1:] >= 0
    per_token = jnp.take_along_axis(jax.nn.log_softmax(logits), labels[..., None], axis=2)[..., 0]
    return (per_token * mask).sum(1)


def scores_of_texts(size: GPTConfig, params: Any, rows: np.ndarray) -> jax.Array:
    """`(rows, outputs)`: of the last token of each text by a head of scores, as transformers pools them."""
    hidden, _ = GPT(size).apply({"params": params}, jnp.maximum(rows, ~rows), None, method="hidden")
    last = rows.shape[1] - 1 - jnp.argmax(rows[:, ::-1] != -1, axis=1)
    return (hidden @ params["score_head"]["kernel"])[jnp.arange(len(rows)), last]


def of_pairs(x: Any) -> tuple[Any, Any]:
    """Values of rows as those of the chosen and of the rejected texts of the pairs that were read."""
    chosen, rejected = jnp.asarray(x).reshape(PAIRS, 2)[READ].T
    return chosen, rejected


def lengths(rows: np.ndarray) -> jax.Array:
    """`(rows,)`: the tokens of the completions."""
    return (jnp.asarray(rows)[:, 1:] >= 0).sum(1)


@cache
def other_params() -> Any:
    """The reference model, which is not the first policy: else rewards would begin at zero."""
    init = jax.jit(partial(GPT(SIZE).init, method="hidden"))
    variables: Any = init(jax.random.key(REFERENCE_SEED), jnp.zeros((1, 2), int), None)
    return variables["params"]


@cache
def references(step: int) -> np.ndarray:
    return np.asarray(jax.jit(log_probabilities)(other_params(), pairs(step)))


Formula = Callable[[Any, jax.Array, np.ndarray], tuple[jax.Array, dict[str, jax.Array]]]


@cache
def plain(formula: Formula, steps: int, size: GPTConfig = SIZE) -> list[dict[str, float]]:
    """Loss, gradient norm and metrics of each step; `formula` takes parameters, the values of a reference, and rows."""
    tx = optax.chain(CLIP, optax.adamw(RATE, b2=0.95, weight_decay=0.1, mask=_is_matrix))

    @jax.jit
    def step(params: Any, state: Any, reference: jax.Array, rows: jax.Array) -> Any:
        (loss, metrics), grads = jax.value_and_grad(formula, has_aux=True)(params, reference, rows)
        updates, state = tx.update(grads, state, params)
        metrics = {"loss": loss, "gradient_norm": optax.tree.norm(grads), **metrics}
        return optax.apply_updates(params, updates), state, metrics

    params = first_params(size)
    state, found = tx.init(params), []
    for number in range(steps):
        params, state, metrics = step(params, state, references(number % 2), pairs(number % 2))
        found.append({name: x.item() for name, x in metrics.items()})
    return found


def _is_matrix(params: Any) -> Any:
    return jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key not in ("bias", "scale"), params)


class On(NamedTuple):
    """The programs of a model on some devices."""

    model: ShardedGPT
    programs: Programs
    devices: tuple[jax.Device, ...]
    objective: Objective
    more: Callable[[int], dict[str, np.ndarray]] = lambda step: {}  # other entries of the rows of a step

    def rows(self, x: np.ndarray) -> np.ndarray:
        return split_rows(x, self.model.axis)

    def place(self, params: Any, model: ShardedGPT) -> Any:
        whole = model.layout.map(lambda leaf, x: np.asarray(x, leaf.dtype), params)
        return zero.to_devices(whole, model.layout, model.axis, self.devices)

    def start(self) -> Any:
        """The state of a new run."""
        return self.programs.start(self.place(first_params(self.model.config), self.model))

    def extra(self, step: int, references: Any) -> dict[str, Any]:
        extra = {"reference": references(step % 2)} if self.objective.has_reference else {}
        extra |= {name: self.rows(LABELS) for name in self.objective.example.members}
        return extra | {name: self.rows(x) for name, x in self.more(step % 2).items()}

    def steps(self, state: Any, references: Any, frozen: Any = None, count: int = 6) -> list[dict[str, float]]:
        found = []
        for step in range(count):
            rows = self.rows(pairs(step % 2))
            first = np.asarray(self.model.axis.row_group_of_device(), np.int32) * rows.shape[1]
            state, metrics = self.programs.step(state, Batch(rows, first, self.extra(step, references)), frozen)
            found.append({name: x.item() for name, x in metrics.items()})
        return found


def programs_on(
    objective: Objective,
    devices: int,
    stage: int,
    axis: zero.Axis | None = None,
    tuning: Tuning | None = None,
    size: GPTConfig = SIZE,
    **options: Any,
) -> On:
    """The programs of an objective."""
    axis = axis or zero.Axis("zero", (1, devices))
    remat = options.pop("remat", "none")
    model = ShardedGPT(size, axis, stage, jnp.float32, tuning=tuning, remat=remat)
    used, chosen = tuple(jax.devices()[:devices]), StepOptions(RATE, objective=objective, **options)
    return On(model, make_programs(model, adamw(0.1, axes=model.axes), chosen, used), used, objective)


def check_steps(
    objective: Objective,
    formula: Formula,
    devices: int,
    stage: int,
    options: dict[str, Any],
    more: Callable[[int], dict[str, np.ndarray]] = lambda step: {},
) -> None:
    """Losses, gradient norms and metrics of ten steps of zero are those of a formula on logits on one device."""
    expected_steps = plain(formula, 10, options.get("size", SIZE))
    one = programs_on(objective, devices, stage, max_gradient_norm=MAX_NORM, **options)._replace(more=more)
    got = one.steps(one.start(), lambda step: one.rows(references(step)), count=10)
    for step, (found, expected) in enumerate(zip(got, expected_steps, strict=True)):
        for name in ("loss", "gradient_norm", *(metric.name for metric in objective.metrics_of_steps)):
            rel, absolute = (1e-5, 1e-5) if step == 0 else (3e-4, 1e-4)
            assert found[name] == pytest.approx(expected[name], rel=rel, abs=absolute), (name, step)
    assert got[-1]["loss"] < got[0]["loss"]
