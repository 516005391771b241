"""Texts that are longer than a row, where TRL's trainers have a `max_length` of the same number of tokens."""

import importlib
import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from tests.helpers import trl_losses, trl_steps
from tests.helpers.brought import save_folder
from tests.helpers.corpora import make
from tests.helpers.loaders import open_loader
from zero.corpus.format.example import LABELLED, PAIR, TEXT, Example
from zero.corpus.preparing.prepare import Corpus
from zero.corpus.text.tokenizers import load_tokenizer
from zero.training.objectives.dpo import Dpo
from zero.training.objectives.kto import Kto
from zero.training.objectives.objective import LIKELIHOOD, Objective
from zero.training.objectives.orpo import Orpo
from zero.training.objectives.reward import Reward
from zero.training.objectives.simpo import Simpo

pytestmark = [*trl_steps.WARNS, pytest.mark.wide]

CONTEXT = trl_steps.CONTEXT
BETA = 0.4
LONG_WORDS = "layout 2048 " * 20
# Answers of unequal lengths; of the last lines a row cannot hold the chosen answer, the rejected one, both, the prompt.
LINES = [
    ("What is a shard? ", "A part.", "No."),
    ("gather ", "scatter scatter stage", "2048 2048"),
    ("layout? ", "don't", "2048"),
    ("stage ", "a", "user assistant user assistant"),
    ("user ", "zéro", "漢字 a b c d"),
    ("all ", "z" * 26, "b"),  # as long as a row
    ("chosen ", LONG_WORDS, "No."),
    ("rejected ", "Yes.", LONG_WORDS),
    ("both ", "a" + LONG_WORDS, LONG_WORDS),
    (LONG_WORDS, "a", "b"),
]
FITTING = 6  # lines
PAIRS = [dict(zip(("prompt", "chosen", "rejected"), line, strict=True)) for line in LINES]
# CPO and ORPO learn a space at the end of a prompt in the text alone whose answer merges with it, DPO in both texts.
UNMERGED = [
    {"prompt": prompt.removesuffix(" "), "chosen": " " + chosen, "rejected": " " + rejected}
    for prompt, chosen, rejected in LINES
]
ANSWERS = [
    {"prompt": prompt, "completion": answers[number % 2], "label": number % 2 == 0}
    for number, (prompt, *answers) in enumerate(LINES)
]


class Case(NamedTuple):
    """An objective, its lines, and the module, name and keys of TRL's trainer."""

    objective: Objective
    lines: list[dict[str, Any]]
    module: str
    name: str
    keys: dict[str, Any]


CASES = {
    "dpo": Case(Dpo(beta=BETA).objective(), PAIRS, "trl", "DPO", {"beta": BETA}),
    "kto": Case(
        Kto(beta=BETA).objective(), ANSWERS, "trl", "KTO", {"beta": BETA, "train_sampling_strategy": "sequential"}
    ),
    "orpo": Case(Orpo(beta=BETA).objective(), UNMERGED, "trl.experimental.orpo", "ORPO", {"beta": BETA}),
    "simpo": Case(
        Simpo(beta=2.0, gamma=0.7).objective(),
        UNMERGED,
        "trl.experimental.cpo",
        "CPO",
        {"loss_type": "simpo", "cpo_alpha": 0.0, "beta": 2.0, "simpo_gamma": 0.7},
    ),
    "reward": Case(Reward(center=0.05).objective(), PAIRS, "trl", "Reward", {"center_rewards_coefficient": 0.05}),
}


@pytest.fixture(scope="module")
def scored_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Qwen2 with a head of scores, and a tokenizer whose padding does not end texts."""
    folder = tmp_path_factory.mktemp("scored") / "folder"
    trl_steps.save_scored_folder(folder)
    return folder


@pytest.fixture(scope="module")
def one_end_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small OLMo 2, whose texts and turns end with the same token."""
    folder = tmp_path_factory.mktemp("one_end") / "folder"
    save_folder(folder, "olmo2")
    return folder


