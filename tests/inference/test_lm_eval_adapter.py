"""The model in EleutherAI's harness, against the harness's own class for transformers on the same model, exported."""

import dataclasses
import json
import os
import random
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import zero
from tests.helpers.brought import MODELS, save_folder
from zero.base.errors import Unavailable, UserError
from zero.checkpoints.manager import Checkpoints
from zero.corpus.text.chat_template import load_chat_template
from zero.corpus.text.tokenizers import load_tokenizer, train_tokenizer
from zero.exchange.export import export
from zero.exchange.hub_model import open_hf_model
from zero.exchange.warm_start import warm_start
from zero.inference import harness_tasks
from zero.inference.harness_tasks import adapter
from zero.inference.manner import Manner
from zero.inference.scoring import Scorer
from zero.inference.trained_model import TrainedModel
from zero.models.config import GPTConfig
from zero.models.families import FAMILIES
from zero.partition.global_arrays import from_global
from zero.partition.layout import derive_layout
from zero.training.sharded_gpt import ShardedGPT

CONTEXT = 48
GROUPED: dict[str, Any] = {"kv_heads": 2, "mlp_dim": 61}
CHANGES: dict[str, dict[str, Any]] = {
    "gpt2": {},
    "bloom": {},
    "gpt_neo": {"windows": (0, 7)},
    "gpt_neox": {"num_head": 3},
    "llama": GROUPED,
    "mistral": {**GROUPED, "windows": (9,)},
    "qwen3": GROUPED,
    "gemma2": {**GROUPED, "windows": (9, 0), "attention_cap": 3.0},
}
SIZES = {
    name: GPTConfig(
        **{
            "embedding_dim": 48,
            "vocab_size": 300,
            "num_head": 6,
            "block_size": CONTEXT,
            "dropout": 0.0,
            "N": 2,
            "vocab_chunks": 3,
            **FAMILIES[name],
            **changes,
        }
    )
    for name, changes in CHANGES.items()
}


@pytest.fixture(scope="module", autouse=True)
def few_tasks() -> Iterator[None]:
    """Of the harness's own tasks those of one folder: to read all 14,000 files takes eight CPU seconds."""
    import lm_eval
    from lm_eval.tasks import TaskManager

    from zero.inference import lm_eval_adapter

    folder = Path(lm_eval.__file__).parent / "tasks" / "lambada"
    manager = TaskManager(include_path=str(folder), include_defaults=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lm_eval_adapter, "_task_manager", lambda: manager)
        yield


def words(seed: int, count: int) -> str:
    pick = random.Random(seed)
    return " ".join(pick.choice(["shard", "gather", "scatter", "stage", "layout", "zéro"]) for _ in range(count))


@pytest.fixture(scope="module", params=["gpt2", *(pytest.param(name, marks=pytest.mark.slow) for name in [*SIZES][1:])])
def size(request: pytest.FixtureRequest) -> GPTConfig:
    """Of each family; the fast tests are of one."""
    return SIZES[request.param]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, size: GPTConfig) -> Path:
    """A tokenizer, a checkpoint of random weights, and both as a Hugging Face folder."""
    place = tmp_path_factory.mktemp("harness")
    (place / "bpe.json").write_bytes(train_tokenizer((words(seed, 50) for seed in range(20)), 300))
    model = ShardedGPT(size, zero.Axis("zero", (1, 1)), 0)
    rng = np.random.default_rng(0)
    params = model.layout.map(lambda leaf: rng.normal(0, 0.3, leaf.shape).astype(leaf.dtype))
    config = {"data": {"tokenizer": str(place / "bpe.json")}, "tuning": {"name": "none"}}
    meta = {"config": config, "size": dataclasses.asdict(size)}
    with Checkpoints(place / "run", keep=1) as checkpoints:
        checkpoints.save(1, {"params": params}, derive_layout(lambda p: {"params": p}, model.layout), meta)
    export(str(place / "run"), place / "hf")
    return place


@pytest.fixture(scope="module")
def ours(place: Path, size: GPTConfig) -> Any:
    model = ShardedGPT(size, zero.Axis("zero", (1, 8)), 3)
    with Checkpoints(place / "run", keep=None) as checkpoints:
        whole = checkpoints.restore(1, model.layout, model.axis, within="params")
    tokenizer = load_tokenizer(str(place / "bpe.json"))
    trained = TrainedModel(model, from_global(whole, model.layout, model.axis), tokenizer, 1)
    return adapter(Scorer(trained, CONTEXT, 8))


