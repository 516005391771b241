"""The ids of brought tokenizers, of texts, prompts, conversations, documents and requests: those of transformers."""

import json
import logging
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.helpers import brought
from tests.helpers.brought import CHATS, HOMES, TOOLS, save_tokenizer
from zero.base.errors import UserError
from zero.corpus.preparing.documents import Document
from zero.corpus.preparing.tokenize_documents import UnitTokenizer
from zero.corpus.text.chat_template import load_chat_template
from zero.corpus.text.special_tokens import companions
from zero.corpus.text.tokenizers import FileTokenizer, encode_prompt, load_tokenizer

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported
TEXTS = brought.texts(100)


def both(folder: Path, family: str) -> tuple[FileTokenizer, Any]:
    """The tokenizer of a folder, ours and that of transformers."""
    import transformers

    save_tokenizer(folder, family)
    ours = load_tokenizer(str(folder / "tokenizer.json"))
    assert isinstance(ours, FileTokenizer)
    return ours, transformers.AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize("family", HOMES)
def test_ids_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    """Of a hundred texts, of conversations with a system turn, tools and several turns; the ends of generation."""
    import transformers

    ours, theirs = both(tmp_path, family)
    assert [ours.encode_whole(text).tolist() for text in TEXTS] == [theirs(text).input_ids for text in TEXTS]
    special = ours.special
    home = transformers.GenerationConfig
    if (tmp_path / "generation_config.json").exists():
        ends = home.from_pretrained(tmp_path).eos_token_id
    else:
        ends = home.from_model_config(transformers.AutoConfig.from_pretrained(tmp_path)).eos_token_id
    assert [*special.ends] == (ends if isinstance(ends, list) else [ends])
    if HOMES[family].names:  # a class has defaults of its own, where no file names any
        assert (special.begin, special.eos) == (theirs.bos_token_id, theirs.eos_token_id)
        assert special.padding == theirs.pad_token_id
    if not HOMES[family].template:
        return
    template = load_chat_template(str(tmp_path / "tokenizer.json"))
    assert template is not None
    for chat in CHATS:
        for tools in (None, TOOLS):
            for asks in (True, False):
                options: dict[str, Any] = {"tools": tools, "add_generation_prompt": asks}
                if chat[0]["role"] == "system" and family == "gemma3":
                    with pytest.raises(UserError, match="no system role"):
                        template.render(chat, asks, tools)
                    continue
                text = template.render(chat, asks, tools)
                expected = theirs.apply_chat_template(chat, return_dict=True, **options)["input_ids"]
                assert ours.encode_whole(text, adds_begin=False).tolist() == expected


@pytest.mark.parametrize("family", ["llama3", "gemma3", "qwen2"])
def test_one_beginning(family: str, tmp_path: Path) -> None:
    """A text that spells its beginning has it once; a prompt is never empty."""
    ours, theirs = both(tmp_path, family)
    special = ours.special
    begin = theirs.bos_token or ""
    assert encode_prompt(ours, f"{begin}shard").tolist() == encode_prompt(ours, "shard").tolist()
    assert encode_prompt(ours, "").tolist() == [special.first]
    assert special.first == json.loads((tmp_path / "generation_config.json").read_text())["bos_token_id"]


@pytest.mark.parametrize("family", HOMES)
def test_documents(family: str, tmp_path: Path) -> None:
    """A document has the ids of transformers, and one end, which no turn of a conversation has."""
    ours, theirs = both(tmp_path, family)
    unit = UnitTokenizer(ours, 64, one_document_per_row=False, has_completions=False, threshold=0)
    for text in TEXTS[1:20]:
        assert unit._ids(Document(text)).tolist() == [*theirs(text).input_ids, ours.end_of_text]
    part = Document("shard", ends=False, begins=False)
    assert unit._ids(part).tolist() == theirs("shard", add_special_tokens=False).input_ids
    if ours.special.turn_ends and len(HOMES[family].specials) > 3:
        assert ours.end_of_text not in ours.special.turn_ends


@pytest.mark.parametrize("family", [name for name, home in HOMES.items() if home.template])
def test_learned_tokens_of_a_chat(family: str, tmp_path: Path) -> None:
    """Those of transformers' own mask: the end of each answer's turn once, no beginning, no padding."""
    from zero.corpus.preparing.sources.completions import CompletionReader

    ours, theirs = both(tmp_path, family)
    reader = CompletionReader(load_chat_template(str(tmp_path / "tokenizer.json")))
    chat = CHATS[1]
    document = reader({"messages": chat}, "here")
    found = theirs.apply_chat_template(chat, return_dict=True, return_assistant_tokens_mask=True)
    for alone in (True, False):
        if not alone and ours.end_of_text in found["input_ids"][:-1]:
            continue  # refused: its turns end as documents do
        unit = UnitTokenizer(ours, 64, one_document_per_row=alone, has_completions=True, threshold=0)
        tokens = unit._tokens(document)
        assert tokens.is_learned is not None
        length = len(found["input_ids"])
        assert tokens.ids[:length].tolist() == found["input_ids"]
        assert tokens.is_learned[:length].tolist() == found["assistant_masks"]
        assert len(tokens.ids) - length == int(not alone and found["input_ids"][-1] != ours.end_of_text)
        assert not tokens.is_learned[length:].any()


