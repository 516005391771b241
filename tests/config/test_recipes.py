"""The recipes of conf/recipe are right, and train at a tiny size; the commands of their page are right as well."""

import math
import re
import shlex
from pathlib import Path

import numpy as np
import pytest

from tests.config.composing import CONF, compose
from tests.helpers import cli
from zero.commands.modes import check
from zero.corpus.preparing.options import CorpusOptions
from zero.corpus.preparing.prepare import prepare
from zero.corpus.text.tokenizers import ByteTokenizer
from zero.exchange import zero_weights
from zero.exchange.checkpoint_weights import choose_steps, open_checkpoints
from zero.exchange.export import export
from zero.job.sizes import load_sizes
from zero.planning.config import PlanConfig

SIZES = load_sizes()
RECIPES = sorted(path.stem for path in (CONF / "recipe").glob("*.yaml") if path.stem != "common")
PAGE = CONF.resolve().parent / "docs" / "reference" / "from-other-code.md"
FEATURES = CONF.resolve().parent / "benchmarks" / "measured" / "features-of-other-code.md"
# The model of a recipe, made tiny; the rest of the recipe is as it is.
SMALL = (
    *("model.override.N=2", "model.override.vocab_size=257", "model.override.vocab_chunks=1"),
    *(f"model.override.block_size={cli.CONTEXT}", "data.tokenizer=bytes", "data.wandb_project=null"),
    *("training.total_steps=3", "training.warmup_steps=1", "training.gradient_accumulation_steps=1"),
    *("training.maximum_evaluation_steps=1", "training.sample_tokens=0", "distributed.cpu_devices=8"),
)
LONGER = ("data.index_path_train=longer/index/longer_train.index", "data.index_path_validation=null")
OWN = {
    "zero-transformer": ("model.override.embedding_dim=24", "model.override.num_head=3", "training.batch_size=8"),
    "mu-transformer": ("model.override.embedding_dim=16", "model.override.head_dim=8", "training.batch_size=8"),
    "transformer-vq": (
        *("model.override.embedding_dim=16", "model.override.key_width=8", "model.override.codes=4"),
        *("model.override.vq_block=8", "training.batch_size=8"),
        *("model.override.update_tokens=16", "training.total_steps=4"),
    ),
    "gpt-neo": ("model.override.embedding_dim=24", "model.override.num_head=3", "training.batch_size=8"),
    "lingvo": (
        *("model.override.embedding_dim=16", "model.override.num_head=8", "model.override.head_dim=4"),
        "model.override.mlp_dim=32",
    ),
}


@pytest.fixture(scope="module")
def workplace(workplace: Path) -> Path:
    """With a corpus whose rows have the target of the last position, as most recipes need them."""
    prepare(
        workplace / "text",
        "longer",
        CorpusOptions(ByteTokenizer(), cli.CONTEXT + 1, begin_rows=True),
        directory=workplace / "longer",
        index_directory=workplace / "longer" / "index",
        progress=False,
    )
    return workplace


def tiny(recipe: str) -> tuple[str, ...]:
    (own,) = (keys for name, keys in OWN.items() if recipe.startswith(name))
    files = () if recipe.startswith("lingvo") else LONGER  # Lingvo's rows are ones, of no file
    return (f"+recipe={recipe}", *SMALL, *files, *own)


@pytest.mark.parametrize("recipe", RECIPES)
def test_recipe_is_right(recipe: str) -> None:
    """A recipe is a right configuration, whose global batch divides over its slice, and names itself in its command."""
    config = check(compose(f"+recipe={recipe}", "mode=plan"), SIZES)
    assert isinstance(config, PlanConfig)
    devices = int(config.plan.topology.partition("-")[2])
    groups = devices // config.zero.tensor_shards
    rows = config.training.batch_size * devices // 8  # hosts of a v3 have 8 devices
    assert rows == groups * config.plan.micro_batch * config.training.gradient_accumulation_steps
    assert f"python main_zero.py +recipe={recipe}" in (CONF / "recipe" / f"{recipe}.yaml").read_text()
    assert f"`{recipe}`" in PAGE.read_text() or f"`-{recipe.rpartition('-')[2]}`" in PAGE.read_text()


