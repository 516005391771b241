"""The commands of docs/how-to/fine-tuning.md, run with a small model in place of the one that the page downloads."""

import os
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import cli
from tests.helpers.corpora import call
from zero.corpus.text.tokenizers import train_tokenizer
from zero.exchange import zero_weights

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "fine-tuning.md"
SHAPE = {"embedding_dim": 32, "num_head": 4, "kv_heads": 2, "mlp_dim": 48, "N": 2, "vocab_size": 300, "block_size": 64}
SMALL = (
    *(f"model.override.{key}={value}" for key, value in SHAPE.items()),
    "data.max_context=48",
    "distributed.cpu_devices=2",
)
SHORT = (
    "data.wandb_project=null",
    "training.total_steps=6",
    "training.evaluation_frequency=6",
    "training.warmup_steps=2",
    "training.sample_tokens=0",
)


def make_base(folder: Path) -> None:
    """A folder of transformers as `hf download` leaves it, of the page's architecture."""
    import transformers

    shape: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 300}
    heads: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True}
    rope: dict[str, Any] = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}, "rms_norm_eps": 1e-6}
    config = transformers.Qwen2Config(**shape, **heads, **rope, max_position_embeddings=64)
    transformers.Qwen2ForCausalLM(config).save_pretrained(folder)
    (folder / "tokenizer.json").write_bytes(train_tokenizer(["What is 7 plus 5?"] * 9, 300))


@pytest.mark.wide
def test_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the downloaded folder to folders that transformers and PEFT load."""
    import transformers

    monkeypatch.chdir(tmp_path)
    lines = [f'{{"prompt": "What is {i} plus {j}?", "completion": " {i + j}"}}\n' for i in range(9) for j in range(9)]
    Path("questions.jsonl").write_text("".join(lines))
    blocks = re.findall(r"^```bash\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    done = []
    for line in "".join(blocks).replace("\\\n", " ").splitlines():
        program, *arguments = shlex.split(line)
        done.append(program)
        match program:
            case "hf":
                make_base(Path(arguments[-1]))
            case "zero-prepare":
                assert call(*arguments[:-1], "48").returncode == 0
            case "python":
                shortened = ("sample.tokens=4",) if "mode=sample" in arguments else SHORT
                cli.Forks(tmp_path).check(*arguments[1:], *SMALL, *shortened)
            case "zero-weights":
                monkeypatch.setattr(sys, "argv", [program, *arguments])
                zero_weights.main()
    assert done == ["hf", "python", "zero-prepare", *["python"] * 2, *["zero-weights"] * 2, "python", "zero-weights"]
    auto: Any = transformers.AutoModelForCausalLM
    for folder in ("my-tuned", "my-merged", "my-model"):
        assert auto.from_pretrained(folder).config.model_type == "qwen2"
    assert {path.name for path in Path("my-adapters").iterdir()} == {
        "adapter_config.json",
        "adapter_model.safetensors",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
    }
