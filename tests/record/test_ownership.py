"""Of two processes that save to one directory, one is refused, or ends before it writes or deletes anything."""

from pathlib import Path

import pytest

from tests.helpers import bucket
from tests.helpers.checkpoints import save_small
from zero.base.errors import UserError
from zero.checkpoints.manager import Checkpoints
from zero.files import storage
from zero.record.ownership import locked, owned


def test_one_process_a_run(tmp_path: Path) -> None:
    with locked(tmp_path, "name another"):
        with pytest.raises(UserError, match="another process trains here; name another"):
            with locked(tmp_path, "name another"):
                raise AssertionError("both are in")
    with locked(tmp_path, ""):
        assert list(tmp_path.iterdir()) == []


def test_one_process_a_directory_of_checkpoints(tmp_path: Path) -> None:
    """The directory is locked, whatever run saves there; one that nothing was saved to is removed."""
    place = tmp_path / "shared" / "checkpoints"
    with owned(place, "runs/one"):
        with pytest.raises(UserError, match=r"trains here; name another data\.checkpoint_directory"):
            with owned(place, "runs/two"):
                raise AssertionError("both are in")
    assert not place.exists()
    with owned(place, "runs/two"):
        (place / "6").mkdir()
    assert [path.name for path in place.iterdir()] == ["6"]


def test_bucket_is_taken_over(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process that was started last has a bucket: a save of an earlier one is not committed and deletes nothing."""
    bucket.use(monkeypatch, server)
    place = f"gs://{bucket.BUCKET}/owned"
    with owned(place, "runs/one") as check_one:
        with Checkpoints(place, keep=1, check_owner=check_one) as one:
            save_small(one, 2)
            one.wait()
            with owned(place, "runs/two") as check_two:
                check_two()
                save_small(one, 4)
                with pytest.raises(UserError, match=r"another process has taken the run over since, on .* in runs/two"):
                    one.wait()
                with Checkpoints(place, keep=1, check_owner=check_two) as two:
                    assert two.steps() == [2]
                    save_small(two, 6)
                    two.wait()
                    assert two.steps() == [6]
    assert not [url for url in storage.list_files(place) if url.startswith(f"{place}/4")]
