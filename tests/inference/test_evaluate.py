"""A trained model in use, by command: its losses against a plain loop on one device, and texts that it writes."""

import json
import math
import re
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from tests.helpers import cli
from tests.helpers.loaders import open_loader
from zero.config.saved_config import flat_config
from zero.corpus.format.index_files import read_index
from zero.corpus.text.tokenizers import ByteTokenizer
from zero.inference.scoring import windows
from zero.inference.trained_model import load_weights
from zero.job.sizes import load_sizes
from zero.models.gpt import GPT
from zero.partition.collectives.axis import Axis
from zero.report.html_report import write_report
from zero.run.config import default_config
from zero.training.sharded_gpt import ShardedGPT

SIZE = load_sizes()["test"]
RUN = "trained"


@pytest.fixture(scope="module")
def workplace(workplace: Path) -> Path:
    """With a trained model."""
    cli.Lasting(workplace).train(RUN, *cli.TINY)
    return workplace


def use(runs: cli.Forks, mode: str, out: str, *arguments: str) -> Path:
    return runs.train(out, f"mode={mode}", f"model.model_path={RUN}", *arguments)


def evaluated(runs: cli.Forks, out: str, *arguments: str) -> Any:
    return json.loads((use(runs, "evaluate", out, *arguments) / "evaluation.json").read_text())


@pytest.fixture(scope="module")
def params(workplace: Path) -> Any:
    """The weights, whole."""
    model = ShardedGPT(SIZE, Axis("zero", (1, 1)), 0)
    return jax.tree.map(lambda x: x[0], load_weights(workplace / RUN, model, None)[0])


@pytest.fixture(scope="module")
def plain(workplace: Path, params: Any) -> dict[str, float]:
    """One text after the other through the whole model, on one device; rows of 32 tokens, contexts of 12."""
    loader = open_loader(
        workplace / cli.INDICES[1], global_rows=1, context=32, vocab_size=256, shuffle=False, max_epochs=1
    )
    nats, tokens, octets = 0.0, 0, 0
    losses_of = jax.jit(GPT(SIZE).apply)
    for batch in loader.batches():
        row = batch.tokens[0][batch.tokens[0] >= 0]
        seen, target = np.zeros((2, 31, 12), np.int32)  # a context and what follows it, for each token but the first
        last = np.zeros(len(row) - 1, int)
        for t in range(1, len(row)):
            start = 0 if t < 12 else 6 * math.ceil((t - 11) / 6)
            last[t - 1] = t - start - 1
            seen[t - 1, : t - start] = row[start:t]
            target[t - 1, t - start - 1] = row[t]
        losses = np.asarray(losses_of({"params": params}, seen, target))
        nats += float(np.sum(losses[np.arange(len(last)), last], dtype=float))
        tokens, octets = tokens + len(last), octets + int(np.count_nonzero(row[1:]))
    return {"nats": nats, "tokens": tokens, "bytes": octets}


@pytest.mark.parametrize(
    "where",
    [
        ("evaluate.replicate=false", "distributed.cpu_devices=8"),
        *(
            pytest.param(where, marks=pytest.mark.wide)
            for where in (
                ("evaluate.replicate=false", "distributed.cpu_devices=3", "zero.stage=1"),
                ("evaluate.replicate=true", "distributed.cpu_devices=8", "training.batch_size=7"),
                ("distributed.cpu_devices=1",),
            )
        ),
    ],
)
def test_bits_per_byte(forks: cli.Forks, lasting: cli.Lasting, plain: dict[str, float], where: tuple[str, ...]) -> None:
    """Bits per byte are those of a plain loop."""
    out = "_".join(where).replace("=", "-")
    runs = lasting if "distributed.cpu_devices=8" in where else forks
    result = evaluated(runs, out, "evaluate.context=12", "evaluate.stride=6", *where)
    assert (result["tokens"], result["bytes"]) == (plain["tokens"], plain["bytes"])
    bits = plain["nats"] / math.log(2) / plain["bytes"]
    assert abs(result["bits_per_byte"] - bits) <= 1e-6 * bits
    assert result["perplexity"] == pytest.approx(math.exp(plain["nats"] / plain["tokens"]))
    assert result["step"] == 12


