"""Every parameter of every family has axes, and what is read from them is what lists of names said before.

The lists are kept here alone: parameters that were there before axes are grouped, decayed and started as they were, so
that runs saved before continue bit for bit.
"""

import dataclasses
import re
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest

from zero.models.adapters import Adapters, combine, resolved, with_copies
from zero.models.axes import EMBED, HEADS, MLP, Axes, Role, named, shapes_and_axes
from zero.models.config import GPTConfig
from zero.models.families import FAMILIES
from zero.models.gpt import parameter_axes, variable_shapes

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "change-the-model.md"
# 12 layers have each family's pattern of windows and mixers.
_BASE: dict[str, Any] = {"embedding_dim": 64, "vocab_size": 100, "num_head": 4, "block_size": 16, "dropout": 0, "N": 12}
_FEW_EXPERTS = {"experts": 16, "shared_dim": 24}


def _of(family: str, **changes: Any) -> GPTConfig:
    few = _FEW_EXPERTS if "experts" in FAMILIES[family] else {}
    few = {**few, "experts_per_token": 2} if few else few
    return GPTConfig(**{**_BASE, **FAMILIES[family], **few, **changes})


MODELS = {
    **{family: _of(family) for family in FAMILIES},
    "learned positions, biased norms": _of("gpt2"),
    "multi-token prediction": _of("deepseek_v3", predictor=True),
    "queries without a latent vector": _of("deepseek_v3", query_latent_dim=None),
    "norms of projections": _of("dense_lm", qk_norm=True, qk_norm_over="projection"),
    "gated units with biases": _of("vq", norm="rms_biased", head_bias=True, positions="sinusoidal"),
    "experts with biases": _of("gpt_oss", experts_every=1),
    "several chunks": _of("llama", vocab_chunks=4),
    "mup": _of("llama", parametrization="mup", mup_base_width=32),
}

_CUT_OUTPUTS = ("query", "key", "value", "key_value", "gate", "attention_gate", "output_gate", "mlp_in", "mlp_gate")
_CUT_INPUTS = ("attention_out", "mlp_out", "vocabulary", "head")
_KERNELS = ("kernel", "lora_a", "lora_b")
_STACKS = ("blocks", "first_blocks", "predictor_blocks")
_PRODUCTS = (
    *("query", "key", "value", "attention_out", "mlp_in", "mlp_gate", "mlp_out", "query_latent", "latent", "key_value"),
    *("attention_gate", "shared_gate", "output_gate", "rate", "decay_input"),
)


def _cut(path: list[str]) -> int | None:
    """The dimension that tensor groups cut."""
    module, leaf = ["", *path][-2:]
    if len(path) > 2 and path[-3].startswith("unit_") and module in ("query", "key"):
        return None
    if module in _CUT_OUTPUTS:
        return None if leaf == "lora_a" else -1
    if module in _CUT_INPUTS:
        return None if leaf in ("bias", "magnitude", "lora_b") else -2
    return None


def _has_experts(path: list[str]) -> bool:
    return "experts" in path and "router" not in path


def _is_matrix(path: list[str]) -> bool:
    return path[-1] in _KERNELS or path[0] in ("vocabulary", "head")


def _decays_in_gpt_neo(path: list[str]) -> bool:
    return path[-1] in _KERNELS or path[0] in ("vocabulary", "head", "positions", "norm")


def _is_matrix_of_layers(path: list[str]) -> bool:
    return path[0] in _STACKS and path[-1] in _KERNELS


def _may_have_adapter(path: list[str]) -> bool:
    return path[-1] == "kernel" and path[-2] in _PRODUCTS and "experts" not in path


def _is_stacked(path: list[str]) -> bool:
    return path[0] in (*_STACKS, "vocabulary", "head")


