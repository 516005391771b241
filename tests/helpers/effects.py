"""What a run writes, feature by feature, and the moments of each effect at which a process is killed.

- `EFFECTS`: the table, in the order in which features act. `PAIRS`: what a run on preferences writes at its start.
- `Run`: the same command starts it each time, it is killed at a moment, and compared at its end.
- `on_disk`, `in_bucket`: make one. `on_pairs`, `on_labels`, `on_teacher`: one of another objective, on disk.

tests/run/test_train_killed_at_each_effect.py goes through the table, benchmarks/storm.py draws from it.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple
from unittest.mock import patch

import numpy as np

from tests.helpers import bucket, cli, hosts, kills
from tests.helpers.compilation import QUICK_FLAGS
from zero.checkpoints.manager import Checkpoints
from zero.corpus.preparing.options import CorpusOptions
from zero.corpus.preparing.prepare import prepare
from zero.corpus.text.tokenizers import ByteTokenizer
from zero.files import storage
from zero.files.storage import gcs
from zero.record.run_files import committed_steps

# Emergency checkpoints at 3, 6, 9 and 12; durable ones at 3, 6 and 12, outside the run directory.
JOB = (
    *cli.TINY,
    "training.gradient_accumulation_steps=1",
    "training.sample_tokens=4",
    "zero.emergency_steps=3",
    "zero.emergency_directory=memory",
    "hydra.run.dir=run",
)
RUN = Path("run")
MOST_SECONDS = 3600  # of a start, on a machine that may be busy
EQUAL_METADATA = (  # of checkpoints; the others hold times, paths and what was pending
    *("step", "cursor", "skipped_rows", "samples_checksum", "validation_loss"),
    *("shapes", "dtypes", "checksums"),
)


class InBucket(NamedTuple):
    """The request that takes the place of an operation on disk."""

    name: str  # a pattern of the name of the object
    when: Literal["before", "after"]
    nth: int = 1


class Effect(NamedTuple):
    """A moment of an effect: the operation before or after which the process is killed."""

    feature: str
    moment: Literal["before", "within", "after"]
    event: kills.Event
    path: str
    action: Literal["kill before", "kill after"]
    in_bucket: InBucket | None = None  # of what is beside the checkpoints

    def rule(self, nth: int = 1, host: int = 0) -> kills.Rule:
        return kills.Rule(self.event, self.path, self.action, nth, host)


EFFECTS = (
    Effect("validate", "before", "open", r"/validation-\d+\.tar$", "kill before"),
    Effect("validate", "within", "open", r"/validation-\d+\.tar$", "kill after"),
    Effect("track", "before", "append", r"/run/metrics\.jsonl$", "kill before"),
    Effect("track", "after", "append", r"/run/metrics\.jsonl$", "kill after"),
    Effect("mirror", "before", "os.rename", r"/place-run/config\.yaml$", "kill before",
           InBucket(r"place-run/config\.yaml", "before")),
    Effect("mirror", "within", "os.rename", r"/place-run/metrics\.jsonl$", "kill before",
           InBucket(r"place-run/metrics\.jsonl", "before")),
    Effect("mirror", "after", "os.rename", r"/place-run/emergency_lineage$", "kill after",
           InBucket(r"place-run/emergency_lineage", "after")),
    Effect("save", "before", "os.mkdir", r"/place/\d+\.", "kill before", InBucket(r"place/\d+[./]", "before")),
    Effect("save", "within", "os.mkdir", r"/place/\d+\..*/", "kill after", InBucket(r"place/\d+[./]", "after", 3)),
    Effect("save", "within", "os.rename", r"/place/\d+$", "kill before",
           InBucket(r"place/\d+/commit_success\.txt", "before")),
    Effect("save", "after", "os.rename", r"/place/\d+$", "kill after",
           InBucket(r"place/\d+/commit_success\.txt", "after")),
    Effect("protect", "before", "open", r"-\d+-\d+\.shards\.tmp$", "kill before"),
    Effect("protect", "within", "os.rename", r"-\d+-\d+\.shards$", "kill before"),
    Effect("protect", "after", "os.rename", r"-\d+-\d+\.shards$", "kill after"),
    Effect("sample", "before", "append", r"/run/samples\.txt$", "kill before"),
    Effect("sample", "after", "append", r"/run/samples\.txt$", "kill after"),
    Effect("report", "before", "os.rename", r"/run/run\.png$", "kill before"),
    Effect("report", "within", "os.rename", r"/run/run\.png$", "kill after"),
    Effect("report", "after", "os.rename", r"/run/report\.html$", "kill after"),
)  # fmt: skip
PAIRS = (
    Effect("reference", "before", "open", r"/\.pairs_train\.reference-", "kill before"),
    Effect("reference", "within", "os.rename", r"/pairs_train\.reference-", "kill before"),
    Effect("reference", "after", "os.rename", r"/pairs_train\.reference-", "kill after"),
)


# What others write beside a run that trains: a follower, and an average of its checkpoints.
BESIDE = (
    Effect("follow", "before", "os.rename", r"/evaluations\.jsonl$", "kill before",
           InBucket(r"place-run/evaluations\.jsonl", "before")),
    Effect("follow", "after", "os.rename", r"/evaluations\.jsonl$", "kill after",
           InBucket(r"place-run/evaluations\.jsonl", "after")),
    Effect("average", "before", "os.mkdir", r"/\.mean\.[0-9a-f]{8}$", "kill after"),
    Effect("average", "within", "os.rename", r"/\.mean\.[0-9a-f]{8}/checkpoints/\d+$", "kill before"),
    Effect("average", "after", "os.rename", r"/mean$", "kill before"),
)  # fmt: skip
# Another trainer on the checkpoints of the run, in a run directory of its own; it makes at most one step.
OTHER_TRAINER = Effect("other trainer", "before", "append", r"/other/metrics\.jsonl$", "kill before")


@dataclass
class Run:
    """A run on one host or more, which the same command starts each time; each host is a fork.

    Attributes:
      place: of its checkpoints.
      proxy: of the bucket that these are in.
      count: of hosts.
      effects: the moments at which it may be killed; those of its start are `effects_of_start`.
    """

    workplace: Path
    place: Path | str
    arguments: tuple[str, ...]
    count: int = 1
    proxy: bucket.Proxy | None = None
    effects: tuple[Effect, ...] = EFFECTS
    effects_of_start: tuple[Effect, ...] = ()

    def start(self) -> list[cli.Fork]:
        """One process per host; several of them compile at each start, so as quickly as XLA can."""
        with patch.dict(os.environ, {"XLA_FLAGS": QUICK_FLAGS}):
            return self._start()

    def _start(self) -> list[cli.Fork]:
        own = (f"distributed.cpu_devices={2 // self.count}", f"training.batch_size={16 // self.count}")
        arguments = cli.later_values("--resume=auto", *JOB, *self.arguments, *own)
        if self.count == 1:
            return [cli.Forks(self.workplace).start(*arguments)]
        return [
            cli.Forks(self.workplace, host).start(
                *cli.later_values(*arguments, *together, f"zero.emergency_directory=memory-{host}")
            )
            for host, together in enumerate(hosts.joining(self.count))
        ]

    def attempt(self, effect: Effect, nth: int = 1, host: int = 0) -> subprocess.CompletedProcess[str]:
        """Starts the run and kills a host at the moment, the others as a launcher does; what came of this host."""
        is_request = self.proxy is not None and effect.in_bucket is not None
        with cli.customized("" if is_request else kills.at(effect.rule(nth, host))):
            processes = self.start()
        victim = processes[host]
        if self.proxy is not None and effect.in_bucket is not None:
            name, when, first = effect.in_bucket
            self.proxy.strike = bucket.Strike(name, when, lambda: os.kill(victim.pid, signal.SIGKILL), first + nth - 1)
        done = cli.finish(victim, MOST_SECONDS)
        if self.proxy is not None:
            self.proxy.strike = None
        for process in processes:
            if process is not victim:
                if done.returncode != 0:
                    process.kill()
                cli.finish(process)
        return done

    def follow(self, effect: Effect | None = None) -> cli.Fork:
        """Starts a follower, which lives as long as the run, or until the moment of an effect."""
        with cli.customized("" if effect is None else kills.at(effect.rule())):
            return cli.Forks(self.workplace, 1).start(
                *("mode=evaluate", "evaluate.follow=true", "distributed.cpu_devices=2", "hydra.run.dir=follower"),
                f"model.model_path={self.place if self.proxy is not None else RUN}",
            )

    def average(self, effect: Effect | None = None, *steps: int) -> subprocess.CompletedProcess[str]:
        """`zero-weights average` of these checkpoints, or of all, to `mean`, killed at the moment of an effect."""
        chosen = ["--steps", *map(str, steps)] if steps else []
        command = [sys.executable, "-m", "zero.exchange.zero_weights", "average", str(self.place), "mean", *chosen]
        with cli.customized("" if effect is None else kills.at(effect.rule())):
            environment = cli.environment()
        environment["PYTHONPATH"] += f":{cli.MAIN.parent}"
        return subprocess.run(command, cwd=self.workplace, env=environment, capture_output=True, text=True)

    def other_trainer(self) -> cli.Fork:
        """Starts the run once more, in another directory, killed at its first step if it is not refused before."""
        with cli.customized(kills.at(OTHER_TRAINER.rule())):
            own = ("distributed.cpu_devices=2", "training.batch_size=16", "hydra.run.dir=other")
            arguments = cli.later_values("--resume=auto", *JOB, *self.arguments, *own)
            return cli.Forks(self.workplace, 2).start(*arguments)

    def evaluations(self) -> dict[int, float]:
        """The losses of a follower, by step."""
        file = f"{self.place}-run/evaluations.jsonl"
        lines = map(json.loads, storage.read_bytes(file).splitlines()) if storage.exists(file) else ()
        return {line["step"]: line["evaluation/loss"] for line in lines}

    def check_beside(self, undisturbed: "Run") -> None:
        """Compares evaluations and the mean of the checkpoints with those of a run that was left alone."""
        found, expected = self.evaluations(), undisturbed.evaluations()
        steps = committed_steps(self.place)
        assert set(steps) - {9} <= found.keys() and max(found) == max(expected)
        for step in found.keys() & expected.keys():
            assert found[step] == expected[step], step
        shutil.rmtree(self.workplace / "mean", ignore_errors=True)
        done = self.average(None, *steps)
        assert done.returncode == 0, done.stderr
        assert [path.name for path in self.workplace.glob(".mean.*")] == []

    def killed(self, effect: Effect, nth: int = 1, host: int = 0) -> None:
        """Starts the run and asserts that it was killed at the moment."""
        done = self.attempt(effect, nth, host)
        assert done.returncode == -signal.SIGKILL, (effect, done.stderr)

    def finish(self) -> list[subprocess.CompletedProcess[str]]:
        """Starts the run, which ends by itself."""
        done = [cli.finish(process, MOST_SECONDS) for process in self.start()]
        assert [one.returncode for one in done] == [0] * self.count, [one.stderr for one in done]
        return done

    def durable(self) -> tuple[dict[int, dict[str, Any]], dict[str, np.ndarray]]:
        """The metadata of each durable checkpoint, with the checksums of its leaves, and the last state, whole.

        Paths in the metadata are relative to the workplace.
        """
        steps = committed_steps(self.place)
        with Checkpoints(self.place, None) as checkpoints:
            texts = {step: json.dumps(checkpoints.meta(step)) for step in steps}
            metadata = {step: json.loads(text.replace(f"{self.workplace}/", "")) for step, text in texts.items()}
            return metadata, {name: checkpoints.read(steps[-1], name) for name in metadata[steps[-1]]["shapes"]}

    def check(self, undisturbed: "Run") -> None:
        """Compares metrics, samples, report and checkpoints with those of a run that was left alone."""
        run, calm = self.workplace / RUN, undisturbed.workplace / RUN
        assert cli.metrics(run) == cli.metrics(calm)
        if (calm / "samples.txt").exists():
            assert (run / "samples.txt").read_text() == (calm / "samples.txt").read_text()
        page = run / "report.html"
        assert page.stat().st_mtime_ns >= (run / "metrics.jsonl").stat().st_mtime_ns and (run / "run.png").exists()
        metadata, leaves = self.durable()
        expected_metadata, expected_leaves = undisturbed.durable()
        # 9 was saved where it was restored, and the oldest may be gone.
        assert max(metadata) == max(expected_metadata) and metadata.keys() <= {9, *expected_metadata}
        for step in metadata.keys() & expected_metadata.keys():
            for key in EQUAL_METADATA:
                of_step, expected = metadata[step][key], expected_metadata[step][key]
                assert of_step == expected, (step, key, of_step, expected)
        assert leaves.keys() == expected_leaves.keys()
        for name, leaf in leaves.items():
            np.testing.assert_array_equal(leaf, expected_leaves[name], err_msg=name)
        assert list(self.workplace.glob("memory*/*/*")) == []
        assert unfinished_files(self.workplace) == []


def unfinished_files(directory: Path) -> list[Path]:
    """What processes have left that were killed while they wrote a file (`zero.files.storage.write`)."""
    return [path for path in directory.rglob(".*") if re.fullmatch(r"\..+\.[0-9a-f]{8}", path.name)]


@contextmanager
def on_disk(workplace: Path, count: int = 1) -> Iterator[Run]:
    place = cli.make_workplace(workplace) / "place"
    yield Run(workplace, place, (f"data.checkpoint_directory={place}",), count)


@contextmanager
def in_bucket(workplace: Path, count: int = 1) -> Iterator[Run]:
    cli.make_workplace(workplace)
    train, validation = (workplace / path for path in cli.INDICES)
    keys = (f"data.index_path_train={train}", f"data.index_path_validation={validation}")
    with bucket.serving() as server:
        proxy = bucket.Proxy(server, 0)
        with (
            bucket.disturbed(proxy) as address,
            patch.dict(os.environ, {"STORAGE_EMULATOR_HOST": address, "TENSORSTORE_GCS_HTTP_URL": address}),
        ):
            gcs.client.cache_clear()
            arguments = (f"data.bucket_path={bucket.BUCKET}", "data.checkpoint_directory=place", *keys)
            yield Run(workplace, f"gs://{bucket.BUCKET}/place", arguments, count, proxy)


@contextmanager
def on_pairs(workplace: Path, count: int = 1) -> Iterator[Run]:
    """A run that learns preferences from another run, which is its reference."""
    texts = [{"prompt": f"{i}? ", "chosen": "yes" + "!" * (i % 3), "rejected": "no"} for i in range(100)]
    with _on_answers(workplace, count, "preferences", texts, "objective=dpo", "objective.beta=0.3") as run:
        yield run


@contextmanager
def on_labels(workplace: Path, count: int = 1) -> Iterator[Run]:
    """A run that learns from labelled answers (KTO), with another run as its reference."""
    texts = [{"prompt": f"{i}? ", "completion": "yes" if i % 3 else "no", "label": i % 3 > 0} for i in range(100)]
    with _on_answers(workplace, count, "labels", texts, "objective=kto") as run:
        yield run


@contextmanager
def _on_answers(
    workplace: Path, count: int, examples: str, texts: list[dict[str, Any]], *objective: str
) -> Iterator[Run]:
    """A run on a corpus of such examples, which samples nothing and stores the values of its reference first."""
    with on_disk(workplace, count) as run:
        source = workplace / "pairs.jsonl"
        source.write_text("".join(json.dumps(text) + "\n" for text in texts))
        prepare(
            source,
            "pairs",
            CorpusOptions(ByteTokenizer(), cli.CONTEXT, validation_fraction=0.2, examples=examples),
            directory=workplace / "data",
            index_directory=workplace / "data" / "index",
            progress=False,
        )
        _train_base(workplace)
        index = workplace / "data" / "index"
        run.arguments += (
            *objective,
            "training.sample_tokens=0",
            "model.warm_start=true",
            "model.model_path=base",
            f"data.index_path_train={index}/pairs_train.index",
            f"data.index_path_validation={index}/pairs_validation.index",
        )
        run.effects = tuple(effect for effect in EFFECTS if effect.feature != "sample")
        run.effects_of_start = PAIRS
        yield run


@contextmanager
def on_teacher(workplace: Path, count: int = 1) -> Iterator[Run]:
    """A run that learns from the tokens of another run, its teacher, which are stored beside its index files."""
    with on_disk(workplace, count) as run:
        _train_base(workplace)
        cli.Forks(workplace).check(
            *("mode=evaluate", "model.model_path=base", "evaluate.top_tokens=5", "evaluate.validation=false"),
            *(f"evaluate.index=[{','.join(cli.INDICES)}]", "distributed.cpu_devices=2", "hydra.run.dir=stored"),
        )
        run.arguments += ("objective=distillation", "objective.top_tokens=4", "objective.weight=0.5")
        yield run


def _train_base(workplace: Path) -> None:
    """A run of one step, which others start from."""
    shortest = ("training.total_steps=1", "training.warmup_steps=0", "training.maximum_evaluation_steps=0")
    cli.Forks(workplace).train("base", *cli.TINY, "distributed.cpu_devices=2", *shortest)
