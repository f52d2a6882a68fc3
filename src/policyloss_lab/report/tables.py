"""The end of the page, which needs no script: what the losses are, and all settings."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from policyloss_lab.report.cards import swatch
from policyloss_lab.report.compare import flat
from policyloss_lab.report.markup import escaped


def losses(data: Mapping[str, Any]) -> str:
    """A card for each different loss, and how the others differ from the first."""
    cards: list[tuple[Any, list[int]]] = []
    for i, run in enumerate(data["runs"]):
        same = next(
            (users for spec, users in cards if spec == run["loss"]["spec"] and spec is not None),
            None,
        )
        if same is None:
            cards.append((run["loss"]["spec"], [i]))
        else:
            same.append(i)
    differ = "".join(_difference(d) for d in data["differences"]["loss"])
    return (
        differ
        + f'<div class="cards">{"".join(_loss(data["runs"], users) for _, users in cards)}</div>'
    )


def _difference(difference: Mapping[str, Any]) -> str:
    a, b = (f"<bdi>{escaped(difference[side])}</bdi>" for side in ("a", "b"))
    columns = {"a": a, "b": b, "meaning": "What it means"}
    head = "<th scope=col>Slot" + "".join(f"<th scope=col>{title}" for title in columns.values())
    rows = ""
    for change in difference["changes"]:
        cells = (
            escaped(change[name]) if name == "meaning" else f"<code>{escaped(change[name])}</code>"
            for name in columns
        )
        rows += f"<tr><th scope=row>{escaped(change['slot'])}" + "".join(
            f"<td>{cell}" for cell in cells
        )
    extra = "".join(f"<p>{escaped(note)}</p>" for note in difference["notes"])
    table = f'<table class="stacked"><thead><tr>{head}</thead><tbody>{rows}</tbody></table>'
    key = f'<p class="quiet">a is the loss of {a}, b that of {b}.</p>'
    return f'<div class="card"><h3>How the losses differ</h3>{key}{table}{extra}</div>'


def _loss(runs: Sequence[Mapping[str, Any]], users: Sequence[int]) -> str:
    loss = runs[users[0]]["loss"]
    used = " ".join(f"{swatch(i)}<bdi>{escaped(runs[i]['label'])}</bdi>" for i in users)
    explanation = loss["explain"]
    if explanation is None:
        why = (
            "The files of the run do not say which loss it was trained with."
            if loss["spec"] is None
            else "This loss cannot be explained; see the notes on the data."
        )
        return (
            f'<div class="card"><h3>{escaped(loss["name"])}</h3><p>{used}</p><p '
            f'class="quiet">{why}</p></div>'
        )
    formula = "\n".join(f"{line['name']} = {line['expression']}" for line in explanation["formula"])
    words = "".join(
        f"<dt>{escaped(slot)}<dd>{escaped(text)}." for slot, text in explanation["words"].items()
    )
    none = _no_gradient(explanation["zero_gradient"])
    numbers = _rows([(n["where"], str(n["value"]), n["source"]) for n in explanation["numbers"]])
    traps = "".join(f"<li>{escaped(trap['text'])}" for trap in explanation["traps"])
    preset = f"preset {explanation['preset']}" if explanation["preset"] else ""
    title = " · ".join(filter(None, (preset, explanation["paper"])))
    heading = f"<h3>{escaped(explanation['title'])}</h3>"
    return f"""<div class="card loss">{heading}\
<p>{used} <span class="quiet">{escaped(title)}</span></p>
<pre dir="ltr">{escaped(formula)}</pre><dl>{words}</dl>
{_folded("Which tokens get no gradient", none) if none else ""}
{_folded("Every number and where it comes from", f"<table>{numbers}</table>")}
{_folded("Traps", f"<ul>{traps}</ul>") if traps else ""}
{_folded("All of it as text", f'<pre dir="ltr">{escaped(loss["text"])}</pre>')}</div>"""


def _no_gradient(zero: Mapping[str, Any]) -> str:
    """The conditions of `explain`: those of a single token, and those of its group."""
    parts = []
    if zero["alone"]:
        parts += [
            "<p>Where one of these holds, the policy term gives a token exactly none:</p>",
            _conditions(zero["alone"]),
        ]
    if zero["together"]:
        parts += [
            f"<p>And where every token of its {escaped(zero['group'])} meets one of these:</p>",
            _conditions(zero["together"]),
        ]
    if parts and zero["still_moved_by"]:
        parts.append(f"<p>{escaped(zero['still_moved_by'])}</p>")
    return "".join(parts)


def _conditions(conditions: Iterable[Mapping[str, str]]) -> str:
    return f"<table>{_rows([(c['expression'], c['meaning']) for c in conditions])}</table>"


def _rows(rows: Iterable[Sequence[str]]) -> str:
    return "".join(
        f"<tr><th scope=row><code>{escaped(row[0])}</code>"
        + "".join(f"<td>{escaped(v)}" for v in row[1:])
        for row in rows
    )


def _folded(title: str, body: str) -> str:
    return f'<details><summary>{escaped(title)}</summary><div class="wide">{body}</div></details>'


def settings(data: Mapping[str, Any], name: str) -> str:
    """The settings of all runs side by side: those that differ first, then those that were
    changed, and the complete list folded. A value that is the default is marked.
    """
    runs = data["runs"]
    tables = [flat(run[name]) for run in runs]
    defaults = [flat(run["defaults"]) if name == "config" else {} for run in runs]
    keys = dict.fromkeys(key for table in tables for key in table)
    if not keys:
        return '<p class="quiet">None was recorded.</p>'
    rows = {key: [table.get(key) for table in tables] for key in keys}
    differing = [row["key"] for row in data["differences"][name]]
    changed = [
        key
        for key, values in rows.items()
        if key not in differing
        and any(key in usual and usual[key] != v for usual, v in zip(defaults, values, strict=True))
    ]
    parts = []
    if len(runs) > 1:
        parts.append(
            f"<h3>Different</h3>{_table(runs, rows, differing, defaults)}"
            if differing
            else '<p class="quiet">The same in all runs.</p>'
        )
    if changed:
        parts.append(f"<h3>Set by hand</h3>{_table(runs, rows, changed, defaults)}")
    complete = _table(runs, rows, keys, defaults)
    return complete if not parts else "".join(parts) + _folded(f"All {len(keys)}", complete)


def _table(
    runs: Sequence[Mapping[str, Any]],
    rows: Mapping[str, Sequence[str | None]],
    keys: Iterable[str],
    defaults: Sequence[Mapping[str, str]],
) -> str:
    head = "".join(
        f"<th scope=col>{swatch(i)}<bdi>{escaped(run['label'])}</bdi>" for i, run in enumerate(runs)
    )
    body = "".join(
        f"<tr><th scope=row>{escaped(key)}"
        + "".join(
            _cell(value, key in usual and usual[key] == value)
            for value, usual in zip(rows[key], defaults, strict=True)
        )
        for key in keys
    )
    return (
        '<div class="wide"><table '
        f'class="settings"><thead><tr><th>{head}</thead><tbody>{body}</tbody></table></div>'
    )


def _cell(value: str | None, is_default: bool) -> str:
    mark = ' <span class="quiet">(default)</span>' if is_default else ""
    return f"<td><bdi>{'–' if value is None else escaped(value)}</bdi>{mark}"


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
