"""Adapters beside peft in PyTorch: the same losses over a training, from the same folder of adapters."""

import dataclasses
import json
import os
import re
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

import zero
from tests.exchange.random_weights import SIZES, params, save, variables
from tests.exchange.small_models import logits_of_peft
from tests.helpers import llama
from zero.base.errors import UserError
from zero.exchange.architecture_table import ARCHITECTURES, architecture_of
from zero.exchange.export import export
from zero.exchange.peft_folder import alpha_of, check_adapter_keys, peft_adapters, read_peft, tensor_name, write_peft
from zero.exchange.warm_start import warm_start
from zero.models.adapters import Adapters, merged
from zero.models.collections import COLLECTIONS
from zero.models.gpt import GPT, parameter_axes
from zero.training.batch import Batch
from zero.training.optimizers.optimizer import adamw
from zero.training.parts import StepOptions
from zero.training.programs import make_programs
from zero.training.sharded_gpt import ShardedGPT
from zero.training.tuning import Tuning

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported

# peft asks transformers for a property that is deprecated there.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
CONTEXT, STEPS, RATE, DECAY = 24, 20, 1e-2, 0.1
PRODUCTS = ("query", "key", "value", "attention_out", "mlp_in", "mlp_gate", "mlp_out")
MODULES = ["q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "gate_proj", "down_proj"]


class Peft(NamedTuple):
    """A folder of transformers, one of PEFT with random adapters for it, and what PyTorch made of both."""

    base: Path
    adapters: Path
    losses: list[float]


def rows() -> np.ndarray:
    """The rows of each step `(steps, devices, rows, context)`."""
    return np.random.default_rng(0).integers(0, 300, (STEPS, 8, 1, CONTEXT), np.int32)


@pytest.fixture(scope="module", params=[pytest.param("lora", marks=pytest.mark.slow), "dora"])
def trained_by_peft(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Peft:
    import peft
    import torch
    import transformers

    place = tmp_path_factory.mktemp("peft")
    llama.save(place / "base", CONTEXT)
    auto: Any = transformers.AutoModelForCausalLM
    # A and B are random.
    options: dict[str, Any] = {"init_lora_weights": False, "use_dora": request.param == "dora"}
    config = peft.LoraConfig(r=4, lora_alpha=6, target_modules=MODULES, task_type="CAUSAL_LM", **options)
    torch.manual_seed(1)
    model = peft.get_peft_model(auto.from_pretrained(place / "base"), config)
    with torch.no_grad():
        for name, x in model.named_parameters():
            if "magnitude" in name:
                x.mul_(1 + 0.1 * torch.randn_like(x))
    model.save_pretrained(str(place / "adapters"))
    trained = [x for x in model.parameters() if x.requires_grad]
    groups: Any = [
        {"params": [x for x in trained if x.ndim > 1], "weight_decay": DECAY},
        {"params": [x for x in trained if x.ndim == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.95), eps=1e-8)
    losses = []
    for batch in rows():
        tokens = torch.tensor(batch.reshape(-1, CONTEXT)).long()
        loss = model(input_ids=tokens, labels=tokens).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return Peft(place / "base", place / "adapters", losses)


def test_losses_equal_peft(trained_by_peft: Peft) -> None:
    """Losses over 20 steps on 8 devices at stage 3 are those of peft, from the same adapters."""
    size = llama.size(CONTEXT)
    adapters = peft_adapters(trained_by_peft.adapters, size)
    assert (adapters.rank, adapters.alpha, adapters.targets) == (4, 6.0, PRODUCTS)
    model = ShardedGPT(size, zero.Axis("zero", (1, 8)), 3, tuning=Tuning(adapters))
    devices = tuple(jax.devices())
    programs = make_programs(model, adamw(DECAY, axes=model.axes), StepOptions(lambda step: jnp.float32(RATE)), devices)
    frozen = warm_start(str(trained_by_peft.base), model.base)
    state = programs.start(read_peft(trained_by_peft.adapters, model))
    losses = []
    for batch in rows():
        state, metrics = programs.step(state, Batch(batch, np.arange(8, dtype=np.int32)), frozen)
        losses.append(metrics["loss"].item())
    np.testing.assert_allclose(losses, trained_by_peft.losses, rtol=1e-4)
    assert np.ptp(losses) > 0.1


def test_tied_tables_have_a_copy(tmp_path: Path) -> None:
    """Tables that are trained whole, and are one, have both names, as PEFT writes and reads them."""
    table = np.random.default_rng(0).normal(size=(300, 48)).astype(np.float32)
    for is_tied in (False, True):
        size = dataclasses.replace(llama.size(CONTEXT), tied=is_tied)
        place = tmp_path / str(is_tied)
        place.mkdir()
        leaves = ["vocabulary/trained_table"]
        write_peft(place, lambda leaf: table, leaves, Adapters(4, 6.0), ARCHITECTURES["llama"], "base", size)
        tensors = load_file(place / "adapter_model.safetensors")
        names = ["model.embed_tokens", *(["lm_head"] if is_tied else [])]
        assert sorted(tensors) == sorted(f"base_model.model.{name}.weight" for name in names)
        assert all(np.array_equal(tensor, table) for tensor in tensors.values())
        assert json.loads((place / "adapter_config.json").read_text())["ensure_weight_tying"] is is_tied


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("init_lora_weights", kind) for kind in ("pissa", "pissa_niter_4", "olora", "corda", "loftq", "lora_ga")),
        ("alora_invocation_tokens", [5, 7]),
        ("target_parameters", ["mlp.experts.gate_up_proj"]),
        ("a_key_of_tomorrow", 0.5),
    ],
)
def test_other_adapters_are_refused(key: str, value: Any) -> None:
    """What is no plain LoRA, or unknown, is refused by name; every default of PEFT is read."""
    import peft

    plain = {**peft.LoraConfig(r=4, target_modules=MODULES).to_dict(), "init_lora_weights": "gaussian"}
    for name, default in plain.items():
        plain[name] = sorted(default) if isinstance(default, set) else default
    assert {field.name for field in dataclasses.fields(peft.LoraConfig)} - {"runtime_config"} <= set(plain)
    check_adapter_keys(Path("adapter_config.json"), plain)
    with pytest.raises(UserError, match=f"adapter_config.json: {key} is {re.escape(repr(value))}, expected"):
        check_adapter_keys(Path("adapter_config.json"), {**plain, key: value})


