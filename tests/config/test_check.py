"""The check before a start: each mistake is a line that names the key and what was expected, and all are listed."""

from pathlib import Path

import pytest
import yaml
from hydra.errors import HydraException
from omegaconf import OmegaConf

from docs.print_reference import config_yaml, help_of_declarations, keys_page, metrics_page, models_head, yaml_text
from tests.config.composing import CONF, compose
from zero.base.errors import UserError
from zero.base.keys import all_keys
from zero.commands.modes import MODES, check, describe
from zero.job.sizes import load_sizes
from zero.planning.config import PlanConfig
from zero.run.config import GROUPS, TrainConfig

pytestmark = pytest.mark.quick

SIZES = load_sizes()
NO_STEPS_AND_NO_HOURS = ("0h", "-2h", "2H", "2d", "h", "2 h", "nanh", "1e999h", "1.5", "true", "[2]", "2147483648")


def refusal(*overrides: str) -> str:
    """What a person reads."""
    try:
        check(compose(*overrides), SIZES, [override.lstrip("+").partition("=")[0] for override in overrides])
    except HydraException as error:
        return describe(error)
    except UserError as error:
        return str(error)
    raise AssertionError("it was accepted")


def test_default_job() -> None:
    """The default job is accepted, and its values are typed."""
    checked = check(compose(), SIZES)
    assert isinstance(checked, TrainConfig)
    assert checked.model.size == "bytes" and checked.zero.stage == 3


def test_an_integer_may_have_an_exponent() -> None:
    tokens = check(compose("mode=plan", "plan.tokens=30e9"), SIZES).plan.tokens
    assert tokens == 30_000_000_000 and type(tokens) is int