QUICK = ("transformer-vq-enwik8",)


@pytest.mark.parametrize(
    "recipe",
    [pytest.param(name, marks=pytest.mark.wide if name in QUICK else pytest.mark.slow) for name in RECIPES],
)
def test_recipe_trains_tiny(recipe: str, forks: cli.Forks) -> None:
    """A recipe trains a few steps on eight devices, with its own optimizer, schedule and groups."""
    run = forks.train(recipe, *tiny(recipe))
    assert len(cli.losses(run)) == 1
    assert cli.losses(run, "step") == [4 if recipe.startswith("transformer-vq") else 3]


def weights_of(run: Path) -> dict[str, np.ndarray]:
    """The parameters in the newest checkpoint of a run, by their names."""
    with open_checkpoints(str(run)) as checkpoints:
        step = choose_steps(checkpoints, None)[-1]
        names = [name for name in checkpoints.meta(step)["shapes"] if name.startswith("params/")]
        return {name: checkpoints.read(step, name) for name in names}


@pytest.mark.slow
def test_the_760m_grows_from_the_mean_of_the_580m(forks: cli.Forks, monkeypatch: pytest.MonkeyPatch) -> None:
    """The two lines of the page: the mean of four checkpoints of the last fifth, whose first layer of three doubles."""
    mean_line, grown_line = re.findall(
        r"^(?:zero-weights average|python main_zero.py) .*MEAN.*$", PAGE.read_text(), re.M
    )
    last = (*("data.keep_every=1", "data.save_every=1", "training.total_steps=20"), "model.override.N=3")
    run = forks.train("RUN_580M", *tiny("zero-transformer-580m"), *last)
    monkeypatch.chdir(forks.workplace)
    monkeypatch.setattr("sys.argv", shlex.split(mean_line))
    zero_weights.main()
    each = []
    with open_checkpoints(str(run)) as checkpoints:
        for step in (17, 18, 19, 20):
            each.append(checkpoints.read(step, "params/blocks/mlp_in/kernel"))
    mean = weights_of(forks.workplace / "MEAN")
    np.testing.assert_allclose(mean["params/blocks/mlp_in/kernel"], np.mean(each, axis=0), atol=1e-7)
    assert not np.array_equal(each[0], each[-1])

    words = [word for word in shlex.split(grown_line) if "=" in word and "index_path" not in word]
    assert "+recipe=zero-transformer-760m" in words
    still = ("training.peak_learning_rate=1e-30", "training.end_learning_rate=1e-31", "model.override.N=4")
    grown = forks.train("grown", *words, *tiny("zero-transformer-760m")[1:], *still)
    for name, value in weights_of(grown).items():
        before = mean[name]
        np.testing.assert_array_equal(value, before[[0, 0, 1, 2]] if name.startswith("params/blocks/") else before)


def commands(page: Path) -> list[str]:
    """The commands of a page's tables that train."""
    found = re.findall(r"`python main_zero.py ([^`]*)`", page.read_text())
    return [command for command in found if "--" not in command and "mode=" not in command]