@pytest.mark.parametrize("name", MODELS)
def test_axes_say_what_lists_of_names_said(name: str) -> None:
    axes = parameter_axes(MODELS[name])
    shapes = jax.tree_util.tree_leaves_with_path(variable_shapes(MODELS[name])["params"])
    assert {*axes} == {jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in shapes}
    for leaf, own in axes.items():
        path = leaf.split("/")
        assert own.cut == _cut(path), leaf
        assert own.has_experts == _has_experts(path), leaf
        assert own.is_matrix == _is_matrix(path), leaf
        assert own.decays_in_gpt_neo == _decays_in_gpt_neo(path), leaf
        assert (own.is_product and own.is_of_layers) == _is_matrix_of_layers(path), leaf
        assert (len(own.own) < len(own.names)) == _is_stacked(path), leaf
        if MODELS[name].layer == "transformer":  # adapters are not for gated units
            assert own.adaptable == _may_have_adapter(path), leaf


def test_a_parameter_without_axes_is_named() -> None:
    model = nn.Dense(3, kernel_init=named(nn.initializers.zeros, EMBED, MLP))
    with pytest.raises(ValueError, match="parameter bias has no axes"):
        shapes_and_axes(model.init, jax.random.key(0), jnp.ones((1, 2)))


def test_a_parameter_has_an_axis_for_each_dimension() -> None:
    model = nn.Dense(3, use_bias=False, kernel_init=named(nn.initializers.zeros, EMBED))
    with pytest.raises(ValueError, match=r"parameter kernel of \(2, 3\): expected an axis each, got \('embed',\)"):
        shapes_and_axes(model.init, jax.random.key(0), jnp.ones((1, 2)))


def test_parameters_are_plain_arrays() -> None:
    config = dataclasses.replace(MODELS["gpt2"], N=1)
    parameter_axes(config)  # collects in a trace of its own, and leaves no trace in others
    model = nn.Dense(3, kernel_init=named(nn.initializers.zeros, EMBED, MLP, role=Role.QUERY))
    assert isinstance(model.init(jax.random.key(0), jnp.ones((1, 2)))["params"]["kernel"], jax.Array)


def test_adapters_train_a_fresh_part_whole() -> None:
    """Its leaves are copied, also those that could have adapters; what is frozen stays beside them."""
    axes = {
        "score/kernel": Axes((EMBED, "outputs"), fresh=True),
        "blocks/gate/kernel": Axes(("layers", EMBED, MLP), fresh=True, adaptable=True),
        "blocks/query/kernel": Axes(("layers", EMBED, HEADS), adaptable=True),
    }
    adapters = Adapters(rank=2, alpha=2.0)
    trained = adapters.axes(axes)
    assert {*trained} == {
        *("score/trained_kernel", "blocks/gate/trained_kernel"),
        *("blocks/query/lora_a", "blocks/query/lora_b"),
    }
    assert trained["score/trained_kernel"] == axes["score/kernel"]
    base = {
        "score": {"kernel": jnp.full((6, 1), 7.0)},
        "blocks": {"gate": {"kernel": jnp.full((3, 6, 5), 3.0)}, "query": {"kernel": jnp.zeros((3, 6, 4))}},
    }
    own = adapters.init(jax.random.key(0), adapters.shapes(base, axes))
    started = with_copies(own, base)
    whole = resolved(combine(base, started))
    assert float(whole["score"]["kernel"][0, 0]) == 7 and float(whole["blocks"]["gate"]["kernel"][0, 0, 0]) == 3
    assert whole["blocks"]["query"]["lora_a"].shape == (3, 6, 2)


def test_axes_are_values() -> None:
    assert Axes((EMBED, MLP)) == Axes((EMBED, MLP)) != Axes((EMBED, MLP), Role.RESIDUAL_OUT)


@pytest.mark.quick
def test_the_part_of_a_page_names_its_axes() -> None:
    """Tensor groups divide its hidden values, and its outputs go to the residual stream, as the page says."""
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    names: dict[str, Any] = {}
    exec(next(block for block in blocks if "class Hidden" in block), names)
    x_BTD = jnp.ones((1, 2, 4))
    shapes, axes = shapes_and_axes(names["Hidden"](6).init, jax.random.key(0), x_BTD)
    assert shapes["params"]["into"]["kernel"].shape == (4, 6)
    assert (axes["into/kernel"].cut, axes["out/kernel"].cut) == (-1, -2)
    assert (axes["into/kernel"].role, axes["out/kernel"].role) == (None, Role.RESIDUAL_OUT)