@pytest.mark.wide  # tests/models/test_gpt.py counts the parameters of each kind
@pytest.mark.parametrize("size", SIZES)
def test_every_size_can_be_trained(size: str) -> None:
    context = SIZES[size].block_size
    overrides = [f"model.size='{size}'", f"data.max_context={context}", "training.warmup_train_context=8"]
    if SIZES[size].update_tokens is not None:  # whose rows take several steps
        overrides += ["training.staged_warmup_steps=0", "training.log_frequency=8"]
    check(compose(*overrides), SIZES)


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("model.sizee=test", ["model.sizee", "did you mean model.size?"]),
        ("+foo=1", ["foo", "expected one of mode, resume, seed"]),
        ("++data.tain_samples=1", ["data.tain_samples", "did you mean data.train_samples?"]),
        ("++data.foo=1", ["data.foo", "expected one of corpus"]),
        ("~seed", ["seed", "missing"]),
        ("~training.total_steps", ["training.total_steps: missing"]),
        ("training=5", ["training=5", "a section of keys"]),
        ("training.total_steps=many", ["training.total_steps=many", "an integer, at least 1"]),
        ("training.total_steps=1.5", ["training.total_steps=1.5", "an integer"]),
        ("training.total_steps=null", ["training.total_steps=null", "an integer"]),
        ("training.peak_learning_rate=fast", ["training.peak_learning_rate=fast", "a number"]),
        ("data.max_context", ["data.max_context", "EQUAL"]),
        ("mode=tain", ["mode=tain", "one of train, evaluate, sample, plan"]),
        ("data.index_path_train=null", ["data.index_path_train=null", "the path of an index file, a list of paths"]),
        ("data.index_path_train=[]", ["data.index_path_train=[]", "the path of an index file, a list of paths"]),
        ("data.index_path_train=[{index: a, weight: 0}]", ["data.index_path_train", "weight"]),
        ("data.index_path_train=[{index: a, weigth: 1}]", ["data.index_path_train", "weight"]),
        ("data.index_path_train=[{index: a, weight: 1}, b]", ["data.index_path_train", "weight"]),
        ("data.index_path_train=[{index: a, weight: [[5, 1]]}]", ["data.index_path_train", "weight"]),
        ("data.index_path_train=[{index: a, weight: [[0, 1], [5, 0]]}]", ["data.index_path_train", "weight"]),
        ("data.index_path_train=[{index: x/a, weight: 1}, {index: y/a, weight: 1}]", ["files with different names"]),
        ("data.index_path_validation=[{index: a, weight: 1}]", ["data.index_path_validation", "or a list"]),
        ("data.index_path_validation={}", ["data.index_path_validation={}", "{name: a path or a list, ...}"]),
        ("data.index_path_validation={a/b: c.index}", ["data.index_path_validation", "names of letters and digits"]),
        ("mode=evaluate; evaluate.index={a: []}", ["evaluate.index={'a': []}", "or a list"]),
        ("data.checkpoint_directory=s3://b/c", ["data.checkpoint_directory=s3://b/c", "orbax cannot save to s3://b/c"]),
        ("data.bucket_path=s3://b/c", ["data.checkpoint_directory=checkpoints", "save to s3://b/c/checkpoints"]),
        ("data.crop=last", ["data.crop=last", "one of first, all, random"]),
        ("data.shuffle_shards=0", ["data.shuffle_shards=0", "at least 1"]),
        ("profile.steps=[5]", ["profile.steps=[5]", "[20,25], or null"]),
        ("profile.peak_flops=0", ["profile.peak_flops=0", "null"]),
        ("mode=plan; plan.search=true", ["plan.search=true: expected one of none, stages, fastest, largest"]),
        ("mode=plan; plan.dollars_per_hour=0", ["plan.dollars_per_hour=0", "null"]),
        ("distributed.process_id=1", ["distributed.process_id=1", "without distributed.coordinator_address"]),
        (
            "distributed.coordinator_address=host; distributed.num_processes=1; distributed.process_id=0",
            ["distributed.coordinator_address=host", "host:port"],
        ),
        ("mode=evaluate; evaluate.validation=false", ["evaluate.validation=false", "evaluate.harness"]),
        (
            "mode=evaluate; evaluate.follow=true; data.resume_step=6",
            ["evaluate.follow=true", "false, as data.resume_step=6"],
        ),
        ("mode=evaluate; evaluate.stride=256", ["evaluate.stride=256", "1 to 255"]),
        ("data.max_skipped_rows=-1", ["data.max_skipped_rows=-1", "zero or more"]),
        ("model.size=999b", ["model.size=999b: no such size; of about as many parameters are kimi_k2, dense_lm_1t"]),
        ("zero.stage=4", ["zero.stage=4", "one of 0, 1, 2, 3"]),
        ("zero.compute_dtype=float16", ["zero.compute_dtype=float16", "float32, bfloat16"]),
        ("seed=-1", ["seed=-1"]),
        ("seed=4294967296", ["seed=4294967296"]),
        ("training.batch_size=0", ["training.batch_size=0", "at least 1"]),
        ("training.gradient_accumulation_steps=-1", ["training.gradient_accumulation_steps=-1", "at least 1"]),
        ("training.max_gradient_norm=0", ["training.max_gradient_norm=0", "null"]),
        ("training.skip_spikes=0", ["training.skip_spikes=0", "null"]),
        ("training.skip_spikes=nan", ["training.skip_spikes=nan", "more than 0"]),
        ("training.peak_learning_rate=-1", ["training.peak_learning_rate=-1"]),
        ("training.peak_learning_rate=nan", ["training.peak_learning_rate=nan"]),
        ("training.weight_decay=inf", ["training.weight_decay=inf"]),
        ("optimizer.b1=0.99999999", ["optimizer.b1=0.99999999", "less than 1 in float32"]),
        ("optimizer.b2=0.9999999999", ["optimizer.b2=0.9999999999", "less than 1 in float32"]),
        ("optimizer=muon; optimizer.adam_b2=0.99999999", ["optimizer.adam_b2=0.99999999", "in float32"]),
        ("training.ema=0.99999999", ["training.ema=0.99999999", "less than 1 in float32"]),
        ("optimizer.eps=1e-60", ["optimizer.eps=1e-60", "more than 0", "1.2e-38 to 3.4e38"]),
        ("training.max_gradient_norm=1e-50", ["training.max_gradient_norm=1e-50", "more than 0 in float32"]),
        ("training.peak_learning_rate=1e308", ["training.peak_learning_rate=1e+308", "finite in float32"]),
        ("training.weight_decay=1e39", ["training.weight_decay=1e+39", "finite in float32"]),
        ("training.max_epochs=0", ["training.max_epochs=0", "null"]),
        ("training.warmup_steps=100000", ["training.warmup_steps=100000", "fewer than training.total_steps="]),
        ("training.warmup_steps=-1", ["training.warmup_steps=-1"]),
        ("training.warmup_train_context=100", ["training.warmup_train_context=100", "data.max_context=256"]),
        ("training.warmup_train_context=512", ["training.warmup_train_context=512", "data.max_context=256"]),
        ("training.warmup_train_context=1", ["training.warmup_train_context=1"]),
        ("training.context_stages=[[5,64],[5,100]]", ["[[5, 64], [5, 100]]", "data.max_context=256"]),
        ("training.context_stages=[[5,256]]", ["[[5, 256]]", "less than data.max_context=256 tokens, or null"]),
        ("training.context_stages=[[0,64]]", ["training.context_stages", "[[steps, tokens per sequence], ...]"]),
        ("training.context_stages=quadratic", ["training.context_stages", "linear"]),
        ("training.context_stages=[[true,64]]", ["training.context_stages", "[[steps, tokens per sequence], ...]"]),
        ("data.max_context=true", ["data.max_context=true", "at least 2"]),
        ("data.index_path_train=[{index: a, weight: true}]", ["data.index_path_train", "weight"]),
        ("model.warm_start=2", ["model.warm_start=2", "true, false or ema"]),
        ("zero.fused_update=null", ["zero.fused_update=null", "true or false"]),
        ("mode=sample; sample.prompt=2024", ["sample.prompt=2024: expected a string, quoted as", "if it looks"]),
        ("mode=sample; sample.prompt=[]", ["sample.prompt=[]: expected a string"]),
        ("mode=sample; sample.prompt=[1,2]", ["sample.prompt=[1, 2]: expected a string"]),
        ("mode=sample; sample.prompt=[[a]]", ["sample.prompt=[['a']]: expected a string"]),
        ("mode=sample; sample.prompt=true", ["sample.prompt=true: expected a string"]),
        ("mode=sample; sample.replicate=2", ["sample.replicate=2", "true or false, or null"]),
        (
            "mode=plan; plan.grid.overlap_gathers=[1]",
            ["plan.grid.overlap_gathers=[1]", "a list, each element true or false"],
        ),
        ("data.tokenizer=", ["data.tokenizer=: expected a non-empty string"]),
        ("data.tokenizer=' '", ["data.tokenizer= : expected a non-empty string"]),
        ("data.bucket_path=", ["data.bucket_path=: expected a non-empty string, or null"]),
        ("data.wandb_project=a/b", ["data.wandb_project=a/b", "without any of / \\ # ? % :"]),
        ("data.wandb_project=' '", ["data.wandb_project= : expected a non-empty string"]),
        (f"data.wandb_project={'a' * 129}", ["data.wandb_project=aa", "at most 128 characters"]),
        ("data.checkpoint_directory=", ["data.checkpoint_directory=: expected a non-empty string"]),
        ("data.cache_directory=", ["data.cache_directory=", "non-empty string, or null"]),
        ("data.corpus=", ["data.corpus=", "non-empty string, or null"]),
        ("model.model_path=", ["model.model_path=", "non-empty string, or null"]),
        ("data.max_context=257", ["data.max_context=257", "2 to 256, the block_size"]),
        ("data.max_context=1", ["data.max_context=1"]),
        ("data.train_samples=0", ["data.train_samples=0", "null"]),
        ("data.keep_checkpoints=0", ["data.keep_checkpoints=0"]),
        ("data.keep_every=0", ["data.keep_every=0", "a number of steps, at least 1", "or hours such as 2h", "or null"]),
        *((f"data.keep_every={wrong}", [f"data.keep_every={wrong}: expected"]) for wrong in NO_STEPS_AND_NO_HOURS),
        ("data.resume_step=5", ["data.resume_step=5", "--resume"]),
        ("model.warm_start=true", ["model.model_path", "model.warm_start=true"]),
        ("distributed.cpu_devices=0", ["distributed.cpu_devices=0"]),
        ("data.max_context=long", ["data.max_context=long", "null"]),
        ("zero.gradient_dtype=int8", ["zero.gradient_dtype=int8", "float32, bfloat16"]),
        ("zero.master_dtype=int8", ["zero.master_dtype=int8", "float32, bfloat16"]),
        ("optimizer.state_dtype=float16", ["optimizer.state_dtype=float16", "float32, bfloat16, int8"]),
        ("optimizer=adam", ["optimizer=adam", "one of adamw, ademamix"]),
        (
            "optimizer=muon; optimizer.state_dtype=int8",
            ["optimizer.state_dtype", "optimizer=adamw and optimizer=lion"],
        ),
        (
            "model.size=bytes_mup; optimizer=muon",
            ["optimizer=muon", "adamw or lion, as model.size=bytes_mup is in mup"],
        ),
        ("optimizer.nesterov=true", ["optimizer.nesterov", "optimizer=sgd"]),
        ("optimizer=lamb; zero.fused_update=true", ["optimizer=lamb", "adamw, ademamix, lion, sgd"]),
        ("schedule.decay_steps=9", ["schedule.decay_steps", "schedule=wsd"]),
        ("schedule=wsd; schedule.decay_steps=941", ["schedule.decay_steps=941", "at most 940"]),
        ("mode=plan; plan.grid.state_dtype=[int8,int4]", ["plan.grid.state_dtype", "float32, bfloat16, int8"]),
        (
            "zero.replicas=1; zero.replica_wire_dtype=int8",
            ["zero.replica_wire_dtype=int8", "auto, as zero.replicas=1 is one copy of the state"],
        ),
        (
            "zero.stage=0; zero.replica_wire_dtype=bfloat16",
            ["zero.replica_wire_dtype=bfloat16", "auto, as zero.stage=0 sums whole gradients over all devices"],
        ),
        ("zero.replicas=2; zero.phases=torus", ["zero.phases=torus", "auto or flat, as zero.replicas=2"]),
        ("zero.wire_dtype=int8; zero.stage=0", ["zero.wire_dtype=int8", "auto, float32 or bfloat16, as zero.stage=0"]),
        (
            "zero.product_dtype=int8; model.size=bytes_vq",
            ["zero.product_dtype=int8", "auto, as model.size=bytes_vq has gated units"],
        ),
        (
            "zero.product_dtype=int8; model.size=test_experts",
            ["zero.product_dtype=int8", "auto, as model.size=test_experts has experts"],
        ),
        (
            "zero.product_dtype=bfloat16; tuning=lora; model.warm_start=true; model.model_path=run",
            ["zero.product_dtype=bfloat16", "auto, as tuning=lora multiplies with frozen weights"],
        ),
        (
            "zero.product_dtype=float8; zero.remat=dots",
            ["zero.product_dtype=float8", "auto or bfloat16, as zero.remat=dots stores the sums"],
        ),
        (
            "zero.remat=experts+attention",
            ["zero.remat=experts+attention", "mlp+attention, as", "has no experts"],
        ),
        (
            "zero.offload=activations; zero.remat=none",
            ["zero.remat=none", "full or another value, as zero.offload=activations finds no names"],
        ),
        ("zero.offload=all", ["zero.offload=all", "none, activations, optimizer, both"]),
        (
            "zero.offload=optimizer",
            ["zero.fused_update=false", "true, as zero.offload=optimizer moves the state of a span of layers"],
        ),
        (
            "zero.offload=both; zero.fused_update=true; zero.emergency_steps=5",
            ["zero.emergency_steps=5: expected null, as zero.offload=both needs the host's memory that"],
        ),
        ("zero.product_dtype=int4", ["zero.product_dtype=int4", "auto, bfloat16, int8, int8_all, float8"]),
        (
            "zero.gather_dtype=products",
            ["zero.product_dtype=auto", "one of int8, int8_all, float8, as zero.gather_dtype=products sends"],
        ),
        (
            "mode=evaluate; model.size=bytes_vq; evaluate.weight_dtype=int8",
            ["evaluate.weight_dtype=int8", "auto, as model.size=bytes_vq has gated units"],
        ),
        (
            "mode=sample; zero.tensor_shards=2; sample.weight_dtype=int8",
            ["sample.weight_dtype=int8", "auto, as zero.tensor_shards=2 cuts blocks of codes"],
        ),
        (
            "mode=evaluate; evaluate.adapters=[a]; evaluate.weight_dtype=int8",
            ["evaluate.weight_dtype=int8", "auto, as evaluate.adapters are merged"],
        ),
        ("zero.gather_dtype=int8; zero.stage=0", ["zero.gather_dtype=int8", "auto, as zero.stage=0"]),
        ("zero.tensor_shards=4", ["zero.tensor_shards=4", "a divisor of num_head=6 of model.size=bytes"]),
        ("zero.context_shards=2; zero.tensor_shards=2", ["zero.context_shards=2", "1, as zero.tensor_shards=2"]),
        (
            "model.size=qwen3_5_9b; model.override.delta_key_heads=1; zero.context_shards=2",
            ["zero.context_shards=2", "a divisor of delta_key_heads=1 of model.size=qwen3_5_9b"],
        ),
        (
            "model.size=qwen3_5_9b; model.override.delta_key_heads=1; zero.tensor_shards=2",
            ["zero.tensor_shards=2", "a divisor of delta_key_heads=1 of model.size=qwen3_5_9b"],
        ),
        ("zero.context_shards=3", ["zero.context_shards=3", "a divisor of half of the 256 tokens of a sequence"]),
        ("zero.context_shards=2; model.attention=dense", ["model.attention=dense", "auto or blockwise, as zero.co"]),
        ("zero.expert_shards=2", ["zero.expert_shards=2", "1, as model.size=bytes has no experts"]),
        ("model.size=mixtral_8x7b; zero.expert_shards=2", ["zero.expert_shards=2", "a number as expert_capacity of"]),
        ("model.size=test_experts; zero.expert_shards=3", ["zero.expert_shards=3", "a divisor of experts=8 of"]),
        (
            "model.size=test_experts; zero.expert_shards=2; zero.tensor_shards=3; data.max_context=63; "
            "training.staged_warmup_steps=0",
            ["zero.tensor_shards=3", "1, as zero.expert_shards=2"],
        ),
        (
            "model.size=test_experts; zero.expert_shards=2; zero.gather_dtype=int8",
            ["zero.gather_dtype=int8", "auto, as zero.expert_shards=2"],
        ),
        ("model.size=test_experts; zero.expert_shards=2; zero.phases=torus", ["zero.phases=torus", "auto or flat"]),
        (
            "model.size=bytes_vq; zero.context_shards=2",
            ["zero.context_shards=2", "1, as model.size=bytes_vq"],
        ),
        (
            "model.size=bytes_vq; zero.fused_update=true",
            ["zero.fused_update=true", "false, as model.size=bytes_vq has a codebook"],
        ),
        ("objective=multi_token", ["objective=multi_token", "another one, as model.size=bytes has no predictor"]),
        (
            "model.override.predictor=true",
            ["objective=likelihood", "multi_token, as model.size=bytes has a predictor, which nothing else trains"],
        ),
        (
            "model.override.predictor=true; objective=multi_token; zero.fused_update=true",
            ["zero.fused_update=true", "false, as model.size=bytes has a predictor"],
        ),
        (
            "model.override.predictor=true; objective=multi_token; tuning=lora; model.warm_start=true; "
            "model.model_path=run",
            ["tuning=lora", "none, as model.size=bytes has a predictor, which adapters do not train"],
        ),
        (
            "model.size=bytes_vq; data.isolate_documents=true",
            ["data.isolate_documents=true", "false, as model.size=bytes_vq has gated units"],
        ),
        *(
            (f"model.size=test_vq; model.override.update_tokens=16; training.staged_warmup_steps=0; {key}", named)
            for key, named in (
                (
                    "training.log_frequency=10",
                    ["training.log_frequency=10", "a multiple of 4, the steps per row with "],
                ),
                ("training.total_steps=66; training.log_frequency=4", ["training.total_steps=66", "multiple of 4"]),
                ("training.log_frequency=4; data.save_every=2", ["data.save_every=2", "a multiple of 4"]),
                ("training.log_frequency=4; data.max_context=24", ["data.max_context=24", "update_tokens=16 of model"]),
                (
                    "training.log_frequency=4; statistics.every=4",
                    ["statistics.every=4", "null, as update_tokens"],
                ),
                ("training.log_frequency=4; zero.remat=nested", ["zero.remat=nested", "auto, full, dots or none"]),
            )
        ),
        (
            "model.size=test_vq; model.override.update_tokens=16; training.log_frequency=4",
            ["training.staged_warmup_steps=280", "0, with training.context_stages=null, as update_tokens=16"],
        ),
        ("model.override.update_tokens=16", ["layer: transformer needs update_tokens: none, got 16"]),
        (
            "model.size=test_vq; model.override.update_tokens=12",
            ["update_tokens 12 must be a multiple of vq_block 8"],
        ),
        ("model.override.norm=rms_biased", ["norm: rms_biased needs layer: gated_units"]),
        (
            "optimizer.decay=constant; training.peak_learning_rate=0; training.end_learning_rate=0",
            ["optimizer.decay=constant", "rate, as training.peak_learning_rate=0"],
        ),
        (
            "mode=evaluate; evaluate.carry=true",
            ["evaluate.carry=true", "false, as model.size=bytes has no memory of constant size"],
        ),
        (
            "mode=evaluate; model.size=bytes_vq; evaluate.carry=true; evaluate.context=1000",
            ["evaluate.carry=true", "a multiple of vq_block=128 of model.size=bytes_vq"],
        ),
        ("zero.remat=some", ["zero.remat=some", "nested, full, attention, projections, mlp_in, mlp, "]),
        ("model.attention=some", ["model.attention=some", "auto, dense, blockwise, kernel"]),
        ("mode=plan; plan.micro_batch=0", ["plan.micro_batch=0", "at least 1"]),
        ("mode=plan; plan.grid.stage=[4]", ["plan.grid.stage=[4]", "0, 1, 2, 3"]),
        (
            "mode=plan; plan.grid.remat=[]",
            ["plan.grid.remat=[]", "nested, full, attention, projections, mlp_in, mlp, "],
        ),
        ("mode=plan; plan.grid.context=[1024]", ["plan.grid.context=[1024]", "2 to 256"]),
        (
            "mode=plan; plan.grid.state_dtype=[float32,int8]; optimizer=sgd",
            ["plan.grid.state_dtype=", "as optimizer=sgd"],
        ),
    ],
)
def test_mistakes_name_key_and_expectation(override: str, named: list[str]) -> None:
    """A mistake is one line that names the key and what was expected."""
    line = refusal(*override.split("; "))
    assert "\n" not in line
    assert [part for part in named if part not in line] == [], line


