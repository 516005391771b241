"""Fine-tuning as a whole: JSON lines and a folder of transformers in; losses as PyTorch has them, resumed exactly."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import zero
from tests.config.composing import Only, compose
from tests.helpers import cli, llama
from tests.helpers.corpora import call
from tests.helpers.lasting import KEYS
from tests.helpers.loaders import open_loader
from tests.helpers.shared_jobs import FinishedRun, SharedJobs
from zero.base.errors import UserError
from zero.base.keys import with_values
from zero.checkpoints.manager import Checkpoints
from zero.commands.modes import check, merge_resumed
from zero.corpus.text.tokenizers import load_tokenizer, train_tokenizer
from zero.exchange.warm_start import warm_start
from zero.inference.evaluate import evaluate
from zero.inference.outputs.validation import score_validation_set
from zero.inference.sample import sample
from zero.inference.scoring import Scorer
from zero.inference.trained_model import TrainedModel
from zero.job.job import place_model
from zero.record.metrics_file import read_metrics
from zero.record.run_files import saved_config
from zero.run.train import train
from zero.training.optimizers.optimizer import adamw
from zero.training.sharded_gpt import ShardedGPT
from zero.training.step import state_layout

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported

CONTEXT, STEPS = 48, 6
SIZE = llama.size(CONTEXT, dropout=0.1)
TEMPLATE = (
    "{% for message in messages %}{{ message.role + ': ' + message.content + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)
JOB = (
    *(option for option in cli.TINY if not option.startswith(("model.", "data.", "training.total", "training.eval"))),
    "model.size=mine",
    "model.warm_start=true",
    "model.model_path=folder",
    "data.corpus=null",
    "data.wandb_project=null",
    "data.tokenizer=folder/tokenizer.json",
    "data.index_path_train=data/index/questions_train.index",
    "data.index_path_validation=data/index/questions_validation.index",
    "data.isolate_documents=true",
    "training.loss_on=completion",
    "training.peak_learning_rate=3e-3",
    f"training.total_steps={STEPS}",
    f"training.evaluation_frequency={STEPS // 2}",
    "training.maximum_evaluation_steps=100",
)


def configured(*overrides: str) -> Any:
    return check(compose(*JOB, *overrides), Only(SIZE))


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Any:
    root = tmp_path_factory.mktemp("fine_tune")
    folder = root / "folder"
    llama.save(folder, CONTEXT)
    (folder / "tokenizer.json").write_bytes(train_tokenizer(["user: assistant: What is plus?"] * 9, 300))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    lines: list[dict[str, Any]] = [
        {"prompt": f"What is {i} plus {j}?", "completion": f" {i + j}, I think." * (1 + j % 3)}
        for i in range(12)
        for j in range(12)
    ]
    for line in lines[::3]:
        said = (line.pop("prompt"), line.pop("completion"), "So?", "Yes")
        roles = ("user", "assistant", "user", "assistant")
        line["messages"] = [{"role": role, "content": text} for role, text in zip(roles, said, strict=True)]
    (root / "questions.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        options = ("--completions", "--tokenizer", "folder/tokenizer.json", "--row-tokens", str(CONTEXT))
        done = call("questions.jsonl", *options, "--validation-fraction", "0.1")
        assert done.returncode == 0, done.stderr
        run = root / "run"
        run.mkdir()
        jobs = SharedJobs(KEYS)
        with jobs.shared([]):
            assert train(configured(), SIZE, run) == 0
        yield FinishedRun(root, run, jobs)


def state(run: Path, step: int) -> list[Any]:
    axis = zero.Axis("zero", (1, 8))
    with Checkpoints(run / "checkpoints", None) as checkpoints:
        model = ShardedGPT(SIZE, axis, 3)
        layout = state_layout(model, adamw(0.1, axes=model.axes))
        return jax.tree.leaves(checkpoints.restore(step, layout, axis))


def rows(index: str, only_completions: bool = True) -> np.ndarray:
    options: dict[str, Any] = {"shuffle": False, "max_epochs": 1, "only_completions": only_completions}
    loader = open_loader(index, global_rows=1, context=CONTEXT, vocab_size=300, **options)
    return np.concatenate([batch.tokens for batch in loader.batches()])


@pytest.mark.wide  # exchange/test_trl.py compares completions of chats with TRL
def test_losses_equal_pytorch(place: FinishedRun) -> None:
    """Losses before training are those of PyTorch on single documents.

    Each document, or what a row has of it, alone: over the tokens of its completions.
    """
    import torch
    import transformers

    config = configured()
    model = place_model(config, SIZE).model
    tokenizer = load_tokenizer(config.data.tokenizer)
    trained = TrainedModel(model, warm_start("folder", model), tokenizer, 0)
    index = str(config.data.index_path_validation)
    got = score_validation_set(Scorer(trained, CONTEXT, 8), index, 1, only_completions=True).means()

    auto: Any = transformers.AutoModelForCausalLM
    theirs = auto.from_pretrained("folder")
    nats, count = 0.0, 0
    for row in rows(index):
        ids = np.maximum(row, ~row)[: len(np.trim_zeros(row + 1, "b"))]
        ends = np.flatnonzero(ids == tokenizer.end_of_text).tolist()
        starts = [
            0,
            *(end + 1 for end in ends),
        ]  # a document begins after the divider, and its first token is no target
        for start, stop in zip(starts, [*ends, len(ids) - 1], strict=True):
            own = slice(start, stop + 1)
            labels = np.where(row[own] >= 0, ids[own], -100)
            scored = int((labels[1:] >= 0).sum())
            if scored:
                batch = {"input_ids": torch.tensor(ids[None, own]).long(), "labels": torch.tensor(labels[None]).long()}
                nats, count = nats + scored * theirs(**batch).loss.item(), count + scored
    assert got["tokens"] == count > 50
    assert got["loss"] == pytest.approx(nats / count, rel=1e-5)


def test_completions_are_learned(place: FinishedRun) -> None:
    lines = read_metrics(place.run / "metrics.jsonl")
    losses = [line["validation/loss"] for line in lines if "validation/loss" in line]
    assert len(losses) == 2 and losses[1] < losses[0] - 0.1


@pytest.mark.wide  # other runs are
def test_resumed_bit_for_bit(place: FinishedRun, tmp_path: Path) -> None:
    """A resumed run is the same, bit for bit.

    Forked from the middle.
    """
    overrides = ["data.resume_step=3", "resume=run"]
    config = check(merge_resumed(saved_config(place.run), compose(*JOB, *overrides), overrides), Only(SIZE))
    assert config.training.loss_on == "completion" and config.data.isolate_documents
    again = tmp_path / "again"
    again.mkdir()
    with place.jobs.shared([]):
        assert train(config, SIZE, again) == 0
    keys = ("step", "train/loss", "validation/loss", "gradient_norm", "samples_checksum")
    got, expected = (
        [[line.get(key) for key in keys] for line in read_metrics(run / "metrics.jsonl")] for run in (again, place.run)
    )
    assert got == expected
    for x, y in zip(state(again, STEPS), state(place.run, STEPS), strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.wide  # inference/ has both modes
def test_evaluated_and_sampled(place: FinishedRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The model is evaluated as it was trained, and sampled."""
    config = configured("mode=evaluate", "model.model_path=run")
    assert evaluate(config, SIZE, tmp_path) == 0
    result = json.loads((tmp_path / "evaluation.json").read_text())
    last = read_metrics(place.run / "metrics.jsonl")[-1]
    assert result["loss"] == pytest.approx(last["validation/loss"], rel=1e-5)
    lengths = load_tokenizer("folder/tokenizer.json").byte_lengths()
    whole = rows("data/index/questions_validation.index")
    scored = whole[:, 1:]
    is_first = np.maximum(whole, ~whole)[:, :-1] == 0  # of a document, after the divider
    assert result["bytes"] == lengths[scored[(scored >= 0) & ~is_first]].sum()
    sampled = configured("mode=sample", "model.model_path=run", "sample.prompt='What is 1 plus 1?'", "sample.tokens=8")
    assert sample(sampled, SIZE, tmp_path) == 0
    assert capsys.readouterr().out.count("What is 1 plus 1?") == 1
    assert json.loads((tmp_path / "samples.jsonl").read_text())["text"]


