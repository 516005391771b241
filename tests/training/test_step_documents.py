"""Whole steps of packed documents, some of whose tokens are not predicted, against single documents on one device."""

import dataclasses
from functools import cache, partial
from typing import Any

import jax
import numpy as np
import pytest

from tests.training.small_gpt import (
    CONFIG,
    ROWS,
    STEPS,
    Run,
    assert_close,
    first_params,
    reference,
    run_on,
    setup,
)
from zero.models.config import GPTConfig
from zero.models.gpt import GPT
from zero.training.batch import Separators
from zero.training.programs import make_inference
from zero.training.schedules import SequenceLengths

END = 3
STARTS = Separators(starts=(END,))  # an end of text belongs to the document after it
ENDS = Separators(ends=(END,))  # to the one before it
# Without dropout, whose masks would depend on the place in a row; nested layers are two groups of two.
PLAIN = dataclasses.replace(CONFIG, dropout=0.0, N=4)
LEARNED = dataclasses.replace(PLAIN, alibi_attn=False)


def packed(step: int) -> np.ndarray:
    """Rows of the global batch: documents joined by ends of text, prompts of the later devices longer."""
    rng = np.random.default_rng(step)
    rows = rng.integers(END + 1, CONFIG.vocab_size, (ROWS, 12), np.int32)
    rows[rng.random(rows.shape) < 0.25] = END
    is_read_only = (rng.random(rows.shape) < np.linspace(0, 1, ROWS)[:, None]) & (rows != END)
    rows = np.where(is_read_only, ~rows, rows)
    rows[-1, 7:] = -1
    return rows


def apart(rows: np.ndarray, separators: Separators = STARTS) -> np.ndarray:
    """Each document of some rows in a row of its own, with the end of text after it and, of `STARTS`, before it."""
    found, width = [], rows.shape[1]
    for row in rows:
        ends = np.flatnonzero(row == END).tolist()
        starts = ends if separators == STARTS else [end + 1 for end in ends]
        for start, stop in zip([0, *starts], [*ends, width - 1], strict=True):
            found.append(np.pad(row[start : stop + 1], (0, width - 1 - stop + start), constant_values=-1))
    return np.stack(found)


def alone(step: int, separators: Separators = STARTS) -> np.ndarray:
    """The documents of `packed`; as many rows at every step."""
    rows = apart(packed(step), separators)
    return np.pad(rows, ((0, 6 * ROWS - len(rows)), (0, 0)), constant_values=-1)


def run(
    devices: int,
    stage: int,
    micro_batches: int = 1,
    config: GPTConfig = PLAIN,
    separators: Separators = STARTS,
    **options: Any,
) -> Run:
    return run_on(setup(devices, stage, micro_batches, config=config, separators=separators, **options), data=packed)


@cache
def expected(config: GPTConfig = PLAIN, separators: Separators = STARTS) -> Run:
    return reference(config, data=partial(alone, separators=separators))


def test_uneven_counts() -> None:
    """The rows of this file have different counts of tokens on each device and in each micro-batch."""
    for step in range(STEPS):
        counts = (packed(step)[:, 1:] >= 0).reshape(8, -1).sum(axis=1)
        assert (alone(step)[:, 1:] >= 0).sum() == counts.sum() and len(set(counts.tolist())) > 5


SOME = [(3, 2, 4)]  # tests/models/test_segments.py has the model, test_fused_update.py and others steps of documents
ALL = [(n, stage, m) for n, m in ((1, 1), (1, 3), (3, 1), (3, 4), (8, 1), (8, 3)) for stage in range(4)]


@pytest.mark.parametrize(
    ("devices", "stage", "micro_batches"),
    [
        *(pytest.param(*case, marks=pytest.mark.wide) for case in SOME),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in ALL if case not in SOME),
    ],
)
def test_packed_documents_train_as_documents_alone(devices: int, stage: int, micro_batches: int) -> None:
    assert_close(run(devices, stage, micro_batches), expected(), rtol=1e-5, config=PLAIN)


