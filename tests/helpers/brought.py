"""Folders as they are on the hub, small: a tokenizer with the special tokens, post-processor and files of its family.

- `HOMES`: how each family's files name its special tokens; `save_tokenizer` writes them, with a vocabulary of our own.
- `MODELS`: small models with such tokenizers, of `SHAPE`, or of `ODD`; `save_folder` writes one as it is on
  the hub, with random weights.
- `texts`, `CHATS`, `TOOLS`: what a table of ids is compared on.
"""

import json
import random
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from zero.corpus.text.tokenizers import train_tokenizer

WORDS = ("shard", "gather", "scatter", "stage", "layout", "zéro", "漢字", "don't", "2048", "user", "assistant")


class Home(NamedTuple):
    """The special tokens of a family and the files that name them; ends are those of generation_config.json."""

    specials: tuple[str, ...]
    names: dict[str, str]  # bos_token, eos_token, pad_token
    ends: tuple[str, ...]  # empty: there is no generation_config.json
    template: str
    adds_begin: bool = True  # the post-processor does
    in_special_map: Mapping[str, str] = MappingProxyType(
        {}
    )  # names in special_tokens_map.json, which count instead of those above
    of_config: tuple[str, ...] = ()  # ends in config.json
    text_tokens: tuple[str, ...] = ()  # added tokens that are not special
    splits_digits: bool = False  # as Qwen's files do; its class in transformers has this of its own


def _turns(header: str, end: str, begin: str = "", system: bool = True, after: str = "") -> str:
    """A template whose turns are a header with a role, the content, and an end."""
    refusal = (
        "" if system else "{%- if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    )
    return (
        f"{{{{- {begin or repr('')} }}}}{refusal}"
        "{%- if tools %}{{ 'Tools:' }}{% for tool in tools %}{{ '\\n' + (tool | tojson) }}{% endfor %}"
        "{{ '\\n' }}{% endif %}"
        f"{{%- for m in messages %}}{{{{ {header!r} | replace('ROLE', m.role) }}}}"
        f"{{%- if m.role == 'assistant' %}}{{% generation %}}{{{{ m.content + {end!r} }}}}{{% endgeneration %}}"
        f"{{%- else %}}{{{{ m.content + {end!r} }}}}{{% endif %}}{{{{ {after!r} }}}}{{%- endfor %}}"
        f"{{%- if add_generation_prompt %}}{{{{ {header!r} | replace('ROLE', 'assistant') }}}}{{% endif %}}"
    )


_LLAMA3 = "<|start_header_id|>ROLE<|end_header_id|>\n\n"
_CHATML = "<|im_start|>ROLE\n"
_INST = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %}"
    "{% generation %}{{ ' ' + m.content + eos_token }}{% endgeneration %}"
    "{% else %}{{ '[INST] ' + m.content + ' [/INST]' }}{% endif %}{% endfor %}"
)
HOMES = {
    "llama2": Home(("<unk>", "<s>", "</s>"), {"bos_token": "<s>", "eos_token": "</s>"}, ("</s>",), _INST),
    "llama3": Home(
        (
            "<|begin_of_text|>",
            "<|end_of_text|>",
            "<|eom_id|>",
            "<|eot_id|>",
            "<|start_header_id|>",
            "<|end_header_id|>",
        ),
        {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"},
        ("<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"),
        _turns(_LLAMA3, "<|eot_id|>", "bos_token"),
    ),
    "llama3_base": Home(
        ("<|begin_of_text|>", "<|end_of_text|>"),
        {"bos_token": "<|begin_of_text|>", "eos_token": "<|end_of_text|>"},
        (),
        "",
        of_config=("<|end_of_text|>",),
    ),
    "gemma3": Home(
        ("<pad>", "<eos>", "<bos>", "<start_of_turn>", "<end_of_turn>"),
        {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>"},
        ("<eos>", "<end_of_turn>"),
        _turns("<start_of_turn>ROLE\n", "<end_of_turn>", "bos_token", system=False, after="\n"),
        text_tokens=("<s>", "</s>"),
    ),
    "mistral": Home(("<unk>", "<s>", "</s>"), {"bos_token": "<s>", "eos_token": "</s>"}, ("</s>",), _INST),
    "qwen2": Home(
        ("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
        {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"},
        ("<|im_end|>", "<|endoftext|>"),
        _turns(_CHATML, "<|im_end|>", after="\n"),
        adds_begin=False,
        of_config=("<|im_end|>",),
        splits_digits=True,
    ),
    "phi3": Home(
        ("<unk>", "<s>", "</s>", "<|endoftext|>", "<|assistant|>", "<|user|>", "<|system|>", "<|end|>"),
        {"bos_token": "<s>", "eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>"},
        ("<|endoftext|>", "<|assistant|>", "<|end|>"),
        _turns("<|ROLE|>\n", "<|end|>", after="\n"),
        adds_begin=False,
        of_config=("<|endoftext|>",),
    ),
    "smollm3": Home(
        ("<|begin_of_text|>", "<|end_of_text|>", "<|im_start|>", "<|im_end|>"),
        {"bos_token": "<|begin_of_text|>", "eos_token": "<|end_of_text|>"},
        ("<|im_end|>",),
        _turns(_CHATML, "<|im_end|>", after="\n"),
        adds_begin=False,
        in_special_map={"eos_token": "<|im_end|>", "pad_token": "<|im_end|>"},
    ),
    "olmo2": Home(
        ("<|endoftext|>", "<|pad|>"),
        {"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>", "pad_token": "<|pad|>"},
        ("<|endoftext|>",),
        _turns("<|ROLE|>\n", "<|endoftext|>", "bos_token", after="\n"),
        adds_begin=False,
    ),
    "gpt_oss": Home(
        ("<|startoftext|>", "<|endoftext|>", "<|return|>", "<|call|>", "<|start|>", "<|end|>", "<|message|>"),
        {"bos_token": "<|startoftext|>", "eos_token": "<|return|>", "pad_token": "<|endoftext|>"},
        ("<|return|>", "<|endoftext|>", "<|call|>"),
        _turns("<|start|>ROLE<|message|>", "<|return|>"),
        adds_begin=False,
    ),
    "gpt2": Home(("<|endoftext|>",), {}, ("<|endoftext|>",), "", adds_begin=False, of_config=("<|endoftext|>",)),
}
SHAPE: dict[str, Any] = {
    "hidden_size": 36,
    "intermediate_size": 52,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "vocab_size": 337,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
}
# Another size: odd numbers of layers and of heads, one head of keys, more inputs than hidden units.
ODD: dict[str, Any] = {
    "hidden_size": 60,
    "intermediate_size": 28,
    "num_hidden_layers": 3,
    "num_attention_heads": 5,
    "num_key_value_heads": 1,
    "vocab_size": 341,
}
HEADS = {"head_dim": 10}
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {  # the class of the configuration, the tokenizer, and keys
    "llama": ("LlamaConfig", "llama3", {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}),
    "gemma3": ("Gemma3TextConfig", "gemma3", {**HEADS, "sliding_window": 7, "query_pre_attn_scalar": 13}),
    "qwen2": ("Qwen2Config", "qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3Config", "qwen2", HEADS),
    "mistral": ("MistralConfig", "mistral", {**HEADS, "sliding_window": 9}),
    "phi3": ("Phi3Config", "phi3", {"pad_token_id": None}),
    "smollm3": ("SmolLM3Config", "smollm3", {"pad_token_id": None}),
    "olmo2": ("Olmo2Config", "olmo2", {}),
    "gpt_oss": (
        "GptOssConfig",
        "gpt_oss",
        {**HEADS, "num_local_experts": 3, "num_experts_per_tok": 2, "sliding_window": 7},
    ),
}
TOOLS = [{"type": "function", "function": {"name": "weather", "description": "of é", "parameters": {"type": "object"}}}]
CHATS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "What is a shard?"}],
    [
        {"role": "user", "content": "One?"},
        {"role": "assistant", "content": "Two."},
        {"role": "user", "content": "Three?"},
        {"role": "assistant", "content": "Four."},
    ],
    [{"role": "system", "content": "be short"}, {"role": "user", "content": "漢字?"}],
    [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "tool_calls": None}],
]


