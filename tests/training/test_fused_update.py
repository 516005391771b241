"""The update inside the backward pass against the update after it: clipping, skipping, nested layers, refusals."""

import dataclasses
import math
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import zero
from tests.training.small_gpt import (
    CLIP,
    CONFIG,
    MAX_NORM,
    PLAIN,
    RATE,
    Run,
    advance,
    assert_close,
    batch,
    bits,
    first_params,
    named,
    reference,
    run_on,
    setup,
    shapes_of,
)
from zero.models.gpt import STACK, parameter_axes
from zero.models.parametrization import multipliers_of
from zero.models.stack import span_size
from zero.training.batch import Separators
from zero.training.ema import EMA
from zero.training.fused_update import LayeredLoss, backward_and_update
from zero.training.optimizers.optimizer import adamw
from zero.training.parts import StepOptions, TrainState

DEEP = dataclasses.replace(PLAIN, N=6)  # three spans of two layers


# Rates by leaf.
MIXED = dataclasses.replace(
    CONFIG, N=4, embedding_dim=48, alibi_attn=False, tied=False, attention_scale=None, parametrization="mup",
    mup_base_width=16,
)  # fmt: skip


def by_rank_and_size() -> optax.GradientTransformation:
    """AdamW, element-wise, but the shapes of the leaves, all layers together, decide, and their names."""

    def is_wide(params: Any) -> Any:
        return jax.tree.map(lambda p: p.ndim == 2 and p.size > 200, params)

    own = adamw(0.1, axes=parameter_axes(MIXED), multipliers=multipliers_of(MIXED, parameter_axes(MIXED)))
    return optax.chain(own, optax.masked(optax.scale(0.1), is_wide))


@pytest.mark.parametrize("windows", [(0,), pytest.param((5, 0), marks=pytest.mark.wide)])
def test_fused_equals_whole_gradient(windows: tuple[int, ...]) -> None:
    """An update inside the backward pass is the same update, of an optimizer that sees the shapes of all layers.

    With rates by leaf, documents that are kept apart, an average of the weights and two copies of the state at once;
    in the wide set with windows by layer, too.
    """
    config = dataclasses.replace(MIXED, windows=windows)
    options: dict[str, Any] = {
        "config": config,
        "separators": Separators(ends=(7,)),
        "ema_decay": 0.9,
        "tx": by_rank_and_size(),
    }
    options |= {"max_norm": None, "skip_bad_steps": False}
    plain, fused = setup(1, 3, **options), setup(8, 3, fused_update=True, axis=zero.Axis("zero", (2, 4)), **options)
    kinds = {leaf.name: (len(leaf.shape), math.prod(leaf.shape)) for leaf in plain.model.layout.leaves}
    assert any(rank == 2 and size > 200 and name.startswith("blocks") for name, (rank, size) in kinds.items())
    expected, got = run_on(plain), run_on(fused)
    assert_close(got, expected, rtol=1e-5, config=config)
    assert got.state is not None and expected.state is not None
    np.testing.assert_allclose(got.state.guard.running[0], expected.state.guard.running[0], rtol=1e-4)
    states = (fused, got.state), (plain, expected.state)
    averages = (on.whole(state.averages[EMA], on.model.layout) for on, state in states)
    first = named(first_params(config))
    for (name, x), y in zip(next(averages).items(), next(averages).values(), strict=True):
        if not name.endswith("/key/bias"):
            assert np.linalg.norm(x - y) < 1e-3 * np.linalg.norm(y - first[name]), name
    assert max(expected.metrics["gradient_norm"]) > MAX_NORM  # which would have been clipped


@pytest.mark.parametrize(
    "tx",
    [
        optax.stateless(lambda g, _: jax.tree.map(lambda x: x - jnp.flip(x, 0), g)),
        zero.across_shards(optax.clip_by_global_norm(1.0)),
    ],
    ids=["other layers", "all leaves"],
)
def test_optimizers_across_layers_are_refused(tx: Any) -> None:
    """An update inside the backward pass that needs other layers is refused."""
    on = setup(8, 3, max_norm=None, skip_bad_steps=False, fused_update=True, tx=tx)
    with pytest.raises(zero.NotElementwiseError):
        on.programs.step.lower(shapes_of(on), batch(on, 0))


