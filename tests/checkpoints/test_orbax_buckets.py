"""Buckets through orbax: as patient as zero's own storage, without a change for other users of fsspec."""

import pytest
import tensorstore

from tests.helpers import bucket
from tests.helpers.checkpoints import assert_same, make_state, save_small, small
from zero.base.errors import UserError
from zero.checkpoints.damage import write_errors
from zero.checkpoints.manager import Checkpoints
from zero.files import storage


def test_patient_buckets_for_orbax_only(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only orbax gets patient buckets; other users of fsspec do not."""
    import fsspec
    import gcsfs

    from zero.checkpoints.orbax_buckets import PatientBucket

    bucket.use(monkeypatch, server)
    before = fsspec.get_filesystem_class("gs")
    assert issubclass(before, gcsfs.GCSFileSystem) and before is not PatientBucket
    place = f"gs://{bucket.BUCKET}/patient"
    with Checkpoints(place, keep=1) as checkpoints:
        assert fsspec.get_filesystem_class("gs") is fsspec.get_filesystem_class("gcs") is before
        save_small(checkpoints, 5)
        checkpoints.wait()
        assert isinstance(checkpoints._manager.directory._backend.fs(place), PatientBucket)
        assert_same(checkpoints.restore(5, *small(8)), make_state(*small(8), seed=5), small(8)[0])


def test_a_bucket_that_is_shared_with_other_folders(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checkpoints may lie in a bucket itself; orbax removes an unfinished step, and no other folder."""
    place = f"gs://{bucket.BUCKET}"
    with bucket.serving() as address:
        bucket.use(monkeypatch, address)
        storage.write(f"{place}/corpus/train-00000.tar", b"rows")
        storage.write(f"{place}/4/state/unfinished", b"half")
        with Checkpoints(place, keep=1) as checkpoints:
            save_small(checkpoints, 5)
            checkpoints.wait()
        with Checkpoints(place, keep=1) as checkpoints:
            assert checkpoints.steps() == [5]
            assert_same(checkpoints.restore(5, *small(8)), make_state(*small(8), seed=5), small(8)[0])
        folders = {url.removeprefix(f"{place}/").partition("/")[0] for url in storage.list_files(place)}
        assert folders == {"corpus", "5"}


def open_bucket_anew() -> None:
    """As in a new process: file systems are kept for its whole life, by etils and by fsspec."""
    from etils.epath import backend

    from zero.checkpoints.orbax_buckets import PatientBucket

    backend.fsspec_backend._get_filesystem.cache_clear()
    PatientBucket.clear_instance_cache()


def test_a_server_without_generations(monkeypatch: pytest.MonkeyPatch) -> None:
    """An emulator whose objects have no generations cannot hold checkpoints, and the error says why.

    Two writers of a tensorstore database stand in for a checkpoint: orbax reads it back only in larger saves.
    """
    place = f"gs://{bucket.BUCKET}/unnumbered"
    refusal = f"{place}: .* sends no generation numbers .* set data.checkpoint_directory to a local absolute path"
    with bucket.serving(has_generations=False) as address:
        bucket.use(monkeypatch, address)
        database = {"driver": "ocdbt", "base": f"{place}/"}
        tensorstore.KvStore.open(database).result().write("first", b"1").result()
        with pytest.raises(UserError, match=refusal) as caught, write_errors(place):
            tensorstore.KvStore.open(database).result().write("second", b"2").result()
    assert caught.value.status == 2


def test_a_bucket_that_bills_its_readers(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checkpoints are written and read there once the environment names the project that pays."""
    from orbax.checkpoint._src.serialization import tensorstore_utils

    for name in ("_BASE_TS_CONTEXT", "_DEFAULT_OCDBT_TS_CONTEXT"):
        monkeypatch.setattr(tensorstore_utils, name, dict(getattr(tensorstore_utils, name)))
    proxy = bucket.Proxy(server, budget=0)
    proxy.bills_readers = True
    place = f"gs://{bucket.BUCKET}/billed-checkpoints"
    with bucket.disturbed(proxy) as address:
        bucket.use(monkeypatch, address)
        open_bucket_anew()
        with pytest.raises(UserError, match="billed-checkpoints: the bucket bills its readers; set GS_USER_PROJECT="):
            Checkpoints(place, keep=1)
        monkeypatch.setenv("GS_USER_PROJECT", "mine")
        open_bucket_anew()
        with Checkpoints(place, keep=1) as checkpoints:
            save_small(checkpoints, 5)
            checkpoints.wait()
        with Checkpoints(place, keep=None) as checkpoints:
            assert checkpoints.steps() == [5]
            assert_same(checkpoints.restore(5, *small(8)), make_state(*small(8), seed=5), small(8)[0])
    open_bucket_anew()
