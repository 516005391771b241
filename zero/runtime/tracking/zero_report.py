"""The HTML report of runs: `zero-report RUN [RUN ...] [--to report.html]`; several are drawn over each other."""

import argparse
import sys
from pathlib import Path

from zero.runtime.errors import UserError
from zero.runtime.tracking.html_report import REPORT_FILE, write_report


def main() -> None:
    """Writes the report and prints its path; an error is one line and status 1."""
    parser = argparse.ArgumentParser(prog="zero-report", description=__doc__)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a run directory")
    parser.add_argument("--to", type=Path, help="the file to write; default: report.html in the first run")
    options = parser.parse_args()
    try:
        print(write_report(options.runs, options.to or options.runs[0] / REPORT_FILE))
    except (UserError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.status if isinstance(error, UserError) else 1)


if __name__ == "__main__":
    main()
