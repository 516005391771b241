"""A picture knows the numbers that it shows: their digest is among the texts of the PNG."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING

from PIL import Image

if TYPE_CHECKING:
    from matplotlib.figure import Figure

KEY = "Numbers"


def digest(numbers: str) -> str:
    return hashlib.sha256(numbers.encode()).hexdigest()


def save(figure: Figure, picture: Path, numbers: str) -> None:
    """Writes the picture of these numbers, the text of a file or of a table."""
    figure.savefig(picture, metadata={KEY: digest(numbers)})


def shows(picture: Path, numbers: str) -> bool:
    """Whether the picture was drawn from these numbers."""
    with Image.open(picture) as image:
        return bool(image.info.get(KEY) == digest(numbers))
