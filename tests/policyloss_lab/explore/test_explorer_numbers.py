"""The explorer computes in a real browser what `policy_loss` computes: values and gradients of
every preset and of random compositions of parts.
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from formula_evaluator import Evaluator
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from strategies import specs
from walk import walked

import policyloss as pl
from cases import PRESETS, Batch, make_batch, run, unweighted
from policyloss.explanations.formula import Formula, FormulaLine
from policyloss.explanations.traits import elsewhere
from policyloss.parts.data import VARIANTS

POINTS = 200
LOGP = ("logp", "old_logp", "rollout_logp", "ref_logp", "teacher_logp")
SEEDED = pl.preset("clip_cov", seed=7, fraction=0.1, cov_low=0.1)
TOLERANCE = 1e-9  # relative, or absolute below 1


def as_step(batch: Batch) -> dict[str, Any]:
    """The valid tokens of a batch, as the page takes them."""
    row, column = batch.mask.nonzero(as_tuple=True)
    tensors = {
        name: getattr(batch, name)[batch.mask].tolist()
        for name in (*LOGP, "entropy", "divergence", "advantages", "ages")
    }
    group = batch.group_ids[row]
    return {**tensors, "row": row.tolist(), "column": column.tolist(), "group": group.tolist()}


def assert_computes(page: Any, spec: pl.LossSpec, batches: list[Batch]) -> None:
    """One loss per batch, and the gradients of each of its tokens."""
    batches = list(map(unweighted, batches))  # as on the page
    results = page.evaluate(
        "([spec, steps]) => steps.map((step) => policyloss.evaluate(spec, step))",
        [spec.to_dict(), [as_step(batch) for batch in batches]],
    )
    for batch, result in zip(batches, results, strict=True):
        expected = run(spec, batch)
        carried = [a + 4 * b for a, b in zip(result["entropy"], result["divergence"], strict=True)]
        for values, wanted in (
            ([result["loss"]], expected.loss[None]),
            (result["logp"], expected.dlogp[batch.mask]),
            (carried, expected.dentropy[batch.mask]),
        ):
            torch.testing.assert_close(
                torch.tensor(values, dtype=torch.float64),
                wanted,
                rtol=TOLERANCE,
                atol=TOLERANCE,
                msg=lambda text: f"{spec}\n{text}",
            )


def batches(first: int, points: int = POINTS) -> list[Batch]:
    """Small random steps with at least this many valid tokens together."""
    steps: list[Batch] = []
    while sum(int(batch.mask.sum()) for batch in steps) < points:
        steps.append(make_batch(first + len(steps), rows=7, width=8, spread=0.5))
    return steps


@walked("name", [*PRESETS, "a seed"])
def test_the_browser_computes_the_numbers_of_pytorch(page: Any, name: str) -> None:
    assert_computes(page, PRESETS.get(name, SEEDED), batches(first=1000))


def known_to_the_page(spec: pl.LossSpec) -> bool:
    """Without the parts of frameworks, of which the page has no formula."""
    return all(type(part) in VARIANTS[slot] for slot in VARIANTS for part in spec.parts_in(slot))


def any_loss() -> st.SearchStrategy[pl.LossSpec]:
    return specs().filter(known_to_the_page)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(spec=any_loss(), seed=st.integers(0, 999))
@example(pl.LossSpec(correction=pl.Stale(2, decay=0.7)), 0)
@example(pl.LossSpec(pl.TokenRatio("current"), pl.Clip(0, math.inf)), 0)
def test_any_composition_is_computed_and_written_down(
    page: Any, spec: pl.LossSpec, seed: int
) -> None:
    """Numbers and gradients; the printed formula, run by an evaluator that shares no code with the
    page; the Python, run; and the names in frameworks.
    """
    batch = unweighted(make_batch(seed, rows=5, width=6, spread=0.5))
    assert_computes(page, spec, [batch])
    data = spec.to_dict()
    assert pl.LossSpec.from_dict(page.evaluate("(spec) => policyloss.check(spec)", data)) == spec
    lines = [
        FormulaLine(*text.split(" = ", 1))
        for text in page.evaluate("(spec) => policyloss.formula(spec)", data)
    ]
    loss = Evaluator(Formula(tuple(lines)), batch).names["loss"].item()
    assert loss == pytest.approx(run(spec, batch).loss.item(), rel=TOLERANCE, abs=TOLERANCE)
    scope: dict[str, Any] = {}
    exec(page.evaluate("(spec) => policyloss.python(spec)", data), scope)
    assert scope["spec"] == spec
    names = page.evaluate("(spec) => policyloss.elsewhere(spec)", data)
    assert names == [[entry.part, entry.what] for entry in elsewhere(spec)]


# One-line mistakes in the evaluator, and the preset whose numbers must notice.
MISTAKES = {
    "a clip keeps its slope beyond its bounds": (
        "[x >= a && x <= b ? 1 : 0, 0, 0]",
        "[1, 0, 0]",
        "ppo",
    ),
    "a tie gives both sides the slope": ("(a === b ? 0.5 : 0)", "(a === b ? 1 : 0)", "ppo"),
    "a gradient is not stopped": ("sg: (x) => leaf(x.value)", "sg: (x) => x", "cispo"),
    "a mean sends its slope back as a sum": ("slope / by[i])", "slope)", "gspo"),
    "turns are sequences": (
        "overKeys(runs(), x, true)",
        "overKeys(step.row, x, true)",
        "gspo_turn",
    ),
    "a rank counts from the smallest": ("a < b ? 1 : a > b ? -1 : 0", "a < b ? -1 : 1", "kl_cov"),
    "a draw ignores its seed": ("BigInt(seed) * 0x9e3779b9n", "0n", "clip_cov"),
}


@pytest.mark.slow
@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_comparison_notices_a_mistake(
    browser: Any, explorer_html: str, tmp_path: Path, mistake: str
) -> None:
    old, new, name = MISTAKES[mistake]
    assert explorer_html.count(old) == 1
    file = tmp_path / "wrong.html"
    unprotected = re.sub(r"<meta http-equiv=[^>]*>", "", explorer_html)
    file.write_text(unprotected.replace(old, new), encoding="utf-8")
    wrong = browser.new_page()
    wrong.goto(file.as_uri())
    spec = SEEDED if name == "clip_cov" else PRESETS[name]
    with pytest.raises(AssertionError):
        assert_computes(wrong, spec, batches(first=1000))
    wrong.close()