@pytest.mark.parametrize(
    "where", ["evaluate.replicate=false", pytest.param("evaluate.replicate=true", marks=pytest.mark.wide)]
)
def test_weights_in_int8(lasting: cli.Lasting, plain: dict[str, float], where: str) -> None:
    """Weights held in int8 change the perplexity by less than 0.5 %, wherever they are."""
    contexts = ("evaluate.context=12", "evaluate.stride=6", "evaluate.weight_dtype=int8")
    found = evaluated(lasting, f"int8-{where.partition('=')[2]}", *contexts, where)["perplexity"]
    exact = math.exp(plain["nats"] / plain["tokens"])
    assert abs(found / exact - 1) < 5e-3
    assert found != pytest.approx(exact, rel=1e-7)


@pytest.mark.parametrize(("context", "stride"), [(2, 1), (5, 1), (5, 4), (7, 3), (40, 20)])
def test_windows_score_tokens_once(context: int, stride: int) -> None:
    """Windows score each token once, after enough context."""
    for length in range(30):
        tokens, scored = np.arange(length), []
        for passage, first in windows(tokens, context, stride):
            assert len(passage) <= context and 1 <= first < len(passage)
            scored += passage[first:].tolist()
            assert passage[0] == 0 or first >= context - stride
        assert scored == list(range(1, length))


def texts(directory: Path) -> list[str]:
    return [json.loads(line)["text"] for line in (directory / "samples.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    "devices", [pytest.param(3, marks=pytest.mark.wide), pytest.param(8, marks=pytest.mark.slow)]
)  # training/test_inference.py has text of shards
def test_text_is_the_same_everywhere(devices: int, forks: cli.Forks, lasting: cli.Lasting) -> None:
    """Text is the same wherever the weights are."""
    options = ("sample.prompt=[shard gath,s,scatter]", "sample.copies=2", "sample.tokens=20")
    whole = texts(use(lasting, "sample", "whole", *options, "sample.replicate=true"))
    assert len(whole) == 6 and len(set(whole)) == 6 and all(text for text in whole)
    sharded = ("sample.replicate=false", f"distributed.cpu_devices={devices}")
    assert texts(use(forks, "sample", f"sharded-{devices}", *options, *sharded)) == whole
    assert texts(use(lasting, "sample", "seed", *options, "sample.replicate=true", "sample.seed=1")) != whole


def test_greedy_text_beyond_trained_context(lasting: cli.Lasting, params: Any) -> None:
    """Greedy text is the most likely one, also beyond the trained context.

    With ALiBi 60 tokens after a context of 32 need nothing.
    """
    done = lasting.check(
        "mode=sample", f"model.model_path={RUN}", "sample.prompt='shard g'", "sample.tokens=60",
        "sample.temperature=0", "hydra.run.dir=greedy",
    )  # fmt: skip
    tokens = np.append(0, ByteTokenizer().encode("shard g")).astype(np.int32)
    table = params["vocabulary"]["table"].reshape(-1, SIZE.embedding_dim)[: SIZE.vocab_size]
    hidden_of = jax.jit(partial(GPT(SIZE).apply, method="hidden"))
    while len(tokens) < 8 + 60 and (len(tokens) == 8 or tokens[-1] != 0):
        padded = np.pad(tokens, (0, 8 + 60 - len(tokens)))  # what comes after a position does not reach it
        hidden, _ = hidden_of({"params": params}, padded[None], None)
        tokens = np.append(tokens, np.argmax(hidden[0, len(tokens) - 1] @ table.T)).astype(np.int32)
    expected = ByteTokenizer().decode(tokens[8:])
    assert done.stdout == "shard g" + expected + "\n"
    assert texts(lasting.workplace / "greedy") == [expected]
    assert "tokens/s" in done.stderr


def test_prompts_come_from_a_file(lasting: cli.Lasting) -> None:
    (lasting.workplace / "prompts.txt").write_text("shard\nlay\u2028out\n")  # splitlines() would cut it
    out = use(lasting, "sample", "file", "sample.prompt_file=prompts.txt", "sample.tokens=4")
    lines = [json.loads(line) for line in (out / "samples.jsonl").read_bytes().splitlines()]
    assert [line["prompt"] for line in lines] == ["shard", "lay\u2028out"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("mode=sample", f"model.model_path={RUN}", "sample.top_p=2"), "sample.top_p=2"),
        (("mode=sample", f"model.model_path={RUN}", "sample.prompt_file=none.txt"), "none.txt: no such file"),
        (("mode=sample", "model.model_path=nowhere"), "nowhere: not a run directory"),
        (("mode=evaluate", f"model.model_path={RUN}", "evaluate.validation=false"), "validation=false: expected"),
        (("mode=sample",), "runs has no run with a checkpoint"),
        (("mode=evaluate", f"model.model_path={RUN}", "data.resume_step=7"), "resume_step=7: .* holds steps 6, 12"),
        (("mode=evaluate", f"model.model_path={RUN}", "evaluate.stride=32"), "evaluate.stride=32: expected 1 to 31"),
        (("mode=evaluate", f"model.model_path={RUN}", "model.size=124m"), "model.size=124m: expected test"),
    ],
)  # fmt: skip
def test_mistakes_are_one_line(forks: cli.Forks, arguments: tuple[str, ...], message: str) -> None:
    done = forks.run(*arguments, "hydra.run.dir=mistake")
    assert done.returncode == 2
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("error: ") and re.search(message, last), done.stderr