@pytest.mark.parametrize(
    "changed",
    [
        {"stage": 2},
        {"micro_batches": 3},
        {"skip_spikes": 6.0},
        {"remat": "dots"},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_whole_gradient_options_are_refused(changed: dict[str, Any]) -> None:
    """Options that need the whole gradient are refused beside a fused update."""
    options = {"stage": 3, "micro_batches": 1} | changed
    with pytest.raises(ValueError, match="fused_update needs"):
        setup(8, fused_update=True, **options)


def clip_parts(max_norm: float) -> optax.GradientTransformation:
    """Each layer, and all that is in no layer, to its share of the norm; of whole gradients."""

    def update(grads: Any, state: Any, params: Any = None) -> Any:
        limit = max_norm / np.sqrt(DEEP.N + 1)

        def clipped(part: Any) -> Any:
            shrink = jnp.minimum(1, limit / optax.tree.norm(part))
            return jax.tree.map(lambda g: g * shrink, part)

        rest = clipped({name: part for name, part in grads.items() if name != STACK})
        return {**rest, STACK: jax.vmap(clipped)(grads[STACK])}, state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


CLIP_PARTS = clip_parts(MAX_NORM)
DESCENT: dict[str, Any] = {"tx": optax.identity()}  # where Adam does not see what scales all gradients alike
BY_OPTAX = optax.sgd(RATE)


@cache
def run(
    devices: int, stage: int = 3, max_norm: float | None = MAX_NORM, remat: str = "full", fused: bool = True
) -> Run:
    return run_on(setup(devices, stage, max_norm=max_norm, remat=remat, config=DEEP, fused_update=fused, **DESCENT))


SLOW = pytest.mark.slow
LOOPS = [(3, "nested"), pytest.param(8, "full", marks=SLOW)]  # programs that two tests share


@pytest.mark.parametrize(
    ("devices", "remat"),
    [*LOOPS, *(pytest.param(*case, marks=SLOW) for case in ((8, "nested"), (3, "full"), (1, "full")))],
)
def test_clipping_by_part(devices: int, remat: str) -> None:
    """A fused update clips each layer, and the rest, by its own norm."""
    assert_close(run(devices, remat=remat), reference(DEEP, CLIP_PARTS, BY_OPTAX), rtol=1e-5, config=DEEP)


@pytest.mark.parametrize(("devices", "remat"), LOOPS)
def test_nothing_moves_without_finite_loss(devices: int, remat: str) -> None:
    """Nothing moves where the loss is not finite."""
    on = setup(devices, 3, remat=remat, config=DEEP, fused_update=True, **DESCENT)
    state, _ = advance(on, on.start(), range(1))
    healthy = state.params["norm"]["scale"]
    sick = np.array(healthy)
    sick[0] = np.nan  # on the first device alone

    def with_scale(state: TrainState, scale: Any) -> TrainState:
        placed = jax.device_put(scale, healthy.sharding)  # else the step would be compiled again
        return state._replace(params={**state.params, "norm": {**state.params["norm"], "scale": placed}})

    state = with_scale(state, sick)
    before = bits((state.params, state.opt_state))
    state, metrics = advance(on, state, range(1, 3))
    for got, expected in zip(bits((state.params, state.opt_state)), before, strict=True):
        np.testing.assert_array_equal(got, expected)
    assert [m["skipped_steps"] for m in metrics] == [m["skipped_in_a_row"] for m in metrics] == [1, 2]
    _, (metrics_after,) = advance(on, with_scale(state, healthy), range(3, 4))
    assert (metrics_after["skipped_steps"], metrics_after["skipped_in_a_row"]) == (2, 0)


@pytest.mark.slow  # it tells of the data of the test above, not of the program
def test_reference_clips_some_parts() -> None:
    """The reference clips some parts and not others.

    What it does differs from clipping nothing, and from clipping all that the global norm asks for.
    """
    losses = [reference(DEEP, clip, BY_OPTAX).metrics["loss"] for clip in (CLIP_PARTS, optax.identity(), CLIP)]
    assert len({loss[-1] for loss in losses}) == 3


@pytest.mark.slow  # test_step_documents.py trains nested layers beside one device
@pytest.mark.parametrize("stage", range(4))
def test_nested_layers_train_alike(stage: int) -> None:
    """Nested layers train as layers one by one."""
    assert_close(run(8, stage, remat="nested", fused=False), run(8, 3, fused=False), rtol=1e-6, config=DEEP)


@pytest.mark.slow
@pytest.mark.parametrize("devices", [8, 3])
def test_fused_update_of_nested_layers(devices: int) -> None:
    """A fused update of nested layers is the same update.

    To rounding: XLA fuses the layer into two programs, and with all its optimizations it sums the gradient of a bias
    over rows and positions in another order in each of them.
    """
    got, expected = run(devices, remat="nested"), run(devices)
    assert_close(got, expected, rtol=1e-6, config=DEEP)


def test_spans_keep_fewer_inputs() -> None:
    assert [span_size(layers) for layers in (1, 2, 6, 7, 36, 136)] == [1, 1, 2, 1, 6, 8]


LAYERS = 4


@cache
def toy(span: int) -> tuple[Any, Any]:
    """Shards of a toy, and its step, whose derivatives get NaNs on the last device where arrays say so."""
    n = jax.device_count()

    @jax.custom_vjp
    def poisoned(w: jax.Array, poison: jax.Array) -> jax.Array:
        return w

    poisoned.defvjp(lambda w, poison: (w, poison), lambda poison, g: (g + poison, None))
    whole = {STACK: {"w": jnp.ones((LAYERS, 2 * n))}, "rest": {"w": jnp.ones(2 * n)}}
    layout = zero.make_layout(whole, n, stacked=(STACK,))
    axis, tx = zero.Axis("zero", (1, n)), optax.sgd(0.5)

    def step(params: Any, sick_layers: jax.Array, sick_rest: jax.Array) -> Any:
        last = lax.axis_index("zero") == n - 1

        def poison(of: jax.Array) -> jax.Array:
            return jnp.where(last, of, 0)

        loss = LayeredLoss(
            lambda rest: rest["rest"]["w"],
            lambda p, x, layer: x + poisoned(p["w"], poison(sick_layers[layer])),
            lambda rest, x: (jnp.sum(x * poisoned(rest["rest"]["w"], poison(sick_rest))), None),
        )
        return backward_and_update(
            loss,
            tx,
            params,
            tx.init(params),
            layout=layout,
            axis=axis,
            span=span,
            options=StepOptions(lambda step: jnp.float32(0)),
        )

    shards = jax.pmap(lambda _: zero.shard(whole, layout, axis), "zero")(np.ones(n))
    return shards, jax.pmap(step, "zero", in_axes=(0, None, None))


@pytest.mark.parametrize("span", [1, 2, 4])
@pytest.mark.parametrize("bad", [None, 0, 2, "rest"])
def test_not_finite_part_stays(bad: Any, span: int) -> None:
    """A part whose gradient is not finite stays and the others move.

    Of a toy whose derivative is poisoned on one device, by a part's number; its values are finite.
    """
    shards, step = toy(span)
    sick = np.asarray([np.nan if layer == bad else 0 for layer in range(LAYERS)], np.float32)
    _, params, _, norm, is_bad, _ = step(shards, sick, np.float32(np.nan if bad == "rest" else 0))
    is_moved = [bool((np.asarray(params[STACK]["w"])[:, layer] != 1).all()) for layer in range(LAYERS)]
    assert is_moved == [layer != bad for layer in range(LAYERS)]
    assert (np.asarray(params["rest"]["w"]) != 1).all() == (bad != "rest")
    stays = [np.asarray(params[STACK]["w"])[:, bad]] if isinstance(bad, int) else []
    assert all((x == 1).all() for x in stays)
    assert np.isfinite(norm).all() == (bad is None) and is_bad.all() == is_bad.any() == (bad is not None)


@pytest.mark.parametrize("span", [1, 2])
def test_inputs_on_the_host_change_no_bit(span: int) -> None:
    """The backward pass of a span gets the input that its forward pass has stored, in either memory.

    Of layers whose derivative depends on their input; test_step_offload.py has whole steps.
    """
    devices = 3
    rng = np.random.default_rng(0)
    tx = optax.sgd(0.5)
    whole = {STACK: {"w": rng.normal(1, 0.5, (LAYERS, 2 * devices))}, "rest": {"w": rng.normal(1, 0.5, 2 * devices)}}
    whole = jax.tree.map(np.float32, whole)
    layout = zero.make_layout(whole, devices, stacked=(STACK,))
    axis = zero.Axis("zero", (1, devices))
    loss = LayeredLoss(
        lambda rest: rest["rest"]["w"],
        lambda p, x, layer: jnp.sin(x * p["w"]),
        lambda rest, x: (jnp.sum(x * rest["rest"]["w"]), None),
    )

    def updated(on_host: bool) -> Any:
        def step(_: jax.Array) -> Any:
            params = zero.shard(whole, layout, axis)
            options = StepOptions(lambda step: jnp.float32(0))
            return backward_and_update(
                *(loss, tx, params, tx.init(params)),
                layout=layout,
                axis=axis,
                span=span,
                on_host=on_host,
                options=options,
            )[1]

        return jax.pmap(step, "zero", devices=jax.devices()[:devices])(np.ones(devices))

    on_device, on_host = updated(False), updated(True)
    jax.tree.map(np.testing.assert_array_equal, on_host, on_device)
