"""The door: every mistake in a configuration is refused in one line that names the key and what was expected."""

from pathlib import Path
from typing import Any

import hydra
import pytest
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf

from zero.runtime.config.configuration import (
    FIXED_KEYS,
    Config,
    check,
    describe,
    index_files,
    load_sizes,
    merge_resumed,
)
from zero.runtime.errors import UserError

CONF = Path(__file__).parents[3] / "conf"
SIZES = load_sizes(CONF / "model_config.yaml")
RESUMED = ["resume=runs/a"]


def compose(*overrides: str) -> DictConfig:
    with hydra.initialize_config_dir(str(CONF), version_base="1.3"):
        return hydra.compose("config", list(overrides))


def refusal(*overrides: str) -> str:
    """The one line that a person reads."""
    try:
        check(compose(*overrides), SIZES)
    except HydraException as error:
        return describe(error)
    except UserError as error:
        return str(error)
    raise AssertionError("it was accepted")


def test_default_job_is_accepted_as_typed_values() -> None:
    checked = check(compose(), SIZES)
    assert isinstance(checked, Config)
    assert checked.model.size == "bytes" and checked.zero.stage == 3


@pytest.mark.parametrize("size", SIZES)
def test_every_size_can_be_trained(size: str) -> None:
    context = SIZES[size].block_size
    check(compose(f"model.size='{size}'", f"data.max_context={context}", "training.warmup_train_context=8"), SIZES)


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("model.sizee=test", ["model.sizee", "size, warm_start, model_path"]),
        ("+foo=1", ["foo", "expected one of mode, resume, seed"]),
        ("++data.foo=1", ["data.foo", "expected one of corpus"]),
        ("~seed", ["seed", "missing"]),
        ("~training.total_steps", ["training.total_steps", "deletion"]),
        ("training=5", ["training=5", "int"]),
        ("training.total_steps=many", ["training.total_steps=many", "Integer"]),
        ("training.total_steps=1.5", ["training.total_steps=1.5", "Integer"]),
        ("training.total_steps=null", ["training.total_steps=null", "not Optional"]),
        ("training.peak_learning_rate=fast", ["training.peak_learning_rate=fast", "Float"]),
        ("data.max_context", ["data.max_context", "EQUAL"]),
        ("mode=tain", ["mode=tain", "train"]),
        ("data.index_path_train=null", ["data.index_path_train=None", "the path of an index file, a list"]),
        ("data.index_path_train=[]", ["data.index_path_train=[]", "the path of an index file, a list"]),
        ("data.index_path_train=[{index: a, weight: 0}]", ["data.index_path_train", "weight"]),
        ("data.index_path_train=[{index: a, weigth: 1}]", ["data.index_path_train", "weight"]),
        ("data.index_path_train=[{index: a, weight: 1}, b]", ["data.index_path_train", "weight"]),
        ("data.index_path_train=[{index: x/a, weight: 1}, {index: y/a, weight: 1}]", ["files of different names"]),
        ("data.index_path_validation=[{index: a, weight: 1}]", ["data.index_path_validation", "or a list"]),
        ("data.window=0", ["data.window=0", "at least 1"]),
        ("data.max_skipped_rows=-1", ["data.max_skipped_rows=-1", "zero or more"]),
        ("data.cache_bytes=0", ["data.cache_bytes=0", "at least 1"]),
        ("model.size=999b", ["model.size=999b", "one of test, bytes, 124m"]),
        ("zero.stage=4", ["zero.stage=4", "0, 1, 2 or 3"]),
        ("zero.compute_dtype=float16", ["zero.compute_dtype=float16", "float32, bfloat16"]),
        ("seed=-1", ["seed=-1"]),
        ("seed=4294967296", ["seed=4294967296"]),
        ("training.batch_size=0", ["training.batch_size=0", "at least 1"]),
        ("training.gradient_accumulation_steps=-1", ["training.gradient_accumulation_steps=-1", "at least 1"]),
        ("training.max_gradient_norm=0", ["training.max_gradient_norm=0", "null"]),
        ("training.skip_spikes=0", ["training.skip_spikes=0", "null"]),
        ("training.skip_spikes=nan", ["training.skip_spikes=nan", "more than 0"]),
        ("training.peak_learning_rate=-1", ["training.peak_learning_rate=-1"]),
        ("training.peak_learning_rate=nan", ["training.peak_learning_rate=nan"]),
        ("training.weight_decay=inf", ["training.weight_decay=inf"]),
        ("training.max_epochs=0", ["training.max_epochs=0", "null"]),
        ("training.warmup_steps=100000", ["training.warmup_steps=100000", "fewer than training.total_steps="]),
        ("training.warmup_steps=-1", ["training.warmup_steps=-1"]),
        ("training.warmup_train_context=100", ["training.warmup_train_context=100", "data.max_context=256"]),
        ("training.warmup_train_context=512", ["training.warmup_train_context=512", "data.max_context=256"]),
        ("training.warmup_train_context=1", ["training.warmup_train_context=1"]),
        ("data.max_context=257", ["data.max_context=257", "block_size=256"]),
        ("data.max_context=1", ["data.max_context=1"]),
        ("data.train_samples=0", ["data.train_samples=0", "null"]),
        ("data.keep_checkpoints=0", ["data.keep_checkpoints=0"]),
        ("data.resume_step=5", ["data.resume_step=5", "--resume"]),
        ("model.warm_start=true", ["model.model_path", "model.warm_start=true"]),
        ("distributed.cpu_devices=0", ["distributed.cpu_devices=0"]),
        ("data.max_context=long", ["data.max_context=long", "null"]),
        ("zero.gradient_dtype=int8", ["zero.gradient_dtype=int8", "float32, bfloat16"]),
        ("zero.remat=some", ["zero.remat=some", "full, dots, none"]),
        ("plan.micro_batch=0", ["plan.micro_batch=0", "at least 1"]),
        ("plan.grid.stage=[4]", ["plan.grid.stage=[4]", "0 to 3"]),
        ("plan.grid.remat=[]", ["plan.grid.remat=[]", "full, dots, none"]),
        ("plan.grid.context=[1024]", ["plan.grid.context=[1024]", "2 to 256"]),
    ],
)
def test_mistake_is_one_line_that_names_key_and_expectation(override: str, named: list[str]) -> None:
    line = refusal(override)
    assert "\n" not in line
    assert [part for part in named if part not in line] == [], line


