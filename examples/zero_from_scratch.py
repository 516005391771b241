"""ZeRO from scratch: the four stages of a training step with Adam, with nothing but jax.pmap and its collectives.

    python examples/zero_from_scratch.py

Each stage changes a few lines of the one before and trains to the same loss; only the bytes per device change.
Shapes: L layers of a (D, D) matrix on N devices. A slice is 1/N of the rows of each matrix: (L, D/N, D).
"""

import os

os.environ.setdefault("XLA_FLAGS", "--xla_cpu_enable_concurrency_optimized_scheduler=false")  # collectives in order

import jax
import jax.numpy as jnp
from jax import lax

jax.config.update("jax_num_cpu_devices", 8)  # for a machine without accelerators
L, D, ROWS, N, STEPS = 8, 256, 4, jax.device_count(), 5


def gather(x, dim):  # slices in, the whole array out, on every device
    return lax.all_gather(x, "devices", axis=dim, tiled=True)


def scatter_mean(g, dim):  # one whole gradient per device in, this device's slice of their mean out
    return lax.psum_scatter(g, "devices", scatter_dimension=dim, tiled=True) / N


def loss_fn(w, x, use=lambda layer: layer):  # each layer computes with use(its part of w)
    layer = jax.checkpoint(lambda h, w: (h + jnp.tanh(h @ use(w)), None))
    return jnp.mean((lax.scan(layer, x, w)[0] - jnp.roll(x, 1)) ** 2)


def adam(w, m, v, g, t):  # element-wise: a slice needs nothing from the other devices
    m, v = 0.9 * m + 0.1 * g, 0.99 * v + 0.01 * g**2
    return w - 1e-3 * (m / (1 - 0.9**t)) / (jnp.sqrt(v / (1 - 0.99**t)) + 1e-8), m, v


def stage_0(w, m, v, t, x):  # plain data parallelism: w, m and v are whole on every device
    grads = jax.grad(loss_fn)(w, x)
    return adam(w, m, v, lax.psum(grads, "devices") / N, t)  # a psum is a psum_scatter and an all_gather


def stage_1(w, m, v, t, x):  # so update a slice between the two, and gather at the start of the next step
    grads = jax.grad(loss_fn)(gather(w, 1), x)
    return adam(w, m, v, scatter_mean(grads, 1), t)  # whole during the step: the weights and the gradient


borrow = jax.custom_vjp(lambda part, full: full)  # compute with the gathered layer, send its gradient to the slice
borrow.defvjp(lambda part, full: (full, None), lambda _, g: (scatter_mean(g, 0), jnp.zeros_like(g)))


def stage_2(w, m, v, t, x):  # scatter the gradient of each layer as soon as the backward pass has it
    full = gather(w, 1)  # whole during the step: the weights
    use = lambda layer: borrow(layer[0], full[layer[1]])  # noqa: E731  its slice and its number
    return adam(w, m, v, jax.grad(lambda w: loss_fn((w, jnp.arange(L)), x, use))(w), t)


whole = jax.custom_vjp(lambda part: gather(part, 0))
whole.defvjp(lambda part: (gather(part, 0), None), lambda _, g: (scatter_mean(g, 0),))


def stage_3(w, m, v, t, x):  # gather each layer where it is needed, forward and again backward
    return adam(w, m, v, jax.grad(loss_fn)(w, x, use=whole), t)  # whole during the step: one layer


w0 = jax.random.normal(jax.random.key(0), (L, D, D)) / D
x = jax.random.normal(jax.random.key(1), (N, ROWS, D))
print(f"{N} devices, {L * D * D:,} parameters; bytes per device held between steps, and temporaries of a step:")
for stage in (stage_0, stage_1, stage_2, stage_3):
    w = jnp.stack([w0] * N) if stage is stage_0 else jnp.stack(jnp.split(w0, N, axis=1))
    m, v = jnp.zeros_like(w), jnp.zeros_like(w)
    program = jax.pmap(stage, "devices", donate_argnums=(0, 1, 2)).lower(w, m, v, jnp.ones(N), x).compile()
    for t in range(1, STEPS + 1):
        w, m, v = program(w, m, v, jnp.full(N, float(t)), x)
    loss = loss_fn(w[0] if stage is stage_0 else jnp.concatenate(list(w), axis=1), x.reshape(-1, D))
    state = sum(a.nbytes for a in (w, m, v)) // N
    print(f"{stage.__name__:10}{loss:8.5f}{state:12,}{program.memory_analysis().temp_size_in_bytes:12,}")
