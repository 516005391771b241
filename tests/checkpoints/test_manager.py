"""Checkpoints: the same logical arrays for any number of devices and any stage, or a line that names the leaf."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zero
from tests.helpers.checkpoints import (
    CONFIG,
    META,
    assert_same,
    make_state,
    placed,
    restore,
    restore_small,
    save,
    save_small,
    small,
)
from zero.base.errors import UserError
from zero.checkpoints.manager import Checkpoints
from zero.checkpoints.retention import Saved
from zero.files import storage
from zero.hosts import agreement
from zero.training.sharded_gpt import ShardedGPT


@pytest.mark.parametrize(
    "saved", [(8, 3), *(pytest.param(x, marks=pytest.mark.wide) for x in ((3, 1), (1, 3), (8, 0)))], ids=str
)
def test_other_devices_and_stages(saved: tuple[int, int], tmp_path: Path) -> None:
    """Any number of devices and any stage reads what another wrote."""
    save(tmp_path, 5, devices=saved[0], stage=saved[1])
    for devices, stage in [(3, 2), (1, 1), (8, 0)] if saved == (8, 3) else [(8, 3)]:
        layout, axis = placed(devices, stage)
        restored = restore(tmp_path, 5, devices, stage)
        assert_same(restored, make_state(layout, axis, seed=5), layout)
        zero.from_global(restored, layout, axis)  # and pmap takes it


@pytest.fixture(scope="module")
def saved_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Step 5, to be read by several tests and changed by none."""
    place = tmp_path_factory.mktemp("saved")
    save(place, 5)
    return place


def test_weights_alone_can_be_read(saved_once: Path) -> None:
    model = ShardedGPT(CONFIG, zero.Axis("zero", (1, 3)), 2)
    with Checkpoints(saved_once, None) as checkpoints:
        params = checkpoints.restore(5, model.layout, model.axis, within="params")
    layout, axis = placed(3, 2)
    assert_same(params, make_state(layout, axis, seed=5).params, model.layout)


def test_meta_comes_back(saved_once: Path) -> None:
    with Checkpoints(saved_once, None) as checkpoints:
        meta = checkpoints.meta(5)
    assert {key: meta[key] for key in META} == META
    assert meta["shapes"] == {leaf.name: list(leaf.shape) for leaf in placed(8, 3)[0].leaves}


