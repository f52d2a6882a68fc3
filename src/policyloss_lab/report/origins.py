"""What the metrics of other trainers' runs are called in their own files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from policyloss_lab.report.text import escaped


def origins(runs: Sequence[Mapping[str, Any]]) -> str:
    """A table: each metric that has another name in the files of some run; "" if there is none."""
    places = [i for i, run in enumerate(runs) if run["names"]]
    names = sorted({name for i in places for name in runs[i]["names"]})
    if not names:
        return ""
    head = "".join(
        f'<th scope=col title="{escaped(runs[i]["source"])}"><bdi>{escaped(runs[i]["label"])}</bdi>'
        for i in places
    )
    rows = "".join(
        f"<tr><th scope=row><code>{escaped(name)}</code>"
        + "".join(f"<td>{_name(runs[i]['names'].get(name))}" for i in places)
        for name in names
    )
    sources = "".join(
        f"<li><bdi>{escaped(runs[i]['label'])}</bdi>: {escaped(runs[i]['source'])}" for i in places
    )
    return (
        f"<p>These runs were read from other trainers' files:</p><ul>{sources}</ul>"
        f"<details><summary>{len(names)} metrics have another name in the files</summary><div "
        f'class="wide"><table class="settings"><thead><tr><th scope=col>Here{head}</thead><tbody>'
        f"{rows}</tbody></table></div></details>"
    )


def _name(name: str | None) -> str:
    return "–" if name is None else f"<code>{escaped(name)}</code>"
