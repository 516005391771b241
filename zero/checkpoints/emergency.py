"""Emergency checkpoints: every few steps each host keeps its shards in memory, and the next host keeps a copy.

A run that lost a host resumes from them without the bucket. They are files, by default in /dev/shm, because all
processes of a run end with the one that was lost. A file is a line of JSON, then the shards of this host's devices,
leaf by leaf. Reasons against orbax's: docs/decisions/surviving.md.
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
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self

import jax
import numpy as np

from zero.errors import UserError
from zero.hosts import agreement
from zero.hosts.peers import FAILURES, Peers
from zero.partition.checksums import examine
from zero.partition.collectives.axis import Axis
from zero.partition.global_arrays import stack_local
from zero.partition.layout import Layout, PyTree

log = logging.getLogger(__name__)

NAME = re.compile(r"(\d+)-(\d+)\.shards")  # step, host; nothing else in the directory is touched


class DamagedShards(Exception):
    """A damaged file of shards."""


class EmergencyCheckpoints:
    """The emergency checkpoints of one run; a context manager, which deletes them unless it is left by an error.

    All hosts call every method together. Each host holds at most its own newest three and those of the host before.

    Args:
      directory: of this host, for all runs.
      place: the durable checkpoints of the run, which identify its files.
      model: its configuration, which must be the same.

    Raises:
      UserError: the directory cannot be made, or has no room for all files.
    """

    def __init__(
        self, directory: Path, place: Path | str, model: Mapping[str, Any], layout: Layout, axis: Axis
    ) -> None:
        self._directory = directory / hashlib.sha256(str(place).encode()).hexdigest()[:16]
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"zero.emergency_directory={directory}: {error}") from error
        _check_room(directory, self._directory, layout)
        self._layout, self._axis = layout, axis
        self._model = json.loads(json.dumps(dict(model)))  # as a file gives it back: lists in place of tuples
        self._host, self._hosts = jax.process_index(), jax.process_count()
        self._peers = Peers(self._directory)
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="emergency checkpoint")
        self._pending: Future[None] | None = None
        self.lineage = agreement.broadcast("lineage", secrets.token_hex(8))  # another attempt may have the same steps

    def save(self, step: int, state: PyTree, position: dict[str, Any]) -> None:
        """Copies this host's shards, and returns; a thread writes them and sends them to the next host.

        A failure is logged: training continues, and the durable checkpoints are not affected.
        """
        if self._pending is not None:
            self._pending.result()
        agreement.wait_for_all()  # the checkpoint before is complete on all hosts: older ones are no longer needed
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
        name = f"{step}-{self._host}.shards"
        buffers = [x.reshape(-1).view(np.uint8).data for x in copies]
        checksum = 0
        for buffer in buffers:
            checksum = zlib.crc32(buffer, checksum)
        header = {**self._description(), "step": step, "position": position, "checksum": checksum}
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
        for older in sorted(self._steps() - {step})[:-1]:  # the one before stays until all hosts have this one
            self._delete(older)

    def _description(self) -> dict[str, Any]:
        """The properties that must be equal for shards to fit."""
        return {
            "lineage": self.lineage,
            "hosts": self._hosts,
            "host": self._host,
            "devices": jax.local_device_count(),
            "model": self._model,
            "axis": str(self._axis),
            "leaves": [
                [leaf.name, leaf.dtype.name, list(leaf.shape), list(leaf.shard_shape)] for leaf in self._layout.leaves
            ],
        }

    def restore(self, lineage: str, after: int) -> tuple[dict[str, Any], PyTree] | None:
        """The position and state of the newest checkpoint that all hosts together hold; its lineage continues.

        Returns None if no checkpoint of the previous start's `lineage` is newer than the durable one at step `after`.
        Only the shards of a replaced host are sent, by its neighbour.
        """
        self.lineage, new = lineage, self.lineage
        found = self._restore(after)
        if found is None:
            self.lineage = new
        return found

    def _restore(self, after: int) -> tuple[dict[str, Any], PyTree] | None:
        held = [json.loads(text) for text in agreement.gather("emergency checkpoints", json.dumps(self._held()))]
        holders: dict[int, dict[int, int]] = {}  # by step and by host of the shards: who has them
        for holder, found in enumerate(held):
            for step, host in found:
                before = holders.setdefault(step, {}).get(host)
                holders[step][host] = holder if before is None or holder == host else before
        whole = [step for step, hosts in holders.items() if step > after and len(hosts) == self._hosts]
        if not whole:
            return None
        step = max(whole)
        name, holder = f"{step}-{self._host}.shards", holders[step][self._host]
        found = None
        try:
            if holder != self._host:
                self._peers.get(holder, name)
            found = self._read(self._directory / name)
        except (DamagedShards, *FAILURES) as error:
            log.warning("emergency checkpoint %d, shards of host %d: %s", step, self._host, error)
        if agreement.sum_over_hosts(found is None)[0]:
            log.warning("emergency checkpoint %d cannot be read on all hosts; the durable one is used", step)
            return None
        assert found is not None
        try:
            _, not_finite = examine(found[1], self._layout, self._axis)
            fault = f"{', '.join(not_finite)} not finite" if not_finite else ""
        except ValueError as error:
            fault = str(error)
        if fault:
            log.warning("emergency checkpoint %d: %s; the durable one is used", step, fault)
            return None
        source = "its own files" if holder == self._host else f"the copy of host {holder}"
        log.info("resumed from the emergency checkpoint of step %d, from %s", step, source)
        return found

    def _held(self) -> list[list[int]]:
        """Step and host of each file here that fits this run."""
        found = []
        for path in self._directory.iterdir():
            if (name := NAME.fullmatch(path.name)) is None:
                continue
            try:
                with path.open("rb") as file:
                    header = json.loads(file.readline())
            except ValueError:
                log.warning("%s is damaged", path)
                continue
            if header == header | self._description() | {"host": int(name[2])}:
                found.append([int(name[1]), int(name[2])])
        return found

    def _read(self, path: Path) -> tuple[dict[str, Any], PyTree]:
        with path.open("rb") as file:
            header = json.loads(file.readline())
            data = np.frombuffer(file.read(), np.uint8)
        own = self._description()
        if changed := [key for key in own if header[key] != own[key]]:
            raise DamagedShards(f"{path}: {', '.join(changed)} differs from this host's")
        if zlib.crc32(data.data) != header["checksum"]:
            raise DamagedShards(f"{path}: the checksum does not match")
        arrays, local = [], jax.local_devices()
        for leaf in self._layout.leaves:
            shape = (len(local), 1, *leaf.shard_shape)
            size = int(np.prod(shape)) * leaf.dtype.itemsize
            arrays.append(stack_local([*data[:size].view(leaf.dtype).reshape(shape)], local, self._axis.name))
            data = data[size:]
        return header["position"], self._layout.treedef.unflatten(arrays)

    def _steps(self) -> set[int]:
        return {int(found[1]) for path in self._directory.iterdir() if (found := NAME.fullmatch(path.name))}

    def _delete(self, step: int) -> None:
        for path in self._directory.glob(f"{step}-*.shards"):
            path.unlink(missing_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self._pool.shutdown()
        if error is None:  # the last durable checkpoint is as new
            for step in self._steps():
                self._delete(step)


def _check_room(directory: Path, own: Path, layout: Layout) -> None:
    """Raises UserError where the files of this host will not fit: /dev/shm of a container often has 64 MiB."""
    share = sum(math.prod(leaf.shard_shape) * leaf.dtype.itemsize for leaf in layout.leaves)
    needed = (3 if jax.process_count() == 1 else 6) * share * jax.local_device_count()
    free = shutil.disk_usage(own).free + sum(path.stat().st_size for path in own.iterdir())  # those are replaced
    if free < needed:
        raise UserError(
            f"zero.emergency_directory={directory}: expected {needed / 2**20:,.1f} MiB for the shards of this host and "
            f"its neighbour, {free / 2**20:,.1f} are free; name a directory on a local disk, or give the container "
            "more shared memory (docker run --shm-size)"
        )
