"""Every parser of a file that others write, called with any bytes; and a valid file of each kind, to be damaged.

- `READERS`: by name, a function of an empty directory and the bytes of a file. `valid_files()`: accepted bytes of each.
- `outcome(action)`: the exit status and the line that a user would see.
- `npy_header`: the header of a `.npy` file.
"""

import copy
import gzip
import io
import json
import tarfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import zstandard
from omegaconf import DictConfig, OmegaConf
from safetensors.numpy import save, save_file

from tests.config.composing import CONF, compose
from tests.helpers import sources
from tests.helpers.shards import loader, npy, write_tar
from zero.base.errors import UserError, file_error
from zero.commands.modes import check, default_config, merge_resumed
from zero.corpus.format import manifest
from zero.corpus.preparing import corpus_files
from zero.corpus.preparing.documents import too_many_broken
from zero.corpus.preparing.sources.completions import CompletionReader
from zero.corpus.preparing.sources.source import Source
from zero.corpus.text.chat_template import load_chat_template
from zero.corpus.text.tokenizers import load_tokenizer, train_tokenizer
from zero.exchange.hf_folder import HuggingFaceFolder
from zero.inference.sample import _prompts
from zero.job.sizes import load_sizes
from zero.record.metrics_file import read_metrics, read_resumes
from zero.record.run_files import METRICS_FILE, saved_config, saved_steps

MESSAGES = [{"role": "user", "content": "What is it?"}]
GPT2 = {"model_type": "gpt2", "n_layer": 1, "n_head": 2}


def outcome(action: Callable[[], Any]) -> tuple[int, str]:
    """The exit status and the message of a program that does this; any other exception, a traceback, is raised."""
    try:
        action()
    except UserError as error:
        return error.status, str(error)
    except OSError as error:
        return file_error("", error).status, str(error)
    return 0, ""


@cache
def _composed() -> DictConfig:
    return compose()


def _tokenizer(place: Path, data: bytes) -> None:
    (place / "tokenizer.json").write_bytes(data)
    tokenizer = load_tokenizer(str(place / "tokenizer.json"))
    tokenizer.decode(tokenizer.encode("What is it?\ud800"))
    tokenizer.encode_with_spans("What is it?", has_special=True)
    tokenizer.byte_lengths()


def _chat(name: str) -> Callable[[Path, bytes], None]:
    def read(place: Path, data: bytes) -> None:
        (place / name).write_bytes(data)
        template = load_chat_template(str(place / "tokenizer.json"))
        if template is not None:
            template.render(MESSAGES, add_generation_prompt=True)

    return read


def _hugging_face(name: str) -> Callable[[Path, bytes], None]:
    def read(place: Path, data: bytes) -> None:
        (place / "config.json").write_text(json.dumps(GPT2))
        prefix = "transformer"
        if name == "config.json":
            (place / name).write_bytes(data)
            prefix = "model.layers" if b"llama" in data or b"mistral" in data or b"gemma2" in data else prefix
        layer = "h.0." if prefix == "transformer" else "0."
        save_file({f"{prefix}.{layer}x": np.zeros(3, np.float32)}, place / "model.safetensors")
        (place / name).write_bytes(data)
        with HuggingFaceFolder(place):
            pass

    return read


def _json_lines(name: str, completions: bool = False) -> Callable[[Path, bytes], None]:
    def read(place: Path, data: bytes) -> None:
        (place / name).write_bytes(data)
        reader = CompletionReader(None) if completions else None
        for unit in Source(str(place / name), "text", 0.1, reader).units():
            for document in unit.documents():
                if document.problem:
                    raise too_many_broken(1, 0, document.problem)

    return read


def _index(place: Path, data: bytes) -> None:
    write_tar(place / "s.tar", {"a.input_id.npy": npy(np.arange(6))})
    (place / "it.index").write_bytes(data)
    list(loader(place / "it.index", max_epochs=1, global_rows=1).batches())


def _shard(place: Path, data: bytes, rows: str = "") -> None:
    (place / "s.tar").write_bytes(data)
    (place / "it.index").write_text(f"s.tar{rows}")
    list(loader(place / "it.index", max_epochs=1, global_rows=1, shuffle=False).batches())


def _npy(place: Path, data: bytes) -> None:
    """A member, skipped where it is wrong, which has to succeed; counted; and read as the index file counts it."""
    tar = write_tar(place / "s.tar", {"a.input_id.npy": data, "b.input_id.npy": npy(np.arange(6))}).read_bytes()
    (place / "it.index").write_text("s.tar # 2 rows")
    skipping = loader(place / "it.index", max_epochs=1, global_rows=1, shuffle=False, skip_bad=True)
    status, message = outcome(lambda: list(skipping.batches()))
    assert status == 0 or "rows, but the index file records 2" in message, message
    outcome(lambda: _shard(place, tar))
    _shard(place, tar, " # 2 rows")


def _metrics(place: Path, data: bytes) -> None:
    (place / METRICS_FILE).write_bytes(data)
    steps = [line["step"] for line in read_metrics(place / METRICS_FILE)]
    assert steps == sorted(steps)
    read_resumes(place / METRICS_FILE)


def _run(place: Path, data: bytes) -> None:
    (place / "config.yaml").write_bytes(data)
    (place / "checkpoints" / "3").mkdir(parents=True, exist_ok=True)
    saved_steps(place)
    check(merge_resumed(saved_config(place), copy.deepcopy(_composed()), []), load_sizes())


