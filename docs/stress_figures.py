"""Draws the pictures of docs/stress.md as SVG: a heat map, and curves with their ranges."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from docs.evidence_figure import WIDTH, Box, Chart, draw_page, draw_text
from docs.performance_figure import FLOOR, INK, OURS, RULE, SOFT

INKS = (OURS, FLOOR, "#5b8a3c", "#7b4ba0", "#b7820b", "#0f8b8d", "#c03a76", SOFT, INK, "#8a5a2b")
# The colours of accuracies: orange below 0.9, blue above.
SCALE = (
    (0.0, (110, 28, 6)),
    (0.5, (214, 104, 45)),
    (0.8, (248, 214, 184)),
    (0.9, (245, 246, 247)),
    (1.0, (27, 108, 168)),
)
LEFT, TOP, ROW, GAP = 172, 152, 18, 8
HEIGHT, PANEL_TOP, PANEL_GAP = 170, 106, 56
DOTTED = 10  # a line of at most so many points shows each of them


class Square(NamedTuple):
    """A cell of the heat map: the mean accuracy, and the number of collapsed runs."""

    accuracy: float
    collapsed: int = 0

    @property
    def shade(self) -> str:
        """The colour of the accuracy."""
        high = next(i for i, (x, _) in enumerate(SCALE) if i and self.accuracy <= x)
        (a, low_ink), (b, high_ink) = SCALE[high - 1], SCALE[high]
        share = (self.accuracy - a) / (b - a)
        mixed = (round(x + share * (y - x)) for x, y in zip(low_ink, high_ink, strict=True))
        return "#" + "".join(f"{x:02x}" for x in mixed)

    def draw(self, x: float, y: float, width: float) -> list[str]:
        """A rectangle with its numbers."""
        text = f"{100 * self.accuracy:.0f}" + (f" ×{self.collapsed}" if self.collapsed else "")
        ink = INK if 0.45 < self.accuracy < 0.985 else "#ffffff"
        size, weight = (10, 600) if self.collapsed else (11, 400)
        style = f'rx="2" fill="{self.shade}"'
        return [
            f'<rect x="{x:.1f}" y="{y:g}" width="{width:.1f}" height="{ROW - 2}" {style}/>',
            draw_text(
                x + width / 2, y + 12, text, anchor="middle", fill=ink, size=size, weight=weight
            ),
        ]


def heat_map(
    rows: Mapping[str, Mapping[str, Square]],
    groups: Mapping[str, Sequence[str]],
    families: Mapping[str, str],
) -> str:
    """Rows of losses, columns of conditions. groups: the conditions below each caption. families:
    of the losses, shown by the colour of a dot.
    """
    count = sum(map(len, groups.values()))
    column = min((WIDTH - 20 - LEFT - GAP * (len(groups) - 1)) / max(count, 1), 130)
    inks = dict(zip(sorted(set(families.values())), INKS, strict=False))
    about = "Final accuracy in percent, mean over the seeds. ×2: two of these runs collapsed."
    lines = _heading("Which loss survives which difficulty", about)
    for i, percent in enumerate((0, 30, 60, 80, 90, 95, 100)):
        lines += Square(percent / 100).draw(20 + 21 * i, 64, 21)
    x = float(LEFT)
    for caption, names in groups.items():
        end = x + column * len(names) - 2
        lines.append(draw_text(x, 74, caption, size=11, weight=600))
        lines.append(f'<path d="M{x:.1f} 79 H{end:.1f}" stroke="{SOFT}"/>')
        for name in names:
            turned = f"translate({x + column / 2 - 4:.1f} {TOP - 6}) rotate(-42)"
            lines.append(f'<g transform="{turned}">{draw_text(0, 0, name, size=11)}</g>')
            for i, row in enumerate(rows.values()):
                if name in row:
                    lines += row[name].draw(x, TOP + ROW * i, column - 2)
            x += column
        x += GAP
    for i, loss in enumerate(rows):
        y = TOP + ROW * i + 12.5
        lines.append(_dot(26, y - 4, 4, inks[families[loss]]))
        lines.append(draw_text(36, y, loss, size=12))
    bottom = TOP + ROW * len(rows)
    label = f"Heat map of the final accuracy of {len(rows)} losses under {count} conditions"
    return draw_page(bottom + 36, label, [*lines, *_legend(bottom + 22, inks)])


def _heading(title: str, about: str) -> list[str]:
    return [
        draw_text(20, 28, title, size=17, weight=600),
        draw_text(20, 46, about, size=12, fill=SOFT),
    ]


def _dot(x: float, y: float, radius: float, ink: str) -> str:
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius:g}" fill="{ink}"/>'


def _legend(y: float, inks: Mapping[str, str]) -> list[str]:
    """Names in their colours, in one line."""
    lines, x = [], 20.0
    for name, ink in inks.items():
        lines.append(f'<rect x="{x:.1f}" y="{y - 8:.1f}" width="12" height="8" fill="{ink}"/>')
        lines.append(draw_text(x + 16, y, name, fill=ink, size=12, weight=600))
        x += 28 + 6.9 * len(name)
    return lines


class Point(NamedTuple):
    """A place of a curve: the mean over the runs, and their range."""

    x: float
    mean: float
    low: float
    high: float


class Panel(NamedTuple):
    """A small chart. lines: points by name. marks: labels of the x axis by place. low, high: the
    limits of the y axis; whole decades if it is logarithmic.
    """

    title: str
    lines: Mapping[str, Sequence[Point]]
    marks: Mapping[float, str]
    low: float = 0.0
    high: float = 1.0
    logarithmic: bool = False

    @property
    def levels(self) -> list[float]:
        """The marks of the y axis."""
        if not self.logarithmic:
            return [self.low + i * (self.high - self.low) / 4 for i in range(5)]
        first, last = (round(math.log10(x)) for x in (self.low, self.high))
        return [10.0**k for k in range(first, last + 1)]

    def draw(self, box: Box, inks: Mapping[str, str]) -> list[str]:
        """Axes, ranges and lines."""
        x, y, _, height = box
        chart = Chart(box, max(self.marks), self.low, self.high, logarithmic=self.logarithmic)
        lines = [draw_text(x, y - 10, self.title, size=12, weight=600)]
        small = {"fill": SOFT, "size": 11}
        for level in self.levels:
            place = chart.at(0, level)[1] + 4
            lines.append(chart.level(level, RULE))
            lines.append(draw_text(x - 6, place, f"{level:g}", anchor="end", **small))
        for step, mark in self.marks.items():
            place = chart.at(step, self.low)[0]
            lines.append(draw_text(place, y + height + 15, mark, anchor="middle", **small))
        for name, points in self.lines.items():
            edge = [chart.at(p.x, p.low) for p in points]
            edge += [chart.at(p.x, p.high) for p in reversed(points)]
            shape = " ".join(f"{a:.1f},{b:.1f}" for a, b in edge)
            lines.append(f'<polygon points="{shape}" fill="{inks[name]}" fill-opacity="0.1"/>')
        for name, points in self.lines.items():
            lines.append(chart.line([(p.x, p.mean) for p in points], inks[name], 2))
            places = [chart.at(p.x, p.mean) for p in points if len(points) <= DOTTED]
            lines += [_dot(a, b, 2.5, inks[name]) for a, b in places]
        return lines


def curves_figure(title: str, about: str, panels: Sequence[Panel], columns: int = 2) -> str:
    """Panels side by side, with one legend for all."""
    names = list(dict.fromkeys(name for panel in panels for name in panel.lines))
    inks = {name: INKS[i % len(INKS)] for i, name in enumerate(names)}
    width, row = (WIDTH - 40) / columns - PANEL_GAP, HEIGHT + 60
    lines = [*_heading(title, about), *_legend(68, inks)]
    for i, panel in enumerate(panels):
        x, y = 60 + (i % columns) * (width + PANEL_GAP), PANEL_TOP + (i // columns) * row
        lines += panel.draw((x, y, width, HEIGHT), inks)
    return draw_page(PANEL_TOP + math.ceil(len(panels) / columns) * row - 22, title, lines)
