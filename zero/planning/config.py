"""The configuration of `mode=plan`: the keys of a training run and its own; and the requests made from them."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from zero.base.keys import (
    DTYPES,
    INT64,
    Check,
    Mistakes,
    at_least,
    key,
    list_of,
    one_of,
    positive,
    section,
    with_values,
)
from zero.models.config import GPTConfig
from zero.models.stack import REMAT
from zero.run.config import TrainConfig
from zero.training.optimizers.optimizer import QUANTIZABLE
from zero.training.optimizers.optimizer_keys import STATE_DTYPES

# The key whose values each key of plan.grid lists.
OF_GRID = {
    "stage": "zero.stage",
    "micro_batch": "plan.micro_batch",
    "accumulation": "training.gradient_accumulation_steps",
    "remat": "zero.remat",
    "master_dtype": "zero.master_dtype",
    "state_dtype": "optimizer.state_dtype",
    "context": "data.max_context",
    "tensor": "zero.tensor_shards",
    "context_shards": "zero.context_shards",
    "expert": "zero.expert_shards",
    "replicas": "zero.replicas",
    "phases": "zero.phases",
    "overlap_gathers": "zero.overlap_gathers",
}
OF_SEARCHES: dict[str, tuple[str, ...]] = {
    "none": (),
    "stages": (),
    "fastest": tuple(OF_GRID),
    "largest": ("context", "master_dtype", "state_dtype"),
}
# The keys that each search overrides.
REPLACED = {
    "none": {},
    "stages": {"zero.stage": "plan.search=stages compiles all of them"},
    "fastest": {},
    "largest": {
        **dict.fromkeys(("model.size", "model.override"), "plan.search=largest makes its own models"),
        "data.max_context": "plan.search=largest plans for 1024 tokens, or for the most of plan.grid.context",
    },
}
# Columns of a row whose keys have another name or are outside section `zero`.
_ELSEWHERE = {
    "accumulation": ("training", "gradient_accumulation_steps"),
    "context": ("data", "max_context"),
    "state_dtype": ("optimizer", "state_dtype"),
}


@dataclass(frozen=True)
class Grid:
    stage: list[int] = key([2, 3], list_of(one_of(0, 1, 2, 3)), "Values of zero.stage.")
    micro_batch: list[int] = key([1, 4, 16], list_of(at_least(1)), "Values of plan.micro_batch.")
    accumulation: list[int] = key([1, 4], list_of(at_least(1)), "Values of training.gradient_accumulation_steps.")
    remat: list[str] = key(["auto"], list_of(one_of("auto", *REMAT)), "Values of zero.remat.")
    master_dtype: list[str] | None = key(
        None,
        list_of(one_of(*DTYPES)),
        "Values of zero.master_dtype; null: only its own value.",
    )
    state_dtype: list[str] | None = key(
        None,
        list_of(one_of(*STATE_DTYPES)),
        "Values of optimizer.state_dtype; null: only its own value.",
    )
    context: list[int] | None = key(
        None,
        list_of(at_least(2)),
        "Values of data.max_context; null: only its own value, or 1024 with search=largest.",
    )
    tensor: list[int] | None = key(
        None,
        list_of(at_least(1)),
        "Values of zero.tensor_shards; null: only its own value.",
    )
    context_shards: list[int] | None = key(None, list_of(at_least(1)), "Values of zero.context_shards.")
    expert: list[int] | None = key(None, list_of(at_least(1)), "Values of zero.expert_shards.")
    replicas: list[int] | None = key(None, list_of(at_least(1)), "Values of zero.replicas.")
    phases: list[str] | None = key(None, list_of(one_of("auto", "flat", "torus")), "Values of zero.phases.")
    overlap_gathers: list[bool] | None = key(
        None, Check(bool, "a list, each element true or false"), "Values of zero.overlap_gathers."
    )


@dataclass(frozen=True)
class Plan:
    topology: str = key(
        "local",
        None,
        "A TPU slice such as v3-8, v4-32, v5e-16, v5p-128, v6e-8, tpu7x-8 or v3:4x4; local, cpu, gpu: devices of "
        "this machine; or gpu:h100x8, by a formula.",
    )
    micro_batch: int = key(4, at_least(1), "Sequences per device and micro-batch.")
    search: str = key(
        "none",
        one_of("none", "stages", "fastest", "largest"),
        "none: the step that the other keys describe; stages: the same at zero.stage=0 to 3; fastest: the setting of "
        "plan.grid that fits and is predicted to be fastest; largest: the largest model that fits.",
    )
    grid: Grid = section(
        Grid,
        "search=fastest tries all possible combinations of these values; search=largest varies only master_dtype and "
        "state_dtype, at the largest context.",
    )
    exact: bool = key(
        False,
        None,
        "For a TPU, compile the whole program and read its cycles; false: stop at the compiler's schedule, in a few "
        "seconds, unless the memory could be too small.",
    )
    tokens: int | None = key(
        None,
        at_least(1, INT64),
        "Tokens of the run for which days and dollars are shown; null: 20 per parameter (arXiv 2203.15556).",
    )
    dollars_per_hour: float | None = key(
        None,
        positive(),
        "Price of the whole slice in US dollars per hour, to show the cost of the run; null: not shown.",
    )
    breakdown: bool = key(
        False,
        None,
        "Also print the predicted time by part of the model, for the best row or the last one that fits.",
    )
    processes: int | None = key(
        None,
        at_least(1),
        "Compiler processes that run in parallel; null: one per core of this machine, at most 4.",
    )

    def without_effect(self) -> Mistakes:
        """Keys of the run and of the grid that this search does not read, each with the reason."""
        if self.tokens is not None:
            yield "training.total_steps", "plan.tokens replaces it"
        yield from REPLACED[self.search].items()
        for name, replaced in OF_GRID.items():
            if name not in OF_SEARCHES[self.search]:
                reading = " or ".join(f"plan.search={search}" for search, names in OF_SEARCHES.items() if name in names)
                yield f"plan.grid.{name}", f"plan.search={self.search}; {reading} reads it"
            elif getattr(self.grid, name) is not None and replaced not in REPLACED[self.search]:
                yield replaced, f"plan.grid.{name} replaces it"


@dataclass(frozen=True)
class PlanConfig(TrainConfig):
    """Predicts memory, traffic and time of the step that the other sections describe, without the hardware.

    plan.micro_batch takes the place of training.batch_size.
    """

    plan: Plan = section(Plan, "mode=plan")

    @property
    def trains(self) -> bool:
        return False

    def mistakes(self, model_config: GPTConfig) -> Mistakes:
        yield from super().mistakes(model_config)
        plan = self.plan
        if plan.search != "largest" and max(plan.grid.context or [0]) > model_config.block_size:
            limit = f"the block_size of {self.model}"
            yield "plan.grid.context", f"a list, each element 2 to {model_config.block_size}, {limit}, or null"
        if self.optimizer.name not in QUANTIZABLE and set(plan.grid.state_dtype or []) - {"float32"}:
            yield "plan.grid.state_dtype", f"[float32] or null, as optimizer={self.optimizer.name}"

    def without_effect(self) -> Mistakes:
        """Other keys of training are part of the printed command, if not of the compiled step."""
        yield "data.resume_step", "mode=plan plans a fresh start"
        yield "training.batch_size", "plan.micro_batch replaces it"
        yield "batch", "mode=plan plans the steps after the last stage"
        yield "profile.step_time", "mode=plan predicts it"
        yield from self.plan.without_effect()
        yield from super().without_effect()


@dataclass(frozen=True)
class Request:
    """A step to compile: a checked configuration on a slice."""

    config: PlanConfig
    size: GPTConfig
    micro_batch: int  # sequences per micro-batch and device, or group of devices that take the same sequences

    @property
    def rows(self) -> int:
        """Sequences per step and device, or group of devices that take the same sequences.

        For an objective on pairs, `micro_batch` counts these.
        """
        texts = self.config.objective.objective().example.texts
        return texts * self.micro_batch * self.config.training.gradient_accumulation_steps

    def with_changes(self, micro_batch: int | None = None, **keys: Any) -> Request:
        """A copy with other values for some columns of a row."""
        changed = with_keys(self.config, keys)
        return dataclasses.replace(self, config=changed, micro_batch=micro_batch or self.micro_batch)


def with_keys(config: PlanConfig, keys: dict[str, Any]) -> PlanConfig:
    """A copy with other values of `accumulation`, `context`, `state_dtype`, or keys of the section `zero`."""
    named = {".".join(_ELSEWHERE.get(name, ("zero", name))): value for name, value in keys.items()}
    return with_values(config, named)
