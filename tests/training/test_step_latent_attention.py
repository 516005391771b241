"""Whole steps with latent attention in groups of devices, and text that they sample."""

import dataclasses
from functools import cache, partial
from typing import Any

import jax
import numpy as np
import pytest

import zero
from tests.training.small_gpt import CONFIG, SEED, Run, run_on, setup, tokens
from zero.inference.generate import generate
from zero.models.gpt import GPT
from zero.training.inference import Sampling
from zero.training.programs import make_inference

LATENT = dataclasses.replace(
    CONFIG, embedding_dim=48, num_head=8, block_size=16, dropout=0.0, alibi_attn=False, positions="rotary", norm="rms",
    qkv_bias=False, out_bias=False, mlp_bias=False, mlp_dim=64, head_dim=12, rotary_dim=4, rotary_interleaved=True,
    latent_dim=20, query_latent_dim=24, value_dim=8, embedding_norm=False,
)  # fmt: skip
AXES = {
    "alone": None,
    "tensor": zero.Axis.with_tensor_groups("zero", 8, 4),
    "context": zero.Axis("zero", (1, 8), context=2),
}


@cache
def trained(groups: str) -> Run:
    return run_on(setup(8, 3, config=LATENT, axis=AXES[groups]), data=partial(tokens, context=16))


@pytest.mark.parametrize(
    "groups", [pytest.param("tensor", marks=pytest.mark.wide), pytest.param("context", marks=pytest.mark.slow)]
)
def test_groups_train_as_devices_alone(groups: str) -> None:
    np.testing.assert_allclose(trained(groups).metrics["loss"], trained("alone").metrics["loss"], rtol=1e-5)
    norms = trained("alone").metrics["gradient_norm"]
    np.testing.assert_allclose(trained(groups).metrics["gradient_norm"], norms, rtol=1e-4)


@pytest.mark.wide  # tests/models/test_latent_attention.py has the model
@pytest.mark.parametrize("groups", ["alone", pytest.param("tensor", marks=pytest.mark.wide)])
def test_sampled_text_is_that_of_whole_passes(groups: str) -> None:
    """Each most likely token, drawn from stored latents, is that of a pass over the whole text on one device."""
    on = setup(8, 3, config=LATENT, axis=AXES[groups])
    weights = jax.tree.map(lambda x: 4 * x, on.first_weights())
    inference = make_inference(on.model, Sampling(temperature=0), devices=on.devices)
    prompts = [np.arange(3 + row % 2) * (row + 3) % 101 for row in range(8 if groups == "alone" else 2)]
    *_, texts = generate(inference, weights, prompts, 6, seed=SEED, chunk=3)
    tree: Any = jax.tree_util.tree_unflatten(on.model.layout.treedef, [*on.whole(weights, on.model.layout).values()])
    apply: Any = jax.jit(partial(GPT(LATENT).apply, method="logits"))
    for row, prompt in enumerate(prompts):
        for position in range(len(prompt), len(prompt) + 6):
            logits, _ = apply({"params": tree}, texts[row : row + 1], last=position - 1)
            assert texts[row, position] == logits.argmax()
