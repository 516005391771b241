"""ZeRO from scratch: a replicated Adam becomes stage 3 in four steps, with nothing but jax.pmap and its collectives.

    python examples/zero_from_scratch.py

Each step changes a few lines of the one before and trains to the same loss; only the bytes per device change.
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


def replicated(w, m, v, t, x):  # plain data parallelism: everything whole, N times
    g = jax.grad(loss_fn)(w, x)
    return adam(w, m, v, lax.psum(g, "devices") / N, t)


def step_1_psum_scatter(w, m, v, t, x):  # an all-reduce is a reduce-scatter and a gather
    g = jax.grad(loss_fn)(w, x)
    return adam(w, m, v, gather(scatter_mean(g, 1), 1), t)


def step_2_update_a_slice(w, m, v, t, x):  # so update between the two: m and v are slices (ZeRO stage 1)
    g = jax.grad(loss_fn)(w, x)
    own = lax.dynamic_slice_in_dim(w, lax.axis_index("devices") * (D // N), D // N, 1)
    own, m, v = adam(own, m, v, scatter_mean(g, 1), t)
    return gather(own, 1), m, v


def step_3_all_gather(w, m, v, t, x):  # keep the slice, and gather at the start of the next step
    g = jax.grad(loss_fn)(gather(w, 1), x)
    return adam(w, m, v, scatter_mean(g, 1), t)  # whole: the weights and the gradient, during the step only


whole = jax.custom_vjp(lambda w: gather(w, 0))
whole.defvjp(lambda w: (gather(w, 0), None), lambda _, g: (scatter_mean(g, 0),))


def step_4_custom_vjp(w, m, v, t, x):  # each layer gathers its weights and scatters its gradient (ZeRO stage 3)
    return adam(w, m, v, jax.grad(loss_fn)(w, x, whole), t)


w0, x = jax.random.normal(jax.random.key(0), (L, D, D)) / D, jax.random.normal(jax.random.key(1), (N, ROWS, D))
held = {replicated: "www", step_1_psum_scatter: "www", step_2_update_a_slice: "wss"}  # w, m, v: whole or slices
print(f"{N} devices, {L * D * D:,} parameters; bytes per device held between steps, and temporaries of a step:")
for step in (*held, step_3_all_gather, step_4_custom_vjp):
    forms = {"w": jnp.stack([w0] * N), "s": jnp.stack(jnp.split(w0, N, axis=1))}
    w, m, v = (forms[form] * scale for form, scale in zip(held.get(step, "sss"), (1, 0, 0), strict=True))
    program = jax.pmap(step, "devices", donate_argnums=(0, 1, 2)).lower(w, m, v, jnp.ones(N), x).compile()
    for t in range(1, STEPS + 1):
        w, m, v = program(w, m, v, jnp.full(N, float(t)), x)
    loss = loss_fn(w[0] if w.shape[2] == D else jnp.concatenate(list(w), axis=1), x.reshape(-1, D))
    state, temporaries = sum(a.nbytes for a in (w, m, v)) // N, program.memory_analysis().temp_size_in_bytes
    print(f"{step.__name__:24}{loss:8.5f}{state:12,}{temporaries:12,}")
