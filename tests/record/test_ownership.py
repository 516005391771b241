"""Of two processes that save to one directory, one is refused, or ends before it writes or deletes anything."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import pytest

from tests.helpers import bucket
from tests.helpers.checkpoints import save_small
from zero.base.errors import Unavailable, UserError
from zero.checkpoints.manager import Checkpoints
from zero.files import storage
from zero.record.ownership import discarding_unused, locked, new_directory, owned
from zero.record.run_files import save_config


def test_one_process_a_run(tmp_path: Path) -> None:
    with locked(tmp_path, "choose another"):
        with pytest.raises(UserError, match="another process trains here; choose another"):
            with locked(tmp_path, "choose another"):
                raise AssertionError("both are in")
    with locked(tmp_path, ""):
        assert list(tmp_path.iterdir()) == []


def test_one_process_a_directory_of_checkpoints(tmp_path: Path) -> None:
    """The directory is locked, whatever run saves there; one that nothing was saved to is removed."""
    place = tmp_path / "shared" / "checkpoints"
    with owned(place, "runs/one"):
        with pytest.raises(UserError, match=r"trains here; choose another data\.checkpoint_directory"):
            with owned(place, "runs/two"):
                raise AssertionError("both are in")
    assert not place.exists()
    with owned(place, "runs/two"):
        (place / "6").mkdir()
    assert [path.name for path in place.iterdir()] == ["6"]


def test_bucket_is_taken_over(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process that was started last has a bucket: an earlier one commits, changes and deletes nothing."""
    bucket.use(monkeypatch, server)
    place = f"gs://{bucket.BUCKET}/owned"
    with owned(place, "runs/one") as one_of:
        with Checkpoints(place, keep=1, check_owner=one_of.check) as one:
            save_small(one, 2)
            one.wait()
            with owned(place, "runs/two") as two_of:
                two_of.check()
                save_small(one, 4)
                message = r"another process has since taken over the run, on .* in runs/two"
                with pytest.raises(UserError, match=message):
                    one.wait()
                changes = (lambda: one.set_validation_loss(2, 1.0)), (lambda: one.set_aside(2))
                for change in changes:
                    with pytest.raises(UserError, match=message):
                        change()
                with Checkpoints(place, keep=1, check_owner=two_of.check) as two:
                    assert two.steps() == [2] and two.meta(2)["validation_loss"] is None
                    save_small(two, 6)
                    two.wait()
                    assert two.steps() == [6]
    assert not [url for url in storage.list_files(place) if url.startswith(f"{place}/4")]


def test_owner_in_a_bucket_is_lost(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name that was removed, as with the folder beside the checkpoints, or is no longer one, ends the process."""
    bucket.use(monkeypatch, server)
    with owned(f"gs://{bucket.BUCKET}/lost", "runs/one") as one:
        file = f"gs://{bucket.BUCKET}/lost-run/owner.json"
        for damaged, message in ((b"{", f"{file}: expected a JSON object"), (b"{}", "taken over the run, on None")):
            storage.write(file, damaged)
            with pytest.raises(UserError, match=message):
                one.check()
        storage.remove(file)
        with pytest.raises(Unavailable, match=f"^{file} was removed while this process trained; it ends without"):
            one.check()


def test_names_by_the_clock(tmp_path: Path) -> None:
    """Two starts in one second have directories of their own."""
    names = [new_directory(f"{tmp_path}/runs/12-00-00") for _ in range(3)]
    assert names == [f"{tmp_path}/runs/12-00-00{end}" for end in ("", "-2", "-3")]
    assert sorted(str(path) for path in (tmp_path / "runs").iterdir()) == sorted(names)


def test_folder_of_a_refused_start(tmp_path: Path) -> None:
    """Removed with its last directory, but not one that somebody else has made."""
    results, own = tmp_path / "run" / "evaluate", tmp_path / "own"
    names = [Path(new_directory(f"{results}/12-00-00")) for _ in range(2)]
    (own / "named").mkdir(parents=True)
    for directory, is_left in ((names[0], True), (names[1], False), (own / "named", False)):
        with discarding_unused(directory):
            pass
        assert not directory.exists() and results.exists() == is_left
    assert own.exists() and results.parent.exists()


@pytest.fixture
def logs(tmp_path: Path) -> Iterator[Callable[[], logging.FileHandler]]:
    """Opens the log of one directory, as Hydra does in each process that is started there."""
    opened: list[logging.FileHandler] = []

    def open_log() -> logging.FileHandler:
        (tmp_path / "run").mkdir(exist_ok=True)
        opened.append(logging.FileHandler(tmp_path / "run" / "main_zero.log"))
        return opened[-1]

    yield open_log
    for handler in opened:
        handler.close()


@contextmanager
def start(run: Path, log: logging.FileHandler) -> Iterator[None]:
    """A start in a process of its own, whose only log this is."""
    with patch.object(logging.root, "handlers", [log]):
        with discarding_unused(run):
            yield


def test_directory_of_another_start(tmp_path: Path, logs: Callable[[], logging.FileHandler]) -> None:
    """A refused start removes no directory in which another one has begun; the last of them does."""
    run = tmp_path / "run"
    one, two = logs(), logs()
    with start(run, one):
        with start(run, two):
            pass
        assert (run / "main_zero.log").exists()
    assert not run.exists()
    late = logs()
    with start(run, logs()):
        pass
    assert not run.exists()  # removed before the other start had its lock
    with start(run, late):
        late.emit(logging.makeLogRecord({"msg": "begun"}))
    assert (run / "main_zero.log").read_text() == "begun\n"


def test_directory_that_is_renamed(tmp_path: Path) -> None:
    """Its process learns the new name, whether or not there is another directory of the old one."""
    path = tmp_path / "run"
    with locked(path, "") as claim:
        claim.check()
        path.rename(tmp_path / "moved")
        for _ in range(2):
            with pytest.raises(
                Unavailable, match=rf"{path} was renamed to {tmp_path / 'moved'} while .* --resume hydra"
            ):
                claim.check()
            path.mkdir(exist_ok=True)
        with locked(path, ""):
            pass


def test_directory_that_is_removed(tmp_path: Path) -> None:
    """It is made and locked again, unless another run has begun there."""
    path = tmp_path / "run"
    with locked(path, "another place") as claim:
        path.rmdir()
        with pytest.raises(Unavailable, match="was removed while this process trained there"):
            claim.check()
        claim.take_again()
        claim.check()
        with pytest.raises(UserError, match="another process trains here; another place"):
            with locked(path, "another place"):
                raise AssertionError("both are in")
        path.rmdir()
        save_config(path, {"of": "another run"})
        with pytest.raises(
            UserError, match="was removed while this process trained there, and another one has used it"
        ):
            claim.take_again()


def test_checkpoint_of_a_directory_that_is_renamed(tmp_path: Path) -> None:
    """It is committed nowhere: half of it would be under each name."""
    with locked(tmp_path / "run", "") as claim:
        with pytest.raises(UserError, match="run was renamed to"):
            with Checkpoints(tmp_path / "run" / "checkpoints", keep=1, check_owner=claim.check) as checkpoints:
                (tmp_path / "run").rename(tmp_path / "moved")
                save_small(checkpoints, 2)
                checkpoints.wait()
    assert not [path for path in tmp_path.rglob("2") if path.is_dir()]
