"""A run that trains adapters of a folder of transformers: resumed, evaluated, merged, exported as PEFT has it."""

import dataclasses
import json
import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import zero
from tests.config.composing import Only, compose
from tests.helpers import cli, llama
from tests.helpers.lasting import KEYS
from tests.helpers.shared_jobs import FinishedRun, SharedJobs
from zero.base.errors import UserError
from zero.checkpoints.manager import Checkpoints
from zero.commands.modes import check, merge_resumed
from zero.exchange.export import export
from zero.exchange.hf_folder import HuggingFaceFolder
from zero.exchange.peft_folder import read_peft
from zero.exchange.warm_start import warm_start
from zero.inference.evaluate import evaluate
from zero.job.job import place_model
from zero.models.gpt import GPT
from zero.record.metrics_file import read_metrics, read_resumes
from zero.record.run_files import saved_config
from zero.run.train import train
from zero.training.sharded_gpt import ShardedGPT

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported

STEPS = 8
SIZE = llama.size(64)
JOB = (
    *(
        option
        for option in cli.TINY
        if not option.startswith(("model.", "training.total", "training.eval", "training.max"))
    ),
    "model.size=mine",
    "model.warm_start=true",
    "model.model_path=folder",
    "tuning=lora",
    "tuning.rank=4",
    "tuning.alpha=8",
    "tuning.targets=[query,value,attention_out,mlp_in,mlp_gate]",
    "training.peak_learning_rate=1e-2",
    f"training.total_steps={STEPS}",
    f"training.evaluation_frequency={STEPS // 2}",
    "training.maximum_evaluation_steps=100",
)
MODULES = {
    "query": "self_attn.q_proj",
    "value": "self_attn.v_proj",
    "attention_out": "self_attn.o_proj",
    "mlp_in": "mlp.up_proj",
    "mlp_gate": "mlp.gate_proj",
}


def configured(*overrides: str) -> Any:
    return check(compose(*JOB, *overrides), Only(SIZE))


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Any:
    root = cli.make_workplace(tmp_path_factory.mktemp("lora"))
    llama.save(root / "folder", 64)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        run = root / "run"
        run.mkdir()
        jobs = SharedJobs(KEYS)
        with jobs.shared([]):
            assert train(configured(), SIZE, run) == 0
        yield FinishedRun(root, run, jobs)


def fork(place: FinishedRun, to: Path, *more: str) -> list[dict[str, Any]]:
    """The metrics of a run that continues from the middle of another."""
    overrides = [f"data.resume_step={STEPS // 2}", "resume=run", *more]
    config = check(merge_resumed(saved_config(place.run), compose(*JOB, *overrides), overrides), Only(SIZE))
    to.mkdir()
    with place.jobs.shared([]):
        assert train(config, SIZE, to) == 0
    return list(read_metrics(to / "metrics.jsonl"))


def torch_logits(folder: Path, adapters: Path | None = None) -> np.ndarray:
    """Logits of transformers, with the adapters of a folder in peft."""
    import peft
    import torch
    import transformers

    auto: Any = transformers.AutoModelForCausalLM
    model = auto.from_pretrained(folder)
    if adapters is not None:
        model = peft.PeftModel.from_pretrained(model, adapters)  # warns of tensors that are missing or left over
        config = json.loads((adapters / "adapter_config.json").read_text())
        assert sorted(config["target_modules"]) == sorted(MODULES.values())
    tokens = torch.arange(40)[None] * 7 % 256
    with torch.no_grad():
        logits: np.ndarray = model(tokens).logits.numpy()
    return logits


def test_adapters_alone_in_checkpoint(place: FinishedRun) -> None:
    """The checkpoint holds adapters and their moments, and names the base with its checksum."""
    with Checkpoints(place.run / "checkpoints", None) as checkpoints:
        meta = checkpoints.meta(STEPS)
    params = [name for name in meta["shapes"] if name.startswith("params/")]
    assert sorted(params) == sorted(f"params/blocks/{name}/lora_{half}" for name in MODULES for half in "ab")
    assert not any(name.endswith("kernel") for name in meta["shapes"])
    assert meta["base"]["place"] == "folder" and isinstance(meta["base"]["checksum"], int)
    losses = [
        line["validation/loss"] for line in read_metrics(place.run / "metrics.jsonl") if "validation/loss" in line
    ]
    assert losses[-1] < losses[0] - 0.1


def test_resumed_bit_for_bit(place: FinishedRun, tmp_path: Path) -> None:
    """A run that continues from the middle is the same, bit for bit."""
    keys = ("step", "train/loss", "validation/loss", "gradient_norm", "samples_checksum")
    expected = [[line.get(key) for key in keys] for line in read_metrics(place.run / "metrics.jsonl")]
    assert [[line.get(key) for key in keys] for line in fork(place, tmp_path / "again")] == expected


