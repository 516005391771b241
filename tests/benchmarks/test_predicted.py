"""The published steps that predictions are compared with: each is a step that a plan accepts, with as many tokens."""

from pathlib import Path

import pytest

from benchmarks import predicted
from zero.costs.topology import slice_shape

# Tokens of all devices per step, as published; Levanter's of config/gpt2_7b.yaml.
TOKENS = {
    "mtj-2.7b": 16_384,
    "mtj-4.8b": 16_384,
    "mtj-6b": 65_536,
    "shmap-6.9b": 131_072,
    "zero-124m": 524_288,
    "zero-760m": 524_288,
    "lingvo-137b": 16_384,
    "llama-8b": 8 * 3 * 8_192,
    "levanter-6.7b": 1_024 * 2_048,
    "levanter-13b": 1_024 * 2_048,
}


@pytest.mark.parametrize("name", predicted.RUNS)
def test_published_steps(name: str) -> None:
    """A published step is planned with its number of tokens."""
    run = predicted.RUNS[name]
    request = predicted.request_of(run)
    assert [*request.config.zero.mistakes_beside(request.config, request.size, str(request.config.model))] == []
    devices = int(run.topology.rpartition("-")[2])
    assert slice_shape(run.topology)
    groups = devices // request.config.zero.tensor_shards
    assert groups * request.rows * run.context == TOKENS[name]


def test_times_and_utilizations_are_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = type("Found", (), {"seconds": 2.0})()
    monkeypatch.setattr(predicted, "predict", lambda text, devices: found)
    monkeypatch.setattr(predicted, "find_devices", lambda topology: [type("V3", (), {"device_kind": "TPU v3"})()])
    (tmp_path / "a.txt").write_text("a program")
    assert predicted.compare(predicted.RUNS["mtj-6b"], tmp_path / "a.txt") == (2.0, 3.373)
    _, measured = predicted.compare(predicted.RUNS["levanter-6.7b"], tmp_path / "a.txt")
    tokens = 4 * 2_048
    assert measured == pytest.approx(6 * 6.8e9 * tokens / 0.473 / 61.5e12, rel=0.1)