@pytest.fixture(scope="module")
def theirs(place: Path) -> Iterator[Any]:
    os.environ["HF_HUB_OFFLINE"] = "1"
    from lm_eval.models.huggingface import HFLM

    yield HFLM(
        pretrained=str(place / "hf"), device="cpu", batch_size=4, max_length=CONTEXT, attn_implementation="eager"
    )


def task(place: Path, name: str, items: list[dict[str, Any]], **said: Any) -> dict[str, Any]:
    (place / f"{name}.json").write_text("".join(json.dumps(item) + "\n" for item in items))
    files = {"validation": str(place / f"{name}.json")}
    source = {"dataset_path": "json", "dataset_kwargs": {"data_files": files, "cache_dir": str(place / "cache")}}
    return {"task": name, "validation_split": "validation", **source, **said}


@pytest.mark.wide
def test_tasks_equal_transformers(place: Path, ours: Any, theirs: Any) -> None:
    """Tasks give what transformers gets for the exported model."""
    choice = task(
        place,
        "choice",
        # Contexts from none to some that have to be cut.
        [
            {"text": words(i, i), "choices": [words(i + j, 1 + j) for j in (1, 2, 3)], "gold": i % 3}
            for i in range(1, 40)
        ],
        output_type="multiple_choice",
        doc_to_text="text",
        doc_to_choice="choices",
        doc_to_target="gold",
    )
    rolling = task(
        place,
        "rolling",
        [{"text": words(i, 3 * i)} for i in range(1, 25)],
        output_type="loglikelihood_rolling",
        doc_to_text="",
        doc_to_target="text",
        metric_list=[{"metric": "bits_per_byte"}, {"metric": "word_perplexity"}],
    )
    harness = harness_tasks._adapter_module()
    got, expected = (harness.run(model, [choice, rolling]) for model in (ours, theirs))
    assert set(got) == {"choice", "rolling"}
    assert got["choice"]["acc,none"] == expected["choice"]["acc,none"]
    for metric in ("bits_per_byte,none", "word_perplexity,none"):
        assert got["rolling"][metric] == pytest.approx(expected["rolling"][metric], rel=1e-5)


