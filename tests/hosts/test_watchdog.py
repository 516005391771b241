"""The watchdog against a key-value store that fails, for a moment or for good (real hosts: tests/test_hosts.py)."""

import threading
import time
from typing import Any

import jax
import pytest

from zero.base.errors import Unavailable
from zero.hosts import agreement, watchdog


class Store:
    """The store of two hosts, of which the other one sends a heartbeat whenever it is asked."""

    def __init__(self, other: int) -> None:
        self.other = other
        self.is_failing, self.is_stopped = threading.Event(), threading.Event()
        self.is_silent = threading.Event()  # the other host
        self.watching: Any = None
        self.of_the_other = ""  # its last report
        self.values = {f"zero/name/{other}": "name"}
        self.reports: list[str] = []  # of this host
        self.failures = 0
        self.arrivals = 0  # of the other host
        self.beats = 0

    def key_value_set(self, key: str, value: str, overwrite: bool = False) -> None:
        if self.is_stopped.is_set():
            threading.Event().wait(30)
        if self.is_failing.is_set():
            self.failures += 1
            raise jax.errors.JaxRuntimeError("UNAVAILABLE: failed to connect")
        self.values[key] = value
        self.reports.append(value)

    def key_value_dir_get(self, directory: str) -> list[tuple[str, str]]:
        if directory == "zero/heartbeat/":
            return [(f"zero/heartbeat/{self.other}", self.report())]
        return [(key, value) for key, value in self.values.items() if key.startswith(directory)]

    def blocking_key_value_get(self, key: str, timeout: int) -> str:
        if key == "zero/names":
            return self.values.get(key, '["name", "name"]')
        assert key == f"zero/heartbeat/{self.other}" == "zero/heartbeat/0"
        return self.report()

    def report(self) -> str:
        """The newest one of the other host."""
        self.beats += 1
        beat = 1 if self.is_silent.is_set() else self.beats
        return self.of_the_other or f"{beat} {self.arrivals} {self.arrivals}"