def test_rank_stabilised_scale() -> None:
    """The scale of rsLoRA is that of PEFT's own layer."""
    import peft
    import torch

    layer = torch.nn.Sequential(torch.nn.Linear(6, 5))
    config = peft.LoraConfig(r=9, lora_alpha=7, target_modules=["0"], use_rslora=True)
    model: Any = peft.get_peft_model(layer, config)
    (scale,) = model.base_model.model[0].scaling.values()
    assert alpha_of({"r": 9, "lora_alpha": 7, "use_rslora": True}) / 9 == pytest.approx(scale)


# Their first layers have an MLP where others have experts and one beside them.
ROUTED = ("glm4_moe", "deepseek_v3")


@pytest.mark.wide
@pytest.mark.parametrize("family", ROUTED)
def test_two_stacks_of_layers(family: str, tmp_path: Path) -> None:
    """Adapters of both stacks: peft computes with the folder what zero computes with the weights merged."""

    size = SIZES[family]
    save(tmp_path / "run", size, 0)
    export(str(tmp_path / "run"), tmp_path / "base")
    weights = params(size)
    adapters = Adapters(
        3, 6.0, targets=("query", "query_latent", "latent", "key_value", "key", "value", "attention_out")
    )
    rng = np.random.default_rng(0)
    trained = {name: tree for name, tree in weights.items() if name not in COLLECTIONS}
    shapes = adapters.shapes(trained, parameter_axes(size))
    own = jax.tree.map(lambda leaf: rng.normal(0, 0.3, leaf.shape).astype(np.float32), shapes)
    leaves = {
        jax.tree_util.keystr(path, simple=True, separator="/"): x
        for path, x in jax.tree_util.tree_leaves_with_path(own)
    }
    (tmp_path / "adapters").mkdir()
    architecture = ARCHITECTURES[family]
    with pytest.raises(UserError, match=r"mlp_in of \S+ beside its experts, and PEFT would take it for"):
        write_peft(
            tmp_path,
            lambda leaf: np.ones((1, 2, 2)),
            ["first_blocks/mlp_in/lora_a"],
            adapters,
            architecture,
            "base",
            size,
        )
    write_peft(tmp_path / "adapters", leaves.__getitem__, list(leaves), adapters, architecture, "base", size)
    read = peft_adapters(tmp_path / "adapters", size)
    assert ({*(read.targets or ())}, read.rank, read.alpha) == ({*own["blocks"], *own["first_blocks"]}, 3, 6.0)
    tokens = np.random.default_rng(1).integers(0, 101, (2, 24))
    expected = logits_of_peft(tmp_path / "base", tmp_path / "adapters", tokens)
    apply: Any = jax.jit(partial(GPT(size).apply, method="logits"))
    logits, _ = apply(variables(size, merged(weights, own, adapters)), tokens)
    plain, _ = apply(variables(size, weights), tokens)
    np.testing.assert_allclose(logits, expected, atol=1e-4, rtol=0)
    assert np.abs(plain - logits).max() > 0.1
    tuned = ShardedGPT(size, zero.Axis("zero", (1, 8)), 3, tuning=Tuning(read))
    shards = read_peft(tmp_path / "adapters", tuned)
    again = zero.to_host(shards, tuned.layout, tuned.axis)
    for name, x in leaves.items():
        stack, product, part = name.split("/")
        np.testing.assert_array_equal(again[stack][product][part], x)


def test_a_part_without_a_tensor_is_refused() -> None:
    """What adapters trained whole has a tensor in the folder, or the line names it."""
    architecture = architecture_of(SIZES["llama"])
    assert tensor_name("head/trained_table", architecture).endswith("lm_head.weight")
    with pytest.raises(UserError, match="score was trained whole beside the adapters, and llama has no tensor for it"):
        tensor_name("score/trained_kernel", architecture)
