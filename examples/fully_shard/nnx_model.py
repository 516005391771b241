"""A Flax NNX model at stages 2 and 3: `python nnx_model.py`. A module is split into a graph and a state, a tree."""

from flax import nnx
from training import report


class Block(nnx.Module):
    def __init__(self, width, rngs):
        self.norm = nnx.LayerNorm(width, rngs=rngs)
        self.up = nnx.Linear(width, 96, rngs=rngs)
        self.down = nnx.Linear(96, width, rngs=rngs)

    def __call__(self, x):
        return x + self.down(nnx.gelu(self.up(self.norm(x))))


def build():
    params, layers = {}, {}
    for i in range(3):
        graph, state = nnx.split(Block(24, nnx.Rngs(i)))
        params[f"block_{i}"] = nnx.to_pure_dict(state)

        def layer(params, x, graph=graph, state=state):
            nnx.replace_by_pure_dict(state, params)
            return nnx.merge(graph, state)(x)

        layers[f"block_{i}"] = layer
    return params, layers


if __name__ == "__main__":
    report(*build())