def test_chat_template(place: FinishedRun, tmp_path: Path) -> None:
    """A chat is sampled with the template that was learned."""
    options = ("mode=sample", "model.model_path=run", "sample.tokens=8", "sample.temperature=0")
    texts = []
    for number, overrides in enumerate((["So?", "true"], ["user: So?\nassistant: ", "false"])):
        config = with_values(configured(*options, f"sample.chat={overrides[1]}"), {"sample.prompt": overrides[0]})
        (tmp_path / str(number)).mkdir()
        assert sample(config, SIZE, tmp_path / str(number)) == 0
        texts.append(json.loads((tmp_path / str(number) / "samples.jsonl").read_text())["text"])
    assert texts[0] == texts[1]
    without = tmp_path / "without"  # all files of the tokenizer but its template
    shutil.copytree("data/corpus/questions", without, ignore=shutil.ignore_patterns("*.tar", "chat_template.jinja"))
    config = with_values(config, {"sample.chat": True, "data.tokenizer": str(without / "tokenizer.json")})
    with pytest.raises(UserError, match=r"sample\.chat=true: data\.tokenizer=.* has no chat template beside it"):
        sample(config, SIZE, tmp_path)


def test_other_tokenizer_and_texts_are_refused(place: FinishedRun, tmp_path: Path) -> None:
    """Another tokenizer and a corpus of texts are refused."""
    with pytest.raises(UserError, match=r"data\.tokenizer: corpus data/corpus/questions was prepared.*not bytes"):
        train(configured("data.tokenizer=bytes"), SIZE, tmp_path)
    (place.root / "texts.jsonl").write_text("".join(json.dumps({"text": f"text {i}"}) + "\n" for i in range(99)))
    done = call("texts.jsonl", "--tokenizer", "folder/tokenizer.json", "--row-tokens", str(CONTEXT))
    assert done.returncode == 0, done.stderr
    texts = [f"data.index_path_{split}=data/index/texts_{split}.index" for split in ("train", "validation")]
    with pytest.raises(UserError, match=r"has no member completion\.npy"):
        train(configured(*texts, "training.batch_size=8", "training.gradient_accumulation_steps=1"), SIZE, tmp_path)