def test_closed_pipe_of_help(tmp_path: Path) -> None:
    """A reader that has gone does not end the program: `--help | head`."""
    process = cli.start(tmp_path, "--help")
    assert process.stdout is not None
    process.stdout.close()
    _, errors = process.communicate(timeout=900)
    assert process.returncode == 0 and not errors, errors


@pytest.mark.parametrize(
    "mode", [pytest.param("sample", marks=pytest.mark.wide), pytest.param("evaluate", marks=pytest.mark.slow)]
)
def test_closed_pipe(forks: cli.Forks, mode: str) -> None:
    """A reader that has gone does not end the program.

    As in `mode=sample | head`: the file is written all the same.
    """
    arguments = (f"mode={mode}", f"model.model_path={RUN}", "sample.tokens=40", f"hydra.run.dir=gone-{mode}")
    process = cli.start(forks.workplace, *arguments)
    assert process.stdout is not None
    process.stdout.close()
    _, errors = process.communicate(timeout=900)
    assert process.returncode == 0, errors
    assert "Traceback" not in errors and "BrokenPipe" not in errors
    assert (forks.workplace / f"gone-{mode}" / ("samples.jsonl" if mode == "sample" else "evaluation.json")).exists()


def test_isolated_documents_of_another_tokenizer(forks: cli.Forks) -> None:
    """A corpus of another tokenizer is refused where documents are isolated.

    Its end of text is another token: documents would be cut elsewhere, and the loss would not be the run's.
    """
    place = forks.workplace / "other"
    shutil.copytree(forks.workplace / "corpus", place)
    manifest = json.loads((place / "tiny" / "manifest.json").read_text())
    (place / "tiny" / "manifest.json").write_text(json.dumps(manifest | {"tokenizer": "file:other"}))
    other = ("data.isolate_documents=true", f"data.index_path_validation={place}/index/tiny_validation.index")
    done = forks.run("mode=evaluate", f"model.model_path={RUN}", *other)
    assert done.returncode == 2, done.stderr
    last = done.stderr.splitlines()[-1]
    assert "data.tokenizer: corpus" in last and str(place) in last


