"""What each mode is told: sections with the keys of their owners, and what they read of a saved run."""

import pickle
import shutil
import subprocess
import sys
from collections import Counter
from dataclasses import FrozenInstanceError, asdict, dataclass, fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import hydra
import pytest
from omegaconf import OmegaConf

from tests.config.composing import CONF, compose
from zero.base.errors import UserError
from zero.base.keys import all_keys, at_least, defaults_of, key, members_of, section, with_values
from zero.commands.modes import MODES, check, default_config, typed
from zero.config.modes import Configuration
from zero.job.sizes import load_sizes
from zero.run import fresh
from zero.run.restore import TrainingPosition

pytestmark = pytest.mark.quick


@dataclass(frozen=True)
class Clock:
    every: int = key(7, at_least(1), "Steps between two looks out of the window.")


@dataclass(frozen=True)
class Sky:
    cloud: str | None = key(None, None, "Its name.")


@dataclass(frozen=True)
class Weather(Clock, Sky):
    """A section of two owners."""


@dataclass(frozen=True)
class Walk(Configuration):
    weather: Weather = section(Weather)


def test_section_of_several_owners() -> None:
    """A section is an instance of each owner's keys, which stand in the order of its bases."""
    assert isinstance(Weather(), Clock) and isinstance(Weather(), Sky)
    assert [member.name for member in members_of(Weather)] == ["every", "cloud"]
    assert defaults_of(Walk) == {"mode": "train", "resume": None, "weather": {"every": 7, "cloud": None}}


def test_configurations_are_frozen() -> None:
    """What a run was told never changes; a copy has other values."""
    walk = Walk()
    with pytest.raises(FrozenInstanceError):
        walk.weather.every = 3  # type: ignore[misc]
    other = with_values(walk, {"weather.every": 3, "mode": "plan"})
    assert (other.weather.every, other.mode, other.weather.cloud) == (3, "plan", None) and walk == Walk()


def test_keys_have_one_owner() -> None:
    """No key is declared twice, neither within a section nor in two sections."""
    for kind in MODES.kinds.values():
        for member in members_of(kind):
            owners = Counter(
                name
                for base in getattr(member, "kind", kind).__mro__
                for name in vars(base).get("__annotations__", {})
                if getattr(member, "kind", kind) is not kind
            )
            assert [name for name, count in owners.items() if count > 1] == [], member.name


def test_declared_keys_need_not_be_printed(tmp_path: Path) -> None:
    """Hydra learns keys from their declarations: a new one works before it is in conf/config.yaml."""
    shutil.copytree(CONF, tmp_path / "conf")
    printed = tmp_path / "conf" / "config.yaml"
    lines = printed.read_text().splitlines(keepends=True)
    printed.write_text("".join(line for line in lines if "skip_spikes" not in line))
    with hydra.initialize_config_dir(str(tmp_path / "conf"), version_base="1.3"):
        assert check(hydra.compose("config"), load_sizes()).training.skip_spikes is None
        assert check(hydra.compose("config", ["training.skip_spikes=6"]), load_sizes()).training.skip_spikes == 6


def test_default_configuration_in_a_plain_script() -> None:
    """It needs no other import."""
    code = "from zero.commands.modes import default_config, typed; print(typed(default_config()).statistics.every)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["None"]


def test_rules_of_owners() -> None:
    """What an owner expects of its keys is refused by name."""
    spikes = "training.max_skipped_in_a_row=0: expected at least 1, as training.skip_spikes=6.0"
    with pytest.raises(UserError, match=spikes):
        check(compose("training.max_skipped_in_a_row=0", "training.skip_spikes=6"), load_sizes())
    with pytest.raises(UserError) as caught:
        check(compose("model.size=gpt_neo_125m", "training.sample_tokens=9000"), load_sizes())
    assert "training.sample_tokens=9000: expected at most 2047, one less than the learned positions" in str(
        caught.value
    )


def test_default_configuration_is_the_checked_one() -> None:
    assert OmegaConf.to_container(default_config()) == asdict(check(compose(), load_sizes()))
    lion = asdict(check(compose("optimizer=lion"), load_sizes()))
    assert OmegaConf.to_container(default_config(optimizer="lion")) == lion
    assert asdict(typed(default_config())) == asdict(check(compose(), load_sizes()))


@pytest.mark.parametrize("name", sorted({each.name for each in all_keys(MODES.first)} - {"mode"}))
def test_values_that_are_the_defaults(name: str) -> None:
    """A key that is given with its default is never refused as one without an effect, in any mode."""
    for mode in MODES.kinds:
        check(compose(f"mode={mode}"), load_sizes(), [name, name.rpartition(".")[0]])


@pytest.mark.parametrize(("value", "is_average"), [("true", False), ("ema", True)])
def test_weights_of_a_warm_start(value: str, is_average: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """`model.warm_start=ema` begins with the moving average of the weights."""
    taken: list[bool] = []
    monkeypatch.setattr(fresh, "described_folder", lambda place: None)
    monkeypatch.setattr(fresh.warm_start, "warm_start", lambda place, model, ema, seed: taken.append(ema))
    job: Any = SimpleNamespace(
        model=SimpleNamespace(tuning=None), programs=SimpleNamespace(start=lambda params: params)
    )
    config = check(compose(f"model.warm_start={value}", "model.model_path=run"), load_sizes())
    fresh.new_state(config.seed, config.model, config.tuning, job, {}, TrainingPosition(global_rows=1))
    assert taken == [is_average]


@pytest.mark.parametrize("mode", MODES.kinds)
def test_copies_in_other_processes(mode: str) -> None:
    """A process that plans gets the configuration as it is."""
    config: Any = check(compose(f"mode={mode}", "distributed.cpu_devices=7"), load_sizes())
    copied: Any = pickle.loads(pickle.dumps(config))
    assert copied == config and [field.name for field in fields(copied)] == [field.name for field in fields(config)]