def _sizes(place: Path, data: bytes) -> None:
    (place / "model_config.yaml").write_bytes(data)
    load_sizes(place / "model_config.yaml")


def _manifest(place: Path, data: bytes) -> None:
    (place / "manifest.json").write_bytes(data)
    manifest.check_tokenizer(str(place), load_tokenizer("bytes"))
    corpus_files.find_usable(str(place), {}, False)


def _prompt_file(place: Path, data: bytes) -> None:
    (place / "prompts.txt").write_bytes(data)
    config: Any = compose("mode=sample")
    config.sample.prompt_file = str(place / "prompts.txt")
    _prompts(config.sample)


READERS: dict[str, Callable[[Path, bytes], None]] = {
    "tokenizer.json": _tokenizer,
    "tokenizer_config.json": _chat("tokenizer_config.json"),
    "chat_template.jinja": _chat("chat_template.jinja"),
    "config.json": _hugging_face("config.json"),
    "model.safetensors": _hugging_face("model.safetensors"),
    "model.safetensors.index.json": _hugging_face("model.safetensors.index.json"),
    "documents.jsonl": _json_lines("documents.jsonl"),
    "documents.jsonl.gz": _json_lines("documents.jsonl.gz"),
    "documents.jsonl.zst": _json_lines("documents.jsonl.zst"),
    "documents.json": _json_lines("documents.json"),
    "documents.csv": _json_lines("documents.csv"),
    "documents.txt": _json_lines("documents.txt"),
    "documents.tar": _json_lines("documents.tar"),
    "documents.parquet": _json_lines("documents.parquet"),
    "tokens.npy": _json_lines("tokens.npy"),
    "completions.jsonl": _json_lines("completions.jsonl", completions=True),
    "it.index": _index,
    "s.tar": _shard,
    "input_id.npy": _npy,
    "metrics.jsonl": _metrics,
    "config.yaml": _run,
    "model_config.yaml": _sizes,
    "manifest.json": _manifest,
    "prompts.txt": _prompt_file,
}


def npy_header(text: str, version: int = 1) -> bytes:
    """A .npy file of this header and no data."""
    length = 2 if version == 1 else 4
    return b"\x93NUMPY" + bytes([version, 0]) + (len(text) + 1).to_bytes(length, "little") + text.encode() + b"\n"


def _tar() -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, data in {
            "a.input_id.npy": npy(np.arange(12).reshape(2, 6)),
            "a.length.npy": npy(np.array([3, 6])),
        }.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return buffer.getvalue()


@cache
def valid_files() -> dict[str, bytes]:
    """A file for each reader that is read without an error."""
    template = "{% for m in messages %}<|{{ m['role'] }}|>{{ m.content | trim }}{{ eos_token }}{% endfor %}"
    documents = b'{"text": "one"}\n{"text": "two"}\n'
    shard = {"name": "train-00000.tar", "rows": 3, "size": 1, "sha256": "0"}
    split = {"documents": 1, "tokens": 2, "bytes": 3, "rows": 3, "shards": [shard]}
    llama = {
        "model_type": "llama",
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e4,
    }
    files = {
        "tokenizer.json": train_tokenizer(["What is it? It is a shard."] * 9, 280),
        "tokenizer_config.json": {"chat_template": [{"name": "default", "template": template}], "eos_token": "</s>"},
        "chat_template.jinja": template.encode(),
        "config.json": {**llama, "rope_scaling": None, "sliding_window": None, "tie_word_embeddings": False},
        "model.safetensors": save({"transformer.h.0.x": np.zeros((2, 3), np.float32), "wte.weight": np.zeros(4)}),
        "model.safetensors.index.json": {"weight_map": {"transformer.h.0.x": "model.safetensors"}},
        "documents.jsonl": documents,
        "documents.jsonl.gz": gzip.compress(documents, mtime=0),
        "documents.jsonl.zst": zstandard.compress(documents),
        "documents.json": b'[{"text": "one"},\n {"text": "two"}]\n',
        "documents.csv": b"number,text\n1,one\n2,two\n",
        "documents.txt": b"one\ntwo\n" * 9,
        "documents.tar": sources.tar({"a.txt": b"one", "b.txt": b"two"}),
        "documents.parquet": sources.parquet_bytes({"text": ["one", "two"]}),
        "tokens.npy": npy(np.arange(60)),
        "completions.jsonl": b'{"prompt": "1 + 1", "completion": " = 2"}\n',
        "it.index": b"# a corpus\ns.tar # 1 rows\n",
        "s.tar": _tar(),
        "input_id.npy": npy(np.arange(6)),
        "metrics.jsonl": b'{"step": 1, "train/loss": 2.5}\n{"event": "resume", "step": 1}\n{"step": 2, "a": null}\n',
        "config.yaml": OmegaConf.to_yaml(default_config()).encode(),
        "model_config.yaml": b"test" + (CONF / "model_config.yaml").read_bytes().rpartition(b"\ntest")[2],
        "manifest.json": {"tokenizer": "bytes", "train": split, "validation": split, "skipped": 0},
        "prompts.txt": "shard\ngéther\n".encode(),
    }
    return {name: file if isinstance(file, bytes) else json.dumps(file).encode() for name, file in files.items()}
