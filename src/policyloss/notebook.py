"""HTML for notebooks: plain elements without style, in which every text is escaped."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape


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
