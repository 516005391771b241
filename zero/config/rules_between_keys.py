"""Rules between the keys of a configuration. Checks of single keys are in schema.py, rules of features beside them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from zero.config.constraints import is_paths, shown
from zero.config.declared import value_of, whole_kind
from zero.config.keys import all_keys
from zero.config.no_effect import with_read_keys
from zero.config.schema import Config, EvaluateConfig, PlanConfig, SampleConfig
from zero.corpus.reading.synthetic import SYNTHETIC
from zero.files import storage
from zero.models.config import HEAD, VOCABULARY, GPTConfig
from zero.models.products import EIGHT_BITS
from zero.models.stack import OFFLOADED, STORED, span_size
from zero.training.block_codes import CODECS
from zero.training.objectives.objective import REFERENCE
from zero.training.optimizers.optimizer import ELEMENTWISE, MULTIPLIABLE, QUANTIZABLE
from zero.training.tuning import Adapted

Mistakes = Iterator[tuple[str, str]]  # key, and what was expected
_WITHOUT_INT8 = {"wire_dtype": "auto, float32 or bfloat16", "gather_dtype": "auto"}


def mistakes(config: Config, size: GPTConfig) -> Mistakes:
    """The contradictions between keys, section by section."""
    config = with_read_keys(config)
    for rules in (
        training_rules,
        part_rules,
        objective_rules,
        model_rules,
        data_rules,
        optimizer_rules,
        tuning_rules,
        schedule_rules,
        zero_rules,
        evaluate_rules,
        held_weights_rules,
        plan_rules,
        distributed_rules,
    ):
        yield from rules(config, size)


def training_rules(config: Config, size: GPTConfig) -> Mistakes:
    training = config.training
    if training.warmup_steps >= training.total_steps:
        yield "training.warmup_steps", f"fewer than training.total_steps={training.total_steps}"
    longest = config.data.max_context
    key = "context_stages" if isinstance(training.context_stages, list) else "warmup_train_context"
    if longest <= size.block_size and any(length < 2 or longest % length for _, length in training.stages()):
        yield f"training.{key}", f"a divisor of data.max_context={longest}, at least 2"


def part_rules(config: Config, size: GPTConfig) -> Mistakes:
    """What a model whose steps take parts of rows leaves to the end of a row, or cannot do."""
    training = config.training
    if size.update_tokens is None or config.mode not in ("train", "plan"):
        return
    setting = f"update_tokens={size.update_tokens} of model.size={config.model.size}"
    if config.data.max_context % size.update_tokens:
        yield "data.max_context", f"a multiple of {setting}"
        return
    if training.stages() or training.context_stages is not None:
        yield "training.staged_warmup_steps", f"0, with training.context_stages=null, as {setting}"
    if value_of(config, "statistics.every") is not None:
        yield "statistics.every", f"null, as {setting} and it repeats steps on whole rows"
    if config.zero.remat == "nested":
        yield "zero.remat", f"auto, full, dots or none, as {setting}"
    if config.zero.fused_update:
        yield "zero.fused_update", f"false, as {setting}"
    if config.objective.make().example.is_whole:
        yield "objective", f"likelihood, or another on running text, as {setting}"
    steps = config.data.max_context // size.update_tokens
    for key in (key.name for key in all_keys(whole_kind()) if key.in_steps):
        every = value_of(config, key)
        if every is not None and every % steps:
            yield key, f"a multiple of {steps}, the steps per row with {setting}"


def objective_rules(config: Config, size: GPTConfig) -> Mistakes:
    """An objective needs what it reads, and one on whole examples has no terms per token and no rows that are cut."""
    training = config.training
    data = config.data
    objective = config.objective.make()
    example = objective.example
    setting = f"objective={config.objective.name}"
    is_training = config.mode in ("train", "plan")
    if config.mode == "train" and objective.has_reference and not config.model.warm_start:
        yield "model.warm_start", f"true, as the reference of {setting} is the model at model.model_path"
    stored = [entry.name for entry in objective.reads if entry.source]
    if config.tuning.name != "none" and objective.has_reference:
        stored.remove(REFERENCE.name)  # computed for each batch
    if is_training and stored and data.max_skipped_rows:
        yield "data.max_skipped_rows", f"0, as {setting} reads {stored[0]} of rows by their number"
    if not example.is_whole:
        return
    of_model = f"model.size={config.model.size}"
    lacks = {"experts": size.experts is not None, "a codebook": size.has_codebook, "z_loss": size.z_loss != 0}
    for feature in (name for name, has_it in lacks.items() if has_it):
        yield "objective", f"likelihood, or another on running text, as {of_model} has {feature}, a loss per token"
    if isinstance(config, EvaluateConfig) and config.evaluate.validation and not config.evaluate.index:
        made = f"rows of zero-prepare {example.option}"
        yield "evaluate.index", f"an index file of texts, as data.index_path_validation of {setting} holds {made}"
    if not is_training:
        return
    if data.last_target:
        yield "data.last_target", f"false or null, as rows are whole examples with {setting}"
    if training.context_stages is not None:
        yield "training.context_stages", f"null, as {setting} compares whole texts"
    elif training.stages():
        yield "training.staged_warmup_steps", f"0, as {setting} compares whole texts"
    if config.mode == "train" and data.corpus is not None:
        yield "data.corpus", f"null, as zero-prepare {example.option} makes the corpus of {setting}"
    for key, expected in (("crop", "first"), ("isolate_documents", False)):
        if getattr(data, key) != expected:
            yield f"data.{key}", f"{shown(expected)}, as a row is one text with {setting}"


def model_rules(config: Config, size: GPTConfig) -> Mistakes:
    model = config.model
    if config.mode == "train" and model.warm_start and not model.model_path:
        places = "a run, a directory of checkpoints or a Hugging Face folder"
        yield "model.model_path", f"{places}, as model.warm_start=true"


def data_rules(config: Config, size: GPTConfig) -> Mistakes:
    data = config.data
    of_model = f"model.size={config.model.size}"
    if data.max_context > size.block_size:
        yield "data.max_context", f"2 to {size.block_size}, the block_size of {of_model}, or null"
    if not is_paths(data.index_path_train) and data.train_samples is not None:
        yield "data.train_samples", "null, as data.index_path_train is a mixture"
    if data.corpus in SYNTHETIC:
        has_rows = f"as data.corpus={data.corpus} has no end, no documents and no completions"
        for key, value, expected in (
            ("training.max_epochs", config.training.max_epochs, None),
            ("data.train_samples", data.train_samples, None),
            ("data.crop", data.crop, "first"),
            ("data.isolate_documents", data.isolate_documents, False),
            ("training.loss_on", config.training.loss_on, "all"),
        ):
            if value != expected:
                yield key, f"{shown(expected)}, {has_rows}"
    if data.isolate_documents and size.layer == "gated_units":
        yield "data.isolate_documents", f"false, as {of_model} has gated units"
    switch = size.rotary_switch
    if switch is not None and data.isolate_documents and data.max_context > switch:
        yield "data.isolate_documents", f"false, as rotary frequencies depend on the length of rows beyond {switch}"
    place = storage.join(storage.bucket(data.bucket_path) if data.bucket_path else "", data.checkpoint_directory)
    if config.mode == "train" and "://" in place and storage.scheme(place) != "gs":
        why = f"orbax cannot save to {place} (docs/decisions/stores.md)"
        yield "data.checkpoint_directory", f"an absolute path or a gs:// URL, as {why}"
    if data.resume_step is not None and config.resume is None and config.mode == "train":
        yield "data.resume_step", "null without --resume"


def optimizer_rules(config: Config, size: GPTConfig) -> Mistakes:
    optimizer = config.optimizer
    for key in ("decay", "scaled_eps"):
        if size.parametrization == "standard" and getattr(optimizer, key, None) in ("coupled", True):
            yield f"optimizer.{key}", f"another value, as model.size={config.model.size} is not in mup"
    if optimizer.decay in ("independent", "constant") and config.training.peak_learning_rate == 0:
        yield "optimizer.decay", "rate, as training.peak_learning_rate=0"
    if optimizer.name not in MULTIPLIABLE and size.parametrization != "standard":
        yield "optimizer", f"{' or '.join(MULTIPLIABLE)}, as model.size={config.model.size} is in mup"
    if optimizer.name not in ELEMENTWISE and config.zero.fused_update:
        yield "optimizer", f"{', '.join(ELEMENTWISE)}, as zero.fused_update=true updates one layer at a time"


def tuning_rules(config: Config, size: GPTConfig) -> Mistakes:
    tuning = config.tuning
    zero = config.zero
    if not isinstance(tuning, Adapted) or config.mode not in ("train", "plan"):
        return
    of_model = f"model.size={config.model.size}"
    setting = f"tuning={tuning.name}"
    if config.mode == "train" and not config.model.warm_start:
        yield "model.warm_start", f"true, as {setting} adapts the weights of model.model_path"
    if size.layer == "gated_units":
        yield "tuning", f"none, as {of_model} has gated units"
    if size.parametrization != "standard":
        why = "with learning rates for whole matrices"
        yield "tuning", f"none, as {of_model} is in {size.parametrization}, {why}"
    if zero.fused_update:
        yield "zero.fused_update", f"false, as {setting} has only small gradients"
    lacking = {"mlp_gate"} if not size.gated else set[str]()
    if size.experts is not None and size.experts_every == 1:
        lacking |= {"mlp_in", "mlp_gate", "mlp_out"}
    patterns = {"rank_pattern": tuning.rank_pattern or {}, "alpha_pattern": tuning.alpha_pattern or {}}
    for key, names in {"targets": tuning.targets or (), **patterns}.items():
        for name in sorted(lacking & {*names}):
            why = "its MLP has no gate" if size.experts is None else "adapters are not for experts"
            yield f"tuning.{key}", f"products without {name}, as {why} in {of_model}"
    for key, pattern in patterns.items():
        if tuning.targets is not None and not set(pattern) <= set(tuning.targets):
            yield f"tuning.{key}", f"products of tuning.targets={shown(tuning.targets)} only"
    if size.tied and HEAD in (tuning.modules_to_save or ()):
        yield (
            "tuning.modules_to_save",
            f"[{VOCABULARY}] or null, as the logits of {of_model} are tied to its vocabulary",
        )
    if tuning.base_dtype in CODECS and zero.tensor_shards > 1:
        why = f"zero.tensor_shards={zero.tensor_shards} cuts blocks of codes"
        yield "tuning.base_dtype", f"float32 or bfloat16, as {why}"
    for key in ("tensor_shards", "context_shards"):
        if tuning.dropout and getattr(zero, key) > 1:
            yield "tuning.dropout", f"0, as zero.{key}={getattr(zero, key)} divides the inputs of adapters"


def schedule_rules(config: Config, size: GPTConfig) -> Mistakes:
    schedule = config.schedule
    left = config.training.total_steps - config.training.warmup_steps
    if schedule.decay_steps is not None and schedule.decay_steps > left:
        yield "schedule.decay_steps", f"at most {left}, the steps after the warmup"
    if schedule.decay_end is not None and schedule.decay_end <= config.training.warmup_steps:
        yield "schedule.decay_end", f"more than training.warmup_steps={config.training.warmup_steps}"


def zero_rules(config: Config, size: GPTConfig) -> Mistakes:
    zero = config.zero
    of_model = f"model.size={config.model.size}"
    if zero.remat in STORED and size.layer == "gated_units":
        yield "zero.remat", f"dots, full or none, as {of_model} has gated units"
    if zero.remat == "nested" and span_size(size.scanned_layers) == 1:
        yield "zero.remat", f"full, as the {size.scanned_layers} layers of {of_model} make no equal spans"
    if zero.remat == "none" and "activations" in OFFLOADED[zero.offload]:
        yield "zero.remat", f"full or another value, as zero.offload={zero.offload} finds no names in what none stores"
    if "optimizer" in OFFLOADED[zero.offload]:
        if not zero.fused_update:
            yield (
                "zero.fused_update",
                f"true, as zero.offload={zero.offload} moves the state of a span of layers at a time",
            )
        if zero.emergency_steps is not None:
            yield (
                "zero.emergency_steps",
                f"null, as zero.offload={zero.offload} needs the host's memory that emergency checkpoints would take",
            )
    for key in ("replicas", "expert_shards"):
        if zero.phases == "torus" and (getattr(zero, key) or 1) > 1:
            yield "zero.phases", f"auto or flat, as zero.{key}={getattr(zero, key)}"
    for key, other in _WITHOUT_INT8.items():
        if zero.stage == 0 and getattr(zero, key) == "int8":
            yield f"zero.{key}", f"{other}, as zero.stage=0 sums whole gradients and gathers nothing"
    if zero.replica_wire_dtype != "auto":
        if zero.stage == 0:
            yield "zero.replica_wire_dtype", "auto, as zero.stage=0 sums whole gradients over all devices"
        if zero.replicas == 1:
            yield "zero.replica_wire_dtype", "auto, as zero.replicas=1 is one copy of the state"
    yield from _uncut(config, size)
    yield from _undivided(config, size)
    yield from _unrounded(config, size)
    yield from _unsent(config)
    if size.layer == "gated_units" and zero.context_shards > 1:
        yield "zero.context_shards", f"1, as {of_model} has gated units (docs/decisions/vq.md)"
    if size.has_codebook and zero.fused_update:
        yield "zero.fused_update", f"false, as {of_model} has a codebook, which an update of single layers cannot move"
    if not zero.fused_update:
        return
    needed: dict[str, tuple[Any, list[Any]]] = {
        "zero.stage": (zero.stage, [3]),
        "zero.remat": (zero.remat, ["auto", "full", "nested"]),
        "training.skip_spikes": (config.training.skip_spikes, [None]),
        "training.gradient_accumulation_steps": (config.training.gradient_accumulation_steps, [1]),
    }
    for key, (value, choices) in needed.items():
        if value not in choices:
            possible = " or ".join(map(shown, choices))
            yield key, f"{possible}, as zero.fused_update=true never holds the whole gradient"
    if zero.master_dtype == "bfloat16" and zero.gradient_dtype != "bfloat16":
        yield "zero.gradient_dtype", "bfloat16, the dtype of zero.master_dtype, as zero.fused_update=true"


def _unrounded(config: Config, size: GPTConfig) -> Mistakes:
    """The models and keys whose products are not computed in another dtype than activations."""
    zero = config.zero
    if zero.product_dtype == "auto":
        return
    of_model = f"model.size={config.model.size}"
    if size.layer == "gated_units":
        yield "zero.product_dtype", f"auto, as {of_model} has gated units"
    if size.experts is not None:
        yield "zero.product_dtype", f"auto, as {of_model} has experts"
    if isinstance(config.tuning, Adapted) and config.mode in ("train", "plan"):  # else adapters are merged
        yield "zero.product_dtype", f"auto, as tuning={config.tuning.name} multiplies with frozen weights"
    if zero.remat == "dots" and zero.product_dtype in EIGHT_BITS:
        why = "stores the sums of products, which have 4 bytes"
        yield "zero.product_dtype", f"auto or bfloat16, as zero.remat=dots {why}"


def _unsent(config: Config) -> Mistakes:
    """The keys with which weights are not gathered as their products round them."""
    zero = config.zero
    given = "zero.gather_dtype=products"
    if zero.gather_dtype != "products":
        return
    if zero.product_dtype not in EIGHT_BITS:
        yield (
            "zero.product_dtype",
            f"one of {', '.join(EIGHT_BITS)}, as {given} sends weights as these products round them",
        )
    if zero.stage != 3:
        yield "zero.stage", f"3, as {given} rounds each layer that is gathered"
    if zero.tensor_shards > 1:
        yield (
            "zero.tensor_shards",
            f"1, as {given} gathers whole columns, of which a device of a tensor group has parts",
        )


def _undivided(config: Config, size: GPTConfig) -> Mistakes:
    """The keys that do not fit expert groups."""
    zero = config.zero
    of_model = f"model.size={config.model.size}"
    if zero.expert_shards == 1:
        return
    if size.experts is None:
        yield "zero.expert_shards", f"1, as {of_model} has no experts"
    elif size.experts % zero.expert_shards:
        yield "zero.expert_shards", f"a divisor of experts={size.experts} of {of_model}"
    elif size.expert_capacity is None:
        why = "as devices exchange a fixed number of tokens"
        yield "zero.expert_shards", f"1, or a number as expert_capacity of {of_model}, {why}"
    given = f"zero.expert_shards={zero.expert_shards}"
    if zero.tensor_shards > 1:
        yield "zero.tensor_shards", f"1, as {given}"
    for key, other in _WITHOUT_INT8.items():
        if getattr(zero, key) == "int8":
            yield f"zero.{key}", f"{other}, as {given}"


def _uncut(config: Config, size: GPTConfig) -> Mistakes:
    """The keys and sizes that tensor groups and context groups cannot cut into equal parts."""
    zero = config.zero
    of_model = f"of model.size={config.model.size}"
    cut = {
        f"num_head={size.num_head} {of_model}": size.num_head,
        f"kv_heads={size.key_heads} {of_model}": size.key_heads,
        f"mlp_dim={size.mlp_width} {of_model}": size.mlp_width,
    }
    if size.layer == "gated_units":
        cut = {f"twice embedding_dim={size.embedding_dim} {of_model}": 2 * size.embedding_dim}
    if config.mode in ("train", "plan"):
        cut[f"data.max_context={config.data.max_context}"] = config.data.max_context
        cut |= {f"a stage of {length} tokens": length for _, length in config.training.stages()}
    for description, count in cut.items():
        if count % zero.tensor_shards:
            yield "zero.tensor_shards", f"a divisor of {description}"
    if zero.context_shards == 1 or config.mode not in ("train", "plan"):
        return
    if zero.tensor_shards > 1:
        yield "zero.context_shards", f"1, as zero.tensor_shards={zero.tensor_shards}"
    if size.experts is not None:
        yield "zero.context_shards", f"1, as tokens are routed row by row in model.size={config.model.size}"
    if config.model.attention == "dense":
        yield "model.attention", f"auto or blockwise, as zero.context_shards={zero.context_shards}"
    for length in (config.data.max_context, *(length for _, length in config.training.stages())):
        if length % (2 * zero.context_shards):
            yield "zero.context_shards", f"a divisor of half of the {length} tokens of a sequence"


def evaluate_rules(config: Config, size: GPTConfig) -> Mistakes:
    if not isinstance(config, EvaluateConfig):
        return
    evaluate = config.evaluate
    if not (evaluate.validation or evaluate.harness):
        yield "evaluate.validation", "true, or tasks in evaluate.harness"
    elif evaluate.validation and not (evaluate.index or config.has_validation_set):
        data = config.data
        path = shown(config.data.index_path_validation)
        indices = f"data.corpus={shown(data.corpus)} and data.index_path_validation={path}"
        yield "evaluate.validation", f"false, as {indices} hold no validation set"
    if evaluate.follow and config.data.resume_step is not None:
        yield "evaluate.follow", f"false, as data.resume_step={config.data.resume_step} names one checkpoint"
    if evaluate.follow and evaluate.adapters is not None:
        yield "evaluate.adapters", "null with evaluate.follow, which scores the checkpoints of one run"
    context = evaluate.context or config.data.max_context
    if evaluate.stride is not None and evaluate.stride >= context:
        yield "evaluate.stride", f"1 to {context - 1}, or null"
    if evaluate.carry and size.layer != "gated_units":
        yield "evaluate.carry", f"false, as model.size={config.model.size} has no memory of constant size"
    elif evaluate.carry and (evaluate.stride is not None or context % size.vq_block):
        block = f"vq_block={size.vq_block} of model.size={config.model.size}"
        yield "evaluate.carry", f"false, or evaluate.stride=null and a context that is a multiple of {block}"


def held_weights_rules(config: Config, size: GPTConfig) -> Mistakes:
    """The models and keys with which weights are not held as codes for inference."""
    mode = config.mode
    if not isinstance(config, EvaluateConfig | SampleConfig):
        return
    section = config.evaluate if isinstance(config, EvaluateConfig) else config.sample
    if section.weight_dtype == "auto":
        return
    key = f"{mode}.weight_dtype"
    if size.layer == "gated_units":
        yield key, f"auto, as model.size={config.model.size} has gated units"
    if config.zero.tensor_shards > 1:
        yield key, f"auto, as zero.tensor_shards={config.zero.tensor_shards} cuts blocks of codes"
    if isinstance(config, EvaluateConfig) and config.evaluate.adapters is not None:
        yield key, "auto, as evaluate.adapters are merged into one copy of the weights"


def plan_rules(config: Config, size: GPTConfig) -> Mistakes:
    if not isinstance(config, PlanConfig):
        return
    plan = config.plan
    if plan.search != "largest" and max(plan.grid.context or [0]) > size.block_size:
        limit = f"the block_size of model.size={config.model.size}"
        yield "plan.grid.context", f"a list, each element 2 to {size.block_size}, {limit}, or null"
    if config.optimizer.name not in QUANTIZABLE and set(plan.grid.state_dtype or []) - {"float32"}:
        yield "plan.grid.state_dtype", f"[float32] or null, as optimizer={config.optimizer.name}"


def distributed_rules(config: Config, size: GPTConfig) -> Mistakes:
    distributed = config.distributed
    number = distributed.process_id
    count = distributed.num_processes
    if distributed.coordinator_address is None:
        for key, value in (("num_processes", count), ("process_id", number)):
            if value is not None:
                yield f"distributed.{key}", "null, as there is no distributed.coordinator_address"
    elif count is None:
        yield "distributed.num_processes", "the number of processes, as there is a distributed.coordinator_address"
    elif number is None or number >= count:
        yield "distributed.process_id", f"0 to {count - 1}, another one for each process"
