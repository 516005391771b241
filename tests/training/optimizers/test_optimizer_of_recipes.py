"""Ten steps of the optimizer of each family of recipes, beside its source's formulas in numpy."""

import math
import re
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from benchmarks.recipe_sources import REPOSITORY
from tests.helpers.toy_axes import toy_axes
from zero.commands.cli import compose
from zero.models.parametrization import multipliers_of
from zero.training.optimizers.optimizer import clip_values, make_optimizer, scaled
from zero.training.schedules import learning_rate

FEATURES = REPOSITORY / "benchmarks" / "measured" / "features-of-other-code.md"


class Adam(NamedTuple):
    """What the optimizer of a source does in one step, beside Adam's means: how it clips, corrects and decays."""

    clip: Callable[[dict[str, np.ndarray]], dict[str, np.ndarray]]
    b2: float
    eps: float
    is_corrected: bool
    decay: Callable[[str, float], float]  # from a leaf and the learning rate to the share of the weight that goes
    rate: Callable[[int], float]  # from the number of the update, counted from 1
    factor: Callable[[str], float] = lambda leaf: 1.0  # of a leaf's rate


def by_norm(most: float) -> Callable[[dict[str, np.ndarray]], dict[str, np.ndarray]]:
    def clipped(grads: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        norm = math.sqrt(sum(float((g**2).sum()) for g in grads.values()))
        return {name: g * min(1, most / norm) for name, g in grads.items()}

    return clipped


def cosine(done: float, end: float) -> float:
    return end + (1 - end) * (1 + math.cos(math.pi * min(done, 1))) / 2


def linear(step: int, warmup: int, last: int) -> float:
    """A ramp, and a line to a ten thousandth of the peak."""
    if step < warmup:
        return step / warmup
    return 1 - (1 - 1e-4) * min((step - warmup) / (last - warmup), 1)


MATRICES = ("kernel", "vocabulary", "head")
OPTIMIZERS = {
    "gpt-neo-125m": Adam(
        by_norm(1.0), 0.95, 1e-8, False,
        lambda leaf, rate: 0.0 if leaf == "bias" else 0.1 * rate,
        lambda step: 6e-4 * cosine(step / 572_300, 0.1) * min(step / 3_000, 1),
    ),
    "gpt-neo-1_3b": Adam(
        by_norm(1.0), 0.95, 1e-8, False,
        lambda leaf, rate: 0.0,
        lambda step: 2e-4 * cosine(step / 300_000, 0.1) * min(step / 3_000, 1),
    ),
    "zero-transformer-580m": Adam(
        lambda grads: {name: np.clip(g, -1, 1) for name, g in grads.items()}, 0.95, 1e-8, True,
        lambda leaf, rate: 0.1 * rate if leaf in MATRICES else 0.0,
        lambda step: 2.5e-4 * (step / 2_000 if step < 2_000 else cosine((step - 2_000) / 88_000, 0.1)),
    ),
    "transformer-vq-enwik8": Adam(
        by_norm(0.1), 0.98, 1e-9, True,
        lambda leaf, rate: 2e-4 if leaf in MATRICES else 0.0,
        lambda step: 4e-4 * (step / 10_000 if step < 10_000 else cosine((step - 10_000) / 115_000, 0.1)),
    ),
    # Widths of 512 and 2,048, of which learning rates are those of 128; biases and the embedding have them undivided.
    "mu-transformer-medium": Adam(
        by_norm(1.0), 0.98, 1e-9, True,
        lambda leaf, rate: 0.0,
        lambda step: 2**-6 * linear(step, 10_000, 125_000),
        lambda leaf: 1 / 4 if leaf in ("kernel", "head") else 1.0,
    ),
    "mu-transformer-combined-large": Adam(
        by_norm(1.0), 0.95, 1e-8, True,
        lambda leaf, rate: 0.1 * rate if leaf in MATRICES else 0.0,
        lambda step: 2**-6 * linear(step, 7_000, 90_000),
        lambda leaf: 1 / 16 if leaf in ("kernel", "head") else 1.0,
    ),
    # Lingvo's and TensorFlow's: epsilon is added before the correction, of which recipes say that it differs here.
    "lingvo-41b": Adam(
        lambda grads: grads, 0.999, 1e-6, True,
        lambda leaf, rate: 0.0,
        lambda step: 0.01 * math.sqrt(10_000 / max(step, 10_000)),
    ),
}  # fmt: skip


@pytest.mark.parametrize("first_step", [0, 310_000])
@pytest.mark.parametrize("recipe", OPTIMIZERS)
def test_ten_steps_of_the_optimizer(recipe: str, first_step: int) -> None:
    """The optimizer of a recipe moves weights as its source does, at the start and after its decay has ended."""
    source = OPTIMIZERS[recipe]
    config, size = compose([f"+recipe={recipe}"])
    rates = learning_rate(config.training, config.schedule)
    rng = np.random.default_rng(7)
    names = ("kernel", "bias", "vocabulary", "head", "positions", "last norm")
    params = {name: rng.normal(size=(3, 4)) for name in names}
    moments = {name: (np.zeros((3, 4)), np.zeros((3, 4))) for name in params}

    def tree(leaves: dict[str, np.ndarray]) -> Any:
        own = {name: jnp.asarray(x, jnp.float32) for name, x in leaves.items()}
        return {
            "blocks": {"query": {"kernel": own["kernel"], "bias": own["bias"]}},
            "vocabulary": {"table": own["vocabulary"]},
            "head": {"table": own["head"]},
            "positions": {"table": own["positions"]},
            "norm": {"scale": own["last norm"]},
        }

    held = tree(params)
    axes = toy_axes(held)
    tx = make_optimizer(
        config.optimizer.name,
        config.training.weight_decay
        / (config.training.peak_learning_rate if config.optimizer.decay == "independent" else 1),
        axes=axes,
        multipliers=multipliers_of(size, axes),
        **config.optimizer.hyperparameters(),
    )
    state = tx.init(held)
    for number in range(1, 11):
        grads = {name: rng.normal(size=(3, 4)) * 0.7 for name in params}
        clipped = source.clip(grads)
        rate = source.rate(first_step + number)
        for name, x in params.items():
            mean, square = moments[name]
            mean, square = 0.9 * mean + 0.1 * clipped[name], source.b2 * square + (1 - source.b2) * clipped[name] ** 2
            moments[name] = mean, square
            if source.is_corrected:
                mean, square = mean / (1 - 0.9**number), square / (1 - source.b2**number)
            own_rate = rate * source.factor(name)
            params[name] = x - own_rate * mean / (np.sqrt(square) + source.eps) - source.decay(name, own_rate) * x
        given = tree(grads)
        if config.training.max_gradient_norm is not None:
            by = jnp.minimum(1, config.training.max_gradient_norm / optax.tree.norm(given))
            given = jax.tree.map(partial(jnp.multiply, by), given)
        if config.training.max_gradient_value is not None:
            given = clip_values(given, config.training.max_gradient_value)
        updates, state = scaled(tx, rates(first_step + number - 1), jnp.int32(number)).update(given, state, held)
        held = optax.apply_updates(held, updates)
    expected = tree(params)
    # 1e-5 of the distance that Adam moves a weight in ten steps.
    atol = 1e-7 + 1e-5 * sum(source.rate(first_step + number) for number in range(1, 11))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6, atol=atol), held, expected)


