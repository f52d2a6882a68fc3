"""The doctor's confusion matrix as a page and a picture, from `benchmarks/results/doctor.json`."""

from __future__ import annotations

import json
from html import escape
from pathlib import Path
from typing import Any

from docs.markdown import GENERATED, join, table

CELL, LEFT, TOP = 15, 150, 130


def doctor_pages(results: Path) -> dict[str, str]:
    """The page and its picture by their paths; nothing before the matrix was measured."""
    if not results.exists():
        return {}
    data = json.loads(results.read_text(encoding="utf-8"))
    return {"docs/doctor_matrix.md": _page(data), "docs/figures/doctor.svg": _picture(data)}


def _page(data: dict[str, Any]) -> str:
    rows = []
    for fault, row in data["faults"].items():
        others = {k: n for k, n in row["verdicts"].items() if not _right(fault, k)}
        mistaken = ", ".join(f"{name} {n}×" for name, n in others.items())
        pairs = row["right_from_pairs"]
        rows.append(
            [
                f"`{fault}`",
                str(row["diagnoses"]),
                f"{row['right']:.0%}",
                "" if pairs is None else f"{pairs:.0%}",
                "" if row["least_tokens"] is None else str(row["least_tokens"]),
                mistaken,
            ]
        )
    head = ["fault", "batches", "right", "right from pairs alone", "least tokens", "mistaken for"]
    return join(
        "# The doctor's confusion matrix",
        GENERATED,
        "Rollouts are those of a real vLLM on small models; `python -m benchmarks.doctor` makes "
        f"them, injects every fault and asks the [doctor](doctor.md). Of {data['diagnoses']} "
        f"batches ({' and '.join(map(str, data['sizes']))} rows of about 26 tokens), "
        f"**{data['right']:.1%}** were diagnosed right with the model. False alarms on healthy "
        f"float32 and bf16: **{data['false_alarms']:.1%}**.",
        "![A row for each fault, a column for each verdict](figures/doctor.svg)",
        table(head, rows),
        "Least tokens: the median size of the smallest batches from which on at least 95 % are "
        "right. Pairs alone cannot tell top-k and min-p from top-p; naming top-p counts as right.",
    )


def _right(fault: str, verdict: str) -> bool:
    aliases = {
        "healthy_f32": "healthy",
        "healthy_bf16": "healthy",
        "temperature_raw": "temperature",
        "noise": "not_explained",
    }
    return sorted(aliases.get(fault, fault).split("+")) == verdict.split("+")


def _picture(data: dict[str, Any]) -> str:
    faults = list(data["faults"])
    verdicts = sorted({v for row in data["faults"].values() for v in row["verdicts"]})
    order = {f: i for i, f in enumerate(faults)}
    firsts = {v: next((order[f] for f in faults if _right(f, v)), 99) for v in verdicts}
    verdicts.sort(key=lambda v: (firsts[v], v))
    width, height = LEFT + CELL * len(verdicts) + 10, TOP + CELL * len(faults) + 10
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="10">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    for j, verdict in enumerate(verdicts):
        x = LEFT + CELL * j + 11
        parts.append(
            f'<text x="{x}" y="{TOP - 5}" transform="rotate(-60 {x} {TOP - 5})">'
            f"{escape(verdict)}</text>"
        )
    for i, fault in enumerate(faults):
        row = data["faults"][fault]
        y = TOP + CELL * i
        parts.append(f'<text x="{LEFT - 6}" y="{y + 11}" text-anchor="end">{escape(fault)}</text>')
        for j, verdict in enumerate(verdicts):
            share = row["verdicts"].get(verdict, 0) / row["diagnoses"]
            colour = "#2b6cb0" if _right(fault, verdict) else "#c53030"
            fill = f'fill="{colour}" fill-opacity="{max(share, 0.15):.2f}"'
            fill = fill if share else 'fill="#f2f2f2"'
            parts.append(
                f'<rect x="{LEFT + CELL * j}" y="{y}" width="{CELL - 1}" height="{CELL - 1}" '
                f"{fill}><title>{escape(fault)}: {escape(verdict)} {share:.0%}</title></rect>"
            )
    return "\n".join([*parts, "</svg>", ""])
