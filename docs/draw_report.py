"""Takes docs/pictures/report.png, the first screen of a run's report page: `python -m docs.draw_report RUN`.

It needs Chromium, and Pillow, which matplotlib brings.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image

PICTURE = Path(__file__).with_name("pictures") / "report.png"
WIDTH, HEIGHT = 1300, 1060  # pixels of the window


def draw(page: Path, path: Path, width: int = WIDTH, height: int = HEIGHT) -> None:
    """Takes a picture of the top of a page, in a palette of 64 colors, which takes a third of the bytes."""
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        sys.exit("Chromium is missing")
    with tempfile.TemporaryDirectory() as folder:
        picture = Path(folder) / "page.png"
        options = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", f"--user-data-dir={folder}/home"]
        options += [f"--window-size={width},{height}", f"--screenshot={picture}", page.absolute().as_uri()]
        subprocess.run([browser, *options], check=True, capture_output=True)
        with Image.open(picture) as image:
            image.convert("RGB").quantize(64, kmeans=1).save(path, optimize=True)


if __name__ == "__main__":
    draw(Path(sys.argv[1]) / "report.html", PICTURE)
