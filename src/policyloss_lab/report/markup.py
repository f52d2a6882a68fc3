"""Text and assets of pages that open offline. Text from a run is escaped, and never invisible."""

from __future__ import annotations

import base64
import hashlib
import html
import json
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

from policyloss.errors import visible


def escape(value: Any) -> str:
    """`value` as HTML text, also for a quoted attribute; invisible characters become numbers."""
    return html.escape(visible(str(value)), quote=True)


def island(data: Any) -> str:
    """JSON for a `<script>` element, escaped so that it cannot end the element."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))  # ASCII only
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def number(value: float | int | None) -> str:
    """A number with three significant digits and separated thousands; "–" for None."""
    if value is None:
        return "–"
    if abs(value) < 1e15 and (isinstance(value, int) or abs(value) >= 1000):
        return f"{value:,.0f}"
    return f"{value:.3g}"


def duration(seconds: float | int | None) -> str:
    """Seconds as 42 s, 3 min 05 s or 2 h 07 min."""
    if seconds is None:
        return "–"
    rounded = round(seconds)
    if rounded < 60 or rounded >= 1e15:
        return f"{seconds:.3g} s"
    if rounded < 3600:
        return f"{rounded // 60} min {rounded % 60:02d} s"
    return f"{rounded // 3600} h {rounded % 3600 // 60:02d} min"


def in_sentence(names: Sequence[str]) -> str:
    """Names in a sentence: "a, b and c", or the first five and the number of others."""
    if len(names) > 6:
        return f"{', '.join(names[:5])} and {number(len(names) - 5)} more"
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def asset(path: str) -> str:
    """The text of "folder/name", a file in the folder `assets` of a folder of this package."""
    folder, name = path.split("/")
    return (files("policyloss_lab") / folder / "assets" / name).read_text(encoding="utf-8")


def document(title: str, body: str, data: Any, assets: Sequence[str], live: int = 0) -> str:
    """A page with its styles, scripts and data. Its content policy forbids every request and every
    other script. title, body: as HTML. data: for the script. assets: styles and scripts, as in
    `asset`. live: as in `render`; only a live page may send requests, to its own server.
    """
    style = "".join(asset(path) for path in assets if path.endswith(".css"))
    inside = "\n".join(asset(path) for path in assets if path.endswith(".js"))
    script = f"(() => {{\n{inside}}})();"
    rules = [
        "default-src 'none'; base-uri 'none'; form-action 'none'",
        f"script-src '{_digest(script)}'",
        f"style-src '{_digest(style)}'",
        "img-src data:",
        *(["connect-src 'self'"] if live else []),
    ]
    return f"""<!doctype html>
<html lang="en"{f' data-live="{live}"' if live else ""}><head><meta charset="utf-8">\
<meta http-equiv="Content-Security-Policy" content="{"; ".join(rules)}">
<meta name="viewport" content="width=device-width, initial-scale=1">\
<title>{title}</title>
<style>{style}</style></head><body>
{body}
<script type="application/json" id="data">{island(data)}</script>
<script>{script}</script></body></html>
"""


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
