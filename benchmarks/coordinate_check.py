"""How large activations are, and how far a few steps move them, at several widths: standard against maximal update.

    python benchmarks/coordinate_check.py [--widths 64 128 256 512 1024] [--keep docs/sources/coordinate-check.jsonl]

Trains the same small GPT at every width for a few steps of AdamW on one batch of text, and prints for each tensor the
slope of log mean |activation| against log width after the last step; of the logits, which start near 0, that of their
change. With the maximal update parametrization slopes are near 0: no tensor grows or vanishes with the width (Yang et
al., Tensor Programs V, arXiv 2203.03466, appendix D.1). The exit status is 1 if a slope is out of bounds.

The batch is text because the limit of large widths is reached where the width exceeds the number of tokens that occur
about equally often: with 160 random ones the logits have a slope of -0.1, as an update is partly noise between tokens.
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

from zero.models.config import STACK, GPTConfig
from zero.models.elements import Dense
from zero.models.gpt import GPT, parameter_axes
from zero.models.parametrization import multipliers_of
from zero.models.transformer_layer import TransformerLayer
from zero.training.optimizers.optimizer import adamw

PARAMETRIZATIONS = ("standard", "mup")
BASE_WIDTH, HEAD, LAYERS, VOCABULARY, CONTEXT, ROWS = 64, 32, 2, 256, 32, 8
STEPS, RATE = 4, 2.0**-8
FLAT, STEEP = 0.1, 0.3  # the largest slope with mup, and the smallest of the standard logits
Activations = dict[str, np.ndarray]


def config_of(parametrization: str, width: int) -> GPTConfig:
    base: dict[str, Any] = {"mup_base_width": BASE_WIDTH} if parametrization == "mup" else {}
    shape = (width, VOCABULARY, width // HEAD, CONTEXT, 0.0, LAYERS)
    return GPTConfig(*shape, alibi_attn=False, tied=False, parametrization=parametrization, **base)


def text(seed: int) -> np.ndarray:
    """Bytes of a source file of Python's standard library, int32 `(ROWS, CONTEXT + 1)`."""
    source = np.frombuffer(inspect.getsource(argparse).encode(), np.uint8)
    starts = np.random.default_rng(seed).integers(0, len(source) - CONTEXT, ROWS)
    return np.stack([source[start : start + CONTEXT + 1] for start in starts]).astype(np.int32)


def activations(config: GPTConfig, params: Any, tokens: np.ndarray) -> dict[str, jax.Array]:
    """The inputs and outputs of every matrix of every layer, the residual stream, and the logits."""
    found: dict[str, jax.Array] = {}
    apply: Any = partial(GPT(config).apply, {"params": params})

    def keep(call: Any, args: Any, kwargs: Any, context: nn.module.InterceptorContext) -> Any:
        out = call(*args, **kwargs)
        if isinstance(context.module, Dense | nn.Dense) and context.method_name == "__call__":
            found[f"{layer}/{context.module.name}"] = out
            if context.module.name in ("attention_out", "mlp_out"):
                found[f"{layer}/{context.module.name} (input)"] = args[0]
        return out

    stream = apply(tokens, method="embed")
    found["embedding"] = stream[0]
    for layer in range(config.N):
        own = jax.tree.map(lambda stack, layer=layer: stack[layer], params[STACK])
        with nn.intercept_methods(keep):
            block: Any = TransformerLayer(config, jnp.float32).apply({"params": own}, (stream, None), layer, None, 0)
        (stream, _), _ = block
        found[f"{layer}/residual stream"] = stream[0]
    x = apply(stream[0], method=lambda model, x: model.norm(x))
    found["logits"] = x @ params["head"]["table"].reshape(-1, config.embedding_dim).T
    return found


def trace(config: GPTConfig, steps: int, rate: float, seed: int) -> list[Activations]:
    """The activations before the first step and after each."""
    model = GPT(config)
    tokens = text(seed)
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    init: Any = jax.jit(partial(model.init, method="hidden"))(jax.random.key(seed), inputs[:1, :2], None)
    params = init["params"]
    axes = parameter_axes(config)
    tx = optax.chain(adamw(0.0, axes=axes, multipliers=multipliers_of(config, axes)), optax.scale(-rate))

    @jax.jit
    def step(params: Any, state: Any) -> Any:
        def loss(params: Any) -> jax.Array:
            losses: Any = model.apply({"params": params}, inputs, targets)
            return losses.mean()

        updates, state = tx.update(jax.grad(loss)(params), state, params)
        return optax.apply_updates(params, updates), state

    measure = jax.jit(partial(activations, config))
    state, kept = tx.init(params), [jax.device_get(measure(params, inputs))]
    for _ in range(steps):
        params, state = step(params, state)
        kept.append(jax.device_get(measure(params, inputs)))
    return kept