def test_documented_task(place: Path, ours: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The task of the documentation runs from its file."""
    page = (Path(__file__).parents[2] / "docs" / "how-to" / "evaluate.md").read_text(encoding="utf-8")
    (text,) = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    lines = [{"text": words(i, 3), "choices": ["shard", "gather stage"], "gold": i % 2} for i in range(8)]
    monkeypatch.chdir(place)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(place / "cache"))
    (place / "my_choices.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (place / "my_choices.yaml").write_text(text)
    results = harness_tasks._adapter_module().run(ours, ["my_choices.yaml"])
    assert 0 <= results["my_choices"]["acc,none"] <= 1


def test_batches_of_prompts(place: Path) -> None:
    """Prompts are batched by length, and a batch ends with the last stop of its prompts."""
    from lm_eval.api.instance import Instance

    from zero.inference.lm_eval_adapter import HarnessModel

    tokenizer = load_tokenizer(str(place / "bpe.json"))
    batches, yielded = [], []

    def write(prompts: Any, count: int) -> Iterator[list[np.ndarray]]:
        batches.append([len(prompt) for prompt in prompts])
        for length in range(4, count + 1, 4):
            yielded.append(length)
            yield [tokenizer.encode("shard gather" * 9)[:length] for _ in prompts]

    model = HarnessModel(tokenizer, 200, lambda passages: iter(()), write, rows=2)
    prompts = [words(i, n) for i, n in enumerate((40, 3, 41, 4))]
    requests = [
        Instance("generate_until", {}, (text, {"until": [" gather"], "max_gen_toks": 100}), i)
        for i, text in enumerate(prompts)
    ]
    texts = model.generate_until(requests)
    assert len(set(texts)) == 1 and "gather" not in texts[0] and texts[0].startswith("shard")
    assert [len(batch) for batch in batches] == [2, 2] and max(batches[0]) < min(batches[1])
    assert max(yielded) < 20  # not all 100 tokens


def test_losses_and_texts_equal_transformers(ours: Any, theirs: Any) -> None:
    """Losses and texts are those of transformers."""
    from lm_eval.api.instance import Instance

    def requests(kind: Any, *arguments: Any) -> list[Any]:
        return [Instance(kind, {}, one, i) for i, one in enumerate(arguments)]

    pairs = [(words(1, 3), " shard"), (words(2, 60), " gather zéro"), ("", "stage layout"), ("a ", "b")]
    got, expected = (model.loglikelihood(requests("loglikelihood", *pairs)) for model in (ours, theirs))
    np.testing.assert_allclose([x for x, _ in got], [x for x, _ in expected], rtol=1e-5, atol=1e-6)
    assert [hit for _, hit in got] == [hit for _, hit in expected]
    stop = theirs.generate_until(requests("generate_until", ("shard", {"until": [], "max_gen_toks": 12})))[0][2:5]
    asked = [(words(i, 4), {"until": until, "max_gen_toks": 12}) for i, until in enumerate(([], [stop], ["e", "a"]))]
    got, expected = (model.generate_until(requests("generate_until", *asked)) for model in (ours, theirs))
    assert got == expected and len(got[0]) > 3


# Keys of generation, and how many words the prompt has: some lose their beginning.
GENERATION: list[tuple[dict[str, Any], int]] = [
    ({"until": [], "max_gen_toks": 12}, 4),
    ({"until": ["e"], "max_new_tokens": 12}, 60),
    ({"until": "a", "max_tokens": 12}, 13),
    ({"max_completion_tokens": 12}, 14),
    ({"max_gen_toks": 12, "max_new_tokens": 3}, 5),
    ({"max_gen_toks": CONTEXT - 1}, 5),
    ({"max_gen_toks": CONTEXT}, 5),
    ({}, 5),
    *(({"until": until, "max_gen_toks": 12}, count) for until in (["st", "ga"], ["\n"], ["h"]) for count in (2, 60)),
    *(({"do_sample": False, "temperature": heat, "max_gen_toks": 12}, 9) for heat in (0.0, 0.7)),
    *(({"temperature": 0.0, "max_gen_toks": count}, 30) for count in (1, 12)),
    ({"until": ["shard"], "max_gen_toks": 28, "top_p": None}, 40),
    ({"until": [" "], "max_gen_toks": 28}, 1),
]


@pytest.mark.parametrize(
    ("options", "count"),
    [case if i in (1, 7) else pytest.param(*case, marks=pytest.mark.wide) for i, case in enumerate(GENERATION)],
)
def test_generation_equals_transformers(ours: Any, theirs: Any, options: dict[str, Any], count: int) -> None:
    """Under each name of the longest answer; an answer that leaves no place for its prompt is refused by both."""
    from lm_eval.api.instance import Instance

    requests = [Instance("generate_until", {}, (words(i, count), dict(options)), i) for i in range(2)]
    longest = next(iter(value for key, value in options.items() if key.startswith("max_")), 256)
    if longest >= CONTEXT:
        with pytest.raises(UserError, match=rf"evaluate.context={CONTEXT}: a task writes up to {longest} tokens"):
            ours.generate_until(requests)
        with pytest.raises(AssertionError, match="Invalid configuration"):
            theirs.generate_until(requests)
        return
    assert ours.generate_until(requests) == theirs.generate_until(requests)


def test_lost_beginnings_are_logged(ours: Any, caplog: pytest.LogCaptureFixture) -> None:
    from lm_eval.api.instance import Instance

    pairs = [(words(2, count), " gather zéro") for count in (3, 60)]
    ours.loglikelihood([Instance("loglikelihood", {}, pair, i) for i, pair in enumerate(pairs)])
    asked = [(text, {"max_gen_toks": 12}) for text, _ in pairs]
    ours.generate_until([Instance("generate_until", {}, one, i) for i, one in enumerate(asked)])
    line = f"1 of 2 requests lose the beginning of their prompt: evaluate.context is {CONTEXT} tokens"
    assert [record.message for record in caplog.records].count(line) == 2


@pytest.mark.parametrize(
    "family", [name if name == "gemma3" else pytest.param(name, marks=pytest.mark.slow) for name in MODELS]
)
def test_instruct_models_are_scored_as_published(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Chat template, system text, few shots and a limit: the prompts, texts and scores of the class for transformers.

    Gemma's template refuses a system text: both ask without it.
    """
    from lm_eval.models.huggingface import HFLM

    os.environ["HF_HUB_OFFLINE"] = "1"
    length = 256
    save_folder(tmp_path / "folder", family, max_position_embeddings=length)
    found = open_hf_model(str(tmp_path / "folder"))
    assert found is not None
    model = ShardedGPT(found.size, zero.Axis("zero", (1, 8)), 3)
    tokenizer = load_tokenizer(found.tokenizer())
    template = load_chat_template(found.tokenizer())
    assert template is not None
    trained = TrainedModel(model, warm_start(str(tmp_path / "folder"), model), tokenizer, None)
    ours = adapter(Scorer(trained, length, 8), template)
    theirs = HFLM(pretrained=str(tmp_path / "folder"), device="cpu", dtype="float32", batch_size=1, max_length=length)
    docs = [{"text": words(i, 4), "choices": [" gather", " zéro", "."], "gold": i % 3} for i in range(8)]
    common: dict[str, Any] = {"doc_to_text": "text", "doc_to_target": "gold", "fewshot_split": "validation"}
    choosing = task(tmp_path, "choosing", docs, output_type="multiple_choice", doc_to_choice="choices", **common)
    writing = task(tmp_path, "writing", docs, output_type="generate_until", **{**common, "doc_to_target": "text"})
    writing |= {"generation_kwargs": {"until": ["\n"], "max_gen_toks": 8}, "metric_list": [{"metric": "exact_match"}]}
    asked: dict[str, list[Any]] = {"ours": [], "theirs": []}
    for name, harness in (("ours", ours), ("theirs", theirs)):
        for kind in ("generate_until", "loglikelihood"):
            monkeypatch.setattr(harness, kind, recording(getattr(harness, kind), asked[name]))
    manner = Manner(template, "be short", few_shots=2, limit=4)
    run = harness_tasks._adapter_module().run
    results = [run(harness, [choosing, writing], manner) for harness in (ours, theirs)]
    assert [prompt for prompt, _ in asked["ours"]] == [prompt for prompt, _ in asked["theirs"]]
    assert len(asked["ours"]) == 4 * 3 + 4
    for (_, answer), (_, expected) in zip(asked["ours"], asked["theirs"], strict=True):
        if isinstance(answer, str):
            assert answer == expected
        else:
            assert answer[0] == pytest.approx(expected[0], rel=1e-4, abs=1e-4) and answer[1] == expected[1]
    assert results[0]["choosing"]["acc,none"] == results[1]["choosing"]["acc,none"]
    has_system = "be short" in asked["ours"][0][0][0]
    assert has_system != ("retrying without the system prompt" in caplog.text)


def recording(answer: Any, asked: list[Any]) -> Any:
    """The method of a model of the harness, which also keeps its requests and their answers."""

    def record(requests: Any, **options: Any) -> Any:
        answers = answer(requests, **options)
        asked.extend(zip([request.args for request in requests], answers, strict=True))
        return answers

    return record


def test_unanswerable_requests_are_refused(ours: Any) -> None:
    """Requests that cannot be answered are refused in one line."""
    from lm_eval.api.instance import Instance

    with pytest.raises(UserError, match=r"evaluate.context=48: a task scores \d+ tokens at once"):
        ours.loglikelihood([Instance("loglikelihood", {}, ("a", words(0, 100)), 0)])
    with pytest.raises(UserError, match="a task wants random samples"):
        ours.generate_until([Instance("generate_until", {}, ("a", {"do_sample": True}), 0)])
    with pytest.raises(UserError, match="a task sets num_beams=2, which zero does not support"):
        ours.generate_until([Instance("generate_until", {}, ("a", {"num_beams": 2, "max_gen_toks": 4}), 0)])


def test_missing_tasks_are_refused(ours: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tasks that do not exist are refused in one line."""
    import datasets

    with pytest.raises(UserError, match=r"evaluate.harness: nope: no such task; `lm_eval ls tasks` lists them"):
        harness_tasks._adapter_module().run(ours, ["nope"])
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    with pytest.raises(Unavailable, match=r"evaluate.harness: .*Couldn't reach 'EleutherAI/lambada_openai'"):
        harness_tasks._adapter_module().run(ours, ["lambada_openai"])


def test_missing_harness_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A missing installation of the harness is reported in one line."""
    monkeypatch.delitem(sys.modules, "zero.inference.lm_eval_adapter", raising=False)
    monkeypatch.delattr("zero.inference.lm_eval_adapter", raising=False)
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(UserError, match=r"lm_eval is missing; pip install -c .*constraints.txt -e '.*\[lm-eval\]'"):
        harness_tasks._adapter_module()


CHOICE = """
task: choice
dataset_path: json
dataset_kwargs: {data_files: {validation: FOLDER/docs.json}, cache_dir: FOLDER/cache}
validation_split: validation
output_type: multiple_choice
doc_to_text: "{{q}}"
doc_to_choice: ["a", "b"]
doc_to_target: 0
"""


@pytest.mark.parametrize(
    "text",
    [
        "task: [",
        "task: a\n\ttab",
        "5",
        "",
        "[1]",
        "\ud800",
        "[" * 1000,
        "task: alone",
        "task: [a]",
        "task: a\ninclude: nope.yaml",
        "task: a\nprocess_docs: !function nope.docs",
        "task: a\nprocess_docs: !!python/object/apply:os.nope []",
        CHOICE.replace('"{{q}}"', '"{{ 1 / 0 }}"'),
        CHOICE.replace('"{{q}}"', '"{% for"'),
        CHOICE.replace('"{{q}}"', '"{{ q.no.such }}"'),
        CHOICE.replace("multiple_choice", "nope"),
        CHOICE.replace('["a", "b"]', "5"),
        CHOICE.replace("doc_to_target: 0", "doc_to_target: 7"),
        CHOICE.replace("validation_split: validation", "validation_split: nope"),
        CHOICE.replace("docs.json", "absent.json"),
        CHOICE + "metric_list: 5",
        CHOICE + "metric_list: [{metric: nope}]",
        CHOICE + "filter_list: [{name: a, filter: [{function: nope}]}]",
        CHOICE + "num_fewshot: many",
        CHOICE + "nope: 1",
    ],
)
def test_wrong_task_files_are_refused(ours: Any, tmp_path: Path, text: str) -> None:
    """Wrong task files are refused in one line."""
    (tmp_path / "docs.json").write_text('{"q": "What?"}\n')
    path = tmp_path / "task.yaml"
    path.write_bytes(text.replace("FOLDER", str(tmp_path)).encode("utf-8", "surrogatepass"))
    with pytest.raises(UserError) as caught:
        harness_tasks._adapter_module().run(ours, [str(path)])
    assert str(caught.value).startswith(f"evaluate.harness: {path}: ") and "\n" not in str(caught.value)
    assert caught.value.status == 2


def test_tasks_are_known_by_their_documents(tmp_path: Path) -> None:
    """Other documents, examples in the prompt or settings give another digest; another place gives the same."""

    def digest(folder: Path, text: str, document: str, few_shots: int | None = None) -> str:
        folder.mkdir(exist_ok=True)
        (folder / "docs.json").write_text(f'{{"q": "{document}"}}\n')
        (folder / "task.yaml").write_text(text.replace("FOLDER", str(folder)))
        name = str(folder / "task.yaml")
        return harness_tasks.task_digests([name], Manner(few_shots=few_shots))[name]

    plain = digest(tmp_path / "one", CHOICE, "What?")
    assert digest(tmp_path / "two", CHOICE, "What?") == plain
    others = [
        digest(tmp_path / "one", CHOICE, "Who??"),
        digest(tmp_path / "one", CHOICE, "What?", few_shots=1),
        digest(tmp_path / "one", CHOICE.replace('"b"', '"c"'), "What?"),
    ]
    assert len({plain, *others}) == 4
    with pytest.raises(UserError, match=r"^evaluate.harness: nope: no such task"):
        harness_tasks.task_digests(["nope"], Manner())


def test_model_errors_are_no_task_errors(ours: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error of the model is not reported as one of the task."""
    (tmp_path / "docs.json").write_text('{"q": "What?"}\n')
    (tmp_path / "task.yaml").write_text(CHOICE.replace("FOLDER", str(tmp_path)))
    harness_tasks._adapter_module().run(ours, [str(tmp_path / "task.yaml")])

    def fail(passages: Any) -> Any:
        raise ValueError("of the model")

    monkeypatch.setattr(ours, "_score", fail)
    with pytest.raises(ValueError, match="of the model"):
        harness_tasks._adapter_module().run(ours, [str(tmp_path / "task.yaml")])


@pytest.mark.parametrize("answer", ["It is", "It is "])
def test_text_up_to_an_answer(answer: str) -> None:
    """What a template writes after the last answer is left out, also if the template strips the answer."""
    from zero.inference.lm_eval_adapter import _up_to

    assert _up_to("<a>\nIt is<end>", answer) == "<a>\nIt is"
