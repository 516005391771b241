"""`python -m zero.commands.check` on programs that were not changed."""

from pathlib import Path

import pytest

from zero.commands import check

EXAMPLES = Path(__file__).parents[2] / "examples"
READY = ["flax_classifier/train.py", "sam/train.py", "translation/train.py", "diffusion/train.py"]


@pytest.mark.parametrize("program", READY)
def test_program_is_ready(program: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert check.main([str(EXAMPLES / program), "optimizer", "create_state"]) == 0
    first, whole, _, last = capsys.readouterr().out.splitlines()
    before, after = (int(word.replace(",", "")) for word in first.split() if word[0].isdigit() and len(word) > 3)
    assert before / 9 < after < before / 5
    assert whole.startswith("whole on every device: ") and last == "the optimizer works on slices unchanged"


def test_program_would_be_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """The refusal is that of the sharded program, with its remedy."""
    program = str(EXAMPLES / "language_model" / "train.py")
    assert check.main([program, "optimizer", "create_state", "--devices", "3"]) == 1
    first, *_, last = capsys.readouterr().out.splitlines()
    assert first.startswith("optimizer state per device: ") and "unknown" not in first
    assert last.startswith("refused: clip_by_global_norm is not element-wise")
    assert "use zero.across_shards(optax.clip_by_global_norm(...))" in last


def test_names_that_a_program_lacks() -> None:
    with pytest.raises(
        SystemExit,
        match=r"has no 'tx' at its top level\. .* print\(check\.examine\(optimizer, params, 32\).text\)",
    ):
        check.main([str(EXAMPLES / "sam" / "train.py"), "tx", "create_state", "--devices", "32"])
