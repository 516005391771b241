"""Configurations of saved runs: merged with the overrides given now."""

from typing import Any

import pytest
from omegaconf import OmegaConf

from tests.config.composing import compose
from zero.config.check import check
from zero.config.files import load_sizes
from zero.config.saved_config import FIXED_KEYS, merge_resumed
from zero.errors import UserError

RESUMED = ["resume=runs/a"]
CHANGES = {
    "seed": "1",
    "training.ema": "0.9",
    "model.size": "test",
    "model.sizes": "my.yaml",
    "model.override": "{N: 3}",
    "training.objective": "dpo",
    "data.max_context": "128",
    "data.shuffle_shards": "4",
    "data.crop": "all",
    "optimizer.name": "lion",
    "optimizer.b1": "0.8",
    "optimizer.b2": "0.8",
    "optimizer.eps": "1e-7",
    "optimizer.nesterov": "true",
    "optimizer.decay_rate": "0.7",
    "optimizer.factored_from": "64",
    "optimizer.max_update_rms": "2.0",
    "optimizer.min_scale": "1e-2",
    "optimizer.scale_by_parameter": "false",
    "optimizer.decay": "independent",
    "optimizer.scaled_eps": "true",
    "optimizer.newton_schulz_steps": "4",
    "optimizer.update_rms": "0.1",
    "optimizer.adam_b1": "0.5",
    "optimizer.adam_b2": "0.5",
    "tuning.method": "lora",
    "tuning.rank": "2",
    "tuning.alpha": "1",
    "tuning.dropout": "0.1",
    "tuning.targets": "[query]",
    "tuning.base_dtype": "bfloat16",
    "tuning.adapter": "other",
}


def test_resume_merges_overrides() -> None:
    """A resume takes the saved values and the overrides that are given now."""
    saved = compose("training.total_steps=70", "training.warmup_steps=7", "zero.stage=1")
    merged = merge_resumed(saved, compose(*RESUMED, "training.total_steps=90"), ["training.total_steps=90"])
    assert (merged.training.total_steps, merged.training.warmup_steps, merged.zero.stage) == (90, 7, 1)
    assert merged.resume == "runs/a"


def test_preset_at_a_resume(caplog: pytest.LogCaptureFixture) -> None:
    """A preset given at a resume changes nothing of the run, and each key that differs is named."""
    for given in (["+preset=v3-8"], ["+slice=v3-8"], ["+slice=v3-32", "+memory=fused"]):
        _check_that_a_preset_changes_nothing([*given, "training.total_steps=900"], caplog)
        caplog.clear()


def _check_that_a_preset_changes_nothing(keys: list[str], caplog: pytest.LogCaptureFixture) -> None:
    saved = compose(*keys, "training.batch_size=16")
    merged = merge_resumed(saved, compose(*RESUMED, *keys), keys)
    assert (merged.training.batch_size, merged.training.total_steps) == (16, 900)
    assert caplog.messages == ["a preset is for a fresh start; the run keeps its own values: training.batch_size=16"]
    merged = merge_resumed(saved, compose("mode=evaluate", *keys), ["mode=evaluate", *keys])
    assert (merged.mode, merged.training.batch_size) == ("evaluate", 16)


def test_hydra_overrides_are_no_keys() -> None:
    """Overrides of Hydra itself are not keys of the configuration."""
    merge_resumed(compose(), compose(*RESUMED), ["hydra.run.dir=runs/a"])
    with pytest.raises(UserError, match=r"^foo: "):
        check(merge_resumed(compose(), compose(*RESUMED, "+foo=1"), ["+foo=1"]), load_sizes())


def test_resume_step_is_forgotten() -> None:
    """A resume forgets the step that an earlier resume asked for."""
    saved = compose(*RESUMED, "data.resume_step=5")
    assert merge_resumed(saved, compose(*RESUMED), []).data.resume_step is None
    again = ["data.resume_step=10"]
    assert merge_resumed(saved, compose(*RESUMED, *again), again).data.resume_step == 10


def test_other_validation_sets() -> None:
    """Validation sets that are given now take the place of those of the run; they do not join them."""
    saved = compose("data.index_path_validation={a: a.index}")
    assert merge_resumed(saved, compose(*RESUMED), []).data.index_path_validation == {"a": "a.index"}
    for given in ("{b: b.index}", "c.index"):
        override = f"data.index_path_validation={given}"
        merged = merge_resumed(saved, compose(*RESUMED, override), [override])
        expected = "c.index" if given == "c.index" else {"b": "b.index"}
        assert merged.data.index_path_validation == expected


def test_configuration_without_a_new_key() -> None:
    """A resume reads a configuration from before a key existed."""
    saved = compose()
    older = OmegaConf.create({k: v for k, v in saved.items() if k != "zero"})
    assert merge_resumed(older, compose(*RESUMED), []).zero.stage == 3


@pytest.mark.parametrize("key", FIXED_KEYS)
def test_resume_refusals(key: str) -> None:
    """A resume refuses changes of the model, the seed or the order of the data."""
    override = f"{key}={CHANGES[key]}"
    with pytest.raises(UserError, match=rf"{key}=.*: expected .*, the value of the run"):
        merge_resumed(compose(), compose(*RESUMED, override), [override])
    merge_resumed(compose(override), compose(*RESUMED, override), [override])


def test_moments_in_another_dtype() -> None:
    """Only AdamW continues with moments in another dtype."""
    override = "optimizer.state_dtype=int8"
    merge_resumed(compose(), compose(*RESUMED, override), [override])
    saved, now = (compose("optimizer.name=lion", *given) for given in ((), (*RESUMED, override)))
    with pytest.raises(UserError, match=r"state_dtype=int8: expected float32, the value of the run"):
        merge_resumed(saved, now, [override])


def test_unknown_key_in_saved_file() -> None:
    """A resume refuses an unknown key in the saved file."""
    saved = OmegaConf.create({"traning": {"batch_size": 8}})
    with pytest.raises(UserError, match=r"configuration of the run: .*traning"):
        merge_resumed(saved, compose(*RESUMED), [])


def test_plan_of_a_saved_configuration() -> None:
    """The section plan of a run is not merged: only mode=plan reads it, without a run."""
    saved: Any = OmegaConf.to_container(compose())
    saved["plan"] |= {"micro_batch": 8, "mfu": 0.4}
    merged = merge_resumed(OmegaConf.create(saved), compose(*RESUMED), [])
    assert merged.plan == compose().plan