def ids_by_prompt(trainer: Any) -> dict[str, list[list[int]]]:
    """The ids of the texts of each example that the trainer keeps, as its collator gives them to the model."""
    found = {}
    for example in trainer.train_dataset:
        batch = trainer.data_collator([example])
        names = ["chosen_", "rejected_"] if "chosen_input_ids" in batch else [""]
        texts = []
        for name in names:
            ids, attended = (np.asarray(batch[f"{name}{kind}"]) for kind in ("input_ids", "attention_mask"))
            texts += [row[mask == 1].tolist() for row, mask in zip(ids, attended, strict=True)]
        found[example["prompt"]] = texts
    return found


def prepared(folder: Path, lines: list[dict[str, Any]], place: Path, **options: Any) -> Corpus:
    """One split, of rows of `CONTEXT` tokens by the tokenizer of the folder."""
    source = place / "lines.jsonl"
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    tokenizer = load_tokenizer(str(folder / "tokenizer.json"))
    return make(source, place, tokenizer=tokenizer, row_tokens=CONTEXT, validation_fraction=0.0, **options)


def read(
    corpus: Corpus, folder: Path, example: Example = TEXT, only_completions: bool = True
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """All texts `(examples * texts, CONTEXT)` in the order of the lines, and the numbers of the examples by name."""
    size = load_tokenizer(str(folder / "tokenizer.json")).vocab_size
    keys: dict[str, Any] = {"global_rows": corpus.train.rows, "context": CONTEXT, "max_epochs": 1, "shuffle": False}
    keys |= {"only_completions": only_completions, "example": example, "vocab_size": size}
    (batch,) = open_loader(corpus.train_index, **keys).batches()
    return batch.tokens.reshape(-1, CONTEXT), dict(batch.extra)


def ids_of(row: np.ndarray) -> list[int]:
    """Without padding, also those that are not learned."""
    kept = row[row != -1]
    return np.maximum(kept, ~kept).tolist()


@pytest.mark.parametrize("name", CASES)
def test_examples_that_trl_cuts_are_left_out(name: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """zero counts exactly these. Of the others ids are TRL's, and so are the losses of ten steps."""
    import transformers

    case = CASES[name]
    folder = request.getfixturevalue("scored_folder" if name == "reward" else "trl_folder")
    too_long = {line["prompt"] for line in case.lines[FITTING:]}
    module: Any = importlib.import_module(case.module)
    classes = getattr(module, f"{case.name}Trainer"), getattr(module, f"{case.name}Config")
    options = dict(case.keys)
    if name == "reward":
        options["auto"] = transformers.AutoModelForSequenceClassification
    trainers = [
        trl_steps.open_trainer(*classes, folder, case.lines, tmp_path / "trl", **{**options, "max_length": length})
        for length in (CONTEXT, 8 * CONTEXT)
    ]
    cut, whole = map(ids_by_prompt, trainers)
    assert {prompt for prompt, texts in whole.items() if cut.get(prompt) != texts} == too_long
    if name == "reward":
        assert not too_long & cut.keys()  # RewardTrainer leaves them out, as zero

    example = LABELLED if name == "kto" else PAIR
    corpus = prepared(folder, case.lines, tmp_path, examples=example.option.removeprefix("--"))
    assert (corpus.long, corpus.train.documents) == (len(LINES) - FITTING, FITTING)
    texts, extra = read(corpus, folder, example)
    kept = case.lines[:FITTING]
    for number, line in enumerate(kept):
        of_example = whole[line["prompt"]]  # of KTO without the answer of another prompt
        assert [ids_of(texts[2 * number + text]) for text in range(len(of_example))] == of_example

    trainer, expected = trl_steps.train(*classes, folder, kept, tmp_path / "kept", **options)
    found = trl_steps.steps_of_zero(folder, case.objective, texts, 2, 3, **extra)
    if name == "orpo":  # the paper's loss, of the odds that TRL logs; its likelihood also counts prompts
        logged = trainer.state.log_history[0]
        assert found.losses[0] == pytest.approx(-logged["logps/chosen"] - BETA * logged["log_odds_ratio"], rel=1e-4)
    else:
        trl_steps.assert_same(found, expected)


def of_trl(folder: Path, lines: list[dict[str, Any]], place: Path) -> trl_losses.OfTrl:
    """What SFTTrainer makes of the lines at a `max_length` of a row, and their loss."""
    return trl_losses.of_lines(folder, None, lines, place / "trl", CONTEXT)


def first_loss(folder: Path, rows: np.ndarray) -> float:
    """Of zero, on two devices."""
    return trl_steps.steps_of_zero(folder, LIKELIHOOD, rows, 2, 3).losses[0]


def test_cut_documents_are_those_of_transformers(one_end_folder: Path, tmp_path: Path) -> None:
    """Ids are those of `truncation=True` of a tokenizer that adds an end, which stays after the cut.

    TRL cuts the end off: its last token is one more of the text.
    """
    import transformers
    from tokenizers import Tokenizer, processors

    texts = ["a gather", "stage " * 13, LONG_WORDS, "zéro 漢字 " * 30]
    lines = [{"text": text} for text in texts]
    corpus = prepared(one_end_folder, lines, tmp_path, one_document_per_row=True, cut_documents=True)
    assert (corpus.cut, corpus.train.documents) == (2, 4)
    rows, _ = read(corpus, one_end_folder, only_completions=False)
    tokenizer = Tokenizer.from_file(str(one_end_folder / "tokenizer.json"))
    end = tokenizer.token_to_id("<|endoftext|>")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A <|endoftext|>", special_tokens=[("<|endoftext|>", end)]
    )
    with_end: Any = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    expected = with_end(texts, truncation=True, max_length=CONTEXT)["input_ids"]
    assert [ids_of(row) for row in rows] == expected

    theirs = of_trl(one_end_folder, lines, tmp_path)
    np.testing.assert_array_equal(rows[:, :-1], theirs.rows[:, :-1])
    assert rows[2:, -1].tolist() == [end, end] and end not in theirs.rows[2:]
    assert first_loss(one_end_folder, theirs.rows) == pytest.approx(theirs.loss, rel=1e-5)


def chat(*texts: str) -> dict[str, Any]:
    """A conversation of a user and an assistant in turn."""
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[number % 2], "content": text} for number, text in enumerate(texts)]}


