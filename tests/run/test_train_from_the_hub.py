"""A folder as it is on the hub through all of zero: used at once, tuned on chats and preferences, merged, exported.

At each step its ids, losses, stops, texts and files are those of transformers, lm-evaluation-harness, PEFT and TRL.
"""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.helpers import cli, trl_losses
from tests.helpers.brought import MODELS, ODD, save_folder, texts
from tests.helpers.corpora import call
from tests.helpers.loaders import open_loader
from zero.base.errors import UserError
from zero.commands.cli import compose
from zero.corpus.format.example import PAIR, TEXT
from zero.exchange.export import export
from zero.exchange.hub_model import open_hf_model
from zero.inference import harness_tasks
from zero.inference.evaluate import evaluate
from zero.inference.sample import TEXTS_FILE, sample
from zero.run.train import train

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported

# PEFT asks transformers for a property that is deprecated there, and TRL's trainers warn of coming changes.
pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]
FAMILIES = [name for name in MODELS if name != "phi3"]  # PEFT has one adapter for products that Phi-3 fuses
SIZES: dict[str, dict[str, Any]] = {"small": {}, "odd": ODD}
SHORT = ("qwen2", ODD)  # of the wide tests: its tables are tied, and trained whole
STEPS, CONTEXT, BETA = 8, 64, 0.3
QUESTION = "What is a shard?"
DEVICES = "distributed.cpu_devices=8"
TUNING = ("tuning=lora", "tuning.rank=3", "tuning.alpha=7", "tuning.targets=[query,value]")
# Ranks and scales of their own, and embeddings that are trained whole.
PATTERNS = ("tuning.rank_pattern={query: 5}", "tuning.alpha_pattern={value: 11}", "tuning.modules_to_save=[vocabulary]")
OF_CHATS = (
    "data.tokenizer=data/corpus/chats/tokenizer.json",
    "data.index_path_validation=data/index/chats_validation.index",
    "training.loss_on=completion",
)
JOB = (
    *(key for key in cli.TINY if not key.startswith(("model.", "data.index", "data.max", "training.total"))),
    "model.warm_start=true",
    f"data.max_context={CONTEXT}",
    "training.peak_learning_rate=1e-2",
    f"training.total_steps={STEPS}",
    f"training.evaluation_frequency={STEPS}",
    "training.maximum_evaluation_steps=100",
)
CHATS = [
    [{"role": "user", "content": f"{i} {text[:20]}?"}, {"role": "assistant", "content": "A shard, I think."}]
    for i, text in enumerate(texts(60))
]
PAIRS = [
    {"prompt": chat[:1], "chosen": chat[1:], "rejected": [{"role": "assistant", "content": "No, " + "zéro" * (i % 3)}]}
    for i, chat in enumerate(CHATS)
]


def written(place: Path, *keys: str) -> str:
    """The text of mode=sample, up to its stop."""
    config, size = compose(["mode=sample", DEVICES, "sample.temperature=0", "sample.tokens=12", *keys])
    place.mkdir()
    assert sample(config, size, place) == 0
    return json.loads((place / TEXTS_FILE).read_text())["text"]


def evaluated(place: Path, *keys: str) -> dict[str, Any]:
    """The content of evaluation.json."""
    config, size = compose(["mode=evaluate", DEVICES, f"evaluate.context={CONTEXT}", *OF_CHATS, *keys])
    place.mkdir()
    assert evaluate(config, size, place) == 0
    return json.loads((place / "evaluation.json").read_text())


def trained(place: Path, *keys: str) -> list[dict[str, Any]]:
    """The lines of metrics of a run."""
    config, size = compose([*JOB, *keys])
    place.mkdir()
    assert train(config, size, place) == 0
    return cli.metrics(place)


def of_transformers(
    folder: Path, prompt: str, is_chat: bool, adapters: Path | None = None, skips_special: bool = False
) -> str:
    """The greedy text of transformers, up to its own stop; in float32, with the adapters of a folder in PEFT."""
    import peft
    import transformers

    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(adapters or folder)
    model = trl_losses.model_of(folder)
    if adapters is not None:
        model = peft.PeftModel.from_pretrained(model, adapters)
    encoded = tokenizer(prompt, return_tensors="pt")
    if is_chat:
        chat = [{"role": "user", "content": prompt}]
        encoded = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    tokens = model.generate(**encoded, do_sample=False, max_new_tokens=12)[0, encoded["input_ids"].shape[1] :].tolist()
    ends = model.generation_config.eos_token_id
    ends = ends if isinstance(ends, list) else [ends]
    stops = [i for i, token in enumerate(tokens) if token in ends]
    return tokenizer.decode(tokens[: stops[0]] if stops else tokens, skip_special_tokens=skips_special)


