"""Where the runs of a page are: a folder or a file each, or one of the runs in a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from policyloss.errors import InputError
from policyloss_lab.report import limits
from policyloss_lab.report.columns import Columns, read_tables
from policyloss_lab.report.reading import Notes
from policyloss_lab.report.sources import Files, files_of, is_our_run, split_run


@dataclass
class Place:
    """path: as it was passed, with `#` and the name of the run behind it if it holds several.
    files: of another trainer's run; None for one of ours. run: the name of a run in a table of
    several. columns: the numbers of a run in a table, which is read once for all its runs. notes:
    on what was left out so far.
    """

    path: Path
    notes: Notes
    files: Files | None = None
    run: str = ""
    columns: Columns | None = None


def places_of(path: Path, paths: int) -> list[Place]:
    """The runs that `path` names: several if it is a table of several, else one. paths: how many
    share the bounds.
    """
    notes: Notes = []
    if is_our_run(path):
        return [Place(path, notes)]
    files = files_of(path, notes)
    if files.kind != "table":
        return [Place(path, notes, files)]
    # A number takes a third of its bytes in JSON lines.
    runs = read_tables(files.numbers, notes, limits.bytes_of(limits.METRIC_BYTES, paths) // 3)
    if files.run and files.run not in runs:
        names = ", ".join(repr(name) for name in [*runs][:10])
        raise InputError(f"{split_run(path)[0]} holds no run {files.run!r}; it holds {names}.")
    if files.run or len(runs) < 2:
        columns = runs[files.run] if files.run else next(iter(runs.values()), Columns())
        return [Place(path, notes, files, files.run, columns)]
    if files.completions:
        notes.append("Files of completions beside a table of several runs were not read.")
    files = replace(files, completions=[])
    return [
        Place(Path(f"{path}#{run}"), notes if not i else [], files, run, columns)
        for i, (run, columns) in enumerate(runs.items())
    ]


def labels_of(places: Sequence[Place]) -> list[str]:
    """A short, unique name for each run: that of its folder or in its table, with what it is in if
    two are equal, and with a number if that does not help.
    """
    names, longer = [], []
    for place in places:
        path = (split_run(place.path)[0] if place.run else place.path).resolve()
        parts = (path.name, place.run) if place.run else (path.parent.name, path.name)
        names.append(parts[1])
        longer.append("/".join(parts))
    names = [
        long if names.count(name) > 1 else name for name, long in zip(names, longer, strict=True)
    ]
    return [
        name if names.count(name) == 1 else f"{name} ({names[: i + 1].count(name)})"
        for i, name in enumerate(names)
    ]
