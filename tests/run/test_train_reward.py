"""A reward model from a folder of transformers to a folder of transformers, killed on the way."""

import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import cli
from tests.helpers.pair_runs import CONTEXT, JOB, LORA, STEPS, VALIDATION, make_pairs
from zero.exchange.export import export

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported

REWARD = tuple(o for o in JOB if not o.startswith("objective")) + ("objective=reward", "model.override.score_outputs=1")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder of transformers and a corpus of pairs."""
    root = tmp_path_factory.mktemp("reward")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        make_pairs(root)
        yield root


@pytest.mark.wide
def test_a_reward_model_is_trained_killed_and_exported(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Its head starts with random weights, and evaluation says how many pairs it orders."""
    import transformers

    runs = cli.Forks(root)
    done = runs.check(*REWARD, "hydra.run.dir=whole")
    assert "holds no score_head, which starts with random weights" in done.stderr
    whole = cli.metrics(root / "whole")
    assert whole[-1]["validation/rewards/accuracies"] > 0.9
    again = (*REWARD, "hydra.run.dir=killed", "--resume=auto")
    process = runs.start(*again)
    process.wait_for(root / "killed" / "checkpoints" / str(STEPS // 2))
    process.kill()
    process.finish()
    runs.check(*again)
    assert cli.metrics(root / "killed") == whole
    caplog.set_level(logging.ERROR)
    export(str(root / "killed"), root / "exported")
    auto: Any = transformers.AutoModelForSequenceClassification
    model, loaded = auto.from_pretrained(root / "exported", output_loading_info=True)
    assert not any(loaded.values()) and model.config.num_labels == 1
    result = evaluated(runs, root / "of-run", "model.model_path=killed")
    expected = {name: whole[-1][f"validation/rewards/{name}"] for name in ("accuracies", "margins")}
    assert {name: result[f"rewards/{name}"] for name in expected} == pytest.approx(expected, rel=1e-5)
    of_folder = (f"data.index_path_validation={VALIDATION}", "data.tokenizer=bytes", f"evaluate.context={CONTEXT}")
    again = evaluated(runs, root / "of-folder", "model.model_path=exported", "objective=reward", *of_folder)
    assert again["examples"] == result["examples"] > 20
    assert again["rewards/margins"] == pytest.approx(result["rewards/margins"], rel=1e-5)
    refused = runs.run("mode=sample", "model.model_path=exported", "data.tokenizer=bytes")
    assert "a model of tokens" in refused.stderr


def evaluated(runs: cli.Forks, directory: Path, *arguments: str) -> Any:
    """evaluation.json of a run or a folder."""
    runs.check("mode=evaluate", *arguments, f"hydra.run.dir={directory}")
    return json.loads((directory / "evaluation.json").read_text())


@pytest.mark.wide
def test_adapters_train_the_whole_head_and_are_merged(root: Path) -> None:
    """PEFT's folder is for a ForSequenceClassification, and so is the base with the adapters merged."""
    import transformers

    run = cli.Forks(root).train("adapted", *cli.later_values(*REWARD, *LORA, "training.sample_tokens=3"))
    assert not (run / "samples.txt").exists()
    assert cli.metrics(run)[-1]["validation/rewards/accuracies"] > 0.9
    export(str(run), root / "merged", merges=True)
    auto: Any = transformers.AutoModelForSequenceClassification
    _, loaded = auto.from_pretrained(root / "merged", output_loading_info=True)
    assert not any(loaded.values())
    export(str(run), root / "peft")
    config = json.loads((root / "peft" / "adapter_config.json").read_text())
    assert (config["task_type"], config["modules_to_save"]) == ("SEQ_CLS", ["score"])
