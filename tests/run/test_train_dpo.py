"""Direct preference optimization as a whole: JSON lines and a folder in; the reference's values, learned, resumed."""

import dataclasses
import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest

from tests.config.composing import Only, compose
from tests.helpers import cli, hosts, kills
from tests.helpers.checkpoints import leaves
from tests.helpers.corpora import call
from tests.helpers.loaders import open_loader
from tests.helpers.pair_runs import CONTEXT, JOB, LORA, SIZE, STEPS, TRAIN, VALIDATION, make_pairs
from zero.base.errors import UserError
from zero.base.keys import values_in_scores
from zero.commands.modes import check
from zero.corpus.format.example import PAIR
from zero.corpus.format.index_files import read_index
from zero.job.job import make_job, place_model
from zero.planning.compile import evaluation_arguments, step_arguments
from zero.planning.config import Request
from zero.run.column import Column, ColumnInputs
from zero.run.data import column_inputs
from zero.run.reference import reference_column
from zero.run.restore import TrainingPosition
from zero.training.objectives.dpo import METRICS

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported

NAMES = {metric.name for metric in METRICS}


class Place(NamedTuple):
    runs: cli.Lasting
    run: Path


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A folder of transformers and a corpus of pairs."""
    root = tmp_path_factory.mktemp("dpo")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        make_pairs(root)
        yield root


@pytest.fixture(scope="module")
def place(root: Path) -> Place:
    """A run of main_zero.py on 8 devices that has learned the pairs."""
    runs = cli.Lasting(root)
    return Place(runs, runs.train("run", *JOB))


def torch_values(index: str) -> np.ndarray:
    """The log-probability of each completion given its prompt by PyTorch, `(rows, 2)`, one text at a time."""
    import torch
    import transformers

    auto: Any = transformers.AutoModelForCausalLM
    model = auto.from_pretrained("folder")
    options: dict[str, Any] = {"shuffle": False, "max_epochs": 1, "only_completions": True, "example": PAIR}
    found = []
    for batch in open_loader(index, global_rows=1, context=CONTEXT, vocab_size=300, **options).batches():
        for text in batch.tokens.reshape(2, CONTEXT):
            own = text[: len(np.trim_zeros(text + 1, "b"))]
            ids = torch.tensor(np.maximum(own, ~own)[None]).long()
            with torch.no_grad():
                log_probabilities = model(ids).logits.log_softmax(-1)[0, :-1]
            per_token = log_probabilities[torch.arange(len(own) - 1), ids[0, 1:]].numpy()
            found.append(per_token[own[1:] >= 0].sum())
    return np.reshape(found, (-1, 2))


@pytest.mark.wide  # exchange/test_trl.py compares losses, of which the reference is a part, with TRL
def test_reference_is_that_of_pytorch(place: Place) -> None:
    """Values of PyTorch beside each index file."""
    for index in (TRAIN, VALIDATION):
        (path,) = Path(index).parent.glob(f"{Path(index).stem}.reference-*.npy")
        np.testing.assert_allclose(np.load(path), torch_values(index), rtol=1e-4, atol=1e-3)


# exchange/test_trl.py has the loss, the tests below what the references are of, and the arguments of the step.
@pytest.mark.wide
def test_preference_is_learned(place: Place) -> None:
    """The first loss is that of equal models; then the chosen texts are preferred, also in pairs not learned from."""
    lines = cli.metrics(place.run)
    assert lines[0]["train/loss"] == pytest.approx(np.log(2), abs=1e-4)
    assert abs(lines[0]["rewards/margins"]) < 1e-4 and set(NAMES) < set(lines[0])
    assert lines[-1]["rewards/accuracies"] == 1 and lines[-1]["train/loss"] < 0.5
    assert lines[-1]["validation/rewards/accuracies"] == 1 and lines[-1]["validation/loss"] < 0.5
    assert lines[-1]["logps/chosen"] > lines[-1]["logps/rejected"]
    assert lines[-1]["tokens_seen"] == STEPS * 16 * 2 * CONTEXT


@pytest.mark.wide
def test_resumed_bit_for_bit(place: Place) -> None:
    """A run that continues from the middle is the same, bit for bit, and reads the values that were stored."""
    before = {path: path.stat().st_mtime_ns for path in Path("data/index").glob("*.npy")}
    assert cli.metrics(place.runs.fork("run", STEPS // 2)) == cli.metrics(place.run)
    assert {path: path.stat().st_mtime_ns for path in Path("data/index").glob("*.npy")} == before


@pytest.mark.slow
def test_adapters_on_their_base(place: Place) -> None:
    """Adapters learn with their base as the reference, and are resumed bit for bit; nothing is stored."""
    before = set(Path("data/index").iterdir())
    run = place.runs.train("lora", *JOB, *LORA, "zero.stage=2")
    lines = cli.metrics(run)
    assert lines[0]["train/loss"] == pytest.approx(np.log(2), abs=1e-4)
    assert lines[-1]["train/loss"] < 0.6 and lines[-1]["validation/rewards/accuracies"] > 0.9
    assert cli.metrics(place.runs.fork("lora", STEPS // 2)) == lines
    assert set(Path("data/index").iterdir()) == before


RESUMED = {
    "QLoRA in copies": (*LORA, "tuning.base_dtype=nf4", "zero.replicas=2"),
    "copies that send bytes": ("zero.replicas=2", "zero.replica_wire_dtype=int8"),
    "8 bits": ("zero.product_dtype=int8", "zero.gather_dtype=products", "optimizer.state_dtype=int8"),
    "offload": ("zero.offload=both", "zero.fused_update=true", "training.gradient_accumulation_steps=1"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", RESUMED)
def test_resumed_with(name: str, place: Place) -> None:
    """Beside what changes arithmetic or places, the reference is scored as the model is, and a resume is exact."""
    run = place.runs.train(name, *cli.later_values(*JOB, *RESUMED[name]))
    lines = cli.metrics(run)
    assert lines[0]["train/loss"] == pytest.approx(np.log(2), abs=1e-4) and abs(lines[0]["rewards/margins"]) < 1e-4
    assert lines[-1]["train/loss"] < 0.6 and lines[-1]["validation/rewards/accuracies"] > 0.9
    assert cli.metrics(place.runs.fork(name, STEPS // 2)) == lines


@pytest.mark.slow
def test_killed_with_quantized_base(root: Path) -> None:
    """A run of QLoRA on two copies of the state that was killed after a save ends as one that was left alone."""
    forks = cli.Forks(root)
    job = cli.later_values(*JOB, *RESUMED["QLoRA in copies"])
    calm = forks.train("calm", *job)
    with cli.customized(kills.at(kills.Rule("os.rename", rf"/checkpoints/{STEPS // 2}$", "kill after"))):
        assert forks.run(*job, "hydra.run.dir=killed").returncode == -signal.SIGKILL
    forks.check("--resume", "hydra.run.dir=killed")
    assert cli.metrics(root / "killed") == cli.metrics(calm)


# Two hosts are what two dimensions of a TPU slice, or two slices with one state, are: collectives in two phases.
TWO_SLICES = "import zero.job.devices\nzero.job.devices.slices_of = lambda devices: 2\n"
PHASES = {"dimensions": ("", "zero.phases=torus"), "slices": (TWO_SLICES, "zero.replicas=1")}


@pytest.mark.wide
def test_two_hosts_read_the_weights_of_one(root: Path) -> None:
    """Each host holds the shards of its devices alone; a learning rate of zero keeps them as they are."""
    still = ("training.peak_learning_rate=0", "training.end_learning_rate=0", "training.warmup_steps=1")
    job = cli.later_values(*JOB, *still, f"training.total_steps={STEPS // 2}")
    one = cli.Forks(root).train("still-one", *job, "distributed.cpu_devices=4")
    done = hosts.finish(hosts.start_forked([root] * 2, *job, "distributed.cpu_devices=2", "hydra.run.dir=still-two"))
    assert [host.returncode for host in done] == [0, 0], [host.stderr for host in done]
    expected, got = leaves(one, STEPS // 2, "params/"), leaves(root / "still-two", STEPS // 2, "params/")
    assert got.keys() == expected.keys()
    for name, x in expected.items():
        np.testing.assert_array_equal(got[name], x, err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("kind", PHASES)
def test_killed_in_phases_of_two_hosts(kind: str, root: Path) -> None:
    """Collectives within hosts, then across them: a host that is killed after a save and resumed changes nothing."""
    hosts_as, phases = PHASES[kind]
    job = cli.later_values(*JOB, "distributed.cpu_devices=4", "training.batch_size=8")

    def run(directory: str, *more: str) -> list[int]:
        arguments = cli.later_values(*job, *more, f"hydra.run.dir={directory}-{kind}")
        done = hosts.finish(hosts.start([root] * 2, *arguments))
        return [one.returncode for one in done]

    assert run("flat") == [0, 0]
    with cli.customized(hosts_as):
        assert run("calm", phases) == [0, 0]
    with cli.customized(hosts_as + kills.at(kills.Rule("os.rename", rf"/checkpoints/{STEPS // 2}$", "kill after"))):
        assert -signal.SIGKILL in run("struck", phases)
    with cli.customized(hosts_as):
        assert run("struck", phases, "--resume") == [0, 0]
    calm = root / f"calm-{kind}"
    assert cli.metrics(root / f"struck-{kind}") == cli.metrics(calm)
    assert cli.losses(calm) == pytest.approx(cli.losses(root / f"flat-{kind}"), rel=1e-4)


@pytest.mark.wide  # test_identity.py refuses other contents, the test below computes values anew
def test_pairs_prepared_again(place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other pairs under the same name, as many: their values are computed anew, and a resume on them is refused."""
    shutil.copytree("folder", tmp_path / "folder")
    shutil.copy("sizes.yaml", tmp_path)
    shutil.copytree("run", tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    arguments = ("pairs.jsonl", "--preferences", "--row-tokens", str(CONTEXT), "--validation-fraction", "0.2")
    old = [len(np.load(place.runs.workplace / path)) for path in sorted(reference_files(place.runs.workplace))]
    # A hash of the texts decides which pairs are for validation; of these as many as before.
    answers = {"chosen": "maybe 9", "rejected": "certainly"}
    lines = [json.dumps({"prompt": f"{i} and {i % 12}? ", **answers}) for i in range(144)]
    Path("pairs.jsonl").write_text("".join(line + "\n" for line in lines))
    assert call(*arguments).returncode == 0
    assert [sum(shard.rows for shard in read_index(index)) for index in (TRAIN, VALIDATION)] == old
    for name in reference_files(place.runs.workplace):
        shutil.copy(place.runs.workplace / name, name)
    runs = cli.Lasting(tmp_path)
    run = runs.train("again", *JOB)
    assert cli.metrics(run)[0]["train/loss"] == pytest.approx(np.log(2), abs=1e-4)
    assert len(reference_files(tmp_path)) == 4
    cli.check_refusal(
        runs.run("--resume", "hydra.run.dir=run", f"training.total_steps={2 * STEPS}"), f"{TRAIN} has as many rows"
    )


def test_replaced_reference(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other weights at the path of the reference: a new run computes anew, and the old one refuses them."""
    import safetensors.numpy

    for name in ("folder", "data"):
        shutil.copytree(name, tmp_path / name)
    monkeypatch.chdir(tmp_path)
    config: Any = configured()
    job = make_job(config, place_model(config, SIZE))
    first = TrainingPosition(global_rows=config.training.batch_size)
    old = reference_column(inputs_of(config), job, first)
    assert len(reference_files(tmp_path)) == 2
    weights = Path("folder", "model.safetensors")
    arrays = safetensors.numpy.load_file(weights)
    arrays["model.norm.weight"][0] += 1
    safetensors.numpy.save_file(arrays, weights, {"format": "pt"})
    kept = reference_column(inputs_of(config), job, first)  # of the run that began with the old ones, which are stored
    first_of_new = TrainingPosition(global_rows=config.training.batch_size)
    new = reference_column(inputs_of(config), job, first_of_new)
    np.testing.assert_array_equal(values_of(kept), values_of(old))
    assert np.abs(values_of(new) - values_of(old)).max() > 1e-3 and len(reference_files(tmp_path)) == 4
    (path,) = (name for name in reference_files(tmp_path) if np.array_equal(np.load(name), values_of(new)))
    for damaged, message in ((0.0, "other values than were stored, by their SHA-256; remove it"), (9.0, "SHA-256")):
        check_damage(Path(path), damaged, message, lambda: reference_column(inputs_of(config), job, first_of_new))
    for name in reference_files(tmp_path):
        Path(name).unlink()
    with pytest.raises(UserError, match=r"^model.model_path=folder: the run has other weights as its reference, th"):
        reference_column(inputs_of(config), job, first)


def check_damage(path: Path, value: float, message: str, read: Callable[[], Column]) -> None:
    """Half of the stored values are replaced: they are refused, or without their digest only impossible ones."""
    whole = path.read_bytes()
    array = np.load(path)
    array[: len(array) // 2] = value
    header = len(whole) - 32 - array.nbytes
    path.write_bytes(whole[:header] + array.tobytes() + whole[-32:])
    with pytest.raises(UserError, match=rf"{path}: .*{message}"):
        read()
    np.save(path, array)  # as an earlier version has written them
    if value > 0:
        with pytest.raises(UserError, match=rf"{path}: expected logarithms of probabilities"):
            read()
    else:
        np.testing.assert_array_equal(values_of(read()), array)
    path.write_bytes(whole)


def values_of(column: Column) -> np.ndarray:
    return column.stored[TRAIN]["reference"][:]


@pytest.mark.wide
@pytest.mark.parametrize("key", ["zero.product_dtype=int8", "zero.gather_dtype=int8"])
def test_reference_in_other_arithmetic(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str) -> None:
    """Rounded products or gathers have log-probabilities of their own: those of exact ones are not taken for them."""
    for name in ("folder", "data"):
        shutil.copytree(name, tmp_path / name, ignore=shutil.ignore_patterns("*.reference-*"))
    monkeypatch.chdir(tmp_path)
    stored = []
    for overrides in ((), (key,)):
        config: Any = configured(*overrides)
        made = make_job(config, place_model(config, SIZE))
        column = reference_column(inputs_of(config), made, TrainingPosition(config.training.batch_size))
        stored.append(values_of(column))
    assert len(reference_files(tmp_path)) == 4 and np.abs(stored[1] - stored[0]).max() > 1e-6


def reference_files(workplace: Path) -> list[str]:
    return [str(path.relative_to(workplace)) for path in workplace.glob("data/index/*.reference-*.npy")]


@pytest.mark.wide
def test_damaged_reference_is_named(place: Place, tmp_path: Path) -> None:
    (path,) = Path("data/index").glob("pairs_train.reference-*.npy")
    data = path.read_bytes()
    try:
        path.write_bytes(data[:-40])  # its SHA-256 and two values
        cli.check_refusal(place.runs.run(*JOB, f"hydra.run.dir={tmp_path}"), f"{path} is not a complete .npy array")
    finally:
        path.write_bytes(data)


def inputs_of(config: Any) -> ColumnInputs:
    return column_inputs(config.data, config.model, values_in_scores(config), has_sets=True)


def configured(*overrides: str) -> Any:
    return check(compose(*(o for o in JOB if "model.size" not in o), "model.size=mine", *overrides), Only(SIZE))


@pytest.mark.parametrize("objective", ["dpo", "kto"])
def test_plan_has_the_texts_of_examples(objective: str) -> None:
    """A planned step and evaluation take two texts per example of a micro-batch, and what the objective reads."""
    config = configured("mode=plan", "plan.micro_batch=3", f"objective={objective}")
    request, job = Request(config, SIZE, 3), make_job(config, place_model(config, SIZE))
    arguments = step_arguments(job, request.rows, CONTEXT)
    assert arguments[1].tokens.shape == (8, 3 * 2 * 2, CONTEXT)
    extra = {"reference": (8, 3 * 2 * 2)} | dict.fromkeys(job.objective.example.members, (8, 3 * 2))
    assert {name: x.shape for name, x in arguments[1].extra.items()} == extra
    _, metrics = jax.eval_shape(job.programs.step, *arguments)
    assert set(job.objective.names) < set(metrics)
    _, _, sums = jax.eval_shape(job.programs.evaluate, *evaluation_arguments(job, request))
    assert set(sums) == set(job.objective.names)


def test_contradictions_are_refused() -> None:
    """Keys that do not fit pairs, or a stored reference, are refused by name, all at once."""
    wrong = {
        "model.warm_start=false": "true, as the reference of objective=dpo",
        "training.staged_warmup_steps=2": "0, as objective=dpo compares whole texts",
        "data.corpus=stdlib": "null, as zero-prepare --preferences",
        "data.crop=all": "first, as a row is one text",
        "data.isolate_documents=true": "false, as a row is one text",
        "data.max_skipped_rows=5": "0, as objective=dpo reads reference",
    }
    with pytest.raises(UserError) as error:
        configured(*wrong, "training.warmup_train_context=8")
    lines = str(error.value).splitlines()
    for line, (given, expected) in zip(sorted(lines), sorted(wrong.items()), strict=True):
        assert line.startswith(f"{given}: expected {expected}")
    with pytest.raises(
        UserError, match=r"evaluate.index=null: expected an index file of texts, as data.index_path_val"
    ):
        configured("mode=evaluate")
    configured("data.max_skipped_rows=5", *LORA)
    with pytest.raises(
        UserError,
        match=r"objective=dpo: expected likelihood, or another on running text, as model\.size=siz",
    ):
        check(compose(*JOB), Only(dataclasses.replace(SIZE, z_loss=1e-4)))
