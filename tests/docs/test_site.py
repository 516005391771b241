"""The navigation of the documentation's site, without the tool that builds it (CONTRIBUTING.md has its command)."""

from pathlib import Path

import pytest

from docs import conf, draw_idea, draw_torus

pytestmark = pytest.mark.quick

REPOSITORY = Path(__file__).parents[2]


def test_every_page_is_in_the_navigation() -> None:
    """Every page of the documentation is in the navigation once, and every entry exists."""
    entries = [f"{page}.md" for pages in conf.NAVIGATION.values() for page in pages]
    missing = [entry for entry in entries if not (REPOSITORY / entry).is_file()]
    pages = {str(path.relative_to(REPOSITORY)) for path in (REPOSITORY / "docs").rglob("*.md")} | {
        str(path.relative_to(REPOSITORY))
        for folder in (".", "data", "examples", "benchmarks/measured")
        for path in (REPOSITORY / folder).glob("*.md")
    }
    assert missing == [] and sorted(entries) == sorted(pages - {"docs/README.md"})  # the page that has the navigation


def test_picture_of_the_idea_is_that_of_its_script() -> None:
    """docs/pictures/idea.svg is what `python -m docs.draw_idea` writes."""
    assert draw_idea.PICTURE.read_text() == draw_idea.picture()


def test_picture_of_groups() -> None:
    """docs/pictures/torus.svg is what `python -m docs.draw_torus` writes."""
    pytest.importorskip("libtpu")
    assert draw_torus.PICTURE.read_text() == draw_torus.picture()
