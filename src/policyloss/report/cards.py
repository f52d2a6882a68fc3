"""The parts of the page that need no script: an overview of the runs, losses, settings."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from policyloss.report.compare import flat
from policyloss.report.text import duration, escaped, number

_STATES = {
    "finished": "finished",
    "running": "still running",
    "stopped": "stopped early",
    "unknown": "",
}


_COLUMNS = ("Loss", "Model", "Task", "Held-out accuracy", "Reward", "Steps", "Time", "Tokens")


def swatch(index: int) -> str:
    """The mark in a run's colour."""
    return f'<i class="swatch run{index % 8}"></i>'


def overview(runs: Sequence[Mapping[str, Any]]) -> str:
    """One row for each run: what it trained, with what, how far, and how well it ended."""
    head = "".join(f"<th scope=col>{name}" for name in ("Run", *_COLUMNS))
    rows = "".join(_overview_row(i, run) for i, run in enumerate(runs))
    return (
        '<div class="wide"><table class="runs '
        f'stacked"><thead><tr>{head}</thead><tbody>{rows}</tbody></table></div>'
    )


def _overview_row(index: int, run: Mapping[str, Any]) -> str:
    s = run["summary"]
    steps = number(s["steps"]) + (
        f" of {number(s['planned_steps'])}" if s["planned_steps"] not in (None, s["steps"]) else ""
    )
    state = _STATES[s["state"]]
    cells = (
        f"<b>{escaped(run['loss']['name'])}</b>",
        escaped(s["model"] or "–"),
        escaped(s["task"] or "–"),
        _change(s["held_out"], share=True),
        _change(s["reward"]),
        f'<span>{steps} <span class="state {s["state"]}">{state}</span></span>',
        duration(s["seconds"]),
        number(s["tokens"]),
    )
    name = (
        "<th scope=row "
        f'title="{escaped(run["path"])}">{swatch(index)}<bdi>{escaped(run["label"])}</bdi>'
    )
    named_cells = zip(_COLUMNS, cells, strict=True)
    return f"<tr>{name}" + "".join(f'<td data-name="{c}">{cell}' for c, cell in named_cells)


def _change(change: Mapping[str, Any] | None, *, share: bool = False) -> str:
    if change is None:
        return '<span class="quiet">not measured</span>'
    first, last = (
        f"{100 * v:.1f} %" if share else number(v) for v in (change["first"], change["last"])
    )
    where = (
        f"step {change['first_step']} → step {change['last_step']}; best {number(change['best'])}"
    )
    return (
        f'<span class="change" title="{where}"><span class="quiet">{first} →</span> '
        f"<b>{last}</b></span>"
    )


def notes(runs: Sequence[Mapping[str, Any]]) -> str:
    """What was missing or odd in a run; "" if nothing was."""
    items = [(i, run["label"], note) for i, run in enumerate(runs) for note in run["notes"]]
    if not items:
        return ""
    lines = "".join(
        f"<li>{swatch(i)}<bdi>{escaped(label)}</bdi>: {escaped(note)}" for i, label, note in items
    )
    opened = " open" if len(items) < 6 else ""
    return (
        f'<details class="notes"{opened}><summary>Notes on the data '
        f"({len(items)})</summary><ul>{lines}</ul></details>"
    )


def health(runs: Sequence[Mapping[str, Any]]) -> str:
    """What the doctor says of each run that has enough steps; "" if none has."""
    lines, count = [], 0
    for i, run in enumerate(runs):
        name = f"<li>{swatch(i)}<bdi>{escaped(run['label'])}</bdi>: "
        count += len(run["health"])
        for row in run["health"]:
            since = f" from step {row['step']}" if row["step"] else ""
            lines.append(
                f"{name}<b>{escaped(row['cause'])}</b>{since}: {escaped(row['evidence'])}."
                f"<br>Remedy: {escaped(row['remedy'])}"
            )
        if run["judged_steps"] and not run["health"]:
            lines.append(f"{name}no symptom in {run['judged_steps']} steps")
    if not lines:
        return ""
    title = f"{count or 'no'} symptom{'s' if count > 1 else ''}"
    items = "".join(lines)
    return (
        f'<details class="notes" open><summary>Health: {title}</summary><ul>{items}</ul></details>'
    )


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
        why = "This loss cannot be explained; see the notes on the data."
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
    """The settings of all runs side by side: differences visible, the complete list folded."""
    runs = data["runs"]
    tables = [flat(run[name]) for run in runs]
    keys = dict.fromkeys(key for table in tables for key in table)
    if not keys:
        return '<p class="quiet">None was recorded.</p>'
    differing = _table(runs, [(d["key"], d["values"]) for d in data["differences"][name]])
    same = '<p class="quiet">The same in all runs.</p>' if len(runs) > 1 else ""
    complete = _table(runs, [(key, [table.get(key) for table in tables]) for key in keys])
    return (
        complete if len(runs) == 1 else (differing or same) + _folded(f"All {len(keys)}", complete)
    )


def _table(
    runs: Sequence[Mapping[str, Any]], rows: Sequence[tuple[str, Sequence[str | None]]]
) -> str:
    if not rows:
        return ""
    head = "".join(
        f"<th scope=col>{swatch(i)}<bdi>{escaped(run['label'])}</bdi>" for i, run in enumerate(runs)
    )
    body = "".join(
        f"<tr><th scope=row>{escaped(key)}"
        + "".join(f"<td><bdi>{'–' if v is None else escaped(v)}</bdi>" for v in values)
        for key, values in rows
    )
    return (
        '<div class="wide"><table '
        f'class="settings"><thead><tr><th>{head}</thead><tbody>{body}</tbody></table></div>'
    )
