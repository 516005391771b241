"""An Equinox model at stages 2 and 3: `python equinox_model.py`. A module is a tree; its arrays are what is sharded."""

import equinox as eqx
import jax
from training import report


class Block(eqx.Module):
    norm: eqx.nn.LayerNorm
    up: eqx.nn.Linear
    down: eqx.nn.Linear

    def __init__(self, width, key):
        up, down = jax.random.split(key)
        self.norm = eqx.nn.LayerNorm(width)
        self.up = eqx.nn.Linear(width, 96, key=up)
        self.down = eqx.nn.Linear(96, width, key=down)

    def __call__(self, x):
        return x + self.down(jax.nn.gelu(self.up(self.norm(x))))


def build():
    params, layers = {}, {}
    for i, key in enumerate(jax.random.split(jax.random.key(0), 3)):
        arrays, static = eqx.partition(Block(24, key), eqx.is_array)
        params[f"block_{i}"] = arrays
        layers[f"block_{i}"] = lambda arrays, x, static=static: jax.vmap(eqx.combine(arrays, static))(x)
    return params, layers


if __name__ == "__main__":
    report(*build())
