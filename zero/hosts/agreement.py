"""Agreement between hosts: sums, messages from host 0, barriers, and decisions at the same step."""

from __future__ import annotations

import hashlib
import json
import secrets
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental.multihost_utils import reached_preemption_sync_point

from zero.base.errors import Unavailable, UserError, first_line
from zero.partition.pmapped import pmap
from zero.partition.whole_state import coordination_client

LOOK_SECONDS = 24 * 3600  # that hosts wait for what host 0 looks up; `distributed.start_minutes` ends them before
ANSWER_SECONDS = 300  # within which all hosts that have joined send or take a message
_arrivals = 0  # at any of these functions, by this host
_advances = 0  # of the work of this host alone
_calls: Counter[str] = Counter()  # by name: the store refuses a key that it has


def arrivals() -> int:
    """How often this host has come where hosts meet; a host with fewer than others is the one they wait for."""
    return _arrivals


def arrive() -> None:
    """Counts an arrival of this host where all hosts come equally often."""
    global _arrivals
    _arrivals += 1


def advances() -> int:
    """How often this host has called `advance`."""
    return _advances


def advance() -> None:
    """Counts progress of this host in work that no other host does, such as preparing a corpus."""
    global _advances
    _advances += 1


def sum_over_hosts(*numbers: int) -> list[int]:
    """Sums over hosts, modulo 2^32, by an all-reduce; all hosts call it at the same step."""
    arrive()
    if jax.process_count() == 1:
        return [number % 2**32 for number in numbers]
    return _sum()(_parts(numbers)).tolist()


def is_host_0() -> bool:
    return jax.process_index() == 0


def broadcast(name: str, text: str, seconds: int = ANSWER_SECONDS) -> str:
    """Host 0's text, on all hosts, which call it in the same order.

    Raises:
      Unavailable: host 0 did not send it within so many seconds; the message has `name`.
    """
    arrive()
    if jax.process_count() == 1:
        return text
    client = coordination_client()
    key = _next_key(f"broadcast/{name}")
    if jax.process_index() == 0:
        client.key_value_set(key, text)
    try:
        return str(client.blocking_key_value_get(key, 1000 * seconds))
    except jax.errors.JaxRuntimeError as error:
        raise Unavailable(f"{name}: host 0 did not answer for {seconds} s ({first_line(error)})") from error


def on_host_0(name: str, look: Callable[[], Any], /) -> Any:
    """What a function returns on host 0, as JSON can hold it, on all hosts, which call it in the same order.

    A thousand hosts would otherwise ask a bucket the same questions in the same second.

    Raises:
      UserError: the function raised it on host 0.
    """
    if jax.process_count() == 1:
        return look()
    answer = ""
    if is_host_0():
        try:
            answer = json.dumps({"result": look()})
        except UserError as error:
            broadcast(name, json.dumps({"error": str(error), "may_succeed": isinstance(error, Unavailable)}))
            raise
    answers = json.loads(broadcast(name, answer, LOOK_SECONDS))
    if "error" in answers:
        raise (Unavailable if answers["may_succeed"] else UserError)(f"on host 0: {answers['error']}")
    return answers["result"]


def union(name: str, texts: Iterable[str]) -> set[str]:
    """The texts of all hosts, each once, on all hosts, which call it in the same order.

    Each host asks once for all texts, and is sent a text that many hosts have only once: a question per host, or a
    text of each host to each host, would be the square of their number (docs/decisions/fault-tolerance.md).
    """
    arrive()
    if jax.process_count() == 1:
        return set(texts)
    client = coordination_client()
    key = _next_key(f"union/{name}")
    for text in texts:
        client.key_value_set(f"{key}/{hashlib.sha256(text.encode()).hexdigest()}", text, allow_overwrite=True)
    arrived = f"{key}-arrived"
    client.key_value_set(f"{arrived}/{jax.process_index()}", "1")
    try:
        client.wait_at_barrier(key, 1000 * ANSWER_SECONDS)
    except jax.errors.JaxRuntimeError as error:
        raise Unavailable(
            f"{name}: {_missing(arrived)} did not respond for {ANSWER_SECONDS} s ({first_line(error)})"
        ) from error
    return {str(text) for _, text in client.key_value_dir_get(f"{key}/")}


def reports(name: str, report: str | None) -> dict[int, str]:
    """What some hosts report, by host in ascending order, on all hosts, which call it in the same order.

    Hosts with nothing to report, None, add nothing to what each is sent.
    """
    own = [] if report is None else [json.dumps([jax.process_index(), report])]
    return dict(sorted(map(json.loads, union(name, own))))


