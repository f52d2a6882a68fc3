"""The doctor's matrix as a page and two pictures, from `benchmarks/results/doctor.json`, and the
families that were held out, from `doctor_heldout.json` next to it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path
from typing import Any

from docs.markdown import GENERATED, join, table

CELL, LEFT, TOP = 15, 150, 130
OUTCOMES = ("right", "place", "healthy", "unplaced", "missed", "wrong")
MODES = ("open", "held out", "healthy")


def doctor_pages(results: Path) -> dict[str, str]:
    """The page and its pictures by their paths; nothing before the matrix was measured."""
    if not results.exists():
        return {}
    data = json.loads(results.read_text(encoding="utf-8"))
    strange = json.loads(results.with_name("doctor_heldout.json").read_text(encoding="utf-8"))
    return {
        "docs/doctor_matrix.md": join(_page(data), *_held_out(strange)),
        "docs/figures/doctor.svg": _matrix(data),
        "docs/figures/doctor_tokens.svg": _least_tokens(data),
    }


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
        "Rollouts are those of a real vLLM on small models (for the router, of a second forward of "
        "a mixture of experts); `python -m benchmarks.doctor` makes "
        "them, injects every fault and asks the [doctor](doctor.md). The models "
        f"({', '.join(data['models'])}) are none of those that thresholds were chosen on. Of "
        f"{data['diagnoses']:,} batches (at least {data['seeds']} seeds of "
        f"{' and '.join(map(str, data['sizes']))} rows of about 26 tokens), "
        f"**{data['right']:.1%}** were diagnosed right with the model. False alarms on healthy "
        "float32 and bf16: "
        f"**{data['false_alarms']:.1%}** with the model, **{data['false_alarms_from_pairs']:.1%}** "
        "from pairs alone.",
        "![A row for each fault, a column for each verdict](figures/doctor.svg)",
        table(head, rows),
        "Pairs alone cannot tell top-k and min-p from top-p, and naming top-p counts as right; nor "
        "can they tell an engine in bf16 beside a trainer in float32 from a healthy one, and "
        "healthy counts as right.",
        "## Least tokens",
        "The same batches with fewer of their rows. Least tokens is the median number of tokens at "
        "the smallest size from which on at least 95 % of the verdicts are right; it is empty "
        "where the largest batches have fewer. In the picture a column is a size of batch, and a "
        "darker cell means that more verdicts are right (the number is their share in percent).",
        "![A row for each fault, a column for each size of batch](figures/doctor_tokens.svg)",
    )


def _held_out(data: dict[str, Any]) -> list[str]:
    """Counts with and without the family of each fault, the reliability curve, and the floors."""
    counts, curve = [], []
    for reads, words in (("model", "with the model"), ("pairs", "from pairs alone")):
        for mode, what in (("open", "all families"), ("held out", "family held out")):
            row = data[reads][mode]
            shown = [row.get(key, 0) for key in ("correct", *OUTCOMES)]
            counts.append([words, what, str(row["verdicts"]), *map(str, shown)])
        for point in data[reads]["reliability"]:
            share = f"{point['right'] / point['verdicts']:.0%}"
            curve.append([words, f"{point['confidence']:.0%}", share, str(point["verdicts"])])
    faults = []
    for name, row in data["model"]["faults"].items():
        cells = [
            ", ".join(f"{k} {n}" for k, n in row.get(m, {}).items() if k != "named") for m in MODES
        ]
        least = [str(row.get("least_tokens", "")), str(row.get("least_scale", ""))]
        faults.append([f"`{name}`", *cells, *least])
    quiet = [data[reads]["healthy"] for reads in ("model", "pairs")]
    alarms = " and ".join(
        f"{row.get('alarm', 0)} of {row['verdicts']} {words}"
        for row, words in zip(quiet, ("with the model", "from pairs alone"), strict=True)
    )
    return [
        "## Families held out",
        f"`python -m benchmarks.doctor_heldout` makes {data['batches']} batches on other models "
        f"({', '.join(data['models'])}) with an engine in torch, float32 or bf16, 8 or 32 rows. "
        "Each is diagnosed with all families, and with the family of its fault disabled: then the "
        "right verdict is *not explained* with the right place, or *healthy* below the floor. "
        "*Right* is the right name, *place* is not explained at the right place; "
        "*Missed* is healthy above the floor; *unplaced* is not explained at another place. False "
        "alarms on healthy batches (float32, bf16, autocast, fp8 on both sides, another kernel, an "
        f"exact engine): {alarms}.",
        table(["reads", "families", "verdicts", "correct", *OUTCOMES], counts),
        "Of the verdicts at each confidence, the share that is right:",
        table(["reads", "confidence", "right", "verdicts"], curve),
        "The verdicts on each fault with the model, and the smallest batch and the smallest scale "
        "(nats of an unlikely token) at which it was named:",
        table(["fault", *MODES, "least tokens", "least scale"], faults),
    ]


def _right(fault: str, verdict: str) -> bool:
    aliases = {
        "healthy_f32": "healthy",
        "healthy_bf16": "healthy",
        "healthy_autocast": "healthy",
        "temperature_raw": "temperature",
        "noise": "not_explained",
    }
    return sorted(aliases.get(fault, fault).split("+")) == verdict.split("+")


def _matrix(data: dict[str, Any]) -> str:
    faults = list(data["faults"])
    verdicts = sorted({v for row in data["faults"].values() for v in row["verdicts"]})
    order = {f: i for i, f in enumerate(faults)}
    firsts = {v: next((order[f] for f in faults if _right(f, v)), 99) for v in verdicts}
    verdicts.sort(key=lambda v: (firsts[v], v))

    def cell(fault: str, verdict: str) -> tuple[float, str, str] | None:
        row = data["faults"][fault]
        share = row["verdicts"].get(verdict, 0) / row["diagnoses"]
        colour = "#2b6cb0" if _right(fault, verdict) else "#c53030"
        return (share, colour, "") if share else None

    return _grid(faults, verdicts, CELL, cell)


def _least_tokens(data: dict[str, Any]) -> str:
    curves = {
        fault: {f"{point['rows']} rows": point for point in row["curve"]}
        for fault, row in data["faults"].items()
    }
    sizes = sorted({size for c in curves.values() for size in c}, key=lambda s: int(s.split()[0]))

    def cell(fault: str, size: str) -> tuple[float, str, str] | None:
        point = curves[fault].get(size)
        if point is None:
            return None
        colour = "#2b6cb0" if point["right"] >= 0.95 else "#c53030"
        return point["right"], colour, f"{point['right']:.0%}".removesuffix("%")

    return _grid(list(curves), sizes, 2 * CELL, cell)


def _grid(
    rows: Sequence[str],
    columns: Sequence[str],
    width: int,
    cell: Callable[[str, str], tuple[float, str, str] | None],
) -> str:
    """A picture of cells: the opacity, the colour and the text of each, or None."""
    # The last heading leans out to the right, by half its length.
    slant = 3 * len(columns[-1]) if columns else 0
    right, bottom = LEFT + width * len(columns) + 10 + slant, TOP + CELL * len(rows) + 10
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{right}" height="{bottom}" '
        f'viewBox="0 0 {right} {bottom}" font-family="sans-serif" font-size="10">',
        f'<rect width="{right}" height="{bottom}" fill="white"/>',
    ]
    for j, column in enumerate(columns):
        x = LEFT + width * j + width // 2 + 4
        parts.append(
            f'<text x="{x}" y="{TOP - 5}" transform="rotate(-60 {x} {TOP - 5})">'
            f"{escape(column)}</text>"
        )
    for i, row in enumerate(rows):
        y = TOP + CELL * i
        parts.append(f'<text x="{LEFT - 6}" y="{y + 11}" text-anchor="end">{escape(row)}</text>')
        for j, column in enumerate(columns):
            content = cell(row, column)
            share, colour, text = content or (0.0, "#f2f2f2", "")
            opacity = max(share, 0.15) if content else 1.0
            parts.append(
                f'<rect x="{LEFT + width * j}" y="{y}" width="{width - 1}" height="{CELL - 1}" '
                f'fill="{colour}" fill-opacity="{opacity:.2f}"><title>{escape(row)}: '
                f"{escape(column)} {share:.0%}</title></rect>"
            )
            if text:
                parts.append(
                    f'<text x="{LEFT + width * j + width // 2}" y="{y + 11}" '
                    f'fill="{"white" if share > 0.5 else "black"}" '
                    f'text-anchor="middle">{text}</text>'
                )
    return "\n".join([*parts, "</svg>", ""])
