"""Tensors of all experts of a layer, and those of single experts that they stand for."""

from pathlib import Path

import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file

from zero.exchange.architecture_table import ARCHITECTURES
from zero.exchange.joint_experts import joined, names_within, separated
from zero.exchange.stored_tensor import StoredTensor


def test_experts_are_separated_and_joined(tmp_path: Path) -> None:
    """Each expert's gate comes before its input; what is no joint tensor stays."""
    joint = ARCHITECTURES["qwen3_5_moe_text"].joint_experts
    rng = np.random.default_rng(0)
    block = "layers.0.mlp"
    written = {
        f"{block}.experts.gate_up_proj": rng.normal(size=(3, 10, 4)).astype(np.float32),
        f"{block}.experts.down_proj": rng.normal(size=(3, 4, 5)).astype(np.float32),
        f"{block}.shared_expert.down_proj.weight": rng.normal(size=(4, 7)).astype(np.float32),
    }
    save_file(written, tmp_path / "x.safetensors")
    with safe_open(tmp_path / "x.safetensors", "numpy") as file:
        stored = {name: StoredTensor(tmp_path, file, name) for name in written}
        alone = separated(stored, joint)
        arrays = {name: tensor[:] for name, tensor in alone.items()}
        assert {name: tuple(tensor.get_shape()) for name, tensor in alone.items()} == {
            name: x.shape for name, x in arrays.items()
        }
        first_rows = alone[f"{block}.experts.2.up_proj.weight"][:2]
    gate_up, down = written[f"{block}.experts.gate_up_proj"], written[f"{block}.experts.down_proj"]
    np.testing.assert_array_equal(arrays[f"{block}.experts.1.gate_proj.weight"], gate_up[1, :5])
    np.testing.assert_array_equal(arrays[f"{block}.experts.2.up_proj.weight"], gate_up[2, 5:])
    np.testing.assert_array_equal(first_rows, gate_up[2, 5:7])
    np.testing.assert_array_equal(arrays[f"{block}.experts.0.down_proj.weight"], down[0])
    for name, x in written.items():
        parts = names_within(name, arrays, joint)
        np.testing.assert_array_equal(joined(name, {part: arrays.pop(part) for part in parts}, joint), x)
    assert not arrays
