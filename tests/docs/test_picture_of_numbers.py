"""Pictures of the documentation beside the numbers that they show."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

from docs import draw_coordinate_check, draw_first_run, draw_quantized, draw_transfer, draw_vq
from docs.picture_of_numbers import shows

DOCS = Path(__file__).parents[2] / "docs"
DRAWN = (draw_coordinate_check, draw_first_run, draw_quantized, draw_transfer, draw_vq)
pytestmark = pytest.mark.quick


@pytest.mark.parametrize("script", DRAWN, ids=lambda script: script.__name__)
def test_picture_is_that_of_the_numbers(script: ModuleType) -> None:
    """The picture was drawn after the last change of its numbers: `python -m` and the name of the script."""
    assert shows(script.PICTURE, script.numbers())
    assert not shows(script.PICTURE, script.numbers() + "\n")


@pytest.mark.wide
def test_scripts_draw(tmp_path: Path) -> None:
    for script in DRAWN:
        script.draw(tmp_path / "drawn.svg")
        assert shows(tmp_path / "drawn.svg", script.numbers())


def test_pictures_are_small() -> None:
    sizes = {path.name: path.stat().st_size for path in (DOCS / "pictures").iterdir()}
    assert "report.png" in sizes and max(sizes.values()) < 150_000


def test_kept_numbers_are_small() -> None:
    assert all(path.stat().st_size < 100_000 for path in (DOCS / "sources").rglob("*") if path.is_file())
