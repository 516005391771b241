"""A run continues on the data and with the tokenizer that it began with; other ones are refused by name."""

import json
import random
import shutil
from dataclasses import asdict
from pathlib import Path

import pytest

from tests.helpers import cli
from tests.helpers.loaders import open_loader
from zero.base.errors import UserError
from zero.corpus.preparing.options import CorpusOptions
from zero.corpus.preparing.prepare import prepare
from zero.corpus.text.tokenizers import FileTokenizer, bytes_as_file
from zero.run.identity import check_identity
from zero.run.restore import TrainingPosition

RESUME = ("--resume", "hydra.run.dir=run", "training.total_steps=14")
TOKENIZER = "corpus/tiny/tokenizer.json"


def prepare_text(place: Path, seed: int) -> None:
    """Another text of the same size, in place of the last one, gives as many rows of both splits."""
    words = random.Random(seed)
    place.mkdir(exist_ok=True)
    (place / "text.txt").write_text("".join(words.choice("shard gat,\n") for _ in range(20_000)))
    corpus = place / "corpus"
    prepare(
        place / "text.txt",
        "tiny",
        CorpusOptions(FileTokenizer("tokenizer.json", bytes_as_file()), cli.CONTEXT),
        directory=corpus,
        index_directory=corpus / "index",
        workers=1,
        overwrite=True,
        progress=False,
    )


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A workplace with a finished run."""
    root = tmp_path_factory.mktemp("identity")
    prepare_text(root, seed=0)
    cli.Lasting(root).train("run", *cli.TINY, f"data.tokenizer={TOKENIZER}")
    return root


@pytest.fixture
def copied(place: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(place, tmp_path / "copied"))


def test_replaced_corpus(copied: Path) -> None:
    """A corpus of as many rows that replaced another one: the resume is refused, and writes nothing."""
    before = cli.contents(copied / "run")
    prepare_text(copied, seed=1)
    runs = cli.Lasting(copied)
    done = runs.run(*RESUME)
    cli.check_refusal(done, f"{cli.INDICES[0]} has as many rows as before, but other contents (by manifest)")
    assert "model.warm_start=true model.model_path=RUN" in done.stderr
    assert "nothing to do" in runs.check("--resume", "hydra.run.dir=run").stderr  # it needs no data
    assert cli.contents(copied / "run") == before


@pytest.mark.wide  # reading/test_contents.py has contents at another place
def test_moved_corpus(copied: Path) -> None:
    """The same contents at another path, by another name, are the same corpus and tokenizer; prepared again too."""
    shutil.move(copied / "corpus", copied / "before")
    prepare_text(copied, seed=0)
    shutil.move(copied / "corpus", copied / "elsewhere")
    shutil.move(copied / "elsewhere" / "tiny", copied / "elsewhere" / "renamed")
    indices = [f"elsewhere/index/tiny_{split}.index" for split in ("train", "validation")]
    for index in indices:
        (copied / index).write_text((copied / index).read_text().replace("/tiny/", "/renamed/"))
    keys = [f"data.index_path_{split}={index}" for split, index in zip(("train", "validation"), indices, strict=True)]
    run = cli.Lasting(copied).fork("run", 6, *keys, "data.tokenizer=elsewhere/renamed/tokenizer.json")
    assert cli.metrics(run) == cli.metrics(copied / "run")
    assert "contents" not in (run / "main_zero.log").read_text()


def test_replaced_tokenizer(copied: Path) -> None:
    """A file that replaced the tokenizer: refused by its corpus, by a resume without a manifest, and by sampling."""
    tokenizer = copied / TOKENIZER
    runs = cli.Lasting(copied)
    tokenizer.write_bytes(tokenizer.read_bytes() + b"\n")
    cli.check_refusal(
        runs.run(*RESUME), "data.tokenizer: corpus", "was prepared with tokenizer tokenizer.json sha256:", "use its own"
    )
    tokenizer.with_name("manifest.json").unlink()
    for arguments in (RESUME, ("mode=sample", "model.model_path=run")):
        done = runs.run(*arguments)
        cli.check_refusal(done, "step 12", "was trained with tokenizer tokenizer.json sha256:", "copy of that file")


@pytest.mark.wide  # text/test_tokenizers.py has them in the identity
def test_other_files_beside_the_tokenizer(copied: Path) -> None:
    """A file that gives the same tokenizer another end of text: a resume and sampling are refused."""
    runs = cli.Lasting(copied)
    (copied / TOKENIZER).with_name("tokenizer_config.json").write_text('{"eos_token": "a"}')
    for arguments in (RESUME, ("mode=sample", "model.model_path=run")):
        done = runs.run(*arguments)
        cli.check_refusal(
            done, "step 12", "was trained with end_of_text=0", "say end_of_text=97", "tokenizer_config.json"
        )


def test_replaced_validation_set(
    copied: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Training continues, and a warning says that losses of validation are of other texts."""
    monkeypatch.chdir(copied)
    tokenizer = FileTokenizer("any.json", bytes_as_file())
    position = TrainingPosition(global_rows=16, step=12)

    def start() -> None:
        training, validation = (open_loader(index, global_rows=16, context=32, vocab_size=256) for index in cli.INDICES)
        check_identity(position, tokenizer, training, {"web": validation})

    start()
    position = TrainingPosition(**json.loads(json.dumps(asdict(position))))  # as a checkpoint gives it back
    start()
    assert not caplog.records
    path = copied / "corpus" / "tiny" / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["validation"]["shards"][0]["sha256"] = "0" * 64
    path.write_text(json.dumps(manifest))
    start()
    assert "the validation set web has changed since step 12: validation/loss" in caplog.text


def test_hosts_with_different_data(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hosts that each have a disk are compared: one with other contents is named."""
    monkeypatch.chdir(copied)
    loader = open_loader(cli.INDICES[0], global_rows=16, context=32, vocab_size=256)
    of_host_0 = [["elsewhere/tiny_train.index", "blocks", "0"] for _ in loader.contents]  # another disk
    monkeypatch.setattr("zero.hosts.agreement.broadcast", lambda name, text: json.dumps(of_host_0))
    monkeypatch.setattr("zero.hosts.agreement.reports", lambda name, report: {2: report})
    message = r"elsewhere/tiny_train.index: host 0 has other contents \(by blocks\) than host 2 \(by manifest\)"
    with pytest.raises(UserError, match=message):
        check_identity(TrainingPosition(16), FileTokenizer("any.json", bytes_as_file()), loader, {})
