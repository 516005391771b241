"""The documentation's site, built as CI builds it, in Chromium: layout, search, nothing from a network."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers import browser
from tests.helpers.browser import LAYOUT, Browser

REPOSITORY = Path(__file__).parents[2]
WIDTHS = (360, 768, 1300)
PAGES = (
    *("docs/README", "docs/tutorial/first-run", "docs/how-to/launching", "docs/how-to/pmap-programs"),
    *("docs/reference/keys", "docs/reference/metrics", "docs/reference/api", "docs/reference/from-other-code"),
    *(
        "docs/reference/performance",
        "docs/explanation/stages",
        "docs/explanation/architecture",
        "docs/decisions/README",
    ),
)
# The menus of a narrow page lie beside it until they are asked for.
WITHOUT_MENUS = "document.querySelectorAll('.sidebar-drawer, .toc-drawer').forEach(menu => menu.remove())"
RESULTS = "[...document.querySelectorAll('#search-results li a')].map(a => a.getAttribute('href'))"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(
        importlib.util.find_spec("sphinx") is None, reason="no Sphinx: pip install -c constraints.txt -e '.[docs]'"
    ),
    browser.needed,
]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-c", "docs", ".", str(folder)]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Browser]:
    with Browser(tmp_path / "profile") as opened:
        yield opened


def test_layout(site: Path, opened: Browser) -> None:
    """Nothing leaves a page, is cut or overlaps, and all text has contrast, in light and dark; nothing is asked for."""
    for page in PAGES:
        for width in WIDTHS:
            for dark in (False, True):
                opened.open(site / f"{page}.html", width, dark=dark)
                if width < WIDTHS[-1]:
                    opened.evaluate(WITHOUT_MENUS)
                assert opened.evaluate(LAYOUT) == [], (page, width, dark)
    assert (opened.complaints, opened.asked) == ([], [])


def test_pictures_are_on_the_pages(site: Path, opened: Browser) -> None:
    """The first page shows the idea, as wide as a telephone allows."""
    for width in WIDTHS:
        opened.open(site / "docs" / "README.html", width)
        shown = opened.evaluate("(i => [i.naturalWidth > 0, i.getBoundingClientRect().width])(document.images[0])")
        assert shown[0] and 300 <= shown[1] <= width


def test_search(site: Path, opened: Browser) -> None:
    """A word of one page finds it."""
    opened.open(f"{(site / 'search.html').as_uri()}?q=emergency_steps")
    for _ in range(100):
        found = opened.evaluate(f"new Promise(resolve => setTimeout(() => resolve({RESULTS}), 100))")
        if any("how-to/resume" in address for address in found):
            return
    raise AssertionError(found)
