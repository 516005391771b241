"""The work of instructions, and their seconds before the compiler has counted cycles."""

from types import SimpleNamespace
from typing import Any

import pytest

from zero.costs import hlo
from zero.costs.predict import predict
from zero.costs.rates import RATES, Works
from zero.hosts.speeds import SPEEDS

SPEED, RATE = SPEEDS["TPU v5 lite"], RATES["TPU v5 lite"]
TEXT = """
%product (a: s8[4096,512], b: s8[512,256]) -> f32[4096,256] {
  %a = s8[4096,512]{1,0:T(8,128)(4,1)} parameter(0)
  %b = s8[512,256]{1,0:T(8,128)(4,1)} parameter(1)
  ROOT %y = f32[4096,256]{1,0:T(8,128)} convolution(%a, %b), dim_labels=bf_io->bf
}

%stack (p: bf16[8,64,1024], x: bf16[1,64,1024], i: s32[]) -> bf16[8,64,1024] {
  %p = bf16[8,64,1024]{2,1,0:T(8,128)(2,1)} parameter(0)
  %x = bf16[1,64,1024]{2,1,0:T(8,128)(2,1)} parameter(1)
  %i = s32[] parameter(2)
  ROOT %u = bf16[8,64,1024]{2,1,0:T(8,128)(2,1)} dynamic-update-slice(%p, %x, %i)
}

ENTRY %main (a: s8[4096,512], b: s8[512,256], p: bf16[8,64,1024], x: bf16[1,64,1024]) -> f32[4096,256] {
  %a = s8[4096,512]{1,0:T(8,128)(4,1)} parameter(0)
  %b = s8[512,256]{1,0:T(8,128)(4,1)S(1)} parameter(1)
  %p = bf16[8,64,1024]{2,1,0:T(8,128)(2,1)} parameter(2)
  %x = bf16[1,64,1024]{2,1,0:T(8,128)(2,1)} parameter(3)
  %i = s32[] constant(3)
  %stacked = bf16[8,64,1024]{2,1,0:T(8,128)(2,1)} fusion(%p, %x, %i), kind=kLoop, calls=%stack
  ROOT %y = f32[4096,256]{1,0:T(8,128)} fusion(%a, %b), kind=kOutput, calls=%product
}
"""


def chip(kind: str) -> list[Any]:
    return [SimpleNamespace(device_kind=kind, coords=(0, 0, 0), core_on_chip=0)]


def test_work() -> None:
    """Products by the dtype of their operands; of a stack in place the slice; bytes by the memory that holds them."""
    bodies, entry = hlo.computations(TEXT)
    results = {x.name: x.result for x in bodies[entry]}
    stacked, product = (Works(bodies).of(x, results) for x in bodies[entry][-2:])
    assert product.flops == {"int8": 2 * 4096 * 512 * 256}
    assert (product.hbm, product.vmem) == (4096 * 512 + 4 * 4096 * 256, 512 * 256)
    assert not stacked.flops and stacked.hbm == 2 * 2 * 64 * 1024 + 4  # read, written, and the index


def test_seconds_before_there_are_cycles() -> None:
    found = predict(TEXT, chip("TPU v5 lite"), is_whole=False)
    assert found is not None and predict(TEXT, chip("TPU v5 lite")) is None
    products = 2 * 4096 * 512 * 256 / (2 * SPEED.flops) / RATE.products
    memory = (4096 * 512 + 4 * 4096 * 256) / SPEED.memory / RATE.memory
    stack = (2 * 2 * 64 * 1024 + 4) / SPEED.memory / RATE.memory
    assert memory > products
    assert found.seconds == pytest.approx(memory + stack)
    assert predict(TEXT, chip("TPU v2"), is_whole=False) is None
