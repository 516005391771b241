"""The table beside published steps is printed from its rows, and their steps are those that a plan accepts."""

import math
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from benchmarks import published
from benchmarks.published import PAGE, RECIPES, START, Row
from benchmarks.recipe_sources import with_part
from benchmarks.recipes import Digests
from zero.costs.hlo import Instruction
from zero.costs.live_arrays import LiveArray, LiveArrays, Place
from zero.costs.predict import CORE, Event, Prediction, TimedPart, Timeline
from zero.costs.topology import find_devices, slice_shape, slices_in
from zero.job.job import make_job, place_model
from zero.models.config import GPTConfig
from zero.models.gpt import GPT
from zero.training.activations import kinds_on_host

# Parameters in billions, as each recipe's model is named or its authors count them.
BILLIONS = {
    "8b": 8.03,
    "7b": 7.24,
    "70b": 70.6,
    "405b": 405.9,
    "175b": 174.6,
    "12b": 11.77,
    "8x7b": 46.7,
    "8x22b": 140.6,
    "671b": 671.03,
    "235b": 235.09,
}


def parameters_of(size: GPTConfig) -> int:
    initialize = partial(GPT(size).init, method="hidden")
    shapes = jax.eval_shape(initialize, jax.random.key(0), jnp.zeros((1, 8), int), None)
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes["params"]))


# Each kind of model, and slices of each size; the others are as these, and wide.
SOME = {"llama3-8b-v6e-8", "llama3-70b-v6e-128", "llama2-70b-v6e-256", "llama3-405b-2xv6e-256"}
SOME |= {"gpt3-175b-v6e-256", "gemma3-12b-v6e-256", "mixtral-8x7b-v6e-256"}


def cells(names: Iterable[str]) -> list[Any]:
    return [pytest.param(name, marks=() if name in SOME else pytest.mark.wide) for name in names]


@pytest.mark.parametrize("name", cells(RECIPES))
def test_requests(name: str) -> None:
    """A published step is one that a plan accepts, on a slice that exists."""
    recipe = RECIPES[name]
    assert slice_shape(slices_in(recipe.topology)[1])
    size = published.size_of(recipe)
    billions = 68.98 if name.startswith("llama2-70b") else BILLIONS[name.split("-")[1]]
    assert parameters_of(size) / 1e9 == pytest.approx(billions, rel=2e-3)
    assert recipe.context <= size.block_size
    request = published.request_of(recipe)
    assert [*request.config.zero.mistakes_beside(request.config, request.size, str(request.config.model))] == []


BOTH = ("layer_input", "attention")
WITH_HOST = {  # what is stored, and which kinds of it lie in the host's memory
    "mistral-7b-v6e-8": ("attention", BOTH),
    "llama3-70b-v6e-32": ("full", ("layer_input",)),
    "llama3-70b-v6e-64": ("mlp_in", ("layer_input", "mlp_in")),
    "llama3-70b-v6e-128": ("attention", BOTH),
    "llama3-70b-v6e-256": ("attention", BOTH),
    "llama3-405b-2xv6e-256": ("attention", BOTH),
    "llama3-405b-tpu7x-256": ("full", ("layer_input",)),
    "gpt3-175b-v6e-256": ("mlp", ("layer_input", "mlp_in")),
    "gemma3-12b-v6e-256": ("attention", ("layer_input",)),
    "gemma3-12b-2xv6e-256": ("attention", ("layer_input",)),
    "gemma3-12b-4xv6e-256": ("attention", ("layer_input",)),
    "mixtral-8x7b-v6e-256": ("attention", BOTH),
    "mixtral-8x22b-v6e-256": ("full", ("layer_input",)),
    "deepseek3-671b-tpu7x-128": ("full", ("layer_input",)),
}


