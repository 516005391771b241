"""Random configurations and damaged files: whatever is in them, they are read, or refused in one line with status 2."""

import copy
import math
import os
import random
import re
from pathlib import Path
from typing import Any

import pytest
from hydra.errors import HydraException
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from tests.config.composing import compose
from tests.helpers.readers import READERS, outcome, valid_files
from zero.base.errors import UserError
from zero.commands.cli import all_mistakes, resolve
from zero.commands.modes import default_config, describe
from zero.config.saved_config import flat_config

COMPOSED = compose()
KEYS = sorted(flat_config(default_config()))
SECTIONS = sorted({key.partition(".")[0] for key in KEYS})
EDGES = (
    0,
    -1,
    1,
    2,
    3,
    64,
    2**31 - 1,
    2**31,
    2**32,
    2**63,
    10**30,
    True,
    0.0,
    -0.5,
    0.5,
    1e-60,
    1e308,
    math.inf,
    math.nan,
)
WORDS = (
    "",
    "auto",
    "test",
    "float32",
    "int8",
    "bfloat16",
    "linear",
    "null",
    "???",
    "2024",
    "gs://b/c",
    "a b",
    "é\ud800",
)
REFERENCES = ("${seed}", "${nope}", "${", "${oc.env:NOPE}", "${model}", "${.name}", "a${seed}b", "$", "\\${seed}")
NUMBERS = (b"9" * 5000, b"99999999999999999999", b"-1", b"1e999", b"null", b"[]", b'"x"', b"{}", b"0")
single = st.one_of(
    st.none(), st.sampled_from(EDGES), st.sampled_from(WORDS), st.sampled_from(REFERENCES), st.integers(), st.floats()
)
values = st.recursive(
    single,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.sampled_from(["index", "weight", "name", "stage"]), inner, max_size=2),
    ),
    max_leaves=4,
)


def are_apart(changed: dict[str, Any]) -> bool:
    """Whether no key lies in a section that is changed as a whole, to a list for instance, which has no keys."""
    return not any(key.startswith(f"{section}.") for section in changed for key in changed)


names = st.sampled_from([*KEYS, *SECTIONS, "nope", "training.nope"])
changes = st.dictionaries(names, values, min_size=1, max_size=4).filter(are_apart)
LONG = settings(deadline=None, max_examples=600, suppress_health_check=list(HealthCheck))
SHORT = settings(LONG, max_examples=25)


def configure(changed: dict[str, Any]) -> None:
    """Checks the default job with these values, and uses what is derived from the keys alone."""
    config = copy.deepcopy(COMPOSED)
    try:
        for key, value in changed.items():
            OmegaConf.update(config, key, value, merge=False, force_add=True)
    except OmegaConfBaseException as error:
        raise UserError(describe(error)) from error
    resolved = resolve(config, [*changed])[0]
    resolved.training.lengths(resolved.data.max_context, bool(resolved.data.last_target))


def assert_lines(status: int, message: str) -> None:
    assert status in (0, 2)
    assert (status == 0) == (message == "")
    assert not status or all(line.strip() for line in message.split("\n")), message
    assert len(message) < 20_000


def check_configuration(changed: dict[str, Any]) -> None:
    assert_lines(*outcome(lambda: configure(changed)))


def check_override(text: str) -> None:
    def run() -> None:
        try:
            resolve(compose(text), [text])
        except HydraException as error:
            raise UserError("\n".join(all_mistakes([text], error))) from error

    assert_lines(*outcome(run))


overrides = st.one_of(
    st.builds("{}={}".format, st.sampled_from(KEYS), st.text(max_size=12)),
    st.builds("{}={}".format, st.sampled_from(KEYS), st.text("[]{},:'\"$\\()=~+ 0a", max_size=9)),
    st.text(max_size=12),
)


@SHORT
@given(changes)
def test_configurations_are_run_or_refused(changed: dict[str, Any]) -> None:
    check_configuration(changed)


@settings(SHORT, max_examples=3)
@given(overrides)
def test_overrides_are_read_or_refused(text: str) -> None:
    check_override(text)


@pytest.mark.slow
@LONG
@given(changes)
def test_many_configurations_are_run_or_refused(changed: dict[str, Any]) -> None:
    check_configuration(changed)


@pytest.mark.slow
@settings(LONG, max_examples=100)
@given(overrides)
def test_many_overrides_are_read_or_refused(text: str) -> None:
    check_override(text)


def damaged(data: bytes, rng: random.Random) -> bytes:
    """The bytes after one to three accidents: a flipped bit, a cut, a repetition, deep nesting, large numbers."""
    for _ in range(rng.randint(1, 3)):
        place = rng.randrange(len(data) + 1)
        length = rng.choice([1, 2, 8, 64])
        match rng.randrange(7):
            case 0 if place < len(data):
                data = data[:place] + bytes([data[place] ^ (1 << rng.randrange(8))]) + data[place + 1 :]
            case 1:
                data = data[:place]
            case 2:
                data = data[:place] + data[place + length :]
            case 3:
                data = data[:place] + data[place : place + length] * rng.choice([2, 50]) + data[place:]
            case 4:
                data = data[:place] + rng.choice([b"[", b"{", b"(", b"-", b'{"a":', b"- "]) * 3000 + data[place:]
            case 5:
                data = re.sub(rb"\d+", lambda found: rng.choice([found[0], rng.choice(NUMBERS)]), data, count=40)
            case _:
                data = data[:place] + bytes(rng.randrange(256) for _ in range(length)) + data[place + length :]
    return data


def check_damaged(place: Path, name: str, seeds: range) -> None:
    for seed in seeds:
        folder = place / str(seed)
        folder.mkdir()
        data = damaged(valid_files()[name], random.Random(f"{name} {seed}"))
        status, message = outcome(lambda data=data, folder=folder: READERS[name](folder, data))  # type: ignore[misc]
        assert_lines(status, message)
        assert not status or name in ("config.yaml",) or str(folder) in message, message


@pytest.mark.parametrize("name", READERS)
def test_valid_files_are_read(tmp_path: Path, name: str) -> None:
    assert outcome(lambda: READERS[name](tmp_path, valid_files()[name])) == (0, "")


@pytest.mark.parametrize("name", READERS)
def test_damaged_files_are_read_or_refused(tmp_path: Path, name: str) -> None:
    check_damaged(tmp_path, name, range(8))


@pytest.mark.slow
@pytest.mark.parametrize("name", READERS)
def test_damaged_files(tmp_path: Path, name: str) -> None:
    """Many damaged files are read or refused."""
    check_damaged(tmp_path, name, range(8, int(os.environ.get("ZERO_FUZZ_CASES", "64"))))
