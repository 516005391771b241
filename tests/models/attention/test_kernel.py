"""Kernels of others against dense attention: what they compute, and what they are not asked for."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from zero.models.attention.dense import dense_attention
from zero.models.attention.kernel import cudnn_attention, missing_in, splash_attention
from zero.models.attention.scores import Form
from zero.partition.collectives.axis import Axis
from zero.partition.collectives.context_group import ContextGroup


def compare(attend: Any, groups: int, form: Form, starts: jax.Array | None = None, width: int = 16) -> None:
    """Outputs and gradients, with 4 heads of queries."""
    q, weights = jax.random.normal(jax.random.key(0), (2, 1, 256, 4, width))
    k, v = jax.random.normal(jax.random.key(1), (2, 1, 256, groups, width))

    def both(attend: Any, **options: Any) -> Any:
        return jax.vjp(lambda q, k, v: attend(q, k, v, form=form, **options), q, k, v)

    options = {} if starts is None else {"starts_BT": starts}
    with jax.numpy_rank_promotion("allow"):  # the code of others
        out, pull_back = both(attend, **options)
        grads = pull_back(weights)
    expected, pull_back = both(dense_attention, **options)
    for got, x in zip((out, *grads), (expected, *pull_back(weights)), strict=True):
        np.testing.assert_allclose(got, x, rtol=1e-4, atol=1e-4)


STARTS = jnp.asarray(np.repeat([0, 90, 91, 200], [90, 1, 109, 56])[None], jnp.int32)


@pytest.mark.parametrize(
    ("form", "starts"),
    [(Form(), None), (Form(window=70, divisor=3.0, cap=1.5), STARTS), (Form(has_alibi=True), STARTS)],
)
def test_splash_attention_computes_the_same(form: Form, starts: jax.Array | None) -> None:
    compare(lambda *args, **kwargs: splash_attention(*args, interpret=True, **kwargs), 2, form, starts, width=128)


@pytest.mark.parametrize("form", [Form(), Form(window=70, divisor=3.0)])
def test_cudnn_arguments(form: Form) -> None:
    """The arguments for cuDNN describe the same attention.

    jax's own implementation of the same call: there is no cuDNN here.
    """
    compare(lambda *args, **kwargs: cudnn_attention(*args, implementation="xla", **kwargs), 2, form)


@pytest.mark.parametrize(
    ("kernel", "change", "missing"),
    [
        ("splash", {}, None),
        ("cudnn", {}, None),
        (None, {}, "a kernel for this device"),
        ("splash", {"form": Form(has_alibi=True)}, None),
        ("cudnn", {"form": Form(has_alibi=True)}, "ALiBi"),
        ("splash", {"form": Form(has_alibi=True, cap=1.0)}, "a cap of scores with ALiBi"),
        ("splash", {"form": Form(cap=1.0, window=3)}, None),
        ("cudnn", {"form": Form(cap=1.0)}, "a cap of scores"),
        ("cudnn", {"has_segments": True}, "segments"),
        ("splash", {"has_segments": True}, None),
        ("splash", {"drops": True}, "dropout of attention"),
        ("splash", {"has_bias": True}, "T5's bias"),
        ("splash", {"positions": 200}, "rows of 200 positions"),
        ("cudnn", {"positions": 200}, None),
        ("splash", {"form": Form(has_extra_logit=True)}, "a further logit"),
        ("splash", {"form": Form(cut=ContextGroup(Axis("batch", (1, 8), context=2)))}, "rows that are cut"),
    ],
)
def test_what_a_kernel_lacks_is_named(kernel: str | None, change: dict[str, Any], missing: str | None) -> None:
    asked: dict[str, Any] = {"form": Form(), "positions": 256, "drops": False, "has_bias": False, "has_segments": False}
    found = missing_in(kernel, **{**asked, **change})
    assert found == missing or (missing and found and found.startswith(missing))
