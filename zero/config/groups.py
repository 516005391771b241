"""The groups of the configuration: sections whose keys depend on a choice, such as optimizer=lion (omegaconf).

A choice has only keys that do something with it. `optimizer=lion` chooses one, `optimizer.b1=0.95` sets its key.
A new choice is a class here and an entry of its table.
"""
# ruff: noqa: RUF009  `key` and `section` return dataclass fields

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, ClassVar

from zero.config.constraints import (
    DTYPES,
    INT64,
    PATHS,
    SETS,
    at_least,
    fraction,
    fraction_below_one,
    is_paths,
    is_prompts,
    is_sets,
    list_of,
    map_of,
    not_empty,
    one_of,
    positive,
    random_seed,
    whole_number,
    zero_or_more,
)
from zero.config.keys import Check, key, named, section
from zero.models.adapters import PRODUCTS, TABLES
from zero.models.stack import REMAT
from zero.training.block_codes import FORMS
from zero.training.dpo import LOSSES
from zero.training.optimizer import DECAYED

STATE_DTYPES = (*DTYPES, "int8")
BASE_DTYPES = (*DTYPES, *FORMS)
_PROMPTS = "a text, quoted as '\"2024\"' if it looks like a number, or a list of texts"


def is_validation(value: Any) -> bool:
    return value is None or is_paths(value) or is_sets(value)


# ---- optimizer ------------------------------------------------------------------------------------------------------


