"""A model that PyTorch has trained: imported, evaluated as PyTorch evaluates it, and trained on."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.config.composing import Only, compose
from tests.helpers import cli
from tests.helpers.loaders import open_loader
from zero.commands.modes import check
from zero.corpus.text.tokenizers import load_tokenizer
from zero.exchange.warm_start import warm_start
from zero.inference.evaluate import evaluate
from zero.inference.outputs.validation import score_validation_set
from zero.inference.scoring import Scorer
from zero.inference.trained_model import TrainedModel
from zero.job.job import place_model
from zero.models.config import GPTConfig
from zero.models.families import FAMILIES
from zero.record.metrics_file import read_metrics
from zero.run.train import train

pytestmark = pytest.mark.slow
LLAMA: dict[str, Any] = {**FAMILIES["llama"], "kv_heads": 2, "mlp_dim": 122}
SIZE = GPTConfig(embedding_dim=48, vocab_size=257, num_head=6, block_size=cli.CONTEXT, dropout=0.0, N=2, **LLAMA)
STEPS, ROWS = 400, 32


def rows(index: str, count: int, **options: Any) -> list[np.ndarray]:
    loader = open_loader(index, global_rows=count, context=cli.CONTEXT, vocab_size=257, **options)
    return [batch.tokens for batch, _ in zip(loader.batches(), range(STEPS), strict=False)]


def test_imported_and_trained_further(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that PyTorch has trained is imported, evaluated and trained further."""
    import torch
    import transformers

    cli.make_workplace(tmp_path)
    monkeypatch.chdir(tmp_path)
    shape: dict[str, Any] = {"hidden_size": 48, "intermediate_size": 122, "num_hidden_layers": 2, "vocab_size": 257}
    heads: dict[str, Any] = {"num_attention_heads": 6, "num_key_value_heads": 2, "rms_norm_eps": 1e-5}
    transformers.set_seed(0)
    theirs: Any = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**shape, **heads, max_position_embeddings=cli.CONTEXT)
    )

    def loss_of(batch: np.ndarray) -> Any:
        ids = torch.tensor(batch).long()
        return theirs(input_ids=ids.clamp(min=0), labels=torch.where(ids < 0, -100, ids)).loss

    optimizer = torch.optim.AdamW(theirs.parameters(), lr=2e-3)
    for batch in rows(cli.INDICES[0], ROWS, seed=0):
        optimizer.zero_grad()
        loss_of(batch).backward()
        optimizer.step()
    theirs.save_pretrained("folder")
    held_out = rows(cli.INDICES[1], 1, shuffle=False, max_epochs=1)
    with torch.no_grad():
        scored = [(loss_of(row).item(), int((row[:, 1:] >= 0).sum())) for row in held_out]
    expected = sum(loss * count for loss, count in scored) / sum(count for _, count in scored)
    assert expected < 2  # from 5.5: it has learned

    job = (*(option for option in cli.TINY if not option.startswith("model.")), "model.size=mine")
    start = ("model.warm_start=true", "model.model_path=folder", "training.peak_learning_rate=2e-3")
    config = check(compose(*job, *start, "training.total_steps=60", "training.maximum_evaluation_steps=99"), Only(SIZE))
    model = place_model(config, SIZE).model
    trained = TrainedModel(model, warm_start("folder", model), load_tokenizer(config.data.tokenizer), 0)
    got = score_validation_set(Scorer(trained, cli.CONTEXT, 8), cli.INDICES[1], 1).means()
    assert got["loss"] == pytest.approx(expected, rel=1e-5)

    run = tmp_path / "run"
    run.mkdir()
    assert train(config, SIZE, run) == 0
    lines = read_metrics(run / "metrics.jsonl")
    assert lines[0]["train/loss"] < expected + 0.2 and lines[-1]["validation/loss"] < expected
    use: Any = check(compose(*job, "mode=evaluate", "model.model_path=run"), Only(SIZE))
    (tmp_path / "use").mkdir()
    assert evaluate(use, SIZE, tmp_path / "use") == 0
    found = json.loads((tmp_path / "use" / "evaluation.json").read_text())["loss"]
    assert found == pytest.approx(lines[-1]["validation/loss"], rel=1e-5)
