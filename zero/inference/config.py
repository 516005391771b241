"""The configuration of `mode=evaluate` and `mode=sample`: the keys of a saved run that they read, and their own."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Self

from zero.base.keys import (
    Check,
    Mistakes,
    at_least,
    choice,
    fraction,
    key,
    list_of,
    not_empty,
    positive,
    random_seed,
    section,
    zero_or_more,
)
from zero.config.modes import Configuration
from zero.corpus.reading.keys import ScoredKeys, SetKeys
from zero.exchange import warm_start
from zero.hosts.startup import DistributedKeys
from zero.inference.output import Output
from zero.inference.outputs.examples import Examples
from zero.inference.outputs.harness import Harness
from zero.inference.outputs.top_tokens import TopTokens
from zero.inference.outputs.validation import Validation
from zero.inference.trained_model import HeldWeights, SavedData
from zero.job.model import AttentionKeys
from zero.job.sharding import WeightKeys
from zero.job.sizes import SizeKeys
from zero.models.config import GPTConfig
from zero.tracking.tracker import TrackerKeys
from zero.training.objectives.objective import ObjectiveKeys
from zero.training.objectives.table import OBJECTIVES

_PROMPTS = "a string, quoted as '\"2024\"' if it looks like a number, or a list of strings"


def is_prompts(value: Any) -> bool:
    """Whether a value is a text or a list of texts. The command line parses a text that looks like a number as one."""
    texts = value if isinstance(value, list) else [value]
    return bool(texts) and all(isinstance(text, str) for text in texts)


@dataclass(frozen=True)
class Evaluate(HeldWeights, TopTokens.Keys, Validation.Keys, Harness.Keys):
    """Section `evaluate`."""

    context: int | None = key(None, at_least(2), "Context length in tokens; null: data.max_context.", in_scores=True)
    adapters: list[str] | None = key(
        None,
        list_of(not_empty()),
        "Runs that trained adapters, or PEFT folders, for the base of model.model_path. The base is read once, and "
        "each adapter is merged and scored; null: only model.model_path.",
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
class Model(SizeKeys, warm_start.PathKeys, AttentionKeys):
    """The model of a run, and where the run is."""


@dataclass(frozen=True)
class EvaluateData(SavedData, SetKeys, TrackerKeys):
    """The keys that define a run's rows and validation sets."""


@dataclass(frozen=True)
class TrainedModelConfig(Configuration):
    """The keys of every mode that opens a trained model."""

    model: Model = section(Model)
    data: SavedData = section(SavedData)
    zero: WeightKeys = section(WeightKeys)
    distributed: DistributedKeys = section(DistributedKeys)

    def fitted(self, model_config: GPTConfig) -> Self:
        if self.data.max_context is not None:
            return self
        return dataclasses.replace(self, data=dataclasses.replace(self.data, max_context=model_config.block_size))

    def mistakes(self, model_config: GPTConfig) -> Mistakes:
        model_label = str(self.model)
        yield from self.data.row_mistakes(model_config, model_label)
        yield from self.zero.mistakes(model_config, model_label)
        yield from self.distributed.mistakes()


@dataclass(frozen=True)
class EvaluateConfig(TrainedModelConfig):
    """Scores a trained run. Takes the keys of the run that scores depend on, and the keys of this mode."""

    training: ScoredKeys = section(ScoredKeys)
    data: EvaluateData = section(EvaluateData)
    objective: ObjectiveKeys = choice(OBJECTIVES, "What was minimized.")
    evaluate: Evaluate = section(Evaluate, "mode=evaluate")

    @property
    def context(self) -> int:
        """Tokens that are seen at once, when the configuration is checked."""
        return self.evaluate.context or int(self.data.max_context)

    def mistakes(self, model_config: GPTConfig) -> Mistakes:
        yield from super().mistakes(model_config)
        evaluate = self.evaluate
        yield from evaluate.mistakes("evaluate", model_config, str(self.model), self.zero.tensor_shards)
        if evaluate.weight_dtype != "auto" and evaluate.adapters is not None:
            yield "evaluate.weight_dtype", "auto, as evaluate.adapters are merged into one copy of the weights"
        if evaluate.follow and self.data.resume_step is not None:
            yield "evaluate.follow", f"false, as data.resume_step={self.data.resume_step} names one checkpoint"
        if evaluate.follow and evaluate.adapters is not None:
            yield "evaluate.adapters", "null with evaluate.follow, which scores the checkpoints of one run"
        for output in outputs(self):
            yield from output.mistakes(model_config, str(self.model))
            if not (output.is_asked and output.is_of_one_model):
                continue
            if evaluate.follow:
                yield "evaluate.follow", f"false, as {output.key} takes one model"
            if evaluate.adapters is not None:
                yield "evaluate.adapters", f"null, as {output.key} takes one model"
        if not any(output.is_asked for output in outputs(self)):
            yield "evaluate.validation", "true, or tasks in evaluate.harness"

    def without_effect(self) -> Mistakes:
        if not self.evaluate.follow:
            yield "data.tensorboard", "evaluate.follow=false"
            yield "data.wandb_project", "evaluate.follow=false"


def outputs(config: EvaluateConfig) -> list[Output]:
    """What can be made of trained weights, in this order: each output, made of the sections that it reads."""
    evaluate = config.evaluate
    return [
        TopTokens(evaluate, config.data),
        Validation(evaluate, config.training, config.data, config.context, config.objective),
        Examples(evaluate, config.data, config.objective),
        Harness(evaluate, config.data),
    ]


@dataclass(frozen=True)
class SampleConfig(TrainedModelConfig):
    """Samples texts from a trained run. Takes the keys that its model depends on, and the keys of this mode."""

    sample: Sample = section(Sample, "mode=sample")

    def mistakes(self, model_config: GPTConfig) -> Mistakes:
        yield from super().mistakes(model_config)
        if model_config.score_outputs is not None:
            yield "model.model_path", f"a model of tokens, as {self.model} has a head of scores in place of logits"
        yield from self.sample.mistakes("sample", model_config, str(self.model), self.zero.tensor_shards)
