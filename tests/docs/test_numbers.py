"""Numbers of the pages beside what they are numbers of: sizes, keys, choices, constants, digests, a first run."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable
from pathlib import Path

import pytest

from docs.draw_first_run import RUN
from zero.config.files import conf_directory
from zero.costs.formula import KINDS
from zero.hosts.watchdog import SILENCE_SECONDS
from zero.models.families import FAMILIES
from zero.report.html_report import RELOAD_SECONDS
from zero.run.config import GROUPS
from zero.run.features.report import REPORT_SECONDS

pytestmark = pytest.mark.quick

REPOSITORY = Path(__file__).parents[2]
HOW_TO = "docs/how-to"
STAGES = "docs/explanation/stages.md"
FIRST_RUN = "docs/tutorial/first-run.md"
MEMORY = "docs/how-to/planning.md"
COMPARISON = "docs/explanation/comparison.md"
HASHES = re.compile(r"\b(hashlib\.|crc32c?\(|checksums\()")
# Modules that hash without storing a digest: keys by which documents are found or drawn, or by which hosts compare.
KEYS_ONLY = {
    "corpus/format/one_host.py",
    "corpus/preparing/corpus_statistics.py",
    "corpus/preparing/engines.py",
    "corpus/preparing/filters/contamination.py",
    "corpus/preparing/near_duplicates.py",
    "corpus/preparing/sources/changes.py",
    "corpus/preparing/tokenize_documents.py",
    "hosts/agreement.py",
}


def test_number_of_keys() -> None:
    """The bound on the architecture page is that of the test of all keys."""
    bound = re.search(r"len\(keys\) <= (\d+)", text_of("tests/run/test_config_every_key.py"))
    assert bound is not None and f"shows at most {bound[1]} keys" in text_of("docs/explanation/architecture.md")


def text_of(page: str) -> str:
    return (REPOSITORY / page).read_text()


# The sizes with their parameters: tests/models/test_gpt.py counts them, and compares them with these comments.
SIZES_TEXT = "".join(
    path.read_text()
    for path in (conf_directory() / "model_config.yaml", *sorted(conf_directory().glob("models/*.yaml")))
)
SIZES = re.findall(r'^"?(\w+)"?: # ([0-9,]+) parameters', SIZES_TEXT, re.M)
PARAMETERS = dict(SIZES)
# The keys with their defaults: tests/config/test_check.py compares the page with the declarations.
DEFAULTS = dict(re.findall(r"^\| `([\w.]+)` \| `([^`]*)` \|", text_of("docs/reference/keys.md"), re.M))
LOGGED = [json.loads(line) for line in (RUN / "metrics.jsonl").read_text().splitlines()]
OF_TRAINING, OF_VALIDATION = [json.loads(line) for line in (RUN / "evaluations.jsonl").read_text().splitlines()]
ROWS_OF_AN_EVALUATION = int(DEFAULTS["training.maximum_evaluation_steps"]) * int(DEFAULTS["training.batch_size"])
HAVE_NO_FOLDERS = {"dense_lm", "vq"}  # of transformers


def listed(names: Iterable[str]) -> str:
    """The names as a sentence has them.

    >>> listed(["a", "b", "c"])
    'a, b or c'
    """
    *first, last = names
    return f"{', '.join(first)} or {last}"


(FASTER_THAN_MAXTEXT,) = re.findall(
    r"zero is ([\d.]+ to [\d.]+) times as fast\s+as MaxText", text_of("docs/reference/performance.md")
)
LOGGED_AT_240 = next(line for line in LOGGED if line["step"] == 240)
# A page, a pattern with the number or the list in its group, and what that is.
SAID = [
    ("README.md", r"([\d,]+) parameters, context 1024", PARAMETERS["1_1b"]),
    (FIRST_RUN, r"only the first (\d+) of", ROWS_OF_AN_EVALUATION),
    (FIRST_RUN, r"score ([\d.]+) on the whole validation set", f"{OF_VALIDATION['loss']:.3f}"),
    (FIRST_RUN, r"and ([\d.]+) on rows of the training set", f"{OF_TRAINING['loss']:.3f}"),
    ("README.md", r"(\d+) model families", len(FAMILIES.keys() - HAVE_NO_FOLDERS)),
    ("docs/reference/features.md", r"\| (\d+) model families \|", len(FAMILIES.keys() - HAVE_NO_FOLDERS)),
    ("CHANGELOG.md", r"(\d+) families of transformers", len(FAMILIES.keys() - HAVE_NO_FOLDERS)),
    ("notebooks/train.ipynb", r"a GPT of ([\d,.]+(?: million)?) parameters", PARAMETERS["bytes"]),
    (STAGES, r"Ψ = ([\d,]*\d)", PARAMETERS["bytes"]),
    (STAGES, r"([\d,]+) parameters, context 1024", PARAMETERS["1_1b"]),
    (COMPARISON, r"([\d.]+ to [\d.]+) times as fast as MaxText's", FASTER_THAN_MAXTEXT),
    ("README.md", r"([\d.]+ to [\d.]+) times as fast as MaxText's", FASTER_THAN_MAXTEXT),
    (FIRST_RUN, r"ln 256 = (\d\.\d+)", f"{math.log(256):.2f}"),
    (FIRST_RUN, r"with sequences of (\d+) tokens", DEFAULTS["training.warmup_train_context"]),
    (FIRST_RUN, r"after (\d+) steps\. Each length", DEFAULTS["training.staged_warmup_steps"]),
    (FIRST_RUN, r"step 240/960: loss ([\d.]+),", f"{LOGGED_AT_240['train/loss']:.3f}"),
    (FIRST_RUN, r"tokens/s, validation ([\d.]+),", f"{LOGGED_AT_240['validation/loss']:.3f}"),
    (FIRST_RUN, r"Every (\d+) steps zero evaluates", DEFAULTS["training.evaluation_frequency"]),
    (FIRST_RUN, r"after (\d+) some of its words", DEFAULTS["training.total_steps"]),
    (f"{HOW_TO}/watch-a-run.md", r"reloads itself every (\d+) s", RELOAD_SECONDS),
    (f"{HOW_TO}/watch-a-run.md", r"at most every (\d+) s", REPORT_SECONDS),
    (f"{HOW_TO}/use-a-cluster.md", r"does not respond for (\d+) s", SILENCE_SECONDS),
    (f"{HOW_TO}/export-weights.md", r"it has (\d+) lines", text_of("zero/exchange/modeling_zero.py").count("\n")),
    (f"{HOW_TO}/planning.md", r"in nodes of eight: (.*?)\.", listed(sorted(KINDS))),
    (f"{HOW_TO}/choose-an-optimizer.md", r"`optimizer=` is ([^.]*)\.", listed(GROUPS["optimizer"].choices)),
    (f"{HOW_TO}/choose-an-optimizer.md", r"`schedule=` is ([^.]*)\.", listed(GROUPS["schedule"].choices)),
    *((MEMORY, rf"model\.size={size}\b.*?\| \d+ \| \**([\d,]+)", PARAMETERS[size]) for size in ("38_8b", "58_3b")),
]


def check(text: str, pattern: str, value: object) -> None:
    found = re.findall(pattern, " ".join(text.split()))
    assert found and set(found) == {str(value)}, f"expected {value} where {pattern} finds {found}"


@pytest.mark.parametrize(("page", "pattern", "value"), SAID, ids=lambda value: str(value)[:40])
def test_what_pages_say(page: str, pattern: str, value: object) -> None:
    check(text_of(page), pattern, value)


def test_a_wrong_number_is_seen() -> None:
    pattern, value = next((pattern, value) for page, pattern, value in SAID if page == "notebooks/train.ipynb")
    with pytest.raises(AssertionError):
        check("a GPT of 3.2 million parameters", pattern, value)
    with pytest.raises(AssertionError):
        check("nothing", pattern, value)


def test_sizes_with_so_many_parameters_exist() -> None:
    """A number of more than a billion in the tables of planned memory is the number of parameters of a size."""
    numbers = set(re.findall(r"\b\d{1,3}(?:,\d{3}){3,}\b", text_of(MEMORY)))
    assert numbers and numbers <= {parameters for _, parameters in SIZES}


def test_first_run_of_the_readme() -> None:
    """The tutorial shows the text, and the README the last validation loss to two digits, of the run that is kept."""
    readme = text_of("README.md")
    assert f"```text\n{(RUN / 'sample.txt').read_text()}```" in text_of(FIRST_RUN)
    (said,) = re.findall(r"validation loss of about ([\d.]+) nats", " ".join(readme.split()))
    assert abs(float(said) - LOGGED[-1]["validation/loss"]) < 0.02  # machines differ by as much


def digests() -> list[list[str]]:
    """The modules in the column of makers and in the column of readers, row by row."""
    page = (REPOSITORY / "docs" / "reference" / "files.md").read_text()
    section = page.partition("## Who compares each digest")[2]
    rows = [line.split("|")[1:-1] for line in section.splitlines() if line.startswith("| ")][1:]
    return [[" ".join(re.findall(r"`([a-z_/]+\.py)`", cell)) for cell in row[2:]] for row in rows]


def test_every_maker_of_a_digest_is_listed() -> None:
    listed = {name for row in digests() for cell in row for name in cell.split()}
    zero = REPOSITORY / "zero"
    making = {str(path.relative_to(zero)) for path in zero.rglob("*.py") if HASHES.search(path.read_text())}
    assert making - listed - KEYS_ONLY == set()
    assert [name for name in listed if not (zero / name).is_file()] == []


def test_every_digest_has_a_reader() -> None:
    """Only rows seen and records of TensorBoard are compared by somebody outside."""
    without = [row for row in digests() if not row[1]]
    assert [row[0] for row in without] == ["run/run.py corpus/rows.py", "tracking/tensorboard.py"]
