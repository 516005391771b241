"""The update inside the backward pass against the update after it, and what it refuses."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import zero
from tests.training.small_gpt import assert_close, batch, reference, run_on, setup, shapes_of

pytestmark = pytest.mark.usefixtures("quick_compilation")


def test_an_update_inside_the_backward_pass_is_the_same_update() -> None:
    plain, fused = (setup(8, 3, max_norm=None, skip_bad_steps=False, fused_update=f) for f in (False, True))
    expected = run_on(plain)
    assert_close(run_on(fused), expected, rtol=1e-6)
    assert expected.metrics["gradient_norm"] != reference().metrics["gradient_norm"]  # no step was clipped


def by_rank_and_size() -> optax.GradientTransformation:
    """Element-wise, but the shapes of the leaves, all layers together, decide."""

    def is_wide(params: Any) -> Any:
        return jax.tree.map(lambda p: p.ndim == 2 and p.size > 200, params)

    return optax.chain(optax.scale_by_adam(), optax.masked(optax.scale(0.1), is_wide))


def test_an_update_inside_the_backward_pass_sees_the_shapes_of_all_layers() -> None:
    options: dict[str, Any] = {"skip_bad_steps": False, "tx": by_rank_and_size()}
    plain, fused = (setup(8, 3, max_norm=None, fused_update=f, **options) for f in (False, True))
    kinds = {leaf.name: (len(leaf.shape), math.prod(leaf.shape)) for leaf in plain.model.layout.leaves}
    assert any(rank == 2 and size > 200 and name.startswith("blocks") for name, (rank, size) in kinds.items())
    assert_close(run_on(fused), run_on(plain), rtol=1e-6)


@pytest.mark.parametrize(
    "tx",
    [
        optax.stateless(lambda g, _: jax.tree.map(lambda x: x - jnp.flip(x, 0), g)),
        zero.clip_by_global_norm(1.0),
    ],
    ids=["other layers", "all leaves"],
)
def test_an_update_inside_the_backward_pass_that_needs_other_layers_is_refused(tx: Any) -> None:
    on = setup(8, 3, max_norm=None, skip_bad_steps=False, fused_update=True, tx=tx)
    with pytest.raises(zero.NotElementwiseError):
        on.programs.step.lower(shapes_of(on), batch(on, 0))


@pytest.mark.parametrize(
    "changed",
    [
        {"stage": 2},
        {"micro_batches": 3},
        {"max_norm": 1.0},
        {"skip_bad_steps": True},
        {"skip_spikes": 6.0},
        {"remat": "dots"},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_what_needs_the_whole_gradient_is_refused_beside_a_fused_update(changed: dict[str, Any]) -> None:
    options = {"stage": 3, "micro_batches": 1, "max_norm": None, "skip_bad_steps": False} | changed
    on = setup(8, fused_update=True, **options)
    with pytest.raises(ValueError, match="fused_update needs"):
        on.programs.step.lower(shapes_of(on), batch(on, 0))
