"""The result as one HTML file with its styles, scripts and data inside. It makes no request."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from policyloss.catalogue import PRESETS, presets_equal_to
from policyloss.errors import visible
from policyloss_lab.completions import BRANCHES
from policyloss_lab.limits import NOTE_LENGTH, NOTES, TEXT_LENGTH, cut
from policyloss_lab.report.markup import asset, content_policy, escaped, island
from policyloss_lab.whatif.result import YOURS, WhatIf

SHOWN_TOKENS = 4_000  # with their weights under every loss
_OURS = "policyloss_lab.whatif"


def page(result: WhatIf, title: str) -> str:
    """The page of a result. title: what the tokens are from."""
    style = asset("policyloss_lab.report", "page.css") + asset(_OURS, "whatif.css")
    scripts = (asset("policyloss_lab.report", "draw.js"), asset(_OURS, "whatif.js"))
    script = "(() => {\n" + "\n".join(scripts) + "})();"
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8">\
<meta http-equiv="Content-Security-Policy" content="{content_policy(style, script)}">
<meta name="viewport" content="width=device-width, initial-scale=1">\
<title>{escaped(title)} · what if</title>
<style>{style}</style></head><body>
<header><h1>What if</h1><p><bdi>{escaped(title)}</bdi>: {result.about}.</p>
{_verdict(result)}{_notes(result.notes)}</header>
<main>{asset(_OURS, "whatif.html").replace("{table}", _table(result) + _refused(result))}</main>
<script type="application/json" id="data">{island(page_data(result))}</script>
<script>{script}</script></body></html>
"""


def _verdict(result: WhatIf) -> str:
    if result.outcomes[0].name != YOURS:
        return ""
    items = "".join(
        f"<li><b>{escaped(problem)}</b><br>{escaped(cure)}" for problem, cure in result.problems()
    )
    kind, mark = ("worse", "!") if items else ("solved", "✓")
    sentence = "Your loss has a problem on these tokens." if items else result.verdict()[0]
    return (
        f'<div class="card" id="verdict"><p class="verdict {kind}"><i>{mark}</i> {sentence}</p>'
        f"{f'<ul>{items}</ul>' if items else ''}</div>"
    )


def _notes(notes: Sequence[str]) -> str:
    items = "".join(f"<li>{escaped(cut(note, NOTE_LENGTH))}" for note in notes[:NOTES])
    return (
        f'<details class="notes" open><summary>Notes</summary><ul>{items}</ul></details>'
        if items
        else ""
    )


def _table(result: WhatIf) -> str:
    columns, rows = result.table()
    head = "".join(
        f'<th scope=col><button type="button" title="{escaped(column.meaning)}">'
        f"{escaped(column.title)}</button>"
        for column in columns
    )
    body = ""
    for outcome, (name, *numbers) in zip(result.outcomes, rows, strict=True):
        title = escaped(_title(outcome.name, outcome.spec))
        body += f'<tr><th scope=row title="{title}">{escaped(name)}'
        body += "".join(f"<td>{escaped(x)}" for x in numbers)
    table = f"<table><thead><tr>{head}</thead><tbody>{body}</tbody></table>"
    meanings = [(column.title, column.meaning) for column in columns]
    return f'<div class="wide side">{table}</div>' + _listed("The columns", meanings)


def _refused(result: WhatIf) -> str:
    reasons = [
        (", ".join(names), cut(why, NOTE_LENGTH)) for why, names in result.not_tried().items()
    ]
    return _listed(f"Not tried ({len(result.refused)})", reasons) if reasons else ""


def _listed(title: str, pairs: Sequence[tuple[str, str]]) -> str:
    items = "".join(f"<dt>{escaped(name)}<dd>{escaped(text)}" for name, text in pairs)
    return f"<details><summary>{title}</summary><dl>{items}</dl></details>"


def _title(name: str, spec: Any) -> str:
    """What a loss is called in words."""
    if name in PRESETS:
        return PRESETS[name].title
    return ", ".join(p.title for p in presets_equal_to(spec)[:1]) or "a loss of your own"


def page_data(result: WhatIf) -> dict[str, Any]:
    """What the script draws. Lists of tokens end where the page would become large."""
    tokens, t = result.tokens, result.tokens.inputs
    lengths: list[int] = tokens.lengths.tolist()
    shown = 0
    while shown < len(lengths) and sum(lengths[: shown + 1]) <= max(SHOWN_TOKENS, lengths[0]):
        shown += 1
    lengths, count = lengths[:shown], sum(lengths[:shown])

    def split(x: Tensor) -> list[list[float | None]]:
        return [[rounded(v) for v in part.tolist()] for part in torch.split(x[:count], lengths)]

    texts = tokens.texts or [f"#{i + 1}" for n in lengths for i in range(n)]
    starts = [sum(lengths[:i]) for i in range(shown)]
    ratio = None if t.old_logp is None else split((t.logp - t.old_logp).exp())
    logp, advantages, mask = split(t.logp), split(t.advantages), split(t.mask.double())
    sequences = [
        {
            "texts": [visible(text) for text in texts[starts[i] : starts[i] + n]],
            "prompt": visible(cut(tokens.prompt_texts[i], TEXT_LENGTH))
            if tokens.prompt_texts
            else "",
            "reward": None if tokens.rewards is None else rounded(float(tokens.rewards[i])),
            "logp": logp[i],
            "ratio": None if ratio is None else ratio[i],
            "advantage": advantages[i],
            "mask": mask[i],
        }
        for i, n in enumerate(lengths)
    ]
    losses = [
        {
            "name": outcome.name,
            "title": _title(outcome.name, outcome.spec),
            "gain": rounded(row["gain"]),
            "norm": rounded(row["norm"]),
            "mass": {
                kind: {name: rounded(x) for name, x in shares.items()}
                for kind, shares in row["mass"].items()
            },
            "change": [rounded(x) for x in row["change"][:shown]],
            "push": split(-outcome.gradient),
            "scale": rounded(
                float(outcome.gradient[:count].abs().quantile(0.98)) if count else 1.0
            ),
            "branch": [part.tolist() for part in torch.split(outcome.branch[:count], lengths)],
        }
        for outcome, row in zip(result.outcomes, result.rows(), strict=True)
    ]
    matrices = {"tokens": result.by_token.cosine}
    if result.by_model is not None:
        matrices[result.through] = result.by_model.cosine
    return {
        "losses": losses,
        "sequences": sequences,
        "left_out": tokens.lengths.shape[0] - shown,
        "cosine": {
            name: [[rounded(x, 3) for x in row] for row in m.tolist()]
            for name, m in matrices.items()
        },
        "branch_codes": list(BRANCHES),
        "branches": [{"name": name, "meaning": meaning} for name, meaning in BRANCHES.values()],
    }


def rounded(x: float | None, digits: int = 4) -> float | None:
    """A number with so many digits, as strict JSON takes it."""
    return None if x is None or not math.isfinite(x) else float(f"{x:.{digits}g}")
