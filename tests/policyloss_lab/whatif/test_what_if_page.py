"""The output of `what_if` for a reader: a verdict, one line for equal reasons, columns with names,
and a page that is laid out like the others.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import policyloss_lab as lab
from policyloss_lab.explore.page import explorer_page
from policyloss_lab.whatif import WhatIf
from policyloss_lab.whatif.page import page
from policyloss_lab.whatif.result import COLUMNS, UNKNOWN


def stored(spec: str | None = "gspo", drift: float = 0.3) -> WhatIf:
    """Six sequences of eight tokens, whose policy has drifted."""
    torch.manual_seed(0)
    old_logp = -torch.rand(6, 8)
    tokens = {
        "logp": old_logp + drift * torch.randn(6, 8),
        "old_logp": old_logp,
        "advantages": torch.tensor([1.0, -1.0, 0.5, -0.5, 0.0, 2.0]),
        "mask": torch.ones(6, 8, dtype=torch.bool),
    }
    return lab.what_if(tokens, spec=spec)


def test_the_text_has_a_verdict_and_a_legend() -> None:
    texts = {
        "wrong": (str(stored()), "Verdict\n  - "),
        "healthy": (str(stored("reinforce", 0.0)), "Verdict\n  Nothing is wrong with your loss"),
        "nobody's": (str(stored(None)), "Verdict\n  None: no loss of yours is among these."),
    }
    for name, (text, verdict) in texts.items():
        assert verdict in text, name
        head = next(line for line in text.splitlines() if line.startswith("loss  "))
        for column in COLUMNS[1:]:
            assert (f"- {column.name}: " in text) == (column.name in head), (name, column.name)
        assert max(map(len, text.splitlines())) <= 100, name


def test_a_column_without_a_number_is_left_out() -> None:
    columns, rows = stored().table()
    assert "by model" not in [column.name for column in columns]
    for i, column in enumerate(columns):
        assert {row[i] for row in rows} != {UNKNOWN}, column.name


def test_equal_reasons_and_equal_cures_stand_there_once() -> None:
    result = stored()
    assert len(result.not_tried()) < len(result.refused)
    assert {name for names in result.not_tried().values() for name in names} == {*result.refused}
    assert len(result.problems()) < len(result.remedies)
    for text in (str(result), result._repr_html_(), page(result, "tokens")):
        plain = " ".join(text.split())
        for reason in result.not_tried():
            assert plain.count(reason[:-1]) == 1, reason


def opened(browser: Any, path: Path, html: str, width: int, scheme: str = "light") -> Any:
    path.write_text(html, encoding="utf-8")
    tab = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    tab.goto(path.as_uri())
    return tab


@pytest.mark.parametrize("width", [1280, 390])
def test_nothing_touches_or_leaves_the_page(browser: Any, tmp_path: Path, width: int) -> None:
    tab = opened(browser, tmp_path / "page.html", page(stored(), "tokens"), width)
    assert tab.evaluate("document.documentElement.scrollWidth <= innerWidth")
    boxes = tab.evaluate(
        "[...document.querySelectorAll('#masses .card, #verdict, .side, .framed, .token-view > *')]"
        ".map((x) => x.getBoundingClientRect()).map((b) => [b.left, b.top, b.right, b.bottom])"
    )
    assert len(boxes) == 9
    for i, (left, top, right, bottom) in enumerate(boxes):
        for other in boxes[i + 1 :]:
            apart = max(other[0] - right, left - other[2], other[1] - bottom, top - other[3])
            assert apart >= 12
    edges = tab.evaluate(
        "['h1', '#bar label', '.side', '#masses'].map((x) => "
        "Math.round(document.querySelector(x).getBoundingClientRect().left))"
    )
    assert len(set(edges)) == 1, "one edge for everything"
    tab.close()


def test_a_bar_is_as_long_as_its_number(browser: Any, tmp_path: Path) -> None:
    result = stored()
    tab = opened(browser, tmp_path / "page.html", page(result, "tokens"), 1280)
    lengths = "(x) => [...document.querySelectorAll(x)].map((bar) => [bar.querySelector('i')"
    lengths += ".getBoundingClientRect().width / bar.firstChild.getBoundingClientRect().width, "
    lengths += "bar.querySelector('i').classList.contains('down'), bar.lastChild.textContent])"
    shares = tab.evaluate(lengths, "#masses .bar")
    assert len(shares) > 30
    for length, _, text in shares:
        assert length == pytest.approx(float(text.removesuffix(" %")) / 100, abs=0.012), text
    changes = tab.evaluate(lengths, "#sequences .bar")
    numbers = [float(text.replace("−", "-")) for *_, text in changes]
    most = max(map(abs, numbers))
    assert len(changes) == 6 * 3
    for (length, down, text), x in zip(changes, numbers, strict=True):
        assert length == pytest.approx(abs(x) / most / 2, abs=0.012), text
        assert down == (x < 0), text
    tab.close()


def test_columns_have_names_and_the_theme_changes_as_on_other_pages(
    browser: Any, tmp_path: Path
) -> None:
    result = stored()
    pages = {"what if": page(result, "tokens"), "explorer": explorer_page()}
    labels = {}
    for name, html in pages.items():
        tab = opened(browser, tmp_path / "page.html", html, 1280, "dark")
        button, seen = tab.locator("#theme"), []
        for _ in range(4):
            ground = tab.evaluate("getComputedStyle(document.documentElement).backgroundColor")
            seen.append((button.inner_text(), ground))
            button.click()
        labels[name] = seen
        if name == "what if":
            heads = tab.locator(".side thead th").all_inner_texts()
            assert heads == [column.title for column in result.table()[0]]
            assert tab.locator("#cosines [role=columnheader]").all_inner_texts() == [
                outcome.name for outcome in result.outcomes
            ]
        tab.close()
    assert labels["what if"] == labels["explorer"]
    assert [label for label, _ in labels["what if"]] == [
        *("Theme: system", "Theme: light", "Theme: dark", "Theme: system")
    ]
