"""The recipes of conf/recipe are right, and train at a tiny size; the commands of their page are right as well."""

import re
import shlex
from pathlib import Path

import pytest

from tests.helpers import cli
from tests.runtime.config.composing import CONF, compose
from zero.runtime.config.check import check
from zero.runtime.config.files import load_sizes

SIZES = load_sizes()
RECIPES = sorted(path.stem for path in (CONF / "recipe").glob("*.yaml") if path.stem != "common")
PAGE = CONF.resolve().parent / "docs" / "from-other-code.md"
# The model of a recipe, made tiny; the rest of the recipe is as it is.
SMALL = (
    *("model.override.N=2", "model.override.vocab_size=257", "model.override.vocab_chunks=1"),
    *(f"model.override.block_size={cli.CONTEXT}", "data.tokenizer=bytes", "data.wandb_project=null"),
    *("training.total_steps=3", "training.warmup_steps=1", "training.gradient_accumulation_steps=1"),
    *("training.maximum_evaluation_steps=1", "training.sample_tokens=0", "distributed.cpu_devices=8"),
    *(f"data.index_path_train={cli.INDICES[0]}", f"data.index_path_validation={cli.INDICES[1]}"),
)
OWN = {
    "zero-transformer": ("model.override.embedding_dim=24", "model.override.num_head=3", "training.batch_size=8"),
    "mu-transformer": ("model.override.embedding_dim=16", "model.override.head_dim=8", "training.batch_size=8"),
    "transformer-vq": (
        *("model.override.embedding_dim=16", "model.override.key_width=8", "model.override.codes=4"),
        *("model.override.vq_block=8", "training.batch_size=8"),
    ),
    "gpt-neo": ("model.override.embedding_dim=24", "model.override.num_head=3", "training.batch_size=8"),
    "lingvo": (
        *("model.override.embedding_dim=16", "model.override.num_head=8", "model.override.head_dim=4"),
        "model.override.mlp_dim=32",
    ),
}


def tiny(recipe: str) -> tuple[str, ...]:
    (own,) = (keys for name, keys in OWN.items() if recipe.startswith(name))
    return (f"+recipe={recipe}", *SMALL, *own)


@pytest.mark.parametrize("recipe", RECIPES)
def test_recipe_is_right(recipe: str) -> None:
    """A recipe is a right configuration, whose global batch divides over its slice, and names itself in its command."""
    config = check(compose(f"+recipe={recipe}"), SIZES)
    devices = int(config.plan.topology.partition("-")[2])
    groups = devices // config.zero.tensor_shards
    rows = config.training.batch_size * devices // 8  # hosts of a v3 have 8 devices
    assert rows == groups * config.plan.micro_batch * config.training.gradient_accumulation_steps
    assert f"python main_zero.py +recipe={recipe}" in (CONF / "recipe" / f"{recipe}.yaml").read_text()
    assert f"`{recipe}`" in PAGE.read_text() or f"`-{recipe.rpartition('-')[2]}`" in PAGE.read_text()


QUICK = ("transformer-vq-enwik8",)


@pytest.mark.parametrize(
    "recipe", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in RECIPES]
)
def test_recipe_trains_tiny(recipe: str, forks: cli.Forks) -> None:
    """A recipe trains three steps on eight devices, with its own optimizer, schedule and groups."""
    run = forks.train(recipe, *tiny(recipe))
    assert len(cli.losses(run)) == 1 and cli.losses(run, "step") == [3]


def commands(page: Path) -> list[str]:
    found = re.findall(r"`python main_zero.py ([^`]*)`", page.read_text())
    return [command for command in found if "--" not in command and "mode=" not in command]


def test_commands_are_right() -> None:
    """Each command that trains is a right configuration, its rules between keys included."""
    assert len(commands(PAGE)) > 40
    for command in commands(PAGE):
        words = [word for word in shlex.split(command) if not word.startswith("model.sizes")]
        check(compose(*(word for word in words if word != "model.size=mine")), SIZES)
