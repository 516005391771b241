"""The whole configuration, with the keys that features declare."""

import pickle
from collections import Counter
from dataclasses import asdict, dataclass
from types import SimpleNamespace
from typing import Any

import pytest
from omegaconf import OmegaConf

from tests.config.composing import compose
from zero.base.errors import UserError
from zero.config import declared
from zero.config.check import check
from zero.config.constraints import at_least
from zero.config.declared import Keys, keys_of, whole_kind
from zero.config.files import load_sizes
from zero.config.keys import Shared, all_keys, key, members_of, shared
from zero.config.names import MOVED, moved
from zero.config.saved_config import default_config, merge_resumed, upgraded
from zero.config.schema import MODES
from zero.run import fresh
from zero.run.features import FEATURES
from zero.run.restore import TrainingPosition

pytestmark = pytest.mark.quick


@dataclass
class Weather(Keys):
    batch_size: int = shared("training.batch_size")
    every: int = key(7, at_least(1), "Steps between two looks out of the window.")
    cloud: str | None = key(None, None, "Its name.", at="training")


@pytest.fixture
def with_weather(monkeypatch: pytest.MonkeyPatch) -> type[Any]:
    monkeypatch.setattr(declared, "_OF_FEATURES", {"weather": Weather})
    return whole_kind.__wrapped__("train")


def test_keys_of_a_feature(with_weather: type[Any]) -> None:
    """A key is in the section of its feature or in the one that it names; a shared one stays where it is."""
    config = with_weather()
    assert (config.weather.every, config.training.cloud, config.training.batch_size) == (7, None, 8)
    config.training.batch_size = 3
    assert keys_of(config, "weather", Weather) == Weather(batch_size=3, every=7, cloud=None)
    assert asdict(config)["weather"] == {"every": 7}
    names = [each.name for each in all_keys(with_weather)]
    assert {"weather.every", "training.cloud"} <= set(names) and "weather.batch_size" not in names


def test_keys_have_one_owner() -> None:
    """No key is declared twice, by sections or by features, and each shared one is declared by somebody else."""
    counts = Counter(each.name for each in all_keys(whole_kind()))
    assert [name for name, count in counts.items() if count > 1] == []
    taken = [member.name for kind in FEATURES for member in members_of(kind.Config) if isinstance(member, Shared)]
    assert set(taken) <= counts.keys()


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_has_the_keys_of_features(mode: str) -> None:
    """A run that is evaluated, sampled or planned keeps the keys that it was trained with."""
    missing = {each.name for each in all_keys(whole_kind())} - {each.name for each in all_keys(whole_kind(mode))}
    assert missing == set()
    assert issubclass(whole_kind(mode), MODES[mode])


def test_keys_that_are_not_declared_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that did not import the features is told so, and does not work without their keys."""
    monkeypatch.setattr(declared, "_OF_FEATURES", {})
    with pytest.raises(RuntimeError, match=r"import zero\.run\.features first"):
        whole_kind.__wrapped__("train")


def test_rules_of_features() -> None:
    """What a feature expects of its keys is refused by name."""
    spikes = "training.max_skipped_in_a_row=0: expected at least 1, as training.skip_spikes=6.0"
    with pytest.raises(UserError, match=spikes):
        check(compose("training.max_skipped_in_a_row=0", "training.skip_spikes=6"), load_sizes())
    for override, message in (
        ("training.sample_tokens=9000", "training.sample_tokens=9000: expected at most 2047, the learned positions"),
    ):
        with pytest.raises(UserError) as caught:
            check(compose("model.size=gpt_neo_125m", override), load_sizes())
        assert message in str(caught.value)


def test_default_configuration_is_the_checked_one() -> None:
    assert OmegaConf.to_container(default_config()) == asdict(check(compose(), load_sizes()))
    lion = asdict(check(compose("optimizer=lion"), load_sizes()))
    assert OmegaConf.to_container(default_config(optimizer="lion")) == lion


@pytest.mark.parametrize(("name", "new_name"), MOVED.items())
def test_keys_with_another_name(name: str, new_name: str) -> None:
    """The old name answers with the new one, and a run that was started with it resumes."""
    assert moved(name) == f"{name}: it is {new_name} now"
    values: Any = OmegaConf.to_container(compose())
    saved: Any = OmegaConf.create(values)
    value = OmegaConf.select(saved, new_name)
    section, _, last = new_name.partition(".")
    del saved[section][last]
    OmegaConf.update(saved, name, value or 5, force_add=True)
    merged = merge_resumed(saved, compose("resume=runs/a"), [])
    assert OmegaConf.select(merged, new_name) == (value or 5)
    assert OmegaConf.select(merged, name) is None


@pytest.mark.parametrize(
    ("saved", "expected"),
    [
        (
            {"training": {"skip_bad_steps": False, "max_skipped_in_a_row": 20}},
            {"training": {"max_skipped_in_a_row": 0}},
        ),
        ({"training": {"skip_bad_steps": True, "max_skipped_in_a_row": 9}}, {"training": {"max_skipped_in_a_row": 9}}),
        ({"model": {"warm_start": True, "ema": True}}, {"model": {"warm_start": "ema"}}),
        ({"model": {"warm_start": False, "ema": True}}, {"model": {"warm_start": False}}),
        ({"data": {"cache_bytes": 5}}, {"data": {}}),
        ({"data": {"keep_every": None, "keep_every_hours": 2.0}}, {"data": {"keep_every": "2h"}}),
        ({"data": {"keep_every": None, "keep_every_hours": 1e-9}}, {"data": {"keep_every": "1e-09h"}}),
        ({"harness": {"every": 2, "tasks": ["a"]}}, {"harness": {"tasks": ["a"]}}),
        ({"data": {"keep_every": 7, "keep_every_hours": None}}, {"data": {"keep_every": 7}}),
    ],
)
def test_keys_that_became_part_of_others(saved: dict[str, Any], expected: dict[str, Any]) -> None:
    """Runs that were started with them resume as they were, and a command line is told what to write instead."""
    assert upgraded(saved) == expected
    of_data = ("data.cache_bytes", "data.keep_every_hours")
    for name in ("training.skip_bad_steps", "model.ema", "model.sizes", "harness.every", *of_data):
        assert str(moved(name)).startswith(f"{name}: it is ")


@pytest.mark.parametrize(("value", "is_average"), [("true", False), ("ema", True)])
def test_weights_of_a_warm_start(value: str, is_average: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """`model.warm_start=ema` begins with the moving average of the weights."""
    taken: list[bool] = []
    monkeypatch.setattr(fresh, "described_folder", lambda place: None)
    monkeypatch.setattr(fresh, "warm_start", lambda place, model, ema: taken.append(ema))
    job: Any = SimpleNamespace(
        model=SimpleNamespace(tuning=None), programs=SimpleNamespace(start=lambda params: params)
    )
    config = check(compose(f"model.warm_start={value}", "model.model_path=run"), load_sizes())
    position = TrainingPosition(global_rows=1)
    fresh.new_state(config, job, {}, position)
    assert taken == [is_average]


@pytest.mark.parametrize("mode", ["train", "plan", "sample"])
def test_copies_in_other_processes(mode: str) -> None:
    """The classes are made at the start; a process that plans gets the configuration all the same."""
    config: Any = check(compose(f"mode={mode}", "verify.every=7" if mode == "train" else "seed=7"), load_sizes())
    copied: Any = pickle.loads(pickle.dumps(config))
    assert copied == config and type(copied) is type(config) and type(copied.verify) is type(config.verify)
