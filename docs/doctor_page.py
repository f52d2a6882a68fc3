"""The doctor on held-out families, as a page and a picture, from
`benchmarks/results/doctor_heldout.json`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from docs.markdown import GENERATED, join, table
from docs.performance_figure import FONT, INK, OURS, RULE, SOFT

OUTCOMES = ("right", "place", "healthy", "unplaced", "missed", "wrong")
MODES = ("open", "held out", "healthy")
READS = {"model": "with the model", "pairs": "from pairs alone"}
SIDE, LEFT, TOP, LOWEST = 300, 60, 30, 0.5


def doctor_pages(results: Path) -> dict[str, str]:
    """The page and its picture by their paths."""
    if not results.is_file():
        return {}
    data = json.loads(results.read_text(encoding="utf-8"))
    return {
        "docs/doctor_matrix.md": _page(data),
        "docs/figures/doctor_reliability.svg": _reliability(data),
    }


def _page(data: dict[str, Any]) -> str:
    quiet = [(data[reads]["healthy"], words) for reads, words in READS.items()]
    alarms = " and ".join(f"{row.get('alarm', 0)} of {row['verdicts']} {w}" for row, w in quiet)
    return join(
        "# The doctor on held-out families",
        GENERATED,
        f"`python -m benchmarks.doctor_heldout` makes {data['batches']} batches, "
        f"{data['healthy_batches']} of them healthy, on "
        f"small models ({', '.join(data['models'])}), on seeds that no rule was chosen on, with an "
        "engine in torch, in float32 or bf16, of 8 or 32 rows. The [doctor](doctor.md) diagnoses "
        "each batch with all families, and with the family of its fault disabled: then the right "
        "verdict is *not explained* with the right place, or *healthy* below the floor. Batches of "
        f"fewer than 16 tokens are left out. Measured with torch {' and '.join(data['torch'])}.",
        "## Counts",
        "*Right* is the right name. *Place* is not explained, at the right place, and *unplaced* "
        "at another one. *Healthy* is a fault below twice the noise floor that is called healthy, "
        "and *missed* one above it. *Wrong* is another name. *Correct* counts right, healthy, and "
        "place where nothing that was passed proves the cause.",
        table(["reads", "families", "verdicts", "correct", *OUTCOMES], _counts(data)),
        f"False alarms on {data['healthy_batches']} healthy batches (float32, bf16, autocast, fp8 "
        f"weights on both sides, another kernel, an exact engine; 4 to 16 rows): {alarms}. With "
        "the model, a bf16 engine next to a float32 trainer (`fp8_both`) is named `weights_bf16`, "
        "which is true; that is an alarm if the differences are above twice the noise floor.",
        "## Reliability",
        "The confidence of a verdict is the share of right verdicts of its kind on the even seeds. "
        "On the odd seeds, this share was right:",
        "![Confidence and share of right verdicts](figures/doctor_reliability.svg)",
        table(["reads", "verdict", "confidence", "right", "verdicts"], _curve(data)),
        "## The floor of every cause",
        "The smallest batch and the smallest scale (nats of an unlikely token) at which each cause "
        "was named right, with the model and all families.",
        table(["cause", "named", "least tokens", "least scale"], _floors(data)),
        "## Every fault",
        "The verdicts with the model. A wrong name is in brackets.",
        table(["fault", *MODES], _faults(data)),
    )


def _counts(data: dict[str, Any]) -> list[list[str]]:
    rows = []
    for reads, words in READS.items():
        for mode, families in (("open", "all families"), ("held out", "family held out")):
            row = data[reads][mode]
            share = f"{row['correct']} ({row['correct'] / max(row['verdicts'], 1):.0%})"
            numbers = [str(row.get(key, 0)) for key in OUTCOMES]
            rows.append([words, families, str(row["verdicts"]), share, *numbers])
    return rows


def _curve(data: dict[str, Any]) -> list[list[str]]:
    return [
        [
            words,
            point["kind"].replace("_", " "),
            f"{point['confidence']:.0%}",
            f"{point['right'] / max(point['verdicts'], 1):.0%}",
            str(point["verdicts"]),
        ]
        for reads, words in READS.items()
        for point in data[reads]["reliability"]
    ]


def _floors(data: dict[str, Any]) -> list[list[str]]:
    return [
        [
            f"`{cause}`",
            f"{row['right']} of {row['batches']}",
            str(row.get("least_tokens", "")),
            str(row.get("least_scale", "")),
        ]
        for cause, row in sorted(data["floors"].items())
    ]


def _faults(data: dict[str, Any]) -> list[list[str]]:
    rows = []
    for name, modes in data["model"]["faults"].items():
        cells = []
        for mode in MODES:
            counts: dict[str, Any] = dict(modes.get(mode, {}))
            wrong = counts.pop("named", {})
            cell = ", ".join(f"{key} {n}" for key, n in counts.items())
            cells.append(cell + (f" ({', '.join(wrong)})" if wrong else ""))
        rows.append([f"`{name}`", *cells])
    return rows


def _reliability(data: dict[str, Any]) -> str:
    """A point for each kind of verdict; on the diagonal, confidence is the share that is right."""

    def x(share: float) -> float:
        return LEFT + SIDE * (max(share, LOWEST) - LOWEST) / (1 - LOWEST)

    def y(share: float) -> float:
        return TOP + LEFT + SIDE - x(share)

    width, height = LEFT + SIDE + 190, TOP + SIDE + 50
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" font-family="{FONT}" font-size="12" fill="{INK}">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<line x1="{x(0.5)}" y1="{y(0.5)}" x2="{x(1)}" y2="{y(1)}" stroke="{RULE}"/>',
    ]
    for share in (0.5, 0.6, 0.7, 0.8, 0.9, 1.0):
        parts.append(
            f'<text x="{x(share)}" y="{y(0.5) + 18}" text-anchor="middle">{share:.0%}</text>'
        )
        parts.append(
            f'<text x="{LEFT - 8}" y="{y(share) + 4}" text-anchor="end">{share:.0%}</text>'
        )
    parts.append(
        f'<text x="{LEFT + SIDE / 2}" y="{height - 8}" text-anchor="middle">confidence</text>'
    )
    parts.append(f'<text x="8" y="{TOP - 12}">right, on other seeds</text>')
    for colour, (reads, words) in zip((OURS, SOFT), READS.items(), strict=True):
        line = TOP + 20 * (1 + list(READS).index(reads))
        parts.append(f'<circle cx="{LEFT + SIDE + 24}" cy="{line}" r="5" fill="{colour}"/>')
        parts.append(f'<text x="{LEFT + SIDE + 36}" y="{line + 4}">{words}</text>')
        for point in data[reads]["reliability"]:
            right = point["right"] / max(point["verdicts"], 1)
            kind = point["kind"].replace("_", " ")
            parts.append(
                f'<circle cx="{x(point["confidence"]):.1f}" cy="{y(right):.1f}" r="5" '
                f'fill="{colour}" fill-opacity="0.8"><title>{kind} {words}: {right:.0%} of '
                f"{point['verdicts']}</title></circle>"
            )
    return "\n".join([*parts, "</svg>", ""])