# Models of the rows, made tiny by keys before those of the command itself; N and the rest are the command's.
ROW = (
    *("data.corpus=synthetic", "data.tokenizer=bytes", "data.wandb_project=null", "data.max_context=null"),
    *("training.total_steps=2", "training.warmup_steps=1", "training.staged_warmup_steps=0", "training.batch_size=4"),
    *("training.gradient_accumulation_steps=1", "training.sample_tokens=0"),
    *("training.evaluation_frequency=2", "training.maximum_evaluation_steps=1", "training.log_frequency=1"),
    *("model.override.N=2", "model.override.embedding_dim=16", f"model.override.block_size={cli.CONTEXT}"),
    *("model.override.vocab_size=257", "model.override.vocab_chunks=1", "distributed.cpu_devices=2"),
)
HEADS = ("model.override.num_head=2",)
CODES = ("model.override.codes=4", "model.override.vq_block=8", "model.override.key_width=8")
EXPERTS = (*HEADS, "model.override.experts=4", "model.override.mlp_dim=16")
OF_SIZE = {"bytes_vq": CODES, "gshard_105b": EXPERTS}
AFTER = {  # what a row needs besides
    "training.total_steps=50": ("training.evaluation_frequency=50",),
    "training.warmup_steps=40000": ("training.warmup_steps=1", "training.total_steps=2"),
    "profile.steps=[20,25]": ("profile.steps=[1,2]",),
    "statistics.every=100": ("statistics.every=2",),
    "model.override.update_tokens=256": ("model.override.update_tokens=16", "training.log_frequency=2"),
    "zero.compute_dtype=bfloat16": ("distributed.compilation_cache=cache",),
    "data.isolate_documents": (
        *("data.corpus=null", f"data.index_path_train={cli.INDICES[0]}"),
        f"data.index_path_validation={cli.INDICES[1]}",
    ),
    "index: a.index": (f"data.index_path_validation={cli.INDICES[1]}", "data.corpus=null"),
    "pile_cc: a.index": ("data.corpus=null", f"data.index_path_train={cli.INDICES[0]}"),
    "data.crop=random": (
        *("data.corpus=null", f"data.index_path_train={cli.INDICES[0]}", "data.max_context=16"),
        f"data.index_path_validation={cli.INDICES[1]}",
    ),
}
ELSEWHERE = {  # rows that need a bucket or several hosts, and the tests that have them
    "data.bucket_path=my-bucket": "tests/test_main_zero_in_a_bucket.py",
    "distributed.coordinator_address=host:1234": "tests/test_hosts.py",
    "+recipe=": "test_recipe_trains_tiny",
}
ROWS = [command for command in commands(FEATURES) if not command.startswith(tuple(ELSEWHERE))]
MINE = """mine:
  embedding_dim: 16
  vocab_size: 257
  num_head: 2
  block_size: 32
  dropout: 0.0
  N: 2
  alibi_attn: true
"""


def tiny_row(command: str) -> tuple[str, ...]:
    """A command of the page with a model that takes seconds."""
    words = shlex.split(command.replace(": a.index", f": {cli.INDICES[0]}").replace(": b.index", f": {cli.INDICES[1]}"))
    (*sizes,) = (word.removeprefix("model.size=") for word in words if word.startswith("model.size="))
    own = OF_SIZE.get(sizes[-1] if sizes else "", HEADS)
    return (*ROW, *own, *words, *(key for part, keys in AFTER.items() if part in command for key in keys))


@pytest.mark.slow  # all commands are checked below
@pytest.mark.parametrize("command", ROWS)
def test_row_trains_tiny(command: str, forks: cli.Forks) -> None:
    """A command of a row trains on two devices."""
    for name, of_size in (("RUN", ()), ("FOLDER", ("model.size=gpt_neo_2_7b",))):
        if f"model.model_path={name}" in command and not (forks.workplace / name).exists():
            run = forks.train("RUN" if name == "RUN" else "neo", *tiny_row(" ".join(of_size)))
            if name == "FOLDER":
                export(str(run), forks.workplace / name)
    if "my.yaml" in command:
        (forks.workplace / "my.yaml").write_text(MINE)
    run = forks.train(f"row-{ROWS.index(command)}", *tiny_row(command))
    lines = cli.metrics(run)
    assert lines and all(math.isfinite(line["train/loss"]) for line in lines)


def test_commands_are_right() -> None:
    """Each command that trains is a right configuration, its rules between keys included."""
    assert len(commands(FEATURES)) > 40
    for command in commands(FEATURES):
        words = [word for word in shlex.split(command) if word != "model.size=my.yaml:mine"]
        check(compose(*words), SIZES)