@pytest.mark.parametrize(
    "adds", [{"add_bos_token": True, "add_eos_token": False}, {"add_bos_token": False, "add_eos_token": True}, {}]
)
def test_a_model_of_sentencepiece(adds: dict[str, bool], tmp_path: Path) -> None:
    """It has no post-processor: there the keys of tokenizer_config.json count, as in transformers, and in a copy."""
    import sentencepiece
    import transformers

    with (tmp_path / "tokenizer.model").open("wb") as file:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(TEXTS[4:]),
            model_writer=file,
            vocab_size=300,
            model_type="bpe",
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            byte_fallback=True,
            minloglevel=2,
        )
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "tokenizer_class": "LlamaTokenizer"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**names, **adds}))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    ours = load_tokenizer(str(tmp_path / "tokenizer.model"))
    theirs: Any = transformers.AutoTokenizer.from_pretrained(tmp_path)
    expected = [theirs(text).input_ids for text in TEXTS[1:]]
    assert [ours.encode_whole(text).tolist() for text in TEXTS[1:]] == expected
    special = ours.special
    assert bool(special.before) == adds.get("add_bos_token", False)
    assert bool(special.after) == adds.get("add_eos_token", False)
    assert isinstance(ours, FileTokenizer)
    copy = tmp_path / "copy"
    copy.mkdir()
    (copy / "tokenizer.json").write_bytes(ours.data)
    for name, content in companions(str(tmp_path)).items():
        (copy / name).write_bytes(content)
    assert [load_tokenizer(str(copy / "tokenizer.json")).encode_whole(text).tolist() for text in TEXTS[1:]] == expected


@pytest.mark.parametrize(
    ("adds_prefix", "keys"),
    [(False, {}), (True, {}), (True, {"legacy": True}), (True, {"legacy": False})],
    ids=["no prefix", "default", "legacy", "not legacy"],
)
def test_chats_of_a_model_with_bytes(adds_prefix: bool, keys: dict[str, bool], tmp_path: Path) -> None:
    """SentencePiece with byte fallback: ids of chats and the learned ones are those of transformers."""
    import sentencepiece
    import transformers

    from zero.corpus.preparing.sources.completions import CompletionReader

    with (tmp_path / "tokenizer.model").open("wb") as file:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(text for text in TEXTS[4:] if text.isascii()),
            model_writer=file,
            vocab_size=300,
            model_type="bpe",
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            add_dummy_prefix=adds_prefix,
            byte_fallback=True,
            minloglevel=2,
        )
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "tokenizer_class": "LlamaTokenizer"}
    template = {"chat_template": HOMES["llama2"].template}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(names | template | keys))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    ours = load_tokenizer(str(tmp_path / "tokenizer.model"))
    theirs: Any = transformers.AutoTokenizer.from_pretrained(tmp_path)
    reader = CompletionReader(load_chat_template(str(tmp_path / "tokenizer.model")))
    unit = UnitTokenizer(ours, 64, one_document_per_row=True, has_completions=True, threshold=0)
    turns = [("a shard?", "two  stages"), ("漢字 🎉?", "zéro 🎉"), ("🎉", "2048")]
    if not keys.get("legacy"):  # there versions 5 of transformers add no blank before a blank, and versions 4 do
        turns.append((" <s> ", "\n\tlayout\n"))
    for ask, answer in turns:
        chat = [{"role": "user", "content": ask}, {"role": "assistant", "content": answer}] * 2
        found = theirs.apply_chat_template(chat, return_dict=True, return_assistant_tokens_mask=True)
        tokens = unit._tokens(reader({"messages": chat}, "here"))
        assert tokens.is_learned is not None
        assert tokens.ids.tolist() == found["input_ids"]
        assert tokens.is_learned.tolist() == found["assistant_masks"]
    assert "<0x" in "".join(theirs.convert_ids_to_tokens(theirs("漢字").input_ids))


