"""Kernels against dense attention: what they compute, and what they are not asked for."""

import itertools
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from zero.costs.topology import find_devices
from zero.models.attention import fused_kernel, tpu_kernels
from zero.models.attention.dense import dense_attention
from zero.models.attention.kernel import (
    cudnn_attention,
    kernel_attention,
    kernel_of,
    missing_in,
    own_attention,
    splash_attention,
    splits_heads,
)
from zero.models.attention.scores import Form, Terms
from zero.models.attention.tpu_kernels import TPU_KERNELS, TpuKernel
from zero.models.attention_keys import missing_in_kernel
from zero.models.config import GPTConfig
from zero.partition.collectives.axis import Axis
from zero.partition.collectives.context_group import ContextGroup
from zero.partition.model_parallel import WHOLE


def compare(
    attend: Any, groups: int, form: Form, starts: jax.Array | None = None, width: int = 16, positions: int = 256
) -> None:
    """Outputs and gradients of two rows, with 4 heads of queries."""
    q, weights = jax.random.normal(jax.random.key(0), (2, 2, positions, 4, width))
    k, v = jax.random.normal(jax.random.key(1), (2, 2, positions, groups, width))

    def both(attend: Any, **options: Any) -> Any:
        return jax.vjp(lambda q, k, v: attend(q, k, v, form=form, **options), q, k, v)

    options = {} if starts is None else {"starts_BT": starts}
    with jax.numpy_rank_promotion("allow"):  # the code of others
        out, pull_back = both(attend, **options)
        grads = pull_back(weights)
    expected, pull_back = both(dense_attention, terms=Terms(starts_BT=starts))
    for got, x in zip((out, *grads), (expected, *pull_back(weights)), strict=True):
        np.testing.assert_allclose(got, x, rtol=1e-4, atol=1e-4)


STARTS = jnp.asarray([np.repeat([0, 90, 91, 200], [90, 1, 109, 56]), np.repeat([0, 130], [130, 126])], jnp.int32)


OWN: dict[str, tuple[Any, ...]] = {
    "plain": (Form(), None, 2, 128, 256, 256),
    "two chunks, one head of keys": (Form(divisor=3.0), None, 1, 128, 256, 128),
    "half a tile": (Form(has_alibi=True), STARTS, 2, 64, 256, 256),
    "four groups": (Form(has_alibi=True), STARTS, 4, 128, 256, 256),
    "two chunks of two blocks": (Form(has_alibi=True), jnp.repeat(STARTS, 2, axis=1), 2, 128, 512, 256),
    "window inside a block": (Form(window=3), None, 4, 128, 384, 128),
    "window over two chunks, with a cap": (Form(window=200, cap=1.5), None, 2, 128, 512, 128),
    "window over chunks of two blocks": (Form(window=257), jnp.repeat(STARTS, 4, axis=1), 1, 128, 1024, 256),
    "tiles of half a block": (Form(window=400, cap=2.0), jnp.repeat(STARTS, 4, axis=1), 2, 128, 1024, 512),
}
QUICK_OWN = {
    ("two chunks, one head of keys", True),
    ("half a tile", False),
    ("window over two chunks, with a cap", False),
    ("window over chunks of two blocks", False),
    ("tiles of half a block", False),
}
WIDE_OWN = {("two chunks of two blocks", True), ("two chunks of two blocks", False)}