@pytest.mark.slow
def test_resumed_in_copies(place: FinishedRun, tmp_path: Path) -> None:
    """In copies of fewer shards a run that continues is the same to rounding."""
    expected = cli.losses(place.run)
    other = fork(place, tmp_path / "other", "zero.replicas=2", "zero.stage=1")
    assert [line["train/loss"] for line in other] == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
def test_killed_run_is_resumed(place: FinishedRun) -> None:
    """A run of adapters that is killed in the middle and resumed writes and exports what an undisturbed one does."""
    forks = cli.Forks(place.root)
    shape = {key: getattr(SIZE, key) for key in ("embedding_dim", "num_head", "kv_heads", "mlp_dim", "N", "vocab_size")}
    job = (
        *(option for option in JOB if not option.startswith(("model.size", "training."))),
        *(option for option in cli.TINY if option.startswith("training.") and "total" not in option),
        "model.size=llama3_8b",
        *(f"model.override.{key}={value}" for key, value in shape.items()),
        "model.override.rotary_base=1e4",
        "model.override.rotary_scaling=null",
        "training.total_steps=60",
    )
    undisturbed, killed = forks.train("undisturbed", *job), place.root / "killed"
    process = forks.start(*job, "hydra.run.dir=killed")
    while process.poll() is None and not (killed / "checkpoints" / "6").exists():
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    assert process.finish().returncode == -signal.SIGKILL
    forks.check("--resume", "hydra.run.dir=killed")
    assert 0 < read_resumes(killed / "metrics.jsonl")[0] < 60
    assert cli.metrics(killed) == cli.metrics(undisturbed)
    for run in (undisturbed, killed):
        export(str(run), place.root / f"{run.name}-adapters")
    assert cli.contents(place.root / "killed-adapters") == cli.contents(place.root / "undisturbed-adapters")


def test_changed_base_is_refused(place: FinishedRun, tmp_path: Path) -> None:
    """A resume with other weights under the adapters ends with both checksums."""
    import transformers

    auto: Any = transformers.AutoModelForCausalLM
    model = auto.from_pretrained(place.root / "folder")
    model.model.norm.weight.data[0] += 1
    model.save_pretrained(tmp_path / "changed")
    with pytest.raises(UserError, match=r"trained for other weights, those of folder with checksum [0-9a-f]{8}; these"):
        fork(place, tmp_path / "again", f"model.model_path={tmp_path / 'changed'}")


def test_evaluated_merged(place: FinishedRun, tmp_path: Path) -> None:
    """An evaluation of the run, which merges, has the loss of the run, which does not."""
    config = configured("mode=evaluate", "model.model_path=run")
    assert evaluate(config, SIZE, tmp_path) == 0
    result = json.loads((tmp_path / "evaluation.json").read_text())
    lines = list(read_metrics(place.run / "metrics.jsonl"))
    assert result["loss"] == pytest.approx(lines[-1]["validation/loss"], rel=1e-5)


@pytest.mark.wide  # tests/training/test_step_adapters.py trains on codes
def test_coded_run_is_merged(place: FinishedRun, tmp_path: Path) -> None:
    """A run on a base of 4 bits ends, and an evaluation merges the weights that its codes stand for."""
    run = tmp_path / "coded"
    run.mkdir()
    assert train(configured("tuning.base_dtype=nf4", "training.total_steps=4"), SIZE, run) == 0
    lines = list(read_metrics(run / "metrics.jsonl"))
    (tmp_path / "evaluation").mkdir()
    config = configured("mode=evaluate", f"model.model_path={run}", "tuning.base_dtype=nf4")
    assert evaluate(config, SIZE, tmp_path / "evaluation") == 0
    result = json.loads((tmp_path / "evaluation" / "evaluation.json").read_text())
    assert result["loss"] == pytest.approx(lines[-1]["validation/loss"], rel=1e-5)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # of transformers, which peft asks
def test_peft_folder_equals_merged(place: FinishedRun, tmp_path: Path) -> None:
    """The exported adapters, loaded by peft, compute as the merged weights in transformers."""
    assert export("run", tmp_path / "adapters") == STEPS
    assert export("run", tmp_path / "merged", merges=True) == STEPS
    by_peft, merged = torch_logits(place.root / "folder", tmp_path / "adapters"), torch_logits(tmp_path / "merged")
    np.testing.assert_allclose(merged, by_peft, atol=1e-4)
    assert np.abs(merged - torch_logits(place.root / "folder")).max() > 0.1


