"""Checkpoints: the same logical arrays for any number of devices and any stage, or a line that names the leaf."""

import dataclasses
import errno
import logging
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zero
from tests import hosts
from zero.models.gpt import GPTConfig
from zero.runtime import UserError
from zero.runtime.checkpoints import Checkpoints, Damaged
from zero.training.step import ShardedGPT, adamw, state_layout

CONFIG = GPTConfig(embedding_dim=42, vocab_size=101, num_head=3, block_size=12, dropout=0.0, N=2, vocab_chunks=3)
META = {"cursor": {"batches": 7, "seed": 1}, "global_rows": 24, "config": {"seed": None, "names": ["é", "'"]}}


@cache
def placed(devices: int, stage: int, **changes: Any) -> tuple[zero.Layout, zero.Axis]:
    axis = zero.Axis("zero", (1, devices))
    return state_layout(ShardedGPT(dataclasses.replace(CONFIG, **changes), axis, stage), adamw(0.1)), axis


def make_state(layout: zero.Layout, axis: zero.Axis, seed: int = 0) -> Any:
    """Random whole arrays, padded with zeros and laid out as `zero.to_global` does."""
    rng = np.random.default_rng(seed)

    def one(leaf: zero.LeafLayout, target: jax.ShapeDtypeStruct) -> jax.Array:
        padded = np.zeros(leaf.padded_shape, leaf.dtype)
        padded[tuple(slice(size) for size in leaf.shape)] = rng.normal(size=leaf.shape, scale=1e3).astype(leaf.dtype)
        return jax.device_put(padded, target.sharding)

    return layout.map(one, zero.global_shapes(layout, axis))


def save(directory: Path, *steps: int, devices: int = 8, stage: int = 3, keep: int = 3, **changes: Any) -> None:
    layout, axis = placed(devices, stage, **changes)
    with Checkpoints(directory, keep) as checkpoints:
        for step in steps:
            checkpoints.save(step, make_state(layout, axis, seed=step), layout, META)


def restore(directory: Path, step: int, devices: int = 8, stage: int = 3, **changes: Any) -> Any:
    with Checkpoints(directory, None) as checkpoints:
        return checkpoints.restore(step, *placed(devices, stage, **changes))


def assert_same(got: Any, expected: Any, layout: zero.Layout) -> None:
    for leaf, x, y in zip(layout.leaves, jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(x, y, err_msg=leaf.name)
        assert x.sharding == y.sharding, leaf.name


@pytest.mark.parametrize("saved", [(8, 3), (3, 1), (1, 3), (8, 0)], ids=str)
def test_any_number_of_devices_and_stage_reads_what_another_wrote(saved: tuple[int, int], tmp_path: Path) -> None:
    save(tmp_path, 5, devices=saved[0], stage=saved[1])
    for devices, stage in [(8, 3), (3, 2), (1, 1), (8, 0)]:
        layout, axis = placed(devices, stage)
        assert_same(restore(tmp_path, 5, devices, stage), make_state(layout, axis, seed=5), layout)
        zero.from_global(restore(tmp_path, 5, devices, stage), layout, axis)  # and pmap takes it


def test_weights_alone_can_be_read(tmp_path: Path) -> None:
    save(tmp_path, 5)
    model = ShardedGPT(CONFIG, zero.Axis("zero", (1, 3)), 2)
    with Checkpoints(tmp_path, None) as checkpoints:
        params = checkpoints.restore(5, model.layout, model.axis, within="params")
    layout, axis = placed(3, 2)
    assert_same(params, make_state(layout, axis, seed=5).params, model.layout)


def test_what_lies_beside_the_arrays_comes_back(tmp_path: Path) -> None:
    save(tmp_path, 5)
    with Checkpoints(tmp_path, None) as checkpoints:
        meta = checkpoints.meta(5)
    assert {key: meta[key] for key in META} == META
    assert meta["shapes"] == {leaf.name: list(leaf.shape) for leaf in placed(8, 3)[0].leaves}


def test_steps_that_go_on_at_once_do_not_spoil_what_is_written(tmp_path: Path) -> None:
    axis = zero.Axis("zero", (1, 8))
    layout = zero.make_layout({"w": jax.ShapeDtypeStruct((500, 8 * 500), jnp.float32)}, 8)
    state = jax.pmap(lambda key: {"w": jax.random.normal(key, (500, 500))}, "zero")(
        jax.random.split(jax.random.key(0), 8)
    )
    step = jax.pmap(lambda state: jax.tree.map(lambda x: x + 1, state), "zero", donate_argnums=0)
    expected = []
    with Checkpoints(tmp_path, keep=3) as checkpoints:
        for number in range(3):
            expected.append(np.array(state["w"]))
            whole = zero.to_global(state, layout, axis, donate=True)
            checkpoints.save(number, whole, layout, {})
            state = zero.from_global(whole, layout, axis, donate=True)
            for _ in range(3):
                state = jax.block_until_ready(step(state))
    with Checkpoints(tmp_path, None) as checkpoints:
        for number in range(3):
            back = zero.from_global(checkpoints.restore(number, layout, axis), layout, axis)
            np.testing.assert_array_equal(back["w"], expected[number])


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"embedding_dim": 45}, r"leaf params/\S+: holds \(2, 42\), this run expects \(2, 45\)"),
        ({"N": 3}, r"leaf params/blocks/\S+: holds \(2, .*\), this run expects \(3, .*\)"),
        ({"alibi_attn": False}, r"leaf params/positions/table: holds nothing, this run expects \(12, 42\)"),
        ({"vocab_chunks": 1}, r"leaf params/vocabulary/table: holds \(3, 34, 42\), this run expects \(1, 101, 42\)"),
    ],
    ids=str,
)
def test_checkpoint_of_another_model_is_refused_by_leaf(changes: dict[str, Any], line: str, tmp_path: Path) -> None:
    save(tmp_path, 5)
    with pytest.raises(UserError, match=rf"{tmp_path}, step 5, {line}") as caught:
        restore(tmp_path, 5, **changes)
    assert "\n" not in str(caught.value)


