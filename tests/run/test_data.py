"""What is made of a configuration before the first step."""

import pytest

from tests.config.composing import compose
from zero.config.check import check
from zero.config.files import load_sizes
from zero.errors import UserError
from zero.run.data import staged_context, with_global_batch


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
    context = staged_context(config)
    assert [context.at(step) for step in range(8)] == lengths


def test_global_batch_of_first_checkpoint(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The global batch of the first checkpoint is the one in the configuration."""
    config = check(compose("training.batch_size=8"), load_sizes())  # of a run on two hosts
    kept = with_global_batch(config, 16)  # on one host now
    assert (kept.training.batch_size, config.training.batch_size) == (16, 8)
    assert "training.batch_size=16 instead of 8 on 1 hosts: the global batch keeps the 16 sequences" in caplog.text
    assert with_global_batch(config, 8) is config
    with pytest.raises(UserError, match=r"global batch of 12 sequences does not divide into 1 hosts x 8 devices"):
        with_global_batch(config, 12)
