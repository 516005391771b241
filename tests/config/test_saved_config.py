"""Configurations of saved runs: merged with the overrides given now."""

from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from tests.config.composing import compose
from zero.base.errors import UserError
from zero.base.keys import all_keys
from zero.commands.modes import check, merge_resumed
from zero.config.saved_config import fixed_keys, flat_config, with_groups
from zero.job.sizes import load_sizes
from zero.record.run_files import CONFIG_FILE, save_config, saved_config
from zero.run.config import GROUPS, TrainConfig

RESUMED = ["resume=runs/a"]
CHANGES = {  # from the start of the run, to what a resume may not change in it
    "seed=1": "seed=1",
    "training.ema=0.9": "training.ema=0.9",
    "batch=stages": "batch=stages",
    "model.size=test": "model.size=test",
    "model.size=my.yaml:bytes": "model.size=my.yaml:bytes",
    "model.override={N: 3}": "model.override={'N': 3}",
    "objective=dpo": "objective=dpo",
    "data.max_context=128": "data.max_context=128",
    "data.last_target=true": "data.last_target=true",
    "data.shuffle_shards=4": "data.shuffle_shards=4",
    "data.crop=all": "data.crop=all",
    "optimizer=lion": "optimizer=lion",
    "tuning=lora": "tuning=lora",
}
OF_ADAPTERS = (
    *("rank=2", "alpha=1", "targets=[query]", "base_dtype=bfloat16", "adapter=other"),
    *("rank_pattern={query: 2}", "alpha_pattern={query: 2}", "modules_to_save=[vocabulary]"),
)
OF_CHOICES = {
    "batch=stages": ("stages=[[3,8]]",),
    "batch=ramp": ("first=2", "steps=8"),
    "optimizer=adamw": (
        "b1=0.8",
        "b2=0.8",
        "eps=1e-7",
        "decay=independent",
        "decay_on=gpt_neo",
        "bias_correction=false",
        "scaled_eps=true",
    ),
    "optimizer=ademamix": ("b1=0.8", "b2=0.8", "b3=0.99", "alpha=2.0", "eps=1e-7", "slow_warmup=4"),
    "optimizer=lion": ("b1=0.8", "b2=0.8", "decay=independent", "state_dtype=int8"),
    "optimizer=sgd": ("b1=0.8", "nesterov=true"),
    "optimizer=lamb": ("b1=0.8", "b2=0.8", "eps=1e-7"),
    "optimizer=adafactor": (
        *("b1=0.8", "eps=1e-7", "decay_rate=0.7", "factored_from=64", "max_update_rms=2.0", "min_scale=1e-2"),
        "scale_by_parameter=false",
    ),
    "optimizer=muon": ("b1=0.8", "newton_schulz_steps=4", "update_rms=0.1", "adam_b1=0.5", "adam_b2=0.5", "eps=1e-7"),
    "tuning=lora": ("dropout=0.1", *OF_ADAPTERS),
    "tuning=dora": OF_ADAPTERS,
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
    assert caplog.messages == [
        "a preset only applies to a fresh start; the run keeps its own values: training.batch_size=16"
    ]
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


def test_every_fixed_key_is_tried() -> None:
    """The tables above hold every key that a resume may not change: a new one has to answer."""
    fixed = {key.name for key in all_keys(TrainConfig) if key.fixed and key.name.partition(".")[0] not in GROUPS}
    fixed |= {group.name for group in GROUPS.values() if group.fixed}
    assert fixed == {change.partition("=")[0] for change in CHANGES}
    tried = {choice: {key.partition("=")[0] for key in keys} for choice, keys in OF_CHOICES.items()}
    for group in GROUPS.values():
        for name in group.choices:
            names = {key.name.partition(".")[2] for key in fixed_keys(group, name)}
            assert names == tried.get(f"{group.name}={name}", set()), name


@pytest.mark.parametrize("override", CHANGES)
def test_resume_refusals(override: str) -> None:
    """A resume refuses changes of the model, the seed, the order of the data, and what is trained by what."""
    with pytest.raises(UserError) as caught:
        merge_resumed(compose(), compose(*RESUMED, override), [override])
    assert str(caught.value).startswith(f"{CHANGES[override]}: expected ")
    assert str(caught.value).endswith(", the value of the run")
    merge_resumed(compose(override), compose(*RESUMED, override), [override])


OF_SOME = ("optimizer=adafactor", "tuning=lora", "batch=ramp")


@pytest.mark.parametrize(
    "choice", [choice if choice in OF_SOME else pytest.param(choice, marks=pytest.mark.wide) for choice in OF_CHOICES]
)
def test_keys_of_a_choice_at_a_resume(choice: str) -> None:
    """A resume composes the choices of its run, and refuses to change their keys."""
    group, _, name = choice.partition("=")
    saved = compose(choice)
    for key in OF_CHOICES[choice]:
        override = f"{group}.{key}"
        values: Any = OmegaConf.to_container(saved)
        given = with_groups([*RESUMED, override], values)
        assert choice in given
        with pytest.raises(
            UserError, match=rf"^{group}\.{key.partition('=')[0]}=.*: expected .*, the value of the run$"
        ):
            merge_resumed(saved, compose(*given), given)
        merge_resumed(compose(choice, override), compose(*given), given)
    assert merge_resumed(saved, compose(*RESUMED), [])[group] == saved[group] and name == saved[group].name


def test_schedule_may_change() -> None:
    """Another schedule takes the place of that of the run, with its own keys."""
    merged = merge_resumed(
        compose(),
        compose(*RESUMED, "schedule=wsd", "schedule.decay_steps=5"),
        ["schedule=wsd", "schedule.decay_steps=5"],
    )
    assert merged.schedule == {"name": "wsd", "decay_steps": 5}
    again = merge_resumed(
        merged, compose(*RESUMED, "schedule=wsd", "schedule.decay_steps=7"), ["schedule=wsd", "schedule.decay_steps=7"]
    )
    assert again.schedule.decay_steps == 7
    kept = merge_resumed(again, compose(*RESUMED, "schedule=wsd"), ["schedule=wsd"])
    assert kept.schedule.decay_steps == 7


def test_moments_in_another_dtype() -> None:
    """Only AdamW continues with moments in another dtype."""
    override = "optimizer.state_dtype=int8"
    merge_resumed(compose(), compose(*RESUMED, override), [override])


def test_unknown_key_in_saved_file() -> None:
    """A resume refuses an unknown key in the saved file."""
    saved = OmegaConf.create({"traning": {"batch_size": 8}})
    with pytest.raises(UserError, match=r"configuration of the run: .*traning"):
        merge_resumed(saved, compose(*RESUMED), [])


def test_saved_texts_are_not_evaluated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A configuration that is read, resumed and saved again keeps `${...}` as text: no secret, and no new directory."""
    monkeypatch.setenv("SECRET", "5")
    texts = {
        "index_path_validation": "${oc.env:SECRET}",
        "cache_directory": f"${{new_directory:{tmp_path}/made}}",
        "tokenizer": "a ${unclosed",
    }
    values: Any = OmegaConf.to_container(compose())
    values["data"] |= texts
    save_config(tmp_path, values)
    written = (tmp_path / CONFIG_FILE).read_bytes()
    saved = saved_config(tmp_path)
    for key, text in texts.items():
        assert saved.data[key] == flat_config(saved)[f"data.{key}"] == text
    merged = merge_resumed(saved, compose(*RESUMED), RESUMED)
    checked = check(merged, load_sizes())
    assert {key: getattr(checked.data, key) for key in texts} == texts
    save_config(tmp_path, values | {"data": values["data"] | texts})
    assert (tmp_path / CONFIG_FILE).read_bytes() == written and b"SECRET" in written
    assert [path.name for path in tmp_path.iterdir()] == [CONFIG_FILE]


def test_overrides_of_a_resume_are_evaluated_once(tmp_path: Path) -> None:
    r"""`\${...}` on the command line is a text, also where a saved configuration is merged."""
    overrides = [*RESUMED, r"data.cache_directory='\${oc.env:HOME}'"]
    merged = merge_resumed(compose(), compose(*overrides), overrides)
    assert merged.data.cache_directory == "${oc.env:HOME}"