def test_unused_context_need_not_divide() -> None:
    """A context that does not divide the rows is refused only where it is used."""
    check(compose("training.warmup_train_context=100", "training.staged_warmup_steps=0"), SIZES)


def test_default_context() -> None:
    """The context is the longest of the model unless it is given."""
    assert check(compose("model.size=test"), SIZES).data.max_context == SIZES["test"].block_size
    assert check(compose("data.max_context=128"), SIZES).data.max_context == 128


PRESETS = sorted(path.stem for path in (CONF / "preset").glob("*.yaml"))


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset(name: str) -> None:
    """Every preset is accepted, and its file opens with what to expect."""
    checked = check(compose(f"+preset={name}", "mode=plan"), SIZES)
    assert isinstance(checked, PlanConfig)
    assert checked.data.max_context == 1024 and name.startswith(checked.plan.topology)
    head = (CONF / "preset" / f"{name}.yaml").read_text().split("\n\n")[0]
    for part in (f"python main_zero.py +preset={name}", "# Hardware", "GiB per device at the peak", "# Not measured"):
        assert part in head


def test_slice_with_memory_recipe() -> None:
    """A slice and a memory recipe are combined where there is no preset."""
    config = compose("mode=plan", "+slice=v4-32", "+memory=4-bytes", "model.size=119_9b")
    assert (config.plan.topology, config.plan.micro_batch, config.optimizer.state_dtype) == ("v4-32", 1, "int8")
    assert (config.zero.fused_update, config.zero.remat, config.zero.master_dtype) == (True, "nested", "bfloat16")
    check(config, SIZES)
    assert compose("+preset=v3-8-fused") == compose("+slice=v3-8", "+memory=fused", "model.size=10_3b")


