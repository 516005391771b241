"""What shows that a key of a training run is obeyed: one row per key, with another valid value of it.

A new key needs a row. tests/run/test_config_every_key.py tries each, tests/helpers/pairs.py tries pairs of them.
"""

from typing import NamedTuple

STEP = "the lowered step differs"
RUN = "the files or the metrics of a short run differ"
REFUSED = "it is refused alone, by its name or by that of the key that it needs"


class Row(NamedTuple):
    """A key at another value.

    Attributes:
      value: another valid value, as the command line takes it.
      shown_by: `STEP`, `RUN` or `REFUSED`; the name of a function of tests/run/test_config_every_key.py that sees it
        without a run; or the path of the test that has what it needs, and why.
      in_run: in place of `value`, for a run of 6 steps.
      beside: what both runs need so that the key can matter.
      is_neutral: a run accepts it, and it changes no loss and no program.
      is_placed: it changes where and when something is computed, and the losses by rounding only.
      is_fixed: a resume must not change it.
    """

    value: str
    shown_by: str
    in_run: str | None = None
    beside: tuple[str, ...] = ()
    is_neutral: bool = False
    is_placed: bool = False
    is_fixed: bool = False


ROWS = {
    "resume": Row("set by --resume", REFUSED),
    "seed": Row("1", STEP, is_fixed=True),
    "training.max_epochs": Row("2", RUN, in_run="1", beside=("data.train_samples=32",)),
    "training.batch_size": Row("8", RUN, in_run="32"),
    "training.loss_on": Row("completion", RUN),
    "training.staged_warmup_steps": Row("6", RUN),
    "training.warmup_train_context": Row("16", RUN),
    "training.context_stages": Row("linear", RUN),
    "training.peak_learning_rate": Row("1e-2", STEP),
    "training.end_learning_rate": Row("1e-5", STEP),
    "training.warmup_steps": Row("2", STEP),
    "training.total_steps": Row("13", STEP),
    "training.weight_decay": Row("0.2", STEP),
    "training.gradient_accumulation_steps": Row("2", STEP, is_placed=True),
    "training.max_gradient_norm": Row("null", STEP),
    "training.max_gradient_value": Row("0.1", STEP),
    "training.max_skipped_in_a_row": Row("0", STEP, is_placed=True),
    "training.skip_spikes": Row("6", STEP, is_placed=True),
    "training.ema": Row("0.9", STEP, is_placed=True, is_fixed=True),
    "training.evaluation_frequency": Row("6", RUN, in_run="2", is_neutral=True),
    "training.maximum_evaluation_steps": Row("2", RUN, is_neutral=True),
    "training.log_frequency": Row("3", RUN, is_neutral=True),
    "training.sample_tokens": Row("5", RUN, is_neutral=True),
    "model.size": Row("bytes", "size_of", is_fixed=True),
    "model.override": Row("{N: 3}", STEP, is_fixed=True),
    "model.attention": Row("blockwise", STEP, is_placed=True),
    "model.model_path": Row("run", REFUSED),
    "model.warm_start": Row("true", REFUSED),
    "data.corpus": Row("null", "tests/corpus/preparing/test_prepare_if_missing.py: the index files of the tests exist"),
    "data.index_path_validation": Row("other.index", RUN),
    "data.bucket_path": Row("my-bucket", "place_of_checkpoints"),
    "data.index_path_train": Row("other.index", RUN),
    "data.crop": Row(
        "all", RUN, beside=("data.max_context=16", "training.max_epochs=1", "data.train_samples=64"), is_fixed=True
    ),
    "data.train_samples": Row("9", RUN),
    "data.shuffle_shards": Row(
        "4", "tests/corpus/reading/test_loader.py has more than two shards to mix", in_run="1", is_fixed=True
    ),
    "data.max_skipped_rows": Row(
        "4", RUN, in_run="900", beside=("data.index_path_train=holes.index",), is_neutral=True
    ),
    "data.cache_directory": Row("cache", RUN),
    "data.tokenizer": Row("other.json", RUN),
    "data.max_context": Row("64", RUN, in_run="16", is_fixed=True),
    "data.last_target": Row(
        "true", "tests/run/test_train_last_target.py has the longer rows that it needs", is_fixed=True
    ),
    "data.isolate_documents": Row("true", STEP),
    "data.checkpoint_directory": Row("elsewhere", RUN, is_neutral=True),
    "data.resume_step": Row("6", REFUSED),
    "data.keep_checkpoints": Row("5", RUN, in_run="1", beside=("data.save_every=1",), is_neutral=True),
    "data.keep_every": Row(
        "3", RUN, in_run="2", beside=("data.save_every=1", "data.keep_checkpoints=1"), is_neutral=True
    ),
    "data.save_every": Row("6", RUN, in_run="2", is_neutral=True),
    "data.checkpoint_minutes": Row("5", RUN, in_run="1e-9", is_neutral=True),
    "data.wandb_project": Row("other", RUN),
    "data.tensorboard": Row("true", RUN),
    "optimizer.state_dtype": Row("bfloat16", STEP),
    "optimizer.decay": Row("independent", STEP, is_fixed=True),
    "optimizer.b1": Row("0.8", STEP, is_fixed=True),
    "optimizer.b2": Row("0.8", STEP, is_fixed=True),
    "optimizer.eps": Row("1e-6", STEP, is_fixed=True),
    "optimizer.decay_on": Row("gpt_neo", STEP, is_fixed=True),
    "optimizer.bias_correction": Row("false", STEP, is_fixed=True),
    "optimizer.scaled_eps": Row("true", REFUSED, is_fixed=True),
    "schedule.decay_end": Row("9", STEP),
    "zero.stage": Row("1", STEP, is_placed=True),
    "zero.compute_dtype": Row("bfloat16", STEP),
    "zero.product_dtype": Row("int8", STEP),
    "zero.gather_dtype": Row("int8", STEP),
    "zero.master_dtype": Row("bfloat16", STEP),
    "zero.tensor_shards": Row("2", REFUSED),
    "zero.expert_shards": Row("2", REFUSED),
    "zero.phases": Row("flat", "on_tpu", in_run="torus"),
    "zero.overlap_gathers": Row("false", "on_tpu"),
    "zero.wire_dtype": Row("bfloat16", STEP),
    "zero.reduce_dtype": Row("bfloat16", STEP),
    "zero.gradient_dtype": Row("bfloat16", STEP),
    "zero.remat": Row("full", STEP, is_placed=True),
    "zero.offload": Row("activations", STEP, is_placed=True),
    "zero.fused_update": Row("true", STEP),
    "zero.replicas": Row("2", STEP, is_placed=True),
    "zero.replica_wire_dtype": Row("bfloat16", "on_two_slices"),
    "zero.context_shards": Row("2", STEP, is_placed=True),
    "zero.emergency_steps": Row(
        "3",
        "tests/run/test_train_until_durable.py; without it the directory of these runs is refused",
        beside=("zero.emergency_directory=emergency",),
        is_neutral=True,
    ),
    "zero.emergency_directory": Row("elsewhere", REFUSED),
    "profile.steps": Row("[3,4]", RUN, in_run="[2,2]"),
    "profile.step_time": Row("0.5", RUN, is_neutral=True),
    "profile.peak_flops": Row("1e12", RUN, is_neutral=True),
    "distributed.cpu_devices": Row("4", "settings"),
    "distributed.coordinator_address": Row("host:1234", REFUSED),
    "distributed.num_processes": Row("2", REFUSED),
    "distributed.process_id": Row("1", REFUSED),
    "distributed.compilation_cache": Row("null", "settings"),
    "distributed.join_minutes": Row("5", "tests/hosts/test_roll_call.py", is_neutral=True),
    "distributed.start_minutes": Row("5", "settings", is_neutral=True),
    "distributed.stall_minutes": Row("5", "settings", is_neutral=True),
    "statistics.every": Row("3", RUN, is_neutral=True),
    "verify.every": Row(
        "3", "tests/run/features/test_verify.py has a device that fails; others leave no trace", is_neutral=True
    ),
    "harness.tasks": Row("[a.yaml]", "tests/run/test_features.py; its tasks need lm-eval, and minutes"),
    "export.folder": Row(
        "exported", "tests/run/test_train_to_stop.py has a model that transformers has", is_neutral=True
    ),
}

OF_THE_STEP = {key: row.value for key, row in ROWS.items() if row.shown_by == STEP}
ELSEWHERE = {key: row.value for key, row in ROWS.items() if row.shown_by not in (STEP, REFUSED)}
ALONE_REFUSED = {key: row.value for key, row in ROWS.items() if row.shown_by == REFUSED}
NEUTRAL = tuple(key for key, row in ROWS.items() if row.is_neutral)
PLACED = tuple(key for key, row in ROWS.items() if row.is_placed)
