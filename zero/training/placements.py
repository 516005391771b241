"""Which parameters of a GPT tensor groups cut and expert groups divide: the rules that `zero.make_layout` takes."""

from zero.models.adapters import LORA_A, LORA_B, MAGNITUDE
from zero.models.config import HEAD, VOCABULARY

_OUTPUTS = ("query", "key", "value", "key_value", "gate", "attention_gate", "output_gate", "mlp_in", "mlp_gate")
# By module: -1 cuts the output (its bias too), -2 the input; of an adapter the matrix on that side.
# The queries and keys of a gated unit stay whole.
_CUT_ALONG = {
    **dict.fromkeys(_OUTPUTS, -1),
    **dict.fromkeys(("attention_out", "mlp_out", VOCABULARY, HEAD), -2),
}
_WHOLE_IN_UNITS = ("query", "key")
_WHOLE_BESIDE_CUT = ((-2, "bias"), (-2, MAGNITUDE), (-2, LORA_B), (-1, LORA_A))


def tensor_dim(name: str) -> int | None:
    """The dimension of a parameter that tensor groups cut, counted from the last one; None for none.

    >>> tensor_dim("blocks/query/kernel"), tensor_dim("blocks/attention_out/bias")
    (-1, None)
    >>> tensor_dim("blocks/unit_1/query/kernel"), tensor_dim("blocks/unit_1/gate/kernel")
    (None, -1)
    """
    path = name.split("/")
    leaf = path[-1]
    module = path[-2] if len(path) > 1 else ""
    is_in_unit = len(path) > 2 and path[-3].startswith("unit_")
    if is_in_unit and module in _WHOLE_IN_UNITS:
        return None
    dim = _CUT_ALONG.get(module)
    return None if (dim, leaf) in _WHOLE_BESIDE_CUT else dim


def is_expert_leaf(name: str) -> bool:
    """Whether a parameter has a dimension of experts, the first one after the dimension of layers.

    >>> is_expert_leaf("blocks/experts/mlp_in/kernel"), is_expert_leaf("blocks/experts/router/kernel")
    (True, False)
    """
    return "experts" in name.split("/") and "router" not in name.split("/")
