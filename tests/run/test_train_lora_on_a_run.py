"""Adapters of a run that trains on: whatever reads them takes the step that they began with, while it is there."""

from pathlib import Path
from typing import Any

import pytest

from tests.helpers import cli
from zero.base.errors import UserError
from zero.exchange.export import export

SHAPE = {"embedding_dim": 48, "num_head": 3, "kv_heads": 3, "mlp_dim": 64, "N": 2, "vocab_size": 256}
BASE = (
    *cli.later_values(*cli.TINY, "model.size=llama3_8b", "training.evaluation_frequency=2", "training.total_steps=4"),
    *(f"model.override.{key}={value}" for key, value in SHAPE.items()),
    *("model.override.rotary_base=1e4", "model.override.rotary_scaling=null"),
)
ADAPTERS = (*BASE, "model.warm_start=true", "model.model_path=base", "tuning=lora", "tuning.rank=4")


def read_all(runs: cli.Lasting, name: str) -> list[Any]:
    """What reads the adapters: a resume from the middle, an evaluation, greedy texts, both kinds of export."""
    resumed = runs.fork("adapters", 2)
    sampled = runs.train(
        f"sampled-{name}", "mode=sample", "model.model_path=adapters", "sample.prompt=shard", "sample.temperature=0"
    )
    folders = [Path(f"{name}-alone"), Path(f"{name}-merged")]
    for folder in folders:
        assert export("adapters", folder, merges=folder == folders[-1]) == 4
    return [
        cli.metrics(resumed),
        runs.evaluate(f"evaluated-{name}", "model.model_path=adapters"),
        (sampled / "samples.jsonl").read_text(),
        *map(cli.contents, folders),
    ]


@pytest.mark.wide
def test_adapters_of_a_base_that_trains_on(lasting: cli.Lasting, monkeypatch: pytest.MonkeyPatch) -> None:
    """All is as before the base had other steps, and refused by name once retention has deleted the step."""
    monkeypatch.chdir(lasting.workplace)
    base = lasting.train("base", *BASE)
    run = lasting.train("adapters", *ADAPTERS)
    before = read_all(lasting, "before")
    lasting.check("--resume", "hydra.run.dir=base", "training.total_steps=8")
    assert (base / "checkpoints" / "8").exists()
    after = read_all(lasting, "after")
    assert after == before
    assert after[0] == cli.metrics(run)

    lasting.check("--resume", "hydra.run.dir=base", "training.total_steps=12", "data.keep_checkpoints=1")
    for words in (
        ("--resume", "data.resume_step=2", "hydra.run.dir=adapters"),
        ("mode=evaluate", "model.model_path=adapters"),
        ("mode=sample", "model.model_path=adapters", "sample.prompt=shard"),
    ):
        done = lasting.run(*words)
        cli.check_refusal(done, "base@4", "no step 4; there are 12")
    with pytest.raises(UserError, match=r"base@4.*no step 4; there are 12"):
        export("adapters", Path("refused"), merges=True)
    export("adapters", Path("alone"))  # which needs no base
