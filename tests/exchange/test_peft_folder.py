"""Adapters beside peft in PyTorch: the same losses over a training, from the same folder of adapters."""

import dataclasses
import json
import os
import re
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

import zero
from tests.helpers import llama
from zero.base.errors import UserError
from zero.exchange.architecture_table import ARCHITECTURES
from zero.exchange.peft_folder import alpha_of, check_adapter_keys, peft_adapters, read_peft, write_peft
from zero.exchange.warm_start import warm_start
from zero.models.adapters import PRODUCTS, Adapters
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
    programs = make_programs(model, adamw(DECAY), StepOptions(lambda step: jnp.float32(RATE)), devices)
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
