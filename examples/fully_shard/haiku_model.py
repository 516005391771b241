"""A Haiku model at stages 2 and 3: `python haiku_model.py`. Each layer is transformed on its own."""

import haiku as hk
import jax
import jax.numpy as jnp
from training import report


def block(x):
    y = jax.nn.gelu(hk.Linear(96)(hk.LayerNorm(-1, create_scale=True, create_offset=True)(x)))
    return x + hk.Linear(x.shape[-1])(y)


def build():
    layer = hk.without_apply_rng(hk.transform(block))
    names = [f"block_{i}" for i in range(3)]
    keys = jax.random.split(jax.random.PRNGKey(0), len(names))
    params = {name: layer.init(key, jnp.zeros((1, 24))) for name, key in zip(names, keys, strict=True)}
    return params, dict.fromkeys(names, layer.apply)


if __name__ == "__main__":
    report(*build())
