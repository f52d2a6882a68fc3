"""The display in a notebook: the same facts as `str()`, as HTML, with every text escaped."""

from __future__ import annotations

from html.parser import HTMLParser
from typing import Any

import torch
from walk import walked

import policyloss as pl
from cases import make_batch, run
from policyloss.check.loss import CheckReport, PropertyResult
from policyloss.check.partition import CutResult, PartitionReport

EVIL = '<script>alert("x")</script> & <b'
VOID = {"br"}


class Page(HTMLParser):
    """The texts of a page, and a complaint about every element that
    is not closed where it should be.
    """

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.texts: list[str] = []
        self.elements: list[str] = []
        self.open: list[str] = []
        self.feed(text)
        self.close()
        assert not self.open, f"not closed: {self.open}"

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.elements.append(tag)
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def evil_surrogate(t: pl.Tokens) -> Any:
    raise RuntimeError


evil_surrogate.__doc__ = EVIL


def partition_report(diagnosis: list[str]) -> PartitionReport:
    cuts = [
        CutResult(EVIL, 3, 0.25, 1.5, moved=True),
        CutResult("in order", 2, 0.0, 1.0, moved=False),
    ]
    return PartitionReport(cuts, diagnosis, [EVIL], 1e-9, 4, 17, torch.zeros(1))


EXPLAINED = pl.explain(pl.LossSpec(trust=evil_surrogate, kl=pl.KL("k3", 0.1)))
SHOWN = {
    "explain": (
        EXPLAINED,
        [EVIL, "kl = exp(d) - 1 - d", "kl.coef", "0.1", "evil_surrogate(tokens)"],
    ),
    "preset": (
        pl.explain("dapo"),
        [
            "DAPO: clip-higher and token mean",
            "trust.eps_high",
            "0.28",
            "held from above",
            "ratio > 1 + 0.28",
        ],
    ),
    "diff": (
        pl.diff("ppo", "dapo"),
        ["ppo", "dapo", "eps_high", "0.2", "0.28", "out of [0.8, 1.28]"],
    ),
    "same": (pl.diff("ppo", "bnpo"), ["ppo and bnpo are the same loss."]),
    "check": (
        CheckReport((PropertyResult("good", True), PropertyResult("bad", False, EVIL))),
        ["good", "ok", "bad", "FAIL", EVIL, "1 of 2 properties hold."],
    ),
    "partition": (
        partition_report([EVIL]),
        [EVIL, "25.0%", "1.500", "none", "moved in 1 of 2 cuts", "17 valid tokens"],
    ),
    "metrics": (
        run(pl.preset("ppo"), make_batch()).records,
        ["clip_fraction", "ratio_mean", "tokens"],
    ),
}


@walked("name", SHOWN)
def test_a_notebook_shows_the_text_and_no_foreign_markup(name: str) -> None:
    thing, expected = SHOWN[name]
    page = Page(thing._repr_html_())
    text = " ".join(page.texts)
    for words in expected:
        assert words in text, words
    assert "script" not in page.elements
    assert "b" not in page.elements


def test_the_shown_metrics_are_the_computed_ones() -> None:
    metrics = pl.Metrics({"share": pl.Stat(torch.tensor(3.0), torch.tensor(8))})
    assert Page(metrics._repr_html_()).texts[-2:] == ["share", "0.375"]
    assert Page(pl.Metrics()._repr_html_()).texts == ["metric", "value"]


def test_a_long_formula_and_a_long_number_stay_whole() -> None:
    e = pl.explain("clip_cov")
    text = "".join(Page(e._repr_html_()).texts)
    for line in e.formula.lines:
        assert str(line) in text
    metrics = pl.Metrics(
        {"tokens": pl.Stat(torch.tensor(123456789.0, dtype=torch.float64), torch.tensor(1))}
    )
    assert "123456789" in metrics._repr_html_()
