"""A classifier from a folder of transformers to a folder of transformers, killed on the way."""

import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.helpers import cli
from tests.helpers.pair_runs import CLASSES, CLASSIFIED, CONTEXT, JOB, LORA, STEPS, make_classes, make_pairs
from zero.exchange.export import export
from zero.record.run_record import read_run
from zero.report.confusion import confusion
from zero.report.html_report import write_report

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported

KEYS = (
    *(option for option in JOB if not option.startswith("objective")),
    "objective=classification",
    f"objective.num_labels={len(CLASSES)}",
    f"objective.label_names=[{','.join(CLASSES)}]",
    f"model.override.score_outputs={len(CLASSES)}",
    "training.peak_learning_rate=1e-2",
    *CLASSIFIED,
)
KEYS = tuple(cli.later_values(*KEYS))
pytestmark = pytest.mark.wide


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder of transformers and a corpus of texts with classes."""
    root = tmp_path_factory.mktemp("classification")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        make_pairs(root)
        make_classes(root)
        yield root


def evaluated(runs: cli.Forks, directory: Path, *arguments: str) -> Any:
    """evaluation.json of a run or a folder."""
    runs.check("mode=evaluate", *arguments, f"hydra.run.dir={directory}")
    return json.loads((directory / "evaluation.json").read_text())


def test_a_classifier_is_trained_killed_and_exported(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Transformers computes the accuracy that validation and `mode=evaluate` report, of the folder too."""
    import torch
    import transformers

    runs = cli.Forks(root)
    runs.check(*KEYS, "hydra.run.dir=whole")
    whole = cli.metrics(root / "whole")
    assert whole[-1]["validation/accuracy"] > 0.9
    assert "confusion/0/0" not in whole[-1]
    again = (*KEYS, "hydra.run.dir=killed", "--resume=auto")
    process = runs.start(*again)
    process.wait_for(root / "killed" / "checkpoints" / str(STEPS // 2))
    process.kill()
    process.finish()
    runs.check(*again)
    assert cli.metrics(root / "killed") == whole
    table = confusion(read_run(root / "killed"))
    assert table is not None and tuple(table.names) == CLASSES
    page = write_report([root / "killed"], root / "page.html", {}).read_text()
    assert "<h2>Confusion</h2>" in page and '<th class="number">maybe</th>' in page

    caplog.set_level(logging.ERROR)
    export(str(root / "killed"), root / "exported")
    auto: Any = transformers.AutoModelForSequenceClassification
    model, loaded = auto.from_pretrained(root / "exported", output_loading_info=True, pad_token_id=299)
    assert not any(loaded.values())
    assert model.config.id2label == dict(enumerate(CLASSES)) and model.config.label2id["maybe"] == 2

    result = evaluated(runs, root / "of-run", "model.model_path=killed")
    of_folder = ("model.model_path=exported", "objective=classification", f"objective.num_labels={len(CLASSES)}")
    own = (*CLASSIFIED[1:], "data.tokenizer=bytes", f"evaluate.context={CONTEXT}")
    again_result = evaluated(runs, root / "of-folder", *of_folder, *own)
    assert again_result["loss"] == pytest.approx(result["loss"], rel=1e-5)
    texts = [f"{i} and {j}? {end}" for i in range(8) for j in range(8) for end in ("no", "yes!", "maybe?")]
    rows = [np.frombuffer(text.encode(), np.uint8).astype(np.int64) for text in texts]
    width = max(map(len, rows))
    ids = torch.tensor([[*row, *[299] * (width - len(row))] for row in rows])
    with torch.no_grad():
        chosen = model(ids, attention_mask=ids != 299).logits.argmax(1).numpy()
    accuracy = (chosen == np.tile([0, 1, 2], 64)).mean()
    assert accuracy > 0.9 and result["accuracy"] > 0.9
    assert sum(value for name, value in result.items() if name.startswith("confusion/")) == pytest.approx(1)


def test_adapters_train_the_whole_head(root: Path) -> None:
    """PEFT's folder is for a ForSequenceClassification, and so is the base with the adapters merged, with its names."""
    import transformers

    run = cli.Forks(root).train("adapted", *cli.later_values(*KEYS, *LORA))
    assert cli.metrics(run)[-1]["validation/accuracy"] > 0.9
    export(str(run), root / "merged", merges=True)
    auto: Any = transformers.AutoModelForSequenceClassification
    model, loaded = auto.from_pretrained(root / "merged", output_loading_info=True)
    assert not any(loaded.values()) and model.config.id2label[2] == CLASSES[2]
