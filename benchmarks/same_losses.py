"""Trains the same settings with two commits, and compares every logged loss and gradient norm bit for bit.

    python benchmarks/same_losses.py COMMIT                     # the current commit against that one
    python benchmarks/same_losses.py COMMIT --only vq fused    # some of the settings

Each setting is a short run of `python main_zero.py` on 8 virtual CPU devices. For some of them the new commit also
resumes a checkpoint of the old one. Finished runs are kept in --place and not repeated. With the environment variable
JAX_DISABLE_MOST_OPTIMIZATIONS=1, and another --place, programs compile in a fifth of the time.
"""

import argparse
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
from io import BytesIO
from pathlib import Path

from zero.corpus.preparing.options import CorpusOptions
from zero.corpus.preparing.prepare import prepare
from zero.corpus.text.tokenizers import ByteTokenizer

REPOSITORY = Path(__file__).parents[1]
KEYS = ("train/loss", "validation/loss", "gradient_norm", "skipped_steps", "samples_checksum", "validation/ema_loss")
COMMON = (
    "data.corpus=null data.index_path_train=corpus/index/text_train.index data.wandb_project=null "
    "data.index_path_validation=corpus/index/text_validation.index data.max_context=64 training.batch_size=16 "
    "training.warmup_steps=3 training.staged_warmup_steps=0 training.evaluation_frequency=4 training.log_frequency=1 "
    "training.maximum_evaluation_steps=2 training.total_steps=8 training.sample_tokens=0 distributed.cpu_devices=8"
)
SHAPE = "embedding_dim: 64, vocab_size: 257, block_size: 64"
FAMILIES = {
    "gpt2": "num_head: 4, dropout: 0.1",
    "bloom": "num_head: 4, dropout: 0.1, alibi_attn: true",
    "gpt_neo": "num_head: 4, dropout: 0.1, windows: [0, 16]",
    "gpt_neox": "num_head: 4, dropout: 0.0",
    "llama": "num_head: 4, kv_heads: 2, dropout: 0.0, mlp_dim: 96",
    "mistral": "num_head: 4, kv_heads: 2, dropout: 0.0, windows: [16], mlp_dim: 96",
    "qwen3": "num_head: 4, kv_heads: 2, dropout: 0.0, mlp_dim: 96, head_dim: 8",
    "mixtral": "num_head: 4, kv_heads: 2, dropout: 0.0, mlp_dim: 96",
    "qwen3_moe": "num_head: 4, kv_heads: 2, dropout: 0.0, mlp_dim: 32, experts: 8, experts_per_token: 2",
    "gemma2": "num_head: 4, kv_heads: 2, dropout: 0.0, windows: [16, 0], mlp_dim: 96",
    "dense_lm": "num_head: 4, dropout: 0.1, mlp_dim: 96",
}
# Small sizes of each family, of two layers and of four, which make two spans of `zero.remat=nested`.
SIZES = [
    f"{kind}_{name}: {{family: {name}, {SHAPE}, N: {layers}, {rest}}}\n"
    for kind, layers in (("tiny", 2), ("deep", 4))
    for name, rest in FAMILIES.items()
]
STAGE3 = "model.size=test zero.stage=3"
DEEP = "model.size=deep_gpt2 zero.stage=3 zero.remat=nested"
# From the name of a setting to its overrides.
SETTINGS = {
    "default": "model.size=bytes training.batch_size=8 distributed.cpu_devices=2",
    **{f"stage {stage}": f"model.size=test zero.stage={stage}" for stage in range(4)},
    "accumulation": f"{STAGE3} training.gradient_accumulation_steps=2",
    "accumulation, stage 1": "model.size=test zero.stage=1 training.gradient_accumulation_steps=2",
    "remat": f"{STAGE3} zero.remat=full",
    "nested": DEEP,
    "fused": f"{STAGE3} zero.fused_update=true zero.remat=full",
    "fused, nested, int8": f"{DEEP} zero.fused_update=true optimizer.state_dtype=int8 zero.master_dtype=bfloat16 "
    "zero.gradient_dtype=bfloat16",
    "ema, spikes": f"{STAGE3} training.ema=0.9 training.skip_spikes=3",
    "no clipping, no skipping": f"{STAGE3} training.max_gradient_norm=null training.max_skipped_in_a_row=0",
    "bfloat16": f"{STAGE3} zero.compute_dtype=bfloat16 zero.wire_dtype=bfloat16 zero.gradient_dtype=bfloat16",
    "int8 on the wire": f"{STAGE3} zero.wire_dtype=int8 zero.gather_dtype=int8",
    "replicas": f"{STAGE3} zero.replicas=2",
    "muon": f"{STAGE3} optimizer=muon",
    "adafactor": f"{STAGE3} optimizer=adafactor",
    "staged": f"{STAGE3} training.staged_warmup_steps=4 training.warmup_train_context=16",
    "vq": "model.size=test_vq zero.stage=3",
    "vq, stage 1, accumulation": "model.size=test_vq zero.stage=1 training.gradient_accumulation_steps=2 "
    "training.ema=0.9",
    "experts": "model.size=test_experts zero.stage=3",
    "experts, groups": "model.size=test_experts zero.stage=3 zero.expert_shards=4",
    "experts, groups, stage 1": "model.size=test_experts zero.stage=1 zero.expert_shards=2 zero.replicas=2",
    "tensor": "model.size=tiny_llama zero.stage=3 zero.tensor_shards=2",
    "tensor, stage 0": "model.size=tiny_llama zero.stage=0 zero.tensor_shards=2",
    "tensor, fused, nested": "model.size=deep_llama zero.stage=3 zero.tensor_shards=2 zero.fused_update=true "
    "zero.remat=nested",
    "context, swapped heads": "model.size=tiny_gpt2 zero.stage=3 zero.context_shards=4",
    "context, ring": "model.size=tiny_llama zero.stage=3 zero.context_shards=8",
    **{family: f"model.size=tiny_{family} zero.stage=3" for family in FAMILIES},
}
RESUMED = ("ema, spikes", "vq, stage 1, accumulation", "fused, nested, int8", "muon")


