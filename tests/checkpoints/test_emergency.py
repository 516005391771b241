"""Emergency checkpoints of one host and of three, of which one is replaced.

test_emergency_of_lost_hosts.py has whole runs.
"""

import json
import os
import shutil
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import zero
from benchmarks.growth import told_of_emergency_copies
from tests.helpers import hosts
from zero.base.errors import UserError
from zero.checkpoints.emergency import EmergencyCheckpoints
from zero.partition.collectives.axis import Axis

DEVICES = 8
AXIS = Axis("zero", (1, DEVICES))
POSITION = {"global_rows": 16, "step": 0, "cursor": {"batches": 3}}
SHAPES = {
    "codes": jax.ShapeDtypeStruct((3, 5), jnp.int8),
    "count": jax.ShapeDtypeStruct((), jnp.int32),
    "half": jax.ShapeDtypeStruct((17,), jnp.bfloat16),
    "w": jax.ShapeDtypeStruct((16, 3), jnp.float32),
}
LAYOUT = zero.make_layout(SHAPES, DEVICES)


def state(seed: int) -> dict[str, Any]:
    """What pmap returns: random bits on each device, no NaN among them, and the same on all where a leaf is whole."""
    random = np.random.default_rng(seed)

    def leaf(leaf: Any) -> Any:
        bits = random.integers(0, 256, (DEVICES, *leaf.shard_shape, leaf.dtype.itemsize), np.uint8)
        if not leaf.splits:
            bits[:] = bits[0]
        x = bits.view(leaf.dtype)[..., 0]
        return jax.pmap(lambda x: x, "zero")(np.where(np.isfinite(x), x, np.zeros_like(x)))

    return LAYOUT.map(lambda one: leaf(one))


def assert_equal(one: Any, other: Any) -> None:
    for name in SHAPES:
        x, y = (np.asarray(tree[name]) for tree in (one, other))
        assert x.dtype == y.dtype and one[name].sharding == other[name].sharding
        assert x.tobytes() == y.tobytes(), name


def opened(
    directory: Path, place: str = "gs://bucket/run", model: Any = None, durable: Sequence[int] = ()
) -> EmergencyCheckpoints:
    model = model or {"N": 2, "pattern": ("local", "global")}
    return EmergencyCheckpoints(directory, place, lambda: durable, model, LAYOUT, AXIS)


def saved(directory: Path) -> str:
    """The lineage of checkpoints at steps 5, 10 and 15, after a process that was killed."""
    emergency = opened(directory)
    for step in (5, 10, 15):
        emergency.save(step, state(step), POSITION | {"step": step})
    emergency._pool.shutdown()
    return emergency.lineage


def test_newest_is_restored(tmp_path: Path) -> None:
    """The newest emergency checkpoint is restored bit for bit, and older ones are deleted."""
    lineage = saved(tmp_path)
    (place,) = tmp_path.iterdir()
    assert sorted(path.name for path in place.iterdir()) == [
        f"{lineage}-10-0.shards",
        f"{lineage}-15-0.shards",
    ]
    emergency = opened(tmp_path)
    found = emergency.restore([lineage], after=10)
    assert found is not None and found[0] == POSITION | {"step": 15}
    assert_equal(found[1], state(15))
    assert emergency.lineages == [emergency.lineage, lineage]
    jax.pmap(lambda x: x["w"] + 1, "zero", donate_argnums=0)(found[1])  # the buffers are jax's own
    again = opened(tmp_path).restore([lineage], after=10)
    assert again is not None
    assert_equal(again[1], state(15))


def test_copy_survives_donation(tmp_path: Path) -> None:
    """A copy does not change with the step that donates the state."""
    emergency, first = opened(tmp_path), state(1)
    emergency.save(1, first, POSITION)
    jax.pmap(lambda x: jax.tree.map(jnp.zeros_like, x), "zero", donate_argnums=0)(first)
    emergency._pool.shutdown()
    found = opened(tmp_path).restore([emergency.lineage], after=0)
    assert found is not None
    assert_equal(found[1], state(1))


