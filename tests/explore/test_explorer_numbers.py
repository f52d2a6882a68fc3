"""The explorer computes in a real browser what `policy_loss` computes: values and gradients of
every preset and of random compositions of parts.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from formula_evaluator import Evaluator
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from strategies import specs

import policyloss as pl
from cases import PRESETS, Batch, make_batch, run
from policyloss.explain.formula import Formula, Line
from policyloss.explain.traits import elsewhere
from policyloss.explore import explorer_page
from policyloss.parts.data import VARIANTS

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
sync_api = pytest.importorskip("playwright.sync_api")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs a Chromium")

POINTS = 200
LOGP = ("logp", "old_logp", "rollout_logp", "ref_logp", "teacher_logp")
TOLERANCE = 1e-9  # relative, or absolute below 1


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    file = tmp_path_factory.mktemp("explorer") / "explorer.html"
    file.write_text(explorer_page(), encoding="utf-8")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM)
        shown = browser.new_page()
        shown.goto(file.as_uri())
        yield shown
        browser.close()


def as_step(batch: Batch) -> dict[str, Any]:
    """The valid tokens of a batch, as the page takes them."""
    row, column = batch.mask.nonzero(as_tuple=True)
    tensors = {
        name: getattr(batch, name)[batch.mask].tolist()
        for name in (*LOGP, "entropy", "divergence", "advantages")
    }
    group = batch.group_ids[row]
    return {**tensors, "row": row.tolist(), "column": column.tolist(), "group": group.tolist()}


def assert_computes(page: Any, spec: pl.LossSpec, batches: list[Batch]) -> None:
    """One loss per batch, and the gradients of each of its tokens."""
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


@pytest.mark.parametrize("name", PRESETS)
def test_the_browser_computes_what_pytorch_computes(page: Any, name: str) -> None:
    assert_computes(page, PRESETS[name], batches(first=1000))


def known_to_the_page(spec: pl.LossSpec) -> bool:
    """Without the parts of frameworks, of which the page has no formula."""
    return all(type(part) in VARIANTS[slot] for slot in VARIANTS for part in spec.parts_in(slot))


def any_loss() -> st.SearchStrategy[pl.LossSpec]:
    return specs().filter(known_to_the_page)


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(spec=any_loss(), seed=st.integers(0, 999))
def test_any_composition_is_computed_and_written_down(
    page: Any, spec: pl.LossSpec, seed: int
) -> None:
    """Numbers and gradients; the printed formula, run by an evaluator that shares no code with the
    page; the Python, run; and the names in frameworks.
    """
    batch = make_batch(seed, rows=5, width=6, spread=0.5)
    assert_computes(page, spec, [batch])
    data = spec.to_dict()
    assert pl.LossSpec.from_dict(page.evaluate("(spec) => policyloss.check(spec)", data)) == spec
    lines = [
        Line(*text.split(" = ", 1))
        for text in page.evaluate("(spec) => policyloss.formula(spec)", data)
    ]
    loss = Evaluator(Formula(tuple(lines)), batch).names["loss"].item()
    assert loss == pytest.approx(run(spec, batch).loss.item(), rel=TOLERANCE, abs=TOLERANCE)
    scope: dict[str, Any] = {}
    exec(page.evaluate("(spec) => policyloss.python(spec)", data), scope)
    assert scope["spec"] == spec
    names = page.evaluate("(spec) => policyloss.elsewhere(spec)", data)
    assert names == [[entry.part, entry.what] for entry in elsewhere(spec)]
