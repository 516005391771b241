"""Whole steps with the codebook of vector-quantized keys: one state of the run, the same on any devices."""

import dataclasses
from functools import cache, partial
from typing import Any

import jax
import numpy as np
import pytest

import zero
from tests.training.small_gpt import (
    ROWS,
    VQ,
    Run,
    Setup,
    advance,
    assert_close,
    assert_first_weights,
    batch,
    bits,
    run_on,
    setup,
    tokens,
)
from zero.inference.generate import generate
from zero.models.codebook import METRICS, codebook_metrics
from zero.models.gated_unit import CODEBOOK
from zero.models.gpt import GPT
from zero.training.host_rows import split_rows
from zero.training.inference import Sampling
from zero.training.programs import make_inference

CONFIG = dataclasses.replace(VQ, dropout=0.0)


def codebook(state: Any) -> dict[str, np.ndarray]:
    """Of the first device; all must have the same."""
    held = state.averages[CODEBOOK]
    zero.check_replicated(held, "zero", devices=jax.devices()[: len(jax.tree.leaves(held)[0])])
    flat = jax.tree_util.tree_leaves_with_path(held)
    return {jax.tree_util.keystr(path): np.asarray(x)[0] for path, x in flat}


@cache
def on_one_device() -> Run:
    return run_on(setup(1, 3, config=CONFIG))


@pytest.mark.slow  # its short forms are test_choices_of_transformer_vq and test_keys_count_once
@pytest.mark.parametrize(
    ("devices", "stage", "options"),
    [
        (8, 3, {}),
        (8, 1, {"micro_batches": 3}),
        (3, 2, {}),
        (8, 0, {}),
        (8, 2, {"remat": "nested"}),
        (1, 3, {"remat": "none", "micro_batches": 2}),
    ],
)
def test_codebook_is_the_same_everywhere(devices: int, stage: int, options: dict[str, Any]) -> None:
    """The codebook is the same at every stage, on any number of devices."""
    expected = on_one_device()
    got = run_on(setup(devices, stage, config=CONFIG, **options))
    assert_close(got, expected, 1e-4, CONFIG)
    for name, x in codebook(expected.state).items():
        np.testing.assert_allclose(codebook(got.state)[name], x, rtol=1e-4, atol=1e-5, err_msg=name)


CUT = dataclasses.replace(VQ, embedding_dim=48, block_size=16)


