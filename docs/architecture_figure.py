"""Draws docs/figures/architecture.svg: the layers of the package with a box for each module.

An arrow leads from a box to each box that it imports; an arrow that crosses a layer has its own
lane between the boxes there. The SVG is written by hand, so that the same code gives the same bytes
everywhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from xml.sax.saxutils import escape

from docs.architecture_imports import Box, direct_imports, layers

WIDTH, ROW, TOP, BOTTOM, LABELS = 1252, 104, 14, 14, 152
BOX_WIDTH, BOX_HEIGHT, LANE, GAP = 112, 46, 2, 20
INK, SOFT, FILL, BORDER, ARROW, BAND = (
    "#1f2933",
    "#5f6b76",
    "#eaf2f8",
    "#9fb3c4",
    "#7c8b99",
    "#f7f9fb",
)
FONT = "ui-sans-serif, -apple-system, 'Segoe UI', Helvetica, Arial, sans-serif"
SWEEPS = 60


@dataclass(frozen=True)
class Lane:
    """Where the arrow from one box to another crosses a layer, counted from the ground."""

    start: str
    end: str
    layer: int


@dataclass
class Place:
    """Where a box or a lane stands, in pixels from the upper left corner."""

    x: float
    y: float
    width: float

    @property
    def right(self) -> float:
        """The right edge."""
        return self.x + self.width

    @property
    def bottom(self) -> float:
        """The lower edge."""
        return self.y + BOX_HEIGHT

    @property
    def middle(self) -> float:
        """Where vertical arrows begin and end."""
        return self.x + self.width / 2


Item = str | Lane
Rows = list[list[Item]]


def grid(boxes: Mapping[str, Box]) -> dict[str, Place]:
    """The place of every box."""
    return _boxes_of(_places(_rows(boxes), direct_imports(boxes)))


def _boxes_of(places: Mapping[Item, Place]) -> dict[str, Place]:
    return {item: place for item, place in places.items() if isinstance(item, str)}


def _rows(boxes: Mapping[str, Box]) -> Rows:
    """The boxes of every layer, from the ground up, with the lanes of arrows that cross it between
    them.
    """
    named: Rows = [list(layer.names) for layer in layers(boxes)]
    height = {name: i for i, row in enumerate(named) for name in row}
    arrows = direct_imports(boxes)
    middle = {name: place.middle for name, place in _places(named, arrows).items()}
    rows: Rows = []
    for i, row in enumerate(named):
        order = {name: middle[name] for name in row}
        for start, end in arrows:
            if height[end] < i < height[start]:
                share = (i - height[end]) / (height[start] - height[end])
                order[Lane(start, end, i)] = share * middle[start] + (1 - share) * middle[end]
        rows.append(sorted(order, key=lambda item: order[item]))
    return rows


def _places(rows: Rows, arrows: Sequence[tuple[str, str]]) -> dict[Item, Place]:
    """The place of every box and lane: each as near as possible to the ends of its arrows."""
    near: dict[Item, list[Item]] = {item: [] for row in rows for item in row}
    for start, end in arrows:
        for a, b in pairwise(_route(start, end, rows)):
            near[a].append(b)
            near[b].append(a)
    places: dict[Item, Place] = {}
    for i, row in enumerate(rows):
        x = float(LABELS)
        for item in row:
            places[item] = Place(
                x, TOP + (len(rows) - 1 - i) * ROW + (ROW - BOX_HEIGHT) / 2, _width(item)
            )
            x += _width(item) + GAP
    for sweep in range(SWEEPS):
        for row in rows if sweep % 2 else reversed(rows):
            _pull(row, places, near)
    for place in places.values():
        place.x = round(place.x)
    return places


def _width(item: Item) -> int:
    return LANE if isinstance(item, Lane) else BOX_WIDTH


def _route(start: str, end: str, rows: Rows) -> list[Item]:
    """The items that an arrow passes, from its start to its end."""
    lanes = [Lane(start, end, i) for i in reversed(range(len(rows)))]
    return [start, *(lane for lane in lanes if lane in rows[lane.layer]), end]


def _pull(row: Sequence[Item], places: dict[Item, Place], near: Mapping[Item, list[Item]]) -> None:
    """Move the items of a row towards the middle of their neighbours, in order and with gaps."""
    wanted = []
    for item in row:
        place = places[item]
        middles = [places[other].middle for other in near[item] if places[other].y != place.y]
        wanted.append((sum(middles) / len(middles) if middles else place.middle) - place.width / 2)
    steps = [places[item].width + GAP for item in row]
    rightward = _apart(wanted, steps, LABELS)
    leftward = _mirrored(_apart(_mirrored(wanted, steps), steps[::-1], 0), steps[::-1])
    # Both keep the gaps, so their mean does; then both ends of the row are moved inside the
    # picture.
    means = _apart([(a + b) / 2 for a, b in zip(rightward, leftward, strict=True)], steps, LABELS)
    inside = _mirrored(_apart(_mirrored(means, steps), steps[::-1], 0), steps[::-1])
    for item, x in zip(row, inside, strict=True):
        places[item].x = x


def _apart(wanted: Sequence[float], steps: Sequence[float], edge: float) -> list[float]:
    """Each wanted number, raised where necessary to one step above the number before it."""
    pushed = []
    for x, step in zip(wanted, steps, strict=True):
        pushed.append(max(x, edge))
        edge = pushed[-1] + step
    return pushed


def _mirrored(xs: Sequence[float], steps: Sequence[float]) -> list[float]:
    """The row seen from the right edge of the picture."""
    return [WIDTH - x - step for x, step in zip(xs, steps, strict=True)][::-1]


def drawing(boxes: Mapping[str, Box]) -> str:
    """The whole picture."""
    rows, arrows = _rows(boxes), direct_imports(boxes)
    places = _places(rows, arrows)
    height = TOP + len(rows) * ROW + BOTTOM
    label = "Three packages in layers; a module imports only modules of its own layer or below"
    return "\n".join(
        [
            (
                f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
                f'width="{WIDTH}" height="{height}" role="img" aria-label="{label}" '
                f'font-family="{FONT}" font-size="13">'
            ),
            (
                '<defs><marker id="tip" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="7" '
                'markerHeight="7" orient="auto"><path d="M0 0L8 4L0 8z" '
                f'fill="{ARROW}"/></marker></defs>'
            ),
            f'<rect width="{WIDTH}" height="{height}" rx="8" fill="#ffffff"/>',
            *(
                line
                for i, layer in enumerate(reversed(layers(boxes)))
                for line in _band(i, layer.title)
            ),
            *_buildings([layer.package for layer in reversed(layers(boxes))]),
            *(
                _arrow([places[item] for item in _route(a, b, rows)], _boxes_of(places))
                for a, b in arrows
            ),
            *(line for name, box in boxes.items() for line in _drawn(box, places[name])),
            "</svg>\n",
        ]
    )


def _band(i: int, title: str) -> list[str]:
    y = TOP + i * ROW
    ground = f'<rect x="8" y="{y}" width="{WIDTH - 16}" height="{ROW}" fill="{BAND}"/>'
    text = f'<text x="20" y="{y + ROW / 2 + 4:.0f}" fill="{SOFT}">{escape(title)}</text>'
    return [text] if i % 2 else [ground, text]


def _buildings(packages: list[str]) -> list[str]:
    """A frame around the layers of each package, with its name. packages: from the top layer."""
    lines = []
    for package in dict.fromkeys(packages):
        y = TOP + packages.index(package) * ROW
        height = packages.count(package) * ROW
        lines += [
            f'<rect x="8" y="{y + 2}" width="{WIDTH - 16}" height="{height - 4}" rx="8" '
            f'fill="none" stroke="{BORDER}" stroke-width="1.5"/>',
            f'<text x="20" y="{y + 22}" font-weight="700" fill="{INK}">{package}</text>',
        ]
    return lines


def _arrow(route: list[Place], all_boxes: Mapping[str, Place]) -> str:
    """From box to box: straight through its lanes, bent between layers, level within a layer."""
    start, end = route[0], route[-1]
    if start.y == end.y:
        return _level(start, end, all_boxes)
    path = f"M{start.middle:.0f} {start.bottom:.0f}"
    for above, below in pairwise(route):
        bend = (above.bottom + below.y) / 2
        path += (
            f" C{above.middle:.0f} {bend:.0f} {below.middle:.0f} {bend:.0f} {below.middle:.0f} "
            f"{below.y:.0f}"
        )
        if below is not end:
            path += f" L{below.middle:.0f} {below.bottom:.0f}"
    return _path(path)


def _level(start: Place, end: Place, all_boxes: Mapping[str, Place]) -> str:
    """An arrow within a layer: a line between neighbours, else a bow below the boxes between."""
    left, right = sorted((start, end), key=lambda place: place.x)
    if not any(place.y == left.y and left.x < place.x < right.x for place in all_boxes.values()):
        x1, x2 = (left.right, right.x) if start is left else (right.x, left.right)
        y = start.y + BOX_HEIGHT / 2
        return _path(f"M{x1:.0f} {y:.0f} L{x2:.0f} {y:.0f}")
    x1, x2, y, bend = start.middle, end.middle, start.bottom, start.bottom + (ROW - BOX_HEIGHT) / 2
    return _path(f"M{x1:.0f} {y:.0f} C{x1:.0f} {bend:.0f} {x2:.0f} {bend:.0f} {x2:.0f} {y:.0f}")


def _path(d: str) -> str:
    return f'<path d="{d}" fill="none" stroke="{ARROW}" stroke-width="1.2" marker-end="url(#tip)"/>'


def _drawn(box: Box, place: Place) -> list[str]:
    middle = f'x="{place.middle:.0f}" text-anchor="middle"'
    return [
        (
            f'<rect x="{place.x:.0f}" y="{place.y:.0f}" width="{BOX_WIDTH}" height="{BOX_HEIGHT}" '
            f'rx="6" fill="{FILL}" stroke="{BORDER}"/>'
        ),
        (
            f'<text {middle} y="{place.y + 20:.0f}" font-weight="600" '
            f'fill="{INK}">{escape(box.name)}</text>'
        ),
        (
            f'<text {middle} y="{place.y + 36:.0f}" font-size="11" '
            f'fill="{SOFT}">{escape(box.size)}</text>'
        ),
    ]
