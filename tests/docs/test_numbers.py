"""Numbers of the pages beside what they are numbers of: sizes, keys, choices, constants, a first run."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable
from pathlib import Path

import pytest

from docs.draw_first_run import RUN
from zero.config.files import conf_directory
from zero.hosts.watchdog import SILENCE_SECONDS
from zero.models.families import FAMILIES
from zero.plan.formula import KINDS
from zero.report.html_report import RELOAD_SECONDS
from zero.run.config import GROUPS
from zero.run.features.report import REPORT_SECONDS

pytestmark = pytest.mark.quick

REPOSITORY = Path(__file__).parents[2]
HOW_TO = "docs/how-to"
STAGES = "docs/explanation/stages.md"
FIRST_RUN = "docs/tutorial/first-run.md"
MEMORY = "docs/how-to/planning.md"


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


# A page, a pattern with the number or the list in its group, and what that is.
SAID = [
    ("README.md", r"([\d,]+) parameters, context 1024", PARAMETERS["1_1b"]),
    (FIRST_RUN, r"only the first (\d+) of", ROWS_OF_AN_EVALUATION),
    (FIRST_RUN, r"score ([\d.]+) on the whole validation set", f"{OF_VALIDATION['loss']:.3f}"),
    (FIRST_RUN, r"and ([\d.]+) on rows of the training set", f"{OF_TRAINING['loss']:.3f}"),
    ("README.md", r"\| (\d+) model families \|", len(FAMILIES.keys() - HAVE_NO_FOLDERS)),
    ("notebooks/train.ipynb", r"a GPT of ([\d,.]+(?: million)?) parameters", PARAMETERS["bytes"]),
    (STAGES, r"Ψ = ([\d,]*\d)", PARAMETERS["bytes"]),
    (STAGES, r"([\d,]+) parameters, context 1024", PARAMETERS["1_1b"]),
    (FIRST_RUN, r"ln 256 = (\d\.\d+)", f"{math.log(256):.2f}"),
    (FIRST_RUN, r"with sequences of (\d+) tokens", DEFAULTS["training.warmup_train_context"]),
    (FIRST_RUN, r"after (\d+) steps\. Each length", DEFAULTS["training.staged_warmup_steps"]),
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
