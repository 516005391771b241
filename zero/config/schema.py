"""The sections of conf/config.yaml: each key with its type and its check (hydra, omegaconf).

Keys that only a feature of the run reads are declared beside it (`zero/run/features`), and declared.py adds them here.
Rules between keys are in rules_between_keys.py. Functions that build a model, a run or a plan take these classes; all
others take plain values.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf

from zero.config.constraints import (
    DTYPES,
    INT32,
    INT64,
    ONE,
    PATHS,
    SETS,
    SMALLEST,
    at_least,
    is_paths,
    is_stages,
    not_empty,
    one_of,
    positive,
    project_name,
    random_seed,
    steps_or_hours,
    zero_or_more,
)
from zero.config.groups import Evaluate, Plan, Sample, is_validation
from zero.config.keys import Check, Group, Key, Section, choice, key, members_of, section
from zero.config.mixtures import is_mixture
from zero.corpus.format.crop import CROPS
from zero.corpus.reading.synthetic import SYNTHETIC
from zero.models.attention.blockwise import CHOICES as ATTENTION
from zero.models.products import PRODUCTS
from zero.models.stack import OFFLOADED, REMAT
from zero.training import tuning as tunings
from zero.training.objectives import objective as objectives
from zero.training.objectives.table import OBJECTIVES
from zero.training.optimizer_keys import Optimizer
from zero.training.optimizers.optimizer import OPTIMIZERS
from zero.training.schedules import SCHEDULES, Schedule
from zero.training.tuning import TUNINGS

EMA = "ema"
_STAGES = "[[steps, tokens per sequence], ...]"
_MIXTURE = (
    "[{index: path, weight: 0.7}, ...] of files of different names, with weights or [[0, weight], [step, weight], ...]"
)


@dataclass
class Training:
    max_epochs: int | None = key(
        None,
        at_least(1),
        "Passes over the training set at most; null: as many as total_steps needs.",
    )
    batch_size: int = key(
        8,
        at_least(1),
        "Sequences of max_context tokens per host and optimizer step, split into gradient_accumulation_steps "
        "micro-batches; in mode=evaluate, rows per host that are scored at once.",
        "A resume keeps the total over all hosts, and divides it among the hosts that it has.",
    )
    peak_learning_rate: float = key(3.0e-3, zero_or_more(), "Learning rate at the end of the warmup.")
    end_learning_rate: float = key(
        3.0e-4,
        zero_or_more(),
        "Learning rate at total_steps, where cosine, linear and wsd schedules end.",
    )
    warmup_steps: int = key(20, at_least(0), "Steps in which the learning rate rises linearly from 0 to its peak.")
    total_steps: int = key(
        960,
        at_least(1),
        "Optimizer steps of the run; here 8 sequences x 256 tokens x 960 steps = 1,966,080 tokens.",
        in_steps=True,
    )
    weight_decay: float = key(
        0.1,
        zero_or_more(),
        "Decoupled weight decay of matrices and embeddings, times the learning rate; sgd adds it to the gradient.",
    )
    gradient_accumulation_steps: int = key(
        1,
        at_least(1),
        "Micro-batches per optimizer step; more need less memory for activations.",
    )
    evaluation_frequency: int = key(
        240,
        at_least(1),
        "Evaluate every 240 steps and after the last; each time also save, draw the curves and sample text.",
        in_steps=True,
    )
    maximum_evaluation_steps: int = key(
        16,
        at_least(0),
        "Validation batches per evaluation at most, of all sets one after the other and of each set with a name; 0: "
        "none, so that an evaluation only saves and samples.",
    )
    staged_warmup_steps: int = key(
        280,
        at_least(0),
        "Steps at the beginning with short sequences, at an unchanged number of tokens per step; 0: none.",
    )
    warmup_train_context: int = key(64, None, "Tokens per sequence during these steps.")
    context_stages: Any = key(
        None,
        Check(lambda value: value in (None, "linear") or is_stages(value), f"linear, {_STAGES}, or null"),
        "How the length of sequences grows; null: in one jump, after the steps above.",
        "linear: during the steps above, from warmup_train_context to max_context.",
        "[[200, 64], [80, 128]]: 200 steps of 64 tokens, then 80 of 128, then max_context; both keys above are not "
        "used.",
    )
    max_gradient_norm: float | None = key(
        1.0,
        Check(lambda value: value >= SMALLEST, "more than 0 in float32"),
        "Gradients are clipped to this global norm; null: no clipping.",
    )
    max_gradient_value: float | None = key(
        None,
        Check(lambda value: value >= SMALLEST, "more than 0 in float32"),
        "Each element of the gradient is clipped to this absolute value, after the norm; null: none is.",
    )
    max_skipped_in_a_row: int = key(
        20,
        at_least(0),
        "A step whose gradient is not finite leaves weights and optimizer unchanged, and more such steps in a row than "
        "this end the run with an error; 0: none is skipped, the first one ends the run.",
    )
    skip_spikes: float | None = key(
        None,
        positive(),
        "Skip updates whose loss or gradient norm is this many standard deviations above its running mean, such as "
        "6; null: none.",
    )
    ema: float | None = key(
        None,
        Check(lambda value: 0 < value < ONE, "more than 0, less than 1 in float32"),
        "Decay per update of a moving average of the weights, such as 0.999, whose loss is validation/ema_loss; "
        "null: none.",
    )
    loss_on: str = key(
        "all",
        one_of("all", "completion"),
        "Tokens that the model learns to predict: all, or completion, in a corpus of zero-prepare --completions.",
        in_scores=True,
    )

    @property
    def skips_bad_steps(self) -> bool:
        """Whether a step whose gradient is not finite leaves the state as it was."""
        return self.max_skipped_in_a_row > 0

    def stages(self) -> tuple[tuple[int, int], ...]:
        """Steps and tokens per sequence of each stage of the warmup; linear growth counts as one."""
        if isinstance(self.context_stages, list):
            return tuple((steps, length) for steps, length in self.context_stages)
        return ((self.staged_warmup_steps, self.warmup_train_context),) if self.staged_warmup_steps else ()


@dataclass
class Model:
    size: str = key(
        "bytes",
        None,
        "An entry of conf/model_config.yaml or of a file in conf/models.",
        "my.yaml:mine: the entry mine of my.yaml, a file of your own that is written like conf/model_config.yaml.",
        "hf:NAME@REVISION or a Hugging Face folder: the model of its config.json; with warm_start that of model_path.",
    )
    override: dict[str, Any] = key(
        {},
        None,
        "Keys of the entry with other values, such as model.override.N=24 model.override.embedding_dim=512.",
    )
    warm_start: Any = key(
        False,
        Check(lambda value: value is True or value is False or value == EMA, "true, false or ema"),
        "Start with the weights of model_path and a fresh optimizer; ema: with the moving average of the weights that "
        "training.ema has kept there.",
    )
    model_path: str | None = key(
        None,
        not_empty(),
        "Source of weights; null: in mode=evaluate and mode=sample the newest run.",
        "A run directory, RUN@STEP for one of its steps, a local Hugging Face folder, or a model of the hub, "
        "hf:NAME@REVISION; warm_start: also a directory of checkpoints.",
    )
    attention: str = key(
        "auto",
        one_of(*ATTENTION),
        "dense holds a score per pair of positions, blockwise needs memory linear in the context.",
        "kernel: on TPU a kernel of zero's own or jax's splash attention, cuDNN's on GPU; falls back to auto where "
        "unsupported.",
        "auto: on TPU and GPU the kernel from 512 positions on; elsewhere, or without it, blockwise in long contexts.",
        in_scores=True,
    )

    @property
    def starts_from_average(self) -> bool:
        """Whether a warm start takes the moving average of the weights of its source."""
        return bool(self.warm_start == EMA)


@dataclass
class Data:
    corpus: str | None = key(
        "stdlib",
        not_empty(),
        "The source that is tokenized on this machine if the index files are missing; null: index files must exist.",
        "synthetic: random rows and synthetic:ones: rows of ones, computed without any files; no index file is "
        "read, and nothing is validated.",
    )
    tokenizer: str = key(
        "bytes",
        not_empty(),
        "bytes, or the path of a tokenizer.json (Hugging Face), a SentencePiece .model or a .tiktoken file.",
    )
    max_context: Any = key(
        None,
        Check(  # an integer, once it is checked
            lambda value: value is None or (isinstance(value, int) and 2 <= value <= INT32), "at least 2, or null"
        ),
        "Sequence length in training, of which all tokens but the first are predicted; null: block_size of the model.",
        in_scores=True,
    )
    last_target: bool | None = key(
        None,
        None,
        "true: rows have one token more than max_context, the target of the last position; null: where those of all "
        "index files have exactly that one more, as zero-prepare --row-tokens makes them.",
        "false: the last position of a row has no target, and is not trained.",
        in_scores=True,
    )
    crop: str = key(
        "first",
        one_of(*CROPS),
        "What is read of rows longer than max_context: first, their first max_context tokens; all, floor(row / "
        "max_context) sequences of each.",
        "random: one sequence per row and epoch, at an offset drawn from the seed, the epoch and the row; "
        "validation then reads all.",
    )
    isolate_documents: bool = key(
        False,
        None,
        "Masks attention and restarts positions where the end-of-text token of data.tokenizer joins documents in a "
        "row.",
        in_scores=True,
    )
    train_samples: int | None = key(None, at_least(1, INT64), "Rows of the training set per epoch; null: all.")
    checkpoint_directory: str = key(
        "checkpoints",
        not_empty(),
        "A relative path is inside the run directory, or inside the bucket if there is one.",
    )
    keep_checkpoints: int = key(
        3,
        at_least(1),
        "The newest checkpoints that are kept; the best one by validation/loss is kept as well.",
    )
    keep_every: Any = key(
        None,
        steps_or_hours(),
        "1000: checkpoints of steps that are a multiple of this are kept as well; null: none.",
        "2h: a checkpoint is kept as well if it is the first one or was saved this many hours after the last that is "
        "kept so.",
    )
    bucket_path: str | None = key(
        None,
        not_empty(),
        "Google Cloud Storage, bucket or bucket/folder, or a URL such as s3://bucket/folder, for relative index "
        "files and checkpoint_directory; null: local disk.",
    )
    index_path_train: Any = key(
        "data/index/stdlib_train.index",
        Check(lambda value: is_paths(value) or is_mixture(value), f"{PATHS}, or {_MIXTURE}"),
        "An index file; a list of them; or a weighted mixture, [{index: a.index, weight: 0.7}, ...].",
        "A weight that changes over training: {index: a.index, weight: [[0, 0.7], [9000, 0.1]]}, 0.7 in the first "
        "9,000 steps, then 0.1.",
    )
    index_path_validation: Any = key(
        "data/index/stdlib_validation.index",
        Check(is_validation, f"{PATHS}, {SETS}, or null"),
        "An index file, or a list of them; null: no validation.",
        "{web: web.index, code: [a.index, b.index]}: also validation/web/loss and validation/web/bits_per_byte; the "
        "total is the mean over the tokens of all sets.",
    )
    shuffle_shards: int = key(
        16,
        at_least(1),
        "Shards of a corpus whose rows are shuffled together; preferably a multiple of the number of hosts.",
    )
    max_skipped_rows: int = key(
        0,
        zero_or_more(),
        "Missing, damaged or corrupt training rows that are skipped before training stops with an error; 0: the "
        "first one stops it.",
    )
    cache_directory: str | None = key(
        None,
        not_empty(),
        "A local directory that caches shards read from a bucket, in at most 90 % of its disk's free space; "
        "refused where all shards are local; null: no cache.",
    )
    wandb_project: str | None = key(
        "zero",
        project_name(),
        "Weights & Biases project, offline unless WANDB_API_KEY is set; null: no Weights & Biases.",
    )
    tensorboard: bool = key(False, None, "Write TensorBoard event files as well; needs the extra tensorboard.")
    resume_step: int | None = key(None, None, "The step whose checkpoint is resumed or used; null: the newest.")


@dataclass
class Zero:
    stage: int = key(
        3,
        one_of(0, 1, 2, 3),
        "ZeRO's stage; weights and optimizer state are sharded at 1 to 3. From most to least memory:",
        "0: everything is replicated, plain data parallelism.",
        "1: parameters are gathered at the start of a step, gradients reduce-scattered at its end.",
        "2: gradients are reduce-scattered layer by layer.",
        "3: parameters are gathered layer by layer as well.",
        in_scores=True,
    )
    compute_dtype: str = key(
        "auto",
        one_of("auto", *DTYPES),
        "Gathered parameters and matrix products: float32, bfloat16, or auto: float32 on CPU, else bfloat16.",
        in_scores=True,
    )
    product_dtype: str = key(
        "auto",
        one_of(*PRODUCTS),
        "Products with weights of attention and MLP: auto, compute_dtype; bfloat16; or int8, int8_all or float8, whose "
        "operands are rounded with a scale per row and per column.",
        "With int8 the gradient of weights is still computed in compute_dtype; with int8_all in int8 as well, with a "
        "scale per channel over the positions of a device.",
        in_scores=True,
    )
    wire_dtype: str = key(
        "auto",
        one_of("auto", *DTYPES, "int8"),
        "Gradients on their way between devices: float32, bfloat16, or int8 in blocks of 256 with a scale; they are "
        "summed in reduce_dtype.",
        "auto: float32; on TPU before v6e, in slices where an all-to-all is fast and at stages 2 and 3, "
        "compute_dtype, in which gradients are computed.",
    )
    gather_dtype: str = key(
        "auto",
        one_of("auto", "int8", "products"),
        "Parameters on their way between devices: auto, the narrower of compute_dtype and master_dtype; int8 in blocks "
        "of 256; or products, at stage 3 with product_dtype in 8 bits: weights as their products round them, so no "
        "result changes.",
        in_scores=True,
    )
    reduce_dtype: str = key("float32", one_of(*DTYPES), "Sums of gradients over devices: float32 or bfloat16.")
    gradient_dtype: str = key(
        "float32",
        one_of(*DTYPES),
        "Gradients held until the update: float32, or bfloat16 for half the memory.",
    )
    master_dtype: str = key(
        "float32",
        one_of(*DTYPES),
        "Weights between steps: float32, or bfloat16 with stochastic rounding for half the memory; norms and biases "
        "stay float32.",
        in_scores=True,
    )
    remat: str = key(
        "auto",
        one_of("auto", *REMAT),
        "What the forward pass stores, so that the backward pass need not recompute it; auto: on CPU all (none), on "
        "GPU full;",
        "on TPU at stage 3 the first that fits of mlp+attention (without a kernel), mlp, mlp_in and full, logged at "
        "the start;",
        "in rows of 4,096 positions and more of mlp+attention, mlp_in+attention, attention and full.",
        "none: everything; at stage 3 each layer is gathered once, and kept for the backward pass.",
        "dots: the products with weights, and the output of attention.",
        "mlp: the products that begin an MLP; mlp_in: without that of its gate.",
        "projections: queries, keys, values and the output of attention; attention: only the output of its scores "
        "and values.",
        "mlp+attention, mlp_in+attention, mlp+projections, mlp_in+projections: both.",
        "full: the inputs of layers, as all of the above do.",
        "nested: the inputs of spans of layers, at the cost of one more forward pass.",
    )
    offload: str = key(
        "none",
        one_of(*OFFLOADED),
        "What lies in the host's memory: none.",
        "activations: all that remat stores, from the forward to the backward pass, so that a device holds that of "
        "about two layers; the same results to the bit.",
        "The automatic choice of remat, on TPU at stage 3 without fused_update, is one for each kind of activation: "
        "the device, the host, or computing it again, by predicted seconds; logged at the start.",
        "optimizer: the optimizer's state of layers, between their updates, so that a device holds that of three spans "
        "of layers; with zero.fused_update. both: both.",
    )
    fused_update: bool = key(
        False,
        None,
        "At stage 3, update each layer inside the backward pass: least memory, no accumulation; clips and skips "
        "layer by layer.",
    )
    replicas: int | None = key(
        None,
        at_least(1),
        "Copies of the whole state, each sharded over a group of neighboring devices: gathers stay inside a group, "
        "gradients are summed over all devices; null: one in each slice of TPUs, so only these sums leave a slice.",
        in_scores=True,
    )
    replica_wire_dtype: str = key(
        "auto",
        one_of("auto", "bfloat16", "int8"),
        "Gradients on their way between copies of the state, once per update: auto, as they are summed; bfloat16; or "
        "int8 in blocks of 256 with a scale, for slices with a slow network between them.",
    )
    tensor_shards: int = key(
        1,
        at_least(1),
        "Tensor parallelism: neighboring devices compute the same sequences, each with a part of the heads, of the "
        "MLP and of the vocabulary.",
        in_scores=True,
    )
    context_shards: int = key(
        1,
        at_least(1),
        "Context parallelism: neighboring devices share sequences, each with 1/context_shards of the positions and "
        "their activations.",
        in_scores=True,
    )
    expert_shards: int = key(
        1,
        at_least(1),
        "Expert parallelism: neighboring devices divide the experts of a layer, and exchange tokens; for a model "
        "with experts and expert_capacity.",
        in_scores=True,
    )
    phases: str = key(
        "auto",
        one_of("auto", "flat", "torus"),
        "Collectives of gathers and scatters: flat, one over all devices; torus, one along each dimension of a TPU "
        "slice; auto: flat, the faster one by the TPU compiler; for a copy of the state over several slices one within "
        "a slice and one between slices; without overlap_gathers torus where it is possible, with the least bytes.",
        "With tensor_shards torus places each group along one dimension, and gathers along the other; auto takes the "
        "placement whose links need less time for both.",
        in_scores=True,
    )
    overlap_gathers: bool = key(
        True,
        None,
        "On TPU and GPU, send parameters and gradients while matrix products run; false: before and after them, "
        "which needs slightly less memory.",
    )
    emergency_steps: int | None = key(
        None,
        at_least(1),
        "Every n steps each host keeps its shards in emergency_directory, and the next host keeps a copy; null: never.",
        "A run that lost a host resumes from them instead of the last durable checkpoint; each time a line of "
        "metrics is logged.",
        in_steps=True,
    )
    emergency_directory: str = key(
        "/dev/shm/zero",
        not_empty(),
        "Memory or a local disk of each host, for six times its share of the state.",
    )


@dataclass
class Profile:
    step_time: float | None = key(
        None,
        positive(),
        "Seconds per step that mode=plan predicts, for predicted_speed; null: predicted from the program, on one "
        "host with TPUs.",
    )
    peak_flops: float | None = key(
        None,
        positive(),
        "Peak operations per second of one device, for MFU; null: the published bfloat16 peak, where it is known.",
    )


@dataclass
class Distributed:
    cpu_devices: int = key(2, at_least(1), "Virtual devices on a machine without an accelerator.")
    coordinator_address: str | None = key(
        None,
        Check(lambda value: re.fullmatch(r".+:\d+", value) is not None, "host:port of the first process"),
        "host:port of process 0, for clusters that jax does not recognize; null: TPU pods, Slurm, Open MPI or one "
        "process.",
    )
    num_processes: int | None = key(
        None,
        at_least(1),
        "Number of processes, where coordinator_address is given; else null.",
    )
    process_id: int | None = key(
        None,
        at_least(0),
        "Number of this process, counted from 0, where coordinator_address is given; else null.",
    )
    compilation_cache: str | None = key(
        "~/.cache/zero",
        None,
        "Directory of compiled programs for later starts; null: no cache.",
        "JAX_COMPILATION_CACHE_DIR takes precedence. Several hosts without accelerators use no cache.",
    )
    stall_minutes: float | None = key(
        60.0,
        positive(),
        "After this many minutes without a step, each host logs the stacks of its threads and ends with status 1; "
        "null: wait for ever.",
    )


@dataclass
class Config:
    """The keys of a training run; conf/config.yaml is printed from them."""

    mode: str = key("train", one_of("train", "evaluate", "sample", "plan"), "Chosen by mode=evaluate.")
    resume: str | None = key(
        None,
        None,
        "The run directory to resume; set by the flags --resume and --resume=auto, not by hand.",
    )
    seed: int = key(0, random_seed(), "Seed of weight initialization, data order and dropout.")
    training: Training = section(Training)
    model: Model = section(Model)
    data: Data = section(Data)
    optimizer: Optimizer = choice(OPTIMIZERS, "What makes an update of a gradient.")
    objective: objectives.Keys = choice(OBJECTIVES, "What is minimized.")
    tuning: tunings.Keys = choice(TUNINGS, "Which parameters are trained; docs/how-to/fine-tuning.md")
    schedule: Schedule = choice(SCHEDULES, "The learning rate after a linear warmup from 0.")
    zero: Zero = section(Zero)
    profile: Profile = section(Profile)
    distributed: Distributed = section(Distributed)

    @property
    def has_validation_set(self) -> bool:
        return self.data.index_path_validation is not None and self.data.corpus not in SYNTHETIC


@dataclass
class EvaluateConfig(Config):
    """Scores a trained run: the keys of the run, and those of this mode."""

    evaluate: Evaluate = section(Evaluate, "mode=evaluate")


@dataclass
class SampleConfig(Config):
    """Samples texts from a trained run: the keys of the run, and those of this mode."""

    sample: Sample = section(Sample, "mode=sample")


@dataclass
class PlanConfig(Config):
    """Predicts memory, traffic and time of the step that the other sections describe, without the hardware.

    plan.micro_batch takes the place of training.batch_size.
    """

    plan: Plan = section(Plan, "mode=plan")


MODES: Mapping[str, type[Config]] = MappingProxyType(
    {"train": Config, "evaluate": EvaluateConfig, "sample": SampleConfig, "plan": PlanConfig}
)
MODE_SECTIONS: Mapping[str, type] = MappingProxyType({"evaluate": Evaluate, "sample": Sample, "plan": Plan})
GROUPS: Mapping[str, Group] = MappingProxyType(
    {member.name: member for member in members_of(Config) if isinstance(member, Group)}
)


def default_section(kind: type) -> dict[str, Any]:
    """The defaults of the keys of a section, and of the sections in it."""
    values: dict[str, Any] = {}
    for member in members_of(kind):
        if isinstance(member, Key):
            values[member.name] = copy.deepcopy(member.default)
        elif isinstance(member, Section):
            values[member.name] = default_section(member.kind)
    return values


def _store() -> None:
    """Tells Hydra the groups, their choices, and that model.override takes any key: it is checked with the entry."""
    store = ConfigStore.instance()
    override = OmegaConf.create({"model": {"override": {}}})
    OmegaConf.set_struct(override.model.override, False)
    store.store(name="schema", node=override)
    for group in GROUPS.values():
        for name, kind in group.choices.items():
            store.store(group=group.name, name=name, node=default_section(kind))
    for mode in MODES:
        node = {"mode": mode} | ({} if mode == "train" else {mode: default_section(MODE_SECTIONS[mode])})
        store.store(group="mode", name=mode, node=node, package="_global_")


_store()