class Sizes:
    """Mean |activation| and mean |change / rate| by tensor, arrays of (widths, steps + 1)."""

    def __init__(self, parametrization: str, widths: list[int], steps: int, rate: float, seeds: int) -> None:
        sizes: dict[str, list[Any]] = {}
        changes: dict[str, list[Any]] = {}
        for width in widths:
            runs = [trace(config_of(parametrization, width), steps, rate, seed) for seed in range(seeds)]
            for name in runs[0][0]:
                size = [[np.abs(now[name]).mean() for now in run] for run in runs]
                change = [[np.abs(now[name] - run[0][name]).mean() / rate for now in run] for run in runs]
                sizes.setdefault(name, []).append(np.mean(size, axis=0))
                changes.setdefault(name, []).append(np.mean(change, axis=0))
        self.widths = widths
        self.activations: Activations = {name: np.array(x) for name, x in sizes.items()}
        self.changes: Activations = {name: np.array(x) for name, x in changes.items()}

    def slopes(self, after: int) -> dict[str, float]:
        """The slope for each tensor after so many steps: of the change of the logits, of the size of all others."""
        chosen = {**self.activations, "logits": self.changes["logits"]}
        return {name: slope(self.widths, x[:, after]) for name, x in chosen.items()}


def slope(widths: list[int], x: np.ndarray) -> float:
    return float(np.polyfit(np.log(widths), np.log(x), 1)[0])


def mistakes(standard: dict[str, float], mup: dict[str, float]) -> list[str]:
    """Slopes that are not as they should be."""
    found = [f"mup: {name} has slope {x:+.3f}" for name, x in mup.items() if not abs(x) <= FLAT]
    if not standard["logits"] > STEEP:
        found.append(f"standard: logits have slope {standard['logits']:+.3f}")
    return found


def last_of(activations: Activations) -> dict[str, list[float]]:
    """The values after the last step by tensor, one for each width, to four digits.

    >>> last_of({"logits": np.array([[0.0, 1 / 3], [0.0, 2 / 3]])})
    {'logits': [0.3333, 0.6667]}
    """
    return {name: [float(f"{value:.4g}") for value in x[:, -1]] for name, x in activations.items()}


def keep(sizes: dict[str, Sizes], path: Path) -> None:
    """Writes what the picture of docs/draw_coordinate_check.py shows."""
    lines = [json.dumps({"steps": STEPS})]
    for parametrization, of in sizes.items():
        for kind, activations in (("activation", of.activations), ("change", of.changes)):
            for name, values in last_of(activations).items():
                line = {"parametrization": parametrization, "kind": kind, "tensor": name, "widths": of.widths}
                lines.append(json.dumps(line | {"values": values}))
    path.write_text("\n".join(lines) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--widths", type=int, nargs="+", default=[64, 128, 256, 512, 1024])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--keep", type=Path, help="writes the numbers of the picture to this file")
    options = parser.parse_args()
    sizes = {name: Sizes(name, options.widths, STEPS, RATE, options.seeds) for name in PARAMETRIZATIONS}
    slopes = {name: of.slopes(STEPS) for name, of in sizes.items()}
    print(f"{'':24s} {'before the first step':^22s} {f'after {STEPS} steps':^22s}")
    print(f"{'slope':24s}" + f" {'standard':>10s} {'mup':>10s} " * 2)
    for name in slopes["mup"]:
        before = [slope(options.widths, sizes[p].activations[name][:, 0]) for p in PARAMETRIZATIONS]
        after = [slopes[p][name] for p in PARAMETRIZATIONS]
        print(f"{name:24s}" + "".join(f" {one:+10.3f} {other:+10.3f} " for one, other in (before, after)))
    if options.keep:
        keep(sizes, options.keep)
    wrong = mistakes(slopes["standard"], slopes["mup"])
    print("\n".join(wrong) or "all as they should be")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
