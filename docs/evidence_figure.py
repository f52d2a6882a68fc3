"""Draws the curves of docs/evidence.md: small charts of the same scale, one line per seed,
as SVG written by hand.

The same numbers give the same bytes everywhere.
A white ground of its own keeps text readable on a dark page.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any
from xml.sax.saxutils import escape

from docs.performance_figure import FONT, INK, OURS, RULE, SOFT

Run = dict[str, Any]
Point = tuple[float, float]
Box = tuple[float, float, float, float]
WIDTH, COLUMNS, GAP, TITLE, TOP = 880, 5, 16, 20, 60
PLAIN_INK, GOAL_INK = "#c2410c", "#5b8a3c"


class Chart:
    """A box (x, y, width, height) whose corner at the bottom left is (step 0, low),
    and (last, high) the one across.
    """

    def __init__(
        self, box: Box, last: float, low: float, high: float, *, logarithmic: bool
    ) -> None:
        self.x, self.y, self.width, self.height = box
        self.last, self.logarithmic = max(last, 1), logarithmic
        self.low, self.high = self._scaled(low), self._scaled(high)

    def _scaled(self, value: float) -> float:
        return math.log10(value) if self.logarithmic else value

    def at(self, step: float, value: float) -> Point:
        """Pixels; values outside are drawn at the edge."""
        share = (
            (self._scaled(value) - self.low) / (self.high - self.low)
            if not self.logarithmic or value > 0
            else 0.0
        )
        return self.x + self.width * step / self.last, self.y + self.height * (
            1 - min(max(share, 0.0), 1.0)
        )

    def line(self, points: Sequence[Point], colour: str, width: float = 1.4) -> str:
        """A curve through (step, value) pairs."""
        drawn = " ".join(f"{x:.1f},{y:.1f}" for x, y in (self.at(*point) for point in points))
        return (
            f'<polyline points="{drawn}" fill="none" stroke="{colour}" stroke-width="{width:g}" '
            'stroke-opacity="0.8"/>'
        )

    def level(self, value: float, colour: str, dashed: bool = False) -> str:
        """A horizontal line."""
        y = self.at(0, value)[1]
        dash = ' stroke-dasharray="3 3"' if dashed else ""
        return (
            f'<line x1="{self.x:.1f}" x2="{self.x + self.width:.1f}" y1="{y:.1f}" y2="{y:.1f}" '
            f'stroke="{colour}"{dash}/>'
        )


def accuracy_figure(presets: dict[str, list[Run]], goal: float) -> str:
    """Held-out accuracy over steps: a small chart for each preset."""
    width, height = (WIDTH - 40 - GAP * (COLUMNS - 1)) / COLUMNS, 84
    row = height + TITLE + GAP
    last = max(int(step) for runs in presets.values() for run in runs for step in run["accuracy"])
    drawn = []
    for i, (name, runs) in enumerate(presets.items()):
        x, y = 20 + (i % COLUMNS) * (width + GAP), TOP + (i // COLUMNS) * row + TITLE
        chart = Chart((x, y, width, height), last, 0.0, 1.0, logarithmic=False)
        drawn += [
            draw_text(x, y - 6, name, weight=600, size=12),
            *(chart.level(value, RULE) for value in (0.0, 0.5, 1.0)),
            chart.level(goal, GOAL_INK, dashed=True),
            *(
                chart.line([(int(step), x) for step, x in run["accuracy"].items()], OURS)
                for run in runs
            ),
        ]
    total = TOP + math.ceil(len(presets) / COLUMNS) * row + 8
    heading = [
        draw_text(20, 28, "Held-out accuracy over training steps", size=17, weight=600),
        draw_text(
            20,
            46,
            f"0 to 1 over {last} steps; one line per seed; the dashed line is {goal:g}",
            size=12,
            fill=SOFT,
        ),
    ]
    return draw_page(
        total, f"Held-out accuracy over {last} steps of {len(presets)} presets", [*heading, *drawn]
    )


def clip_figure(studies: dict[str, dict[str, list[Run]]], losses: tuple[str, str]) -> str:
    """Gradient norm and largest ratio over steps, both losses in one chart,
    a row for each study.
    """
    width, height = (WIDTH - 40 - 60) / 2, 150
    row = height + TITLE + GAP + 14
    drawn = []
    for i, (study, presets) in enumerate(sorted(studies.items())):
        for j, (curve, title) in enumerate(
            (("grad_norm", "gradient norm"), ("ratio_max", "largest ratio"))
        ):
            x, y = 50 + j * (width + 60), TOP + i * row + TITLE
            lines = [
                (loss, _points(run, curve)) for loss in losses for run in presets.get(loss, [])
            ]
            drawn += [
                draw_text(
                    x,
                    y - 6,
                    f"{title}, learning rate {study.rpartition(' ')[2]}",
                    weight=600,
                    size=12,
                )
            ]
            drawn += _log_chart(
                (x, y, width - 30, height), lines, dict(zip(losses, (PLAIN_INK, OURS), strict=True))
            )
    heading = [
        draw_text(20, 28, "Stale completions: plain PPO and dual clip", size=17, weight=600),
        draw_text(20, 46, losses[0], size=12, fill=PLAIN_INK, weight=600),
        draw_text(60, 46, losses[1], size=12, fill=OURS, weight=600),
        draw_text(
            170, 46, "over training steps; one line per seed, logarithmic", size=12, fill=SOFT
        ),
    ]
    return draw_page(
        TOP + len(studies) * row + 8,
        "Gradient norm and largest ratio of plain PPO and dual clip",
        [*heading, *drawn],
    )


def _points(run: Run, curve: str) -> list[Point]:
    return [
        (step, value) for step, value in enumerate(run["curves"][curve], 1) if value is not None
    ]


def _log_chart(box: Box, lines: list[tuple[str, list[Point]]], ink: dict[str, str]) -> list[str]:
    """Curves on a logarithmic axis of whole decades, with the decades named.
    A value of 0 lies at the bottom.
    """
    positive = [value for _, points in lines for _, value in points if value > 0] or [1.0]
    # Five decades are enough to see.
    low = max(math.floor(math.log10(min(positive))), math.ceil(math.log10(max(positive))) - 5)
    high = max(math.ceil(math.log10(max(positive))), low + 1)
    last = max((step for _, points in lines for step, _ in points), default=1)
    chart = Chart(box, last, 10.0**low, 10.0**high, logarithmic=True)
    x, y, width, height = box
    decades = range(low, high + 1)
    return [
        *(chart.level(10.0**k, RULE) for k in decades),
        *(
            draw_text(
                x - 6, chart.at(0, 10.0**k)[1] + 4, f"{10.0**k:g}", anchor="end", fill=SOFT, size=11
            )
            for k in decades
        ),
        draw_text(x + width, y + height + 14, f"step {last:g}", anchor="end", fill=SOFT, size=11),
        *(chart.line(points, ink[loss]) for loss, points in lines),
    ]


def draw_text(
    x: float,
    y: float,
    text: str,
    *,
    anchor: str = "start",
    fill: str = INK,
    size: int = 13,
    weight: int = 400,
) -> str:
    """A line of text."""
    style = f'text-anchor="{anchor}" fill="{fill}" font-size="{size}" font-weight="{weight}"'
    return f'<text x="{x:.1f}" y="{y:.1f}" {style}>{escape(text)}</text>'


def draw_page(height: float, label: str, lines: list[str]) -> str:
    """The whole picture, on a white ground."""
    return "\n".join(
        [
            (
                f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:g}" '
                f'width="{WIDTH}" height="{height:g}" role="img" aria-label="{escape(label)}" '
                f'font-family="{FONT}" font-size="13">'
            ),
            f'<rect width="{WIDTH}" height="{height:g}" rx="8" fill="#ffffff"/>',
            *lines,
            "</svg>\n",
        ]
    )
