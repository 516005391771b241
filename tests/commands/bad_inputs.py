"""Inputs that are wrong, and what a person reads: the table of tests/commands/test_cli_bad_inputs.py.

Each of them once ended in a traceback, or might have. The exit status is 2: the same command would fail again, so a
launcher does not repeat it.
"""

import gzip
import json
import pickle
from datetime import date
from decimal import Decimal
from functools import partial
from typing import Any

import numpy as np

from tests.helpers import sources
from tests.helpers.readers import npy_header
from tests.helpers.shards import npy

DEEP = b"[" * 100_000
NOT_UTF8 = b"\xff"
OFFICE = b"PK\3\4" + bytes(26) + b"[Content_Types].xml"
LLAMA: dict[str, Any] = {"model_type": "llama", "num_attention_heads": 2, "rms_norm_eps": 1e-5}
NEO: dict[str, Any] = {"model_type": "gpt_neo", "num_heads": 2, "layer_norm_epsilon": 1e-5}
SHARDS: dict[str, Any] = {"shards": []}
DATA = b"data: {bucket_path: null, checkpoint_directory: checkpoints}\n"
SIZE = b"a: {embedding_dim: 8, vocab_size: 9, num_head: 2, block_size: 8, dropout: 0.0, N: 1"
# Arguments of main_zero.py, separated by blanks, and words of the message.
CONFIGURATIONS: dict[str, str] = {
    # Values of a key.
    "training.context_stages=[[1,2],[3]]": "training.context_stages=[[1, 2], [3]]: expected linear, [[steps, tokens",
    "training.context_stages=[[1000000000000000000000,64]]": "training.context_stages=[[1000000000000000000000, 64]]",
    "training.context_stages=5": "training.context_stages=5: expected linear",
    "zero.tensor_shards=0": "zero.tensor_shards=0: expected at least 1",
    "zero.context_shards=0": "zero.context_shards=0: expected at least 1",
    "zero.expert_shards=-1": "zero.expert_shards=-1: expected at least 1",
    "training.batch_size=1000000000000": "training.batch_size=1000000000000: expected at least 1, at most 2147483647",
    "training.total_steps=99999999999999999999999": "training.total_steps=99999999999999999999999: expected at least 1",
    "training.total_steps=1e400": "training.total_steps=inf: expected an integer",
    "training.warmup_steps=-1": "training.warmup_steps=-1: expected at least 0",
    "training.sample_tokens=1000000000000": "training.sample_tokens=1000000000000: expected at least 0, at most",
    "data.max_context=1000000000000000000000": "data.max_context=1000000000000000000000: expected at least 2",
    "distributed.cpu_devices=10000000000": "distributed.cpu_devices=10000000000: expected at least 1, at most",
    "seed=99999999999999999999": "seed=99999999999999999999: expected 0 to 4294967295",
    "training.weight_decay=nan": "training.weight_decay=nan: expected zero or more",
    "training.peak_learning_rate=inf": "training.peak_learning_rate=inf: expected zero or more",
    "profile.steps=[1,null]": "profile.steps=[1, null]: expected the first and the last",
    "mode=plan plan.grid.stage=[]": "plan.grid.stage=[]: expected a list, each element one of 0, 1, 2, 3",
    "harness.tasks=5": "harness.tasks=5: expected a list",
    "zero.stage=[1]": "zero.stage=[1]: expected an integer, one of 0, 1, 2, 3",
    # Interpolations.
    "seed='${model.size}'": "seed=bytes: expected an integer",
    "seed='${seed}'": "seed=${seed}: Recursive interpolation detected",
    "seed='${nope}'": "seed=${nope}: Interpolation key 'nope' not found",
    "seed='${oc.env:NO_SUCH_VARIABLE}'": "seed=${oc.env:NO_SUCH_VARIABLE}: KeyError raised while resolving",
    "data.corpus='${training}'": "data.corpus={'max_epochs'",
    "data.index_path_train=['${nope}']": "data.index_path_train=['${nope}']: Interpolation key 'nope' not found",
    "mode=plan plan.grid.stage='${seed}'": "plan.grid.stage=0: expected a list",
    "training.context_stages='${seed}'": "training.context_stages=0: expected linear",
    "data.corpus='${'": "data.corpus='${': no viable alternative",
    # Sections.
    "data='???'": "data=???: expected a section of keys",
    "model=null": "model=null: expected a section of keys",
    "mode=evaluate evaluate=null": "evaluate=null: expected a section of keys",
    "model='???'": "model",
    "optimizer=null": "optimizer=null: expected one of adamw, ademamix, lion",
    "training=[1]": "training=[1]: expected a section of keys",
    "mode=plan plan.grid=5": "plan.grid=5: expected a section of keys",
    "model.size='???'": "model.size: missing",
    "mode='???'": "mode=???: expected one of train, evaluate",
    "resume=[a]": "resume=['a']: expected a path, or null",
    "resume='${nope}'": "resume: Interpolation key 'nope' not found",
    # Runs to resume or to use.
    "--resume": "--resume: runs has no checkpoint",
    "--resume data.corpus=${": "Error parsing override 'data.corpus=${': extraneous input",
    "--resume hydra.run.dir=nowhere": "nowhere has no checkpoint",
    "--resume hydra.run.dir=number": "number/config.yaml is damaged: expected the configuration of a run",
    "--resume hydra.run.dir=superscript": "superscript has no checkpoint",
    "mode=sample model.model_path=loop": "loop: not a run directory, config.yaml is missing",
    "mode=evaluate model.model_path=number": "number/config.yaml is damaged",
}
# The same for whole programs: what only they do.
PROGRAMS: dict[str, str] = {
    "mode=plan hydra.run.dir=${nope}": "hydra.run.dir: Interpolation key 'nope' not found",
    "mode=plan model.size=${nope}": "model.size: Interpolation key 'nope' not found",
    "optimizer=${nope}": "optimizer=${nope}: Error resolving interpolation '${nope}'",
    # An interpolation that can be resolved is no mistake.
    "mode=plan seed=${training.warmup_steps} plan.topology=v3-9": "plan.topology=v3-9: expected v3-",
    "mode=plan hydra.run.dir=locked": "[Errno 21] Is a directory: ",  # in place of the log
    "mode=plan hydra.run.dir=loop": "[Errno 17] File exists: 'loop'",
    "--resume hydra.run.dir=\udcff": "has no checkpoint",
}
# The name of a file (tests/helpers/readers.py), its content, and words of the message beside its path.
FILES: tuple[tuple[str, Any, str], ...] = (
    ("tokenizer.json", DEEP, "is not a file of the tokenizers library"),
    ("tokenizer.json", b"{}", "is not a file of the tokenizers library"),
    ("tokenizer.json", NOT_UTF8, "is not a file of the tokenizers library"),
    ("tokenizer.json", b"", "is not a file of the tokenizers library"),
    ("tokenizer.json", {"model": {"type": "BPE", "vocab": {}, "merges": []}}, "has no token that ends a text"),
    ("tokenizer.json", {"model": {"type": "BPE", "vocab": [], "merges": []}}, "not a file of the tokenizers library"),
    ("tokenizer.json", {"model": {"type": "BPE", "vocab": {"a": -1}, "merges": []}}, "not a file of the tokenizers"),
    (
        "tokenizer.json",
        {"model": {"type": "BPE", "vocab": {"</s>": 4_294_967_295}, "merges": []}},
        "its highest id is 4294967295; expected less than 2**24",
    ),
    (
        "tokenizer.json",
        {"model": {"type": "WordLevel", "vocab": {"</s>": 0}, "unk_token": "?"}},
        "cannot encode a text: WordLevel error: Missing [UNK] token",
    ),
    (
        "tokenizer_config.json",
        b"{",
        "expected a JSON object: Expecting property name enclosed in double quotes",
    ),
    ("tokenizer_config.json", b"[]", "expected a JSON object: found list"),
    ("tokenizer_config.json", b"5", "expected a JSON object: found int"),
    ("tokenizer_config.json", DEEP, "expected a JSON object: maximum recursion depth exceeded"),
    ("tokenizer_config.json", NOT_UTF8, "expected a JSON object: 'utf-8' codec can't decode byte 0xff in position 0"),
    ("tokenizer_config.json", {"chat_template": 5}, "chat_template is int; expected text"),
    ("tokenizer_config.json", {"chat_template": {"a": 1}}, "chat_template is dict; expected text"),
    ("tokenizer_config.json", {"chat_template": [5]}, "expected names and templates under chat_template"),
    ("tokenizer_config.json", {"chat_template": [{"name": "default"}]}, "chat_template: 'template' is missing"),
    ("tokenizer_config.json", {"chat_template": [{"name": [], "template": ""}]}, "expected names and templates"),
    ("tokenizer_config.json", {"chat_template": "{{ 1 // 0 }}"}, "cannot render these messages: "),
    ("chat_template.jinja", NOT_UTF8, "is not UTF-8 text: 'utf-8' codec can't decode byte 0xff in position 0"),
    ("chat_template.jinja", b"{% for", "cannot render these messages: unexpected 'end of template'"),
    ("chat_template.jinja", b"{{ 1 / 0 }}", "cannot render these messages: division by zero"),
    ("chat_template.jinja", b"{{ messages.x.y }}", "cannot render these messages: 'list object' has no attribute 'x'"),
    ("chat_template.jinja", b"{{ raise_exception('no system role') }}", "cannot render these messages: no system role"),
    ("chat_template.jinja", b"{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "maximum recursion depth exceeded"),
    ("chat_template.jinja", b"{{" + b"(" * 5000 + b"}}", "maximum recursion depth exceeded"),
    ("chat_template.jinja", b"{{ 'x' * 10**11 }}", "cannot render these messages: MemoryError"),
    ("chat_template.jinja", b"{{ 'x'.ljust(10**11) }}", "cannot render these messages: MemoryError"),
    ("chat_template.jinja", b"{{ '%100000000000d' % 1 }}", "cannot render these messages: "),
    ("chat_template.jinja", b"{{ range(10**9) | list }}", "cannot render these messages: "),
    ("chat_template.jinja", b"{{ '{:d}'.format('x') }}", "Unknown format code 'd' for object of type 'str'"),
    ("chat_template.jinja", b"{{ ''.__class__.__mro__[1] }}", "cannot render these messages: "),
    ("chat_template.jinja", b"{% include '/etc/passwd' %}", "cannot render these messages: no loader"),
    ("chat_template.jinja", b"{{ [3, 'a'] | sort }}", "cannot render these messages: '<' not supported"),
    (
        "chat_template.jinja",
        b"{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "cannot render these messages: it takes too long",
    ),
    ("config.json", DEEP, "expected a JSON object: maximum recursion depth exceeded"),
    ("config.json", b"[]", "expected a JSON object: found list"),
    ("config.json", NOT_UTF8, "expected a JSON object: 'utf-8' codec"),
    ("config.json", {"model_type": []}, "model_type []: expected one of 'gpt2'"),
    ("config.json", {"model_type": {"a": 1}}, "model_type {'a': 1}: expected one of 'gpt2'"),
    ("config.json", {"model_type": "gpt2"}, "n_head is missing"),
    (
        "config.json",
        {**LLAMA, "rope_scaling": 5},
        "the keys of rotary positions cannot be read: argument of type 'int'",
    ),
    (
        "config.json",
        {**LLAMA, "rope_parameters": [1]},
        "the keys of rotary positions cannot be read: 'list'",
    ),
    (
        "config.json",
        {**LLAMA, "rope_theta": "x"},
        "the keys of rotary positions cannot be read: could not",
    ),
    (
        "config.json",
        {**LLAMA, "rope_theta": 10**400},
        "the keys of rotary positions cannot be read: int too",
    ),
    ("config.json", {**NEO, "attention_types": 5}, "the keys of windows cannot be read: 'int' object is not"),
    (
        "config.json",
        {**NEO, "attention_types": [[["global"], 10**10]]},
        "attention_types names 2 layers",
    ),
    ("config.json", {**NEO, "attention_types": [["global", "local"]]}, "the keys of windows cannot be read"),
    (
        "config.json",
        {**LLAMA, "model_type": "mistral", "sliding_window": [1]},
        "the keys of windows cannot be read",
    ),
    ("config.json", {**LLAMA, "model_type": "mistral", "sliding_window": 1e999}, "windows cannot be read: cannot"),
    ("model.safetensors.index.json", DEEP, "expected a JSON object: maximum recursion depth exceeded"),
    ("model.safetensors.index.json", b"[]", "expected a JSON object: found list"),
    ("model.safetensors.index.json", {"weight_map": []}, "expected a weight_map from the names of tensors"),
    ("model.safetensors.index.json", {"weight_map": {"a": 5}}, "expected a weight_map from the names of tensors"),
    ("model.safetensors.index.json", {"weight_map": {"a": "../x"}}, "weight_map names '../x'; expected a file in this"),
    ("model.safetensors", b"", "not a safetensors file: Error while deserializing header: header too small"),
    ("model.safetensors", b"\xff" * 8, "not a safetensors file: Error while deserializing header: header too"),
    ("model.safetensors", b"\2" + b"\0" * 7 + b"{}", "has no tensor of a layer; expected transformer.h.0"),
    ("model.safetensors", (100_000).to_bytes(8, "little") + DEEP, "not a safetensors file: Error while deserializing"),
    ("documents.jsonl", DEEP, "documents.jsonl, line 1: expected a JSON object: maximum recursion depth exceeded"),
    (
        "documents.jsonl",
        b'{"text": "a"}\n' + DEEP,
        "documents.jsonl, line 2: expected a JSON object: maximum",
    ),
    ("documents.jsonl", b'{"text": "a"}\n\xff', "documents.jsonl, line 2: expected a JSON object: 'utf-8' codec"),
    ("documents.jsonl", b"5", 'documents.jsonl, line 1: expected a string under "text"; found no object'),
    ("documents.jsonl", b'{"text": [1]}', 'documents.jsonl, line 1: expected a string under "text"; it is a list'),
    ("documents.jsonl", b'{"text": ' + b"9" * 5000 + b"}", "line 1: expected a JSON object: Exceeds the limit"),
    ("documents.jsonl.gz", b"x", "is not compressed with .gz, judging by its first bytes; remove .gz from its name"),
    (
        "documents.jsonl.gz",
        gzip.compress(b'{"text": "a"}\n') + b"x",
        "continues with other bytes after the end of its gzip",
    ),
    ("documents.jsonl.zst", b"x", "is not compressed with .zst, judging by its first bytes; remove .zst from its name"),
    ("documents.jsonl.zst", b"\x28\xb5\x2f\xfdxxxx", "is truncated or damaged: zstd decompressor error"),
    (
        "documents.jsonl",
        gzip.compress(b'{"text": "a"}'),
        "documents.jsonl is compressed with gzip; add .gz to its name",
    ),
    (
        "documents.jsonl",
        b'{\n "text": "a"\n}',
        "is JSON over several lines, but its name promises one object per line: name it",
    ),
    ("documents.jsonl", '{"text": "a"}'.encode("utf-16"), "is UTF-16; convert it: iconv -f UTF-16 -t UTF-8"),
    ("documents.jsonl", '{"text": "a"}'.encode("utf-16-le"), "is UTF-16; convert it: iconv -f UTF-16LE -t UTF-8"),
    ("documents.jsonl", b'{"text": "a \\ud83d b"}', "line 1: character 2, \\ud83d, is half of a surrogate pair"),
    ("documents.json", DEEP, "documents.json, line 1: expected JSON: maximum recursion depth exceeded"),
    ("documents.json", b'[{"text": "a"},\n {"text":]', "documents.json, line 2: expected JSON: Expecting value"),
    ("documents.json", b'[{"text": "a"},\n {"text": "b', "line 2: expected JSON: Unterminated string"),
    ("documents.json", b'[{"text": "a"}', "line 1: expected JSON: the array does not end"),
    ("documents.json", b'[{"text": "a"}]\n[]', "line 2: expected JSON: expected nothing after the array"),
    ("documents.json", b'[{"text": "a"} {"text": "b"}]', "line 1: expected JSON: Expecting ',' or ']'"),
    ("documents.json", b"[5]", 'documents.json, item 1: expected a string under "text"; found no object'),
    ("documents.json", b"{\xff", "documents.json is not UTF-8; convert it with iconv"),
    ("documents.csv", "text\na\n".encode("utf-16"), "is UTF-16; convert it: iconv -f UTF-16 -t UTF-8"),
    ("documents.txt", OFFICE, "is an Office document; save a table as .csv, a text as .txt"),
    ("documents.txt", b"PK\3\4" + bytes(40), "is a zip archive; unpack it and pass the folder"),
    ("documents.txt", b"SQLite format 3\0", "is an SQLite database; export a table: sqlite3 -header -csv"),
    ("documents.txt", pickle.dumps(["a"]), "is a pickle, which can run any code and is never loaded"),
    ("documents.txt", pickle.dumps(["a"], 0), "is a pickle, which can run any code and is never loaded"),
    (
        "documents.tar",
        sources.tar({"a.1.txt": b"a", "a.2.txt": b"b"}),
        "found 1.txt, 2.txt, which webdataset takes for one",
    ),
    ("documents.tar", sources.tar({"a.txt": b"a", "a.TXT": b"b"}), "a.TXT is there twice; expected each file once"),
    (
        "documents.parquet",
        partial(sources.parquet_bytes, {"text": [b"\xff"]}),
        'row 0: expected a string under "text"; it is bytes that',
    ),
    (
        "documents.parquet",
        partial(sources.parquet_bytes, {"text": [date(2020, 1, 1)]}),
        'row 0: expected a string under "text"; it is of the type date',
    ),
    (
        "documents.parquet",
        partial(sources.parquet_bytes, {"text": [Decimal("1.5")]}),
        'row 0: expected a string under "text"; it is of the type Decimal',
    ),
    ("tokens.npy", npy(np.zeros(9)), "tokens.npy holds float64; expected token ids, integers"),
    ("tokens.npy", npy(np.asfortranarray(np.ones((2, 3), int))), "stores its array column by column (Fortran order)"),
    ("completions.jsonl", DEEP, "completions.jsonl, line 1: expected a JSON object: maximum recursion depth exceeded"),
    (
        "completions.jsonl",
        b'{"prompt": 1, "completion": "a"}',
        'completions.jsonl, line 1: expected "prompt" and "completion"',
    ),
    ("completions.jsonl", b'{"messages": [5]}', "completions.jsonl, line 1: messages need a chat template"),
    (
        "it.index",
        b"# nothing\ns.tar # 99999999999999999999 rows",
        "it.index, line 2: the shard cannot hold 9999999999",
    ),
    ("it.index", b"s.tar # 2147483647 rows", "it.index, line 1: the shard cannot hold 2147483647 rows"),
    ("it.index", b"gs://b/s.tar # 9999999999 rows", "it.index, line 1: the shard cannot hold 9999999999 rows"),
    ("it.index", b"s.tar # " + b"9" * 5000 + b" rows", "it.index, line 1: the shard cannot hold 9999"),
    ("it.index", b"s.tar # 5000 rows", "s.tar holds 1 rows, but the index file records 5000"),
    ("it.index", NOT_UTF8, "it.index is not UTF-8 text: 'utf-8' codec can't decode byte 0xff in position 0"),
    ("it.index", b"", "it.index lists no shards; expected one path per line"),
    ("it.index", b"a\0b", "it.index, line 1: expected the path of a shard, got"),
    ("it.index", b"a" * 5000, "is missing"),
    ("it.index", b".", "is not a file"),
    ("s.tar", b"", "is truncated or damaged: unexpected end of file"),
    ("s.tar", b"x" * 2000, "is truncated or damaged: not a tar header"),
    ("s.tar", b"\0" * 1024, "is truncated or damaged: it holds no files"),
    ("input_id.npy", b"", "member input_id.npy is not a complete .npy array: EOF: reading magic string"),
    ("input_id.npy", npy_header("-" * 6000), "member input_id.npy is not a complete .npy array: "),
    ("input_id.npy", npy_header("-" * 6000, 2), "member input_id.npy is not a complete .npy array: "),
    ("input_id.npy", npy_header("(" * 900), "member input_id.npy is not a complete .npy array: "),
    ("input_id.npy", npy_header("9" * 5000), "member input_id.npy is not a complete .npy array: Cannot parse header"),
    ("input_id.npy", npy_header("{1}"), "Header is not a dictionary: {1}"),
    ("input_id.npy", npy_header("{'descr': '<u2', 'fortran_order': False, 'shape': None}"), "shape is not valid: None"),
    (
        "input_id.npy",
        npy_header(f"{{'descr': '<u2', 'fortran_order': False, 'shape': ({2**70},)}}"),
        "member input_id.npy is not a complete .npy array: Python int too large",
    ),
    (
        "input_id.npy",
        npy_header(f"{{'descr': '<u2', 'fortran_order': False, 'shape': ({2**70}, 4)}}"),
        "member input_id.npy is not a complete .npy array: Python int too large",
    ),
    (
        "input_id.npy",
        npy_header(f"{{'descr': '<u2', 'fortran_order': False, 'shape': ({2**40}, 0)}}"),
        "has rows of 0 tokens",
    ),
    ("config.yaml", b"5", "is damaged: expected the configuration of a run: Invalid loaded object type: int"),
    ("config.yaml", b"", "is damaged: expected the configuration of a run: 'data' is missing"),
    ("config.yaml", b"[1]", "is damaged: expected the configuration of a run"),
    ("config.yaml", NOT_UTF8, "is damaged: expected the configuration of a run: 'utf-8' codec"),
    ("config.yaml", b"a:\n  - {", "is damaged: expected the configuration of a run: line 2, column 6"),
    ("config.yaml", b"[" * 1000, "is damaged: expected the configuration of a run: maximum recursion depth exceeded"),
    ("config.yaml", b"a: &x [*x]", "is damaged: expected the configuration of a run: maximum recursion depth exceeded"),
    (
        "config.yaml",
        b"a: !!python/object:os.system x",
        "expected the configuration of a run: line 1, column 4",
    ),
    ("config.yaml", b"data: 5", "is damaged: expected the configuration of a run"),
    ("config.yaml", b"data: '${nope}'", "is damaged: expected the configuration of a run: data is not a section"),
    ("config.yaml", DATA.replace(b"null", b"[1]"), "data.bucket_path or data.checkpoint_directory is not a path"),
    (
        "config.yaml",
        DATA.replace(b": checkpoints", b": null"),
        "data.bucket_path or data.checkpoint_directory is not a path",
    ),
    ("config.yaml", DATA + b"model: 5", "is damaged: expected the configuration of a run"),
    ("config.yaml", DATA + b"model: [1]", "is damaged: expected the configuration of a run"),
    ("model_config.yaml", b"5", "expected the model sizes: Invalid loaded object type: int"),
    ("model_config.yaml", b"[1]", "expected the model sizes: expected names with values"),
    ("model_config.yaml", NOT_UTF8, "expected the model sizes: 'utf-8' codec can't decode byte 0xff"),
    ("model_config.yaml", b"a: {", "expected the model sizes: line 1, column 5"),
    ("model_config.yaml", b"a: 5", "size 'a': expected the keys of a model, got 5"),
    ("model_config.yaml", b"a: {family: [1]}", "size 'a': family must be one of gpt2"),
    ("model_config.yaml", SIZE + b", windows: 5}", "size 'a': windows: Invalid value assigned"),
    ("model_config.yaml", SIZE + b", dropout: 1}", "expected the model sizes: line 1"),
    ("model_config.yaml", SIZE.replace(b"num_head: 2", b"num_head: 0") + b"}", "size 'a': num_head must be at least 1"),
    (
        "model_config.yaml",
        SIZE.replace(b"N: 1", b"N: '${nope}'") + b"}",
        "size 'a': N: Value '${nope}' of type 'str' could not",
    ),
    ("manifest.json", b"{", "is not a manifest that this version can read"),
    ("manifest.json", DEEP, "is not a manifest that this version can read"),
    ("manifest.json", b"5", "is not a manifest that this version can read"),
    ("manifest.json", {"train": SHARDS, "validation": SHARDS}, "is not a manifest that this version can read"),
    ("manifest.json", {"tokenizer": 5, "train": SHARDS, "validation": SHARDS}, "is not a manifest"),
    ("manifest.json", {"tokenizer": "bytes", "parts": 5, "train": {}, "validation": {}}, "is not a manifest"),
    ("manifest.json", {"tokenizer": "bytes", "train": {"shards": [5]}, "validation": SHARDS}, "is not a manifest"),
    ("prompts.txt", b"a\n\xff", "is not UTF-8 text: 'utf-8' codec can't decode byte 0xff in position 2"),
    ("prompts.txt", b"", "no prompts; expected one per line"),
)


def content(given: Any) -> bytes:
    """The bytes of a file: given, made by a function of a library that is imported first for it, or of JSON."""
    if callable(given):
        given = given()
    return given if isinstance(given, bytes) else json.dumps(given).encode()


# Contents of a metrics.jsonl and the number of its damaged line, which is passed over.
DAMAGED_LINES: list[tuple[bytes, int]] = [
    (b'{"step": "x"}\n{"step": 1}', 1),
    (b'{"step": 1}\n{"step": "x"}\n{"step": 2}', 2),
    (b'{"step": null}\n{"step": 1}', 1),
    (b'{"event": "resume", "step": "x"}\n{"step": 1}', 1),
    (b'{"step": 1, "train/loss": "a"}\n{"step": 2}', 1),
    (b'{"step": 1, "train/loss": [1]}\n{"step": 2}', 1),
    (b'{"step": 1, "mfu": 1e999}\n{"step": 2}', 1),
    (b'{"step": 1, "mfu": 1' + b"0" * 400 + b'}\n{"step": 2}', 1),
    (b"5\n5", 1),
    (DEEP + b'\n{"step": 1}', 1),
]
