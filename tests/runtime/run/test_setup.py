"""What is made of a configuration before the first step."""

import pytest

from tests.runtime.config.composing import compose
from zero.runtime.config.check import check
from zero.runtime.config.files import load_sizes
from zero.runtime.run.setup import staged_context


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
