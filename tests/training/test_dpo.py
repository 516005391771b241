"""Direct preference optimization on shards: losses and metrics of TRL's formulas on logits, at any stage and N."""

from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zero
from tests.training.small_gpt import CLIP, MAX_NORM, RATE, first_params
from zero.models.adapters import Adapters
from zero.models.config import GPTConfig
from zero.models.families import FAMILIES
from zero.models.gpt import GPT
from zero.training.batch import Batch
from zero.training.objectives.dpo import METRICS, Dpo
from zero.training.optimizers.optimizer import adamw
from zero.training.parts import StepOptions
from zero.training.programs import Programs, make_programs
from zero.training.row_places import split_rows
from zero.training.sharded_gpt import ShardedGPT
from zero.training.tuning import Tuning

STEPS, PAIRS, CONTEXT, BETA = 6, 24, 12, 0.5
NAMES = [metric.name for metric in METRICS]
LLAMA: dict[str, Any] = {**FAMILIES["llama"], "kv_heads": 2, "mlp_dim": 48}
SIZE = GPTConfig(embedding_dim=32, vocab_size=101, num_head=4, block_size=CONTEXT, dropout=0.0, N=2, **LLAMA)
OBJECTIVE = Dpo(beta=BETA).make()
ADAPTERS = Adapters(rank=3, alpha=6.0)
REFERENCE_SEED = 3
NOT_READ = [1, 2]
READ = np.setdiff1d(np.arange(PAIRS), NOT_READ)


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
    """`(rows,)`: of the completions, as TRL's DPOTrainer computes them from logits, labels and their mask."""
    ids = jnp.maximum(rows, ~rows)
    hidden, _ = GPT(SIZE).apply({"params": params}, ids, None, method="hidden")
    table = params["head"]["table"].reshape(-1, SIZE.embedding_dim)[: SIZE.vocab_size]
    logits, labels, mask = (hidden @ table.T)[:, :-1], ids[:, 1:], rows[:, 1:] >= 0
    per_token = jnp.take_along_axis(jax.nn.log_softmax(logits), labels[..., None], axis=2)[..., 0]
    return (per_token * mask).sum(1)


def trl(params: Any, reference: jax.Array, rows: np.ndarray) -> tuple[jax.Array, dict[str, jax.Array]]:
    """The loss and metrics of DPOTrainer (loss_type="sigmoid") for the pairs that were read."""
    logps = log_probabilities(params, rows)
    (chosen, rejected), (ref_chosen, ref_rejected) = (x.reshape(PAIRS, 2)[READ].T for x in (logps, reference))
    logits = (chosen - rejected) - (ref_chosen - ref_rejected)
    chosen_rewards, rejected_rewards = BETA * (chosen - ref_chosen), BETA * (rejected - ref_rejected)
    values = (
        *(chosen_rewards, rejected_rewards, (chosen_rewards > rejected_rewards).astype(float)),
        *(chosen_rewards - rejected_rewards, chosen, rejected),
    )
    metrics = {name: value.mean() for name, value in zip(NAMES, values, strict=True)}
    return -jax.nn.log_sigmoid(BETA * logits).mean(), metrics


@cache
def other_params() -> Any:
    """The reference model, which is not the first policy: else rewards would begin at zero."""
    init = jax.jit(partial(GPT(SIZE).init, method="hidden"))
    variables: Any = init(jax.random.key(REFERENCE_SEED), jnp.zeros((1, 2), int), None)
    return variables["params"]


@cache
def references(step: int) -> np.ndarray:
    return np.asarray(jax.jit(log_probabilities)(other_params(), pairs(step)))


@cache
def plain() -> list[dict[str, float]]:
    """Loss and metrics of each step of a loop on one device that uses nothing of zero but the model."""
    tx = optax.chain(CLIP, optax.adamw(RATE, b2=0.95, weight_decay=0.1, mask=_is_matrix))

    @jax.jit
    def step(params: Any, state: Any, reference: jax.Array, rows: jax.Array) -> Any:
        (loss, metrics), grads = jax.value_and_grad(trl, has_aux=True)(params, reference, rows)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, {"loss": loss, **metrics}

    params = first_params(SIZE)
    state, found = tx.init(params), []
    for number in range(STEPS):
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

    def rows(self, x: np.ndarray) -> np.ndarray:
        return split_rows(x, self.model.axis)

    def place(self, params: Any, model: ShardedGPT) -> Any:
        whole = model.layout.map(lambda leaf, x: np.asarray(x, leaf.dtype), params)
        return zero.to_devices(whole, model.layout, model.axis, self.devices)

    def steps(self, state: Any, references: Any, frozen: Any = None, count: int = STEPS) -> list[dict[str, float]]:
        found = []
        for step in range(count):
            rows = self.rows(pairs(step % 2))
            first = np.asarray(self.model.axis.row_group_of_device(), np.int32) * rows.shape[1]
            state, metrics = self.programs.step(state, Batch(rows, first, {"reference": references(step % 2)}), frozen)
            found.append({name: x.item() for name, x in metrics.items()})
        return found


