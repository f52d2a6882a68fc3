"""The result as one HTML file with its styles, scripts and data; the page makes no request."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate, islice
from typing import Any

import torch
from torch import Tensor

from policyloss.catalogue import PRESETS, presets_equal_to
from policyloss.errors import visible
from policyloss_lab.completions import BRANCHES
from policyloss_lab.limits import NOTE_LENGTH, NOTES, TEXT_LENGTH, cut
from policyloss_lab.report.markup import asset, document, escape
from policyloss_lab.whatif.outcome import Outcome
from policyloss_lab.whatif.result import YOURS, WhatIf
from policyloss_lab.whatif.tokens import StoredTokens

SHOWN_TOKENS = 4_000  # tokens with their gradient under every loss


def page(result: WhatIf, title: str) -> str:
    """The page of a result. title: the source of the tokens."""
    table = _table(result) + _refusals(result)
    body = f"""<header><h1>What if</h1><p><bdi>{escape(title)}</bdi>: {result.about}.</p>
{_verdict(result)}{_notes(result.notes)}</header>
<main>{asset("whatif/whatif.html").replace("{table}", table)}</main>"""
    assets = ("report/page.css", "whatif/whatif.css", "report/draw.js", "whatif/whatif.js")
    return document(f"{escape(title)} · what if", body, page_data(result), assets)


def _verdict(result: WhatIf) -> str:
    if result.outcomes[0].name != YOURS:
        return ""
    pairs = result.problems()
    items = "".join(f"<li><b>{escape(problem)}</b><br>{escape(cure)}" for problem, cure in pairs)
    kind, mark = ("worse", "!") if items else ("solved", "✓")
    sentence = "Your loss has a problem on these tokens." if items else result.verdict()[0]
    return (
        f'<div class="card" id="verdict"><p class="verdict {kind}"><i>{mark}</i> {sentence}</p>'
        f"{f'<ul>{items}</ul>' if items else ''}</div>"
    )


def _notes(notes: Sequence[str]) -> str:
    items = "".join(f"<li>{escape(cut(note, NOTE_LENGTH))}" for note in notes[:NOTES])
    if not items:
        return ""
    return f'<details class="notes" open><summary>Notes</summary><ul>{items}</ul></details>'


def _table(result: WhatIf) -> str:
    columns, rows = result.table()
    head = "".join(
        f'<th scope=col><button type="button" title="{escape(column.meaning)}">'
        f"{escape(column.title)}</button>"
        for column in columns
    )
    body = ""
    for outcome, (name, *numbers) in zip(result.outcomes, rows, strict=True):
        title = escape(_title(outcome.name, outcome.spec))
        body += f'<tr><th scope=row title="{title}">{escape(name)}'
        body += "".join(f"<td>{escape(x)}" for x in numbers)
    table = f"<table><thead><tr>{head}</thead><tbody>{body}</tbody></table>"
    meanings = [(column.title, column.meaning) for column in columns]
    return f'<div class="wide side">{table}</div>' + _list_items("The columns", meanings)


def _refusals(result: WhatIf) -> str:
    known = result.not_tried().items()
    reasons = [(", ".join(names), cut(why, NOTE_LENGTH)) for why, names in known]
    return _list_items(f"Not tried ({len(result.refused)})", reasons) if reasons else ""


def _list_items(title: str, pairs: Sequence[tuple[str, str]]) -> str:
    items = "".join(f"<dt>{escape(name)}<dd>{escape(text)}" for name, text in pairs)
    return f"<details><summary>{title}</summary><dl>{items}</dl></details>"


def _title(name: str, spec: Any) -> str:
    """The name of a loss in words."""
    if name in PRESETS:
        return PRESETS[name].title
    return ", ".join(p.title for p in presets_equal_to(spec)[:1]) or "a loss of your own"


def page_data(result: WhatIf) -> dict[str, Any]:
    """The data that the script draws. Tokens are listed up to about `SHOWN_TOKENS`."""
    lengths: list[int] = result.tokens.lengths.tolist()
    shown = sum(end <= max(SHOWN_TOKENS, lengths[0]) for end in accumulate(lengths))
    matrices = {"tokens": result.by_token.cosine}
    if result.by_model is not None:
        matrices[result.through] = result.by_model.cosine
    pairs = zip(result.outcomes, result.rows(), strict=True)
    return {
        "losses": [_loss_data(outcome, row, lengths[:shown]) for outcome, row in pairs],
        "sequences": _sequences(result.tokens, lengths[:shown]),
        "left_out": len(lengths) - shown,
        "cosine": {name: round_numbers(matrix.tolist(), 3) for name, matrix in matrices.items()},
        "branch_codes": list(BRANCHES),
        "branches": [{"name": name, "meaning": meaning} for name, meaning in BRANCHES.values()],
    }


def _loss_data(outcome: Outcome, row: dict[str, Any], lengths: list[int]) -> dict[str, Any]:
    sizes = outcome.gradient[: sum(lengths)].abs()
    return {
        "name": outcome.name,
        "title": _title(outcome.name, outcome.spec),
        **round_numbers({name: row[name] for name in ("norm", "mass")}),
        "change": round_numbers(row["change"][: len(lengths)]),
        "push": round_numbers(_split(-outcome.gradient, lengths)),
        "scale": round_numbers(float(sizes.quantile(0.98)) if sizes.numel() else 1.0),
        "branch": _split(outcome.branch, lengths),
    }


def _sequences(tokens: StoredTokens, lengths: list[int]) -> list[dict[str, Any]]:
    t = tokens.inputs
    columns = {"logp": t.logp, "advantage": t.advantages, "mask": t.mask.double()}
    if t.old_logp is not None:
        columns["ratio"] = (t.logp - t.old_logp).exp()
    lists = {name: round_numbers(_split(x, lengths)) for name, x in columns.items()}
    texts = iter(tokens.texts or [f"#{i + 1}" for n in lengths for i in range(n)])
    prompts = tokens.prompt_texts or [""] * len(lengths)
    rewards = (
        [None] * len(lengths) if tokens.rewards is None else round_numbers(tokens.rewards.tolist())
    )
    return [
        {
            "texts": [visible(text) for text in islice(texts, length)],
            "prompt": visible(cut(prompts[i], TEXT_LENGTH)),
            "reward": rewards[i],
            "ratio": None,
            **{name: values[i] for name, values in lists.items()},
        }
        for i, length in enumerate(lengths)
    ]


def _split(x: Tensor, lengths: list[int]) -> list[list[float]]:
    return [part.tolist() for part in torch.split(x[: sum(lengths)], lengths)]


def round_numbers(x: Any, digits: int = 4) -> Any:
    """`x` with its numbers, also inside lists and mappings, rounded for strict JSON."""
    if isinstance(x, dict):
        return {name: round_numbers(value, digits) for name, value in x.items()}
    if isinstance(x, list):
        return [round_numbers(value, digits) for value in x]
    return None if x is None or not math.isfinite(x) else float(f"{x:.{digits}g}")
