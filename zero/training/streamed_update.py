"""The fused update with the layers' optimizer state in host memory between updates.

`jax.pmap` takes no argument from there, so a step is not one program but several: one embeds, one runs a span of layers
forward, one computes the loss, one runs a span backward and updates it, one updates the rest. The two for spans are
called once per span. While one computes, the state of the next span comes to the devices, and the state of the span
before leaves them. A device holds the state of three spans at most.

Source: the idea is from ZeRO-Infinity (Rajbhandari et al., arXiv 2104.07857, section 5).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from zero.models.config import STACK
from zero.models.stack import LAYER_INPUT, inputs_of, is_on_host
from zero.partition import pmapped
from zero.partition.host_blocks import HostQueue, in_reverse, to_devices
from zero.partition.layout import PyTree
from zero.partition.sharded_optimizer import norm_of, on_shards
from zero.training.batch import Batch
from zero.training.fused_update import (
    PartUpdate,
    cut_layer,
    layered_loss,
    place_layer,
    span_of,
    subtrees,
    with_layers_added,
)
from zero.training.optimizers.optimizer import scaled, stack_and_rest
from zero.training.parts import StepOptions, TrainState, UpdateResult
from zero.training.sharded_gpt import ShardedGPT
from zero.training.step import make_finish, new_state


class StreamedState(NamedTuple):
    """The state of an optimizer, with the state of layers in host memory.

    Attributes:
      rest: all but the layers, on the devices.
      blocks: of each span of layers, in their order, its part of each tree of parameters in the optimizer's state.
    """

    rest: PyTree
    blocks: tuple[PyTree, ...]


def layers_of(tree: PyTree) -> list[PyTree]:
    """The stacks of layers of each tree of parameters in the state of an optimizer.

    >>> layers_of(optax.ScaleByAdamState(0, {STACK: 1, "norm": 2}, {STACK: 3, "norm": 4}))
    [{'blocks': 1}, {'blocks': 3}]
    """
    return [stack_and_rest(x)[0] for x in _parts(tree)[0] if isinstance(x, dict)]


def rest_of(tree: PyTree) -> PyTree:
    """The state without the layers."""
    return subtrees(lambda x: stack_and_rest(x)[1], tree)


def with_layers(rest: PyTree, layers: Sequence[PyTree]) -> PyTree:
    """The inverse of `layers_of` and `rest_of`.

    >>> state = optax.ScaleByAdamState(0, {STACK: 1, "norm": 2}, {STACK: 3, "norm": 4})
    >>> with_layers(rest_of(state), layers_of(state)) == state
    True
    """
    parts, treedef = _parts(rest)
    places = [index for index, part in enumerate(parts) if isinstance(part, dict)]
    for index, stacks in zip(places, layers, strict=True):
        parts[index] = {**parts[index], **stacks}
    return treedef.unflatten(parts)


def _parts(tree: PyTree) -> tuple[list[Any], Any]:
    return jax.tree.flatten(tree, is_leaf=lambda x: isinstance(x, dict))


class SpanPrograms(NamedTuple):
    """Pmapped functions, or their compiled forms; `first` is the index of a span's first layer.

    Attributes:
      embed: `(clock, parameters outside the layers, batch)` to the first layer's input.
      forward: `(clock, stack, input of a span, first, batch)` to its output.
      score: `(clock, parameters outside, output of the last layer, batch)` to the loss of this device's rows, the
        gradients of both, and the auxiliary outputs.
      backward: `(clock, stack, rest of the optimizer's state, block, input of a span, gradient of its output, first,
        batch)` to the next stack and block, the gradient of the input, and per layer the sum of squares and whether it
        was skipped. Stack, block and gradient are donated.
      finish: `(state without blocks, gradients outside the layers, gradient of the first input, batch, loss, per span
        what backward found, auxiliary outputs)` to the next state without blocks, and shared metrics. The state is
        donated.
    """

    embed: Any
    forward: Any
    score: Any
    backward: Any
    finish: Any


def span_programs(
    model: ShardedGPT, tx: optax.GradientTransformation, options: StepOptions, devices: Sequence[Any] | None
) -> SpanPrograms:
    """The programs of a step; nothing is compiled yet.

    Raises:
      ValueError: an option needs the whole gradient.
    """
    size = span_of(model, options)
    finish_update = make_finish(model, options)
    model = dataclasses.replace(model, sums_copies=True)
    layers = model.config.scanned_layers

    def key_of(clock: jax.Array) -> jax.Array:
        return jax.random.fold_in(jax.random.key(options.seed), clock)

    def loss_of(clock: jax.Array, batch: Batch, terms: Any = None) -> Any:
        return layered_loss(model, options, batch, model.dropout_keys(key_of(clock), batch), terms)

    def updates(clock: jax.Array) -> PartUpdate:
        return PartUpdate(scaled(tx, options.learning_rate(clock), clock), model.layout, model.axis, options, layers)

    def embed(clock: jax.Array, rest: PyTree, batch: Batch) -> PyTree:
        return loss_of(clock, batch).embed(rest)

    def forward(clock: jax.Array, stack: PyTree, x: PyTree, first: jax.Array, batch: Batch) -> PyTree:
        layer = loss_of(clock, batch).layer

        def one(x: PyTree, number: jax.Array) -> tuple[PyTree, None]:
            weights = jax.tree.map(lambda stack: lax.dynamic_index_in_dim(stack, number, keepdims=False), stack)
            return layer(weights, x, number), None

        return lax.scan(one, x, first + jnp.arange(size))[0]

    def score(clock: jax.Array, rest: PyTree, x: PyTree, batch: Batch) -> Any:
        terms = options.objective.count_all(model, batch.tokens)
        loss, backward, more = jax.vjp(loss_of(clock, batch, terms).score, rest, x, has_aux=True)
        return loss, *backward(jnp.ones_like(loss)), more

    def backward(
        clock: jax.Array,
        stack: PyTree,
        rest_state: PyTree,
        block: list[PyTree],
        x: PyTree,
        dx: PyTree,
        first: jax.Array,
        batch: Batch,
    ) -> Any:
        layer = loss_of(clock, batch).layer
        numbers = first + jnp.arange(size)

        def one(carry: Any, xs: tuple[PyTree, jax.Array]) -> tuple[Any, Any]:
            dx, stack, state = carry
            x, number = xs
            old = cut_layer({STACK: stack}, number), cut_layer(state, number - first)
            new, dx, sums, is_bad = updates(clock).of_layer(layer, old, x, dx, number)
            stack = place_layer({STACK: stack}, new[0], number)[STACK]
            return (dx, stack, place_layer(state, new[1], number - first)), (sums, is_bad)

        state = subtrees(lambda x: stack_and_rest(x)[0], with_layers(rest_state, block))
        carry = dx, stack, state
        (dx, stack, state), outcomes = lax.scan(
            one, carry, (inputs_of(layer, stack, x, numbers), numbers), reverse=True
        )
        return stack, layers_of(state), dx, outcomes

    def finish(
        state: TrainState, grads: PyTree, dx: PyTree, batch: Batch, loss: jax.Array, outcomes: list[Any], more: Any
    ) -> tuple[TrainState, dict[str, jax.Array]]:
        objective = options.objective
        routing, objective_sums = more
        stack, rest = stack_and_rest(state.params)
        _, embed_backward = jax.vjp(loss_of(state.clock, batch).embed, rest)
        grads = jax.tree.map(jnp.add, grads, embed_backward(dx)[0])
        (rest, rest_state), sums, is_bad = updates(state.clock).of_rest(grads, (rest, state.opt_state))
        sums, is_bad = with_layers_added((sums, is_bad), jax.tree.map(lambda *spans: jnp.stack(spans), *outcomes))
        terms = objective.count_all(model, batch.tokens)
        metrics = model.metrics(routing, batch) | objective.means(model, objective_sums, terms)
        loss = lax.psum(loss, model.axis.name)
        norm = norm_of(sums, model.axis)
        result = UpdateResult({**rest, **stack}, rest_state, loss, norm, is_bad, {}, metrics)
        rate = options.learning_rate(state.clock)
        return finish_update(state, result, accept, rate, key_of(state.clock))

    def accept(_: Any, result: UpdateResult, state: TrainState) -> tuple[PyTree, PyTree]:
        return result.params, result.opt_state

    pmap = partial(pmapped.pmap, axis_name=model.axis.name, devices=devices)
    return SpanPrograms(
        embed=pmap(embed),
        forward=pmap(forward, in_axes=(0, 0, 0, None, 0)),
        score=pmap(score),
        backward=pmap(backward, in_axes=(0, 0, 0, 0, 0, 0, None, 0), donate_argnums=(1, 3, 5)),
        finish=pmap(finish, donate_argnums=0, out_axes=(0, None)),
    )


@dataclasses.dataclass(frozen=True)
class StreamedStep:
    """A training step of several programs: `(state, batch)`, the state donated, to the next state and shared metrics.

    Attributes:
      programs: of the spans.
      firsts: the first layer of each span.
      keeps_on_host: whether the inputs of spans stay in host memory until the backward pass.
    """

    programs: SpanPrograms
    firsts: tuple[int, ...]
    keeps_on_host: bool

    def __call__(self, state: TrainState, batch: Batch, frozen: PyTree = None) -> tuple[TrainState, Any]:
        embed, forward, score, backward, finish = self.programs
        streamed: Any = state.opt_state
        stack = state.params[STACK]
        _, rest = stack_and_rest(state.params)
        x = embed(state.clock, rest, batch)
        kept = []
        leaving = HostQueue()
        for first in self.firsts:
            kept.append(_kept(x, leaving) if self.keeps_on_host else x)
            x = forward(state.clock, stack, x, np.int32(first), batch)
        loss, grads, dx, more = score(state.clock, rest, x, batch)
        blocks: list[PyTree] = list(streamed.blocks)
        outcomes: list[Any] = [None] * len(blocks)
        leaving = HostQueue()
        for number, block in in_reverse(blocks):
            x = _back(kept.pop()) if self.keeps_on_host else kept.pop()
            first_layer = np.int32(self.firsts[number])
            stack, block, dx, outcomes[number] = backward(
                state.clock, stack, streamed.rest, block, x, dx, first_layer, batch
            )
            blocks[number] = leaving.put(block)
        state = state._replace(params={**rest, STACK: stack}, opt_state=streamed.rest)
        state, metrics = finish(state, grads, dx, batch, loss, outcomes, more)
        return state._replace(opt_state=StreamedState(state.opt_state, tuple(blocks))), metrics

    def calls(self) -> list[tuple[Any, int]]:
        """Each program, and how often a step calls it."""
        embed, forward, score, backward, finish = self.programs
        spans = len(self.firsts)
        return [(embed, 1), (forward, spans), (score, 1), (backward, spans), (finish, 1)]

    def called_with(self, state: TrainState, batch: Batch, frozen: PyTree = None) -> list[Call]:
        """How a step calls its programs for these arguments, or shapes of them; nothing is computed."""
        embed, _, score, backward, _ = self.programs
        streamed: Any = state.opt_state
        stack = state.params[STACK]
        _, rest = stack_and_rest(state.params)
        first = jax.ShapeDtypeStruct((), jnp.int32)
        block = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), streamed.blocks[0])
        x = jax.eval_shape(embed, state.clock, rest, batch)
        loss, grads, dx, more = jax.eval_shape(score, state.clock, rest, x, batch)
        of_backward = state.clock, stack, streamed.rest, block, x, dx, first, batch
        outcomes = [jax.eval_shape(backward, *of_backward)[-1]] * len(self.firsts)
        without_blocks = state._replace(opt_state=streamed.rest)
        arguments = [
            (state.clock, rest, batch),
            (state.clock, stack, x, first, batch),
            (state.clock, rest, x, batch),
            of_backward,
            (without_blocks, grads, dx, batch, loss, outcomes, more),
        ]
        return [Call(program, args, times) for (program, times), args in zip(self.calls(), arguments, strict=True)]

    def lower(self, state: TrainState, batch: Batch, frozen: PyTree = None) -> LoweredStep:
        """The lowered programs for these arguments, or shapes of them."""
        lowered = [call.program.lower(*call.arguments) for call in self.called_with(state, batch)]
        return LoweredStep(self, SpanPrograms(*lowered))


class Call(NamedTuple):
    """A program of a step, shapes of its arguments, and how often it is called."""

    program: Any
    arguments: tuple[Any, ...]
    times: int


class LoweredStep(NamedTuple):
    """The programs of a step, lowered."""

    step: StreamedStep
    programs: SpanPrograms

    def compile(self, options: Any = None) -> StreamedStep:
        """The step with compiled programs."""
        return self.compiled_by(lambda program: program.compile(options))

    def compiled_by(self, compile_lowered: Callable[[Any], Any]) -> StreamedStep:
        """The step with the programs that a function makes of the lowered ones."""
        compiled = SpanPrograms(*map(compile_lowered, self.programs))
        return dataclasses.replace(self.step, programs=compiled)

    def as_text(self) -> str:
        """The text of all programs."""
        return "\n".join(program.as_text() for program in self.programs)


def _kept(x: PyTree, leaving: HostQueue) -> PyTree:
    """The input of a span, whose large arrays go to the host."""
    parts: list[jax.Array]
    parts, treedef = jax.tree.flatten(x)
    places = [index for index, part in enumerate(parts) if _is_large(part)]
    for index, moved in zip(places, leaving.put([parts[index] for index in places]), strict=True):
        parts[index] = moved
    return jax.tree.unflatten(treedef, parts)


def _back(x: PyTree) -> PyTree:
    """The inverse of `_kept`."""
    return jax.tree.map(lambda part: to_devices(part) if _is_large(part) else part, x)


def _is_large(x: jax.Array) -> bool:
    of_device: Any = jax.ShapeDtypeStruct(x.shape[1:], x.dtype)
    return is_on_host(of_device)


def streamed_step(
    model: ShardedGPT, tx: optax.GradientTransformation, options: StepOptions, devices: Sequence[Any] | None
) -> StreamedStep:
    """The step of `Programs`."""
    firsts = tuple(range(0, model.config.scanned_layers, span_of(model, options)))
    return StreamedStep(span_programs(model, tx, options, devices), firsts, LAYER_INPUT in model.offload)


def streamed_start(
    model: ShardedGPT, tx: optax.GradientTransformation, options: StepOptions, devices: Sequence[Any] | None
) -> Callable[[PyTree], TrainState]:
    """The new state for weights, which are donated; the blocks are made in order."""
    size = span_of(model, options)
    on_devices = on_shards(tx, model.layout, model.axis)
    pmap = partial(pmapped.pmap, axis_name=model.axis.name, devices=devices)

    def without_blocks(weights: PyTree) -> TrainState:
        state = new_state(weights, on_devices, model, options)
        return state._replace(opt_state=rest_of(state.opt_state))

    def one_block(weights: PyTree, first: jax.Array) -> list[PyTree]:
        layers = layers_of(on_devices.init(model.split(weights)[0]))
        return jax.tree.map(lambda stack: lax.dynamic_slice_in_dim(stack, first, size), layers)

    begin = pmap(without_blocks, donate_argnums=0)
    block_of = pmap(one_block, in_axes=(0, None))

    def start(weights: PyTree) -> TrainState:
        leaving = HostQueue()
        firsts = range(0, model.config.scanned_layers, size)
        blocks = tuple(leaving.put(block_of(weights, np.int32(first))) for first in firsts)
        state = begin(weights)
        return state._replace(opt_state=StreamedState(state.opt_state, blocks))

    return start
