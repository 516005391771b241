"""Statistics per tensor on shards are those of the unsharded model, whatever the stage, the devices and the groups."""

import dataclasses
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zero
from tests.training.small_gpt import (
    CONFIG,
    EXPERTS,
    RATE,
    SEED,
    VQ,
    CountedRate,
    Setup,
    batch,
    first_params,
    named,
    setup,
    tokens,
)
from zero.models.adapters import Adapters
from zero.models.config import STACK
from zero.models.gpt import GPT
from zero.run.features.statistics import named as metrics_of
from zero.training.optimizers.optimizer import adamw
from zero.training.parts import StepOptions
from zero.training.programs import make_programs
from zero.training.sharded_gpt import ShardedGPT
from zero.training.tuning import Tuning

SLOW, WIDE = pytest.mark.slow, pytest.mark.wide
CLOCK = 2  # updates before the one in question
GROUPS = dataclasses.replace(CONFIG, dropout=0.0, embedding_dim=48, num_head=8, block_size=16, vocab_chunks=1)
ROUTED = dataclasses.replace(EXPERTS, dropout=0.0)


def changed(x: Any) -> Any:
    """The parameters after the update, of which these are those before."""
    return 1.5 * x + 0.125


def found(on: Setup) -> dict[str, float]:
    """The statistics of an update after which every parameter, padding too, is `changed`."""
    state = on.start()
    count, before = len(on.devices), on.programs.hold(on.weights(state))
    clock = jnp.full(count, CLOCK + 1, jnp.int32)
    after = state._replace(clock=clock, params=jax.tree.map(changed, state.params))
    data = partial(tokens, context=on.model.config.block_size)
    return metrics_of(jax.device_get(on.programs.statistics(before, after, batch(on, 0, data))))


@cache
def expected() -> dict[str, float]:
    """The same from the model alone, on one device."""
    model, params, rows = GPT(CONFIG), first_params(), jnp.asarray(tokens(0))
    targets = jnp.concatenate([rows[:, 1:], jnp.full((len(rows), 1), -1)], axis=1)
    read = jnp.where(rows < 0, ~rows, rows)
    step_key = jax.random.fold_in(jax.random.key(SEED), CLOCK)
    keys = jnp.stack([jax.random.fold_in(step_key, row) for row in range(len(rows))])

    def loss(params: Any) -> jax.Array:
        losses: Any = model.apply({"params": params}, read, targets, keys)
        return jnp.sum(losses * (targets >= 0)) / jnp.sum(targets >= 0)

    embed: Any = jax.jit(partial(model.apply, method="embed"))
    stream = embed({"params": params}, read)
    result = {"activation/embedding/0": float(jnp.abs(stream[0]).mean())}
    layer = model.layer(model.row_group)

    @jax.jit
    def shown(own: Any, stream: Any, number: jax.Array) -> Any:
        arguments = ({"params": own}, (stream, None), number, None, 0)
        return layer.apply(*arguments, capture_intermediates=True, mutable=["intermediates"])

    for number in range(CONFIG.N):
        own = jax.tree.map(lambda x, number=number: x[number], params[STACK])
        ((stream, _), _), seen = shown(own, stream, jnp.int32(number))
        of_modules = {name: of["__call__"][0] for name, of in seen["intermediates"].items() if name != "__call__"}
        modules = {name: out for name, out in of_modules.items() if name != "activation"}  # it has no scalars here
        for name, out in {**modules, "stream": stream[0]}.items():
            result[f"activation/{name}/{number}"] = float(jnp.abs(out).mean())
    for name, grad in named(jax.jit(jax.grad(loss))(params)).items():
        result[f"gradient_norm/{name}"] = float(np.linalg.norm(grad))
    for name, x in named(params).items():
        result[f"weight_norm/{name}"] = float(np.linalg.norm(x))
        result[f"change/{name}"] = float(np.abs(changed(x) - x).mean() / RATE(CLOCK))
        norm = np.linalg.norm(x)
        result[f"update_ratio/{name}"] = float(np.linalg.norm(changed(x) - x) / norm) if norm else 0.0
    return result


