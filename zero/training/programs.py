"""The pmapped programs that train and use a model; `mode=plan` compiles the same programs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, ParamSpec, Protocol, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax

from zero.models.config import STACK
from zero.models.gpt import init_cache
from zero.partition import pmapped
from zero.partition.collectives.axis import Axis
from zero.partition.layout import PyTree
from zero.partition.sharded_optimizer import on_shards
from zero.training.batch import Rows
from zero.training.host_rows import HostRows
from zero.training.inference import (
    DecodeState,
    Sampling,
    evaluate_step,
    extend,
    prefill,
    reference_step,
    score,
    score_on,
)
from zero.training.parts import StepOptions, TrainState
from zero.training.sharded_gpt import ShardedGPT
from zero.training.statistics import statistics
from zero.training.step import make_step, new_state
from zero.training.streamed_update import streamed_start, streamed_step
from zero.training.updates_by_part import updates_by_part
from zero.training.verification import verify

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result", covariant=True)
Shared = Mapping[str, jax.Array]  # the same on every device, and without the leading dimension


class Program(Protocol[Arguments, Result]):
    """A pmapped function; every argument and result has a leading dimension of local devices, unless it is shared."""

    def __call__(self, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Result: ...

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        """The program for arguments of these shapes, as `jax.stages.Lowered`."""
        ...


class Programs(NamedTuple):
    """Pmapped functions, to call or to `.lower` and compile; `start`, `fresh` and `step` may call several of them.

    Every argument and result has a leading dimension of local devices, unless it is called shared.

    Attributes:
      init: `(key data)`, one row per device, all alike, to weights: parameter shards, and the model's collections.
      start: weights, donated, to a new `TrainState`.
      fresh: seeds, one per device, all alike, to the new `TrainState` of `init` and `start`.
      step: `(TrainState, Batch)`, the state donated, to the next state and shared metrics.
      evaluate: `(weights, tokens)`, and `Batch.extra` if the objective reads any, to shared sums: of its terms, their
        number, and of its metrics. Of the likelihood: losses, and tokens scored.
      verify: `(weights, tokens, first)`, one number per device, all alike, to the shared checksums of results.
      hold: weights to a copy of them, which outlives the step.
      statistics: `(trained weights before a step, TrainState after it, Batch)`, and frozen parameters if there are any,
        to its shared statistics per tensor.
      reference: `(weights, tokens)`, frozen parameters if there are any, to log-probabilities `(rows,)`.
    """

    init: Program[[Rows], PyTree]
    start: Callable[[PyTree], TrainState]
    fresh: Callable[[Rows], TrainState]
    step: Program[..., tuple[TrainState, Shared]]
    evaluate: Program[..., tuple[Any, ...]]
    verify: Program[[PyTree, Rows, Rows], jax.Array]
    hold: Program[[PyTree], PyTree]
    statistics: Program[..., Shared]
    reference: Program[..., jax.Array]


def make_programs(
    model: ShardedGPT, tx: optax.GradientTransformation, options: StepOptions, devices: Sequence[Any] | None = None
) -> Programs:
    """Binds the model, the optimizer and the options. Nothing is compiled yet.

    `tx` is any optax transform; `start` and `step` raise `NotElementwiseError` where it would be wrong on shards.

    Raises:
      ValueError: options that cannot be combined.
    """

    def init(key_data: jax.Array) -> PyTree:
        return model.init(jax.random.wrap_key_data(key_data))

    pmap = partial(pmapped.pmap, axis_name=model.axis.name, devices=devices)
    make_training = _streamed_training if options.streams_state else _training
    start, fresh, step = make_training(model, tx, options, devices)
    scoring: Any = {"model": dataclasses.replace(model, drops=False), "micro_batches": options.micro_batches}
    return Programs(
        init=pmap(init),
        start=start,
        fresh=fresh,
        step=step,
        evaluate=pmap(partial(evaluate_step, objective=options.objective, **scoring), out_axes=None),
        verify=pmap(partial(verify, model=model, micro_batches=options.micro_batches), out_axes=None),
        hold=pmap(partial(jax.tree.map, jnp.copy)),
        statistics=pmap(partial(statistics, model=model, options=options), out_axes=None),
        reference=pmap(partial(reference_step, **scoring)),
    )


def _training(
    model: ShardedGPT, tx: optax.GradientTransformation, options: StepOptions, devices: Sequence[Any] | None
) -> tuple[Any, Any, Any]:
    """`start`, `fresh` and `step` of `Programs`, of one program each."""
    pmap = partial(pmapped.pmap, axis_name=model.axis.name, devices=devices)
    step = (make_step if options.parts == 1 else updates_by_part)(model, tx, options)

    def start(weights: PyTree) -> TrainState:
        return new_state(weights, on_shards(tx, model.layout, model.axis), model, options)

    return (
        pmap(start, donate_argnums=0),
        pmap(lambda seed: start(model.init(jax.random.key(seed)))),
        pmap(step, donate_argnums=0, out_axes=(0, None)),
    )


def _streamed_training(
    model: ShardedGPT, tx: optax.GradientTransformation, options: StepOptions, devices: Sequence[Any] | None
) -> tuple[Any, Any, Any]:
    """The same with the layers' optimizer state in host memory."""
    start = streamed_start(model, tx, options, devices)
    init = pmapped.pmap(lambda seed: model.init(jax.random.key(seed)), model.axis.name, devices)
    return start, lambda seed: start(init(seed)), streamed_step(model, tx, options, devices)


