"""Initial weights of the maximal update parametrization, what else of a model it changes, and what it refuses."""

import dataclasses
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from zero.models.config import GPTConfig
from zero.models.families import FAMILIES
from zero.models.gpt import GPT, parameter_axes

MUP: dict[str, Any] = {"parametrization": "mup", "mup_base_width": 32, "tied": False}
CONFIG = GPTConfig(192, 1001, 3, 300, 0.0, 4, alibi_attn=False, vocab_chunks=3, head_dim=32, mlp_dim=500, **MUP)


@cache
def initial(config: GPTConfig) -> Any:
    init = jax.jit(partial(GPT(config).init, method="hidden"))
    variables: Any = init(jax.random.key(0), jnp.zeros((1, 2), int), None)
    return variables["params"]


def test_weights_start_as_table_3_says() -> None:
    expected = {
        "vocabulary/table": 1.0,
        "positions/table": 1.0,
        "head/table": 1 / 192,
        **{f"blocks/{name}/kernel": 192**-0.5 for name in ("query", "key", "value", "mlp_in")},
        "blocks/attention_out/kernel": 96**-0.5,  # 3 heads of 32
        "blocks/mlp_out/kernel": 500**-0.5,
    }
    found = set()
    for path, x in jax.tree_util.tree_leaves_with_path(initial(CONFIG)):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        if path[-1].key in ("scale", "bias"):
            np.testing.assert_array_equal(x, float(path[-1].key == "scale"), err_msg=name)
            continue
        found.add(name)
        np.testing.assert_allclose(np.std(x), expected[name], rtol=0.02, err_msg=name)
        assert abs(np.mean(x)) < expected[name] / 50
    assert found == set(expected)


@pytest.mark.parametrize("parametrization", ["mup", pytest.param("standard", marks=pytest.mark.wide)])
def test_zero_initialized_layers(parametrization: str) -> None:
    """Queries and residual outputs start at zero on request."""
    config = dataclasses.replace(CONFIG, zero_init=True)
    if parametrization == "standard":
        config = dataclasses.replace(config, parametrization="standard", mup_base_width=None)
    blocks = initial(config)["blocks"]
    zeros = {name for name in blocks if "kernel" in blocks[name] and not np.any(blocks[name]["kernel"])}
    assert zeros == {"query", "attention_out", "mlp_out"}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (
            {"init": "fan_in", "head_init": "zero"},
            {"vocabulary/table": 1.0, "head/table": 0.0, "query": 192**-0.5, "mlp_in": 192**-0.5, "mlp_out": 500**-0.5},
        ),
        (
            {"init": "lingvo", "attention_scale": "none"},
            {
                "vocabulary/table": 1.0,
                "head/table": 192**-0.5,
                "query": (192 * 32) ** -0.5,
                "key": 192**-0.5,
                "attention_out": 96**-0.5,
                "mlp_in": 192**-0.5,
                "mlp_out": 500**-0.5,
            },
        ),
        (
            {"init": "gpt_neo", "attention_scale": "none"},
            {
                "vocabulary/table": 0.02,
                "positions/table": 0.01,
                "query": (192 * 32) ** -0.5,
                "value": 192**-0.5,
                "attention_out": 96**-0.5,
                "mlp_in": 0.02,
                "mlp_out": 0.02 / 4**0.5,
            },
        ),
        ({"head_init": "fan_in", "zero_init": ["key", "mlp_in"]}, {"head/table": 192**-0.5, "key": 0.0, "mlp_in": 0.0}),
    ],
    ids=["fan-in", "lingvo", "gpt-neo", "gpt2"],
)
def test_initializers(changes: dict[str, Any], expected: dict[str, float]) -> None:
    """Deviations are those of the sources; Lingvo's MLP is uniform."""
    config = dataclasses.replace(
        CONFIG, **{"parametrization": "standard", "mup_base_width": None, "init": "gpt2", "head_init": None, **changes}
    )
    params = initial(config)
    for name, deviation in expected.items():
        x = params[name.split("/")[0]]["table"] if "/" in name else params["blocks"][name]["kernel"]
        np.testing.assert_allclose(np.std(x), deviation, rtol=0.02, atol=1e-9, err_msg=name)
    if config.init == "lingvo":
        assert np.abs(params["blocks"]["mlp_in"]["kernel"]).max() <= 3**0.5 * 192**-0.5 * 1.0001


