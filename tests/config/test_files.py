"""The files of conf/: found in the repository and in a wheel, and a mistake in a model size is named."""

import io
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from zero.base.errors import UserError
from zero.config.files import _content, conf_directory, literal
from zero.job import sizes as sizes_of_models
from zero.job.sizes import SizeKeys, Sizes, load_sizes
from zero.models.config import GPTConfig

CONF = conf_directory()


def test_packaged_conf() -> None:
    """The directory zero/conf of the package is the directory conf of the repository."""
    assert CONF.samefile(Path(__file__).parents[2] / "conf")


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ("num_head: 3", "num_heads: 3", ["num_heads", "did you mean num_head or"]),
        ("  num_head: 3\n", "", ["num_head", "Missing mandatory"]),
        ("num_head: 3", "num_head: 5", ["embedding_dim 48", "num_head 5"]),
        ("num_head: 3", "num_head: 0", ["num_head"]),
        ("num_head: 3", "num_head: three", ["num_head"]),
        ("N: 2", "N: 0", ["N"]),
        ("dropout: 0.1", "dropout: 1.0", ["dropout"]),
        ("vocab_chunks: 3", "vocab_chunks: 0", ["vocab_chunks"]),
        ("vocab_chunks: 3", "vocab_chunks: 200", ["vocab_chunks"]),
        ("alibi_attn: true", "alibi_attn: maybe", ["alibi_attn"]),
        ("  mup_base_width: 64\n", "", ["bytes_mup", "parametrization: mup needs mup_base_width"]),
        ("  tied: false\n", "", ["bytes_mup", "parametrization: mup needs tied: false"]),
    ],
)
def test_mistakes_in_sizes(tmp_path: Path, old: str, new: str, named: list[str]) -> None:
    """A mistake in a size names the file, the size and the key."""
    path = tmp_path / "sizes.yaml"
    text, *_ = (CONF / "model_config.yaml").read_text().partition('"124m":')
    assert old in text
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(UserError) as caught:
        load_sizes(path)
    assert all(part in str(caught.value) for part in ["sizes.yaml", *named]) and "\n" not in str(caught.value)


def test_missing_sizes_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"none.yaml: not found"):
        load_sizes(tmp_path / "none.yaml")
    (tmp_path / "empty.yaml").write_text("test:\n")
    with pytest.raises(UserError, match=r"empty.yaml: size 'test'"):
        load_sizes(tmp_path / "empty.yaml")


def chosen(size: str, **override: Any) -> GPTConfig:
    return load_sizes().chosen(SizeKeys(size, override=override))


def test_override_of_an_entry() -> None:
    """Overrides are merged before defaults are derived, those of a family included."""
    assert chosen("test", N=5) == replace(load_sizes()["test"], N=5)
    mup = chosen("bytes", parametrization="mup", mup_base_width=64, tied=False)
    assert mup == load_sizes()["bytes_mup"] and mup.attention_scale == "linear"
    assert chosen("pythia_1b", family="llama", num_head=8).norm == "rms"


def test_heads_by_their_width() -> None:
    """With num_head null the number of heads is the width of the model over that of a head."""
    widths = [chosen("test", num_head=None, head_dim=16, embedding_dim=width).num_head for width in (32, 64, 128)]
    assert widths == [2, 4, 8]


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ({"N": 0}, "model.size=test with model.override={'N': 0}: N must be at least 1"),
        ({"layers": 3}, r"model.override={'layers': 3}: layers: .*did you mean layer\?"),
        ({"zzz": 3}, "zzz: no such key; expected one of embedding_dim"),
        ({"N": "many"}, "model.override={'N': 'many'}: N: "),
        ({"family": "gpt9"}, "family must be one of gpt2"),
        ({"num_head": None}, "num_head"),
        ({"num_head": None, "head_dim": 20}, "embedding_dim 48 is not a multiple of head_dim 20"),
    ],
    ids=["impossible", "unknown", "nothing similar", "type", "family", "no heads", "heads of another width"],
)
def test_override_refusals(override: dict[str, Any], named: str) -> None:
    with pytest.raises(UserError, match=named) as caught:
        chosen("test", **override)
    assert "\n" not in str(caught.value)


