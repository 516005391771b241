"""The sections of the modes `evaluate`, `sample` and `plan` (omegaconf)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from zero.config.constraints import (
    DTYPES,
    INT64,
    PATHS,
    SETS,
    at_least,
    fraction,
    is_paths,
    is_prompts,
    is_sets,
    list_of,
    not_empty,
    one_of,
    positive,
    random_seed,
    zero_or_more,
)
from zero.config.keys import Check, key, section
from zero.models.stack import REMAT
from zero.training.optimizer_keys import STATE_DTYPES

_PROMPTS = "a text, quoted as '\"2024\"' if it looks like a number, or a list of texts"


def is_validation(value: Any) -> bool:
    return value is None or is_paths(value) or is_sets(value)


@dataclass
class Evaluate:
    validation: bool = key(True, None, "Score the whole validation set, each token once.", in_scores=True)
    index: Any = key(
        None,
        Check(is_validation, f"{PATHS}, {SETS}, or null"),
        "The index files to score, as in data.index_path_validation, such as a test set; null: those.",
    )
    harness: list[str] = key(
        [],
        None,
        "Tasks of lm-evaluation-harness such as lambada_openai, or paths of its YAML files, which can run Python; "
        "needs the extra lm-eval.",
        in_scores=True,
    )
    chat: bool = key(
        False,
        None,
        "Render prompts of harness tasks in the chat template beside data.tokenizer, as instruct models are scored.",
        in_scores=True,
    )
    template_variables: dict[str, Any] = key(
        {}, None, "Variables of the chat template, such as {enable_thinking: false}.", in_scores=True
    )
    system: str | None = key(None, None, "A system text before the prompts of harness tasks.", in_scores=True)
    few_shots: int | None = key(
        None, at_least(0), "Examples in the prompts of harness tasks; null: as each task says.", in_scores=True
    )
    limit: int | None = key(
        None, at_least(1), "Score only so many documents of each harness task; null: all.", in_scores=True
    )
    adapters: list[str] | None = key(
        None,
        list_of(not_empty()),
        "Runs that trained adapters, or folders of PEFT, for the base of model.model_path, which is read once: each "
        "is scored, merged; null: that run.",
    )
    context: int | None = key(
        None, at_least(2), "Tokens that the model sees at once; null: data.max_context.", in_scores=True
    )
    stride: int | None = key(
        None,
        at_least(1),
        "Tokens scored per forward pass in rows longer than the context; null: half the context.",
        in_scores=True,
    )
    carry: bool = key(
        False,
        None,
        "Gated units only: carry the recurrent state from one context to the next, so that rows of any length are "
        "scored as if seen at once.",
        in_scores=True,
    )
    follow: bool = key(
        False,
        None,
        "Score each new checkpoint of the run in model.model_path, a directory or the URL of its checkpoints, until "
        "the run has ended.",
    )
    ema: bool = key(False, None, "Use the moving average of the weights that training.ema has kept.", in_scores=True)
    replicate: bool | None = key(
        None,
        None,
        "true holds whole weights on each device, false shards them; null: true where two copies fit.",
        in_scores=True,
    )
    weight_dtype: str = key(
        "auto",
        one_of("auto", "int8"),
        "Weights of layers on the devices: auto, zero.master_dtype; or int8 in blocks of 64 with a scale, beside a "
        "vocabulary in bfloat16.",
        in_scores=True,
    )


@dataclass
class Sample:
    prompt: Any = key(
        None,
        Check(lambda value: value is None or is_prompts(value), f"{_PROMPTS}, or null"),
        "A text or a list of texts to continue; null: those in prompt_file.",
    )
    prompt_file: str | None = key(
        None,
        None,
        'A file with one prompt per line, or "-" for standard input; null: an empty prompt.',
        'In a file that ends in .jsonl each line is a JSON string, or an object with a "prompt": a prompt may span '
        "lines.",
    )
    interactive: bool = key(
        False,
        None,
        "Read prompts from the terminal, a line each, and stream the texts; /temperature 0.7 changes a key of this "
        "section.",
    )
    chat: bool = key(
        False,
        None,
        "A prompt is a user's turn, rendered in the chat template beside data.tokenizer; false: it is a text to "
        "continue.",
    )
    template_variables: dict[str, Any] = key(
        {}, None, "Variables of the chat template, such as {enable_thinking: false}."
    )
    copies: int = key(1, at_least(1), "Texts sampled per prompt.")
    tokens: int = key(300, at_least(1), "Tokens sampled per text.")
    seed: int = key(0, random_seed(), "Seed of the sampling.")
    temperature: float = key(
        0.8,
        zero_or_more(),
        "Divides the logits: below 1 is less random, 0 always takes the most likely token.",
    )
    top_k: int | None = key(None, at_least(1), "Sample from this many most likely tokens; null: from all.")
    top_p: float | None = key(
        None,
        fraction(),
        "Sample from the most likely tokens that together reach this probability; null: from all.",
    )
    typical_p: float | None = key(
        None,
        fraction(),
        "Locally typical sampling: the tokens closest to the expected information that together reach this "
        "probability; null: off.",
    )
    eta: float | None = key(
        None,
        fraction(),
        "Eta sampling: only tokens with a probability of at least min(eta, sqrt(eta) * exp(-entropy)), such as "
        "0.0009; null: off.",
    )
    log_probabilities: bool = key(
        False,
        None,
        "Also write the log-probability in nats of each sampled token, by the model as it is, without temperature "
        "and filters.",
    )
    repetition_penalty: float = key(
        1.0,
        positive(),
        "Above 1 makes tokens that already occur in the text less likely; 1: off.",
    )
    ema: bool = key(False, None, "Use the moving average of the weights that training.ema has kept.")
    replicate: bool | None = key(
        None,
        None,
        "true holds whole weights on each device, false shards them; null: true where two copies fit.",
    )
    weight_dtype: str = key(
        "auto",
        one_of("auto", "int8"),
        "Weights of layers on the devices: auto, zero.master_dtype; or int8 in blocks of 64 with a scale, beside a "
        "vocabulary in bfloat16.",
    )


@dataclass
class Grid:
    stage: list[int] = key([2, 3], list_of(one_of(0, 1, 2, 3)), "Values of zero.stage.")
    micro_batch: list[int] = key([1, 4, 16], list_of(at_least(1)), "Values of plan.micro_batch.")
    accumulation: list[int] = key([1, 4], list_of(at_least(1)), "Values of training.gradient_accumulation_steps.")
    remat: list[str] = key(["auto"], list_of(one_of("auto", *REMAT)), "Values of zero.remat.")
    master_dtype: list[str] | None = key(
        None,
        list_of(one_of(*DTYPES)),
        "Values of zero.master_dtype; null: only its own value.",
    )
    state_dtype: list[str] | None = key(
        None,
        list_of(one_of(*STATE_DTYPES)),
        "Values of optimizer.state_dtype; null: only its own value.",
    )
    context: list[int] | None = key(
        None,
        list_of(at_least(2)),
        "Values of data.max_context; null: only its own value, or 1024 with search=largest.",
    )
    tensor: list[int] | None = key(
        None,
        list_of(at_least(1)),
        "Values of zero.tensor_shards; null, here and below: only the value that section zero has.",
    )
    context_shards: list[int] | None = key(None, list_of(at_least(1)), "Values of zero.context_shards.")
    expert: list[int] | None = key(None, list_of(at_least(1)), "Values of zero.expert_shards.")
    replicas: list[int] | None = key(None, list_of(at_least(1)), "Values of zero.replicas.")
    phases: list[str] | None = key(None, list_of(one_of("auto", "flat", "torus")), "Values of zero.phases.")
    overlap_gathers: list[bool] | None = key(
        None, Check(bool, "a list, each element true or false"), "Values of zero.overlap_gathers."
    )


@dataclass
class Plan:
    topology: str = key(
        "local",
        None,
        "A TPU slice such as v3-8, v4-32, v5e-16, v5p-128, v6e-8, tpu7x-8 or v3:4x4; local, cpu, gpu: devices of "
        "this machine; or gpu:h100x8, by a formula.",
    )
    micro_batch: int = key(4, at_least(1), "Sequences per device and micro-batch.")
    search: str = key(
        "none",
        one_of("none", "fastest", "largest"),
        "none: stages 0 to 3; fastest: the setting of the grid that fits and is predicted to be the fastest; "
        "largest: the largest model that fits.",
    )
    grid: Grid = section(
        Grid,
        "search=fastest tries all possible combinations of these values; search=largest varies only master_dtype and "
        "state_dtype, at the largest context.",
    )
    tokens: int | None = key(
        None,
        at_least(1, INT64),
        "Tokens of the run whose days and dollars are shown; null: 20 per parameter (arXiv 2203.15556).",
    )
    dollars_per_hour: float | None = key(
        None,
        positive(),
        "Price of the whole slice in US dollars per hour; adds the dollars of the run; null: not shown.",
    )
    breakdown: bool = key(
        False,
        None,
        "true: also print the predicted time by part of the model, of the best row, or of the last one that fits.",
    )
    processes: int | None = key(
        None,
        at_least(1),
        "Compiler processes that run in parallel; null: one per core of this machine, at most 4.",
    )
