"""Filters of samples beside those of transformers."""

import itertools
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from zero.training.inference import Sampling, filtered, penalised


@pytest.mark.parametrize("every", [11, pytest.param(1, marks=pytest.mark.wide)])  # 11 divides no number of choices
def test_filters_are_those_of_transformers(every: int) -> None:
    """Which tokens are left, at 2,160 settings, of 16 rows with tails far below 1e-7; a 1 leaves out nothing.

    Filters treat each row alone, so the rows of all penalties and temperatures are filtered together.
    """
    torch = pytest.importorskip("torch")
    from transformers.generation import logits_process

    rng = np.random.default_rng(0)
    logits = rng.normal(0, 1, (16, 211)).astype(np.float32) * np.linspace(0.1, 9, 16, dtype=np.float32)[:, None]
    tokens = rng.integers(0, 211, (16, 20))
    kinds = {
        "top_k": logits_process.TopKLogitsWarper,
        "top_p": logits_process.TopPLogitsWarper,
        "typical_p": logits_process.TypicalLogitsWarper,
        "eta": logits_process.EtaLogitsWarper,
    }
    penalties, temperatures = (1.0, 1.3, 0.6), (0.3, 0.7, 1.0, 1.6)
    choices: dict[str, tuple[Any, ...]] = {
        "top_k": (None, 1, 17, 211, 400),
        "top_p": (None, 1.0, 0.999999, 0.9, 0.5, 0.01),
        "typical_p": (None, 0.9, 0.2),
        "eta": (None, 1e-3),
    }
    settings = [dict(zip(choices, values, strict=True)) for values in itertools.product(*choices.values())]
    assert len(settings) * len(penalties) * len(temperatures) == 2160
    rows = []
    for penalty in penalties:
        rows.append(np.asarray(penalised(jnp.asarray(logits), jnp.asarray(tokens), penalty)))
        theirs = logits_process.RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor(tokens), torch.tensor(logits))
        np.testing.assert_allclose(rows[-1], theirs, rtol=2e-7)
    of_all_R1: Any = np.repeat(np.asarray(temperatures, np.float32), len(penalties) * len(logits))[:, None]
    logits_RV = np.tile(np.concatenate(rows), (len(temperatures), 1))
    differ = []
    for setting in settings[::every]:
        expected = torch.tensor(logits_RV) / torch.tensor(of_all_R1)
        for name, kind in kinds.items():
            is_off = setting[name] == 1.0 and name != "top_k"  # transformers makes no filter of such a probability
            if setting[name] is not None and not is_off:
                expected = kind(setting[name])(None, expected)
        # Compiled, it would be 180 programs.
        found = filtered(logits_RV, Sampling(temperature=of_all_R1, **setting))  # type: ignore[arg-type]
        is_other_R = (np.isfinite(found) != np.isfinite(expected.numpy())).any(-1)
        differ += [(setting, row) for row in np.flatnonzero(is_other_R)]
    assert not differ