@cache
def on(devices: int, stage: int, axis: zero.Axis | None = None, tuning: Tuning | None = None, **options: Any) -> On:
    axis = axis or zero.Axis("zero", (1, devices))
    remat = options.pop("remat", "none")
    model = ShardedGPT(SIZE, axis, stage, jnp.float32, tuning=tuning, remat=remat)
    used, chosen = tuple(jax.devices()[:devices]), StepOptions(RATE, objective=OBJECTIVE, **options)
    return On(model, make_programs(model, adamw(0.1), chosen, used), used)


TENSOR, CONTEXTS = zero.Axis.with_tensor_groups("zero", 8, 2, 1), zero.Axis("zero", (2, 4), context=2)


@pytest.mark.parametrize(
    ("devices", "stage", "options"),
    [
        pytest.param(1, 3, {}, marks=pytest.mark.slow),
        pytest.param(3, 1, {"micro_batches": 4}, marks=pytest.mark.wide),
        pytest.param(8, 0, {}, marks=pytest.mark.slow),
        pytest.param(8, 2, {"micro_batches": 3}, marks=pytest.mark.slow),
        pytest.param(8, 3, {}, marks=pytest.mark.slow),
        (8, 3, {"axis": TENSOR, "micro_batches": 2}),
        pytest.param(8, 3, {"axis": CONTEXTS}, marks=pytest.mark.slow),
    ],
)
def test_steps_equal_trl(devices: int, stage: int, options: dict[str, Any]) -> None:
    """Losses and metrics of some steps are those of TRL's formulas on logits, in a loop on one device."""
    one = on(devices, stage, max_gradient_norm=MAX_NORM, **options)
    state = one.programs.start(one.place(first_params(SIZE), one.model))
    got = one.steps(state, lambda step: one.rows(references(step)))
    for name in ("loss", *NAMES):
        for step, (found, expected) in enumerate(zip(got, plain(), strict=True)):
            assert found[name] == pytest.approx(expected[name], rel=1e-5 if step == 0 else 1e-4, abs=1e-5), name
    assert got[-1]["loss"] < got[0]["loss"] - 0.1


@pytest.mark.parametrize(
    ("devices", "stage", "options"),
    [pytest.param(3, 1, {"micro_batches": 4}, marks=pytest.mark.wide), (8, 3, {"axis": TENSOR, "micro_batches": 2})],
)
def test_reference_and_evaluation_equal_trl(devices: int, stage: int, options: dict[str, Any]) -> None:
    """Log-probabilities of a reference are those of its logits; an evaluation sums what a step takes the means of."""
    one = on(devices, stage, max_gradient_norm=MAX_NORM, **options)
    rows, group = one.rows(pairs(0)), one.model.axis.row_group
    got = one.programs.reference(one.place(other_params(), one.model), rows)
    np.testing.assert_allclose(np.asarray(got)[::group].ravel(), references(0), rtol=1e-5, atol=1e-5)
    total, count, sums = one.programs.evaluate(one.place(first_params(SIZE), one.model), rows, {"reference": got})
    assert count.item() == len(READ)
    means = {"loss": total.item() / count.item(), **{name: x.item() / count.item() for name, x in sums.items()}}
    assert means == pytest.approx(plain()[0], rel=1e-5, abs=1e-5)


def test_adapters_have_their_base_as_reference() -> None:
    """New adapters equal the reference that is their base without them, and learn the preference from there."""
    one = on(8, 3, tuning=Tuning(ADAPTERS))
    frozen = one.place(other_params(), one.model.base)
    found = {step: one.programs.reference(frozen, one.rows(pairs(step))) for step in (0, 1)}
    np.testing.assert_allclose(np.asarray(found[0]).ravel(), references(0), rtol=1e-5, atol=1e-5)
    key = np.asarray(jax.random.key_data(jax.random.key(0)))
    state = one.programs.start(one.programs.init(np.stack([key] * 8)))
    got = one.steps(state, found.__getitem__, frozen, count=20)
    assert got[0]["loss"] == pytest.approx(np.log(2), rel=1e-5)
    assert got[0]["rewards/chosen"] == pytest.approx(0, abs=1e-5)
    assert got[-1]["loss"] < 0.6 and got[-1]["rewards/accuracies"] > 0.8
    assert got[-1]["rewards/margins"] == pytest.approx(
        got[-1]["rewards/chosen"] - got[-1]["rewards/rejected"], rel=1e-4
    )


@pytest.mark.slow
def test_fused_update_learns_pairs() -> None:
    """An update inside the backward pass has the same loss and metrics, and then a lower loss."""
    one = on(8, 3, fused_update=True, remat="full")
    state = one.programs.start(one.place(first_params(SIZE), one.model))
    got = one.steps(state, lambda step: one.rows(references(step)), count=3)
    assert {name: got[0][name] for name in ("loss", *NAMES)} == pytest.approx(plain()[0], rel=1e-5, abs=1e-5)
    assert got[2]["loss"] < got[0]["loss"] - 0.03


def test_unknown_token_is_no_number() -> None:
    """A token past the vocabulary makes the loss NaN, so that its update is skipped."""
    one = on(8, 3, max_gradient_norm=MAX_NORM, axis=TENSOR, micro_batches=2)
    rows = pairs(0)
    rows[0, 0] = SIZE.vocab_size
    total, count, _ = one.programs.evaluate(
        one.place(first_params(SIZE), one.model), one.rows(rows), {"reference": one.rows(references(0))}
    )
    assert np.isnan(total.item()) and count.item() == len(READ)
