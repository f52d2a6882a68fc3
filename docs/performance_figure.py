"""Draws the bars of docs/performance.md and the README:
time and memory of the head, with the floor of the bare matmuls.

SVG written by hand, so that the same numbers give the same bytes everywhere. It has a white ground
of its own: text stays readable on a dark page.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from xml.sax.saxutils import escape

WIDTH, TOP, ROW, BAR, BOTTOM = 880, 104, 27, 15, 52
LABEL_END, TIME_START, TIME_END, MEMORY_START, MEMORY_END, ERROR_END = 216, 226, 520, 596, 740, 864
OURS, THEIRS, FLOOR, INK, SOFT, RULE = (
    "#1b6ca8",
    "#b4bcc4",
    "#c2410c",
    "#1f2933",
    "#5f6b76",
    "#e3e7eb",
)
FONT = "ui-sans-serif, -apple-system, 'Segoe UI', Helvetica, Arial, sans-serif"
FLOOR_NAME = "three bare matmuls"


@dataclass(frozen=True)
class Bar:
    """One provider: milliseconds, bytes beyond inputs and gradients, RMS error of its
    log-probabilities (None: not exposed).
    """

    name: str
    time: float
    memory: float
    error: float | None
    ours: bool


def bars(providers: dict[str, dict[str, Any]]) -> list[Bar]:
    """Ours in their order, then the others from fast to slow.
    Variants of the loss are left to the tables.
    """
    ours = ("policyloss, one pass", "policyloss, stash", "policyloss, recompute")
    found = [_bar(name, providers[name]) for name in ours if name in providers]
    others = [_bar(name, p) for name, p in providers.items() if p["kind"] == "peer"]
    return found + sorted(others, key=lambda bar: bar.time)


def _bar(name: str, p: dict[str, Any]) -> Bar:
    return Bar(name, p["median_ms"], p["extra_bytes"], p["errors"].get("logp"), p["kind"] == "ours")


def head_figure(run: dict[str, Any]) -> str:
    """The drawing of one run of `benchmarks.head`."""
    providers = run["groups"]["dense"]
    rows, floor = bars(providers), providers.get(FLOOR_NAME, {}).get("median_ms")
    height = TOP + ROW * len(rows) + BOTTOM
    time_scale = Scale(TIME_START, TIME_END, [bar.time for bar in rows])
    memory_scale = Scale(MEMORY_START, MEMORY_END, [bar.memory for bar in rows])
    unit = Unit([bar.memory for bar in rows])
    drawn = [
        line
        for i, bar in enumerate(rows)
        for line in _row(bar, TOP + ROW * i, time_scale, memory_scale, unit)
    ]
    end = TOP + ROW * len(rows)
    label = (
        f"Bars of time and memory of {len(rows)} implementations of the head, with the time of "
        "three bare matmuls"
    )
    return "\n".join(
        [
            (
                f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
                f'width="{WIDTH}" height="{height}" role="img" aria-label="{label}" '
                f'font-family="{FONT}" font-size="13">'
            ),
            f'<rect width="{WIDTH}" height="{height}" rx="8" fill="#ffffff"/>',
            *_heading(run, unit),
            *drawn,
            *(_floor_line(time_scale.at(floor), floor, end) if floor else []),
            *_footnotes(
                rows,
                any(time_scale.cuts(bar.time) or memory_scale.cuts(bar.memory) for bar in rows),
                end,
            ),
            "</svg>\n",
        ]
    )


class Scale:
    """Pixels of a value. One value far beyond the others is cut off, and marked as cut."""

    def __init__(self, start: int, end: int, values: list[float]) -> None:
        ordered = sorted(values)
        second = ordered[-2] if len(ordered) > 1 else ordered[-1]
        self.most = second * 1.12 if ordered[-1] > 2.5 * second > 0 else ordered[-1] or 1.0
        self.start, self.end = start, end

    def at(self, value: float) -> float:
        """The pixel where a bar of this value ends."""
        return self.start + (self.end - self.start) * min(value / self.most, 1.0)

    def cuts(self, value: float) -> bool:
        """Whether the bar is longer than can be shown."""
        return value > self.most


class Unit:
    """GiB, or MiB where everything is small."""

    def __init__(self, values: list[float]) -> None:
        self.name, self.bytes = ("GiB", 2**30) if max(values) >= 2**30 else ("MiB", 2**20)

    def shown(self, value: float) -> str:
        """The number alone; a number that rounds to 0 is not shown as 0."""
        number = value / self.bytes
        if 0 < number < 0.05:
            return "< 0.1"
        return f"{number:.0f}" if number >= 100 else f"{number:.1f}"


def _text(
    x: float,
    y: float,
    text: str,
    *,
    anchor: str = "start",
    fill: str = INK,
    size: int = 13,
    weight: int = 400,
) -> str:
    style = f'text-anchor="{anchor}" fill="{fill}" font-size="{size}" font-weight="{weight}"'
    return f'<text x="{x:g}" y="{y:g}" {style}>{escape(text)}</text>'


def _heading(run: dict[str, Any], unit: Unit) -> list[str]:
    shape, where = (
        run["shape"],
        run["environment"]["gpu"] or f"{run['environment']['threads']} CPU threads",
    )
    tokens = shape["sequences"] * shape["length"]
    sizes = (
        f"{tokens:,} tokens, vocabulary {shape['vocabulary']:,}, hidden size {shape['hidden']:,}, "
        f"{run['dtype']}, {where}"
    )
    return [
        _text(20, 30, "PPO loss and its gradients from hidden states", size=17, weight=600),
        _text(20, 50, f"{sizes}. Shorter is better.", size=12, fill=SOFT),
        _text(TIME_START, 78, "time, ms", weight=600, size=12),
        _text(MEMORY_START, 78, f"memory, {unit.name}*", weight=600, size=12),
        _text(ERROR_END, 78, "log-prob error", anchor="end", weight=600, size=12),
    ]


def _row(bar: Bar, y: int, time: Scale, memory: Scale, unit: Unit) -> list[str]:
    middle, colour, weight = y + BAR - 3, OURS if bar.ours else THEIRS, 600 if bar.ours else 400
    error = "–" if bar.error is None else f"{bar.error:.1e}".replace("e-0", "e-")
    return [
        _text(LABEL_END, middle, bar.name, anchor="end", weight=weight),
        *_drawn(
            time,
            bar.time,
            y,
            colour,
            f"{bar.time:.0f}" if bar.time >= 100 else f"{bar.time:.1f}",
            weight,
        ),
        *_drawn(memory, bar.memory, y, colour, unit.shown(bar.memory), weight),
        _text(
            ERROR_END, middle, error, anchor="end", fill=INK if bar.ours else SOFT, weight=weight
        ),
    ]


def _drawn(scale: Scale, value: float, y: int, colour: str, number: str, weight: int) -> list[str]:
    end = scale.at(value)
    lines = [
        f'<rect x="{scale.start}" y="{y}" width="{max(end - scale.start, 1.5):.1f}" height="{BAR}" '
        f'rx="2" fill="{colour}"/>'
    ]
    if scale.cuts(value):
        x = end - 16
        lines.append(
            f'<path d="M{x:.1f} {y + BAR + 1} l6 -{BAR + 2} h5 l-6 {BAR + 2} z" fill="#ffffff"/>'
        )
    return [*lines, _text(round(end + 6, 1), y + BAR - 3, number, weight=weight)]


def _floor_line(x: float, floor: float, end: int) -> list[str]:
    stroke = f'stroke="{FLOOR}" stroke-width="1.5" stroke-dasharray="4 3"'
    line = f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{TOP - 8}" y2="{end + 2}" {stroke}/>'
    return [
        line,
        _text(
            round(x, 1),
            TOP - 12,
            f"{FLOOR_NAME}: {floor:.1f}",
            anchor="middle",
            fill=FLOOR,
            size=11,
        ),
    ]


def _footnotes(rows: list[Bar], cut: bool, end: int) -> list[str]:
    gap = " A bar with a gap is longer than drawn." if cut else ""
    silent = " –: gives no log-probs." if any(bar.error is None for bar in rows) else ""
    rule = f'<line x1="20" x2="{WIDTH - 16}" y1="{end + 10}" y2="{end + 10}" stroke="{RULE}"/>'
    note = f"* Peak beyond inputs and gradients. Log-prob error: RMS against float64.{silent}{gap}"
    return [rule, _text(20, end + 30, note, size=11, fill=SOFT)]