@pytest.fixture(params=[1])
def watched(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Any:
    """The watchdog of a host, at a hundred times its speed, and the status with which it would end the process."""
    ended: list[int] = []
    monkeypatch.setattr(watchdog, "HEARTBEAT_SECONDS", 0.02)
    monkeypatch.setattr(watchdog, "SILENCE_SECONDS", 0.5)
    monkeypatch.setattr(watchdog, "LEAVE_SECONDS", 0.1)
    monkeypatch.setattr(watchdog, "exit_immediately", ended.append)
    monkeypatch.setattr(jax, "process_index", lambda: request.param)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    store = Store(other=1 - request.param)
    watching = watchdog._Watchdog(store, stall_minutes=None)
    store.watching = watching
    watching.start()
    yield store, ended
    watching._stopped.set()
    watching.join(900)


def wait_until(condition: Any) -> None:
    deadline = time.monotonic() + 900
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_brief_failures_end_nobody(watched: Any) -> None:
    """Requests that fail for a moment end no process."""
    store, ended = watched
    for _ in range(3):
        wait_until(lambda beats=store.beats: store.beats > beats)
        store.is_failing.set()
        wait_until(lambda failures=store.failures: store.failures > failures + 1)
        store.is_failing.clear()
    wait_until(lambda beats=store.beats: store.beats > beats + 2)
    assert not ended


def test_silent_store_ends_the_process(watched: Any, caplog: pytest.LogCaptureFixture) -> None:
    """A store that stays silent ends the process, which names the host."""
    store, ended = watched
    store.is_failing.set()
    wait_until(lambda: ended)
    assert ended[0] == 1
    assert "host 0 of 2 (name) the coordinator, has not responded for 0.5 s (UNAVAILABLE" in caplog.text


def test_store_that_never_answers(watched: Any, caplog: pytest.LogCaptureFixture) -> None:
    """A store that never answers ends the process too.

    Where host 0 is stopped, requests neither fail nor return.
    """
    store, ended = watched
    store.is_stopped.set()
    wait_until(lambda: ended)
    assert ended == [1]
    assert "host 0 of 2 (name) the coordinator, has not responded for 0.5 s (no answer)" in caplog.text


def test_reason_of_a_leaving_host(watched: Any, caplog: pytest.LogCaptureFixture) -> None:
    """The reason of a host that leaves is repeated, with its exit status."""
    store, ended = watched
    store.of_the_other = "leaving 2 0 ended: error: shard 1.tar is damaged"
    wait_until(lambda: ended)
    assert ended == [2]
    assert "host 0 of 2 (name) ended: error: shard 1.tar is damaged; this host exits too" in caplog.text
    assert store.reports[-1] == store.of_the_other  # for host 0, which waits until all have read it


@pytest.mark.parametrize("watched", [0], indirect=True)
def test_host_0_tells_who_is_silent(watched: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Host 0 hears all others; the others hear only host 0, whose last report names the one that was lost."""
    store, ended = watched
    store.is_silent.set()
    wait_until(lambda: ended)
    assert "host 1 of 2 (name) has sent no heartbeat for 0.5 s; this host exits too" in caplog.text
    assert store.reports[-1] == "leaving 1 1 has sent no heartbeat for 0.5 s"


@pytest.mark.parametrize(
    "error",
    [
        ValueError("UNKNOWN: Gloo AllGather failed: Connection closed by peer [127.0.0.1]:5"),
        jax.errors.JaxRuntimeError("FAILED_PRECONDITION: Buffer Definition Event: Gloo all-reduce failed: closed"),
        jax.errors.JaxRuntimeError("UNAVAILABLE: failed to connect to all addresses"),
    ],
)
@pytest.mark.parametrize("is_named", [True, False])
def test_lost_connection_is_one_line(
    watched: Any, monkeypatch: pytest.MonkeyPatch, error: Exception, is_named: bool
) -> None:
    """The error of a lost connection is never raised as it is, with a traceback.

    Where the watchdog names the host, slowly, it ends the process; else the line says what was lost.
    """
    store, ended = watched

    def end_slowly(status: int) -> None:
        time.sleep(1)
        ended.append(status)

    monkeypatch.setattr(watchdog, "exit_immediately", end_slowly)
    monkeypatch.setattr(watchdog.atexit, "register", lambda function, *arguments: None)
    monkeypatch.setattr(watchdog, "_watchdog", store.watching)
    if is_named:
        store.is_silent.set()
    else:
        monkeypatch.setattr(watchdog, "SILENCE_SECONDS", 0.1)
    with pytest.raises(Unavailable, match="the connection to another host was lost: ") as caught:
        with watchdog.ending_together():
            if is_named:
                wait_until(store.watching._leaving.locked)
            raise error
    assert "\n" not in str(caught.value)
    assert ended == [1] * is_named  # in a real process nothing is raised after that


def test_stalled_training_shows_stacks(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Training that stalls ends with the stacks of its threads."""
    ended: list[int] = []
    monkeypatch.setattr(watchdog, "HEARTBEAT_SECONDS", 0.02)
    monkeypatch.setattr(watchdog, "exit_immediately", ended.append)
    watching = watchdog._Watchdog(None, stall_minutes=0.5 / 60)
    monkeypatch.setattr(watchdog, "_watchdog", watching)
    watching.start()
    time.sleep(1)
    assert not ended  # before the first step it may take as long as it needs
    for _ in range(40):  # longer than it may stand still
        watchdog.progress()
        wait_until(lambda: not watching.has_progress.is_set())
    assert not ended
    wait_until(lambda: ended)
    assert ended[0] == 1
    assert "host 0 of 1" in caplog.text and "has made no progress for distributed.stall_minutes" in caplog.text
    assert "thread MainThread" in caplog.text and "in wait_until" in caplog.text
    watching._stopped.set()


def test_a_start_without_progress_ends(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Before the first step too, each arrival where hosts meet is progress, and a limit ends what never arrives."""
    ended: list[int] = []
    monkeypatch.setattr(watchdog, "HEARTBEAT_SECONDS", 0.02)
    monkeypatch.setattr(watchdog, "exit_immediately", ended.append)
    watching = watchdog._Watchdog(None, stall_minutes=None, start_minutes=0.5 / 60)
    watching.start()
    for _ in range(15):
        time.sleep(0.1)
        agreement.broadcast("a phase", "")
    assert not ended
    wait_until(lambda: ended)
    assert ended[0] == 1 and "has made no progress for distributed.start_minutes" in caplog.text
    assert "in wait_until" in caplog.text
    watching._stopped.set()


def test_a_conversation_has_no_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[int] = []
    monkeypatch.setattr(watchdog, "HEARTBEAT_SECONDS", 0.02)
    monkeypatch.setattr(watchdog, "exit_immediately", ended.append)
    watching = watchdog._Watchdog(None, stall_minutes=0.1 / 60, start_minutes=0.1 / 60)
    monkeypatch.setattr(watchdog, "_watchdog", watching)
    watchdog.wait_without_limit()
    watching.start()
    time.sleep(0.5)
    assert not ended
    watching._stopped.set()


@pytest.mark.parametrize("watched", [0, 1], indirect=True)
@pytest.mark.parametrize("is_behind", [True, False])
def test_who_has_not_arrived(
    watched: Any, is_behind: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The host that others wait for is the one with the fewest arrivals; where it advances, the others go on."""
    store, ended = watched
    watching = store.watching
    watching._minutes[watchdog._Limit.START] = 0.5 / 60
    for _ in range(15):
        time.sleep(0.1)
        store.arrivals += 1
    assert not ended
    monkeypatch.setattr(agreement, "_arrivals", store.arrivals + is_behind)
    wait_until(lambda: ended)
    other = f"host {1 - watching._host} of 2 (name)"
    stalled = "has made no progress for distributed.start_minutes"
    if is_behind:
        assert f"{other} {stalled}" in caplog.text and "and has not arrived where the others wait" in caplog.text
    else:
        own = f"host {watching._host} of 2 ({watching._names[watching._host]})"
        assert f"{own} {stalled}" in caplog.text and "where the others" not in caplog.text


@pytest.mark.parametrize("watched", [0], indirect=True)
def test_a_host_that_hangs_is_told(watched: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Host 0 stays until that host, which sends heartbeats, has read why it ends; not so for one that is silent."""
    store, _ = watched
    monkeypatch.setattr(watchdog, "LEAVE_SECONDS", 3600)
    watching = store.watching
    leaving = threading.Thread(target=watching._leave, args=(1, f"{watchdog._STALLED} minutes", 1), daemon=True)
    leaving.start()
    beats = store.beats
    wait_until(lambda: store.beats > beats + 3)
    assert leaving.is_alive()
    store.of_the_other = "leaving 1 1 has made no progress"
    leaving.join(60)
    assert not leaving.is_alive()
    store.of_the_other = ""
    leaving = threading.Thread(target=watching._leave, args=(1, "has sent no heartbeat", 1), daemon=True)
    leaving.start()
    leaving.join(60)
    assert not leaving.is_alive()


@pytest.mark.parametrize("watched", [0], indirect=True)
def test_work_of_one_host_alone(
    watched: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is progress, and no arrival by which the others would be behind."""
    store, ended = watched
    watching = store.watching
    monkeypatch.setattr(agreement, "_arrivals", store.arrivals)
    watching._minutes[watchdog._Limit.START] = 0.5 / 60
    for _ in range(10):
        time.sleep(0.1)
        agreement.advance()
    assert not ended
    wait_until(lambda: ended)
    assert f"host 0 of 2 ({watching._names[0]}) has made no progress" in caplog.text
    assert "where the others" not in caplog.text


@pytest.mark.parametrize("watched", [1], indirect=True)
def test_reading_all_reports_is_no_progress(watched: Any) -> None:
    """A host knows what host 0 knows; its own report, which has that too, adds nothing."""
    watching = watched[0].watching
    watching._stopped.set()
    for thread in watching._threads:
        thread.join(10)
    watching._reports = {0: "5 3 7"}
    known = watching._known_progress()
    watching._reports = {0: "5 3 7", 1: "6 4 11"}
    assert watching._known_progress() == known


def test_lost_connection_is_said_once(watched: Any) -> None:
    """Where jax's thread has named the lost host, the error of the collective waits for the end of the process."""
    store, ended = watched
    store.is_failing.set()
    watching = store.watching
    naming = threading.Thread(target=watching._end, args=(0, "the coordinator, is gone"))
    naming.start()
    wait_until(watching._stopped.is_set)  # the watching thread ends, and no heartbeat is sent any more
    watching.leave("ended: error: Gloo all-reduce failed", 1)
    assert ended == [1]
    naming.join(60)


def test_failed_run_is_watched_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A notebook lives on after its run has failed, and is not ended as stalled."""
    watching = watchdog._Watchdog(None, stall_minutes=1)
    monkeypatch.setattr(watchdog, "_watchdog", watching)
    watching.start()
    with pytest.raises(ValueError, match="of the run"), watchdog.ending_together():
        raise ValueError("of the run")
    watching.join(60)
    assert not any(thread.is_alive() for thread in watching._threads)
    assert watchdog._watchdog is None


def test_one_watchdog_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one before would end the process, as it hears of no further progress."""
    before = watchdog._Watchdog(None, stall_minutes=1)
    monkeypatch.setattr(watchdog, "_watchdog", before)
    before.start()
    watchdog.start(stall_minutes=None)
    before.join(60)
    assert not any(thread.is_alive() for thread in before._threads)
    now = watchdog._watchdog
    assert now is not None and now is not before
    now.finish()


def test_host_that_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host that joined, and then stopped before its first word, is named by all."""
    monkeypatch.setattr(watchdog, "SILENCE_SECONDS", 0.3)
    monkeypatch.setattr(jax, "process_count", lambda: 3)
    store = Store(other=2)
    monkeypatch.setattr(jax, "process_index", lambda: 0)
    message = "host 1 of 3 joined, then did not respond for 0.3 s"
    with pytest.raises(Unavailable, match=message):
        watchdog._Watchdog(store, stall_minutes=None)
    monkeypatch.setattr(jax, "process_index", lambda: 2)
    with pytest.raises(Unavailable, match=message):
        watchdog._Watchdog(store, stall_minutes=None)


def test_host_0_that_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    class Gone(Store):
        def blocking_key_value_get(self, key: str, timeout: int) -> str:
            raise jax.errors.JaxRuntimeError(f"DEADLINE_EXCEEDED: {key}")

    monkeypatch.setattr(jax, "process_index", lambda: 1)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(
        Unavailable, match=r"host 0 of 2, the coordinator, .* did not list the hosts \(DEADLINE_EXCEEDED"
    ):
        watchdog._Watchdog(Gone(other=0), stall_minutes=None)


def test_others_hear_all_where_host_0_has_finished(monkeypatch: pytest.MonkeyPatch) -> None:
    """Host 0 no longer tells who was lost, so the others read all reports themselves."""
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    monkeypatch.setattr(jax, "process_count", lambda: 3)
    store = Store(other=0)
    watching = watchdog._Watchdog(store, stall_minutes=None)
    assert list(watching._read_reports()) == [0]
    store.of_the_other = "finished"
    monkeypatch.setattr(store, "key_value_dir_get", lambda directory: [("zero/heartbeat/2", "7")])
    assert watching._read_reports() == {2: "7"}


def test_a_slow_host_0_is_not_asked_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """All reports, whose number is that of the hosts, are read only if host 0 is silent several times in a row."""
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    monkeypatch.setattr(jax, "process_count", lambda: 3)
    store = Store(other=0)
    watching = watchdog._Watchdog(store, stall_minutes=None)
    asked: list[str] = []

    def read_all(directory: str) -> list[tuple[str, str]]:
        asked.append(directory)
        return [("zero/heartbeat/0", store.of_the_other)]

    monkeypatch.setattr(store, "key_value_dir_get", read_all)
    for beat in (1, 1, 1, 2, 2, 3):
        store.of_the_other = f"{beat} 0 0"
        watching._reports = watching._read_reports()
    assert not asked
    for _ in range(3):
        watching._reports = watching._read_reports()
    assert asked == ["zero/heartbeat/"]
