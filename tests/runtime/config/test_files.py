"""The files of conf/: found in the repository and in a wheel, and a mistake in a model size is named."""

from pathlib import Path

import pytest

from zero.runtime.config.files import conf_directory, load_sizes
from zero.runtime.errors import UserError

CONF = conf_directory()


def test_packaged_conf() -> None:
    """The directory zero/conf of the package is the directory conf of the repository."""
    assert CONF.samefile(Path(__file__).parents[3] / "conf")


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ("num_head: 3", "num_heads: 3", ["num_heads", "expected one of embedding_dim"]),
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
    text = (CONF / "model_config.yaml").read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    for part in ["sizes.yaml", *named]:
        with pytest.raises(UserError, match=part) as caught:
            load_sizes(path)
    assert "\n" not in str(caught.value)


def test_missing_sizes_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"none.yaml: not found"):
        load_sizes(tmp_path / "none.yaml")
    (tmp_path / "empty.yaml").write_text("test:\n")
    with pytest.raises(UserError, match=r"empty.yaml: size 'test'"):
        load_sizes(tmp_path / "empty.yaml")