@pytest.mark.wide  # tests/models/test_segments.py has them
def test_documents_that_begin_after_an_end() -> None:
    """The first token of each is no target, as where it is alone in its row."""
    assert_close(run(3, 2, 4, separators=ENDS), expected(separators=ENDS), rtol=1e-5, config=PLAIN)


@pytest.mark.parametrize(
    ("config", "remat", "blockwise_from"),
    [
        pytest.param(PLAIN, "nested", 2, marks=pytest.mark.wide),
        pytest.param(LEARNED, "nested", None, marks=pytest.mark.slow),
        pytest.param(LEARNED, "full", None, marks=pytest.mark.slow),
        pytest.param(PLAIN, "none", None, marks=pytest.mark.slow),
        pytest.param(PLAIN, "full", 2, marks=pytest.mark.slow),
    ],
)
def test_every_pass_keeps_documents_apart(config: GPTConfig, remat: str, blockwise_from: int | None) -> None:
    """So do passes of nested layers and of blocks of positions."""
    got, documents = run(8, 3, config=config, remat=remat, blockwise_from=blockwise_from), expected(config)
    np.testing.assert_allclose(got.metrics["loss"], documents.metrics["loss"], rtol=1e-5)
    assert_close(got, documents, rtol=1e-4, config=config)


@pytest.mark.slow  # test_fused_update.py has documents
@pytest.mark.parametrize("remat", ["full", "nested"])
def test_the_fused_update_keeps_documents_apart(remat: str) -> None:
    options: dict[str, Any] = {"config": LEARNED, "max_norm": None, "skip_bad_steps": False}
    got = run(8, 3, fused_update=True, **options, remat=remat)
    assert_close(got, run(8, 3, **options), rtol=1e-6, config=LEARNED)


@pytest.mark.parametrize("length", [pytest.param(12, marks=pytest.mark.wide), 6])
def test_documents_in_evaluation_and_warmup(length: int) -> None:
    """Evaluation and the staged warmup keep documents apart.

    The warmup cuts rows, wherever a document is, into rows that are read alone.
    """
    on = setup(8, 3, config=LEARNED, separators=STARTS)
    rows = SequenceLengths(12, ((1, length),)).cut(packed(0), 0)
    documents = apart(rows)
    targets = np.pad(documents[:, 1:], ((0, 0), (0, 1)), constant_values=-1)
    read = np.where(documents < 0, ~documents, documents)
    losses: Any = jax.jit(GPT(LEARNED).apply)({"params": first_params(LEARNED)}, read, targets)
    params = on.first_weights()
    got, scored, _ = on.programs.evaluate(params, rows.reshape(8, -1, length))
    assert scored == (targets >= 0).sum()
    np.testing.assert_allclose(got, np.asarray(losses)[targets >= 0].sum(), rtol=1e-5)


def test_scores_keep_documents_apart() -> None:
    """Every token has one, also those that are not predicted in training."""
    on = setup(8, 3, config=LEARNED, separators=STARTS)
    rows = packed(0)
    params = on.first_weights()
    got, _ = make_inference(on.model).score(params, rows.reshape(8, 3, 12))
    read = np.where(rows < 0, ~rows, rows)
    losses_of: Any = jax.jit(GPT(LEARNED).apply)
    for row, losses in zip(read, np.asarray(got), strict=True):
        documents = apart(row[None])
        expected = losses_of(
            {"params": first_params(LEARNED)},
            np.pad(np.maximum(documents, 0), ((0, 12 - len(documents)), (0, 0))),
            np.pad(np.roll(documents, -1, axis=1), ((0, 12 - len(documents)), (0, 0))),
        )
        lengths = (documents >= 0).sum(axis=1) - 1
        parts = [one[:length] for one, length in zip(expected, lengths, strict=False)]
        np.testing.assert_allclose(losses, np.concatenate(parts), rtol=1e-5)