def texts(count: int) -> list[str]:
    """Texts without a blank at their beginning: the empty one, line breaks, and words."""
    pick = random.Random(0)
    made = ["", "a", "a\n\nb\t c", "🎉 zéro"]
    return [*made, *(" ".join(pick.choices(WORDS, k=1 + i % 17)) for i in range(count - len(made)))]


def save_tokenizer(folder: Path, family: str) -> None:
    """Writes the files of a tokenizer of 320 tokens and a few into a folder; its config.json is extended."""
    import tokenizers
    from tokenizers import AddedToken, normalizers, pre_tokenizers, processors

    home = HOMES[family]
    folder.mkdir(parents=True, exist_ok=True)
    made = tokenizers.Tokenizer.from_buffer(train_tokenizer([" ".join(texts(60))], 320))
    if home.splits_digits:
        from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

        split = pre_tokenizers.Split(tokenizers.Regex(PRETOKENIZE_REGEX), "isolated")
        in_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        made.pre_tokenizer = pre_tokenizers.Sequence([split, in_bytes])
        made.normalizer = normalizers.NFC()
    made.add_tokens([AddedToken(name, normalized=False) for name in home.text_tokens])
    made.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in home.specials])
    if home.adds_begin:
        begin = home.names["bos_token"]
        made.post_processor = processors.TemplateProcessing(
            single=f"{begin} $A", pair=f"{begin} $A {begin} $B", special_tokens=[(begin, made.token_to_id(begin))]
        )
    made.save(str(folder / "tokenizer.json"))
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 4096, **home.names}
    if home.template:
        config["chat_template"] = home.template
    _write(folder / "tokenizer_config.json", config)
    if home.in_special_map:
        _write(folder / "special_tokens_map.json", dict(home.in_special_map))
    ids = [made.token_to_id(name) for name in home.ends]
    if ids:
        begin_id = made.token_to_id(home.names.get("bos_token", home.specials[0]))
        _write(folder / "generation_config.json", {"bos_token_id": begin_id, "eos_token_id": ids, "do_sample": True})
    path = folder / "config.json"
    known = json.loads(path.read_text()) if path.exists() else {"model_type": "llama"}
    of_config = [made.token_to_id(name) for name in home.of_config]
    known.pop("bos_token_id", None)
    known["eos_token_id"] = of_config[0] if of_config else None
    _write(path, known)


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1) + "\n")


def save_folder(folder: Path, family: str, **changes: Any) -> None:
    """Random weights by transformers, in bfloat16, and the files of a tokenizer."""
    import torch
    import transformers

    name, tokenizer, keys = MODELS[family]
    config = getattr(transformers, name)(**{**SHAPE, **keys, **changes})
    transformers.set_seed(0)
    model: Any = transformers.AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
    model.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    save_tokenizer(folder, tokenizer)
