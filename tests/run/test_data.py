"""What is made of a configuration before the first step."""

from pathlib import Path

import pytest

from tests.config.composing import compose
from tests.helpers import bucket, cli
from zero.base.errors import UserError
from zero.commands.modes import check
from zero.corpus.reading.batch_schedule import BatchSchedule
from zero.corpus.text.tokenizers import ByteTokenizer
from zero.files import storage
from zero.job.job import make_job, place_model
from zero.job.sizes import load_sizes
from zero.run.data import open_data, share_of_batch
from zero.run.position import Position


@pytest.mark.parametrize(
    ("stages", "lengths"),
    [
        ("null", [64] * 7 + [256]),
        ("linear", [64, 64, 64, 128, 128, 128, 128, 256]),
        ("[[1,32],[2,128]]", [32, 128, 128] + [256] * 5),
        ("[]", [256] * 8),
    ],
)
def test_contexts_of_the_warmup(stages: str, lengths: list[int]) -> None:
    config = check(compose("training.staged_warmup_steps=7", f"training.context_stages={stages}"), load_sizes())
    context = config.training.lengths(config.data.max_context, has_last_target=False)
    assert [context.at(step) for step in range(8)] == lengths


def test_global_batch_of_first_checkpoint(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The global batch of the first checkpoint is the one in the configuration."""
    config = check(compose("training.batch_size=8"), load_sizes())

    def share(rows: int) -> int:
        return share_of_batch(Position(0, BatchSchedule(rows), 1), config.training, config.zero)

    assert share(16) == 16  # 8 of a run on two hosts, on one now
    assert "training.batch_size=16 instead of 8 on 1 hosts: the global batch stays at 16 sequences" in caplog.text
    caplog.clear()
    assert share(8) == 8 and caplog.messages == []
    refused = r"global batch of 12 sequences cannot be divided into 8 devices .*; 1, 2, 3, 4, 6, 12 devices would do"
    with pytest.raises(UserError, match=refused):
        share(12)


def test_a_cache_for_nothing(workplace: Path, server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache of shards is refused where all of them are local, and accepted where one set is in a bucket."""
    monkeypatch.chdir(workplace)
    bucket.use(monkeypatch, server)
    shard = f"gs://{bucket.BUCKET}/cached/validation.tar"
    storage.write(shard, (workplace / "corpus" / "tiny" / "validation-00000.tar").read_bytes())
    (tmp_path / "remote.index").write_text(f"{shard}\n")

    def open_(*overrides: str) -> None:
        config = check(compose(*cli.TINY, *overrides), load_sizes())
        job = make_job(config, place_model(config, load_sizes().chosen(config.model)))
        schedule = BatchSchedule(16)
        open_data(job, ByteTokenizer(), schedule, {}, config.data, config.training, seed=0, evaluation_batches=2)

    open_()
    cached = f"data.cache_directory={tmp_path / 'cache'}"
    with pytest.raises(UserError, match=rf"^{cached}: it has no effect, because no shard is in a bucket$"):
        open_(cached)
    open_(cached, f"data.index_path_validation={tmp_path / 'remote.index'}")