def test_leaf_that_is_left_over_is_named(tmp_path: Path) -> None:
    save(tmp_path, 5, alibi_attn=False)
    with pytest.raises(UserError, match=r"leaf params/positions/table: holds \(12, 42\), this run expects nothing"):
        restore(tmp_path, 5)


def test_newest_are_kept(tmp_path: Path) -> None:
    save(tmp_path, 1, 2, 3, 4, keep=2)
    with Checkpoints(tmp_path, None) as checkpoints:
        assert checkpoints.steps() == [3, 4]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["3", "4"]


def test_a_place_that_does_not_exist_holds_nothing_and_is_made_at_the_first_save(tmp_path: Path) -> None:
    place = tmp_path / "not yet" / "there"
    with Checkpoints(place, keep=1) as checkpoints:
        assert checkpoints.steps() == [] and not place.exists()
    save(place, 1)
    with Checkpoints(place, None) as checkpoints:
        assert checkpoints.steps() == [1]


def half_write(directory: Path, step: int) -> Path:
    """What a process that was killed in the middle leaves behind: some of its files, under the name it writes to."""
    save(directory, step)
    aside = directory / f"{step}.orbax-checkpoint-tmp"
    (directory / str(step)).rename(aside)
    (aside / "meta" / "metadata").unlink()
    return aside


def test_half_written_checkpoint_is_none_and_is_cleaned_up_by_its_own_run_only(tmp_path: Path) -> None:
    save(tmp_path, 5)
    aside = half_write(tmp_path, 10)
    with Checkpoints(tmp_path, None) as checkpoints:
        assert checkpoints.steps() == [5]
    assert aside.exists()
    save(tmp_path, 10)
    with Checkpoints(tmp_path, None) as checkpoints:
        assert checkpoints.steps() == [5, 10]
    layout, axis = placed(8, 3)
    assert_same(restore(tmp_path, 10), make_state(layout, axis, seed=10), layout)
    assert not aside.exists()


FULL_DISK = """
import resource, signal, sys
sys.path.insert(0, {tests!r})
from pathlib import Path
import test_checkpoints as t
from zero.runtime import UserError
from zero.runtime.checkpoints import Checkpoints

directory = Path({directory!r})
t.save(directory, 5)
layout, axis = t.placed(8, 3)
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))  # no file may grow beyond: to us, a disk that is full
try:
    with Checkpoints(directory, keep=3) as checkpoints:
        checkpoints.save(10, t.make_state(layout, axis), layout, t.META)
        checkpoints.wait()
except UserError as error:
    print(error)
"""


def test_full_disk_is_told_in_one_line_and_takes_no_checkpoint_with_it(tmp_path: Path) -> None:
    program = FULL_DISK.format(tests=str(Path(__file__).parent), directory=str(tmp_path))
    here = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", program], cwd=here, capture_output=True, text=True, check=True)
    assert f"{tmp_path}: the checkpoint could not be written" in done.stdout
    assert len(done.stdout.splitlines()) == 1
    with Checkpoints(tmp_path, None) as checkpoints:
        assert checkpoints.steps() == [5]
    layout, axis = placed(8, 3)
    assert_same(restore(tmp_path, 5), make_state(layout, axis, seed=5), layout)


