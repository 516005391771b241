"""Steps on short sequences are plain steps on the same pieces of rows."""

from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from tests.helpers import cli
from tests.helpers.shards import npy, write_tar
from zero.corpus import Rows
from zero.corpus.reading.order import permutation

SHORT, STEPS, SEED = 8, 5, 3
COMMON = ("training.total_steps=12", "model.override.dropout=0.0", f"seed={SEED}", "training.warmup_steps=3")


@pytest.mark.slow
def test_a_staged_step_is_a_plain_step(workplace: Path, tmp_path: Path):
    """The same losses per step as a run whose rows are the pieces, in their order."""
    staged = cli.Forks(workplace)
    stages = (f"training.staged_warmup_steps={STEPS}", f"training.warmup_train_context={SHORT}")
    staged.check(
        *cli.TINY, *COMMON, *stages, f"hydra.run.dir={tmp_path}/staged", f"data.checkpoint_directory={tmp_path}/a"
    )
    rows = Rows(workplace / cli.INDICES[0], batch=16, context=cli.CONTEXT, seed=SEED)
    pieces = np.concatenate([tokens.reshape(-1, SHORT) for tokens in islice(rows, 12)])
    pieces = pieces[permutation(len(pieces), SEED, 0, 0, 0)]  # so that the order of one shard gives them as they were
    lengths = (pieces >= 0).sum(axis=1)
    members = {"a.input_id.npy": npy(pieces.clip(0).astype(np.uint16)), "a.length.npy": npy(lengths)}
    write_tar(tmp_path / "pieces.tar", members)
    (tmp_path / "pieces.index").write_text("pieces.tar\n")
    cli.Forks(workplace).check(
        *cli.TINY,
        *COMMON,
        f"data.max_context={SHORT}",
        f"data.index_path_train={tmp_path}/pieces.index",
        "data.index_path_validation=null",
        f"training.batch_size={16 * cli.CONTEXT // SHORT}",
        f"hydra.run.dir={tmp_path}/plain",
        f"data.checkpoint_directory={tmp_path}/b",
    )
    found = cli.losses(tmp_path / "staged")[:STEPS]
    expected = cli.losses(tmp_path / "plain")[:STEPS]
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    assert len(found) == STEPS and len(set(found)) == STEPS
