"""The step, compiled by the TPU's compiler for slices that are not here."""

from pathlib import Path

import jax.numpy as jnp
import pytest

from zero.models.gpt import GPTConfig
from zero.partition.collectives import Axis
from zero.runtime.configuration import load_sizes
from zero.training.step import ShardedGPT

pytest.importorskip("libtpu")
from jax.experimental import topologies

from benchmarks.tpu_memory import GIB, compile_step


def peak_bytes(config: GPTConfig, stage: int, topology: str, micro_batch: int) -> int:
    devices = topologies.get_topology_desc(topology_name=topology, platform="tpu").devices
    model = ShardedGPT(config, Axis("zero", (1, len(devices))), stage, jnp.bfloat16)
    compiled = compile_step(model, devices, micro_batch, config.block_size)
    return compiled.memory_analysis().peak_memory_in_bytes


@pytest.mark.timeout(300)
def test_gathering_layer_by_layer_needs_less_than_gathering_once():
    config = GPTConfig(256, 1001, 4, 128, 0.0, 8, vocab_chunks=3)
    once, by_layer = (peak_bytes(config, stage, "v3:2x2", 1) for stage in (1, 3))
    assert by_layer < once / 1.5, (by_layer, once)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("stage, gib", [(1, 5.3), (2, 3.4), (3, 1.5)])
def test_one_billion_parameters_on_32_v3_cores(stage: int, gib: float):
    sizes = load_sizes(Path(__file__).parents[2] / "conf/model_config.yaml")
    assert peak_bytes(sizes["1_1b"], stage, "v3:4x4", 4) <= gib * GIB
