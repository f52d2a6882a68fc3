"""HTML for notebooks: plain elements without style, in which every text is escaped."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from html import escape
from typing import ClassVar


def table(heading: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table with a row of headings."""
    lines = [_row("th", heading), *(_row("td", row) for row in rows)]
    return f"<table>{''.join(lines)}</table>"


def _row(element: str, cells: Sequence[object]) -> str:
    return f"<tr>{''.join(f'<{element}>{escape(str(cell))}</{element}>' for cell in cells)}</tr>"


def paragraphs(*texts: str) -> str:
    """One paragraph for each text that is not empty."""
    return "".join(f"<p>{escape(text)}</p>" for text in texts if text)


def html_list(texts: Iterable[str]) -> str:
    """A bullet list; empty without texts."""
    items = "".join(f"<li>{escape(text)}</li>" for text in texts)
    return f"<ul>{items}</ul>" if items else ""


def html_text(text: str) -> str:
    """Preformatted text: line breaks and spaces are kept."""
    return f"<pre>{escape(text)}</pre>"


def heading(text: str) -> str:
    """A small heading."""
    return f"<h4>{escape(text)}</h4>"


class TableReport:
    """A report of a headline, a table and paragraphs, as text and for a notebook.

    columns: the headings of the table; the first column is aligned on the left.
    """

    columns: ClassVar[tuple[str, ...]]

    def _contents(self) -> tuple[str, Sequence[Sequence[object]], Sequence[str]]:
        """The headline, the rows of the table, the paragraphs."""
        raise NotImplementedError

    def __str__(self) -> str:
        headline, rows, paragraphs = self._contents()
        width = max(len(str(row[0])) for row in rows)
        widths = [len(column) for column in self.columns[1:]]
        lines = [
            "  ".join(["", str(first).ljust(width), *map(str.rjust, map(str, rest), widths)])
            for first, *rest in (self.columns, *rows)
        ]
        texts = [textwrap.fill(x, 110, break_on_hyphens=False) for x in (headline, *paragraphs)]
        return "\n\n".join([texts[0], "\n".join(lines), *texts[1:]])

    def _repr_html_(self) -> str:
        headline, rows, texts = self._contents()
        return paragraphs(headline) + table(self.columns, rows) + paragraphs(*texts)
