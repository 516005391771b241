"""Ten steps of a trainer of TRL on one batch, and those of zero on the same rows from the same weights.

- `open_trainer`: a trainer. `train`: one after its steps, with its losses and gradient norms on `PAIRS`, say.
- `interleaved`: rows of texts of its batch.
- `steps_of_zero`: losses and gradient norms of an objective on some devices. `assert_same`: they are TRL's.
- `save_scored_folder`: a model of scores, for trainers of reward models.
- `WARNS`: marks of a module that imports TRL.
"""

import os
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zero
from tests.helpers import trl_losses
from tests.helpers.brought import save_folder
from zero.exchange.hub_model import open_hf_model
from zero.exchange.warm_start import warm_start
from zero.training.batch import Batch
from zero.training.host_rows import split_rows
from zero.training.objectives.objective import Objective
from zero.training.optimizers.optimizer import adamw
from zero.training.parts import StepOptions
from zero.training.programs import make_programs
from zero.training.sharded_gpt import ShardedGPT

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported

STEPS, RATE, CONTEXT = 10, 3e-3, 32
PAIRS = [
    {"prompt": prompt, "chosen": chosen, "rejected": rejected}
    for prompt, chosen, rejected in [
        ("What is a shard? ", "A part.", "No."),
        ("gather ", "scatter", "2048 2048"),
        ("layout? ", "don't", "2048"),
        ("stage ", "a", "user"),
    ]
]
# TRL's trainers warn of coming changes.
WARNS = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]


class Steps(NamedTuple):
    """Of each step: the loss, and the norm of the gradient before the update."""

    losses: list[float]
    norms: list[float]


def open_trainer(
    trainer_class: Any,
    config_class: Any,
    folder: Path,
    examples: list[Any],
    place: Path,
    auto: Any = None,
    max_length: int = CONTEXT,
    **keys: Any,
) -> Any:
    """A trainer of ten steps of AdamW on all examples at once.

    Args:
      auto: reads the model from the folder; by default `AutoModelForCausalLM`.
      max_length: of a text in tokens.
    """
    from datasets import Dataset

    common = trl_losses.arguments(place, len(examples), max_length)
    common.pop("router_aux_loss_coef")
    training: dict[str, Any] = {"max_steps": STEPS, "logging_steps": 1, "save_strategy": "no", "disable_tqdm": True}
    training |= {"learning_rate": RATE, "lr_scheduler_type": "constant", "max_grad_norm": 1e9, "weight_decay": 0.0}
    return trainer_class(
        trl_losses.model_of(folder, auto),
        args=config_class(**common, **training, **keys),
        train_dataset=Dataset.from_list(examples),
        processing_class=trl_losses.tokenizer_of(folder),
    )


def train(*classes_and_data: Any, **options: Any) -> tuple[Any, Steps]:
    """The trainer that `open_trainer` makes of these arguments after its steps, and what it has logged."""
    trainer = open_trainer(*classes_and_data, **options)
    trainer.train()
    lines = [line for line in trainer.state.log_history if "grad_norm" in line]
    return trainer, Steps([line["loss"] for line in lines], [line["grad_norm"] for line in lines])


def save_scored_folder(folder: Path) -> None:
    """A small Qwen2 with a head of scores, and a tokenizer whose padding does not end texts."""
    import torch
    import transformers

    save_folder(folder, "qwen2")
    auto: Any = transformers.AutoModelForSequenceClassification
    transformers.set_seed(0)
    padding = trl_losses.tokenizer_of(folder).pad_token_id
    model = auto.from_pretrained(folder, num_labels=1, pad_token_id=padding, dtype=torch.float32)
    model.save_pretrained(folder)


def interleaved(*texts: np.ndarray) -> np.ndarray:
    """The texts of an example one after the other."""
    return np.stack(texts, axis=1).reshape(-1, CONTEXT)


def steps_of_zero(
    folder: Path, objective: Objective, rows: np.ndarray, devices: int, stage: int, **of_examples: np.ndarray
) -> Steps:
    """The same steps of zero; the reference is the model that they start from."""
    found = open_hf_model(str(folder))
    assert found is not None
    model = ShardedGPT(found.size, zero.Axis("zero", (1, devices)), stage)
    eight = ShardedGPT(found.size, zero.Axis("zero", (1, 8)), 3)
    whole = zero.to_host(warm_start(str(folder), eight), eight.layout, eight.axis)
    used = jax.devices()[:devices]
    params = zero.to_devices(whole, model.layout, model.axis, used)
    options = StepOptions(lambda step: jnp.float32(RATE), objective=objective)
    programs = make_programs(model, adamw(0.0, b2=0.999, axes=model.axes), options, used)
    split = split_rows(rows, model.axis)
    extra: dict[str, Any] = {name: split_rows(x, model.axis) for name, x in of_examples.items()}
    if objective.has_reference:
        extra["reference"] = programs.reference(params, split)
    state = programs.start(params)
    first = np.arange(devices, dtype=np.int32) * split.shape[1]
    steps = []
    for _ in range(STEPS):
        state, metrics = programs.step(state, Batch(split, first, extra))
        steps.append((metrics["loss"].item(), metrics["gradient_norm"].item()))
    losses, norms = zip(*steps, strict=True)
    return Steps(list(losses), list(norms))


def assert_same(found: Steps, expected: Steps) -> None:
    """Two steps to the precision that TRL logs, all of them to what another order of sums makes of float32.

    Each update multiplies that difference, by how much depends on the processor: after four it is up to 1 %.
    """
    assert len(expected.losses) == STEPS and expected.losses[-1] < expected.losses[0]
    assert found.losses[:2] == pytest.approx(expected.losses[:2], rel=1e-4, abs=1e-4)
    assert found.norms[:2] == pytest.approx(expected.norms[:2], rel=2e-3, abs=2e-4)
    assert found.losses == pytest.approx(expected.losses, rel=3e-2, abs=1e-3)
    assert found.norms == pytest.approx(expected.norms, rel=3e-2, abs=1e-3)


def labelled_texts(trainer: Any) -> np.ndarray:
    """The chosen and rejected texts of the batch of a trainer that labels them, as ORPOTrainer and CPOTrainer do."""
    batch = trainer.data_collator(list(trainer.train_dataset))
    texts = []
    for text in ("chosen", "rejected"):
        ids, labels, attended = (
            np.asarray(batch[f"{text}_{kind}"]) for kind in ("input_ids", "labels", "attention_mask")
        )
        texts.append(trl_losses.as_rows(ids, labels != -100, attended, CONTEXT))
    return interleaved(*texts)