def test_context_that_does_not_divide_matters_only_where_it_is_used() -> None:
    check(compose("training.warmup_train_context=100", "training.staged_warmup_steps=0"), SIZES)


def test_context_is_the_longest_of_the_model_unless_it_is_said() -> None:
    assert check(compose("model.size=test"), SIZES).data.max_context == SIZES["test"].block_size
    assert check(compose("data.max_context=128"), SIZES).data.max_context == 128


PRESETS = sorted(path.stem for path in (CONF / "preset").glob("*.yaml"))


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_is_accepted_and_opens_with_what_to_expect(name: str) -> None:
    checked = check(compose(f"+preset={name}"), SIZES)
    assert checked.data.max_context == 1024 and name.startswith(checked.plan.topology)
    head = (CONF / "preset" / f"{name}.yaml").read_text().split("\n\n")[0]
    for part in (f"python main_zero.py +preset={name}", "# Hardware", "GiB a core at the peak", "# Not measured"):
        assert part in head


FUSED = ("zero.fused_update=true", "training.max_gradient_norm=null", "training.skip_bad_steps=false")


@pytest.mark.parametrize(
    "override",
    [
        "zero.stage=2",
        "zero.remat=dots",
        "training.max_gradient_norm=1.0",
        "training.skip_bad_steps=true",
        "training.skip_spikes=6",
        "training.gradient_accumulation_steps=2",
    ],
)
def test_a_fused_update_refuses_what_needs_the_whole_gradient(override: str) -> None:
    check(compose(*FUSED), SIZES)
    line = refusal(*FUSED, override)
    assert override.split("=")[0] in line and "zero.fused_update=true" in line


def test_sample_has_to_fit_into_learned_positions(tmp_path: Path) -> None:
    (tmp_path / "sizes.yaml").write_text(
        (CONF / "model_config.yaml").read_text().replace("alibi_attn: true", "alibi_attn: false")
    )
    sizes = load_sizes(tmp_path / "sizes.yaml")
    with pytest.raises(UserError, match=r"training.sample_tokens=256: expected .*255"):
        check(compose("training.sample_tokens=256"), sizes)
    check(compose("training.sample_tokens=255"), sizes)