def test_checkpoint_of_an_older_version_is_read(tmp_path: Path) -> None:
    """Written by zero 0.1.0 with its compression, from 8 devices; this one's is not compressed."""
    params = {"w": jax.ShapeDtypeStruct((3, 20), jnp.float32), "b": jax.ShapeDtypeStruct((5,), jnp.float32)}
    tree = {"params": params, "step": jax.ShapeDtypeStruct((), jnp.int32)}
    with tarfile.open(Path(__file__).with_name("checkpoint-0.1.0.tar.xz")) as archive:
        archive.extractall(tmp_path, filter="data")
    for devices in (8, 3):
        axis, layout = zero.Axis("zero", (1, devices)), zero.make_layout(tree, devices)
        with Checkpoints(tmp_path, keep=2) as checkpoints:
            old = checkpoints.restore(5, layout, axis)
            assert checkpoints.meta(5)["cursor"] == {"batches": 7}
            checkpoints.save(5 + devices, old, layout, {})
            new = checkpoints.restore(5 + devices, layout, axis)
            assert checkpoints.steps()[0] == 5
        for state in (old, new):
            w, b = np.asarray(state["params"]["w"])[:, :20], np.asarray(state["params"]["b"])[:5]
            np.testing.assert_array_equal(w, np.arange(60, dtype=np.float32).reshape(3, 20) + 7)
            np.testing.assert_array_equal(b, np.arange(5, dtype=np.float32) + 7)
            assert state["step"] == 7
        shutil.rmtree(tmp_path / str(5 + devices))


def save_small(checkpoints: Checkpoints, step: int, **options: Any) -> None:
    layout, axis = small(8)
    checkpoints.save(step, make_state(layout, axis, seed=step), layout, {}, **options)


@cache
def small(devices: int) -> tuple[zero.Layout, zero.Axis]:
    tree = {"w": jax.ShapeDtypeStruct((40, 400), jnp.float32), "b": jax.ShapeDtypeStruct((7,), jnp.float32)}
    return zero.make_layout(tree, devices), zero.Axis("zero", (1, devices))


LIFE = """
import sys
sys.path.insert(0, {tests!r})
from pathlib import Path
import test_checkpoints as t
from zero.runtime.checkpoints import Checkpoints

with Checkpoints(Path({directory!r}), keep=2) as checkpoints:
    for step, loss in {losses!r}.items():
        t.save_small(checkpoints, step, validation_loss=loss)
"""


def test_newest_and_best_are_kept_from_one_process_to_the_next(tmp_path: Path) -> None:
    lives = [{1: 3.0, 2: 1.5, 3: 2.0, 4: None}, {5: 1.75, 6: float("nan")}, {7: 1.0, 8: 4.0, 9: 5.0}]
    for losses, expected in zip(lives, [[2, 3, 4], [2, 5, 6], [7, 8, 9]], strict=True):
        source = LIFE.format(tests=str(Path(__file__).parent), directory=str(tmp_path), losses=losses)
        run(source.replace("nan", "float('nan')"))
        with Checkpoints(tmp_path, None) as checkpoints:
            assert checkpoints.steps() == expected
            for step in expected:
                assert_same(checkpoints.restore(step, *small(8)), make_state(*small(8), seed=step), small(8)[0])


def test_step_below_one_that_stands_is_saved_and_one_that_stands_is_refused(tmp_path: Path) -> None:
    with Checkpoints(tmp_path, keep=3) as checkpoints:
        for step in (10, 20, 15):
            save_small(checkpoints, step)
        with pytest.raises(UserError, match=rf"{tmp_path}: step 20 is saved already, and nothing is overwritten"):
            save_small(checkpoints, 20)
        save_small(checkpoints, 5)
        checkpoints.wait()
        assert checkpoints.steps() == [5, 15, 20]
    assert_same(restore_small(tmp_path, 15), make_state(*small(8), seed=15), small(8)[0])


def restore_small(directory: Path, step: int) -> Any:
    with Checkpoints(directory, None) as checkpoints:
        return checkpoints.restore(step, *small(8))


