"""The style of all pictures drawn by matplotlib: report.html's, on white."""

from typing import Any

COLORS = ("#1f66b0", "#c2410c", "#1b7a43", "#8a3ca8", "#8a5a00", "#0e7490", "#be2463", "#57606a")
GRAY = COLORS[-1]
STYLE: Any = {  # for matplotlib.rc_context
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 10,
    "grid.alpha": 0.25,
    "legend.fontsize": 8,
    "legend.frameon": False,
    "savefig.dpi": 110,
    "svg.fonttype": "none",
    "svg.hashsalt": "zero",
}
