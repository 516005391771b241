"""The parts of a model's configuration: each key has one owner, and a module reads only the parts that it names."""

import dataclasses
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest

from zero.models.axes import Role
from zero.models.config import GPTConfig, default_values
from zero.models.experts import Experts, Mixture
from zero.models.families import FAMILIES
from zero.models.gated_layer import OTHER_KEYS, OWN_KEYS
from zero.models.gated_unit import GatedUnit, GatedUnits
from zero.models.mixer import Transformer
from zero.models.mlp import MLP
from zero.models.norms import Norms, make_norm
from zero.models.parametrization import Initial
from zero.models.part import ConfigPart, Sizes, own_keys
from zero.models.positions import Positions
from zero.models.positions.learned import LearnedPositions
from zero.models.positions.sinusoidal import Sinusoidal, Sinusoids
from zero.models.transformer_layer import TransformerLayer
from zero.models.vocabulary import Chunk, HeadBias, Vocabulary, VocabularyChunk

SIZE: dict[str, Any] = {"embedding_dim": 12, "vocab_size": 31, "num_head": 2, "block_size": 8, "dropout": 0.0, "N": 2}
ROUTED = GPTConfig(**SIZE, **{**FAMILIES["mixtral"], "experts": 3, "kv_heads": 1, "qk_norm": True})
UNITS = GPTConfig(**{**SIZE, **FAMILIES["vq"], "codes": 4, "vq_block": 4, "key_width": 4})
X = jnp.ones((1, 4, 12))
TOKENS = jnp.zeros((1, 4), jnp.int32)
KEYS = {name for name, default in default_values().items() if default is not dataclasses.MISSING}


def part_of(config: GPTConfig, part: type[ConfigPart]) -> Any:
    """The part alone, without the keys of any other."""
    return part(**{field.name: getattr(config, field.name) for field in dataclasses.fields(part)})  # type: ignore[arg-type]


def parts() -> list[type[ConfigPart]]:
    return [part for part in GPTConfig.__mro__ if issubclass(part, ConfigPart) and part is not ConfigPart]


def test_each_key_has_one_owner() -> None:
    owners = [(field.name, part) for part in parts() for field in own_keys(part)]
    names = [name for name, _ in owners]
    assert len(names) == len(set(names))
    assert set(names) == {field.name for field in dataclasses.fields(GPTConfig)}
    assert max(len(own_keys(part)) for part in parts()) <= 11


DENSE = GPTConfig(**SIZE, **{**FAMILIES["llama"], "kv_heads": 1, "qk_norm": True})
# A module made with a configuration, the part that it names, a model, and the arguments of a call.
MODULES: dict[str, tuple[Any, type[ConfigPart], GPTConfig, tuple[Any, ...]]] = {
    "experts": (lambda config: partial(Experts(config, jnp.float32), drops=True), Mixture, ROUTED, (X, 0)),
    "unit": (lambda config: GatedUnit(config, jnp.float32), GatedUnits, UNITS, (X, None, 0, None)),
    "layer": (
        lambda config: TransformerLayer(config, jnp.float32), Transformer, DENSE, (((X, None), None), 0, None, 0),
    ),
    "norm": (lambda config: make_norm(config, jnp.float32, "norm"), Norms, DENSE, (X,)),
    "logits": (
        lambda config: VocabularyChunk(config, jnp.float32, 0.02, Role.HEAD), Vocabulary, DENSE,
        (None, Chunk(jnp.int32(0)), TOKENS, X),
    ),
    "bias": (HeadBias, Vocabulary, DENSE, ()),
    "learned": (LearnedPositions, Initial, DENSE, (X, 0)),
    "sinusoids": (Sinusoids, Sinusoidal, DENSE, (X, 0)),
}  # fmt: skip


@pytest.mark.parametrize("name", MODULES)
def test_a_module_reads_only_its_part(name: str) -> None:
    made, part, config, arguments = MODULES[name]

    class Around(nn.Module):
        config: Any

        @nn.compact
        def __call__(self) -> Any:
            return made(self.config)(*arguments)

    alone = part_of(config, part)
    assert len(dataclasses.fields(alone)) <= len(dataclasses.fields(GPTConfig)) - 12
    outputs = [jax.eval_shape(Around(model).init_with_output, jax.random.key(0)) for model in (alone, config)]
    assert outputs[0] == outputs[1]


def test_a_part_checks_itself() -> None:
    """Without a model around it: a value, a rule, and what follows from another key."""
    with pytest.raises(ValueError, match=r"activation must be one of gelu, .*, got 'tanh'"):
        MLP(**SIZE, activation="tanh")
    with pytest.raises(ValueError, match="activation: clamped_swiglu needs gated: true"):
        MLP(**SIZE, activation="clamped_swiglu")
    with pytest.raises(ValueError, match="positions 'rotary' need alibi_attn: false"):
        Positions(**SIZE, positions="rotary")
    with pytest.raises(ValueError, match="num_head must be at least 1, at most 2147483647, got 0"):
        Sizes(**{**SIZE, "num_head": 0})
    assert Initial(**SIZE, parametrization="mup", mup_base_width=4, tied=False).init == "fan_in"
    assert Sizes(**SIZE, windows=[4, 0]).windows == (4, 0)  # type: ignore[arg-type]  # as YAML has it


def test_a_key_of_other_layers_keeps_its_default() -> None:
    """Of each key that gated units do not have, and of each that only they have."""
    other: dict[str, Any] = {
        "zero_init": ("query",),
        "windows": (4,),
        "mixers": ("delta",),
        "extra_logit": True,
        "mup_base_width": 4,
    }
    other |= {
        "norm_place": "after",
        "qk_norm_over": "projection",
        "attention_scale": "none",
        "head_bias": True,
        "rotary_scaling": ("linear", 2.0),
    }
    checked = set()
    for field in dataclasses.fields(GPTConfig):
        if field.name not in KEYS or field.name in OTHER_KEYS:
            continue
        config = ROUTED if field.name in OWN_KEYS else UNITS
        value = other.get(field.name, not field.default if isinstance(field.default, bool) else 2)
        with pytest.raises(ValueError):
            dataclasses.replace(config, **{field.name: value})
        checked.add(field.name)
    assert {"windows", "experts", "rotary_base", "codes", "head_bias", "distance_base"} <= checked