class Inference(NamedTuple):
    """Pmapped functions for inference; arguments and results as in `Programs`.

    Attributes:
      score: `(params, tokens)` to the shared losses and hits of all rows.
      new_cache: `(tokens)`, of which only the number of rows matters, to an empty cache for `score_on`.
      score_on: `(params, tokens, cache, position)`, the cache donated, to shared losses and hits and the next cache.
      prefill: `(params, tokens, length, width)`, the width static, to a `DecodeState`.
      extend: `(params, DecodeState, keys, count)`, the state donated, the count static, to the next `DecodeState` and
        the shared tokens of all rows.
      host_rows: which rows of a batch the devices of this host compute.
      switch: the number of positions beyond which rotary frequencies depend on their number; None if they never do.
      grows: whether they then change with every position, and not only once.
    """

    score: Program[[PyTree, Rows], tuple[jax.Array, jax.Array]]
    new_cache: Program[[Rows], PyTree]
    score_on: Program[[PyTree, Rows, PyTree, Rows], tuple[jax.Array, jax.Array, PyTree]]
    prefill: Program[[PyTree, Rows, Rows, int], DecodeState]
    extend: Program[[PyTree, DecodeState, Rows, int], tuple[DecodeState, jax.Array]]
    host_rows: HostRows
    switch: int | None = None
    grows: bool = False


def for_inference(model: ShardedGPT) -> ShardedGPT:
    """The same without context groups, and without experts that drop tokens."""
    return dataclasses.replace(model, axis=dataclasses.replace(model.axis, context=1), drops=False)


def make_inference(
    model: ShardedGPT, sampling: Sampling | None = None, *, devices: Sequence[Any] | None = None
) -> Inference:
    """Binds the model, without context groups, and the sampling. Nothing is compiled yet."""
    model = for_inference(model)
    pmap = partial(pmapped.pmap, axis_name=model.axis.name, devices=devices)
    bound = partial(extend, model=model, sampling=sampling or Sampling())
    return Inference(
        score=pmap(partial(score, model=model), out_axes=None),
        new_cache=pmap(
            lambda tokens: init_cache(
                model.config, len(tokens), 0, model.compute_dtype, model.row_group, known=np.iinfo(np.int32).max
            )
        ),
        score_on=pmap(partial(score_on, model=model), donate_argnums=2, out_axes=(None, None, 0)),
        prefill=pmap(
            lambda params, tokens, length, width: prefill(params, tokens, length, model=model, width=width),
            static_broadcasted_argnums=3,
        ),
        extend=pmap(
            lambda params, state, keys, count: bound(params, state, keys, count=count),
            static_broadcasted_argnums=3,
            donate_argnums=1,
            out_axes=(0, None),
        ),
        host_rows=HostRows.here(model.axis, devices),
        switch=model.config.rotary_switch,
        grows=model.config.rotary_kind == "dynamic",
    )


def repeat_layers(weights: PyTree, order: Sequence[int], axis: Axis) -> PyTree:
    """Sharded weights of another depth: layer i of the result is layer `order[i]` of these.

    Per device: leaves under "blocks" of `(layers, ...)`, which become `(len(order), ...)`; no communication.
    """
    repeat = pmapped.pmap(lambda blocks: jax.tree.map(lambda x: x[np.asarray(order)], blocks), axis.name)

    def repeated(tree: PyTree) -> PyTree:
        if not isinstance(tree, dict):
            return tree
        return {name: repeat(below) if name == STACK else repeated(below) for name, below in tree.items()}

    return repeated(weights)
