"""The sections of the page that need no script: verdict, runs, health, notes, losses, settings."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from policyloss_lab.report.compare import flat, group_equal
from policyloss_lab.report.markup import duration, escape, in_sentence, number
from policyloss_lab.report.verdict import WORDS

_STATES = {"running": "still running", "stopped": "stopped early", "unknown": ""}


_DEFAULT = ' <span class="quiet">(default)</span>'
_UNKNOWN = ("–", "<b>unknown</b>")
_VERDICTS = 8  # sentences that are visible at once
_TALL = 12  # the table scrolls if it has more rows
_HEALTHY = 3  # runs without a symptom that have a line each
_SWATCHES = 6  # colours of runs that share a note
_MARKS = {"learns": "▲", "worse": "▼", "flat": "■", "solved": "✓", "early": "…", "unclear": "?"}


def swatch(index: int) -> str:
    """A mark in the colour of the run with this index."""
    return f'<i class="swatch run{index % 8}"></i>'


def _run(index: int, run: Mapping[str, Any]) -> str:
    """The mark and the label of a run."""
    return f"{swatch(index)}<bdi>{escape(run['label'])}</bdi>"


def _table(kind: str, head: str, rows: Iterable[str]) -> str:
    return f'<table class="{kind}"><thead><tr>{head}</thead><tbody>{"".join(rows)}</tbody></table>'


def verdict(data: Mapping[str, Any]) -> str:
    """Whether the runs learn: one sentence, and one for each setting if there are several runs."""
    runs, groups = data["runs"], data["groups"]
    if len(runs) == 1:
        title = _state_line(runs[0]["verdict"]["state"], runs[0]["verdict"]["sentence"])
        return f'<div id="verdict">{title}</div>'
    states = [run["verdict"]["state"] for run in runs]
    worst = next(state for state in ("worse", "flat", *WORDS) if state in states)
    total = _count_line(states, " runs")
    lines = [f"<li>{_group_verdict(runs, group)}" for group in groups]
    lines += [
        f"<li>{escape(in_sentence([runs[i]['label'] for i in same]))} coincide: every metric is "
        "the same at every step, so their lines lie on each other."
        for same in data["identical"]
    ]
    more = (
        f"<details><summary>{len(lines) - _VERDICTS} more</summary>"
        f"<ul>{''.join(lines[_VERDICTS:])}</ul></details>"
        if len(lines) > _VERDICTS
        else ""
    )
    title = _state_line(worst, f"{total[0].upper()}{total[1:]}.")
    return f'<div id="verdict">{title}<ul>{"".join(lines[:_VERDICTS])}</ul>{more}</div>'


def _state_line(state: str, text: str) -> str:
    mark = f'<i aria-hidden="true">{_MARKS[state]}</i>'
    return f'<p class="verdict {state}">{mark}{escape(text)}</p>'


def _count_line(states: Sequence[str], unit: str = "") -> str:
    counts = {WORDS[state].lower(): states.count(state) for state in WORDS if state in states}
    return "; ".join(f"{word}: {n} of {len(states)}{unit}" for word, n in counts.items())


def _group_verdict(runs: Sequence[Mapping[str, Any]], group: Mapping[str, Any]) -> str:
    """The verdict on a run, or on all seeds of one setting."""
    name = f"{swatch(group['runs'][0])}<b><bdi>{escape(group['label'])}</bdi></b>"
    inside = [runs[i]["verdict"] for i in group["runs"]]
    if len(inside) == 1:
        return f"{name}: {escape(inside[0]['sentence'])}"
    text = _count_line([verdict["state"] for verdict in inside])
    if end := group["end"]:
        share = end["metric"] == "held_out"
        what = "Held-out accuracy" if share else "Reward"
        mean, low, high = (_amount(end[key], share=share) for key in ("mean", "low", "high"))
        text += f". {what} at the end: {mean} on average, from {low} to {high}"
    return f"{name}: {escape(text)}."


def overview(runs: Sequence[Mapping[str, Any]]) -> str:
    """A table with one row per run and only columns with data."""
    table = [_overview_cells(run) for run in runs]
    known = [name for name in table[0] if any(cells[name] not in _UNKNOWN for cells in table)]
    head = "".join(f"<th scope=col>{name}" for name in ("Run", *known))
    rows = (
        f'<tr><th scope=row title="{escape(run["path"])}">{_run(i, run)}'
        + "".join(f'<td data-name="{name}">{cells[name]}' for name in known)
        for i, (run, cells) in enumerate(zip(runs, table, strict=True))
    )
    tall = " tall" if len(runs) > _TALL else ""
    return f'<div class="wide{tall}">{_table("runs stacked", head, rows)}</div>'


def _overview_cells(run: Mapping[str, Any]) -> dict[str, str]:
    """The cells of a run by the name of their column."""
    s = run["summary"]
    steps = number(s["steps"]) + (
        f" of {number(s['planned_steps'])}" if s["planned_steps"] not in (None, s["steps"]) else ""
    )
    state = _STATES.get(s["state"], s["state"])
    verdict = run["verdict"]["state"]
    shown = {**s, **run["levels"]}  # smoothed numbers, because one step is noisy
    return {
        "Verdict": f'<span class="verdict {verdict}"><i aria-hidden="true">{_MARKS[verdict]}</i>'
        f"{WORDS[verdict].lower()}</span>",
        "Loss": f"<b>{escape(run['loss']['name'])}</b>",
        "Model": escape(s["model"] or "–"),
        "Task": escape(s["task"] or "–"),
        "Held-out accuracy": _change(shown["held_out"], share=True),
        "Reward": _change(shown["reward"]),
        "Steps": f'<span>{steps} <span class="state {s["state"]}">{state}</span></span>',
        "Time": duration(s["seconds"]),
        "Tokens": number(s["tokens"]),
    }


def _change(change: Mapping[str, Any] | None, *, share: bool = False) -> str:
    if change is None:
        return '<span class="quiet">not measured</span>'
    first, last = (_amount(change[key], share=share) for key in ("first", "last"))
    over = change.get("over", 1)
    means = f"means of {over} steps, " if over > 1 else ""
    where = f"step {change['first_step']} → step {change['last_step']}"
    title = f"{means}{where}; best {number(change['best'])}"
    values = f'<span class="quiet">{first} →</span> <b>{last}</b>'
    return f'<span class="change" title="{title}">{values}</span>'


def _amount(value: float | int, *, share: bool) -> str:
    return f"{100 * value:.1f} %" if share else number(value)


def notes(runs: Sequence[Mapping[str, Any]]) -> str:
    """The notes about missing or odd data; "" if there are none."""
    items = shared_notes(runs)
    if not items:
        return ""
    lines = "".join(
        f"<li>{''.join(map(swatch, at[:_SWATCHES]))}<bdi>{escape(names)}</bdi>: {escape(note)}"
        for note, (names, at) in items.items()
    )
    opened = " open" if len(items) < 6 else ""
    return (
        f'<details class="notes"{opened}><summary>Notes on the data '
        f"({len(items)})</summary><ul>{lines}</ul></details>"
    )


def shared_notes(runs: Sequence[Mapping[str, Any]]) -> dict[str, tuple[str, list[int]]]:
    """Each note once, with the names and the indices of its runs."""
    places: dict[str, list[int]] = {}
    for i, run in enumerate(runs):
        for note in dict.fromkeys(run["notes"]):
            places.setdefault(note, []).append(i)
    return {note: (in_sentence([runs[i]["label"] for i in at]), at) for note, at in places.items()}


def health(runs: Sequence[Mapping[str, Any]]) -> str:
    """The symptoms of each run that has enough steps; "" if no run has enough."""
    lines, count, healthy = [], 0, []
    for i, run in enumerate(runs):
        name = f"<li>{_run(i, run)}: "
        count += len(run["health"])
        for row in run["health"]:
            since = f" from step {row['step']}" if row["step"] else ""
            lines.append(
                f"{name}<b>{escape(row['cause'])}</b>{since}: {escape(row['evidence'])}."
                f"<br>Remedy: {escape(row['remedy'])}"
            )
        if run["judged_steps"] and not run["health"]:
            healthy.append((run["label"], f"{name}no symptom in {run['judged_steps']} steps"))
    if len(healthy) > _HEALTHY:
        names = escape(in_sentence([label for label, _ in healthy]))
        lines.append(f"<li>No symptom in {len(healthy)} runs: {names}")
    else:
        lines += [line for _, line in healthy]
    if not lines:
        return ""
    title = f"{count or 'no'} symptom{'s' if count > 1 else ''}"
    head = f"<summary>Health: {title}</summary>"
    return f'<details class="notes" open>{head}<ul>{"".join(lines)}</ul></details>'


def losses(data: Mapping[str, Any]) -> str:
    """A card for each different loss, and the differences from the first."""
    runs = data["runs"]
    cards = "".join(_loss(runs, same) for same in group_equal([r["loss"]["spec"] for r in runs]))
    differ = "".join(_difference(d) for d in data["differences"]["loss"])
    return f'{differ}<div class="cards">{cards}</div>'


def _difference(difference: Mapping[str, Any]) -> str:
    a, b = (f"<bdi>{escape(difference[side])}</bdi>" for side in ("a", "b"))
    head = f"<th scope=col>Slot<th scope=col>{a}<th scope=col>{b}<th scope=col>What it means"
    rows = (
        f"<tr><th scope=row>{escape(change['slot'])}<td><code>{escape(change['a'])}</code>"
        f"<td><code>{escape(change['b'])}</code><td>{escape(change['meaning'])}"
        for change in difference["changes"]
    )
    extra = "".join(f"<p>{escape(note)}</p>" for note in difference["notes"])
    key = f'<p class="quiet">a is the loss of {a}, b that of {b}.</p>'
    table = _table("stacked", head, rows)
    return f'<div class="card"><h3>How the losses differ</h3>{key}{table}{extra}</div>'


def _loss(runs: Sequence[Mapping[str, Any]], users: Sequence[int]) -> str:
    loss = runs[users[0]]["loss"]
    used = " ".join(_run(i, runs[i]) for i in users)
    explanation = loss["explain"]
    if explanation is None:
        why = (
            "The files of the run do not name its loss."
            if loss["spec"] is None
            else "This loss cannot be explained; see the notes on the data."
        )
        return (
            f'<div class="card"><h3>{escape(loss["name"])}</h3><p>{used}</p><p '
            f'class="quiet">{why}</p></div>'
        )
    formula = "\n".join(f"{line['name']} = {line['expression']}" for line in explanation["formula"])
    slots = explanation["words"].items()
    words = "".join(f"<dt>{escape(slot)}<dd>{escape(text)}." for slot, text in slots)
    none = _no_gradient(explanation["zero_gradient"])
    numbers = _rows([(n["where"], str(n["value"]), n["source"]) for n in explanation["numbers"]])
    traps = "".join(f"<li>{escape(trap['text'])}" for trap in explanation["traps"])
    preset = f"preset {explanation['preset']}" if explanation["preset"] else ""
    title = " · ".join(filter(None, (preset, explanation["paper"])))
    heading = f"<h3>{escape(explanation['title'])}</h3>"
    return f"""<div class="card loss">{heading}\
