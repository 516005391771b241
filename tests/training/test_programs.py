"""All programs of the trainer keep their collectives in order on virtual CPU devices, and pay nothing elsewhere."""

from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import jax
import jax.numpy as jnp
import pytest

import zero
from zero.models.config import GPTConfig
from zero.partition import pmapped
from zero.partition.collectives.axis import Axis
from zero.training import programs
from zero.training.optimizers.optimizer import adamw
from zero.training.parts import StepOptions
from zero.training.sharded_gpt import ShardedGPT

CONFIG = GPTConfig(embedding_dim=8, vocab_size=11, num_head=2, block_size=8, dropout=0.0, N=1)


def make(devices: Any = None) -> int:
    """How many programs there are."""
    model = ShardedGPT(CONFIG, Axis("batch", (1, 8)), 3)
    made = programs.make_programs(model, adamw(0.1, axes=model.axes), StepOptions(jnp.float32), devices)
    inference = programs.make_inference(model, devices=devices)
    return sum(callable(program) for program in (*made, *inference))


def test_programs_are_ordered_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """On CPU the collectives of every program are put in order."""
    in_order = Mock(side_effect=zero.in_order)
    monkeypatch.setattr(pmapped, "in_order", in_order)
    assert make() == in_order.call_count > 0


def test_programs_are_unordered_on_accelerators(monkeypatch: pytest.MonkeyPatch) -> None:
    """On an accelerator no program is put in order."""
    monkeypatch.setattr(pmapped, "in_order", lambda fn: pytest.fail("in_order on an accelerator"))
    monkeypatch.setattr(jax, "pmap", lambda fn, **_: fn)
    assert make([SimpleNamespace(platform="tpu", process_index=0)] * 8)