@pytest.mark.wide
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
def test_tied_tables_are_merged(place: FinishedRun, tmp_path: Path) -> None:
    """Of a tied table that is trained whole beside adapters: the folder has one table, PEFT's and zero's logits."""
    size = dataclasses.replace(SIZE, tied=True)
    config = json.loads((place.root / "folder" / "config.json").read_text())
    shutil.copytree(place.root / "folder", tmp_path / "base")
    (tmp_path / "base" / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    tensors = load_file(tmp_path / "base" / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, tmp_path / "base" / "model.safetensors", {"format": "pt"})
    run = tmp_path / "tied"
    run.mkdir()
    more = (f"model.model_path={tmp_path / 'base'}", "tuning.modules_to_save=[vocabulary]", "training.total_steps=4")
    assert train(check(compose(*JOB, *more), Only(size)), size, run) == 0
    export(str(run), tmp_path / "adapters")
    export(str(run), tmp_path / "merged", merges=True)
    assert "lm_head.weight" not in load_file(tmp_path / "merged" / "model.safetensors")
    merged = torch_logits(tmp_path / "merged")
    np.testing.assert_allclose(merged, torch_logits(tmp_path / "base", tmp_path / "adapters"), atol=1e-4)
    model = ShardedGPT(size, zero.Axis("zero", (1, 1)), 0)
    weights = zero.to_host(warm_start(str(run), model), model.layout, model.axis)
    tokens = jnp.arange(40)[None] * 7 % 256
    last: Any = GPT(size, drops=False).apply({"params": weights}, tokens, method="logits")
    np.testing.assert_allclose(merged[:, -1], last[0], atol=1e-4)
    assert np.abs(merged - torch_logits(tmp_path / "base")).max() > 0.1


@pytest.mark.wide  # exchange/test_peft_folder.py trains DoRA beside PEFT
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
def test_run_with_magnitudes(place: FinishedRun, tmp_path: Path) -> None:
    """A run of DoRA starts where the base is; its folder, loaded by peft, computes as the merged weights."""
    run = tmp_path / "dora"
    run.mkdir()
    assert train(configured("tuning=dora", "training.total_steps=4"), SIZE, run) == 0
    first = cli.losses(run)[0]
    assert first == pytest.approx(cli.losses(place.run)[0], rel=1e-5)
    export(str(run), tmp_path / "adapters")
    export(str(run), tmp_path / "merged", merges=True)
    assert json.loads((tmp_path / "adapters" / "adapter_config.json").read_text())["use_dora"] is True
    by_peft, merged = torch_logits(place.root / "folder", tmp_path / "adapters"), torch_logits(tmp_path / "merged")
    np.testing.assert_allclose(merged, by_peft, atol=1e-4)
    assert np.abs(merged - torch_logits(place.root / "folder")).max() > 0.1


def test_peft_folder_starts_run(place: FinishedRun, tmp_path: Path) -> None:
    """A run may start from the adapters of a folder; keys that differ are refused by name."""
    export("run", tmp_path / "adapters")
    model = place_model(configured(f"tuning.adapter={tmp_path / 'adapters'}"), SIZE).model
    got = read_peft(tmp_path / "adapters", model)
    with Checkpoints(place.run / "checkpoints", None) as checkpoints:
        for leaf, x in zip(model.layout.leaves, model.layout.leaves_of(got), strict=True):
            whole = np.concatenate(np.asarray(x), leaf.splits[0].dim)[tuple(slice(n) for n in leaf.shape)]
            np.testing.assert_array_equal(whole, checkpoints.read(STEPS, f"params/{leaf.name}"))
    for override, line in (
        ("tuning.rank=2", "r is 4, expected tuning.rank=2"),
        ("tuning.alpha=1", "lora_alpha is 8.0, expected tuning.alpha=1"),
        ("tuning.targets=[query]", "tuning.targets has no product for it"),
        (
            "tuning.targets=[query,key]",
            r"k_proj.lora_A.weight: holds nothing, leaf blocks/key/lora_a expects \(4, 48\)",
        ),
    ):
        with pytest.raises(UserError, match=line):
            read_peft(tmp_path / "adapters", place_model(configured(override), SIZE).model)
    with pytest.raises(UserError, match=r"use_dora is False, expected with tuning=lora"):
        read_peft(tmp_path / "adapters", place_model(configured("tuning=dora"), SIZE).model)
    (tmp_path / "adapters" / "adapter_config.json").write_text('{"peft_type": "LORA", "use_qalora": true}')
    with pytest.raises(UserError, match="use_qalora is True, expected False"):
        read_peft(tmp_path / "adapters", model)


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (["model.warm_start=false"], "model.warm_start=false: expected true, as tuning=lora"),
        (["tuning.base_dtype=nf4", "zero.tensor_shards=2"], "tuning.base_dtype=nf4: expected float32 or bfloat16"),
        (["zero.fused_update=true"], "zero.fused_update=true: expected false, as tuning=lora"),
        (["tuning.dropout=0.1", "zero.tensor_shards=2"], "tuning.dropout=0.1: expected 0, as zero.tensor_shards=2"),
        (["tuning.targets=[querry]"], "tuning.targets=.*: expected products without querry, as it has none in"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_contradictions_are_refused(overrides: list[str], line: str) -> None:
    """Keys that do not fit adapters are refused by name."""
    with pytest.raises(UserError, match=line):
        configured(*overrides)


TASK = """
task: choice
dataset_path: json
dataset_kwargs: {data_files: {validation: choice.jsonl}}
validation_split: validation
output_type: multiple_choice
doc_to_text: text
doc_to_choice: choices
doc_to_target: gold
metric_list: [{metric: acc}]
"""


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The folders of transformers whose weights are read."""
    found, params = list[Path](), HuggingFaceFolder.params

    def counted(folder: HuggingFaceFolder, model: ShardedGPT, seed: int | None = None) -> Any:
        found.append(folder.path)
        return params(folder, model, seed)

    monkeypatch.setattr(HuggingFaceFolder, "params", counted)
    return found


@pytest.mark.wide
def test_two_adapters_in_one_evaluation(place: FinishedRun, tmp_path: Path, reads: list[Path]) -> None:
    """A run and the folder of PEFT that was made of it have an entry each; the base is read once."""
    export("run", tmp_path / "adapters")
    adapters = [str(place.run), str(tmp_path / "adapters")]
    config = configured("mode=evaluate", "model.model_path=run", f"evaluate.adapters=[{','.join(adapters)}]")
    assert evaluate(config, SIZE, tmp_path) == 0
    assert len(reads) == 1
    entries = json.loads((tmp_path / "evaluation.json").read_text())["adapters"]
    assert [(name, entry["step"]) for name, entry in entries.items()] == [(adapters[0], STEPS), (adapters[1], None)]
    last = list(read_metrics(place.run / "metrics.jsonl"))[-1]
    for entry in entries.values():
        assert entry["loss"] == pytest.approx(last["validation/loss"], rel=1e-5)


@pytest.mark.wide  # with a third set, of another base dtype, and tasks
def test_several_adapters_in_one_evaluation(
    place: FinishedRun, tmp_path: Path, reads: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each set of adapters, a run or a folder of PEFT, has the entry of its own evaluation; the base is read once."""
    other = tmp_path / "other"
    other.mkdir()
    job = ("training.total_steps=4", "tuning.targets=[value]", "tuning.rank=2", "tuning.base_dtype=bfloat16")
    assert train(configured(*job), SIZE, other) == 0
    export("run", tmp_path / "adapters")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    for name in ("folder", "corpus"):
        (tmp_path / name).symlink_to(place.root / name)
    lines = [{"text": "shard", "choices": [" gather", " scatter"], "gold": i % 2} for i in range(4)]
    Path("choice.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    Path("choice.yaml").write_text(TASK)
    adapters = [str(place.run), str(other), "adapters"]
    use = ("mode=evaluate", f"model.model_path={place.run}")
    together = tmp_path / "together"
    together.mkdir()
    reads.clear()  # the run of this test has read the base too
    config = configured(*use, f"evaluate.adapters=[{','.join(adapters)}]", "evaluate.harness=[choice.yaml]")
    assert evaluate(config, SIZE, together) == 0
    entries = json.loads((together / "evaluation.json").read_text())["adapters"]
    assert len(reads) == 1
    assert list(entries) == adapters
    assert [entry["step"] for entry in entries.values()] == [STEPS, 4, None]
    for run in (place.run, other):
        alone = tmp_path / f"alone-{run.name}"
        alone.mkdir()
        keys = ("tuning.base_dtype=bfloat16",) if run is other else ()
        assert evaluate(configured("mode=evaluate", f"model.model_path={run}", *keys), SIZE, alone) == 0
        assert entries[str(run)]["loss"] == json.loads((alone / "evaluation.json").read_text())["loss"]
    assert entries["adapters"]["loss"] == pytest.approx(entries[str(place.run)]["loss"], rel=1e-6)
    assert entries["adapters"]["harness"] == entries[str(place.run)]["harness"]
    assert entries["adapters"]["loss"] != entries[str(other)]["loss"]


def test_adapters_of_another_base_are_refused(
    place: FinishedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An evaluation of adapters names a run that trained all weights."""
    config = configured("mode=evaluate", "model.model_path=run", "evaluate.adapters=[nothing]")
    with pytest.raises(UserError, match="nothing: no weights; expected a run directory"):
        evaluate(config, SIZE, tmp_path)
