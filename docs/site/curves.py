"""Draws the loss of one token and the push on its log-probability over the ratio, computed by
`policy_loss` itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from xml.sax.saxutils import escape

import torch

import policyloss as pl
from docs.performance_figure import FONT, INK, RULE, SOFT
from policyloss.tokens import LOGP_ARGUMENTS

# Every other policy agrees about the token, whose probability was 0.135; so the ratio may reach 7.
OLD_LOGP = -2.0
POINTS = 121
WIDTH, HEIGHT, CHART_WIDTH, CHART_HEIGHT, TOP = 760, 250, 320, 150, 50
COLOURS = {1.0: "#1b7f5c", -1.0: "#b3432b"}
NAMES = {1.0: "advantage +1", -1.0: "advantage −1"}

Points = list[tuple[float, float]]


def has_curve(spec: pl.LossSpec) -> bool:
    """Whether the loss of a token is a function of its ratio; a pull to a whole distribution is
    not.
    """
    return spec.divergence is None


def token_loss(spec: pl.LossSpec, ratio: float, advantage: float) -> tuple[float, float]:
    """The loss of one token, and the push on its log-probability, `−∂loss/∂logp`."""
    old_logp = torch.full((1, 1), OLD_LOGP, dtype=torch.float64)
    logp = (old_logp + torch.tensor(ratio, dtype=torch.float64).log()).requires_grad_()
    others: Any = {name: old_logp for name in LOGP_ARGUMENTS.values() if name != "old_logp"}
    spec = spec.replace(aggregate=pl.TokenSum())
    mask = torch.ones(1, 1, dtype=torch.bool)
    loss = pl.policy_loss(
        spec, logp, old_logp, torch.tensor([advantage], dtype=torch.float64), mask, **others
    ).loss
    (gradient,) = torch.autograd.grad(loss, logp)
    return float(loss.detach()), -float(gradient)


def shown_range(numbers: Sequence[tuple[str, object]]) -> tuple[float, float]:
    """The ratios to draw, so that every bound of the trust region is inside.

    numbers: the numbers of the loss by their place, as `explain` lists them.
    """
    of_trust = [
        (place.rpartition(".")[2], value)
        for place, value in numbers
        if place.startswith("trust.") and isinstance(value, (int, float))
    ]
    distances = [value for name, value in of_trust if name.startswith("eps") and value < 10]
    ratios = [value for name, value in of_trust if name in ("dual", "high", "delta") and value < 6]
    if distances and max(distances) < 0.05:
        return 1 - 4 * max(distances), 1 + 4 * max(distances)
    return 0.02, max([2.5, *(1.25 * value for value in ratios)])


def curves(name: str) -> str:
    """The drawing of a preset, as SVG."""
    explanation = pl.explain(name)
    low, high = shown_range([(n.where, n.value) for n in explanation.numbers])
    ratios = [low + (high - low) * i / (POINTS - 1) for i in range(POINTS)]
    values = {a: [token_loss(explanation.spec, ratio, a) for ratio in ratios] for a in COLOURS}
    drawn = []
    for i, title in enumerate(("loss of one token", "push on its log-probability, −∂loss/∂logp")):
        lines = {
            a: [(ratio, pair[i]) for ratio, pair in zip(ratios, pairs, strict=True)]
            for a, pairs in values.items()
        }
        drawn.append(_chart(46 + i * (CHART_WIDTH + 58), title, lines))
    legend = "".join(
        f'<rect x="{46 + 130 * i}" y="14" width="14" height="4" fill="{COLOURS[a]}"/>'
        f'<text x="{66 + 130 * i}" y="20" fill="{INK}" font-size="12">{NAMES[a]}</text>'
        for i, a in enumerate(COLOURS)
    )
    label = escape(f"{name}: loss and push of one token over the ratio")
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" '
        f'height="{HEIGHT}" role="img" aria-label="{label}" font-family="{FONT}">'
        f'<rect width="{WIDTH}" height="{HEIGHT}" rx="8" fill="#ffffff"/>'
        f"{legend}{''.join(drawn)}</svg>\n"
    )


def _chart(left: float, title: str, lines: dict[float, Points]) -> str:
    xs = [x for x, _ in lines[1.0]]
    ys = [y for points in lines.values() for _, y in points]
    x_low, x_high = min(xs), max(xs)
    # A token far from the old policy may have a huge loss, which would flatten all the rest.
    y_low, y_high = max(min(*ys, 0.0), -6.0), min(max(*ys, 0.0), 6.0)
    margin = 0.06 * (y_high - y_low) or 1.0
    y_low, y_high = y_low - margin, y_high + margin

    def at(x: float, y: float) -> tuple[float, float]:
        share = (min(max(y, y_low), y_high) - y_low) / (y_high - y_low)
        return (
            left + CHART_WIDTH * (x - x_low) / (x_high - x_low),
            TOP + CHART_HEIGHT * (1 - share),
        )

    zero, one = at(x_low, 0.0)[1], at(1.0, 0.0)[0]
    bottom = TOP + CHART_HEIGHT
    drawn = [
        _text(left, TOP - 10, title, weight=600),
        f'<line x1="{left}" x2="{left + CHART_WIDTH}" y1="{zero:.1f}" y2="{zero:.1f}" '
        f'stroke="{SOFT}" stroke-width="0.8"/>',
        f'<line x1="{one:.1f}" x2="{one:.1f}" y1="{TOP}" y2="{bottom}" stroke="{RULE}" '
        'stroke-dasharray="3 3"/>',
        _text(left - 6, zero + 4, "0", anchor="end"),
    ]
    for value in (y_high - margin, y_low + margin):
        if abs(at(x_low, value)[1] - zero) > 14:
            drawn.append(_text(left - 6, at(x_low, value)[1] + 4, f"{value:.3g}", anchor="end"))
    for x, anchor in ((x_low, "start"), (1.0, "middle"), (x_high, "end")):
        if x == 1.0 or abs(at(x, 0)[0] - one) > 40:
            drawn.append(_text(at(x, 0)[0], bottom + 16, f"{x:.5g}", anchor=anchor))
    drawn.append(_text(left + CHART_WIDTH / 2, bottom + 34, "ratio", anchor="middle"))
    for advantage, points in lines.items():
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in (at(*point) for point in points))
        drawn.append(
            f'<polyline points="{path}" fill="none" stroke="{COLOURS[advantage]}" '
            'stroke-width="2" stroke-linejoin="round"/>'
        )
    return "".join(drawn)


def _text(x: float, y: float, text: str, *, anchor: str = "start", weight: int = 400) -> str:
    fill = INK if weight > 400 else SOFT
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{fill}" font-size="12" '
        f'font-weight="{weight}">{escape(text)}</text>'
    )
