"""Emergency checkpoints: every few steps each host keeps its shards in memory, and the next host keeps a copy.

A run that lost a host resumes from them without the bucket. They are files, by default in /dev/shm, because the loss of
one process ends all processes of a run. A file is a line of JSON followed by the shards of this host's devices, leaf by
leaf. Its name contains the lineage of the start that wrote it, because an earlier attempt may have reached the same
steps with other keys or on other hosts. The line has a checksum of the shards and one of itself. Why not orbax's:
docs/decisions/fault-tolerance.md.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import re
import secrets
import shutil
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Self

import jax
import numpy as np

from zero.base.errors import UserError
from zero.base.keys import at_least, key, not_empty
from zero.checkpoints.metadata import check_metadata, with_checksum
from zero.hosts import agreement
from zero.hosts.peers import FAILURES, Peers
from zero.partition.checksums import examine
from zero.partition.collectives.axis import Axis
from zero.partition.global_arrays import stack_local
from zero.partition.layout import Layout, PyTree

log = logging.getLogger(__name__)

NAME = re.compile(r"([0-9a-f]{16})-(\d+)-(\d+)\.shards(\.tmp)?")  # nothing else in the directory is touched


class DamagedShards(Exception):
    """A damaged file of shards."""


class Emergency(NamedTuple):
    """One emergency checkpoint of all hosts."""

    lineage: str  # of the start that wrote it
    step: int

    def file(self, host: int) -> str:
        """The name of the file with the shards of a host."""
        return f"{self.lineage}-{self.step}-{host}.shards"


@dataclass(frozen=True)
class EmergencyKeys:
    """When and where they are kept: keys of section `zero`."""

    emergency_steps: int | None = key(
        None,
        at_least(1),
        "Every n steps each host saves its shards in emergency_directory, and the next host keeps a copy; null: off.",
        "After losing a host, a run resumes from these shards instead of from the last durable checkpoint. Each save "
        "also logs a line of metrics.",
        in_steps=True,
    )
    emergency_directory: str = key(
        "/dev/shm/zero",
        not_empty(),
        "A directory in memory or on a local disk of each host, with room for six times the host's share of the state.",
        per_host=True,
    )


class EmergencyCheckpoints:
    """The emergency checkpoints of one run; a context manager that deletes those no longer needed.

    A checkpoint is needed until a durable one of the same or a later step is committed. All hosts call every method
    together. Each host holds at most its own newest three and the newest three of the previous host.

    Args:
      directory: on this host, shared by all runs.
      checkpoint_path: the durable checkpoints of the run, which identify its files.
      durable_steps: returns the steps of committed durable checkpoints, oldest first.
      model: the model's configuration, which must be the same.

    Attributes:
      lineage: names the files of this start.
      restored: the checkpoint that this start continues, if it continues an emergency checkpoint.

    Raises:
      UserError: the directory cannot be created, or lacks room for all files.
    """

    def __init__(
        self,
        directory: Path,
        checkpoint_path: Path | str,
        durable_steps: Callable[[], Sequence[int]],
        model: Mapping[str, Any],
        layout: Layout,
        axis: Axis,
    ) -> None:
        self._directory = directory / hashlib.sha256(str(checkpoint_path).encode()).hexdigest()[:16]
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"zero.emergency_directory={directory}: {error}") from error
        _check_room(directory, self._directory, layout)
        self._durable_steps = durable_steps
        self._layout = layout
        self._axis = axis
        self._model = json.loads(json.dumps(dict(model)))  # as read from a file: lists instead of tuples
        self._host = jax.process_index()
        self._hosts = jax.process_count()
        self._peers = Peers(self._directory)
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="emergency checkpoint")
        self._pending: Future[None] | None = None
        self.lineage = agreement.broadcast("lineage", secrets.token_hex(8))
        self.restored: Emergency | None = None

    @property
    def lineages(self) -> list[str]:
        """The lineages that the next start may continue, newest first."""
        if self.restored is None:
            return [self.lineage]
        return [self.lineage, self.restored.lineage]

    def remove_earlier(self) -> None:
        """Removes the files of earlier starts, except the checkpoint that this start continues.

        They would count among the newest, though no start would use them. No host writes before all have removed
        theirs, because `save` waits for all.
        """
        for path, checkpoint in self._files():
            if checkpoint != self.restored or path.suffix == ".tmp":
                path.unlink(missing_ok=True)

    def save(self, step: int, state: PyTree, position: dict[str, Any]) -> None:
        """Copies this host's shards and returns; a thread writes them and sends them to the next host.

        A failure is logged: training continues, and the durable checkpoints are not affected.
        """
        if self._pending is not None:
            self._pending.result()
        agreement.wait_for_all()  # the previous checkpoint is complete on all hosts: older ones are no longer needed
        self._pending = self._pool.submit(self._write, step, list(self._copies(state)), position)

    def _copies(self, state: PyTree) -> Iterator[np.ndarray]:
        """A copy of each leaf `(local devices, *shard_shape)`; the next step donates the originals."""
        leaves = self._layout.treedef.flatten_up_to(state)
        for x in leaves:
            x.copy_to_host_async()
        for x in leaves:
            parts = {part.device: part.data for part in x.addressable_shards}
            yield np.concatenate([np.asarray(parts[device]) for device in jax.local_devices()])

    def _write(self, step: int, copies: list[np.ndarray], position: dict[str, Any]) -> None:
        checkpoint = Emergency(self.lineage, step)
        name = checkpoint.file(self._host)
        buffers = [x.reshape(-1).view(np.uint8).data for x in copies]
        checksum = 0
        for buffer in buffers:
            checksum = zlib.crc32(buffer, checksum)
        header = with_checksum({**self._description(checkpoint), "position": position, "checksum": checksum})
        aside = self._directory / f"{name}.tmp"
        try:
            with aside.open("wb") as file:
                file.write(json.dumps(header).encode() + b"\n")
                for buffer in buffers:
                    file.write(buffer)
            aside.replace(self._directory / name)
            if self._hosts > 1:
                self._peers.put((self._host + 1) % self._hosts, name)
        except FAILURES as error:
            log.warning("emergency checkpoint %d of host %d could not be written: %s", step, self._host, error)
        finally:
            aside.unlink(missing_ok=True)
        on_disk = {checkpoint for _, checkpoint in self._files()}
        older = sorted(on_disk - {checkpoint}, key=lambda checkpoint: checkpoint.step)
        for unneeded in older[:-1]:  # the previous one stays until all hosts have this one
            self._delete(unneeded)

    def _description(self, checkpoint: Emergency) -> dict[str, Any]:
        """The properties that must be equal for shards to fit."""
        return {
            **checkpoint._asdict(),
            "hosts": self._hosts,
            "host": self._host,
            "devices": jax.local_device_count(),
            "model": self._model,
            "axis": str(self._axis),
            "leaves": [
                [leaf.name, leaf.dtype.name, list(leaf.shape), list(leaf.shard_shape)] for leaf in self._layout.leaves
            ],
        }

    def restore(self, lineages: Sequence[str], after: int) -> tuple[dict[str, Any], PyTree] | None:
        """The position and state of the newest checkpoint whose shards all hosts together still have.

        Only the shards of a replaced host are sent, by its neighbor.

        Args:
          lineages: the value of `lineages` at the previous start, newest first.
          after: the step of the newest durable checkpoint.

        Returns:
          None if no checkpoint of these lineages is newer than the durable one.
        """
        held = {(checkpoint, host) for checkpoint, host in self._held(lineages) if checkpoint.step > after}
        holders = find_whole(held, self._host, agreement.union)
        if not holders:
            return None
        newest = min(holders, key=lambda checkpoint: (lineages.index(checkpoint.lineage), -checkpoint.step))
        restored = self._fetch(newest, holders[newest])
        if restored is not None:
            self.restored = newest
        return restored

    def _fetch(self, checkpoint: Emergency, holder: int) -> tuple[dict[str, Any], PyTree] | None:
        """Position and state of a checkpoint, this host's shards from `holder`; None if a host cannot read them."""
        step = checkpoint.step
        name = checkpoint.file(self._host)
        position_and_state = None
        try:
            if holder != self._host:
                self._peers.get(holder, name)
            position_and_state = self._read(checkpoint)
        except (DamagedShards, *FAILURES) as error:
            log.warning("emergency checkpoint %d, shards of host %d: %s", step, self._host, error)
        if agreement.sum_over_hosts(position_and_state is None)[0]:
            log.warning("emergency checkpoint %d cannot be read on all hosts; using the durable checkpoint", step)
            return None
        assert position_and_state is not None
        try:
            _, not_finite = examine(position_and_state[1], self._layout, self._axis)
            fault = f"{', '.join(not_finite)} not finite" if not_finite else ""
        except ValueError as error:
            fault = str(error)
        if fault:
            log.warning("emergency checkpoint %d: %s; using the durable checkpoint", step, fault)
            return None
        source = "its own files" if holder == self._host else f"the copy of host {holder}"
        log.info("resumed from the emergency checkpoint of step %d, from %s", step, source)
        return position_and_state

    def _held(self, lineages: Sequence[str]) -> Iterator[tuple[Emergency, int]]:
        """Checkpoint and host of each complete file here that belongs to one of these lineages and fits this run."""
        for path, checkpoint in self._files():
            if checkpoint.lineage not in lineages or path.suffix == ".tmp":
                continue
            try:
                with path.open("rb") as file:
                    header = _read_header(file)
            except DamagedShards as error:
                log.warning("%s", error)
                continue
            host = int(path.stem.rpartition("-")[2])
            if header == header | self._description(checkpoint) | {"host": host}:
                yield checkpoint, host

    def _read(self, checkpoint: Emergency) -> tuple[dict[str, Any], PyTree]:
        path = self._directory / checkpoint.file(self._host)
        with path.open("rb") as file:
            header = _read_header(file)
            data = np.frombuffer(file.read(), np.uint8)
        expected = self._description(checkpoint)
        changed = [key for key in expected if header[key] != expected[key]]
        if changed:
            raise DamagedShards(f"{path}: {', '.join(changed)} differs from this host's")
        if zlib.crc32(data.data) != header["checksum"]:
            raise DamagedShards(f"{path}: the checksum does not match")
        arrays = []
        local = jax.local_devices()
        for leaf in self._layout.leaves:
            shape = (len(local), 1, *leaf.shard_shape)
            size = int(np.prod(shape)) * leaf.dtype.itemsize
            arrays.append(stack_local([*data[:size].view(leaf.dtype).reshape(shape)], local, self._axis.name))
            data = data[size:]
        return header["position"], self._layout.treedef.unflatten(arrays)

    def _files(self) -> Iterator[tuple[Path, Emergency]]:
        """Each file of shards here, including half-written ones, and the checkpoint it belongs to."""
        for path in list(self._directory.iterdir()):
            if name := NAME.fullmatch(path.name):
                yield path, Emergency(name[1], int(name[2]))

    def _delete(self, checkpoint: Emergency) -> None:
        for path in self._directory.glob(f"{checkpoint.lineage}-{checkpoint.step}-*.shards"):
            path.unlink(missing_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self._pool.shutdown()
        if error is not None:  # storage may not answer, and the next start removes what it does not need
            return
        try:
            durable = max(self._durable_steps(), default=-1)
        except UserError as failure:
            log.warning("could not delete the emergency checkpoints in %s: %s", self._directory, failure)
            return
        for _, checkpoint in list(self._files()):
            if checkpoint.step <= durable:
                self._delete(checkpoint)


def _read_header(file: BinaryIO) -> dict[str, Any]:
    """The first line of a file of shards; raises DamagedShards if it is not as it was written."""
    try:
        header: dict[str, Any] = json.loads(file.readline())
        check_metadata(header)
    except ValueError as error:
        raise DamagedShards(f"{file.name} is damaged: its first line: {error}") from error
    return header


def find_whole(
    held: Collection[tuple[Emergency, int]], host: int, union: Callable[[str, Iterable[str]], set[str]]
) -> dict[Emergency, int]:
    """The checkpoints whose shards all hosts together have, with the host that has those of this one.

    All hosts call it together. It tells each host which checkpoints there are, which hosts lack their own shards, and
    who has these: none of this grows with the number of hosts.

    Args:
      held: the checkpoints and the shards' hosts of the files on this host.
      host: the number of this host.
      union: as `agreement.union`.
    """
    names = union("emergency checkpoints", {checkpoint.file(0) for checkpoint, _ in held})
    checkpoints = [_parse(name)[0] for name in names]
    lacking = union(
        "missing emergency shards",
        {checkpoint.file(host) for checkpoint in checkpoints if (checkpoint, host) not in held},
    )
    found = union("holders of emergency shards", {f"{name} {host}" for name in lacking if _parse(name) in held})
    holders: dict[str, int] = {}
    for name, holder in sorted((name, int(holder)) for name, _, holder in (text.partition(" ") for text in found)):
        holders.setdefault(name, holder)
    lost = {_parse(name)[0] for name in lacking - holders.keys()}
    return {
        checkpoint: holders.get(checkpoint.file(host), host) for checkpoint in checkpoints if checkpoint not in lost
    }


def _parse(name: str) -> tuple[Emergency, int]:
    """The checkpoint of a file, and the host of its shards."""
    match = NAME.fullmatch(name)
    assert match is not None
    return Emergency(match[1], int(match[2])), int(match[3])


def _check_room(directory: Path, own: Path, layout: Layout) -> None:
    """Raises UserError if this host's files will not fit: /dev/shm in a container often has only 64 MiB."""
    share = sum(math.prod(leaf.shard_shape) * leaf.dtype.itemsize for leaf in layout.leaves)
    needed = (3 if jax.process_count() == 1 else 6) * share * jax.local_device_count()
    free = shutil.disk_usage(own).free + sum(path.stat().st_size for path in own.iterdir())  # those are replaced
    if free < needed:
        raise UserError(
            f"zero.emergency_directory={directory}: expected {needed / 2**20:,.1f} MiB for the shards of this host and "
            f"its neighbor, {free / 2**20:,.1f} are free; use a directory on a local disk, or give the container more "
            "shared memory (docker run --shm-size)"
        )