def prepared(name: str, lines: Sequence[Any], *options: str) -> None:
    """A corpus of these lines, with the tokenizer of the folder."""
    Path(f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    tokenizer = ("--tokenizer", "folder/tokenizer.json", "--row-tokens", str(CONTEXT))
    done = call(f"{name}.jsonl", *tokenizer, "--validation-fraction", "0.2", *options)
    assert done.returncode == 0, done.stderr
    assert "cut" not in done.stderr


def rows_of(name: str, split: str, vocabulary: int) -> list[tuple[int, ...]]:
    """The rows of a corpus; of pairs a chosen text with its rejected one."""
    options: dict[str, Any] = {
        "shuffle": False,
        "max_epochs": 1,
        "only_completions": True,
        "example": PAIR if name == "pairs" else TEXT,
    }
    index = f"data/index/{name}_{split}.index"
    loader = open_loader(index, global_rows=1, context=CONTEXT, vocab_size=vocabulary, **options)
    return [tuple(batch.tokens.ravel().tolist()) for batch in loader.batches()]


def in_validation(name: str, lines: Sequence[Any], theirs: np.ndarray, vocabulary: int) -> list[Any]:
    """The lines that are for validation, in order. The rows of the corpus are those of TRL, no more and no less."""
    own = [tuple(rows.ravel().tolist()) for rows in theirs.reshape(len(lines), -1)]
    validation = rows_of(name, "validation", vocabulary)
    assert sorted(own) == sorted([*rows_of(name, "train", vocabulary), *validation])
    return [line for line, row in zip(lines, own, strict=True) if row in set(validation)]


def save_tasks(folder: Path) -> list[dict[str, Any]]:
    """Tasks of the harness, as files: one that scores texts, one that chooses, and one that writes.

    Of the texts to write every second one is that of transformers, so that half of the answers are right.
    """
    prompts = [text for text in texts(40) if text][:4]
    right = [of_transformers(folder, prompt, is_chat=False, skips_special=True) for prompt in prompts]
    docs = [
        {"text": text, "choices": [" gather", " a shard", " zéro"], "gold": i % 3, "answer": right[i] + "?" * (i % 2)}
        for i, text in enumerate(prompts)
    ]
    Path("docs.jsonl").write_text("".join(json.dumps(doc) + "\n" for doc in docs))
    source: dict[str, Any] = {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"validation": "docs.jsonl"}, "cache_dir": "cache"},
        "validation_split": "validation",
    }
    tasks: list[dict[str, Any]] = [
        {"task": "rolling", "output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "text"},
        {"task": "choosing", "output_type": "multiple_choice", "doc_to_text": "text", "doc_to_target": "gold"},
        {"task": "writing", "output_type": "generate_until", "doc_to_text": "text", "doc_to_target": "answer"},
    ]
    tasks[0]["metric_list"] = [{"metric": "bits_per_byte"}]
    tasks[1]["doc_to_choice"] = "choices"
    tasks[2] |= {
        "generation_kwargs": {"until": [], "max_gen_toks": 12, "do_sample": False},
        "metric_list": [{"metric": "exact_match"}],
    }
    tasks = [{**source, **task} for task in tasks]
    for task in tasks:
        Path(f"{task['task']}.yaml").write_text(json.dumps(task))
    return tasks


def marks(family: str, size: dict[str, Any]) -> Any:
    """The tests of exchange/ have the parts of this way, each beside its library."""
    return pytest.mark.wide if (family, size) == SHORT else pytest.mark.slow


@pytest.mark.parametrize(
    ("family", "size"),
    [
        pytest.param(name, size, id=f"{name}-{size_name}", marks=marks(name, size))
        for name in FAMILIES
        for size_name, size in SIZES.items()
    ],
)
def test_a_folder_of_the_hub(family: str, size: dict[str, Any], tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "folder"
    save_folder(folder, family, **size)
    found = open_hf_model("folder")
    assert found is not None
    vocabulary = found.size.vocab_size

    # Used at once: texts and stops of transformers.
    for is_chat in (False, True):
        keys = ("model.model_path=folder", f"sample.prompt={QUESTION}", f"sample.chat={is_chat}")
        assert written(tmp_path / f"sample_{is_chat}", *keys) == of_transformers(folder, QUESTION, is_chat)

    # Its chats as a corpus with TRL's ids and learned tokens; its loss is TRL's, its tasks those of the harness.
    chats = [{"messages": chat} for chat in CHATS]
    prepared("chats", chats, "--completions", "--one-document-per-row")
    theirs = trl_losses.of_chats(folder, None, CHATS, tmp_path / "trl", CONTEXT)
    validation = in_validation("chats", CHATS, theirs.rows, vocabulary)
    tasks = save_tasks(folder)
    names = ",".join(f"{task['task']}.yaml" for task in tasks)
    before = evaluated(tmp_path / "before", "model.model_path=folder", f"evaluate.harness=[{names}]")
    expected = trl_losses.of_chats(folder, None, validation, tmp_path / "trl", CONTEXT)
    assert before["loss"] == pytest.approx(expected.loss, rel=1e-5)
    assert before["tokens"] == (expected.rows >= 0).sum()
    check_harness(folder, tasks, before["harness"])

    # Tuned on the chats. PEFT opens the adapters, TRL has their loss, and zero reads them beside their base.
    tuning = (*TUNING, *(PATTERNS if size else ()))
    lines = trained(
        tmp_path / "run",
        *("model.model_path=folder", "training.sample_tokens=8", *OF_CHATS, *tuning),
        "data.index_path_train=data/index/chats_train.index",
    )
    export("run", tmp_path / "adapters")
    expected = trl_losses.of_chats(folder, tmp_path / "adapters", validation, tmp_path / "trl", CONTEXT)
    assert lines[-1]["validation/loss"] == pytest.approx(expected.loss, rel=1e-5) and expected.loss < before["loss"]
    adapted = evaluated(tmp_path / "adapted", "model.model_path=folder", "evaluate.adapters=[adapters]")
    assert adapted["adapters"]["adapters"]["loss"] == pytest.approx(expected.loss, rel=1e-5)
    export("run", tmp_path / "merged", merges=True, dtype="float32")
    text = written(tmp_path / "tuned", "model.model_path=run", f"sample.prompt={QUESTION}", "sample.chat=true")
    assert text == of_transformers(tmp_path / "merged", QUESTION, is_chat=True)
    assert text == of_transformers(folder, QUESTION, is_chat=True, adapters=tmp_path / "adapters")

    # The merged folder learns preferences, but where a router would add a loss per token, which pairs do not have.
    copies = ["out", "adapters"]
    if found.size.experts is None:
        learn_preferences(tmp_path, tuning, vocabulary)
        copies += ["preferring_adapters", "whole"]
    else:
        with pytest.raises(UserError, match=r"expected likelihood, as model\.size=\S+merged has experts"):
            compose([*JOB, "model.model_path=merged", "objective=dpo", *tuning])
    export("run", tmp_path / "out", merges=True)
    check_files(folder, tmp_path, copies)


def learn_preferences(place: Path, tuning: Sequence[str], vocabulary: int) -> None:
    """The folder "merged" learns preferences, beside TRL with PEFT's adapters on it, and is merged again."""
    prepared("pairs", PAIRS, "--preferences")
    lines = trained(
        place / "preferring",
        *("model.model_path=merged", "objective=dpo", f"objective.beta={BETA}", *tuning),
        *(f"data.index_path_{split}=data/index/pairs_{split}.index" for split in ("train", "validation")),
        "data.tokenizer=data/corpus/pairs/tokenizer.json",
    )
    export("preferring", place / "preferring_adapters")
    merged, adapters = place / "merged", place / "preferring_adapters"
    rows = trl_losses.of_pairs(merged, adapters, PAIRS, place / "trl", CONTEXT, BETA).rows
    validation = in_validation("pairs", PAIRS, rows, vocabulary)
    expected = trl_losses.of_pairs(merged, adapters, validation, place / "trl", CONTEXT, BETA)
    assert lines[-1]["validation/loss"] == pytest.approx(expected.loss, rel=1e-4) and expected.loss < np.log(2)
    for name in ("rewards/chosen", "rewards/margins", "rewards/accuracies"):
        assert lines[-1][f"validation/{name}"] == pytest.approx(expected.metrics[name], rel=1e-4)

    # Merged and exported: the texts of transformers and PEFT, from the folder's own kind of files.
    export("preferring", place / "whole", merges=True, dtype="float32")
    text = written(place / "last", "model.model_path=whole", f"sample.prompt={QUESTION}", "sample.chat=true")
    assert text == of_transformers(place / "whole", QUESTION, is_chat=True)
    assert text == of_transformers(merged, QUESTION, is_chat=True, adapters=adapters)


def check_harness(folder: Path, tasks: list[dict[str, Any]], ours: dict[str, Any]) -> None:
    """Scores, choices and texts are those of the harness's own class for transformers."""
    from lm_eval.models.huggingface import HFLM

    model = HFLM(pretrained=str(folder), device="cpu", dtype="float32", max_length=CONTEXT, batch_size=1)
    theirs = harness_tasks._adapter_module().run(model, tasks)
    expected = theirs["rolling"]["bits_per_byte,none"]
    assert ours["rolling"]["bits_per_byte,none"] == pytest.approx(expected, rel=1e-5)
    assert ours["choosing"]["acc,none"] == theirs["choosing"]["acc,none"]
    assert ours["writing"]["exact_match,none"] == theirs["writing"]["exact_match,none"] == 0.5


def check_files(folder: Path, place: Path, copies: Sequence[str]) -> None:
    """The same folder but for its weights, in the dtype in which it came."""
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        for copy in copies:
            assert (place / copy / name).read_bytes() == (folder / name).read_bytes()
    theirs, ours = (json.loads((place / name / "config.json").read_text()) for name in ("folder", "out"))
    for key in ("dtype", "vocab_size", "tie_word_embeddings", "max_position_embeddings", "model_type", "architectures"):
        assert ours.get(key) == theirs.get(key)
    sizes = [(place / name / "model.safetensors").stat().st_size for name in ("folder", "out")]
    assert sizes[1] == pytest.approx(sizes[0], rel=0.05)