@pytest.mark.parametrize(
    ("name", "in_float32"),
    [
        pytest.param(
            *case, marks=() if case in QUICK_OWN else pytest.mark.wide if case in WIDE_OWN else pytest.mark.slow
        )
        for case in itertools.product(OWN, (False, True))
    ],
)
def test_own_kernel_computes_the_same(name: str, in_float32: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads of whole tiles and others, one chunk and several, in which a kernel keeps sums from step to step."""
    form, starts, groups, width, positions, chunk = OWN[name]
    monkeypatch.setattr(tpu_kernels, "_CHUNK", chunk)
    block = 256 if name == "tiles of half a block" else 128
    own = partial(own_attention, TpuKernel(block, 128, 2**20, in_float32=in_float32), interpret=True)
    compare(own, groups, form, starts, width, positions)


def test_keys_are_repeated_where_gradients_of_their_queries_do_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of the four heads of queries fit, so the one head of keys reaches the kernel twice."""
    heads_of_keys = []
    fused_attention = fused_kernel.fused_attention

    def recorded(q: jax.Array, k: jax.Array, *arguments: Any, **options: Any) -> jax.Array:
        heads_of_keys.append(k.shape[2])
        return fused_attention(q, k, *arguments, **options)

    monkeypatch.setattr(fused_kernel, "fused_attention", recorded)
    two_gradients = 2 * 4 * 256 * 128
    compare(partial(own_attention, TpuKernel(128, 128, two_gradients), interpret=True), 1, Form(), None, 128, 256)
    assert set(heads_of_keys) == {2}


@pytest.mark.parametrize("window", [1, 100, 300, 512, 513, 600, 2048])
@pytest.mark.parametrize(("block", "blocks", "keys"), [(128, 4, 128), (256, 2, 128), (512, 1, 256), (128, 7, 128)])
def test_operations_that_a_kernel_notes(block: int, blocks: int, keys: int, window: int) -> None:
    """Scores of all tiles of all pairs of chunks, and only of tiles in which a query sees a key."""
    problem = fused_kernel.Problem(
        2, 2, 3, 128, block, keys, blocks, 3, False, False, False, min(window, 3 * block * blocks), None, None, True
    )
    found = seen = 0
    for i, j in zip(*problem.pairs(False), strict=True):
        for query in range(0, problem.chunk, block):
            for tile in problem.tiles(query, int(i - j), keys):
                found += block * keys
                first = tile.query + int(i) * problem.chunk
                before = np.arange(first, first + block) - (tile.key + int(j) * problem.chunk)
                distance = before[:, None] - np.arange(keys)
                visible = (distance >= 0) & (distance < problem.window)
                assert visible.any()
                seen += int(visible.sum())
    assert problem.computed(keys) == 2 * 2 * 3 * found
    assert seen == sum(min(query + 1, problem.window) for query in range(3 * problem.chunk))


@pytest.mark.parametrize("window", [100, 384])
@pytest.mark.parametrize("shared", [1, 3])
@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize(("kind", "by_keys"), [("queries", False), ("last queries", True), ("keys", True)])
def test_blocks_of_outputs_are_left_once(kind: str, by_keys: bool, width: int, shared: int, window: int) -> None:
    """A TPU writes back what is in VMEM when a block is left, the interpreter only what a step has changed."""
    problem = fused_kernel.Problem(2, 2, shared, width, 128, 128, 1, 3, False, False, False, window, None, None, True)
    pairs = list(zip(*problem.pairs(by_keys), strict=True))
    inner = itertools.product(pairs, range(shared)) if by_keys else itertools.product(range(shared), pairs)
    steps = [(b, g, *step) for b, g, step in itertools.product(range(2), range(2), list(inner))]
    visited = []
    for b, g, x, y in steps:
        (i, j), member = (x, y) if by_keys else (y, x)
        visited.append(tuple(map(int, fused_kernel.block_index(problem, kind, b, g, member, i, j))))
    left = [block for block, _ in itertools.groupby(visited)]
    assert len(left) == len(set(left)) == 2 * 2 * 3 * (1 if kind == "keys" else shared)


@pytest.mark.parametrize("name", ["tpu_v4", "tpu_v2"])
def test_own_kernel_in_bfloat16(name: str) -> None:
    """With operands in bfloat16 all but rounding is as in float32; large scores show an error of their scale."""
    q, k, v, weights = jax.random.normal(jax.random.key(0), (4, 1, 256, 2, 128)).astype(jnp.bfloat16)
    q, form = 8 * q, Form(has_alibi=True)

    def results(attend: Any, dtype: Any) -> Any:
        out, pull_back = jax.vjp(partial(attend, form=form), *(x.astype(dtype) for x in (q, k, v)))
        return out, *pull_back(weights.astype(dtype))

    own = partial(own_attention, TPU_KERNELS[name], interpret=True)
    for narrow, exact in zip(results(own, jnp.bfloat16), results(dense_attention, jnp.float32), strict=True):
        assert narrow.dtype == jnp.bfloat16
        error = jnp.abs(narrow.astype(jnp.float32) - exact)
        assert jnp.sqrt((error**2).mean()) < 0.01 * jnp.sqrt((exact**2).mean())


slow = pytest.mark.slow


@pytest.mark.parametrize(
    "topology",
    [
        pytest.param("v6e-8", marks=pytest.mark.wide),
        *(pytest.param(name, marks=slow) for name in ("v2-8", "v3-8", "v4-8", "v5e-8", "tpu7x-8")),
    ],
)
def test_kernels_compile_for_tpu(topology: str) -> None:
    """The TPU compiler takes both kernels, of several chunks and, but for v2 and v3, with shared heads of keys.

    Each with ALiBi, and with a cap and a window that is shorter than a row; v2 and v3 take no other long rows.
    """
    pytest.importorskip("libtpu")
    devices = find_devices(topology)[:1]
    kernel = kernel_of("tpu", devices[0].device_kind)
    assert kernel is not None

    is_small = TPU_KERNELS[kernel].in_float32

    def loss(form: Form, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return kernel_attention(kernel, q, k, v, form=form).astype(jnp.float32).sum()

    windowed = Form(window=1025 if is_small else 2100, cap=50.0)
    for positions, form in ((2048, Form(has_alibi=True)), (4096, windowed)):
        step = jax.pmap(jax.grad(partial(loss, form), argnums=(0, 1, 2)), devices=devices)
        q, k = (
            jax.ShapeDtypeStruct((1, 1, positions, heads, 128), jnp.bfloat16) for heads in (2, 2 if is_small else 1)
        )
        text = step.lower(q, k, k).compile().as_text()
        assert text.count('custom_call_target="tpu_custom_call"') == 2


@pytest.mark.parametrize(
    ("form", "starts"),
    [
        pytest.param(Form(), None, marks=slow),
        (Form(window=70, divisor=3.0, cap=1.5), STARTS),
        pytest.param(Form(has_alibi=True), STARTS, marks=pytest.mark.wide),
    ],
)
def test_splash_attention_computes_the_same(form: Form, starts: jax.Array | None) -> None:
    compare(lambda *args, **kwargs: splash_attention(*args, interpret=True, **kwargs), 2, form, starts, width=128)


@pytest.mark.parametrize("form", [pytest.param(Form(), marks=slow), Form(window=70, divisor=3.0)])
def test_cudnn_arguments(form: Form) -> None:
    """The arguments for cuDNN describe the same attention.

    jax's own implementation of the same call: there is no cuDNN here.
    """
    compare(lambda *args, **kwargs: cudnn_attention(*args, implementation="xla", **kwargs), 2, form)


@pytest.mark.parametrize(
    ("kernel", "change", "missing"),
    [
        ("tpu_v4", {}, None),
        ("cudnn", {}, None),
        (None, {}, "a kernel for this device"),
        ("tpu_v4", {"form": Form(has_alibi=True)}, None),
        ("tpu_v2", {"form": Form(has_alibi=True)}, None),
        ("cudnn", {"form": Form(has_alibi=True)}, "ALiBi"),
        ("tpu_v4", {"form": Form(has_alibi=True, cap=1.0)}, "a cap of scores with ALiBi"),
        ("tpu_v4", {"form": Form(cap=1.0, window=3)}, None),
        ("tpu_v2", {"form": Form(cap=1.0, window=3)}, None),
        ("tpu_v2", {"positions": 16384}, "rows of 16384 positions with heads of 128"),
        ("tpu_v2", {"positions": 2048}, None),
        ("tpu_v2", {"positions": 4096, "form": Form(window=1025)}, None),
        ("tpu_v2", {"positions": 4096, "form": Form(window=1026)}, "rows of 4096 positions with heads of 128"),
        ("tpu_v4", {"positions": 16384}, None),
        ("cudnn", {"form": Form(cap=1.0)}, "a cap of scores"),
        ("cudnn", {"has_segments": True}, "segments"),
        ("cudnn", {"width": 256}, "heads of 256"),
        ("cudnn", {"width": 20}, "heads of 20"),
        ("tpu_v6e", {"has_segments": True}, None),
        ("tpu_v4", {"drops": True}, "dropout of attention"),
        ("tpu_v4", {"has_bias": True}, "T5's bias"),
        ("tpu_v4", {"positions": 200}, "rows of 200 positions"),
        ("cudnn", {"positions": 200}, None),
        ("tpu_v4", {"form": Form(has_extra_logit=True)}, "a further logit"),
        ("tpu_v4", {"form": Form(row_group=ContextGroup(Axis("batch", (1, 8), context=2)))}, "rows that are cut"),
    ],
)
def test_what_a_kernel_lacks_is_named(kernel: str | None, change: dict[str, Any], missing: str | None) -> None:
    asked: dict[str, Any] = {
        "form": Form(),
        "positions": 256,
        "width": 128,
        "drops": False,
        "has_bias": False,
        "has_segments": False,
    }
    found = missing_in(kernel, **{**asked, **change})
    assert found == missing or (missing and found and found.startswith(missing))


def test_layers_that_see_all_positions_decide() -> None:
    """Beside windows that a kernel has, layers without one may need more of it."""
    size = GPTConfig(vocab_size=1, dropout=0.0, N=2, num_head=2, embedding_dim=256, block_size=4096, windows=(0, 256))
    found = [
        missing_in_kernel("tpu_v2", replace(size, windows=windows), WHOLE, 4096, has_segments=False)
        for windows in ((0, 256), (256,))
    ]
    assert found == ["rows of 4096 positions with heads of 128 on this TPU", None]


def test_chunks_that_a_window_touches_are_counted() -> None:
    """Of 2,688 positions with chunks of 896, a window of 898 touches all."""
    assert TPU_KERNELS["tpu_v5e"].most_sharing(898, 2688, 256) == 2**25 // (4 * 2688 * 256)


@pytest.mark.parametrize(
    ("kernel", "form", "width", "splits"),
    [
        (None, Form(), 128, False),  # as on CPU, where the last bits depend on it
        ("tpu_v4", Form(), 128, False),
        ("tpu_v4", Form(), 64, True),
        ("tpu_v4", Form(window=3), 128, False),
        ("tpu_v6e", Form(), 64, False),
        ("cudnn", Form(), 128, True),
    ],
)
def test_heads_as_dimensions(kernel: str | None, form: Form, width: int, splits: bool) -> None:
    assert splits_heads(kernel, form, positions=256, width=width) == splits
