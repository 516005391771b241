"""Tensors that hold the weights of all experts of a layer, beside tensors of each expert and module.

Published folders of Qwen 3.5 have the former, and transformers writes the latter. `joint` maps the end of the name of
a joint tensor, such as "experts.gate_up_proj", to the modules that it joins.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from zero.exchange.stored_tensor import Stored


class OfExpert:
    """One module of one expert, `(outputs, inputs)`: a part of the outputs of an entry of a joint tensor.

    Attributes:
      joint: `(experts, outputs of all modules, inputs)`.
      expert: the number of the expert.
      part, parts: the number of the module, and how many the tensor joins, which have as many outputs each.
    """

    def __init__(self, joint: Stored, expert: int, part: int, parts: int) -> None:
        self._joint = joint
        self._expert = expert
        self._outputs = joint.get_shape()[1] // parts
        self._first = part * self._outputs

    def get_shape(self) -> list[int]:
        """See `Stored`."""
        return [self._outputs, self._joint.get_shape()[2]]

    def get_dtype(self) -> str:
        """See `Stored`."""
        return self._joint.get_dtype()

    def __getitem__(self, index: Any) -> np.ndarray:
        """See `Stored`."""
        product: np.ndarray = self._joint[self._expert, self._first : self._first + self._outputs]
        return np.asarray(product[index])


Joint = Mapping[str, tuple[str, ...]]


def separated(tensors: Mapping[str, Stored], joint: Joint) -> dict[str, Stored]:
    """Unread tensors by name, in which those of single experts stand for each joint tensor."""
    expert_arrays: dict[str, Stored] = {}
    for name, tensor in tensors.items():
        modules = _modules(name, joint)
        shape = tensor.get_shape()
        if not modules or len(shape) != 3:
            expert_arrays[name] = tensor
            continue
        for expert in range(shape[0]):
            for part, module in enumerate(modules):
                expert_arrays[_name(name, expert, module)] = OfExpert(tensor, expert, part, len(modules))
    return expert_arrays


def joined(name: str, tensors: Mapping[str, np.ndarray], joint: Joint) -> np.ndarray:
    """The inverse of `separated` for one joint tensor, from those of its experts; the tensor itself if it is none."""
    modules = _modules(name, joint)
    if not modules:
        return tensors[name]
    count = len(names_within(name, tensors, joint)) // len(modules)
    expert_arrays = [[tensors[_name(name, expert, module)] for module in modules] for expert in range(count)]
    return np.stack([np.concatenate(expert_names) for expert_names in expert_arrays])


def names_within(name: str, names: Collection[str], joint: Joint) -> list[str]:
    """The names among `names` whose tensors a tensor holds: its own, or those of experts.

    >>> joint = {"experts.down_proj": ("down_proj",)}
    >>> names = ["experts.0.down_proj.weight", "experts.1.down_proj.weight", "norm.weight"]
    >>> names_within("experts.down_proj", names, joint), names_within("norm.weight", names, joint)
    (['experts.0.down_proj.weight', 'experts.1.down_proj.weight'], ['norm.weight'])
    """
    modules = _modules(name, joint)
    if not modules:
        return [name] if name in names else []
    found: list[str] = []
    for expert in itertools.count():
        expert_names = [_name(name, expert, module) for module in modules]
        if expert_names[0] not in names:
            return found
        found += expert_names
    return found


def _modules(name: str, joint: Joint) -> tuple[str, ...]:
    """The modules of the experts in the joint tensor of this name; empty if it is none."""
    return next((modules for end, modules in joint.items() if name.endswith(end)), ())


def _name(joint_name: str, expert: int, module: str) -> str:
    return f"{joint_name.rpartition('.')[0]}.{expert}.{module}.weight"