FUSED = ("zero.fused_update=true",)


@pytest.mark.parametrize(
    "override",
    [
        "zero.stage=2",
        "zero.remat=dots",
        "training.skip_spikes=6",
        "training.gradient_accumulation_steps=2",
    ],
)
def test_fused_update_refusals(override: str) -> None:
    """A fused update refuses options that need the whole gradient."""
    check(compose(*FUSED), SIZES)
    line = refusal(*FUSED, override)
    assert override.split("=")[0] in line and "zero.fused_update=true" in line


def test_fused_update_has_gradients_of_weights() -> None:
    """The gradients of a fused update have the dtype of the weights, so that no other has an effect."""
    keys = (*FUSED, "zero.master_dtype=bfloat16", "optimizer.state_dtype=int8")
    check(compose(*keys, "zero.gradient_dtype=bfloat16"), SIZES)
    assert refusal(*keys).startswith("zero.gradient_dtype=float32: expected bfloat16, the dtype of zero.master_dtype")
    other = refusal(*FUSED, "zero.gradient_dtype=bfloat16")
    assert other.startswith("zero.gradient_dtype=bfloat16: expected float32, the dtype of zero.master_dtype")
    check(compose("zero.master_dtype=bfloat16", "optimizer.state_dtype=int8"), SIZES)


