"""`write_report`: writes the page and its data to disk, completely or not at all."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from policyloss.errors import InputError
from policyloss.output import check_output, write_output
from policyloss_lab.report.collect import collect
from policyloss_lab.report.render import render
from policyloss_lab.report.sources import split_run

_READ = {
    "answers.jsonl",
    "config.json",
    "environment.json",
    "lock",
    "metrics.jsonl",
    "rollouts.jsonl",
    "timing.jsonl",
}


def write_report(
    paths: Sequence[str | Path], out: str | Path, json_out: str | Path | None = None
) -> dict[str, Any]:
    """Write the report of the runs in `paths` to `out` (HTML) and its data to `json_out`, each
    atomically; returns the data.

    Only regular files are written, and no file of a run is overwritten.
    """
    targets = {"out": Path(out)} | ({} if json_out is None else {"json_out": Path(json_out)})
    data = collect(paths)
    for argument, path in targets.items():
        check_output(path, argument)
        runs = {split_run(Path(p))[0].resolve() for p in paths}
        if path.resolve() in runs or (path.name in _READ and path.parent.resolve() in runs):
            raise InputError(f"{argument}={str(path)!r} is a file of the run; give another name.")
    if len({path.parent.resolve() / path.name for path in targets.values()}) < len(targets):
        raise InputError(f"out and json_out name the same file, {str(out)!r}; give two.")
    page = render(data)
    if json_out is not None:
        write_output(
            json_out, (json.dumps(data, allow_nan=False, indent=1) + "\n").encode(), "json_out"
        )
    write_output(out, page.encode(), "out")
    return data