def test_versions_are_kept_beside_the_arrays(tmp_path: Path) -> None:
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        save_small(checkpoints, 1, validation_loss=0.5)
        meta = checkpoints.meta(1)
    assert meta["versions"]["jax"] == jax.__version__ and meta["validation_loss"] == 0.5
    assert set(meta["versions"]) >= {"zero-pmap", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy"}


DAMAGE: dict[str, Callable[[Path], object]] = {
    "deleted": Path.unlink,
    "empty": lambda file: file.write_bytes(b""),
    "torn": lambda file: file.write_bytes(file.read_bytes()[: file.stat().st_size // 2]),
    "zeros": lambda file: file.write_bytes(bytes(file.stat().st_size)),
}
# orbax writes these, and nothing reads them: what is said in the files of all hosts is merged into state/d.
UNREAD = r"_CHECKPOINT_METADATA|.*commit_success.txt|state/_sharding|state/ocdbt.process_0/manifest.ocdbt"


def test_every_damage_is_told_in_one_line_or_does_no_harm(tmp_path: Path) -> None:
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
            except Damaged as error:
                found[name, kind] = str(error)
                assert str(error).startswith(f"checkpoint {place}, step 5: ")
                assert " cannot be read: " in str(error) and "\n" not in str(error)
            except AssertionError:
                assert kind == "zeros"  # right in length, and nothing but the bytes themselves would tell
                found[name, kind] = "nothing"
    for name, kind in harmless:
        assert re.fullmatch(UNREAD, name) or kind == "deleted" or name.startswith("state/ocdbt.process_0/d/"), name
    damaged = {name for name, kind in found if kind in ("empty", "torn")}
    assert {"meta/metadata", "state/_METADATA", "state/array_metadatas/process_0", "state/manifest.ocdbt"} <= damaged
    assert any(name.startswith("state/d/") for name in damaged)
    assert any(name.startswith("state/ocdbt.process_0/d/") for name in damaged)
    for kind in ("deleted", "empty", "torn"):
        assert any(re.search(r"leaf (w|b) cannot be read: ", line) for (_, k), line in found.items() if k == kind)
        assert re.search("file .*5/meta/metadata", found["meta/metadata", kind])
    assert re.search("file .*5/state/_METADATA cannot be read: no JSON", found["state/_METADATA", "torn"])


def test_damaged_checkpoint_is_set_aside_and_its_step_is_free_again(tmp_path: Path) -> None:
    with Checkpoints(tmp_path, keep=3) as checkpoints:
        save_small(checkpoints, 5)
        for name, stand in [("10.damaged", [5]), ("10.damaged-2", [5, 7])]:
            save_small(checkpoints, 10, validation_loss=0.0)
            checkpoints.wait()
            files = {path.relative_to(tmp_path / "10") for path in (tmp_path / "10").rglob("*")}
            (tmp_path / "10" / "meta" / "metadata").write_text("")
            with pytest.raises(Damaged, match=rf"checkpoint {tmp_path}, step 10: file .*10/meta/metadata cannot be"):
                checkpoints.meta(10)
            checkpoints.set_aside(10)
            assert checkpoints.steps() == stand
            assert {path.relative_to(tmp_path / name) for path in (tmp_path / name).rglob("*")} == files
            if stand == [5]:
                save_small(checkpoints, 7)
        save_small(checkpoints, 10)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["10", "10.damaged", "10.damaged-2", "5", "7"]
    assert_same(restore_small(tmp_path, 10), make_state(*small(8), seed=10), small(8)[0])


def test_damaged_losses_do_not_keep_others_from_being_saved(tmp_path: Path) -> None:
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        save_small(checkpoints, 1, validation_loss=1.0)
    (tmp_path / "1" / "meta" / "metadata").write_text('{"shapes": {"w"')
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        save_small(checkpoints, 2, validation_loss=2.0)
        checkpoints.wait()
        assert checkpoints.steps() == [2]


def test_checkpoint_counts_as_saved_only_when_it_is_synced(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced, reached, go_on = set(), threading.Event(), threading.Event()
    fsync = os.fsync

    def slow(opened: int) -> None:
        fsync(opened)
        synced.add(os.stat(opened).st_ino)
        if reached.is_set():
            return
        reached.set()
        assert go_on.wait(60)

    caplog.set_level(logging.INFO, "zero")
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        save_small(checkpoints, 1)
        checkpoints.wait()
        assert re.fullmatch(r"checkpoint 1 saved: 0\.00 GB in \d+\.\d s", caplog.messages[-1])
        caplog.clear()
        monkeypatch.setattr(os, "fsync", slow)
        save_small(checkpoints, 2)
        assert reached.wait(60)
        for _ in range(5):
            checkpoints.check()
            time.sleep(0.02)
        assert not caplog.messages
        assert (tmp_path / "1").exists() and not (tmp_path / "2").exists()
        go_on.set()
        deadline = time.monotonic() + 60
        while not caplog.messages and time.monotonic() < deadline:
            checkpoints.check()
        assert len(caplog.messages) == 1 and caplog.messages[0].startswith("checkpoint 2 saved: ")
        assert checkpoints.steps() == [2] and not (tmp_path / "1").exists()
    assert {path.stat().st_ino for path in [tmp_path, *tmp_path.rglob("*")]} <= synced
    assert len(caplog.messages) == 1


def test_checkpoint_that_cannot_be_synced_is_none_and_takes_no_other_with_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
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


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A small file system of its own."""
    place = tmp_path / "disk"
    place.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", place], capture_output=True, text=True)
    if made.returncode:
        pytest.skip(f"needs a file system of its own: {made.stderr.strip()}")
    yield place
    subprocess.run(["umount", "--lazy", place], check=True)


def assert_refused(checkpoints: Checkpoints, reason: str) -> None:
    """A second checkpoint is told in one line to be none, and the first one stands."""
    refusal = rf"{checkpoints.directory}: the checkpoint could not be written: .*({reason})"
    with pytest.raises(UserError, match=refusal) as caught:
        save_small(checkpoints, 2)
        checkpoints.wait()
    assert "\n" not in str(caught.value)
    assert checkpoints.steps() == [1]


# Orbax closes the loop of a save that fails, and the writes under way then complain on standard error.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_disk_that_fills_up_is_told_in_one_line_and_takes_no_checkpoint_with_it(disk: Path) -> None:
    with Checkpoints(disk, keep=1) as checkpoints:
        save_small(checkpoints, 1)
        checkpoints.wait()
        (disk / "other").write_bytes(bytes(4096 * (os.statvfs(disk).f_bavail - 4)))
        assert_refused(checkpoints, "No space left|too few bytes")
        (disk / "other").unlink()
        save_small(checkpoints, 3)
    assert_same(restore_small(disk, 3), make_state(*small(8), seed=3), small(8)[0])


def test_place_that_became_read_only_is_told_in_one_line(disk: Path) -> None:
    threads = set(threading.enumerate())
    with Checkpoints(disk, keep=1) as checkpoints:
        save_small(checkpoints, 1)
        checkpoints.wait()
        subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
        assert_refused(checkpoints, "Read-only file system")
        with pytest.raises(UserError, match="Read-only file system"):
            checkpoints.set_aside(1)
    assert set(threading.enumerate()) <= threads  # none that the process would wait for at its end
    assert_same(restore_small(disk, 1), make_state(*small(8), seed=1), small(8)[0])


def test_checkpoint_counts_as_saved_where_an_older_one_cannot_be_deleted(
    disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
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
        saved, warning = caplog.messages
        assert saved.startswith("checkpoint 2 saved: ")
        assert warning.startswith("older checkpoints than 2 could not be deleted: ") and "busy" in warning
        assert checkpoints.steps()[-1] == 2
    assert_same(restore_small(disk, 2), make_state(*small(8), seed=2), small(8)[0])


OTHER_USER = """
import os, sys
sys.path.insert(0, {tests!r})
from pathlib import Path
import test_checkpoints as t
from zero.runtime import UserError
from zero.runtime.checkpoints import Checkpoints, Damaged

directory = Path({directory!r})
t.restore_small(directory, 1)
os.setuid(65534)  # permission bits do not bind the superuser
for locked in ({locked!r}).split():
    try:
        t.restore_small(Path(locked), 1)
    except UserError as error:
        print(isinstance(error, Damaged), error)
"""


def test_missing_permission_is_not_taken_for_damage() -> None:
    if os.geteuid():
        pytest.skip("needs the superuser, to become somebody who may not read")
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
        told = run(OTHER_USER.format(tests=str(Path(__file__).parent), directory=whole, locked=names)).splitlines()
        assert len(told) == 3
        for line, name in zip(told, locked, strict=True):
            assert line.startswith(
                (f"False checkpoint {place}/{name}, step 1 cannot be", f"False {place}/{name} cannot")
            )
            assert "cannot be read now: " in line and re.search("permission", line, re.IGNORECASE)


def run(program: str) -> str:
    """What a Python program prints; it runs in the repository."""
    here = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", program], cwd=here, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_two_processes_agree_on_damage_and_on_when_to_stop(tmp_path: Path) -> None:
    hosts.run_two(Path(__file__).with_name("two_processes.py"), tmp_path)
    assert (tmp_path / "stopped-0").read_text() == (tmp_path / "stopped-1").read_text()
    assert sorted(path.name for path in (tmp_path / "whole").iterdir()) == ["5", "5.damaged"]
