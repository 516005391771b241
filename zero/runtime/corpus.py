"""Text to token shards and the index files that list them. The same input and arguments give the same bytes."""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import sysconfig
import tarfile
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from tqdm import tqdm

from zero.runtime import UserError
from zero.runtime.text import Tokenizer

# What counts as text in a folder. A file outside this list can still be named as the source itself.
_SUFFIXES = """
    .txt .md .rst .tex .org .jsonl .py .pyi .ipynb .c .h .cc .cpp .hpp .cu .cuh .m .rs .go .java .kt .scala .swift .cs
    .js .mjs .jsx .ts .tsx .html .css .rb .php .pl .lua .r .jl .hs .ml .ex .exs .erl .clj .lisp .sh .bash .sql .proto
    .cmake .toml .yaml .yml .ini .cfg
"""
# Of the standard library: tests are repetitive, encodings and pydoc_data are tables, the rest is not its own.
_NOT_STDLIB = {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data"}


@dataclass(frozen=True)
class Split:
    """What one half of a corpus holds."""

    documents: int
    tokens: int  # ends of text included
    rows: int
    shards: int


@dataclass(frozen=True)
class Corpus:
    """A prepared corpus: `directory` holds its shards and this summary as manifest.json."""

    directory: Path
    train_index: Path
    validation_index: Path
    train: Split
    validation: Split
    skipped: int  # files that are not UTF-8


def prepare(
    source: str | Path,
    name: str,
    *,
    directory: Path,
    index_directory: Path,
    tokenizer: Tokenizer,
    row_tokens: int,
    validation_fraction: float = 0.05,
    rows_per_member: int = 256,
    rows_per_shard: int = 8192,
    overwrite: bool = False,
    progress: bool = True,
) -> Corpus:
    """Write `directory/name/*.tar`, and `name_train.index` and `name_validation.index` into `index_directory`.

    Documents are joined with the tokenizer's end of text and cut into rows without loss: the last row of a split is
    padded, and a length.npy says so. A document is in the validation split where the hash of its text says so, or the
    one with the lowest hash where no other is; of a single document it is the last part.

    Shards are written aside and then renamed, and index files come last: whenever this is killed, no index lists a
    shard that is missing. What stands already is kept, if it was made with these arguments.

    Args:
        source: a folder (of text and source files, told by their suffix), a text file, a .jsonl file of objects with a
            "text", or `"stdlib"`: the standard library of the running Python.
        name: of the corpus.
        directory: where corpora lie.
        index_directory: where index files lie; they name the shards relative to it.
        tokenizer: as `zero.runtime.text.load_tokenizer` gives it.
        row_tokens: length of a row, a training sample; the longest context that a model can be trained with.
        validation_fraction: of the documents, above 0 and below 1.
        rows_per_member: rows in one array. Reading pays per array, hardly per row.
        rows_per_shard: a multiple of `rows_per_member`.
        overwrite: replace what was made with other arguments.
        progress: draw a bar on a terminal.

    Raises:
        UserError: there is no text, or a corpus of this name that was made otherwise.
    """
    if not 0 < validation_fraction < 1:
        raise UserError(f"validation_fraction must lie between 0 and 1, not {validation_fraction}")
    if row_tokens < 2 or rows_per_member < 1 or rows_per_shard < 1 or rows_per_shard % rows_per_member:
        raise UserError(
            f"row_tokens {row_tokens} must be at least 2 and rows_per_shard {rows_per_shard} a multiple of "
            f"rows_per_member {rows_per_member}"
        )
    arguments: dict[str, str | int | float] = {
        "source": str(source),
        "tokenizer": tokenizer.name,
        "vocab_size": tokenizer.vocab_size,
        "row_tokens": row_tokens,
        "validation_fraction": validation_fraction,
        "rows_per_member": rows_per_member,
        "rows_per_shard": rows_per_shard,
    }
    place = Path(directory, name)
    if not overwrite and (standing := _standing(place, Path(index_directory), arguments)):
        return standing
    files = _files(source)
    place.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{name}-", dir=place.parent) as aside:
        new = Path(aside, "new")

        def write(texts: Iterable[str], is_validation: Callable[[str], bool]) -> tuple[Split, Split]:
            shutil.rmtree(new, ignore_errors=True)
            new.mkdir()
            train = _Writer(new, "train", tokenizer, row_tokens, rows_per_member, rows_per_shard)
            validation = _Writer(new, "validation", tokenizer, row_tokens, rows_per_member, rows_per_shard)
            for text in texts:
                (validation if is_validation(text) else train).add(text)
            return train.close(), validation.close()

        size = sum(file.stat().st_size for file in files)
        hidden = None if progress else True  # None: hidden where there is no terminal
        with tqdm(total=size, unit="B", unit_scale=True, desc=f"preparing {name}", disable=hidden, leave=False) as bar:
            reader = _Reader(files, bar.update)
            train, validation = write(reader, lambda text: _hash(text) < validation_fraction * 2**64)
        if not train.documents or not validation.documents:  # a few documents
            texts = list(_Reader(files))
            if not texts:
                raise UserError(f"{source} holds no text")
            if len(texts) == 1:
                texts = _halves(texts[0], validation_fraction)
                train, validation = write(texts, lambda text: text is texts[1])
            else:
                lowest = min(map(_hash, texts))
                train, validation = write(texts, lambda text: _hash(text) == lowest)
            if not train.documents or not validation.documents:
                raise UserError(f"{source} holds too little text to set documents aside for validation")
        corpus = Corpus(place, *_indices(place, Path(index_directory)), train, validation, reader.skipped)
        counts = {"train": asdict(train), "validation": asdict(validation), "skipped": reader.skipped}
        Path(new, "manifest.json").write_text(json.dumps(arguments | counts, indent=1) + "\n", encoding="utf-8")
        _publish(corpus, new, Path(aside, "old"), rows_per_shard)
    return corpus


def _indices(place: Path, index_directory: Path) -> tuple[Path, Path]:
    return index_directory / f"{place.name}_train.index", index_directory / f"{place.name}_validation.index"


def _shard(split: str, number: int) -> str:
    return f"{split}-{number:05d}.tar"


def _standing(place: Path, index_directory: Path, arguments: dict[str, str | int | float]) -> Corpus | None:
    """What an earlier call left, None where it left nothing whole; UserError where the arguments were others."""
    indices = _indices(place, index_directory)
    try:
        manifest = json.loads(Path(place, "manifest.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    for key, now in arguments.items():
        if manifest.get(key) != now:
            raise UserError(
                f"corpus {place} was prepared with {key}={manifest.get(key)}, not {key}={now}: "
                "give another name, or --overwrite to replace it"
            )
    corpus = Corpus(place, *indices, Split(**manifest["train"]), Split(**manifest["validation"]), manifest["skipped"])
    shards = [_shard("train", i) for i in range(corpus.train.shards)]
    shards += [_shard("validation", i) for i in range(corpus.validation.shards)]
    whole = all(path.is_file() for path in (*indices, *(place / shard for shard in shards)))
    return corpus if whole else None


def _publish(corpus: Corpus, new: Path, old: Path, rows_per_shard: int) -> None:
    """Put finished shards in their place. At no moment does an index list a shard that is not there."""
    halves = ((corpus.train_index, "train", corpus.train), (corpus.validation_index, "validation", corpus.validation))
    for index, _, _ in halves:
        index.parent.mkdir(parents=True, exist_ok=True)
        index.unlink(missing_ok=True)
    if corpus.directory.exists():
        corpus.directory.rename(old)
    new.rename(corpus.directory)
    for index, name, split in halves:
        relative = Path(os.path.relpath(corpus.directory, index.parent)).as_posix()
        lines = [f"# {corpus.directory.name}, {name}: {split.tokens} tokens of {split.documents} documents"]
        for i in range(split.shards):
            rows = min(rows_per_shard, split.rows - i * rows_per_shard)
            lines.append(f"{relative}/{_shard(name, i)} # {rows} rows")
        aside = index.with_name(f".{index.name}.{os.getpid()}")
        aside.write_text("\n".join(lines) + "\n", encoding="utf-8")
        aside.replace(index)


# ---- documents -------------------------------------------------------------------------------------------------------


def _files(source: str | Path) -> list[Path]:
    """The files that hold the text of a source, in an order that does not depend on the file system."""
    if source == "stdlib":
        root = Path(sysconfig.get_paths()["stdlib"])
        skip, suffixes = _NOT_STDLIB, {".py"}
    else:
        root = Path(source)
        skip, suffixes = {"__pycache__", "node_modules"}, set(_SUFFIXES.split())
    if root.is_file():
        return [root]
    if not root.is_dir():
        raise UserError(f'{source}: no such file or folder; expected one that holds text, or "stdlib"')
    files = []
    for parent, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in skip and not name.startswith(".")]
        files += [Path(parent, name) for name in names if Path(name).suffix.lower() in suffixes]
    if not files:
        raise UserError(f"{source} holds no text files; expected some of {' '.join(sorted(suffixes))}")
    return sorted((file for file in files if file.is_file()), key=lambda file: file.relative_to(root).parts)


class _Reader:
    """The documents of some files: each its whole text, or each line of a .jsonl. Empty ones are left out."""

    def __init__(self, files: list[Path], report: Callable[[int], object] = lambda size: None):
        self._files, self._report = files, report
        self.skipped = 0

    def __iter__(self) -> Iterator[str]:
        for file in self._files:
            for text in self._lines(file) if file.suffix.lower() == ".jsonl" else self._whole(file):
                if text:
                    yield text

    def _whole(self, file: Path) -> Iterator[str]:
        try:
            data = file.read_bytes()
            self._report(len(data))
            yield data.decode("utf-8-sig")
        except OSError as error:
            raise UserError(f"{file} cannot be read: {error.strerror}") from error
        except UnicodeDecodeError:
            self.skipped += 1

    def _lines(self, file: Path) -> Iterator[str]:
        with open(file, "rb") as lines:
            for number, line in enumerate(lines, 1):
                self._report(len(line))
                if not line.strip():
                    continue
                try:
                    text = json.loads(line)["text"]
                except (ValueError, KeyError, TypeError):
                    text = None
                if not isinstance(text, str):
                    raise UserError(f'{file}, line {number}: expected a JSON object with a string under "text"')
                yield text


def _hash(text: str) -> int:
    """64 bits. Of the text, not the name: copies of a document stay on one side of the split."""
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest())


def _halves(text: str, validation_fraction: float) -> list[str]:
    """A text cut at the last line break before its last part, or within a line where there is none."""
    cut = int(len(text) * (1 - validation_fraction))
    cut = text.rfind("\n", 0, cut) + 1 or cut
    return [text[:cut], text[cut:]]


# ---- rows ------------------------------------------------------------------------------------------------------------


class _Writer:
    """Cuts a stream of documents into rows, rows into members, members into shards."""

    def __init__(
        self,
        directory: Path,
        split: str,
        tokenizer: Tokenizer,
        row_tokens: int,
        rows_per_member: int,
        rows_per_shard: int,
    ):
        self._directory, self._split, self._tokenizer = directory, split, tokenizer
        self._row_tokens, self._rows_per_member, self._rows_per_shard = row_tokens, rows_per_member, rows_per_shard
        self._dtype = np.min_scalar_type(tokenizer.vocab_size - 1)
        self._waiting: list[np.ndarray] = []  # less than a member
        self._waiting_tokens = 0
        self._tar: tarfile.TarFile | None = None
        self._documents = self._tokens = self._rows = self._shards = 0

    def add(self, text: str) -> None:
        tokens = np.append(
            self._tokenizer.encode(text).astype(self._dtype), self._dtype.type(self._tokenizer.end_of_text)
        )
        self._documents += 1
        self._tokens += len(tokens)
        self._waiting.append(tokens)
        self._waiting_tokens += len(tokens)
        size = self._rows_per_member * self._row_tokens
        if self._waiting_tokens >= size:
            tokens = np.concatenate(self._waiting)
            whole = len(tokens) // size * size
            for start in range(0, whole, size):
                self._write(tokens[start : start + size])
            self._waiting, self._waiting_tokens = [tokens[whole:]], len(tokens) - whole

    def close(self) -> Split:
        """Write what waits, its last row padded, and end the last shard."""
        if self._waiting_tokens:
            self._write(np.concatenate(self._waiting))
        if self._tar:
            self._tar.close()
        return Split(self._documents, self._tokens, self._rows, self._shards)

    def _write(self, tokens: np.ndarray) -> None:
        if self._rows % self._rows_per_shard == 0:
            if self._tar:
                self._tar.close()
            path = self._directory / _shard(self._split, self._shards)
            self._tar = tarfile.open(path, "w", format=tarfile.USTAR_FORMAT)  # noqa: SIM115  closed by the next one
            self._shards += 1
        key = f"{self._rows:09d}"  # the first row's number in the split
        rows = -(-len(tokens) // self._row_tokens)
        padding = rows * self._row_tokens - len(tokens)
        padded = np.append(tokens, np.full(padding, self._tokenizer.end_of_text, self._dtype))
        self._member(f"{key}.input_id.npy", padded.reshape(rows, self._row_tokens))
        if padding:
            lengths = np.full(rows, self._row_tokens, np.int32)
            lengths[-1] -= padding
            self._member(f"{key}.length.npy", lengths)
        self._rows += rows

    def _member(self, name: str, array: np.ndarray) -> None:
        assert self._tar is not None
        buffer = io.BytesIO()
        np.save(buffer, array, allow_pickle=False)
        member = tarfile.TarInfo(name)  # time, owner and mode stay at their defaults, so that bytes repeat
        member.size = buffer.tell()
        buffer.seek(0)
        self._tar.addfile(member, buffer)