class Adafactor:
    """Adafactor of one array as XLAShardingAdafactorOptimizer computes it (lingvo/core/optimizer.py), without beta1."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.is_factored = min(shape) >= 128
        self.rows, self.columns, self.squares = np.zeros(shape[0]), np.zeros(shape[-1]), np.zeros(shape)

    def step(self, x: np.ndarray, g: np.ndarray, number: int, rate: float) -> np.ndarray:
        kept = 1 - number**-0.8
        square = g**2 + 1e-30
        if self.is_factored:
            self.rows = kept * self.rows + (1 - kept) * square.mean(1)
            self.columns = kept * self.columns + (1 - kept) * square.mean(0)
            update = g / np.sqrt(self.rows / self.rows.mean())[:, None] / np.sqrt(self.columns)[None]
        else:
            self.squares = kept * self.squares + (1 - kept) * square
            update = g / np.sqrt(self.squares)
        update = update / max(1.0, np.sqrt((update**2).mean()))
        return x - rate * max(np.sqrt((x**2).mean()), 1e-3) * update


RATES_OF_ADAFACTOR: dict[str, Callable[[int], float]] = {
    "lingvo-137b": lambda step: 0.01 * math.sqrt(10_000 / max(step, 10_000)),
    "transformer-vq-pg19": lambda step: (
        0.01 * (step / 10_000 if step < 10_000 else cosine((step - 1e4) / 490_000, 0.1))
    ),
}


@pytest.mark.parametrize(
    ("recipe", "first_step"),
    [
        pytest.param("lingvo-137b", 0, marks=pytest.mark.wide),
        pytest.param("lingvo-137b", 310_000, marks=pytest.mark.wide),
        pytest.param("transformer-vq-pg19", 0, marks=pytest.mark.wide),
        ("transformer-vq-pg19", 310_000),
    ],
)
def test_ten_steps_of_adafactor(recipe: str, first_step: int) -> None:
    """Each layer's matrix has its own factors, and each array its own scale and clipping."""
    config, _ = compose([f"+recipe={recipe}"])
    assert config.training.max_gradient_norm is None and config.training.weight_decay == 0
    rates = learning_rate(config.training, config.schedule)
    rng = np.random.default_rng(7)
    shapes: dict[str, tuple[int, ...]] = {"kernel": (128, 144), "scale": (6,), "norm": (6,)}
    params = {(name, place): 0.02 * rng.normal(size=shape) for name, shape in shapes.items() for place in range(2)}
    params["scale", 0] = np.zeros(6)  # its scale is the least one
    optimizers = {key: Adafactor(x.shape) for key, x in params.items()}

    def tree(leaves: dict[tuple[str, int], np.ndarray]) -> Any:
        own = {name: jnp.asarray(np.stack([leaves[name, 0], leaves[name, 1]]), jnp.float32) for name in shapes}
        blocks = {"mlp_in": {"kernel": own["kernel"]}, "norm_mlp": {"scale": own["scale"]}}
        return {"blocks": blocks, "norm": {"scale": own["norm"][0], "other": own["norm"][1]}}

    held = tree(params)
    tx = make_optimizer("adafactor", 0.0, axes=toy_axes(held), **config.optimizer.hyperparameters())
    state = tx.init(held)
    for number in range(1, 11):
        grads = {key: rng.normal(size=x.shape) * 10.0 ** rng.integers(-3, 2) for key, x in params.items()}
        rate = RATES_OF_ADAFACTOR[recipe](first_step + number)
        params = {key: optimizers[key].step(x, grads[key], number, rate) for key, x in params.items()}
        updates, state = scaled(tx, rates(first_step + number - 1), jnp.int32(number)).update(tree(grads), state, held)
        held = optax.apply_updates(held, updates)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-7), held, tree(params))


def test_rate_and_optimizer_of_the_one_billion_word_task() -> None:
    """The command of the page has TransformerSchedule times 0.5, and Adam's ParamsA (lingvo/core)."""
    (command,) = re.findall(r"`python main_zero.py (schedule=inverse_sqrt [^`]*40000[^`]*)`", FEATURES.read_text())
    config, _ = compose(command.split())
    rates = learning_rate(config.training, config.schedule)
    for step in (999, 9_999, 39_999, 40_000, 1_000_000):
        expected = 0.5 * 2_048**-0.5 * min((step + 1) * 40_000**-1.5, (step + 1) ** -0.5)
        np.testing.assert_allclose(float(rates(step)), expected, rtol=1e-4)
    optimizer = config.optimizer.hyperparameters()
    assert (config.optimizer.name, optimizer["b2"], optimizer["eps"]) == ("adamw", 0.997, 1e-9)
    assert optimizer.get("b1", 0.9) == 0.9 and config.training.weight_decay == 0