def test_sample_fits_learned_positions(tmp_path: Path) -> None:
    """A sample has to fit into learned positions."""
    (tmp_path / "sizes.yaml").write_text(
        (CONF / "model_config.yaml").read_text().replace("alibi_attn: true", "alibi_attn: false")
    )
    sizes = load_sizes(tmp_path / "sizes.yaml")
    with pytest.raises(UserError, match=r"training.sample_tokens=256: expected .*255"):
        check(compose("training.sample_tokens=256"), sizes)
    check(compose("training.sample_tokens=255"), sizes)


def test_every_mistake_has_a_line() -> None:
    """Of single keys first: a rule between keys may use any key, and so needs each of them to be right."""
    rules = ("mode=evaluate", "training.warmup_steps=9999", "evaluate.stride=999")
    lines = refusal("seed=-1", "zero.stage=7", "++data.foo=1", *rules)
    assert [line.partition("=")[0].partition(":")[0] for line in lines.splitlines()] == [
        "data.foo",
        "zero.stage",
        "seed",
        "training.warmup_steps",
    ]
    assert [line.partition("=")[0] for line in refusal(*rules).splitlines()] == [
        "evaluate.stride",
        "training.warmup_steps",
    ]


def test_fused_update_names_all_refusals() -> None:
    """A fused update names every option that it refuses."""
    lines = refusal("zero.fused_update=true", "zero.stage=2", "training.skip_spikes=6").splitlines()
    keys = ["zero.stage=2", "training.skip_spikes=6.0"]
    assert [line.partition(":")[0] for line in lines] == keys