@cache
def losses_with(**changes: Any) -> np.ndarray:
    """Of two rows; every parameter is large enough to matter."""
    params = jax.tree.map(lambda x: np.random.default_rng(x.size).normal(0, 0.3, x.shape), initial(CONFIG))
    tokens = np.random.default_rng(0).integers(0, 1001, (2, 7))
    config = dataclasses.replace(CONFIG, **changes)
    return np.asarray(jax.jit(GPT(config).apply)({"params": params}, tokens, tokens))


def test_attention_scale_by_number() -> None:
    """A number multiplies the products of queries and keys, also in mup."""
    np.testing.assert_allclose(losses_with(), losses_with(attention_scale=1 / 32), rtol=1e-6)
    for wrong in (0, -1.0, "half", True):
        with pytest.raises(ValueError, match="attention_scale must be sqrt, linear, none or a number above 0"):
            dataclasses.replace(CONFIG, attention_scale=wrong)


def test_a_matrix_that_starts_at_zero_is_one_of_the_model() -> None:
    """A name that only another mixer has is refused too."""
    for wrong in ("queries", "query_latent"):
        with pytest.raises(ValueError, match=rf"zero_init must be a list of attention_out, .*, got \['{wrong}'\]"):
            parameter_axes(dataclasses.replace(CONFIG, zero_init=[wrong]))
    with pytest.raises(ValueError, match="zero_init must be a list of matrices, true or false"):
        dataclasses.replace(CONFIG, zero_init="query")


def test_true_as_earlier_versions_saved_it() -> None:
    """So that a resume finds the configuration that was saved."""
    saved = dataclasses.replace(CONFIG, zero_init=["query", "attention_out", "mlp_out"])
    assert saved == dataclasses.replace(CONFIG, zero_init=True)


def test_attention_scale() -> None:
    """Products of queries and keys are divided by the head dimension, and nothing else changes."""
    standard: dict[str, Any] = {"parametrization": "standard", "mup_base_width": None, "head_init": None}
    np.testing.assert_array_equal(losses_with(), losses_with(**standard, attention_scale="linear"))
    assert not np.allclose(losses_with(), losses_with(**standard, attention_scale="sqrt"), rtol=1e-3)


def test_untied_families_in_mup() -> None:
    """Families whose embeddings are not tied can be parametrized by mup."""

    def accepts(family: str) -> bool:
        try:
            GPTConfig(**{**dataclasses.asdict(SMALL), **FAMILIES[family], **MUP, "attention_scale": None, "N": 12})
        except ValueError:
            return False
        return True

    scaled = {"gemma", "gemma2", "gemma3", "dense_lm"}  # embeddings
    with_experts = {family for family, keys in FAMILIES.items() if keys.get("experts") is not None}
    refused = {*scaled, *with_experts, "qwen3_5", "vq"}  # the gated delta rule, gated units
    assert {family for family in FAMILIES if accepts(family)} == set(FAMILIES) - refused


SMALL = GPTConfig(48, 101, 3, 24, 0.0, 2)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"tied": True}, "tied: false, got true"),
        ({"scale_embedding": True}, "scale_embedding: false, got true"),
        ({"scale_output": True}, "scale_output: false, got true"),
        ({"attention_scale": "sqrt"}, "attention_scale: linear, got sqrt"),
        ({"mup_base_width": None}, "needs mup_base_width"),
        ({"mup_base_width": 0}, "mup_base_width must be at least 1"),
        ({"parametrization": "standard"}, "mup_base_width must be null"),
        ({"parametrization": "sp"}, "parametrization must be one of standard, mup, mup_absolute"),
    ],
)
def test_what_does_not_fit_is_refused(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        dataclasses.replace(CONFIG, **changes)