@cache
def in_groups(tensor: int, stage: int = 3, **options: Any) -> Run:
    axis = zero.Axis.with_tensor_groups("zero", 8, tensor, replicas=1 if stage else 8 // tensor)
    data = partial(tokens, context=CUT.block_size)
    return run_on(setup(8, stage, config=CUT, axis=axis, **options), data=data)


@pytest.mark.slow  # its short form is test_choices_of_transformer_vq
@pytest.mark.parametrize(
    ("tensor", "stage", "options"),
    [(4, 3, {}), (2, 3, {}), (8, 2, {}), (2, 1, {"micro_batches": 3}), (4, 0, {}), (4, 3, {"remat": "nested"})],
)
def test_tensor_groups_train_alike(tensor: int, stage: int, options: dict[str, Any]) -> None:
    """Groups that share the values of a unit have the losses of single devices, and count each key once."""
    expected, got = in_groups(1), in_groups(tensor, stage, **options)
    np.testing.assert_allclose(got.metrics["loss"], expected.metrics["loss"], rtol=1e-6)
    assert_close(got, expected, 1e-4, CUT)
    for name, x in codebook(expected.state).items():
        if name.endswith("['counts']"):
            np.testing.assert_array_equal(codebook(got.state)[name], x, err_msg=name)
        np.testing.assert_allclose(codebook(got.state)[name], x, rtol=1e-4, atol=1e-5, err_msg=name)


CHOICES = dataclasses.replace(
    CUT,
    tied=False,
    final_norm=False,
    init="fan_in",
    output_scale=0.5,
    positions="sinusoidal",
    distance_base=100.0,
    distance_dropout=0.3,
    layer_dropout=0.3,
    commitment=1e-3,
    codebook_decay=0.9,
)


@pytest.mark.wide  # test_updates_by_part.py has them, test_keys_count_once the codes of several devices
def test_choices_of_transformer_vq() -> None:
    """Its dropouts, positions, initializers and scales train alike on one device and, in micro-batches, in groups."""
    data = partial(tokens, context=CUT.block_size)
    expected = run_on(setup(1, 3, config=CHOICES), data=data)
    axis = zero.Axis.with_tensor_groups("zero", 8, 4)
    got = run_on(setup(8, 3, 3, config=CHOICES, axis=axis), data=data)
    np.testing.assert_allclose(got.metrics["loss"], expected.metrics["loss"], rtol=1e-6)
    for name in METRICS:
        np.testing.assert_allclose(got.metrics[name], expected.metrics[name], rtol=1e-4, err_msg=name)
    assert_close(got, expected, 1e-4, CHOICES)
    for name, x in codebook(expected.state).items():
        np.testing.assert_allclose(codebook(got.state)[name], x, rtol=1e-4, atol=1e-5, err_msg=name)


@pytest.mark.wide
def test_first_weights() -> None:
    """New weights and codes are those of the model on one device."""
    assert_first_weights(setup(8, 1, 3, config=CONFIG))


def test_metrics_of_a_codebook() -> None:
    """By hand: four codes, of which one is unused and the others have their keys, or half of their norm."""
    counts, norm = np.asarray([[2.0, 1.0, 1.0, 0.04]], np.float32), 4**0.25
    codes = np.zeros((1, 4, 4), np.float32)
    codes[0, range(4), range(4)] = np.asarray([norm, norm, norm / 2, norm])
    unit = {"counts": counts, "sums": codes * counts[..., None]}
    found = {name: float(x) for name, x in codebook_metrics({"blocks": {"unit_0": unit}}).items()}
    shares = counts[0] / counts.sum()
    entropy = -(shares * np.log(shares)).sum()
    error = np.sqrt(shares[2] * 0.75)
    expected = dict(zip(METRICS, (entropy, np.exp(entropy), 0.25, error), strict=True))
    assert found == pytest.approx(expected, rel=1e-5)


def whole(on: Setup, weights: Any) -> dict[str, Any]:
    """Parameters and codebook for the model on one device."""
    params, books = on.model.split(weights)
    tree = jax.tree_util.tree_unflatten(on.model.layout.treedef, [*on.whole(params, on.model.layout).values()])
    return {"params": tree, CODEBOOK: jax.tree.map(lambda x: x[0], books[CODEBOOK])}


def assert_greedy(on: Setup, weights: Any, prompts: list[np.ndarray], count: int, chunk: int) -> None:
    """Text drawn by the most likely token is that of whole forward passes on one device."""
    inference = make_inference(on.model, Sampling(temperature=0), devices=on.devices)
    *_, texts = generate(inference, weights, prompts, count, seed=0, chunk=chunk)
    variables, config = whole(on, weights), on.model.config
    hidden = jax.jit(partial(GPT(config).apply, method="hidden"))(variables, texts, None)[0]
    table = np.asarray(variables["params"]["vocabulary"]["table"]).reshape(-1, config.embedding_dim)
    best = (np.asarray(hidden) @ table.T)[..., : config.vocab_size].argmax(-1)
    for row, prompt in enumerate(prompts):
        drawn = slice(len(prompt), len(prompt) + count)
        np.testing.assert_array_equal(texts[row, drawn], best[row, len(prompt) - 1 : len(prompt) + count - 1])


@pytest.mark.wide  # test_gated_unit.py has the state, test_step_tensor_groups.py text of groups
def test_text_of_tensor_groups() -> None:
    """Greedy text of groups is that of one device, decoded with a part of the memory on each, of constant size."""
    on = setup(8, 3, config=CUT, axis=zero.Axis.with_tensor_groups("zero", 8, 4, replicas=1))
    rows = np.maximum(tokens(0, 13)[:8], 0)
    assert_greedy(on, on.first_weights(), [row[: 3 + i] for i, row in enumerate(rows[:3])], 21, chunk=7)


@pytest.mark.wide
def test_scores_of_tensor_groups() -> None:
    on = setup(8, 3, config=CUT, axis=zero.Axis.with_tensor_groups("zero", 8, 4, replicas=1))
    weights, rows = on.first_weights(), np.maximum(tokens(0, 13)[:8], 0)
    losses, _ = make_inference(on.model, devices=on.devices).score(weights, split_rows(rows, on.model.axis))
    apply: Any = jax.jit(GPT(CUT).apply)
    expected = apply(whole(on, weights), rows, np.roll(rows, -1, axis=1))
    np.testing.assert_allclose(losses, expected[:, :-1], rtol=1e-5)


@pytest.mark.parametrize(
    ("devices", "stage", "micro_batches"),
    [(3, 3, 2), pytest.param(1, 3, 1, marks=pytest.mark.wide), pytest.param(8, 1, 3, marks=pytest.mark.wide)],
)
def test_keys_count_once(devices: int, stage: int, micro_batches: int) -> None:
    """Each key of the global batch counts once."""
    on = setup(devices, stage, micro_batches, config=CONFIG)
    state = on.start()
    params, before = on.whole(state.params, on.model.layout), codebook(state)
    (after,) = [codebook(advance(on, state, range(1))[0])]
    found = {name: (after[name] - 0.99 * before[name]) / 0.01 for name in after}
    for unit in ("unit_0", "unit_1"):
        counts = found[f"['blocks']['{unit}']['counts']"]
        np.testing.assert_allclose(counts.sum(-1), ROWS * 12, rtol=1e-4)

    # Of the first unit the keys follow from the tokens alone.
    def rms(x: np.ndarray) -> np.ndarray:
        return x / np.sqrt(np.square(x).mean(-1, keepdims=True) + CONFIG.norm_epsilon)

    rows = tokens(0)
    table = params["vocabulary/table"].reshape(-1, CONFIG.embedding_dim)
    h = rms(table[np.maximum(rows, ~rows)]) * params["blocks/unit_0/norm/scale"][0]
    keys = (rms(h @ params["blocks/unit_0/key/kernel"][0]) * CONFIG.key_width**-0.25).reshape(-1, CONFIG.key_width)
    codes = before["['blocks']['unit_0']['sums']"][0]  # of counts of 1
    is_code = np.square(keys[:, None] - codes).sum(-1).argmin(-1)[:, None] == np.arange(CONFIG.codes)
    np.testing.assert_allclose(found["['blocks']['unit_0']['counts']"][0], is_code.sum(0), atol=2e-2)
    np.testing.assert_allclose(found["['blocks']['unit_0']['sums']"][0], is_code.T @ keys, atol=2e-2)


def test_reported_loss_is_without_the_commitment() -> None:
    on = setup(3, 3, 2, config=CONFIG)
    state = on.start()
    losses, scored, _ = on.programs.evaluate(on.weights(state), batch(on, 0).tokens)
    _, (metrics,) = advance(on, state, range(1))
    np.testing.assert_allclose(metrics["loss"], losses.item() / scored.item(), rtol=1e-6)


@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_skipped_step_keeps_codebook(poison: float) -> None:
    """A skipped step leaves the codebook as it was."""
    on = setup(3, 3, 2, config=CONFIG)
    state = on.start()
    sick = {**state.params, "norm": {"scale": state.params["norm"]["scale"] * poison}}
    before = bits(state.averages[CODEBOOK])
    state, metrics = on.programs.step(state._replace(params=sick), batch(on, 0))
    assert metrics["skipped_steps"].item() == 1
    for got, x in zip(bits(state.averages[CODEBOOK]), before, strict=True):
        np.testing.assert_array_equal(got, x)


def test_codebook_is_no_parameter() -> None:
    """The codebook is not a parameter, and the optimizer does not see it."""
    names = [leaf.name for leaf in setup(8, 3, config=CONFIG).layout.leaves]
    assert [name for name in names if "counts" in name or "sums" in name] == [
        f"averages/codebook/blocks/unit_{unit}/{name}" for unit in range(2) for name in ("counts", "sums")
    ]
    assert not any("codebook" in leaf.name for leaf in setup(8, 3).layout.leaves)


def test_fused_update_is_refused() -> None:
    with pytest.raises(ValueError, match="does not sum what codebook needs"):
        setup(8, 3, config=CONFIG, fused_update=True)


@pytest.mark.slow
def test_units_without_codes() -> None:
    """Gated units without a codebook train alike at every stage."""
    config = dataclasses.replace(CONFIG, codes=0, vq_block=6)
    assert_close(run_on(setup(8, 3, config=config)), run_on(setup(1, 0, config=config)), 1e-4, config)


@pytest.mark.wide
def test_sampling_with_constant_state() -> None:
    """Text drawn with a state of constant size equals text drawn by whole forward passes."""
    on = setup(8, 1, 3, config=CONFIG)
    weights = on.weights(advance(on, on.start(), range(2))[0])
    prompts = [np.arange(1, 2 + row % 5, dtype=np.int32) for row in range(8)]
    assert_greedy(on, weights, prompts, 21, chunk=7)  # longer than block_size
