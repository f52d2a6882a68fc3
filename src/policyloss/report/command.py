"""`policyloss report RUN [RUN…]`: reads its options, writes or serves the page, and prints where it
is.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from policyloss.errors import InputError, visible
from policyloss.report.serve import PORT, serve
from policyloss.report.write import write_report

_OUT = Path("report.html")
_SHOWN = 20  # notes on the command line; the page has them all


def report_command(arguments: Sequence[str]) -> int:
    """Write the report that `arguments` ask for; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="policyloss report",
        description="Draw one or more runs as one HTML page that opens offline.",
    )
    parser.add_argument(
        "runs",
        nargs="+",
        type=Path,
        metavar="RUN",
        help="a run directory, as `policyloss train` and policyloss.report.Recorder write it, or "
        "files of TRL, verl, OpenRLHF, prime-rl, TensorBoard, W&B or trackio (docs/report.md)",
    )
    parser.add_argument("--out", type=Path, help=f"the page (default: {_OUT})")
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write the same data as JSON, too"
    )
    parser.add_argument(
        "--serve",
        action="store_true",
        help="write nothing; show the page on this machine, and update it while the runs train",
    )
    parser.add_argument(
        "--port", type=int, help=f"of --serve (default: {PORT}; 0 takes any that is free)"
    )
    options = parser.parse_args(arguments)
    if options.serve:
        if options.out is not None or options.json is not None:
            raise InputError("--serve writes no file; leave out --out and --json, or --serve.")
        serve(options.runs, PORT if options.port is None else options.port)
        return 0
    if options.port is not None:
        raise InputError(f"--port {options.port} goes with --serve alone.")
    out = options.out or _OUT
    data = write_report(options.runs, out, options.json)
    count = len(data["runs"])
    print(f"{out}: {count} run{'s' if count > 1 else ''}; open it in a browser.", flush=True)
    notes = [f"{run['label']}: {note}" for run in data["runs"] for note in run["notes"]]
    for note in notes[:_SHOWN]:
        print(visible(note), file=sys.stderr)
    if len(notes) > _SHOWN:
        print(f"{len(notes) - _SHOWN} more notes are on the page.", file=sys.stderr)
    return 0
