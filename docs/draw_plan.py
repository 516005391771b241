"""Takes docs/pictures/plan-page.png, the top of the page of a plan: `python -m docs.draw_plan PLAN.html`.

The page is what `python -m benchmarks.foreign_programs CHECKOUTS maxtext --save PLAN.html` writes.
"""

from __future__ import annotations

import sys
from pathlib import Path

from docs.draw_report import draw

PICTURE = Path(__file__).with_name("pictures") / "plan-page.png"
WIDTH, HEIGHT = 680, 1110  # narrow, so that its text can be read on a phone

if __name__ == "__main__":
    draw(Path(sys.argv[1]), PICTURE, WIDTH, HEIGHT)
