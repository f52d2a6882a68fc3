"""The page of a loss on the site: the generated page of the preset, with its formula typeset, its
curves, and its evidence.
"""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

import policyloss as pl
from docs.evidence_page import PRESETS as ALL_PRESETS
from docs.evidence_page import by_preset, good, options, spread
from docs.generate import BENCHMARKS, ROOT, preset_page
from docs.markdown import GENERATED, fenced, join, table
from docs.site import mathml
from docs.site.curves import OLD_LOGP, curves, has_curve

FIGURES = "losses/figures"


def family(name: str) -> str:
    """The caption above the loss, chosen by the tensors that it reads."""
    spec = pl.preset(name)
    if {"teacher_logp", "divergence"} & set(spec.reads) or "opd" in name:
        return "With a teacher"
    if spec.correction or "rollout_logp" in spec.reads:
        return "For another engine or stale data"
    return "A ratio per token" if isinstance(spec.ratio, pl.TokenRatio) else "A ratio per sequence"


def plain_page(name: str) -> str:
    """The page in plain Markdown: the repository's page and the evidence."""
    page, elsewhere, after = preset_page(pl.explain(name)).partition("## Elsewhere\n")
    return page + join(evidence(name)) + "\n" + elsewhere + after


def loss_page(name: str, plain: str) -> tuple[str, dict[str, str]]:
    """The page for Sphinx, made from the plain one, and its drawings by their paths on the site."""
    explanation = pl.explain(name)
    text = fenced(str(explanation.formula), "text")
    typeset = join(
        f'<div class="formula">{mathml.formula(explanation.formula.lines)}</div>',
        mathml.symbols(explanation.formula.lines),
        ":::{dropdown} The same as text, which a test evaluates",
        text,
        ":::",
    ).strip("\n")
    # A search for the name finds this page first, and not the many that mention it.
    entry = f"```{{index}} ! {name.replace('_', ' ')}\n```"
    page = plain.replace(GENERATED, entry).replace(text, typeset)
    if not has_curve(explanation.spec):
        return page, {}
    picture = f"![Loss and push of one token over the ratio](figures/{name}.svg)"
    before, heading, after = page.partition("## Numbers\n")
    play = f'<p><a href="../explorer.html#loss={name}">Play with it in the explorer.</a></p>'
    page = join(before, "## Curves", picture, caption(explanation.spec), play, heading + after)
    return page, {f"{FIGURES}/{name}.svg": curves(name)}


def caption(spec: pl.LossSpec) -> str:
    """The caption of the drawing."""
    others = [name for name in spec.reads if name not in ("old_logp", "entropy")]
    agree = f" and {' and '.join(f'`{name}`' for name in others)}" if others else ""
    text = (
        f"One sequence of one token, whose `old_logp`{agree} is {OLD_LOGP:g} while `logp` moves. "
        "Where the push is zero, the token no longer learns."
    )
    if spec.needs_statistics:
        text += " Numbers of the whole step are here those of the one token."
    return text


@lru_cache(maxsize=1)
def _runs() -> tuple[float, dict[str, list[dict[str, Any]]]]:
    path = Path(ROOT, BENCHMARKS, "evidence.json")
    if not path.is_file():
        return 0.0, {}
    data = json.loads(path.read_text(encoding="utf-8"))
    return data["goal"], by_preset(good(data)[ALL_PRESETS])


def evidence(name: str) -> str:
    """The preset's results on the built-in task."""
    goal, presets = _runs()
    runs = presets.get(name, [])
    if not runs:
        return "## What it learned\n\nNo run of this loss has been recorded yet."
    steps = [run["to_goal"]["steps"] if run["to_goal"] else None for run in runs]
    heading = ["run with", "seeds", "accuracy before", "accuracy after", f"steps to {goal}"]
    row = [
        options(runs[0]),
        str(len(runs)),
        spread([run["start"] for run in runs], ".2f", only_median=True),
        spread([run["end"] for run in runs], ".3f"),
        spread(steps, ".0f"),
    ]
    about = (
        "Held-out accuracy of `policyloss train` on the built-in task, sorting digits: the median "
        "over the seeds, and the range in brackets ([all losses and how they were "
        "run](../evidence.md))."
    )
    return join("## What it learned", about, table(heading, [row]))