def left_by_hosts(name: str, text: str) -> Callable[[int], str]:
    """Leaves a text for the other hosts, and returns a function that asks for the text of one of them.

    All hosts call it in the same order. A host that needs the texts of a few is not sent those of all.

    The function raises Unavailable if the host has not left its text within `ANSWER_SECONDS`.
    """
    client = coordination_client()
    key = _next_key(f"left/{name}")
    client.key_value_set(f"{key}/{jax.process_index()}", text)

    def text_of(host: int) -> str:
        try:
            return str(client.blocking_key_value_get(f"{key}/{host}", 1000 * ANSWER_SECONDS))
        except jax.errors.JaxRuntimeError as error:
            raise Unavailable(
                f"{name}: host {host} did not respond for {ANSWER_SECONDS} s ({first_line(error)})"
            ) from error

    return text_of


def _missing(key: str) -> str:
    """The hosts that have set no text under a key of the store."""
    try:
        texts = dict(coordination_client().key_value_dir_get(f"{key}/"))
    except jax.errors.JaxRuntimeError:
        return "host 0, the coordinator,"
    hosts = [str(host) for host in range(jax.process_count()) if f"{key}/{host}" not in texts]
    if not hosts:
        return "a host that joined too late"
    return f"host {', '.join(hosts)}"


def _next_key(name: str) -> str:
    """A key of the store that no call of this process has had, and that all hosts have for the same call."""
    _calls[name] += 1
    return f"zero/{name}/{_calls[name]}"


def wait_for_all() -> None:
    """A barrier: returns when every host has called it."""
    sum_over_hosts(0)


@contextmanager
def host_0_first() -> Iterator[None]:
    """Runs the block on host 0 first, then on the others, because hosts may share a disk."""
    if not is_host_0():
        wait_for_all()
    yield
    if is_host_0():
        wait_for_all()
    wait_for_all()


def check_shared(key: str, path: Path | str) -> None:
    """Checks that all hosts see what host 0 writes to a directory, or name the same place in a bucket.

    Raises:
      UserError: some do not; `key` is the configuration key that the message names.
    """
    if jax.process_count() == 1:
        return
    if not isinstance(path, Path):
        if len(places := sorted(union(key, [path]))) > 1:
            raise UserError(f"{key}: expected the same on all hosts, got {', '.join(places)}")
        return
    probe = path / f".visible-to-all.{broadcast(key, secrets.token_hex(4))}"  # as `storage.remove_unfinished` expects
    if jax.process_index() == 0:
        path.mkdir(parents=True, exist_ok=True)
        probe.touch()
    wait_for_all()
    (missing,) = sum_over_hosts(not probe.exists())
    if jax.process_index() == 0:
        probe.unlink()
    if missing:
        raise UserError(
            f"{key}: {missing} of {jax.process_count()} hosts do not see {path} of host 0; several hosts need "
            "data.bucket_path, or a shared disk"
        )


class AnyHost:
    """Decisions that all hosts take at the same step: whether any of them has raised a flag.

    Args:
      lag: 0 answers with the flags of this call; 1 with the flags of the previous call, without waiting for devices.
    """

    def __init__(self, lag: int) -> None:
        self._pending: list[jax.Array] = []
        self._lag = lag

    def __call__(self, step: int, *flags: bool) -> list[bool]:
        """Whether any host has raised each flag. All hosts call it equally often at every step.

        The first flag is also raised when jax is notified of the maintenance or preemption of a host.
        """
        arrive()
        if jax.process_count() == 1:
            return list(flags)
        self._pending.append(_sum()(_parts(flags)))
        raised = self._pending.pop(0).tolist() if len(self._pending) > self._lag else [0] * len(flags)
        is_preempted = reached_preemption_sync_point(step)  # orbax calls it too: all hosts have to count alike
        return [raised[0] > 0 or is_preempted, *(number > 0 for number in raised[1:])]


def _parts(numbers: tuple[int, ...] | tuple[bool, ...]) -> np.ndarray:
    """(local devices, numbers): this host's numbers on its first device, zeros on the others."""
    parts = np.zeros((jax.local_device_count(), len(numbers)), np.uint32)
    parts[0] = [number % 2**32 for number in numbers]
    return parts


@cache
def _sum() -> Callable[[np.ndarray], jax.Array]:
    return pmap(partial(jax.lax.psum, axis_name="hosts"), "hosts", out_axes=None)