def test_cut_conversations_are_whole_answers_of_trl(trl_folder: Path, tmp_path: Path) -> None:
    """Where TRL cuts within an answer, zero's row ends with the one before it; without one TRL learns a part."""
    whole = chat("a", "b")
    in_question = chat("", "b", "", "c", LONG_WORDS, "a")
    in_second = chat("gather?", "scatter", "stage?", LONG_WORDS)
    in_first = chat("what?", LONG_WORDS)
    without_answer = chat(LONG_WORDS, "a")
    lines = [whole, in_question, in_second, in_first, without_answer]
    theirs = of_trl(trl_folder, lines, tmp_path)
    assert len(theirs.rows) == 4  # TRL leaves the last one out too
    options = {"completions": True, "one_document_per_row": True, "cut_documents": True}
    corpus = prepared(trl_folder, lines, tmp_path, **options)
    rows, _ = read(corpus, trl_folder)
    assert (corpus.cut, corpus.long, len(rows)) == (2, 2, 3)
    end = load_tokenizer(str(trl_folder / "tokenizer.json")).special.answer_end
    for row, full in zip(rows, theirs.rows, strict=False):
        whole_answers = 1 + np.flatnonzero(full == end)[-1]
        np.testing.assert_array_equal(row, np.where(np.arange(CONTEXT) < whole_answers, full, -1))
    assert not (theirs.rows[3] == end).any() and (theirs.rows[3] >= 0).any()
    # Where no answer is cut, the same tokens are learned, whatever is read after them.
    expected = of_trl(trl_folder, lines[:2], tmp_path / "two").loss
    assert first_loss(trl_folder, rows[:2]) == pytest.approx(expected, rel=1e-5)