def test_refusals_of_rounded_gathers_are_all_at_once() -> None:
    """What does not go with weights that are gathered in 8 bits is refused by name, in one message."""
    assert refusal("zero.gather_dtype=products", "zero.stage=2", "zero.tensor_shards=2").splitlines() == [
        "zero.product_dtype=auto: expected one of int8, int8_all, float8, as zero.gather_dtype=products sends weights "
        "as these products round them",
        "zero.stage=2: expected 3, as zero.gather_dtype=products rounds each layer that is gathered",
        "zero.tensor_shards=2: expected 1, as zero.gather_dtype=products gathers whole columns, of which a device of a "
        "tensor group has parts",
    ]


@pytest.mark.parametrize("mode", ["evaluate", "sample"])
@pytest.mark.parametrize(
    ("of_run", "now"),
    [
        (["zero.fused_update=true", "zero.offload=both"], "zero.stage=1"),
        (["zero.wire_dtype=int8", "zero.replica_wire_dtype=int8"], "zero.stage=0"),
        (["zero.replicas=2"], "zero.phases=torus"),
        (["zero.remat=dots"], "zero.product_dtype=int8"),
        (["tuning=lora", "tuning.targets=[query]"], "zero.product_dtype=int8"),
    ],
)
def test_keys_that_weights_are_not_read_by(mode: str, of_run: list[str], now: str) -> None:
    """Keys of a run that a mode does not read, and lets no one change, are no reason to refuse one that it reads."""
    check(compose(f"mode={mode}", *of_run, now), SIZES, ["mode", now.partition("=")[0]])
    training = ["model.warm_start=true", "model.model_path=there"] if "tuning=lora" in of_run else []
    assert refusal(*training, *of_run, now)