def test_entry_of_another_file(tmp_path: Path) -> None:
    """It is named with its file, which may have an entry with the name of one of conf."""
    path = tmp_path / "my.yaml"
    text = (CONF / "model_config.yaml").read_text().partition("\ntest:")[2].partition("\n\n")[0]
    path.write_text(f"mine:{text}\ntest_vq:{text}".replace("N: 2", "N: 3"))
    mine = chosen(f"{path}:mine", dropout=0.0)
    assert mine == replace(load_sizes()["test"], N=3, dropout=0.0)
    assert chosen(f"{path}:test_vq", dropout=0.0) == mine and chosen("test_vq") == load_sizes()["test_vq"]


@pytest.mark.parametrize(
    ("size", "message"),
    [
        ("my.yaml:none", "model.size=my.yaml:none: expected an entry of my.yaml: mine, other"),
        ("my.yaml:", "model.size=my.yaml:: expected an entry of my.yaml: mine, other"),
        ("my.yaml:test", "model.size=my.yaml:test: expected an entry of my.yaml: mine, other"),
        (
            "gone.yaml:mine",
            "model.size=gone.yaml:mine: gone.yaml not found; if it has moved, set model.size=FILE:mine",
        ),
        ("wrong.yaml:right", "wrong.yaml: size 'wrong': expected the keys of a model, got 5"),
    ],
)
def test_entries_that_a_file_does_not_have(
    size: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message names the file and the entries that it has."""
    monkeypatch.chdir(tmp_path)
    text = (CONF / "model_config.yaml").read_text().partition("\ntest:")[2].partition("\n\n")[0]
    Path("my.yaml").write_text(f"mine:{text}\nother:{text}")
    Path("wrong.yaml").write_text(f"right:{text}\nwrong: 5\n")
    with pytest.raises(UserError, match=f"^{re.escape(message)}$"):
        chosen(size)


@pytest.mark.parametrize("size", ["none", "my.yaml", ":test"])
def test_sizes_that_conf_does_not_have(size: str) -> None:
    """The message says how an entry of a file is named."""
    said = r"(did you mean test\?|no such size; --help sizes lists all)"
    message = rf"^model\.size={size}: {said}.*, or FILE:ENTRY, such as my\.yaml:mine$"
    with pytest.raises(UserError, match=message):
        chosen(size)


def test_sweep_over_entries_of_files() -> None:
    """The command line takes names of files with entries in them, alone and as the values of a sweep."""
    parser = OverridesParser.create()
    alone, sweep = parser.parse_overrides(["model.size=../a/my.yaml:mine", "model.size=my.yaml:1_1b,b.yaml:y,test"])
    assert alone.value() == "../a/my.yaml:mine" and not alone.is_sweep_override()
    jobs = [parser.parse_override(f"model.size={text}").value() for text in sweep.sweep_string_iterator()]
    assert jobs == ["my.yaml:1_1b", "b.yaml:y", "test"]


def test_files_of_published_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """The names in a file begin as its own does, so that only this one is read for them."""
    for path in (CONF / "models").glob("*.yaml"):
        assert [name for name in Sizes(path) if not name.startswith(path.stem)] == []
    read: list[str] = []

    def recorded(path: Path, message: str) -> Any:
        read.append(path.name)
        return yaml.safe_load(path.read_text())

    monkeypatch.setattr(sizes_of_models, "read_yaml", recorded)
    sizes = Sizes(CONF / "model_config.yaml", CONF / "models")
    assert sizes.chosen(SizeKeys("llama3_8b")).N == 32 and sizes.chosen(SizeKeys("gpt_neo_125m")).N == 12
    assert read == ["model_config.yaml", "llama.yaml", "gpt_neo.yaml"]
    assert sizes.chosen(SizeKeys("mistral_7b", override={"N": 3})).N == 3
    assert "llama4" not in sizes and "llama4" not in load_sizes() and len(sizes) == len(list(sizes)) == len(set(sizes))


def test_own_entry_in_place_of_a_published_one(tmp_path: Path) -> None:
    """An entry of conf/model_config.yaml is found first, whatever its name."""
    path = tmp_path / "model_config.yaml"
    path.write_text(
        (CONF / "model_config.yaml")
        .read_text()
        .replace("\ntest:", "\nllama3_mine:")
        .replace("\nbytes:", "\nllama3_8b:")
    )
    sizes = Sizes(path, CONF / "models")
    assert sizes.chosen(SizeKeys("llama3_mine")) == load_sizes()["test"]
    assert sizes.chosen(SizeKeys("llama3_8b")) == load_sizes()["bytes"]
    with pytest.raises(UserError, match=r"model.size=llama9: no such size; --help sizes lists all"):
        sizes.chosen(SizeKeys("llama9"))


TEXTS = {
    "a repeated key": "a: 1\na: 2\n",
    "not YAML": "a: [1\n",
    "numbers and words": "a: 1e-3\nb: 2020-01-01\nc: on\nd: 0o7\ne: 1_000\nf: .inf\ng: 12:30\n",
    "exponents": "a: 1.5e3\nb: 1_0e3\nc: -2.E-3\nd: .5e3\ne: .5e+3\nf: 1e\ng: 1e3x\nh: 1e3_0\n1e3: i\n",
    "a repeated key of another type": "1: a\n1: b\n",
    "a repeated key within": "a: {b: {c: 1, c: 2}}\n",
    "an anchor": "a: &x {b: 1}\nc: *x\nd: {<<: *x, e: 2}\n",
    "an interpolation": "a: ${b}\nb: 3\n",
    "an interpolation beside a tab": "a: ${oc.env:HOME}\nb:\t3\n",
    "a set": "a: !!set {x}\n",
    "code": "a: !!python/object/apply:os.system [ls]\n",
    "a tab": "a:\t1\n",
    "lines": "a: 'x\n  y'\n? b\n: c\n",
}


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_quick_reading_is_omegaconfs(text: str) -> None:
    """libyaml reads what omegaconf reads; what it does not read has the error of omegaconf."""
    try:
        expected: Any = OmegaConf.to_container(OmegaConf.load(io.StringIO(text)))
    except (YAMLError, OmegaConfBaseException) as error:
        with pytest.raises(type(error), match=f"^{re.escape(str(error))}$"):
            _content(text)
    else:
        assert repr(_content(text)) == repr(expected)


@pytest.mark.parametrize(
    "text", [r"${oc.env:HOME}", r"\${a}", r"\\${a}", "a\\b${", "${", "\\", "a ${x} \\", "$\\{", "it's ${a:'}'}"]
)
def test_literal_text(text: str) -> None:
    """omegaconf returns a literal text as it was, whatever stands before an interpolation."""
    value = {"a": [text], "b": {"c": text}, "d": (1, None)}
    resolved = OmegaConf.to_container(OmegaConf.create(literal(value)), resolve=True)
    assert resolved == {"a": [text], "b": {"c": text}, "d": [1, None]}


def test_sizes_are_not_evaluated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Text of a user's file is neither looked up in the environment nor executed, as a value or as an override."""
    monkeypatch.setenv("SECRET", "5")
    path = tmp_path / "my.yaml"
    text = (CONF / "model_config.yaml").read_text().partition("\ntest:")[2].partition("\n\n")[0]
    for value in ("${oc.env:SECRET}", f"${{new_directory:{tmp_path}/made}}"):
        path.write_text(f"mine:{text}".replace("N: 2", f"N: '{value}'"))
        with pytest.raises(UserError, match=re.escape(value)):
            load_sizes(path)
        path.write_text(f"mine:{text}")
        with pytest.raises(UserError, match=re.escape(value)):
            chosen(f"{path}:mine", N=value)
    assert not (tmp_path / "made").exists()
