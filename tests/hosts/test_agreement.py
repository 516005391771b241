"""Messages between hosts, over a store that refuses a key that it has, and the order of two real ones."""

from pathlib import Path

import jax
import pytest

from tests.helpers import hosts
from zero.base.errors import Unavailable, UserError
from zero.hosts import agreement


class Store:
    """jax's key-value store, as host 0 of two sees it; the other host answers at once."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}

    def key_value_set(self, key: str, value: str, allow_overwrite: bool = False) -> None:
        if key in self.values and not allow_overwrite:
            raise jax.errors.JaxRuntimeError(f"ALREADY_EXISTS: key {key} already exists.")
        self.values[key] = value

    def blocking_key_value_get(self, key: str, timeout: int) -> str:
        return self.values[key]

    def wait_at_barrier(self, name: str, timeout: int) -> None:
        self.values[f"{name}/of host 1"] = "of host 1"

    def key_value_dir_get(self, directory: str) -> list[tuple[str, str]]:
        return sorted((key, value) for key, value in self.values.items() if key.startswith(directory))[::-1]


def test_names_may_be_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """No two calls have the same key, whatever their names are; each gives what was sent in it."""
    store = Store()
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(agreement, "coordination_client", lambda: store)
    for number in range(3):
        for name in ("hub org/model", "hub", "hub/1"):
            assert agreement.broadcast(name, f"{name} {number}") == f"{name} {number}"
            assert agreement.union(name, [f"{name} {number}"]) == {f"{name} {number}", "of host 1"}
            assert agreement.left_by_hosts(name, f"{name} {number}")(0) == f"{name} {number}"
    assert len(store.values) == 45


class SharedStore(Store):
    """The store as several hosts see it one after the other; the first of them find nothing of the later ones."""

    def wait_at_barrier(self, name: str, timeout: int) -> None:
        pass


def test_only_hosts_with_a_report_are_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each host is told what some report, in the order of hosts, and nothing of the others."""
    store = SharedStore()
    monkeypatch.setattr(jax, "process_count", lambda: 12)
    monkeypatch.setattr(agreement, "coordination_client", lambda: store)
    heard = {}
    for host in range(12):
        agreement._calls.clear()
        monkeypatch.setattr(jax, "process_index", lambda host=host: host)
        heard = agreement.reports("contents", f"of {host}" if host in (2, 10) else None)
    assert list(heard.items()) == [(2, "of 2"), (10, "of 10")]


def test_places_that_differ_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hosts that name different places in buckets are told all of them, each once and as it was written."""
    store = SharedStore()
    monkeypatch.setattr(jax, "process_count", lambda: 3)
    monkeypatch.setattr(agreement, "coordination_client", lambda: store)
    for host, place in enumerate(("gs://a/saved", "gs://a/saved", "gs://b//saved")):
        agreement._calls.clear()
        monkeypatch.setattr(jax, "process_index", lambda host=host: host)
        if host < 2:
            agreement.check_shared("data.checkpoint_directory", place)
            continue
        with pytest.raises(UserError, match="expected the same on all hosts, got gs://a/saved, gs://b//saved"):
            agreement.check_shared("data.checkpoint_directory", place)


def test_missing_host_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a host does not take part, the line names it and what was gathered."""

    class Missing(Store):
        def wait_at_barrier(self, name: str, timeout: int) -> None:
            raise jax.errors.JaxRuntimeError("DEADLINE_EXCEEDED: Barrier timed out")

    store = Missing()
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(agreement, "coordination_client", lambda: store)
    with pytest.raises(Unavailable, match=r"contents: host 1 did not respond for 300 s \(DEADLINE_EXCEEDED"):
        agreement.union("contents", ["mine"])


def test_host_0_is_first(tmp_path: Path) -> None:
    """The other host begins when host 0 has ended, and both continue when the other one has.

    What host 0 alone looks up, or fails to, both know.
    """
    hosts.run_two(Path(__file__).with_name("two_hosts.py"), tmp_path)


def test_sums_of_large_numbers() -> None:
    """Sums are modulo 2^32, of numbers of any size: checksums of many rows exceed 64 bits."""
    assert agreement._parts((2**63, 2**64 + 5, 2**80 - 1))[0].tolist() == [0, 5, 2**32 - 1]
    assert agreement.sum_over_hosts(2**64 + 5) == [5]