def test_copies_have_the_same_special_tokens(tmp_path: Path) -> None:
    """The files that a corpus and an export copy, without config.json."""
    for family in HOMES:
        ours, _ = both(tmp_path / family, family)
        copy = tmp_path / f"{family}_copy"
        copy.mkdir()
        for name, data in {"tokenizer.json": ours.data, **companions(str(tmp_path / family))}.items():
            (copy / name).write_bytes(data)
        again = load_tokenizer(str(copy / "tokenizer.json")).special
        expected = ours.special
        assert (again.ends, again.end_of_text, again.eos, again.before, again.first, again.is_brought) == (
            *(expected.ends, expected.end_of_text, expected.eos, expected.before, expected.first, expected.is_brought),
        )


def test_contradictions_are_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """With what counts, as in transformers: generation_config.json before config.json, ids in place of names."""
    save_tokenizer(tmp_path, "qwen2")
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"model_type": "qwen2", "eos_token_id": 5}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": 0, "pad_token_id": None}))
    with caplog.at_level(logging.WARNING):
        ours = load_tokenizer(str(tmp_path / "tokenizer.json"))
    assert ours.special.ends == (0,)
    assert "eos_token_id is [5] in config.json and [0] in generation_config.json; the latter is used" in caplog.text
    assert f"eos_token is {ours.special.eos}, and eos_token_id [0]" in caplog.text


def test_tokens_that_only_the_configuration_adds(tmp_path: Path) -> None:
    """Tokens of added_tokens_decoder that tokenizer.json lacks have their ids; another id is refused."""
    save_tokenizer(tmp_path, "olmo2")
    path = tmp_path / "tokenizer_config.json"
    size = load_tokenizer(str(tmp_path / "tokenizer.json")).vocab_size
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "added_tokens_decoder": {size: {"content": "<|tool|>", "special": True}}}))
    import transformers

    ours, theirs = (
        load_tokenizer(str(tmp_path / "tokenizer.json")),
        transformers.AutoTokenizer.from_pretrained(tmp_path),
    )
    assert ours.vocab_size == size + 1
    assert ours.encode_whole("a<|tool|>b").tolist() == theirs("a<|tool|>b").input_ids
    path.write_text(json.dumps({**config, "added_tokens_decoder": {size + 3: {"content": "<|tool|>"}}}))
    with pytest.raises(UserError, match=f"'<|tool|>' as token {size + 3}, and the tokenizer would add it as {size}"):
        load_tokenizer(str(tmp_path / "tokenizer.json"))


def test_truncation_of_a_file_cuts_nothing(tmp_path: Path) -> None:
    """A tokenizer.json that was saved with truncation and padding encodes a whole text, as in transformers."""
    import tokenizers

    save_tokenizer(tmp_path, "llama3")
    path = tmp_path / "tokenizer.json"
    made = tokenizers.Tokenizer.from_file(str(path))
    made.enable_truncation(4)
    made.enable_padding(length=9)
    made.save(str(path))
    ours = load_tokenizer(str(path))
    text = " ".join(brought.WORDS)
    assert ours.decode(ours.encode(text)) == text
    assert len(ours.encode("a")) == 1


def test_lm_eval_encodes_the_same(tmp_path: Path) -> None:
    """The prefix, the ids of requests with and without a context: those of lm-eval's own class for transformers."""
    pytest.importorskip("lm_eval")
    from lm_eval.models.huggingface import HFLM

    from zero.inference.lm_eval_adapter import HarnessModel

    for family in ("llama3", "qwen2", "gemma3", "gpt_oss"):
        ours, theirs = both(tmp_path / family, family)
        harness = HarnessModel(ours, 64, lambda _: iter(()), lambda *_: iter(()), 8)
        expected: Any = HFLM.__new__(HFLM)
        expected.tokenizer = theirs
        expected.add_bos_token = expected.custom_prefix_token_id = None
        expected.backend = harness.backend = "causal"
        assert (harness.prefix_token_id, harness.eot_token_id) == (expected.prefix_token_id, expected.eot_token_id)
        begin = theirs.bos_token or theirs.eos_token
        for text in (*TEXTS[1:10], f"{begin}shard", "shard<|im_end|>"):
            assert harness.tok_encode(text) == expected.tok_encode(text)
            assert harness.tok_encode(text, add_special_tokens=False) == expected.tok_encode(
                text, add_special_tokens=False
            )
            assert harness._encode_pair(text, " gather") == expected._encode_pair(text, " gather")


def test_ends_beyond_the_tokenizer(tmp_path: Path) -> None:
    """An id that config.json names and the tokenizer does not know ends a text, and no document of a corpus."""
    save_tokenizer(tmp_path, "llama3_base")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "eos_token_id": [10**6, True, 3]}))
    ours = load_tokenizer(str(tmp_path / "tokenizer.json"))
    assert ours.special.ends == (10**6, 3) and ours.special.eos == ours.end_of_text != 3
    np.testing.assert_array_equal(encode_prompt(ours, "a")[:1], ours.special.before)
