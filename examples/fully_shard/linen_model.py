"""A Flax Linen model at stages 2 and 3: `python linen_model.py`. A module is applied to its subtree of parameters."""

import flax.linen as nn
import jax
import jax.numpy as jnp
from training import report


class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        y = nn.gelu(nn.Dense(96)(nn.LayerNorm()(x)))
        return x + nn.Dense(x.shape[-1])(y)


def build():
    block = Block()
    names = [f"block_{i}" for i in range(3)]
    keys = jax.random.split(jax.random.key(0), len(names))
    params = {name: block.init(key, jnp.zeros((1, 24)))["params"] for name, key in zip(names, keys, strict=True)}
    return params, {name: lambda params, x: block.apply({"params": params}, x) for name in names}


if __name__ == "__main__":
    report(*build())
