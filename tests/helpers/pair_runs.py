"""Runs on pairs of texts: a folder of transformers, a corpus of pairs, and the overrides of a short job.

- `make_pairs`: makes both in a directory. `JOB`: the overrides of a run; `LORA`: those of adapters.
- `make_labels`: makes a corpus of labelled answers; `LABELLED`: the overrides of a run on it.
- `make_classes`: makes a corpus of texts of the classes `CLASSES`; `CLASSIFIED`: the overrides of a run on it.
"""

import json
from pathlib import Path
from typing import Any

import yaml

from tests.helpers import cli, llama
from tests.helpers.corpora import call
from zero.models.families import FAMILIES

CONTEXT, STEPS = 24, 6
SIZE = llama.size(CONTEXT)
SHAPE = {"embedding_dim": 48, "vocab_size": 300, "num_head": 6, "kv_heads": 2, "mlp_dim": 61, "N": 2, "dropout": 0.0}
TRAIN, VALIDATION = (f"data/index/pairs_{split}.index" for split in ("train", "validation"))
JOB = (
    *(o for o in cli.TINY if not o.startswith(("model.", "data.", "training.total", "training.eval", "training.max"))),
    "model.size=sizes.yaml:mine",
    "model.warm_start=true",
    "model.model_path=folder",
    "data.corpus=null",
    "data.wandb_project=null",
    f"data.max_context={CONTEXT}",
    f"data.index_path_train={TRAIN}",
    f"data.index_path_validation={VALIDATION}",
    "objective=dpo",
    "objective.beta=0.3",
    "training.peak_learning_rate=3e-3",
    f"training.total_steps={STEPS}",
    f"training.evaluation_frequency={STEPS // 2}",
    "training.maximum_evaluation_steps=100",
)
LABELLED = tuple(f"data.index_path_{split}=data/index/labels_{split}.index" for split in ("train", "validation"))
CLASSES = ("no", "yes", "maybe")
CLASSIFIED = tuple(f"data.index_path_{split}=data/index/classes_{split}.index" for split in ("train", "validation"))
LORA = ("tuning=lora", "tuning.rank=4", "tuning.alpha=8", "training.peak_learning_rate=2e-2")


def make_pairs(root: Path) -> None:
    """A folder of transformers and a corpus of pairs in the directory, which is the current one."""
    llama.save(root / "folder", CONTEXT)
    sizes = {"mine": {**SHAPE, "block_size": CONTEXT, "alibi_attn": False, **FAMILIES["llama"]}}
    (root / "sizes.yaml").write_text(yaml.safe_dump(sizes))
    lines = [
        {"prompt": f"{i} and {j}? ", "chosen": "yes" + "!" * (i % 3), "rejected": "no" + "?" * (j % 5)}
        for i in range(12)
        for j in range(12)
    ]
    prepare(root, "pairs", "--preferences", lines)


def make_labels(root: Path) -> None:
    """A corpus of the same texts with labels in the directory, which is the current one."""
    lines = [
        {"prompt": f"{i} and {j}? ", "completion": "yes" if is_wanted else "no" + "?" * (j % 5), "label": is_wanted}
        for i in range(8)
        for j in range(12)
        for is_wanted in (i % 3 > 0, False)
    ]
    prepare(root, "labels", "--labels", lines)


def make_classes(root: Path) -> None:
    """A corpus of texts of three classes in the directory, which is the current one."""
    ends = {"no": 0, "yes!": "yes", "maybe?": "maybe"}
    lines = [
        {"text": f"{i} and {j}? {end}", "label": label}
        for i in range(8)
        for j in range(8)
        for end, label in ends.items()
    ]
    prepare(root, "classes", "--classification", lines, "--label-names", ",".join(CLASSES))


def prepare(root: Path, name: str, option: str, lines: list[dict[str, Any]], *more: str) -> None:
    """A corpus of these lines."""
    (root / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    done = call(f"{name}.jsonl", option, *more, "--row-tokens", str(CONTEXT), "--validation-fraction", "0.2")
    assert done.returncode == 0, done.stderr
