"""A machine without jax: prepares, verifies and reads a corpus there.

- `LIBRARIES`: those of arrays and of the trainer, which such a machine lacks.
- `use_corpus`: runs zero-prepare and a loader.
"""

import json
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

LIBRARIES = ["jax", "jaxlib", "flax", "optax", "hydra", "omegaconf", "orbax", "wandb"]
READ = f"""
import sys
from zero.corpus.reading.loader import ONCE, Batching, Loader
from zero.corpus.format.shards import RowFormat
loader = Loader("data/index/c_train.index", Batching(global_rows=2), RowFormat(context=32, vocab_size=300), ONCE)
rows = sum(len(batch.tokens) for batch in loader.batches())
assert rows == loader.rows // 2 * 2 > 20, (rows, loader.rows)
print(*[name for name in {LIBRARIES} if name in sys.modules])
"""


def use_corpus(
    place: Path, python: Path | str, zero_prepare: Sequence[Path | str], environment: Mapping[str, str]
) -> None:
    """Prepares a corpus with a tokenizer of its own in `place`, verifies it, shows a row, and reads its batches."""

    def run(*command: Path | str) -> str:
        done = subprocess.run(command, cwd=place, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    texts = (" ".join(f"word{number * other % 97}" for other in range(60)) for number in range(60))
    (place / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    run(*zero_prepare, "texts.jsonl", "--name", "c", "--train-tokenizer", "300", "--row-tokens", "32", "--workers", "2")
    run(*zero_prepare, "data/index/c_train.index", "--verify")
    assert "word" in run(*zero_prepare, "data/index/c_train.index", "--peek", "1")
    assert run(python, "-c", READ).split() == []
