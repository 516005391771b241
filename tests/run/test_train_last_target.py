"""A corpus of rows with max_context + 1 tokens trains each position; one of max_context says what it leaves out."""

import numpy as np
import pytest
import yaml

from tests.helpers import cli, hosts
from zero.commands.cli import compose
from zero.corpus.preparing.options import CorpusOptions
from zero.corpus.preparing.prepare import prepare
from zero.corpus.text.tokenizers import ByteTokenizer
from zero.run.data import resolve_data

LEARNED = ("model.override.alibi_attn=false", f"model.override.block_size={cli.CONTEXT}", "training.total_steps=6")
LONGER = (
    "data.index_path_train=longer/index/longer_train.index",
    "data.index_path_validation=longer/index/longer_validation.index",
)
STAGED = ("training.staged_warmup_steps=2", "training.warmup_train_context=8")


@pytest.fixture(scope="module")
def _longer(forks: cli.Forks) -> None:
    prepare(
        forks.workplace / "text",
        "longer",
        CorpusOptions(ByteTokenizer(), cli.CONTEXT + 1),
        directory=forks.workplace / "longer",
        index_directory=forks.workplace / "longer" / "index",
        progress=False,
    )


@pytest.mark.slow  # the next test and tests/training/test_step_last_target.py are short forms
@pytest.mark.usefixtures("_longer")
def test_longer_rows_train_all_positions(forks: cli.Forks) -> None:
    """Also in the short sequences of the staged warmup; the saved configuration has it, for a resume."""
    run = forks.train("longer-rows", *cli.TINY, *LEARNED, *LONGER, *STAGED)
    assert yaml.safe_load((run / "config.yaml").read_text())["data"]["last_target"] is True
    lengths = [line["sequence_length"] for line in cli.metrics(run) if "sequence_length" in line]
    assert lengths[0] == 8 and lengths[-1] == cli.CONTEXT
    assert len(cli.losses(run)) == 6
    assert "positions: the last of the" not in (run / "main_zero.log").read_text()


@pytest.mark.slow
@pytest.mark.usefixtures("_longer")
def test_two_hosts_and_a_resume(forks: cli.Forks) -> None:
    """Two hosts find the target in the same rows as one, and continue a run of one with it."""
    job = (*cli.TINY, *LEARNED, *LONGER, "training.evaluation_frequency=3")
    whole = forks.train("one-host", *job)
    two = ("training.batch_size=8", "training.gradient_accumulation_steps=1", "distributed.cpu_devices=4")
    done = hosts.finish(hosts.start([forks.workplace] * 2, *job, *two, "hydra.run.dir=two-hosts"))
    assert [one.returncode for one in done] == [0, 0], [one.stderr for one in done]
    run = forks.workplace / "two-hosts"
    assert yaml.safe_load((run / "config.yaml").read_text())["data"]["last_target"] is True
    for key in ("train/loss", "validation/loss"):
        np.testing.assert_allclose(cli.losses(run, key), cli.losses(whole, key), rtol=1e-5)
    resumed = forks.fork("one-host", 3)
    assert cli.losses(resumed) == cli.losses(whole)


@pytest.mark.slow
def test_rows_of_the_context_say_so(forks: cli.Forks) -> None:
    run = forks.train("rows-of-the-context", *cli.TINY, *LEARNED)
    assert yaml.safe_load((run / "config.yaml").read_text())["data"]["last_target"] is False
    said = (run / "main_zero.log").read_text()
    assert said.count(f"rows of {cli.CONTEXT + 1} tokens train it (zero-prepare --row-tokens)") == 1


@pytest.mark.usefixtures("_longer")
def test_rows_decide(forks: cli.Forks, monkeypatch: pytest.MonkeyPatch) -> None:
    """One more token in all index files, and no other number, is that target; a resumed run keeps what it had."""
    monkeypatch.chdir(forks.workplace)
    other = f"data.index_path_validation={cli.INDICES[1]}"
    for overrides, expected in (
        (LONGER, True),
        ((*LONGER, other), False),
        ((), False),
        ((*LONGER, f"data.max_context={cli.CONTEXT - 16}"), False),
        ((*LONGER, "data.last_target=false"), False),
    ):
        config, size = compose([*cli.TINY, *LEARNED, *overrides])
        resolved = resolve_data(config.data, ByteTokenizer(), size, "", has_rows=True)
        assert resolved.last_target is expected, overrides
    config, size = compose([*cli.TINY, *LEARNED, *LONGER])
    resumed = resolve_data(config.data, ByteTokenizer(), size, "", has_rows=False)  # saved without the key
    assert resumed.last_target is False