<p>{used} <span class="quiet">{escape(title)}</span></p>
<pre dir="ltr">{escape(formula)}</pre><dl>{words}</dl>
{_fold("Which tokens get no gradient", none) if none else ""}
{_fold("Every number and where it comes from", f"<table>{numbers}</table>")}
{_fold("Traps", f"<ul>{traps}</ul>") if traps else ""}
{_fold("All of it as text", f'<pre dir="ltr">{escape(loss["text"])}</pre>')}</div>"""


def _no_gradient(zero: Mapping[str, Any]) -> str:
    """The conditions of `explain`: of a single token, and of its group."""
    titles = {
        "alone": "Where one of these holds, the policy term gives a token exactly none:",
        "together": f"And where every token of its {zero['group']} meets one of these:",
    }
    parts = [
        f"<p>{escape(title)}</p>"
        f"<table>{_rows([(c['expression'], c['meaning']) for c in zero[name]])}</table>"
        for name, title in titles.items()
        if zero[name]
    ]
    if parts and zero["still_moved_by"]:
        parts.append(f"<p>{escape(zero['still_moved_by'])}</p>")
    return "".join(parts)


def _rows(rows: Iterable[Sequence[str]]) -> str:
    return "".join(
        f"<tr><th scope=row><code>{escape(row[0])}</code>"
        + "".join(f"<td>{escape(v)}" for v in row[1:])
        for row in rows
    )


def _fold(title: str, body: str) -> str:
    return f'<details><summary>{escape(title)}</summary><div class="wide">{body}</div></details>'


def settings(data: Mapping[str, Any], name: str) -> str:
    """The settings of all runs side by side: differing settings first, then changed ones, then the
    complete list, folded. Defaults are marked.
    """
    runs = data["runs"]
    pairs = [(flat(run["defaults"]) if name == "config" else {}, flat(run[name])) for run in runs]
    keys = dict.fromkeys(key for _, table in pairs for key in table)
    if not keys:
        return '<p class="quiet">None was recorded.</p>'
    differing = [row["key"] for row in data["differences"][name]]
    changed = [
        key
        for key in keys
        if key not in differing
        and any(key in usual and usual[key] != table.get(key) for usual, table in pairs)
    ]
    head = "<th>" + "".join(f"<th scope=col>{_run(i, run)}" for i, run in enumerate(runs))

    def table(chosen: Iterable[str]) -> str:
        rows = (
            f"<tr><th scope=row>{escape(key)}"
            + "".join(_setting(table.get(key), usual.get(key)) for usual, table in pairs)
            for key in chosen
        )
        return f'<div class="wide">{_table("settings", head, rows)}</div>'

    parts = []
    if len(runs) > 1:
        parts.append(
            f"<h3>Different</h3>{table(differing)}"
            if differing
            else '<p class="quiet">The same in all runs.</p>'
        )
    if changed:
        parts.append(f"<h3>Set by hand</h3>{table(changed)}")
    return "".join(parts) + _fold(f"All {len(keys)}", table(keys)) if parts else table(keys)


def _setting(value: str | None, default: str | None) -> str:
    if value is None:
        return "<td><bdi>–</bdi>"
    return f"<td><bdi>{escape(value)}</bdi>{_DEFAULT if value == default else ''}"


def origins(runs: Sequence[Mapping[str, Any]]) -> str:
    """A table of the metrics with another name in the files of a run; "" if there are none."""
    renamed = [run for run in runs if run["names"]]
    names = sorted({name for run in renamed for name in run["names"]})
    if not names:
        return ""
    labels = [f"<bdi>{escape(run['label'])}</bdi>" for run in renamed]
    sources = [escape(run["source"]) for run in renamed]
    pairs = list(zip(labels, sources, strict=True))
    head = "<th scope=col>Here"
    head += "".join(f'<th scope=col title="{source}">{label}' for label, source in pairs)
    rows = (
        f"<tr><th scope=row><code>{escape(name)}</code>"
        + "".join(_origin(run["names"].get(name)) for run in renamed)
        for name in names
    )
    read = "".join(f"<li>{label}: {source}" for label, source in pairs)
    return (
        f"<p>These runs were read from other trainers' files:</p><ul>{read}</ul><details><summary>"
        f"{len(names)} metrics have another name in the files</summary>"
        f'<div class="wide">{_table("settings", head, rows)}</div></details>'
    )


def _origin(name: str | None) -> str:
    return "<td>–" if name is None else f"<td><code>{escape(name)}</code>"
