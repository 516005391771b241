"""What the trainer needs beside `import zero`: groups of devices on the pmap axis, and the entries of a layout."""

from zero.partition.collectives.axis import Axis
from zero.partition.collectives.expert_group import ExpertGroup
from zero.partition.collectives.tensor_group import TensorGroup
from zero.partition.layout import LeafLayout, Split, make_grouped_layout

__all__ = ["Axis", "ExpertGroup", "LeafLayout", "Split", "TensorGroup", "make_grouped_layout"]
