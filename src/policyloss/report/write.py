"""`write_report`: the page and its data on disk, whole or not at all."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from policyloss.errors import InputError
from policyloss.report.collect import collect
from policyloss.report.render import render


def write_report(paths: Sequence[str | Path], out: str | Path, json_out: str | Path | None = None) -> dict[str, Any]:
    """Write the report of the runs in `paths` to `out` (HTML) and its data to `json_out`, each atomically; returns the data."""
    data = collect(paths)
    page = render(data)
    if json_out is not None:
        _write(Path(json_out), json.dumps(data, allow_nan=False, indent=1) + "\n", "json_out")
    _write(Path(out), page, "out")
    return data


def _write(path: Path, text: str, argument: str) -> None:
    """Beside the target first, then renamed over it: a reader never sees half a file, and a full disk leaves the old one."""
    if path.is_dir():
        raise InputError(f"{argument}={str(path)!r} is a folder; give the name of a file.")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    except OSError as error:
        raise InputError(f"{argument}={str(path)!r} cannot be written: {error}.") from error
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, 0o644)  # mkstemp makes files that only their owner can read
        os.replace(name, path)
    except OSError as error:
        raise InputError(f"{argument}={str(path)!r} cannot be written: {error}.") from error
    finally:
        Path(name).unlink(missing_ok=True)
