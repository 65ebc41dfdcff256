"""``python -m framework.report RUN_DIR...``: the page of one run, or of several side by side."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from framework.report.page import write


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code: 2 if a folder is no run's."""
    p = argparse.ArgumentParser(prog="python -m framework.report", description=__doc__)
    p.add_argument("run_dirs", nargs="+", metavar="RUN_DIR", help="folder of a run")
    p.add_argument(
        "--out", default="", help="the page; default: report.html in the only run folder, or here for several"
    )
    args = p.parse_args(argv)
    out = args.out or (os.path.join(args.run_dirs[0], "report.html") if len(args.run_dirs) == 1 else "report.html")
    try:
        write(args.run_dirs, out)
    except OSError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
