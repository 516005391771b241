"""A warm start makes the fresh parts of a model anew that its source does not hold, and says so in one line."""

import dataclasses
import logging
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from tests.exchange.random_weights import SIZES, assert_same, model_of, params, save, whole, without_padding
from zero.base.errors import UserError
from zero.exchange.export import export
from zero.exchange.warm_start import warm_start
from zero.partition.pmapped import pmap

SIZE = dataclasses.replace(SIZES["glm4_moe"], N=2, predictor=True)  # with experts whose router has a bias
MODEL = model_of(SIZE)
PARTS = ("predictor_blocks", "predictor_join", "predictor_norm")
SEED = 3


def new_weights(seed: int) -> Any:
    """Those of a new model with this seed."""
    init = pmap(lambda seed: MODEL.init(jax.random.key(seed)), MODEL.axis.name)
    return whole(init(np.full(jax.local_device_count(), seed, np.uint32)), MODEL)


@pytest.mark.parametrize("source", ["run", "folder"])
def test_fresh_parts_start_as_in_a_new_model(source: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """All else is the source's; without a seed, as for an evaluation, the source has to hold them."""
    caplog.set_level(logging.INFO)
    held = {name: tree for name, tree in params(SIZE).items() if name not in PARTS}
    held["router_bias"] = {"blocks": held["router_bias"]["blocks"]}
    save(tmp_path / "run", dataclasses.replace(SIZE, predictor=False), 0, values=held)
    if source == "folder":
        export(str(tmp_path / "run"), tmp_path / "folder")
    read = whole(warm_start(str(tmp_path / source), MODEL, seed=SEED), MODEL)
    expected = new_weights(SEED)
    assert_same({name: read[name] for name in PARTS}, {name: expected[name] for name in PARTS})
    assert_same(read["router_bias"]["predictor_blocks"], expected["router_bias"]["predictor_blocks"])
    others = {name: tree for name, tree in read.items() if name not in (*PARTS, "router_bias")}
    source_has = {name: tree for name, tree in held.items() if name != "router_bias"}
    assert_same(without_padding(others, SIZE), without_padding(source_has, SIZE))
    assert_same(read["router_bias"]["blocks"], held["router_bias"]["blocks"])
    (line,) = [line for line in caplog.messages if "holds no" in line]
    assert line.endswith(f": holds no {', '.join(PARTS)}, which starts with random weights")
    with pytest.raises(UserError, match=r"predictor_blocks.*: holds nothing|expected predictor: false"):
        warm_start(str(tmp_path / source), MODEL)


def test_a_part_that_is_held_is_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Nothing is made anew, and no line is written."""
    caplog.set_level(logging.INFO)
    held = params(SIZE)
    save(tmp_path / "run", SIZE, 0, values=held)
    assert_same(whole(warm_start(str(tmp_path / "run"), MODEL, seed=SEED), MODEL), held)
    assert "holds no" not in caplog.text