@pytest.mark.wide  # test_follow.py has them without runs
def test_follower_scores_each_checkpoint_once(lasting: cli.Lasting) -> None:
    """Up to the last step; after a kill between two checkpoints only what is missing; the report shows the results.

    Other texts are another evaluation, whose results are told apart.
    """
    file, options = lasting.workplace / RUN / "evaluations.jsonl", ("evaluate.context=12", "evaluate.stride=6")
    own = ("mode=evaluate", f"model.model_path={RUN}", "evaluate.follow=true", *options)
    assert steps_of(lasting.check(*own, "hydra.run.dir=follower").stdout) == [6, 12]
    whole = file.read_bytes()
    file.write_bytes(whole.splitlines(keepends=True)[0])
    assert steps_of(lasting.check(*own, "hydra.run.dir=again").stdout) == [12]
    assert file.read_bytes() == whole
    assert [line["step"] for line in cli.metrics(lasting.workplace / "again")] == [12]
    newest = evaluated(lasting, "newest", *options)
    line = json.loads(whole.splitlines()[1])
    assert line.pop("scored")["keys"]["evaluate.stride"] == 6
    assert line == {
        "step": 12,
        **{f"evaluation/{key}": newest[key] for key in ("loss", "perplexity", "bits_per_byte")},
    }
    assert steps_of(lasting.check(*own, f"evaluate.index={cli.INDICES[0]}", "hydra.run.dir=other").stdout) == [6, 12]
    page = write_report(
        [lasting.workplace / RUN], lasting.workplace / "report.html", flat_config(default_config())
    ).read_text()
    assert '"evaluation/loss":[[' in page


def steps_of(output: str) -> list[int]:
    return [json.loads(line)["step"] for line in output.splitlines()]


def test_named_sets(lasting: cli.Lasting) -> None:
    """Named sets have entries, during training and after, and their total is that of all tokens."""
    train, text = cli.INDICES
    both = f"data.index_path_validation={{val: {text}, part: [{train}]}}"
    whole = "training.maximum_evaluation_steps=100"
    run = lasting.fork(RUN, 6, "training.evaluation_frequency=12", whole, both)
    found = cli.metrics(run)[-1]
    options = (f"model.model_path={run}", "evaluate.context=32")
    sets = lasting.evaluate("of-sets", *options)["sets"]
    assert sets.keys() == {"val", "part"}
    for name, one in sets.items():
        for key in ("loss", "bits_per_byte"):
            assert one[key] == pytest.approx(found[f"validation/{name}/{key}"], rel=1e-5)
    tokens = sum(one["tokens"] for one in sets.values())
    total = sum(one["loss"] * one["tokens"] for one in sets.values()) / tokens
    assert found["validation/loss"] == pytest.approx(total, rel=1e-5)


@pytest.mark.wide
def test_named_sets_and_their_total(lasting: cli.Lasting) -> None:
    """Named sets have entries, during training and after; the total equals that of the merged list.

    Also where the number of batches ends within a set: there it is enough for each set, but not for both.
    """
    train, text = cli.INDICES
    both = f"data.index_path_validation={{val: {text}, part: [{train}]}}"
    merged = f"data.index_path_validation=[{text}, {train}]"
    rows = sum(shard.rows for index in cli.INDICES for shard in read_index(lasting.workplace / index))
    limit = f"training.maximum_evaluation_steps={rows // 16}"
    found = {}
    for name, index in (("merged", merged), ("named", both)):
        run = lasting.fork(RUN, 6, "training.evaluation_frequency=12", limit, index)
        found[name] = cli.metrics(run)[-1]
        assert [line["step"] for line in cli.metrics(run)] == [*range(1, 13)]
    named, total = found["named"], found["merged"]["validation/loss"]
    assert named["validation/loss"] == pytest.approx(total, rel=1e-6)
    assert not [key for key in found["merged"] if key.startswith("validation/") and key != "validation/loss"]
    losses = [named[f"validation/{name}/loss"] for name in ("val", "part")]
    assert min(losses) < total < max(losses)
    assert named["validation/val/bits_per_byte"] > losses[0] / math.log(2)  # an end of text has no bytes

    options = (f"model.model_path={run}", "evaluate.context=32")
    result = json.loads((lasting.train("scored", "mode=evaluate", *options) / "evaluation.json").read_text())
    assert result["sets"].keys() == {"val", "part"}
    for name in ("val", "part"):
        one = result["sets"][name]
        assert one["loss"] == pytest.approx(named[f"validation/{name}/loss"], rel=1e-5)
        assert one["bits_per_byte"] == pytest.approx(named[f"validation/{name}/bits_per_byte"], rel=1e-5)
    assert result["tokens"] == sum(one["tokens"] for one in result["sets"].values())
    test_set = json.loads(
        (lasting.train("test-set", "mode=evaluate", *options, f"evaluate.index={text}") / "evaluation.json").read_text()
    )
    assert "sets" not in test_set and test_set["loss"] == result["sets"]["val"]["loss"]