def assert_same(got: dict[str, float], of: dict[str, float]) -> None:
    for name, value in of.items():
        if not name.endswith("key/bias") or not name.startswith(
            ("activation/", "gradient_norm/")
        ):  # else nothing but rounding
            np.testing.assert_allclose(got[name], value, rtol=2e-5, err_msg=name)


@pytest.mark.parametrize(
    ("devices", "stages"),
    [pytest.param(8, (0,), marks=WIDE), *(pytest.param(devices, (0, 1, 2, 3), marks=SLOW) for devices in (1, 3, 8))],
)
def test_equal_to_the_unsharded_model(devices: int, stages: tuple[int, ...]) -> None:
    """Values are those of the unsharded model; stages 1 and 3 are those of the tests below."""
    for stage in stages:
        got = found(setup(devices, stage))
        assert_same(got, expected())
        more = got.keys() - expected().keys()
        inputs = ("attention_out/input", "mlp_out/input")
        assert more == {f"activation/{name}/{layer}" for name in inputs for layer in range(CONFIG.N)}
        assert min(got[name] for name in more) > 0


@pytest.mark.parametrize(
    "on",
    [partial(setup, 8, 3, 3, axis=zero.Axis("zero", (2, 4))), pytest.param(partial(setup, 3, 3, 4), marks=WIDE)],
    ids=["copies", "three devices"],
)
def test_micro_batches_change_no_statistic(on: Callable[[], Setup]) -> None:
    """Neither do copies of the state."""
    assert_same(found(on()), expected())


@pytest.mark.parametrize(
    "on",
    [
        pytest.param(partial(setup, 8, 3, config=GROUPS, axis=zero.Axis.with_tensor_groups("zero", 8, 2)), marks=WIDE),
        pytest.param(
            partial(setup, 8, 1, config=GROUPS, axis=zero.Axis("zero", (2, 4), context=2), blockwise_from=4), marks=WIDE
        ),
        pytest.param(partial(setup, 8, 3, config=ROUTED, axis=zero.Axis.with_expert_groups("zero", 8, 4)), marks=WIDE),
        pytest.param(partial(setup, 3, 2, config=VQ), marks=SLOW),  # its codebook has no statistics
    ],
    ids=["tensor", "context", "expert", "vq"],
)
def test_groups_change_no_statistic(on: Callable[[], Setup]) -> None:
    """Groups of devices change no value."""
    made = on()
    got, alone = found(made), found(setup(1, 0, config=made.model.config))
    assert got.keys() == alone.keys()
    assert_same(got, alone)


@pytest.mark.wide
def test_adapters_have_statistics() -> None:
    """Adapters that start at nothing change no activation, and are the only leaves."""
    axis, used = zero.Axis("zero", (1, 3)), tuple(jax.devices()[:3])
    tuning = Tuning(Adapters(rank=2, alpha=4.0), "float32")
    model = ShardedGPT(CONFIG, axis, 3, jnp.float32, tuning=tuning)
    programs = make_programs(model, adamw(0.1, axes=model.axes), StepOptions(RATE, SEED), used)
    on = Setup(model, programs, used, model.layout, CountedRate())
    frozen = zero.to_devices(first_params(), model.base.layout, axis, used)
    state = programs.start(on.new_weights())
    after = state._replace(clock=jnp.full(3, CLOCK + 1, jnp.int32))
    got = metrics_of(jax.device_get(programs.statistics(on.weights(state), after, batch(on, 0), frozen)))
    assert_same(got, {name: x for name, x in expected().items() if name.startswith("activation/")})
    leaves = [name for name in got if name.startswith("change/")]
    assert leaves and all(name.endswith(("lora_a", "lora_b")) and got[name] == 0 for name in leaves)
    assert got["gradient_norm/blocks/query/lora_a"] == 0 < got["gradient_norm/blocks/query/lora_b"]