def test_resume_takes_the_saved_values_and_the_overrides_given_now() -> None:
    saved = compose("training.total_steps=70", "training.warmup_steps=7", "zero.stage=1")
    merged = merge_resumed(saved, compose(*RESUMED, "training.total_steps=90"), ["training.total_steps=90"])
    assert (merged.training.total_steps, merged.training.warmup_steps, merged.zero.stage) == (90, 7, 1)
    assert merged.resume == "runs/a"


def test_resume_forgets_the_step_that_an_earlier_resume_asked_for() -> None:
    saved = compose(*RESUMED, "data.resume_step=5")
    assert merge_resumed(saved, compose(*RESUMED), []).data.resume_step is None
    again = ["data.resume_step=10"]
    assert merge_resumed(saved, compose(*RESUMED, *again), again).data.resume_step == 10


def test_resume_reads_a_configuration_from_before_a_key_existed() -> None:
    saved = compose()
    older = OmegaConf.create({k: v for k, v in saved.items() if k != "zero"})
    assert merge_resumed(older, compose(*RESUMED), []).zero.stage == 3


CHANGES = {
    "seed": "1",
    "training.ema": "0.9",
    "model.size": "test",
    "data.max_context": "128",
    "data.tokenizer": "other.json",
    "data.train_samples": "9",
    "data.index_path_train": "[a.index,b.index]",
    "data.window": "4",
}


@pytest.mark.parametrize(
    ("value", "bucket_path", "index"),
    [
        ("a/b.index", None, "a/b.index"),
        ("a/b.index", "gs://bucket/place/", "gs://bucket/place/a/b.index"),
        ("/a/b.index", "bucket", "/a/b.index"),
        (["a", "gs://other/b"], "bucket", ["gs://bucket/a", "gs://other/b"]),
        ([{"index": "a", "weight": 0.7}, {"index": "b", "weight": 3}], None, {"a": 0.7, "b": 3}),
        ([{"index": "a", "weight": 0.7}], "bucket", {"gs://bucket/a": 0.7}),
    ],
)
def test_index_files_lie_in_the_bucket_or_where_they_say(value: Any, bucket_path: str | None, index: Any) -> None:
    assert index_files(value, bucket_path) == index


@pytest.mark.parametrize("key", FIXED_KEYS)
def test_resume_refuses_what_changes_model_seed_or_order(key: str) -> None:
    override = f"{key}={CHANGES[key]}"
    with pytest.raises(UserError, match=rf"{key}=.*: a resume keeps {key}="):
        merge_resumed(compose(), compose(*RESUMED, override), [override])
    merge_resumed(compose(override), compose(*RESUMED, override), [override])


def test_resume_refuses_an_unknown_key_in_the_saved_file() -> None:
    saved = OmegaConf.create({"traning": {"batch_size": 8}})
    with pytest.raises(UserError, match=r"run to resume: .*traning"):
        merge_resumed(saved, compose(*RESUMED), [])


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ("num_head: 3", "num_heads: 3", ["num_heads", "expected one of embedding_dim"]),
        ("  num_head: 3\n", "", ["num_head", "Missing mandatory"]),
        ("num_head: 3", "num_head: 5", ["embedding_dim 48", "num_head 5"]),
        ("num_head: 3", "num_head: 0", ["num_head"]),
        ("num_head: 3", "num_head: three", ["num_head"]),
        ("N: 2", "N: 0", ["N"]),
        ("dropout: 0.1", "dropout: 1.0", ["dropout"]),
        ("vocab_chunks: 3", "vocab_chunks: 0", ["vocab_chunks"]),
        ("vocab_chunks: 3", "vocab_chunks: 200", ["vocab_chunks"]),
        ("alibi_attn: true", "alibi_attn: maybe", ["alibi_attn"]),
    ],
)
def test_mistake_in_a_size_names_file_size_and_key(tmp_path: Path, old: str, new: str, named: list[str]) -> None:
    path = tmp_path / "sizes.yaml"
    text = (CONF / "model_config.yaml").read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    for part in ["sizes.yaml", *named]:
        with pytest.raises(UserError, match=part) as caught:
            load_sizes(path)
    assert "\n" not in str(caught.value)


def test_missing_sizes_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"none.yaml: not found"):
        load_sizes(tmp_path / "none.yaml")
    (tmp_path / "empty.yaml").write_text("test:\n")
    with pytest.raises(UserError, match=r"empty.yaml: size 'test'"):
        load_sizes(tmp_path / "empty.yaml")
