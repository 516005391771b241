"""The interface of a schedule of the batch: a new one is a file with its keys and an entry of `table.py`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from zero.base.keys import Mistakes, named


@dataclass(frozen=True)
class BatchKeys(ABC):
    """The keys shared by all choices of the group `batch`."""

    name: str = ""

    @abstractmethod
    def stages_to(self, batch_size: int) -> list[tuple[int, int]]:
        """Steps and sequences per host of each stage before batches of `training.batch_size` sequences."""

    def global_stages(self, batch_size: int, hosts: int) -> list[list[int]]:
        """The stages in rows over all hosts, which the first checkpoint of a run fixes."""
        return [[steps, rows * hosts] for steps, rows in self.stages_to(batch_size)]

    def mistakes(self, batch_size: int) -> Mistakes:
        """The keys that contradict `training.batch_size`."""
        yield from ()

    def start_mistakes(self, batch_size: int, total_steps: int) -> Mistakes:
        """The keys by which a run that starts would not grow its batches; one that is resumed keeps its own."""
        yield from ()


@dataclass(frozen=True)
class Constant(BatchKeys):
    """training.batch_size sequences per host in every step."""

    name: str = named("constant")

    def stages_to(self, batch_size: int) -> list[tuple[int, int]]:
        return []
