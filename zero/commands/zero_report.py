"""The HTML report of runs: `zero-report RUN [RUN ...] [--to report.html] [--picture]`; one page shows all of them."""

import argparse
import sys
from pathlib import Path

from zero.base.child_process import end_with_input
from zero.base.errors import exit_on_error
from zero.config.saved_config import flat_config
from zero.report.html_report import REPORT_FILE, summary, write_report
from zero.run.config import default_config


def main() -> None:
    """Writes the report and prints its path; a line for each run goes to standard error.

    An error is one line, and status 2, or 1 where a repeat may succeed.
    """
    parser = argparse.ArgumentParser(prog="zero-report", description=__doc__)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a run directory")
    parser.add_argument("--to", type=Path, help="the file to write; default: report.html in the first run")
    parser.add_argument("--picture", action="store_true", help="draw run.png in each run as well")
    parser.add_argument("--beside-a-run", action="store_true", help=argparse.SUPPRESS)  # ends with its input
    options = parser.parse_args()
    if options.beside_a_run:
        end_with_input()
    with exit_on_error():
        defaults = flat_config(default_config())
        page = write_report(options.runs, options.to or options.runs[0] / REPORT_FILE, defaults, options.picture)
        print("\n".join(summary(options.runs)), file=sys.stderr)
        print(page)


if __name__ == "__main__":
    main()
