"""Runs on rows that are computed, and runs without validation: resumed, and on two hosts."""

import json
import shutil

import numpy as np
import pytest

from tests.helpers import cli, hosts
from zero.base.errors import UserError
from zero.corpus.reading.loader import Batching
from zero.corpus.reading.synthetic import SYNTHETIC, SyntheticLoader
from zero.record.metrics_file import read_metrics, read_resumes

# The indices and the corpus of `TINY` are not given: nothing is read.
COMPUTED = (
    *(key for key in cli.TINY if not key.startswith(("data.corpus", "data.index"))),
    "data.corpus=synthetic",
)


def test_rows_are_pcg64() -> None:
    """Row r is PCG64(seed, r) below the vocabulary, on any number of hosts and from any batch on."""
    loader = SyntheticLoader("synthetic", Batching(6), 5, 11, seed=3)
    batches = loader.batches()
    first, second = next(batches), next(batches)
    expected = np.stack([np.random.PCG64((3, row)).random_raw(5) % 11 for row in range(12)])
    np.testing.assert_array_equal(np.concatenate([first.tokens, second.tokens]), expected)
    again = next(loader.batches(first.cursor))
    np.testing.assert_array_equal(again.tokens, second.tokens)
    assert again.cursor == second.cursor == json.loads(json.dumps(second.cursor))
    for number in range(3):
        part = SyntheticLoader("synthetic", Batching(6, (number,), 3), 5, 11, 3)
        np.testing.assert_array_equal(next(part.batches(first.cursor)).tokens, second.tokens[2 * number :][:2])
    assert next(SyntheticLoader("synthetic:ones", Batching(2), 5, 11).batches()).tokens.tolist() == [[1] * 5] * 2


def test_cursor_of_other_rows() -> None:
    """A cursor of another seed, batch or kind is refused by the difference."""
    cursor = next(SyntheticLoader("synthetic", Batching(6), 5, 11, seed=3).batches()).cursor
    for other, named in (
        (SyntheticLoader("synthetic", Batching(6), 5, 11, seed=4), "seed=3, not to seed=4"),
        (SyntheticLoader("synthetic", Batching(8), 5, 11, seed=3), "global_rows=6, not to global_rows=8"),
        (SyntheticLoader("synthetic:ones", Batching(6), 5, 11, seed=3), "synthetic=0, not to synthetic=1"),
    ):
        with pytest.raises(UserError, match=named):
            next(other.batches(cursor))


@pytest.mark.wide  # test_train_overrides.py trains on computed rows
def test_lost_steps_are_repeated(lasting: cli.Lasting) -> None:
    """A run that lost its last steps ends as one that did not, without a file of data and without validation."""
    whole = lasting.train("whole", *COMPUTED, "training.sample_tokens=5")
    shutil.copytree(whole, lasting.workplace / "killed")
    shutil.rmtree(lasting.workplace / "killed/checkpoints/12")
    run = lasting.train("killed", "--resume")
    assert read_resumes(run / "metrics.jsonl") == [6]
    assert cli.losses(run) == cli.losses(whole) and len(cli.losses(run)) == 12
    assert not any(name.startswith("validation/") for line in cli.metrics(run) for name in line)
    assert "--- step 12" in (run / "samples.txt").read_text()
    before = cli.contents(run)
    assert "nothing to do" in lasting.check("--resume", "hydra.run.dir=killed").stderr
    assert cli.contents(run) == before


@pytest.mark.parametrize(
    "key",
    [
        pytest.param("training.maximum_evaluation_steps=0", marks=pytest.mark.slow),
        pytest.param("data.index_path_validation=null", marks=pytest.mark.wide),
    ],
)
def test_without_validation(key: str, lasting: cli.Lasting) -> None:
    """An evaluation without a validation set saves, samples and reports."""
    run = lasting.train(f"without/{key.partition('=')[0]}", *cli.TINY, key, "training.sample_tokens=5")
    lines = read_metrics(run / "metrics.jsonl")
    assert len(lines) == 12 and not any(name.startswith("validation/") for line in lines for name in line)
    assert (run / "checkpoints" / "12").exists() and "--- step 12" in (run / "samples.txt").read_text()
    assert (run / "report.html").exists()
    if key.endswith("null"):
        done = lasting.run("mode=evaluate", f"model.model_path={run}")
        cli.check_refusal(done, "evaluate.validation=true: expected false, or evaluate.index, as data.corpus=null and ")


@pytest.mark.slow
def test_on_two_hosts(forks: cli.Forks) -> None:
    """Two hosts train on the same rows as one, with the same statistics of tensors."""
    job = ("training.batch_size=8", "training.gradient_accumulation_steps=1", "distributed.cpu_devices=2")
    computed = (*COMPUTED, "statistics.every=6")
    done = hosts.finish(hosts.start([forks.workplace] * 2, *computed, *job, "hydra.run.dir=two"))
    assert [one.returncode for one in done] == [0, 0], [one.stderr for one in done]
    two, one = forks.workplace / "two", forks.train("one", *computed)
    np.testing.assert_allclose(cli.losses(two), cli.losses(one), rtol=1e-5)
    assert cli.losses(two, "samples_checksum") == cli.losses(one, "samples_checksum")
    kinds = ("activation/", "weight_norm/")
    names = [name for name in read_metrics(one / "metrics.jsonl")[5] if name.startswith(kinds)]
    names = [name for name in names if not name.endswith("key/bias")]  # whose gradient is nothing but rounding
    assert len(names) > 20
    for name in names:
        np.testing.assert_allclose(cli.losses(two, name), cli.losses(one, name), rtol=1e-5, err_msg=name)


@pytest.mark.parametrize("kind", SYNTHETIC)
def test_refusals(kind: str, forks: cli.Forks) -> None:
    """Options that need rows of a corpus are refused, each in a line."""
    done = forks.run(*COMPUTED[:-1], f"data.corpus={kind}", "training.max_epochs=1", "training.loss_on=completion")
    cli.check_refusal(done, f"training.loss_on=completion: expected all, because data.corpus={kind}", lines=2)
