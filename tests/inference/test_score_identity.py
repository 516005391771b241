"""Keys crossed with what is stored: another value of a key that changes scores gives another identity of scores."""

import json
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.config.composing import compose
from tests.helpers.key_table import ELSEWHERE, OF_THE_STEP
from zero.base.errors import UserError
from zero.base.keys import all_keys, values_in_scores
from zero.commands.modes import MODES, check
from zero.inference.score_identity import score_identity
from zero.job.devices import make_axis
from zero.job.job import make_job, place_model
from zero.job.model import make_model
from zero.job.sizes import load_sizes
from zero.training.programs import make_inference
from zero.training.sharded_gpt import ShardedGPT

SIZES = load_sizes()
JOB = (
    *("model.size=test", "data.max_context=32", "training.batch_size=16"),
    *("training.staged_warmup_steps=4", "training.warmup_train_context=8"),
)
OF_GROUPS = {"zero.tensor_shards": "2", "zero.expert_shards": "2"}  # refused in training jobs as small as this one
OF_THE_MODE = {
    "evaluate.validation": "false",  # refused without tasks
    "evaluate.harness": "[a.yaml]",
    "evaluate.chat": "true",
    "evaluate.system": "brief",
    "evaluate.few_shots": "2",
    "evaluate.limit": "3",
    "evaluate.context": "16",
    "evaluate.stride": "4",
    "evaluate.carry": "true",
    "evaluate.ema": "true",
    "evaluate.replicate": "true",
    "evaluate.weight_dtype": "int8",
}
# They change what is kept for a backward pass, and so the text of a program that has none; a test below runs it.
OF_THE_BACKWARD_PASS = ("zero.remat", "zero.offload", "zero.fused_update")
BY_CONTENTS = {  # keys that name what is compared by its contents
    *("data.index_path_validation", "data.tokenizer", "model.model_path", "evaluate.index", "evaluate.adapters"),
    *("model.size", "model.override"),
}


def identity(*overrides: str) -> tuple[str, ShardedGPT]:
    keys = [override.partition("=")[0] for override in overrides]
    config = check(compose(*JOB, *overrides), SIZES, keys)
    size = SIZES.chosen(config.model)
    if config.mode == "evaluate":
        alone = config.zero.alone()
        model = make_model(size, make_axis(alone), alone, config.model, config.data)
    else:
        model = make_job(config, place_model(config, size)).model
    return json.dumps(score_identity(values_in_scores(config), model), sort_keys=True), model


@cache
def scoring(model: ShardedGPT) -> str:
    """The lowered program that scores."""
    weights = jax.tree.map(lambda x: jax.ShapeDtypeStruct((8, *x.shape), x.dtype), model.weight_shapes())
    return str(make_inference(model).score.lower(weights, jax.ShapeDtypeStruct((8, 2, 17), jnp.int32)).as_text())


@pytest.fixture(scope="module")
def plain() -> tuple[str, ShardedGPT]:
    return identity()


def changes_scoring(one: ShardedGPT, other: ShardedGPT) -> bool:
    """Whether two models score by different programs; of another size they do."""
    if one == other:
        return False
    return one.config != other.config or scoring(one) != scoring(other)


VALUES = OF_THE_STEP | ELSEWHERE | OF_GROUPS


@pytest.mark.parametrize("key", sorted(VALUES))
def test_keys_that_change_scores(key: str, plain: tuple[str, ShardedGPT]) -> None:
    """A key without `in_scores` whose other value changes the program that scores is missing in the identity."""
    try:
        changed, model = identity(f"{key}={VALUES[key]}")
    except UserError:  # refused by name, as it cannot be set alone
        return
    if is_declared(key) or (key not in OF_THE_BACKWARD_PASS and changes_scoring(model, plain[1])):
        assert changed != plain[0], f"{key} changes how texts are scored: declare it with in_scores=True"


def test_keys_of_the_backward_pass(plain: tuple[str, ShardedGPT]) -> None:
    """They change no score, bit for bit."""
    random = np.random.default_rng(0)
    weights = jax.tree.map(lambda x: random.normal(0, 0.1, (8, *x.shape)).astype(x.dtype), plain[1].weight_shapes())
    tokens = random.integers(0, 256, (8, 2, 17)).astype(np.int32)
    expected = make_inference(plain[1]).score(weights, tokens)
    for changes in (("zero.remat=full",), ("zero.offload=activations",)):
        found = make_inference(identity(*changes)[1]).score(weights, tokens)
        jax.tree.map(np.testing.assert_array_equal, found, expected)


def is_declared(key: str) -> bool:
    return MODES.keys[key].in_scores if key in MODES.keys else False


@pytest.mark.parametrize("key", sorted(OF_THE_MODE))
def test_keys_of_evaluation(key: str) -> None:
    """So does another value of each key of the mode that does not name contents."""
    try:
        assert identity("mode=evaluate", f"{key}={OF_THE_MODE[key]}")[0] != identity("mode=evaluate")[0]
    except UserError as error:
        assert key in str(error) and is_declared(key)


def test_every_key_of_evaluation_is_tried() -> None:
    """A new key has to answer: its value is part of what scores are known by, or it names contents, or changes none."""
    keys = {key.name for key in all_keys(MODES.own_sections["evaluate"], "evaluate.")}
    tried = OF_THE_MODE.keys() | {"evaluate.template_variables"}
    assert keys - BY_CONTENTS == tried | {"evaluate.follow", "evaluate.top_tokens"}
    assert all(map(is_declared, tried))
