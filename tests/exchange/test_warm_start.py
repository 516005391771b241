"""Weights from a run or a folder for a model that may be deeper; whatever else does not fit is refused."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.exchange.random_weights import LEARNED, model_of, params, save, whole
from zero.base.errors import UserError
from zero.exchange.export import export
from zero.exchange.warm_start import repeated_layers, warm_start


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("run")
    save(place, LEARNED, 0)
    return place


def test_deeper_model_repeats_blocks(run: Path, tmp_path: Path) -> None:
    export(str(run), tmp_path / "hf")
    for place, order in ((run, [0, 0, 1, 1, 2, 2]), (tmp_path / "hf", [0, 0, 1, 2])):
        model = model_of(dataclasses.replace(LEARNED, N=len(order)))
        grown = whole(warm_start(str(place), model), model)
        for name in ("query", "mlp_out"):
            before = params(LEARNED)["blocks"][name]["kernel"]
            np.testing.assert_array_equal(grown["blocks"][name]["kernel"], before[np.array(order)])
        np.testing.assert_array_equal(grown["positions"]["table"], params(LEARNED)["positions"]["table"])
    assert repeated_layers(3, 9, "") == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert repeated_layers(6, 8, "") == [0, 0, 1, 2, 3, 3, 4, 5]


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"embedding_dim": 45}, r"leaf params/\S+: holds .*42.*, this run expects .*45"),
        ({"num_head": 6}, "num_head is 3, this run expects 6"),
        ({"norm_epsilon": 1e-6}, "norm_epsilon is 0.0001, this run expects 1e-06"),
        ({"N": 2}, "N=3 layers cannot be grown to N=2, only to a multiple or to 4/3 of 3"),
        ({"N": 5}, "N=3 layers cannot be grown to N=5"),
        ({"block_size": 256}, r"leaf params/positions/table: holds \(128, 42\), this run expects \(256, 42\)"),
        ({"alibi_attn": True}, "leaf params/positions/table: holds .*, this run expects nothing"),
    ],
    ids=str,
)
def test_misfits_are_refused(change: dict[str, Any], line: str, run: Path) -> None:
    """Weights that do not fit are refused in one line."""
    with pytest.raises(UserError, match=line) as caught:
        warm_start(str(run), model_of(dataclasses.replace(LEARNED, **change)))
    assert str(caught.value).startswith(str(run)) or str(run) in str(caught.value)
    assert "\n" not in str(caught.value)
