"""The page that counts the doctor's names in the logs of runs with a known fault, from
`benchmarks/results/doctor_logs.json`.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.doctor_logs_plan import HEALTHY, KINDS

from docs.markdown import GENERATED, join, table

HEADINGS = {"first": "The first runs", "fresh": "Other seeds"}
ABOUT = {
    "first": "Our thresholds were chosen with knowledge of these runs.",
    "fresh": "The same settings with other seeds (`--seed-shift 1000`). Nobody looked at "
    "these runs before the thresholds were fixed.",
}


def doctor_logs_pages(results: Path) -> dict[str, str]:
    """The page by its path; nothing before it was measured."""
    if not results.exists():
        return {}
    data = json.loads(results.read_text(encoding="utf-8"))
    parts = [
        "# The diagnosis from logs, counted",
        GENERATED,
        "`python -m benchmarks.doctor_logs` makes runs of the trainer's small task: some learn, "
        "with different losses and options, and some have one known fault "
        "(`benchmarks/doctor_logs_plan.py`). `python -m benchmarks.doctor_logs_table RUNS --fresh "
        "OTHER_RUNS` shows the scalar log of each to the [doctor](doctor.md#logs), to rldoctor "
        f"{data['versions']['rldoctor']} and to rlwatch {data['versions']['rlwatch']}.",
        "A fault is **named** if a tool names one of the symptoms that the plan lists for it, and "
        "**noticed** if the tool names anything. A **stray** is a name that neither the fault nor "
        "its listed effects explain; each in a healthy run is a **false alarm**. The lists are "
        "those of the plan. A count is of the runs that were made, which may be a part of the "
        "plan.",
    ]
    for label, tools in data["sets"].items():
        parts += [f"## {HEADINGS[label]}", ABOUT[label], *_tables(tools)]
    parts += ["## What each was shown", *_fairness()]
    return {"docs/doctor_logs.md": join(*parts)}


def _tables(tools: dict[str, Any]) -> list[str]:
    rows = [_total(tool, result["kinds"]) for tool, result in tools.items()]
    head = [
        "",
        "faults named",
        "noticed",
        "sick runs with strays",
        "healthy runs with false alarms",
    ]
    kinds = [kind for kind in KINDS if kind in next(iter(tools.values()))["kinds"]]
    by_kind = []
    for kind in kinds:
        if kind != HEALTHY:
            cells = [result["kinds"][kind] for result in tools.values()]
            by_kind.append(
                [f"`{kind}`", KINDS[kind].fault, str(cells[0]["runs"])]
                + [str(cell["found"]) for cell in cells]
            )
    alarms = [
        f"- {tool}: {names}" for tool, r in tools.items() if (names := _alarms(r["verdicts"]))
    ]
    return [
        table(head, rows),
        "Faults named, by kind:",
        table(["kind", "what was done", "runs", *tools], by_kind),
        "What was named in healthy runs, and in how many:\n\n" + "\n".join(alarms),
    ]


def _total(tool: str, kinds: dict[str, Any]) -> list[str]:
    sick = [row for kind, row in kinds.items() if kind != HEALTHY]
    runs = sum(row["runs"] for row in sick)
    counts = [
        f"{sum(row[name] for row in sick)} of {runs}" for name in ("found", "noticed", "strays")
    ]
    return [tool, *counts, f"{kinds[HEALTHY]['strays']} of {kinds[HEALTHY]['runs']}"]


def _alarms(verdicts: dict[str, Any]) -> str:
    healthy = [row for name, row in verdicts.items() if name.startswith(HEALTHY)]
    counts = Counter(name for row in healthy for name in row["strays"])
    return ", ".join(f"`{name}` {n}×" for name, n in counts.most_common()) or "nothing"


def _fairness() -> list[str]:
    return [
        "Each got every column of the log that it has a name for, under a name that it documents, "
        "for every step, with its own defaults: rldoctor 17 columns and the size of groups, the "
        "length limit, the kind of advantages and the learning rate; rlwatch the 7 scalars that "
        "its detectors read (not single rewards, which the log does not hold). Numbers that are "
        "not finite were passed on. Where a detector of theirs may mean several of our symptoms, "
        "each of these counts as named.",
        "- Neither was fitted to the first runs, and ours was; the second count has other seeds.\n"
        "- rldoctor's own selftest counts findings from a warning on; its notes are below that, "
        "and are counted in a row of their own. It has no detector of learning rates.\n"
        "- rlwatch's limit for the entropy is 1 nat; the policy of this small task begins at "
        "about 0.35. It knows neither groups, lengths, clip fractions nor "
        "held-out scores, and was made to warn while a run goes on.\n"
        "- The task is small, its answers are short, and healthy runs solve it. Other faults, "
        "or these in a large model, may look otherwise.",
    ]