@pytest.mark.parametrize("name", cells(published.load_rows()))
def test_what_is_stored(name: str) -> None:
    """`zero.remat=auto` takes what the row records, and with the host's memory what has the fewest seconds."""
    pytest.importorskip("libtpu")
    recipe, request = RECIPES[name], published.request_of(RECIPES[name])
    model = make_job(
        request.config, place_model(request.config, request.size, find_devices(recipe.topology), request.rows)
    ).model
    recorded = published.load_rows()[name].remat, ()
    assert (model.remat, kinds_on_host(model)) == WITH_HOST.get(name, recorded)


def test_page_is_printed_from_the_rows() -> None:
    page = PAGE.read_text()
    assert START in page
    assert page == with_part(page, published.page_part(published.load_rows()), START)


def test_rows() -> None:
    row = Row(Digests("a", "b", "c"), "full", 3 * 2**30, 16 * 2**30, 3.2, 0.0625, 0.5123)
    assert published.table_row("llama3-8b-v6e-16", row) == (
        "| llama3-8b | v6e-16 | 3 x 8,192 | 3.393 | `zero.remat=full` | 3.00 | 3.200 | 51 % | 0.062 | 0.94"
        " |  |  |  |  |\n"
    )
    beside_maxtext = published.table_row("llama3-8b-v6e-16", row, maxtext=(3.7323, 0.2))
    assert beside_maxtext.endswith("| 0.94 | 3.732 | 1.10 | 0.86 | 0.91 |\n")
    misfit = published.table_row("llama3-8b-v6e-16", replace(row, seconds=None))
    assert misfit.endswith("| 3.00 | does not fit in 16.00 GiB |  |  |  |  |  |  |  |\n")


def test_longest_waits() -> None:
    """Waits for one transfer are summed over the iterations of a loop; short ones are left out."""
    part = TimedPart("gathers", "forward")
    start = Instruction("all-gather-start.1", "", "all-gather-start", ', metadata={op_name="step/all_gather"}')
    done = Instruction("all-gather-done.1", "", "all-gather-done", "")
    body = [Event(CORE, 0.0, 0.5, done, part, waits_for=start), Event(CORE, 0.5, 1.0, done, part)]
    short = Event(CORE, 15.0, 0.001, done, part, waits_for=start._replace(name="all-gather-start.2"))
    events = {"main": [Event(CORE, 0.0, 15.0, done, part, calls="body", times=10), short], "body": body}
    predicted = Prediction(15.001, {}, 5.001, 0.0, timeline=Timeline("main", events))
    assert published.longest_waits(predicted) == [(5.0, "all-gather-start.1 of gathers, forward: step/all_gather")]


def test_largest_at_peak() -> None:
    """Arrays of one shape are counted together; what is not alive at the peak, or small, is left out."""
    large = Instruction("a", "bf16[8,4]{1,0:T(8,128)}", "fusion", "")
    arrays = [LiveArray(large, Place(0, 0, 2**28), 0, 4), LiveArray(large, Place(0, 2**28, 2**28), 2, 3)]
    arrays.append(LiveArray(Instruction("b", "(s32[], bf16[4])", "while", ""), Place(0, 2**29, 2**30), 3, 5))
    arrays.append(LiveArray(large, Place(0, 2**31, 2**27), 3, 3))
    arrays.append(LiveArray(large, Place(0, 2**31, 2**28), 5, 5))
    rows = published.largest_at_peak(LiveArrays(arrays, ["a", "b", "c", "d", "e", "f"]))
    assert rows == [(2**30, 1, "1.000 GiB of a tuple"), (2**29, 2, "bf16[8,4]")]


@pytest.mark.parametrize("options", [["--keys", "zero.remat=full"], ["--xla", "xla_jf_vliw_scheduler=false"]])
def test_a_row_is_that_of_its_recipe(
    options: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Keys and options of XLA without --schedule end the command before it compiles anything."""
    monkeypatch.setattr("sys.argv", ["published", "--rows", "llama3-8b-v6e-8", *options])
    with pytest.raises(SystemExit):
        published.main()
    assert "with --schedule" in capsys.readouterr().err