def test_other_hosts_ask_for_less(saved_once: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Host 0 tells the others what retention depends on; to restore, no host lists files or reads one per host."""
    assert not (saved_once / "5" / "state" / "array_metadatas").exists()
    told = [[5, 0.25, 60.0], [7, None, 90.0]]
    with Checkpoints(saved_once, None) as checkpoints:
        monkeypatch.setattr(agreement, "on_host_0", lambda name, look: told)
        assert checkpoints._known() == {5: Saved(0.25, 60.0), 7: Saved(None, 90.0)}
        monkeypatch.setattr(storage, "list_files", lambda folder: pytest.fail(f"{folder} is listed"))
        layout, axis = placed(8, 3)
        assert_same(checkpoints.restore(5, layout, axis), make_state(layout, axis, seed=5), layout)


def test_steps_during_a_save(tmp_path: Path) -> None:
    """Steps that continue during a save do not change what is written."""
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
def test_checkpoint_of_another_model_is_refused(changes: dict[str, Any], line: str, saved_once: Path) -> None:
    """A checkpoint of another model is refused with the name of a leaf."""
    with pytest.raises(UserError, match=rf"{saved_once}, step 5, {line}") as caught:
        restore(saved_once, 5, **changes)
    assert "\n" not in str(caught.value)


def test_leftover_leaf_is_named(tmp_path: Path) -> None:
    """A leaf of the checkpoint that the model lacks is named."""
    save(tmp_path, 5, alibi_attn=False)
    with pytest.raises(UserError, match=r"leaf params/positions/table: holds \(12, 42\), this run expects nothing"):
        restore(tmp_path, 5)


def test_missing_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A directory that does not exist holds no checkpoints, and is opened and made at the first save."""
    place = tmp_path / "not yet" / "there"
    with monkeypatch.context() as patched:
        patched.setattr(Checkpoints, "_manager", property(lambda _: pytest.fail("opened")))
        with Checkpoints(place, keep=1) as checkpoints:
            assert checkpoints.steps() == []
            checkpoints.wait()
            checkpoints.check()
    assert not place.parent.exists()
    with Checkpoints(place, keep=1) as checkpoints:
        save_small(checkpoints, 1)
    with Checkpoints(place, None) as checkpoints:
        assert checkpoints.steps() == [1]


def half_write(directory: Path, step: int) -> Path:
    """What a process that was killed in the middle leaves behind: some of its files, under the temporary name."""
    with Checkpoints(directory, keep=3) as checkpoints:
        save_small(checkpoints, step)
    temporary = directory / f"{step}.orbax-checkpoint-tmp"
    (directory / str(step)).rename(temporary)
    (temporary / "meta" / "metadata").unlink()
    return temporary


def test_half_written_checkpoint(tmp_path: Path) -> None:
    """A half-written checkpoint does not count and is deleted only by its own run."""
    with Checkpoints(tmp_path, keep=3) as checkpoints:
        save_small(checkpoints, 5)
    temporary = half_write(tmp_path, 10)
    with Checkpoints(tmp_path, None) as checkpoints:
        assert checkpoints.steps() == [5]
    assert temporary.exists()
    with Checkpoints(tmp_path, keep=3) as checkpoints:
        save_small(checkpoints, 10)
        checkpoints.wait()
        assert checkpoints.steps() == [5, 10]
    assert_same(restore_small(tmp_path, 10), make_state(*small(8), seed=10), small(8)[0])
    assert not temporary.exists()


def test_unfinished_save_of_another_process(tmp_path: Path) -> None:
    """A save that another process began in a directory that was absent at the start is not deleted."""
    place = tmp_path / "later"
    with Checkpoints(place, keep=3) as checkpoints:
        temporary = half_write(place, 10)
        save_small(checkpoints, 5)
        checkpoints.wait()
        assert checkpoints.steps() == [5] and temporary.exists()


def test_newest_and_best_are_kept(tmp_path: Path) -> None:
    """The newest and the best checkpoints are kept from one start to the next."""
    starts: list[dict[int, float | None]] = [
        {1: 3.0, 2: 1.5, 3: 2.0, 4: None},
        {5: 1.75, 6: float("nan")},
        {7: 1.0, 8: 4.0, 9: 5.0},
    ]
    for losses, expected in zip(starts, [[2, 3, 4], [2, 5, 6], [7, 8, 9]], strict=True):
        with Checkpoints(tmp_path, keep=2) as checkpoints:
            for step, loss in losses.items():
                save_small(checkpoints, step, validation_loss=loss)
        with Checkpoints(tmp_path, None) as checkpoints:
            assert checkpoints.steps() == expected
            for step in expected:
                assert_same(checkpoints.restore(step, *small(8)), make_state(*small(8), seed=step), small(8)[0])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["7", "8", "9"]


def test_loss_that_was_learned_after_the_save(tmp_path: Path) -> None:
    """The checkpoint is kept by it, at later starts as well; what a killed process has left beside it is removed."""
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        save_small(checkpoints, 1)
    left = tmp_path / "1" / "meta" / ".metadata.0123abcd"
    left.write_text('{"validation_loss": 7')
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        checkpoints.set_validation_loss(1, 1.0)
        save_small(checkpoints, 2, validation_loss=2.0)
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        save_small(checkpoints, 3, validation_loss=3.0)
    with Checkpoints(tmp_path, None) as checkpoints:
        assert checkpoints.steps() == [1, 3] and checkpoints.meta(1)["validation_loss"] == 1.0
        assert_same(checkpoints.restore(1, *small(8)), make_state(*small(8), seed=1), small(8)[0])
    assert [path.name for path in left.parent.iterdir() if path.name.startswith(".")] == []


def test_lower_and_existing_steps(tmp_path: Path) -> None:
    """A step lower than an existing one is saved, and an existing one is refused."""
    with Checkpoints(tmp_path, keep=3) as checkpoints:
        for step in (10, 20, 15):
            save_small(checkpoints, step)
        with pytest.raises(
            UserError,
            match=rf"{tmp_path}: step 20 is already saved, and checkpoints are never "
            rf"overwritten",
        ):
            save_small(checkpoints, 20)
        save_small(checkpoints, 5)
        checkpoints.wait()
        assert checkpoints.steps() == [5, 15, 20]
    assert_same(restore_small(tmp_path, 15), make_state(*small(8), seed=15), small(8)[0])


def test_versions_are_kept_beside_the_arrays(tmp_path: Path) -> None:
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        save_small(checkpoints, 1, validation_loss=0.5)
        meta = checkpoints.meta(1)
    assert meta["versions"]["jax"] == jax.__version__ and meta["validation_loss"] == 0.5
    assert set(meta["versions"]) >= {"zero-pmap", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy"}
