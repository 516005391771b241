"""Checkpoints where storage fails: damage is reported, and what was reported as saved is still there."""

import errno
import json
import logging
import os
import re
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.helpers import hosts
from tests.helpers.checkpoints import (
    META,
    assert_same,
    make_state,
    restore_small,
    run,
    save_small,
    small,
)
from tests.helpers.disks import small_disk
from zero.base.errors import UserError
from zero.checkpoints.damage import DamagedCheckpoint, write_errors
from zero.checkpoints.manager import Checkpoints
from zero.checkpoints.metadata import FORMAT, META_CHECKSUM, meta_checksum
from zero.partition.checksums import array_checksum

DAMAGE: dict[str, Callable[[Path], object]] = {
    "deleted": Path.unlink,
    "empty": lambda file: file.write_bytes(b""),
    "torn": lambda file: file.write_bytes(file.read_bytes()[: file.stat().st_size // 2]),
    "zeros": lambda file: file.write_bytes(bytes(file.stat().st_size)),
}
# orbax writes these, and nothing reads them: what is said in the files of all hosts is merged into state/d.
UNREAD = r"_CHECKPOINT_METADATA|.*commit_success.txt|state/_sharding|state/ocdbt.process_0/manifest.ocdbt"


def test_every_damage(tmp_path: Path) -> None:
    """Every damage is reported in one line or does no harm."""
    with Checkpoints(tmp_path / "whole", keep=1) as checkpoints:
        save_small(checkpoints, 5)
    expected, found, harmless = make_state(*small(8), seed=5), {}, set()
    files = [path.relative_to(tmp_path / "whole") for path in (tmp_path / "whole").rglob("*") if path.is_file()]
    for file in files:
        for kind, damage in DAMAGE.items():
            place = tmp_path / f"{kind}-{str(file).replace('/', '-')}"
            shutil.copytree(tmp_path / "whole", place)
            damage(place / file)
            name = str(file.relative_to("5"))
            try:
                assert_same(restore_small(place, 5), expected, small(8)[0])
                harmless.add((name, kind))
            except DamagedCheckpoint as error:
                found[name, kind] = str(error)
                assert str(error).startswith(f"checkpoint {place}, step 5: ")
                assert " cannot be read: " in str(error) and "\n" not in str(error)
            except AssertionError:
                assert kind == "zeros"  # right in length, and nothing but the bytes themselves would tell
                found[name, kind] = "nothing"
    for name, kind in harmless:
        assert re.fullmatch(UNREAD, name) or kind == "deleted" or name.startswith("state/ocdbt.process_0/d/"), name
    damaged = {name for name, kind in found if kind in ("empty", "torn")}
    assert {"meta/metadata", "state/_METADATA", "state/manifest.ocdbt"} <= damaged
    assert any(name.startswith("state/d/") for name in damaged)
    assert any(name.startswith("state/ocdbt.process_0/d/") for name in damaged)
    for kind in ("deleted", "empty", "torn"):
        assert any(re.search(r"leaf (w|b) cannot be read: ", line) for (_, k), line in found.items() if k == kind)
        assert re.search("file .*5/meta/metadata", found["meta/metadata", kind])
    assert re.search("file .*5/state/_METADATA cannot be read: not valid JSON", found["state/_METADATA", "torn"])


def test_changed_leaf_is_not_read(tmp_path: Path) -> None:
    """One bit of an array, which only its checksum tells: whoever reads this leaf learns of it."""
    layout, axis = small(8)
    state = make_state(layout, axis, seed=5)
    whole = {leaf.name: np.asarray(state[leaf.name])[tuple(map(slice, leaf.shape))] for leaf in layout.leaves}
    sums = {name: array_checksum(array) for name, array in whole.items()}
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        checkpoints.save(5, state, layout, {"checksums": sums})
    piece = whole["w"][3, :8].tobytes()
    changed = bytes([piece[0] ^ 1]) + piece[1:]
    for file in (tmp_path / "5" / "state").rglob("d/*"):
        file.write_bytes(file.read_bytes().replace(piece, changed))
    with Checkpoints(tmp_path, None) as checkpoints:
        np.testing.assert_array_equal(checkpoints.read(5, "b"), whole["b"])
        with pytest.raises(DamagedCheckpoint, match=f"^checkpoint {tmp_path}, step 5: w differs from what was saved"):
            checkpoints.read(5, "w")


def test_changed_metadata_are_damage(tmp_path: Path) -> None:
    """Metadata that were changed, or have another form, are damage.

    Also where they are valid JSON: nothing else would tell that a run continues with other rows.
    """
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        layout, axis = small(8)
        checkpoints.save(5, make_state(layout, axis), layout, META, validation_loss=float("nan"))
        file = tmp_path / "5" / "meta" / "metadata"
        checkpoints.wait()
        text = file.read_text()
        written, read = json.loads(text), checkpoints.meta(5)
        assert read["cursor"] == written["cursor"] == {"batches": 7, "seed": 1}

        def damaged(content: str) -> str:
            file.write_text(content)
            with pytest.raises(DamagedCheckpoint) as caught:
                checkpoints.meta(5)
            assert str(caught.value).startswith(f"checkpoint {tmp_path}, step 5: file {file} cannot be read: ")
            return str(caught.value)

        changes = {"cursor": {"batches": 77, "seed": 1}, "validation_loss": 1.0, "shapes": {}, "new": 1}
        for key, value in changes.items():
            assert "checksum" in damaged(json.dumps(written | {key: value}))
        without_checksum = {key: value for key, value in written.items() if key != META_CHECKSUM}
        for text in ("5", "[]", "null", '"text"', "{}", "[" * 100_000, json.dumps(without_checksum)):
            damaged(text)
        file.write_text(json.dumps(written, indent=2, sort_keys=True))  # the same, written by another program
        assert checkpoints.meta(5)["cursor"] == read["cursor"]


def test_another_format_is_refused(tmp_path: Path) -> None:
    """A checkpoint of another format is no damage, which would be set aside: it is refused with its versions."""
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        save_small(checkpoints, 5)
        checkpoints.wait()
        file = tmp_path / "5" / "meta" / "metadata"
        written = json.loads(file.read_text())
        later = written | {"format": FORMAT + 1}
        file.write_text(json.dumps(later | {META_CHECKSUM: meta_checksum(later)}))
        with pytest.raises(
            UserError, match=f"step 5 is of format {FORMAT + 1}, .* reads format {FORMAT}; .*'jax'"
        ) as caught:
            checkpoints.meta(5)
        assert not isinstance(caught.value, DamagedCheckpoint)


@pytest.mark.parametrize("name", ["lr=[1,2]", "back\\slash", "st*r", "wh?t", "no utf-8 \udce9"])
def test_path_like_a_pattern_is_refused(name: str, tmp_path: Path) -> None:
    """A path that orbax takes for a pattern is refused."""
    with pytest.raises(UserError, match=r"expected a path .*without \*, \?, \[ or a backslash"):
        Checkpoints(tmp_path / name / "checkpoints", keep=3)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("is_first", [True, False])
def test_unmerged_checkpoint_is_not_saved(
    is_first: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint that was not merged is not reported as saved and deletes no other.

    As in a path that orbax could not list: what the hosts have written is never joined, and orbax only logs that.
    """

    async def nothing(*args: object, **options: object) -> None:
        pass

    caplog.set_level(logging.INFO, "zero")
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        if not is_first:
            save_small(checkpoints, 1)
            checkpoints.wait()
        caplog.clear()
        module = "orbax.checkpoint._src.serialization.ocdbt_utils"
        with monkeypatch.context() as patch:
            patch.setattr(f"{module}.merge_ocdbt_per_process_files", nothing)
            save_small(checkpoints, 2)
            with pytest.raises(UserError, match=rf"{tmp_path}: .* could not be written: .*leaves b, w.* missing"):
                checkpoints.wait()
        assert checkpoints.steps() == [1][is_first:] and not caplog.messages
        save_small(checkpoints, 3)
    assert_same(restore_small(tmp_path, 3), make_state(*small(8), seed=3), small(8)[0])


def test_damaged_checkpoint_is_set_aside(tmp_path: Path) -> None:
    """A damaged checkpoint is set aside, and its step can be saved again."""
    with Checkpoints(tmp_path, keep=3) as checkpoints:
        save_small(checkpoints, 5)
        for name, steps in [("10.damaged", [5]), ("10.damaged-2", [5, 7])]:
            save_small(checkpoints, 10, validation_loss=0.0)
            checkpoints.wait()
            files = {path.relative_to(tmp_path / "10") for path in (tmp_path / "10").rglob("*")}
            (tmp_path / "10" / "meta" / "metadata").write_text("")
            with pytest.raises(
                DamagedCheckpoint, match=rf"checkpoint {tmp_path}, step 10: file .*10/meta/metadata cannot be"
            ):
                checkpoints.meta(10)
            checkpoints.set_aside(10)
            assert checkpoints.steps() == steps
            assert {path.relative_to(tmp_path / name) for path in (tmp_path / name).rglob("*")} == files
            if steps == [5]:
                save_small(checkpoints, 7)
        save_small(checkpoints, 10)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["10", "10.damaged", "10.damaged-2", "5", "7"]
    assert_same(restore_small(tmp_path, 10), make_state(*small(8), seed=10), small(8)[0])


def test_damaged_losses_prevent_no_save(tmp_path: Path) -> None:
    """Damaged validation losses do not prevent the next save."""
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        save_small(checkpoints, 1, validation_loss=1.0)
    (tmp_path / "1" / "meta" / "metadata").write_text('{"shapes": {"w"')
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        save_small(checkpoints, 2, validation_loss=2.0)
        checkpoints.wait()
        assert checkpoints.steps() == [2]


def test_saved_means_synced(tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint is reported as saved only when it is synced to disk."""
    synced, reached, go_on = set(), threading.Event(), threading.Event()
    fsync = os.fsync

    def slow(opened: int) -> None:
        fsync(opened)
        synced.add(os.stat(opened).st_ino)
        if reached.is_set():
            return
        reached.set()
        assert go_on.wait(900)

    caplog.set_level(logging.INFO, "zero")
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        save_small(checkpoints, 1)
        checkpoints.wait()
        assert re.fullmatch(r"checkpoint 1 saved: 0\.00 GB in \d+\.\d s", caplog.messages[-1])
        caplog.clear()
        monkeypatch.setattr(os, "fsync", slow)
        save_small(checkpoints, 2)
        assert reached.wait(900)
        for _ in range(5):
            checkpoints.check()
            time.sleep(0.02)
        assert not caplog.messages
        assert (tmp_path / "1").exists() and not (tmp_path / "2").exists()
        go_on.set()
        deadline = time.monotonic() + 900
        while not caplog.messages and time.monotonic() < deadline:
            checkpoints.check()
        assert len(caplog.messages) == 1 and caplog.messages[0].startswith("checkpoint 2 saved: ")
        assert checkpoints.steps() == [2] and not (tmp_path / "1").exists()
    assert {path.stat().st_ino for path in [tmp_path, *tmp_path.rglob("*")]} <= synced
    assert len(caplog.messages) == 1


def test_failed_sync(tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint that cannot be synced is not kept and harms no other."""

    def broken(opened: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    caplog.set_level(logging.INFO, "zero")
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        save_small(checkpoints, 1)
        checkpoints.wait()
        caplog.clear()
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", broken)
            save_small(checkpoints, 2)
            with pytest.raises(UserError, match=f"{tmp_path}: the checkpoint could not be written: .*Input/output"):
                while True:
                    checkpoints.check()
        assert checkpoints.steps() == [1] and not caplog.messages
        save_small(checkpoints, 3)
        checkpoints.wait()
        assert checkpoints.steps() == [3] and not (tmp_path / "1").exists()


FULL_DISK = """
import resource, signal
from pathlib import Path
from tests.helpers.checkpoints import save_small
from zero.base.errors import UserError
from zero.checkpoints.manager import Checkpoints

directory = Path({directory!r})
with Checkpoints(directory, keep=3) as checkpoints:
    save_small(checkpoints, 5)
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))  # no file may grow beyond: to us, a disk that is full
try:
    with Checkpoints(directory, keep=3) as checkpoints:
        save_small(checkpoints, 10)
        checkpoints.wait()
except UserError as error:
    print(error)
"""


def test_full_disk(tmp_path: Path) -> None:
    """A full disk is reported in one line and harms no other checkpoint."""
    program = FULL_DISK.format(directory=str(tmp_path))
    printed = run(program)
    assert f"{tmp_path}: the checkpoint could not be written" in printed
    assert len(printed.splitlines()) == 1
    with Checkpoints(tmp_path, None) as checkpoints:
        assert checkpoints.steps() == [5]
    assert_same(restore_small(tmp_path, 5), make_state(*small(8), seed=5), small(8)[0])


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A small file system of its own."""
    place = tmp_path / "disk"
    place.mkdir()
    with small_disk(place, kib=512):
        yield place


def assert_refused(checkpoints: Checkpoints, reason: str) -> None:
    """Saving a second checkpoint fails with one line, and the first one is intact."""
    refusal = rf"{checkpoints.directory}: the checkpoint could not be written: .*({reason})"
    with pytest.raises(UserError, match=refusal) as caught:
        save_small(checkpoints, 2)
        checkpoints.wait()
    assert "\n" not in str(caught.value)
    assert checkpoints.steps() == [1]


# Orbax closes the loop of a save that fails, and the writes under way then complain on standard error.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_disk_that_fills_up(disk: Path) -> None:
    """A disk that fills up is reported in one line and harms no other checkpoint."""
    with Checkpoints(disk, keep=1) as checkpoints:
        save_small(checkpoints, 1)
        checkpoints.wait()
        (disk / "other").write_bytes(bytes(4096 * (os.statvfs(disk).f_bavail - 4)))
        assert_refused(checkpoints, "No space left|too few bytes|RESOURCE_EXHAUSTED")
        (disk / "other").unlink()
        save_small(checkpoints, 3)
    assert_same(restore_small(disk, 3), make_state(*small(8), seed=3), small(8)[0])


def test_lost_host_is_no_full_disk(tmp_path: Path) -> None:
    """A save during which another host is lost does not blame the storage; jax raised this one in a storm."""
    with pytest.raises(ValueError, match="Gloo"), write_errors(tmp_path):
        raise ValueError("UNKNOWN: Gloo AllGather failed: Connection closed by peer [127.0.0.1]:5")
    with pytest.raises(UserError, match="could not be written"), write_errors(tmp_path):
        raise ValueError("UNKNOWN: No space left on device")


def test_read_only_disk(disk: Path) -> None:
    """A disk that became read-only is reported in one line."""
    threads = set(threading.enumerate())
    with Checkpoints(disk, keep=1) as checkpoints:
        save_small(checkpoints, 1)
        checkpoints.wait()
        subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
        assert_refused(checkpoints, "Read-only file system")
        with pytest.raises(UserError, match="Read-only file system"):
            checkpoints.set_aside(1)
    end = time.monotonic() + 900  # a writer may be about to end
    while not set(threading.enumerate()) <= threads and time.monotonic() < end:
        time.sleep(0.1)
    assert set(threading.enumerate()) <= threads  # none that the process would wait for at its end
    assert_same(restore_small(disk, 1), make_state(*small(8), seed=1), small(8)[0])


def test_failed_save_after_set_aside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failed save of a step that was set aside is not taken for the old checkpoint."""

    def broken(opened: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with Checkpoints(tmp_path, keep=1) as checkpoints:
        save_small(checkpoints, 1)
        checkpoints.wait()
        checkpoints.set_aside(1)
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", broken)
            with pytest.raises(UserError, match="Input/output error"):
                save_small(checkpoints, 1)
                checkpoints.wait()
        assert checkpoints.steps() == []


def test_older_checkpoint_cannot_be_deleted(disk: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A checkpoint counts as saved although an older one cannot be deleted."""
    with Checkpoints(disk, keep=1) as checkpoints:
        save_small(checkpoints, 1)
        checkpoints.wait()
        busy = disk / "1" / "state" / "d"
        subprocess.run(["mount", "--bind", busy, busy], check=True)
        try:
            save_small(checkpoints, 2)
            caplog.clear()
            with caplog.at_level(logging.INFO, "zero"):
                checkpoints.wait()
        finally:
            subprocess.run(["umount", busy], check=True)
        # The garbage collector may log what became of the writes of an earlier test.
        saved, warning = (record.getMessage() for record in caplog.records if record.name.startswith("zero."))
        assert saved.startswith("checkpoint 2 saved: ")
        assert warning.startswith("checkpoints older than 2 could not be deleted: ") and "busy" in warning
        assert checkpoints.steps()[-1] == 2
    assert_same(restore_small(disk, 2), make_state(*small(8), seed=2), small(8)[0])


OTHER_USER = """
import os
from pathlib import Path
from tests.helpers.checkpoints import restore_small
from zero.base.errors import UserError
from tests.helpers.disks import small_disk
from zero.checkpoints.damage import DamagedCheckpoint
from zero.checkpoints.manager import Checkpoints

directory = Path({directory!r})
restore_small(directory, 1)
if os.geteuid() == 0:
    os.setuid(65534)  # permission bits do not bind the superuser
for locked in ({locked!r}).split():
    try:
        restore_small(Path(locked), 1)
    except UserError as error:
        print(isinstance(error, DamagedCheckpoint), error)
"""


def test_missing_permission_is_no_damage() -> None:
    """Missing permission is not taken for damage."""
    with tempfile.TemporaryDirectory() as place:  # tmp_path lies in a directory that nobody else may enter
        os.chmod(place, 0o755)
        with Checkpoints(Path(place, "whole"), keep=1) as checkpoints:
            save_small(checkpoints, 1)
        locked = {"arrays": "1/state/**/d/*", "meta": "1/meta/metadata", "all": "."}
        for name, files in locked.items():
            shutil.copytree(Path(place, "whole"), Path(place, name))
            for file in Path(place, name).glob(files) if name != "all" else [Path(place, name)]:
                file.chmod(0o000)
        names = " ".join(f"{place}/{name}" for name in locked)
        whole = f"{place}/whole"
        printed = run(OTHER_USER.format(directory=whole, locked=names)).splitlines()
        assert len(printed) == 3
        for line, name in zip(printed, locked, strict=True):
            assert line.startswith(
                (f"False checkpoint {place}/{name}, step 1 cannot be", f"False {place}/{name} cannot")
            )
            assert "cannot be read now: " in line and re.search("permission", line, re.IGNORECASE)


@pytest.mark.wide
def test_two_processes_agree_on_damage(tmp_path: Path) -> None:
    """Two processes agree on damage and on when to stop."""
    hosts.run_two(Path(__file__).with_name("two_processes.py"), tmp_path)
    assert (tmp_path / "stopped-0").read_text() == (tmp_path / "stopped-1").read_text()
    assert sorted(path.name for path in (tmp_path / "whole").iterdir()) == ["5", "5.damaged"]