def test_nothing_else_is_restored(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    lineage = saved(tmp_path)
    other = opened(tmp_path)
    for lineages in ([], ["of another attempt"]):
        assert other.restore(lineages, after=10) is None
    assert other.lineages == [other.lineage] != [lineage]
    assert opened(tmp_path).restore([lineage], after=15) is None  # the durable one is as new
    assert opened(tmp_path, place="gs://bucket/other").restore([lineage], after=0) is None
    assert opened(tmp_path, model={"N": 3}).restore([lineage], after=0) is None
    (path,) = tmp_path.rglob("*-15-0.shards")
    whole = path.read_bytes()
    for damaged in (whole[:-1], whole[:-1] + bytes([whole[-1] ^ 1]), whole + b"\0"):
        path.write_bytes(damaged)
        assert opened(tmp_path).restore([lineage], after=10) is None
        assert "15-0.shards: the checksum does not match" in caplog.text
        caplog.clear()
    for damaged in (b"{", whole.replace(b'"batches": 3', b'"batches": 7'), whole.replace(b'"position"', b'"qosition"')):
        path.write_bytes(damaged)
        found = opened(tmp_path).restore([lineage], after=0)
        assert found is not None and found[0]["step"] == 10 and "15-0.shards is damaged: its first line" in caplog.text
        caplog.clear()


@pytest.mark.parametrize(
    ("name", "value", "fault"),
    [("half", np.nan, "half not finite"), ("count", 1, "differ between the copies on axis 'zero': count")],
)
def test_broken_state_is_not_restored(
    name: str, value: float, fault: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A state that is not finite, or whose copies differ, is not restored."""
    broken = np.array(state(5)[name])
    broken[3] = value
    emergency = opened(tmp_path)
    emergency.save(5, state(5) | {name: jax.pmap(lambda x: x, "zero")(broken)}, POSITION)
    emergency._pool.shutdown()
    assert opened(tmp_path).restore([emergency.lineage], after=0) is None
    assert fault in caplog.text and "using the durable checkpoint" in caplog.text


def test_full_disk_does_not_end_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A full disk does not end training and leaves nothing half-written."""
    emergency = opened(tmp_path)
    (place,) = tmp_path.iterdir()
    aside = place / f"{emergency.lineage}-5-0.shards.tmp"
    aside.mkdir()  # it cannot be written
    with pytest.raises(OSError):
        emergency._write(5, [], POSITION)
    aside.rmdir()
    full = Path("/dev/full")
    if full.exists():
        (place / f"{emergency.lineage}-10-0.shards.tmp").symlink_to(full)
        emergency.save(10, state(10), POSITION)
        emergency._pool.shutdown()
        assert "emergency checkpoint 10 of host 0 could not be written: [Errno 28] No space left" in caplog.text
        assert not list(place.glob("*-10-*"))


def test_small_directory_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A directory without room for three states is refused, with a remedy; files that are replaced are room."""
    saved(tmp_path)
    held = sum(path.stat().st_size for path in tmp_path.rglob("*.shards"))
    needed = 3 * DEVICES * sum(leaf.dtype.itemsize * int(np.prod(leaf.shard_shape)) for leaf in LAYOUT.leaves)
    for missing in (0, 1):
        room = SimpleNamespace(free=needed - held - missing)
        monkeypatch.setattr(shutil, "disk_usage", lambda _, room=room: room)
        with pytest.raises(UserError, match="use a directory on a local disk") if missing else nullcontext():
            opened(tmp_path)


def steps_in(place: Path) -> list[int]:
    return sorted(int(path.name.split("-")[1]) for path in place.glob("*.shards"))


def test_deleted_once_durable(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A run that ends well keeps those that are newer than the newest durable one; one that fails keeps all."""
    (tmp_path / "run").mkdir()
    for durable, left in (([], [1, 2]), ([1], [2]), ([1, 2], []), ([1, 3], [])):
        with opened(tmp_path / "run", durable=durable) as emergency:
            (place,) = (tmp_path / "run").iterdir()
            (place / "of-somebody-else").touch()
            for step in (1, 2):
                emergency.save(step, state(step), POSITION)
        assert steps_in(place) == left
        emergency.remove_earlier()
        assert (place / "of-somebody-else").exists()
        for path in place.glob("*.shards"):
            path.unlink()
    with pytest.raises(KeyError), opened(tmp_path / "run", durable=[2]) as emergency:
        emergency.save(2, state(2), POSITION)
        raise KeyError
    assert steps_in(place) == [2]
    (path,) = place.glob("*.shards")
    header = json.loads(path.read_bytes().partition(b"\n")[0])
    assert header["leaves"][2][:3] == ["half", np.dtype(ml_dtypes.bfloat16).name, [17]]

    def unavailable() -> list[int]:
        raise UserError("the bucket does not answer")

    with opened(tmp_path / "run") as emergency:
        emergency._durable_steps = unavailable
    assert (
        steps_in(place) == [2]
        and "could not delete the emergency checkpoints in" in caplog.text
        and "the bucket does not answer" in caplog.text
    )


def test_earlier_lineages_are_removed(tmp_path: Path) -> None:
    """Files of earlier attempts go at the start, whatever their steps, but for the checkpoint that is continued."""
    lineage = saved(tmp_path)
    (place,) = tmp_path.iterdir()
    (place / f"{'0' * 16}-108-1.shards").touch()  # of an attempt that was ahead, on two hosts
    (place / f"{lineage}-20-0.shards.tmp").touch()  # killed while it wrote
    emergency = opened(tmp_path)
    assert emergency.restore([lineage], after=10) is not None
    emergency.remove_earlier()
    assert [path.name for path in place.iterdir()] == [f"{lineage}-15-0.shards"]
    for step, left in ((20, [15, 20]), (25, [20, 25])):  # the one before stays until all hosts have the new one
        emergency.save(step, state(step), POSITION | {"step": step})
        assert emergency._pending is not None
        emergency._pending.result()
        assert steps_in(place) == left
    again = opened(tmp_path)
    found = again.restore(emergency.lineages, after=15)
    assert found is not None and found[0]["step"] == 25
    fresh = opened(tmp_path)
    fresh.remove_earlier()
    assert not list(place.iterdir())


def test_newer_lineage_goes_first(tmp_path: Path) -> None:
    """What a resume has written since counts more than a later step of the attempt before, of a host that came back."""
    before = saved(tmp_path)
    resumed = opened(tmp_path)
    resumed.save(12, state(12), POSITION | {"step": 12})
    resumed._pool.shutdown()
    emergency = opened(tmp_path)
    found = emergency.restore([resumed.lineage, before], after=10)
    assert found is not None and found[0]["step"] == 12
    assert_equal(found[1], state(12))


def together(count: int, folder: Path, lineage: str) -> list[str]:
    """What the last line of each host says."""
    program, port = Path(__file__).with_name("emergency_hosts.py"), str(hosts.free_port())
    line = [sys.executable, str(program)]
    lines = [[*line, str(number), str(count), port, str(folder), lineage] for number in range(count)]
    printed = hosts.run_together(lines, os.environ | {"PYTHONPATH": str(hosts.REPOSITORY)})
    return [text.splitlines()[-1] for text in printed]


@pytest.mark.parametrize("count", [2, pytest.param(3, marks=pytest.mark.wide)])
def test_shards_from_a_neighbor(count: int, tmp_path: Path) -> None:
    """A replaced host gets its shards from its neighbor."""
    lineage, *others = together(count, tmp_path, "new")
    assert others == [lineage] * (count - 1)
    assert sorted(path.name.removeprefix(f"{lineage}-") for path in (tmp_path / "1").rglob("*.shards")) == [
        *("3-0.shards", "3-1.shards", "6-0.shards", "6-1.shards")
    ]
    places = [(tmp_path, "6")]
    if count > 2:
        shutil.copytree(tmp_path, tmp_path / "later", ignore=shutil.ignore_patterns("*-6-2.shards"))
        places.append((tmp_path / "later", "3"))  # there nobody has all of step 6
    for folder, step in places:
        shutil.rmtree(folder / "1")
        assert together(count, folder, lineage) == [step] * count


def test_hosts_are_told_no_more_where_there_are_more() -> None:
    """One of them has lost its files; another has them."""
    assert told_of_emergency_copies(40) == told_of_emergency_copies(20) < 500
