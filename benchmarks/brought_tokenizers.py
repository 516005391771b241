"""Ids of published tokenizers beside transformers: `python -m benchmarks.brought_tokenizers FOLDER...`.

A folder is one of Hugging Face, or holds its tokenizer.json or tokenizer.model alone. For each it prints how many of a
hundred texts, and of the conversations that its template takes, have the same ids in both.
"""

from __future__ import annotations

import argparse
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from zero.base.errors import UserError
from zero.corpus.text.chat_template import load_chat_template
from zero.corpus.text.tokenizers import FileTokenizer, load_tokenizer
from zero.exchange.hub_model import TOKENIZERS

PIECES = (
    *(
        "The shard",
        "don't",
        "naïve",
        "zéro",
        "漢字",
        "ひらがな",
        "한국어",
        "русский",
        "עברית",
        "🎉",
        "👩‍👩‍👧",
        "e\u0301",
    ),
    *("2048", "3.14159", "1,000,000", "0x1F", "HTTPServer", "snake_case", "camelCase", "x = y[0]", "def f(a, b):"),
    *(
        " ",
        "  ",
        "   ",
        "\n",
        "\n\n",
        "\t",
        "\r\n",
        ".",
        "...",
        "!?",
        "(",
        ")",
        "--",
        "“quoted”",
        "’s",
        "<b>",
        "&amp;",
        "\u200b",
    ),
)
QUESTION = [{"role": "user", "content": "What is a shard?"}]
SEVERAL = [*QUESTION, {"role": "assistant", "content": "A part."}, {"role": "user", "content": "漢字  of 12?"}]
SYSTEM = {"role": "system", "content": "be short"}
TOOLS = [{"type": "function", "function": {"name": "weather", "description": "of é", "parameters": {"type": "object"}}}]


def texts(count: int = 100) -> list[str]:
    """Texts of pieces, joined with a blank or with nothing; the first ones are the pieces themselves."""
    pick = random.Random(0)
    joined = [
        pick.choice(("", " ")).join(pick.choices(PIECES, k=pick.randint(2, 24))) for _ in range(count - len(PIECES))
    ]
    return [*PIECES, *joined]


def chats(theirs: Any) -> Iterator[tuple[list[dict[str, str]], dict[str, Any], list[int]]]:
    """Conversations that the template takes, their options, and their ids by transformers."""
    if not theirs.chat_template:
        return
    for chat in (QUESTION, SEVERAL, [SYSTEM, *SEVERAL]):
        for tools in (None, TOOLS):
            for asks in (True, False):
                options = {"tools": tools, "add_generation_prompt": asks}
                try:
                    yield chat, options, theirs.apply_chat_template(chat, return_dict=True, **options)["input_ids"]
                except Exception as error:  # noqa: BLE001  a template raises what its author wrote
                    print(
                        f"  not taken by the template: {len(chat)} turns, {'tools' if tools else 'no tools'}: {error}"
                    )


def compare(folder: Path) -> str:
    """A row: texts and conversations with equal ids; those that differ are printed."""
    import transformers

    theirs: Any = transformers.AutoTokenizer.from_pretrained(folder)
    path = next(folder / name for name in TOKENIZERS if (folder / name).is_file())
    ours = load_tokenizer(str(path))
    assert isinstance(ours, FileTokenizer)
    equal_texts = 0
    for text in texts():
        own, expected = ours.encode_whole(text).tolist(), theirs(text).input_ids
        equal_texts += own == expected
        if own != expected:
            print(f"  {text!r}: {own} for {expected}")
    equal_chats = total = 0
    for chat, options, expected in chats(theirs):
        total += 1
        template = load_chat_template(str(path))
        assert template is not None
        try:
            rendered = template.render(chat, options["add_generation_prompt"], options["tools"])
        except UserError as error:
            print(f"  refused: {error}")
            continue
        own = ours.encode_whole(rendered, adds_begin=False).tolist()
        equal_chats += own == expected
        if own != expected:
            print(f"  {chat} {options}: {own} for {expected}")
    named = dict(
        zip(("begin", "end", "padding"), (theirs.bos_token_id, theirs.eos_token_id, theirs.pad_token_id), strict=True)
    )
    own_ids = {"begin": ours.special.begin, "end": ours.special.eos, "padding": ours.special.padding}
    of_chats = f"{equal_chats} of {total}" if total else "no template"
    special = "equal" if own_ids == named else f"{own_ids} for {named}"
    kind = type(theirs).__name__
    return f"| {folder.name} | {kind} | {len(theirs)} | {equal_texts} of {len(texts())} | {of_chats} | {special} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folders", nargs="+", type=Path)
    os.environ["HF_HUB_OFFLINE"] = "1"
    print("| folder | class of transformers | tokens | texts | conversations | begin, end, padding |")
    for folder in parser.parse_args().folders:
        print(compare(folder))


if __name__ == "__main__":
    main()