@dataclass
class Optimizer:
    """What all optimizers have; an optimizer may have the keys below as well."""

    name: str
    state_dtype: ClassVar[str] = "float32"
    decay: ClassVar[str] = "rate"

    def hyperparameters(self) -> dict[str, Any]:
        """The arguments of the optimizer that are not null."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {
            name: value for name, value in values.items() if name not in ("name", "state_dtype") and value is not None
        }


def _state_dtype(moments: str) -> Any:
    return key("float32", one_of(*STATE_DTYPES), f"{moments} of matrices and embeddings: float32, bfloat16 or int8.")


def _decay() -> Any:
    return key(
        "rate",
        one_of("rate", "coupled", "independent", "constant"),
        "Factor of weight decay: rate, the learning rate; coupled, that of the array, in muP; independent, the rate "
        "over its peak; constant, 1 at every step.",
    )


def _b1(default: float | None, sentence: str = "Decay of the mean of gradients.") -> Any:
    return key(default, fraction_below_one(), sentence)


def _b2(default: float) -> Any:
    return key(default, fraction_below_one(), "Decay of the mean of their squares.")


def _eps(default: float, sentence: str = "Added to the root of the mean square.") -> Any:
    return key(default, positive(), sentence)


@dataclass
class AdamW(Optimizer):
    """AdamW (arXiv 1711.05101)."""

    name: str = named("adamw")
    state_dtype: str = _state_dtype("The two moments, 8, 4 or 2 bytes per parameter,")  # type: ignore[misc]
    b1: float = _b1(0.9)
    b2: float = _b2(0.95)
    eps: float = _eps(1e-8)
    decay: str = _decay()  # type: ignore[misc]
    decay_on: str = key(
        "matrices",
        one_of(*DECAYED),
        "Leaves that decay: matrices, those of layers, vocabulary and head; gpt_neo, also positions and the last norm.",
    )
    bias_correction: bool = key(True, None, "false leaves out the division of the moments by 1 - b^step.")
    scaled_eps: bool = key(False, None, "In muP: eps is multiplied as the learning rate of each array is.")


@dataclass
class AdEMAMix(Optimizer):
    """AdamW with a second, slow mean of gradients, 12 bytes of state per parameter (arXiv 2409.03137)."""

    name: str = named("ademamix")
    b1: float = _b1(0.9)
    b2: float = _b2(0.999)
    b3: float = key(0.9999, fraction_below_one(), "Decay of the slow mean.")
    alpha: float = key(5.0, zero_or_more(), "The slow mean counts this many times.")
    eps: float = _eps(1e-8)
    slow_warmup: int | None = key(
        None,
        at_least(1),
        "Steps until alpha and the half-life of the slow mean have grown to their values; null: they are constant.",
        "The paper takes all steps of the run.",
    )


@dataclass
class Lion(Optimizer):
    """Lion (arXiv 2302.06675)."""

    name: str = named("lion")
    state_dtype: str = _state_dtype("The moment, 4, 2 or 1 bytes per parameter,")  # type: ignore[misc]
    b1: float = _b1(0.9)
    b2: float = key(0.99, fraction_below_one(), "Decay of the momentum.")
    decay: str = _decay()  # type: ignore[misc]


@dataclass
class Sgd(Optimizer):
    """SGD with momentum; weight decay is added to the gradient."""

    name: str = named("sgd")
    b1: float = _b1(0.9, "Momentum.")
    nesterov: bool = key(False, None, "Nesterov momentum.")


@dataclass
class Adafactor(Optimizer):
    """Adafactor (arXiv 1804.04235)."""

    name: str = named("adafactor")
    b1: float | None = _b1(None, "Decay of the mean of updates; null: no mean.")
    eps: float = _eps(1e-30, "Added to the square of the gradient.")
    decay_rate: float = key(0.8, positive(), "The mean square of step t decays by 1 - t^-decay_rate.")
    factored_from: int = key(
        128, at_least(2), "Matrices with both dimensions at least this long keep only means of rows and columns."
    )
    max_update_rms: float = key(1.0, positive(), "Updates are scaled down to this root mean square.")
    scale_by_parameter: bool = key(True, None, "Updates are multiplied by the root mean square of their array.")
    min_scale: float = key(1e-3, positive(), "They are multiplied at least by this.")


@dataclass
class Lamb(Optimizer):
    """LAMB (arXiv 1904.00962)."""

    name: str = named("lamb")
    b1: float = _b1(0.9)
    b2: float = _b2(0.999)
    eps: float = _eps(1e-6)


@dataclass
class Muon(Optimizer):
    """Muon for the matrices of layers, Adam for the rest (https://kellerjordan.github.io/posts/muon/)."""

    name: str = named("muon")
    b1: float = _b1(0.95)
    newton_schulz_steps: int = key(5, at_least(1), "Iterations that orthogonalize an update.")
    update_rms: float = key(
        0.2,
        positive(),
        "Root mean square of an update before the learning rate, for rates like AdamW's (arXiv 2502.16982).",
    )
    adam_b1: float = _b1(0.9, "b1 for vectors and the vocabulary.")
    adam_b2: float = key(0.95, fraction_below_one(), "b2 for vectors and the vocabulary.")
    eps: float = _eps(1e-8)


# ---- objective ------------------------------------------------------------------------------------------------------


@dataclass
class Objective:
    """What all objectives have."""

    name: str


@dataclass
class Likelihood(Objective):
    """The likelihood of tokens."""

    name: str = named("likelihood")


@dataclass
class Dpo(Objective):
    """Direct preference optimization of pairs of zero-prepare --preferences (arXiv 2305.18290).

    The chosen text of a pair becomes more likely than the rejected one, compared with the model at model.model_path.
    training.batch_size and all rows count pairs. docs/how-to/learn-preferences.md
    """

    name: str = named("dpo")
    beta: float = key(0.1, positive(), "Inverse temperature: the larger, the closer the model stays to the reference.")
    label_smoothing: float = key(
        0.0,
        Check(lambda value: 0 <= value < 0.5, "at least 0, less than 0.5"),
        "The share of the pairs whose preference is wrong, as TRL's label_smoothing.",
    )
    smoothing: str = key(
        "conservative",
        one_of(*LOSSES),
        "What follows from it: conservative, the expected loss; or robust (arXiv 2403.00409), TRL's loss_type=robust.",
    )


# ---- tuning ---------------------------------------------------------------------------------------------------------


@dataclass
class Tuning:
    name: str


@dataclass
class Whole(Tuning):
    """All parameters are trained."""

    name: str = named("none")


@dataclass
class Adapted(Tuning):
    name: str
    rank: int
    alpha: float
    targets: list[str] | None
    rank_pattern: dict[str, Any] | None
    alpha_pattern: dict[str, Any] | None
    modules_to_save: list[str] | None
    base_dtype: str
    adapter: str | None
    dropout: ClassVar[float] = 0.0


def _targets() -> Any:
    return key(
        None,
        list_of(one_of(*PRODUCTS)),
        "Products of a layer that have adapters, of query, key, value, attention_out, mlp_in, mlp_gate, mlp_out; "
        "null: all that the model has.",
    )


def _rank_pattern() -> Any:
    return key(
        None,
        map_of(whole_number(at_least(1)), *PRODUCTS),
        "Products with another rank, such as {query: 8, mlp_in: 64}.",
    )


def _alpha_pattern() -> Any:
    return key(None, map_of(positive(), *PRODUCTS), "Products with another alpha; each is divided by its own rank.")


def _modules_to_save() -> Any:
    return key(
        None,
        list_of(one_of(*TABLES)),
        "Tables that are trained whole beside the adapters: vocabulary, the embeddings (and logits where these are "
        "tied to them), and head, the logits.",
    )


def _base_dtype() -> Any:
    return key(
        "float32",
        one_of(*BASE_DTYPES),
        "Matrices of the frozen weights, as they are held and gathered: float32 or bfloat16; norms and biases stay "
        "float32.",
        "int8 or nf4 (QLoRA, arXiv 2305.14314, with double quantisation): products of layers in blocks of 64 with a "
        "scale, 1.06 or 0.52 bytes per weight; the vocabulary in bfloat16.",
    )


def _adapter() -> Any:
    return key(
        None,
        not_empty(),
        "A folder of PEFT whose adapters the run starts from; null: new ones, which change nothing at first.",
    )


def _rank() -> Any:
    return key(16, at_least(1), "Inner dimension of an adapter.")


def _alpha() -> Any:
    return key(32.0, positive(), "The products of adapters are multiplied by alpha / rank.")


@dataclass
class Lora(Adapted):
    """Low-rank adapters are trained beside the frozen weights of model.model_path (arXiv 2106.09685)."""

    name: str = named("lora")
    rank: int = _rank()
    alpha: float = _alpha()
    dropout: float = key(  # type: ignore[misc]
        0.0, fraction_below_one(), "Dropout rate of the inputs of adapters."
    )
    targets: list[str] | None = _targets()
    rank_pattern: dict[str, Any] | None = _rank_pattern()
    alpha_pattern: dict[str, Any] | None = _alpha_pattern()
    modules_to_save: list[str] | None = _modules_to_save()
    base_dtype: str = _base_dtype()
    adapter: str | None = _adapter()


@dataclass
class Dora(Adapted):
    """LoRA, and the norm of the column of each output (arXiv 2402.09353)."""

    name: str = named("dora")
    rank: int = _rank()
    alpha: float = _alpha()
    targets: list[str] | None = _targets()
    rank_pattern: dict[str, Any] | None = _rank_pattern()
    alpha_pattern: dict[str, Any] | None = _alpha_pattern()
    modules_to_save: list[str] | None = _modules_to_save()
    base_dtype: str = _base_dtype()
    adapter: str | None = _adapter()


# ---- schedule -------------------------------------------------------------------------------------------------------


@dataclass
class Schedule:
    name: str
    decay_steps: ClassVar[int | None] = None
    decay_end: ClassVar[int | None] = None
    has_end: ClassVar[bool] = True  # training.end_learning_rate


def _decay_end() -> Any:
    return key(None, at_least(1), "The step from which on the rate is training.end_learning_rate; null: total_steps.")


@dataclass
class Cosine(Schedule):
    """Half a cosine, to training.end_learning_rate at training.total_steps."""

    name: str = named("cosine")
    decay_end: int | None = _decay_end()  # type: ignore[misc]


@dataclass
class Linear(Schedule):
    """A line, to training.end_learning_rate at training.total_steps."""

    name: str = named("linear")
    decay_end: int | None = _decay_end()  # type: ignore[misc]


@dataclass
class RampedCosine(Schedule):
    """A cosine that falls from step 0 on, times the warmup, as in GPT-Neo."""

    name: str = named("ramped_cosine")
    decay_end: int | None = _decay_end()  # type: ignore[misc]


@dataclass
class InverseSqrt(Schedule):
    """peak * sqrt(warmup_steps / step) (arXiv 1706.03762)."""

    name: str = named("inverse_sqrt")
    has_end: ClassVar[bool] = False


@dataclass
class Constant(Schedule):
    """training.peak_learning_rate."""

    name: str = named("constant")
    has_end: ClassVar[bool] = False


@dataclass
class Wsd(Schedule):
    """Constant, with a linear end (arXiv 2404.06395)."""

    name: str = named("wsd")
    decay_steps: int | None = key(  # type: ignore[misc]
        None, at_least(1), "Steps of the linear end; null: a tenth of total_steps, at least 1."
    )


@dataclass
class SqrtDecay(Schedule):
    """peak * sqrt(warmup_steps / max(step, warmup_steps)), without a warmup, as in Lingvo."""

    name: str = named("sqrt_decay")
    has_end: ClassVar[bool] = False


# ---- sections of the modes ------------------------------------------------------------------------------------------


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


OPTIMIZERS = (AdamW, AdEMAMix, Lion, Sgd, Adafactor, Lamb, Muon)
OBJECTIVES = (Likelihood, Dpo)
TUNINGS = (Whole, Lora, Dora)
SCHEDULES = (Cosine, RampedCosine, Linear, InverseSqrt, Constant, Wsd, SqrtDecay)
