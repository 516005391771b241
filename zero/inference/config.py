"""The configuration of `mode=evaluate` and `mode=sample`: the keys of a saved run that they read, and their own."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Self

from zero.checkpoints import manager
from zero.config.constraints import (
    at_least,
    fraction,
    list_of,
    not_empty,
    one_of,
    positive,
    random_seed,
    shown,
    zero_or_more,
)
from zero.config.keys import Check, Mistakes, choice, key, section
from zero.config.modes import Configuration
from zero.corpus.format.index_files import PATHS, SETS
from zero.corpus.reading.keys import ScoredKeys, SetKeys, is_validation
from zero.exchange import warm_start
from zero.hosts import startup
from zero.job import sizes
from zero.job.model import AttentionKeys, RowKeys
from zero.job.sharding import WeightKeys
from zero.models.config import GPTConfig
from zero.tracking import tracker
from zero.training.objectives import objective
from zero.training.objectives.table import OBJECTIVES

_PROMPTS = "a string, quoted as '\"2024\"' if it looks like a number, or a list of strings"


def is_prompts(value: Any) -> bool:
    """Whether a value is a text or a list of texts. The command line parses a text that looks like a number as one."""
    texts = value if isinstance(value, list) else [value]
    return bool(texts) and all(isinstance(text, str) for text in texts)


@dataclass(frozen=True)
class HeldWeights:
    """How a trained model is held: keys of each mode that opens one."""

    ema: bool = key(False, None, "Use the moving average of the weights that training.ema has kept.", in_scores=True)
    replicate: bool | None = key(
        None,
        None,
        "true: whole weights on each device; false: sharded; null: true if two copies fit.",
        in_scores=True,
    )
    weight_dtype: str = key(
        "auto",
        one_of("auto", "int8"),
        "Dtype of the layers' weights on the devices: auto, zero.master_dtype; or int8 in blocks of 64 with a scale, "
        "with the vocabulary in bfloat16.",
        in_scores=True,
    )

    def mistakes(self, mode: str, size: GPTConfig, of_model: str, tensor_shards: int) -> Mistakes:
        """The models and keys that do not allow holding weights as codes."""
        if self.weight_dtype == "auto":
            return
        if size.layer == "gated_units":
            yield f"{mode}.weight_dtype", f"auto, as {of_model} has gated units"
        if tensor_shards > 1:
            yield f"{mode}.weight_dtype", f"auto, as zero.tensor_shards={tensor_shards} cuts blocks of codes"


@dataclass(frozen=True)
class Evaluate(HeldWeights):
    validation: bool = key(True, None, "Score the whole validation set, each token once.", in_scores=True)
    index: Any = key(
        None,
        Check(is_validation, f"{PATHS}, {SETS}, or null"),
        "The index files to score, such as a test set, in the form of data.index_path_validation; null: that key's "
        "files.",
    )
    top_tokens: int | None = key(
        None,
        at_least(1),
        "Write so many most likely tokens of each position beside the index files, from which objective=distillation "
        "trains another model; null: none.",
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
        "Render prompts of harness tasks with the chat template beside data.tokenizer, as for instruct models.",
        in_scores=True,
    )
    template_variables: dict[str, Any] = key(
        {}, None, "Variables of the chat template, such as {enable_thinking: false}.", in_scores=True
    )
    system: str | None = key(None, None, "A system prompt for harness tasks.", in_scores=True)
    few_shots: int | None = key(
        None,
        at_least(0),
        "Number of few-shot examples in the prompts of harness tasks; null: each task's own default.",
        in_scores=True,
    )
    limit: int | None = key(
        None, at_least(1), "Score at most this many documents of each harness task; null: all.", in_scores=True
    )
    adapters: list[str] | None = key(
        None,
        list_of(not_empty()),
        "Runs that trained adapters, or PEFT folders, for the base of model.model_path. The base is read once, and "
        "each adapter is merged and scored; null: only model.model_path.",
    )
    context: int | None = key(None, at_least(2), "Context length in tokens; null: data.max_context.", in_scores=True)
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
        "scored as one context.",
        in_scores=True,
    )
    follow: bool = key(
        False,
        None,
        "Score each new checkpoint of the run in model.model_path, a directory or the URL of its checkpoints, until "
        "the run has ended.",
    )


@dataclass(frozen=True)
class Sample(HeldWeights):
    prompt: Any = key(
        None,
        Check(lambda value: value is None or is_prompts(value), f"{_PROMPTS}, or null"),
        "A text or a list of texts to continue; null: the prompts in prompt_file.",
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
        "Read prompts from the terminal, one per line, and stream the texts; /temperature 0.7 changes a key of this "
        "section.",
    )
    chat: bool = key(
        False,
        None,
        "true: a prompt is a user's turn, rendered with the chat template beside data.tokenizer; false: it is a text "
        "to continue.",
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
    top_k: int | None = key(None, at_least(1), "Sample from the k most likely tokens; null: from all.")
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
        "Also write the log-probability, in nats, of each sampled token under the model itself, without temperature "
        "and filters.",
    )
    repetition_penalty: float = key(
        1.0,
        positive(),
        "Above 1, tokens that already occur in the text become less likely; 1: off.",
    )


@dataclass(frozen=True)
class Model(sizes.Keys, warm_start.PathKeys, AttentionKeys):
    """The model of a run, and where the run is."""


@dataclass(frozen=True)
class SampleData(RowKeys, manager.Keys):
    """The keys that define a run's rows."""