def checkout(revision: str, place: Path) -> Path:
    """The files of a commit, with small sizes of the families added to its model sizes."""
    if not place.exists():
        archive = subprocess.run(["git", "archive", revision], cwd=REPOSITORY, capture_output=True, check=True)
        with tarfile.open(fileobj=BytesIO(archive.stdout)) as files:
            files.extractall(place, filter="data")
        with (place / "conf" / "model_config.yaml").open("a") as file:
            file.writelines(["\n", *SIZES])
    return place


def train(commit: Path, place: Path, directory: Path, *overrides: str) -> str | None:
    """Trains with a checkout; returns the last line of an error, or None."""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "WANDB_MODE": "offline"}
    command = [sys.executable, str(commit / "main_zero.py"), f"hydra.run.dir={directory}", *overrides]
    done = subprocess.run(command, cwd=place, env=environment, capture_output=True, text=True)
    return done.stderr.strip().splitlines()[-1] if done.returncode else None


def metrics(directory: Path) -> list[dict[str, float]]:
    """The compared values of each logged step; of two lines for one step the later one counts."""
    lines = map(json.loads, (directory / "metrics.jsonl").read_text().splitlines())
    steps = {line["step"]: {key: line[key] for key in KEYS if key in line} for line in lines if "event" not in line}
    return [{"step": step, **values} for step, values in sorted(steps.items())]


def result(directory: Path, place: Path, *trainings: tuple[Path, str]) -> list[dict[str, float]] | str:
    """The metrics of a run, trained by one (commit, overrides) after the other, or the error of the one that failed."""
    if not (directory / "finished").exists():
        shutil.rmtree(directory, ignore_errors=True)
        for commit, overrides in trainings:
            error = train(commit, place, directory, *shlex.split(overrides))
            if error is not None:
                return error
        (directory / "finished").touch()
    return metrics(directory)


def difference(expected: list[dict[str, float]] | str, found: list[dict[str, float]] | str) -> str | None:
    """The first difference, or None."""
    if isinstance(expected, str) or isinstance(found, str):
        return f"old: {str(expected)[:150]}; new: {str(found)[:150]}"
    for old, new in zip(expected, found, strict=False):
        for key in (*old, *(key for key in new if key not in old)):
            if old.get(key) != new.get(key):
                return f"step {old['step']}, {key}: {old.get(key)} and {new.get(key)}"
    return None if len(expected) == len(found) else f"{len(expected)} and {len(found)} logged steps"


def main() -> None:
    """Prints a row for each setting; exits with 1 where anything differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", help="the commit to compare with")
    parser.add_argument("--new", default="HEAD", help="another commit than the current one")
    parser.add_argument("--only", nargs="+", choices=list(SETTINGS), metavar="SETTING", help="some of the settings")
    parser.add_argument("--place", type=Path, default=Path("build/same_losses"), help="where runs are kept")
    given = parser.parse_args()
    place, names = given.place.resolve(), given.only or list(SETTINGS)
    place.mkdir(parents=True, exist_ok=True)
    commits = []
    for revision in (given.old, given.new):
        name = subprocess.run(
            ["git", "rev-parse", revision], cwd=REPOSITORY, capture_output=True, text=True, check=True
        )
        commits.append(checkout(name.stdout.strip(), place / name.stdout.strip()))
    old, new = commits
    if not (place / "corpus" / "index").exists():
        prepare(
            old / "docs" / "decisions",
            "text",
            CorpusOptions(ByteTokenizer(), row_tokens=256),
            directory=place / "corpus",
            index_directory=place / "corpus" / "index",
            progress=False,
        )
    differing = 0
    for name in names:
        overrides, half = f"{COMMON} {SETTINGS[name]}", "schedule=constant training.total_steps=4"
        pairs = [(name, [(old, overrides)], [(new, overrides)])]
        if name in RESUMED:
            whole = f"{overrides} schedule=constant"
            rest = "--resume training.total_steps=8"
            pairs.append((f"{name}, resumed", [(old, whole)], [(old, f"{overrides} {half}"), (new, rest)]))
        for title, before, after in pairs:
            expected = result(old / "runs" / re.sub(r"\W+", "_", title), place, *before)
            found = result(new / "runs" / re.sub(r"\W+", "_", title), place, *after)
            differs = difference(expected, found)
            differing += differs is not None
            losses = expected[-1].get("train/loss") if isinstance(expected[-1], dict) else None
            print(
                f"{title:40} {'equal' if differs is None else 'DIFFERS'}  {differs or f'last loss {losses}'}",
                flush=True,
            )
    print(f"{differing} of {len(names)} settings differ" if differing else f"all {len(names)} settings are equal")
    sys.exit(bool(differing))


if __name__ == "__main__":
    main()
