"""`policyloss report RUN [RUN…]`: reads its options, writes or serves the page, and prints where it
is.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from policyloss.commands import read_options
from policyloss.errors import InputError, visible
from policyloss_lab import limits
from policyloss_lab.commands import Report
from policyloss_lab.report.cards import shared_notes
from policyloss_lab.report.serve import serve
from policyloss_lab.report.write import write_report


def report_command(arguments: Sequence[str]) -> int:
    """Write the report that `arguments` ask for; returns the exit code."""
    options = read_options("report", Report, arguments)
    if options.serve:
        if options.out != Report.out or options.json is not None:
            raise InputError("--serve writes no file; leave out --out and --json, or --serve.")
        serve(options.runs, options.port)
        return 0
    if options.port != Report.port:
        raise InputError(f"--port {options.port} goes with --serve alone.")
    data = write_report(options.runs, options.out, options.json)
    runs = f"{count} runs" if (count := len(data["runs"])) > 1 else "1 run"
    print(f"{options.out}: {runs}; open it in a browser.", flush=True)
    notes = [f"{names}: {note}" for note, (names, _) in shared_notes(data["runs"]).items()]
    for note in notes[: limits.PRINTED_NOTES]:
        print(visible(note), file=sys.stderr)
    if len(notes) > limits.PRINTED_NOTES:
        print(f"{len(notes) - limits.PRINTED_NOTES} more notes are on the page.", file=sys.stderr)
    return 0
