"""Plans of training programs that nobody here wrote, unchanged, by `zero.plan`: what each needs to be told.

    python -m benchmarks.foreign_programs CHECKOUTS PROGRAM [--topology v3-8] [--save plan.html]

CHECKOUTS is a folder with clones of the repositories (benchmarks/measured/foreign-programs.md has their commits) in an
environment with what they import. The lines of each function here are what had to be said by hand. Data loaders do not
run: batches are shapes. Each run prints the plan, and a line of figures for the table.
"""

from __future__ import annotations

import argparse
import functools
import importlib.abc
import importlib.machinery
import inspect
import os
import resource
import sys
import time
from collections.abc import Callable
from importlib import import_module as load
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

# What reads data and writes logs: imported by the programs, not by their steps, and replaced by empty modules.
NOT_OF_THE_STEP = {
    "clu",
    "datasets",
    "deepdiff",
    "lenses",
    "matplotlib",
    "ray",
    "sentencepiece",
    "tensorflow",
    "tensorflow_datasets",
    "tensorflow_addons",
    "tensorflow_text",
    "wandb",
}
PROGRAMS: dict[str, tuple[str, str, Callable[..., Any]]] = {}  # by name: folder, default topology, and the function


def program(folder: str, topology: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Registers a program whose modules are in this folder of the checkouts."""

    def register(fn: Callable[..., Any]) -> Callable[..., Any]:
        PROGRAMS[fn.__name__] = (folder, topology, fn)
        return fn

    return register


@program("flax/examples/imagenet", "v3-8")
def flax_imagenet(shape: Any, devices: int, jax: Any) -> Any:
    models, train = load("models"), load("train")
    config = load("configs.tpu").get_config()
    model = models.ResNet50(num_classes=1000, dtype=jax.numpy.bfloat16)  # create_model asks jax.devices() for it
    rate = train.create_learning_rate_fn(config, 0.1, 1251)
    state = jax.eval_shape(lambda: train.create_train_state(jax.random.key(0), config, model, 224, rate))
    step = functools.partial(train.train_step, learning_rate_fn=rate)
    step = jax.pmap(step, in_axes=(None, 0), out_axes=(None, 0), axis_name="batch")  # as in train_and_evaluate
    rows = config.batch_size // devices
    batch = {"image": shape((devices, rows, 224, 224, 3), "bfloat16"), "label": shape((devices, rows), "int32")}
    return step, state, batch


@program("flax-2023-07/examples/lm1b", "v3-8")
def flax_lm1b_pmap(shape: Any, devices: int, jax: Any) -> Any:
    import optax
    from flax.training.train_state import TrainState

    models, train = load("models"), load("train")
    c = load("configs.default").get_config()
    sizes = {name: c[name] for name in ("emb_dim", "num_heads", "num_layers", "qkv_dim", "mlp_dim", "vocab_size")}
    config = models.TransformerConfig(
        **sizes, output_vocab_size=c.vocab_size, max_len=c.max_eval_target_length, dtype=jax.numpy.bfloat16
    )
    model = models.TransformerLM(config)
    tx = optax.adamw(train.create_learning_rate_schedule(c.learning_rate, 1000), 0.9, 0.98, 1e-9, weight_decay=0.1)
    rows = shape((c.per_device_batch_size, c.max_target_length), "float32")
    made = jax.eval_shape(model.init, jax.random.key(0), rows)
    state = jax.eval_shape(lambda params: TrainState.create(apply_fn=model.apply, params=params, tx=tx), made["params"])
    rate = train.create_learning_rate_schedule(c.learning_rate, c.warmup_steps)
    step = functools.partial(train.train_step, config=config, learning_rate_fn=rate)
    step = jax.pmap(step, axis_name="batch", donate_argnums=(0,))  # as in train_and_evaluate
    state, rng, batch = jax.tree.map(
        lambda x: shape((devices, *x.shape), x.dtype),
        (state, jax.random.PRNGKey(0), {"inputs": shape(rows.shape, "int32")}),
    )
    return step, state, batch, {"dropout_rng": rng}


@program("nanodo", "v3-8")
def nanodo(shape: Any, devices: int, jax: Any) -> Any:
    from jax.experimental import mesh_utils

    train = load("nanodo.train")
    c = load("nanodo.configs.default").get_config()
    model, loss = load("nanodo.model_factory").get_model_and_loss(c, 32_000)  # the size of a tokenizer's vocabulary
    mesh = jax.sharding.Mesh(mesh_utils.create_device_mesh((devices,)), ("data",))
    shardings, state = train._init_train_state(c, model, rng=jax.random.PRNGKey(0), mesh=mesh)
    trainer = train.Trainer(c, state, mesh, shardings, loss)
    return trainer.step_fn, state, shape((c.batch_size, c.model.L), "int32")


@program("big_vision", "v3-8")
def big_vision(shape: Any, devices: int, jax: Any) -> Any:
    from absl import flags

    train = load("big_vision.train")
    folder = next(iter(load("big_vision").__path__))
    flags.FLAGS(["plan", f"--config={folder}/configs/vit_s16_i1k.py"])
    config = flags.FLAGS.config
    with config.unlocked():
        config.evals = {}
    sizes = {"image": (config.input.batch_size, 224, 224, 3), "labels": (config.input.batch_size, 1000)}
    float32 = argparse.Namespace(as_numpy_dtype="float32")
    spec = {name: argparse.Namespace(shape=size, dtype=float32) for name, size in sizes.items()}
    train.input_pipeline.training = lambda config: (argparse.Namespace(element_spec=spec), 1_281_167)

    def batches(dataset: Any, places: Any, prefetch: int) -> Any:
        rows = jax.sharding.NamedSharding(jax.sharding.Mesh(places, ("data",)), jax.sharding.PartitionSpec("data"))
        return [{name: shape(size, "float32", sharding=rows) for name, size in sizes.items()}]

    train.input_pipeline.start_global = batches
    return FirstCall(jax, "update_fn", lambda: train.main(["plan"]))


@program("ddpm/denoising_diffusion_flax", "v3-8")
def diffusion_step(shape: Any, devices: int, jax: Any) -> Any:
    train = load("train")
    c = load("configs.cifar10").get_config()
    state = jax.eval_shape(lambda: train.create_train_state(jax.random.PRNGKey(0), c))
    constants, loss = load("utils").get_ddpm_params(c.ddpm), train.get_loss_fn(c)
    step = functools.partial(
        train.p_loss, ddpm_params=constants, loss_fn=loss, self_condition=True, is_pred_x0=False, pmap_axis="batch"
    )
    size, rows = c.data.image_size, c.data.batch_size // devices
    state, key = jax.tree.map(lambda x: shape((devices, *x.shape), x.dtype), (state, jax.random.PRNGKey(0)))
    batch = {"image": shape((devices, rows, size, size, c.data.channels), "float32")}
    return jax.pmap(step, axis_name="batch"), key, state, batch  # as in train


@program("levanter/src", "v3-32")
def levanter_gpt2(shape: Any, devices: int, jax: Any) -> Any:
    hax, jmp = load("haliax"), load("jmp")
    models, trainers = load("levanter.models.gpt2"), load("levanter.trainer")
    examples, tracker = load("levanter.models.lm_model"), load("levanter.tracker.tracker")
    mp = jmp.get_policy("p=f32,c=bfloat16")
    config = trainers.TrainerConfig(id="plan", mp=mp, train_batch_size=256, tracker=tracker.NoopConfig())
    optimizer = load("levanter.optim").AdamConfig(learning_rate=1e-3, weight_decay=0.1).build(20_000)
    model = models.Gpt2Config(scale_attn_by_inverse_layer_idx=True)  # gpt2_small_fast.yaml

    def mean(loss: Any, where: Any, axis: Any) -> Any:  # jax takes no masks of floats any more
        return hax.mean(loss, where=where.astype(bool), axis=axis)

    loss = functools.partial(examples.compute_next_token_loss, reduction=mean)
    trainer = trainers.Trainer(config, optimizer, loss, add_default_hooks=False)
    trainer.__enter__()  # sets the mesh
    key = jax.random.PRNGKey(0)
    vocabulary = hax.Axis("vocab", 50_272)
    state = trainer.initial_state(key, model_init=lambda: model.build(vocabulary, key=key))
    tokens = hax.shard(hax.zeros((config.TrainBatch, model.Pos), dtype=int), trainer.compute_axis_mapping)
    mask = hax.shard(hax.ones(tokens.axes, dtype=bool), trainer.compute_axis_mapping)  # integers fail with this jax
    batch = examples.LmExample(tokens=tokens, loss_mask=mask)
    return trainer._jit_train_step_fn_no_hook, state, (batch,), {}


@program("", "v5e-16")
def maxtext(shape: Any, devices: int, jax: Any) -> Any:
    compiled = load("maxtext.trainers.pre_train.train_compile")
    settings = {
        "compile_topology": "v5e-16",
        "compile_topology_num_slices": 1,
        "base_emb_dim": 1024,
        "base_num_query_heads": 8,
        "base_num_kv_heads": 8,
        "base_mlp_dim": 4096,
        "per_device_batch_size": 4,
        "max_target_length": 1024,
        "attention": "flash",
        "dataset_type": "synthetic",
        "enable_checkpointing": False,
        "log_config": False,
    }
    assert compiled.__file__ is not None
    base = Path(compiled.__file__).parents[2] / "configs" / "base.yml"
    run = functools.partial(compiled.main, ["", str(base), *(f"{key}={value}" for key, value in settings.items())])
    return FirstCall(jax, "train_step", run)


class NoTensor:
    """The type of a tensor in an empty module: einops asks whether an array is one of TensorFlow."""


class EmptyModules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds modules of `NOT_OF_THE_STEP`, whose every name is a mock."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] not in NOT_OF_THE_STEP:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> Any:
        return MagicMock(Tensor=NoTensor, Variable=NoTensor)

    def exec_module(self, module: Any) -> None:
        pass


class FirstCall:
    """The arguments with which a program calls a function that it compiles inside another function."""

    def __init__(self, jax: Any, name: str, run: Callable[[], None]) -> None:
        self.jax = jax
        self.name = name
        self.run = run

    def plan(self, topology: str) -> Any:
        """The plan of the function at its first call, in the contexts of that call."""
        import zero

        jit = self.jax.jit
        plans: list[Any] = []

        class Planned(BaseException):
            pass

        def planning_jit(fn: Any = None, **options: Any) -> Any:
            jitted = jit(fn, **options) if fn is not None else functools.partial(planning_jit, **options)
            if getattr(fn, "__name__", "") != self.name:
                return jitted

            def first_call(*args: Any, **kwargs: Any) -> Any:
                plans.append(zero.plan(jitted, *args, topology=topology, **kwargs))
                raise Planned

            first_call.lower = first_call  # type: ignore[attr-defined]
            return first_call

        self.jax.jit = planning_jit
        try:
            self.run()
        except Planned:
            return plans[0]
        finally:
            self.jax.jit = jit
        raise ValueError(f"the program did not call {self.name}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkouts", type=Path)
    parser.add_argument("program", choices=PROGRAMS)
    parser.add_argument("--topology")
    parser.add_argument("--save", type=Path)
    options = parser.parse_args()
    folder, topology, make = PROGRAMS[options.program]
    topology = options.topology or topology
    os.environ["JAX_PLATFORMS"] = "cpu"
    sys.path.insert(0, str(options.checkouts / folder))
    if folder:
        sys.meta_path.insert(0, EmptyModules())
    import jax

    import zero

    devices = len(zero.topology(topology))
    jax.config.update("jax_num_cpu_devices", devices)
    began = time.monotonic()
    before = resource.getrusage(resource.RUSAGE_SELF)
    asked = make(jax.ShapeDtypeStruct, devices, jax)
    if isinstance(asked, FirstCall):
        plan = asked.plan(topology)
    else:
        step, *arguments = asked
        is_named = isinstance(arguments[-1], dict) and "dropout_rng" in arguments[-1]
        named = arguments.pop() if is_named else {}
        before = resource.getrusage(resource.RUSAGE_SELF)
        plan = zero.plan(step, *arguments, topology=topology, **named)
    after = resource.getrusage(resource.RUSAGE_SELF)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    print(plan)
    lines = len(inspect.getsource(make).splitlines()) - 2
    guess = plan.guessed_seconds / plan.seconds if plan.seconds else 0
    holder = plan.holders[0]
    cells = [
        options.program,
        topology,
        lines,
        f"{plan.peak_bytes / 2**30:.2f} of {plan.available_bytes / 2**30:.2f}",
        f"{holder.name} {holder.bytes / 2**30:.2f}",
        plan.seconds,
        f"{plan.exposed_seconds:.4g}",
        f"{guess:.1%}",
        f"{cpu:.0f}",
    ]
    print("|", " | ".join(map(str, cells)), "|", f"{time.monotonic() - began:.0f} s on a clock")
    if options.save:
        plan.save(options.save)


if __name__ == "__main__":
    main()