@dataclass(frozen=True)
class EvaluateData(SampleData, SetKeys, tracker.Keys):
    """The keys that define a run's rows and validation sets."""


@dataclass(frozen=True)
class TrainedModelConfig(Configuration):
    """The keys of every mode that opens a trained model."""

    model: Model = section(Model)
    data: SampleData = section(SampleData)
    zero: WeightKeys = section(WeightKeys)
    distributed: startup.Keys = section(startup.Keys)

    def fitted(self, size: GPTConfig) -> Self:
        if self.data.max_context is not None:
            return self
        return dataclasses.replace(self, data=dataclasses.replace(self.data, max_context=size.block_size))

    def mistakes(self, size: GPTConfig) -> Mistakes:
        of_model = str(self.model)
        yield from self.data.row_mistakes(size, of_model)
        yield from self.zero.mistakes(size, of_model)
        yield from self.distributed.mistakes()


@dataclass(frozen=True)
class EvaluateConfig(TrainedModelConfig):
    """Scores a trained run. Takes the keys of the run that scores depend on, and the keys of this mode."""

    training: ScoredKeys = section(ScoredKeys)
    data: EvaluateData = section(EvaluateData)
    objective: objective.Keys = choice(OBJECTIVES, "What was minimized.")
    evaluate: Evaluate = section(Evaluate, "mode=evaluate")

    def mistakes(self, size: GPTConfig) -> Mistakes:
        yield from super().mistakes(size)
        evaluate = self.evaluate
        data = self.data
        of_model = str(self.model)
        yield from evaluate.mistakes("evaluate", size, of_model, self.zero.tensor_shards)
        if evaluate.weight_dtype != "auto" and evaluate.adapters is not None:
            yield "evaluate.weight_dtype", "auto, as evaluate.adapters are merged into one copy of the weights"
        example = self.objective.make().example
        if example.is_whole and evaluate.validation and not evaluate.index:
            holds = f"data.index_path_validation of objective={self.objective.name} holds"
            yield "evaluate.index", f"an index file of texts, as {holds} rows of zero-prepare {example.option}"
        if evaluate.top_tokens is not None:
            yield from self._top_tokens(evaluate.top_tokens, size, of_model)
        if not (evaluate.validation or evaluate.harness or evaluate.top_tokens):
            yield "evaluate.validation", "true, or tasks in evaluate.harness"
        elif evaluate.validation and not (evaluate.index or data.has_validation_set):
            path = shown(data.index_path_validation)
            indices = f"data.corpus={shown(data.corpus)} and data.index_path_validation={path}"
            yield "evaluate.validation", f"false, as {indices} hold no validation set"
        if evaluate.follow and data.resume_step is not None:
            yield "evaluate.follow", f"false, as data.resume_step={data.resume_step} names one checkpoint"
        if evaluate.follow and evaluate.adapters is not None:
            yield "evaluate.adapters", "null with evaluate.follow, which scores the checkpoints of one run"
        context = evaluate.context or data.max_context
        if evaluate.stride is not None and evaluate.stride >= context:
            yield "evaluate.stride", f"1 to {context - 1}, or null"
        if evaluate.carry and size.layer != "gated_units":
            yield "evaluate.carry", f"false, as {of_model} has no memory of constant size"
        elif evaluate.carry and (evaluate.stride is not None or context % size.vq_block):
            block = f"vq_block={size.vq_block} of {of_model}"
            yield "evaluate.carry", f"false, or evaluate.stride=null and a context that is a multiple of {block}"

    def _top_tokens(self, count: int, size: GPTConfig, of_model: str) -> Mistakes:
        """Settings for which nothing can be stored beside index files."""
        evaluate = self.evaluate
        if count > size.vocab_size:
            yield "evaluate.top_tokens", f"at most {size.vocab_size}, the vocabulary of {of_model}"
        if not (evaluate.index or self.data.has_validation_set):
            yield "evaluate.index", "index files, beside which evaluate.top_tokens are written"
        if evaluate.follow:
            yield "evaluate.follow", "false, as evaluate.top_tokens belong to one teacher"
        if evaluate.adapters is not None:
            yield "evaluate.adapters", "null, as evaluate.top_tokens belong to one teacher"

    def without_effect(self) -> Mistakes:
        if not self.evaluate.follow:
            yield "data.tensorboard", "evaluate.follow=false"
            yield "data.wandb_project", "evaluate.follow=false"


@dataclass(frozen=True)
class SampleConfig(TrainedModelConfig):
    """Samples texts from a trained run. Takes the keys that its model depends on, and the keys of this mode."""

    sample: Sample = section(Sample, "mode=sample")

    def mistakes(self, size: GPTConfig) -> Mistakes:
        yield from super().mistakes(size)
        yield from self.sample.mistakes("sample", size, str(self.model), self.zero.tensor_shards)