def test_configuration_file() -> None:
    """conf/config.yaml and the pages of keys and metrics are what is printed: python -m docs.print_reference."""
    reference = CONF.resolve().parent / "docs" / "reference"
    assert (CONF / "config.yaml").read_text() == config_yaml()
    assert (CONF / "help.json").read_text() == help_of_declarations().to_json()
    assert (CONF / "model_config.yaml").read_text().startswith(models_head() + "\ntest:")
    assert (reference / "keys.md").read_text() == keys_page()
    assert (reference / "metrics.md").read_text() == metrics_page()
    assert {key.name: yaml.safe_load(yaml_text(key.default)) for key in all_keys(MODES.first)} == {
        key.name: key.default for key in all_keys(MODES.first)
    }


def test_every_key_is_explained() -> None:
    """Each key has a sentence, and lacks none of those that are needed."""
    assert [key.name for key in all_keys(MODES.first) if not key.lines[0]] == []
    with pytest.raises(UserError) as caught:
        check(OmegaConf.create({}), SIZES)
    missing = {line.partition(":")[0] for line in str(caught.value).splitlines()}
    assert missing == {key.name for key in all_keys(MODES.first)} | {f"{group}.name" for group in GROUPS}


@pytest.mark.parametrize(
    "given", ["statistics.every=60", "verify.every=60", "zero.emergency_steps=60", "profile.steps=[60, 70]"]
)
def test_steps_after_the_last(given: str) -> None:
    """A key of steps that the run does not make is refused; at the last step it acts."""
    steps = ["training.total_steps=50", "training.staged_warmup_steps=0"]
    assert refusal(*steps, given) == f"{given}: it has no effect, as training.total_steps=50 ends the run before"
    check(compose(*steps, given.replace("60", "50")), SIZES, [given.partition("=")[0]])
