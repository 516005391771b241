"""The documentation as a site, by Sphinx with MyST: `sphinx-build -W -c docs . build/site` (CONTRIBUTING.md).

The pages are written for a forge as well: links are relative paths, and nothing in them is syntax of Sphinx. So the
navigation is here, and the reference of the public names is appended to docs/reference/api.md while the site is built.
"""

import re
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent
MEASURED = DOCS.parent / "benchmarks" / "measured"
# Four kinds of pages (https://diataxis.fr): to learn, to do one thing, to look up, to understand. Decisions are of the
# last kind; their pages belong to decisions/README.md, which lists them by subject.
NAVIGATION = {
    "Tutorial": [f"docs/tutorial/{name}" for name in ("first-run", "own-text", "slice")],
    "How to": [
        *("docs/how-to/pmap-programs", "docs/how-to/shard-map", "docs/how-to/when-pmap-goes", "examples/README"),
        *("data/README", "docs/how-to/prepare-at-size"),
        *("docs/how-to/read-from-buckets", "docs/how-to/mix-corpora", "docs/how-to/use-the-loader"),
        *("docs/how-to/change-the-model", "docs/how-to/choose-an-optimizer", "docs/how-to/find-a-learning-rate"),
        *("docs/how-to/train-long-contexts", "docs/how-to/start-from-weights"),
        "docs/how-to/fine-tuning",
        *(
            "docs/how-to/learn-preferences",
            "docs/how-to/classify",
            "docs/how-to/train-on-conversations",
            "docs/how-to/distill",
        ),
        *("docs/how-to/planning", "docs/how-to/examine-a-machine"),
        *("docs/how-to/launching", "docs/how-to/use-a-cluster"),
        *("docs/how-to/watch-a-run", "docs/how-to/compare-runs"),
        *("docs/how-to/resume", "docs/how-to/troubleshoot"),
        *("docs/how-to/evaluate", "docs/how-to/export-weights"),
    ],
    "Reference": [
        *("docs/reference/keys", "docs/reference/metrics", "docs/reference/exit-statuses", "docs/reference/files"),
        "docs/reference/records",
        *("docs/reference/api", "docs/reference/families", "docs/reference/from-other-code"),
        *("docs/reference/performance", "docs/reference/features", "docs/reference/words"),
    ],
    "Explanation": [
        f"docs/explanation/{name}" for name in ("comparison", "faq", "stages", "groups", "scale", "mup", "architecture")
    ],
    "Decisions": [
        "docs/decisions/README",
        *(f"docs/decisions/{path.stem}" for path in sorted(DOCS.glob("decisions/[a-z]*.md"))),
    ],
    "Measurements": [
        "benchmarks/measured/README",
        *(f"benchmarks/measured/{path.stem}" for path in sorted(MEASURED.glob("[a-z]*.md"))),
    ],
    "The project": ["README", "CONTRIBUTING", "CHANGELOG"],
}

project = "zero"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
root_doc = "docs/README"
include_patterns = [f"{page}.md" for pages in NAVIGATION.values() for page in pages] + [f"{root_doc}.md"]
exclude_patterns = [".*", "build", "data/corpus", "runs"]  # else all files of the environment are looked at
html_theme = "furo"
html_title = "zero"
html_copy_source = False
html_static_path = ["site.css"]
html_css_files = ["site.css"]
smartquotes = False  # which makes an option's -- a dash
myst_heading_anchors = 6  # the anchors that forges make
highlight_language = "text"
default_role = "code"  # docstrings quote names in single backticks
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_format = "short"
napoleon_use_ivar = True  # fields of a tuple are members already


def append_navigation(app: Any, page: str, content: list[str]) -> None:
    """Gives the first page the navigation, and docs/reference/api.md the reference from the docstrings."""
    if page == root_doc:
        for caption, pages in NAVIGATION.items():
            entries = "\n".join(f"/{page}" for page in pages)
            content[0] += f"\n```{{toctree}}\n:hidden:\n:caption: {caption}\n\n{entries}\n```\n"
    if page == "docs/reference/api":
        content[0] += "\n## Reference\n\n```{eval-rst}\n.. automodule:: zero\n   :members:\n```\n"


def as_restructured_text(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Gives docstrings, which are plain text, the few marks that reStructuredText needs."""
    text = "\n".join(lines) + "\n"
    text = re.sub(r"(?<=[^\n>]\n\n)(?=    +[^\s>-])", "::\n\n", text)  # an indented block is code
    text = re.sub(r"(`[^`\n]+`)(\w?)", lambda m: m[1] + (m[2] and rf"\ {m[2]}"), text)  # `name`s
    text = re.sub(r"(?m)^(.+ raises:)\n((?:  .*\n)+)", _list_of_exceptions, text)
    lines[:] = text.split("\n")


def _list_of_exceptions(section: re.Match[str]) -> str:
    """Of the functions that a function returns; napoleon reads those of the function itself."""
    return f"{section[1]}\n\n" + re.sub(r"(?m)^  (?=\w)", "  * ", section[2])


def write_index(app: Any, error: Exception | None) -> None:
    """Leads from the folder to its first page."""
    if error is None:
        page = f'<!doctype html><title>zero</title><meta http-equiv="refresh" content="0; url={root_doc}.html">'
        (Path(app.outdir) / "index.html").write_text(page)


def setup(app: Any) -> None:
    app.connect("source-read", append_navigation)
    app.connect("autodoc-process-docstring", as_restructured_text, priority=100)  # before napoleon indents its sections
    app.connect("build-finished", write_index)
