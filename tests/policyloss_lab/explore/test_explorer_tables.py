"""The data of the explorer: the open formula of every part, limits, and the command."""

from __future__ import annotations

import dataclasses
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from walk import walked

import policyloss as pl
from policyloss.cli import main
from policyloss.errors import PolicyLossError
from policyloss.explanations.algebra.expression import Expression, constant
from policyloss.explanations.formula import lines_by_slot
from policyloss.parts.data import VARIANTS
from policyloss_lab.explore import page
from policyloss_lab.explore.fields import Field, Limits, fields_of, limits, numbers_of, start
from policyloss_lab.explore.page import explorer_page
from policyloss_lab.explore.templates import Variant, template

PARTS = [part for parts in VARIANTS.values() for part in parts]
NUMBERS = [(part, field) for part in PARTS for field in numbers_of(part)]
# Numbers that no formula of one token shows: the head's measurements, and the coefficients that
# join the slots.
ELSEWHERE = {("KL", "coef"), ("Divergence", "coef"), ("Divergence", "beta"), ("Divergence", "k")}


def field_name(case: Any) -> str:
    return case.__name__ if isinstance(case, type) else getattr(case, "name", str(case))


def parameters(variant: Variant) -> set[str]:
    """The parameters that the lines of a variant have."""
    nodes = [node for _, x in variant.lines for node in x.walk() if node.operator == "name"]
    return {str(node.value) for node in nodes if str(node.value).startswith("$")}


@walked(("part", "field"), NUMBERS, ids=field_name)
def test_every_number_of_a_part_stays_open(part: type, field: Field) -> None:
    """Otherwise a slider would move nothing, and the page show the number it was made with."""
    places = [f"${field.name}" in parameters(v) for v in template(part).variants.values()]
    assert any(places) is ((part.__name__, field.name) not in ELSEWHERE)


def filled(x: Expression, part: Any) -> Expression:
    """An open expression with the numbers of a part."""
    values: dict[str, float] = {f"${f.name}": getattr(part, f.name) for f in numbers_of(type(part))}
    for field in fields_of(type(part)):
        if field.kind == "clamp":
            low, high = getattr(part, field.name)
            values |= {f"${field.name}.low": low, f"${field.name}.high": high}

    def change(node: Expression) -> Expression | None:
        if node.operator == "negative" and str(node.arguments[0].value).startswith("$"):
            return constant(-values[str(node.arguments[0].value)])
        return constant(values[str(node.value)]) if str(node.value) in values else None

    return x.substitute(change)


RATIO, TRUST = pl.SequenceRatio("token", "rollout", (-3.5, 2.25)), pl.Clip(0.15, 0.45, dual=2.75)
KL = pl.KL("k3", 0.3, "k2", "detached_ratio", 7.5, 1.25, "teacher", 2.5)
BAND = pl.ProbabilityBand("kl", 0.35, 0.15, "both", "score", 6.5)
MASK = pl.DivergenceMask("tv", 0.75, 0.25, "sequence", "token", 0.125, 3.5)


@pytest.mark.parametrize(
    ("slot", "part"),
    [("ratio", RATIO), ("trust", TRUST), ("trust", BAND), ("kl", KL), ("correction", MASK)],
    ids=lambda x: type(x).__name__,
)
def test_an_open_formula_with_numbers_is_the_formula(slot: str, part: Any) -> None:
    of = template(type(part))
    states = {
        key: "rollout"
        if key == "anchor of the ratio"
        else "number"
        if isinstance(getattr(part, key), float)
        else getattr(part, key)
        for key in of.keys
    }
    variant = of.variants[tuple(states.values())]
    spec = pl.LossSpec(ratio=pl.TokenRatio("rollout"), trust=pl.Unbounded())
    lines = lines_by_slot(spec.replace(**{slot: part}))[slot][0]
    assert [(label, str(filled(x, part))) for label, x in variant.lines] == [
        (line.name, line.expression) for line in lines
    ]


@pytest.mark.parametrize(
    ("part", "name", "expected"),
    [
        (pl.Clip, "eps_low", Limits(least=0, below=2.0)),
        (pl.Clip, "dual", Limits(above=1)),
        (pl.CovClip, "fraction", Limits(above=0, most=1.0, infinite=False)),
        (pl.CovClip, "cov_high", Limits(not_below="cov_low")),
        (pl.DetachedClip, "ratio_max", Limits(above=0, not_below="ratio_min")),
        (pl.DetachedClip, "ratio_min", Limits(least=0, infinite=False)),
        (pl.Divergence, "beta", Limits(least=0, most=1.0, infinite=False)),
        (pl.Divergence, "k", Limits(least=1, infinite=False)),
        (pl.KL, "coef", Limits(least=0, infinite=False)),
        (pl.SoftGate, "tau_positive", Limits(above=0, infinite=False)),
    ],
    ids=field_name,
)
def test_limits_come_from_the_part(part: type, name: str, expected: Limits) -> None:
    (field,) = [field for field in numbers_of(part) if field.name == name]
    assert limits(part, field) == expected


@walked(("part", "field"), NUMBERS, ids=field_name)
def test_a_part_accepts_its_limits_and_nothing_beyond(part: type, field: Field) -> None:
    bounds, first = limits(part, field), start(part)

    def accepts(value: float) -> bool:
        try:
            dataclasses.replace(first, **{field.name: int(value) if field.integer else value})
        except PolicyLossError:
            return False
        return True

    if not accepts(getattr(first, field.name) or 2) or field.name == "k":
        return  # it needs a choice of another field
    closed = {bounds.least: -1, bounds.most: 1}
    for limit, outward in closed.items():
        if limit is not None and bounds.not_below is None:
            assert accepts(limit), limit
            assert not accepts(limit + outward * (1 if field.integer else 1e-6)), limit
    for limit, inward in {bounds.above: 1e-6, bounds.below: -1e-6}.items():
        if limit is not None and bounds.not_below is None:
            assert not accepts(limit), limit
            assert accepts(limit + inward), limit


@walked("part", PARTS, ids=field_name)
def test_a_combination_that_the_class_refuses_has_its_error(part: type) -> None:
    variants = template(part).variants.values()
    assert all(bool(v.error) != bool(v.lines) or part is pl.SelfNormalise for v in variants)
    errors = {"KL": "weight_max", "Reject": "bound", "Veto": "bound", "Divergence": "Divergence"}
    errors["DetachedClip"] = "outside"
    refused = [v.error for v in variants if v.error]
    assert bool(refused) is (part.__name__ in errors)
    assert all(errors[part.__name__] in error for error in refused)


class Parsed(HTMLParser):
    """The elements of a page, and the content policy."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.policy = ""
        self.handlers: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.handlers += [name for name, _ in attrs if name.startswith("on") or name == "style"]
        if ("http-equiv", "Content-Security-Policy") in attrs:
            self.policy = str(dict(attrs)["content"])


def test_the_page_is_one_file_that_asks_for_nothing(explorer_html: str) -> None:
    page = Parsed(explorer_html)
    assert page.policy.startswith("default-src 'none'; base-uri 'none'; form-action 'none'")
    assert "unsafe" not in page.policy
    assert page.tags.count("script") == 2
    assert not {"link", "img", "iframe", "object"} & set(page.tags)
    assert page.handlers == []
    assert not re.search(
        r"(?:src|href)=\"|@import|url\(|\beval\(|innerHTML|new Function", explorer_html
    )
    assert len(explorer_html) < 400_000


def test_the_command_writes_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    opened: list[str] = []
    monkeypatch.setattr(page.webbrowser, "open", lambda url: opened.append(url) or True)
    monkeypatch.setattr(page, "explorer_page", lambda losses: f"the page of {losses}")
    monkeypatch.setattr(page.sys, "platform", "linux")
    for name in ("DISPLAY", "WAYLAND_DISPLAY"):
        monkeypatch.delenv(name, raising=False)
    file, spec = tmp_path / "page.html", tmp_path / "spec.json"
    spec.write_text(json.dumps(pl.preset("dapo", eps_high=0.3).to_dict()))
    assert main(["explore", "cispo", str(spec), "--out", str(file)]) == 0
    assert file.read_text() == f"the page of {['cispo', pl.preset('dapo', eps_high=0.3)]}"
    assert capsys.readouterr().out == f"{file}: open it in a browser.\n"
    assert opened == []
    monkeypatch.setenv("DISPLAY", ":0")
    assert main(["explore", "--out", str(file), "--no-open"]) == 0
    assert opened == []
    assert main(["explore", "--out", str(file)]) == 0
    assert opened == [file.as_uri()]
    assert file.read_text() == "the page of ['ppo', 'gspo']"


def test_the_command_names_losses_it_cannot_show(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "page.html"
    assert main(["explore", "pppo", "--out", str(file)]) == 2
    assert "did you mean 'ppo'" in capsys.readouterr().err
    assert main(["explore", *["ppo"] * 4, "--out", str(file)]) == 2
    assert "shows one to 3 losses, got 4" in capsys.readouterr().err
    assert not file.exists()
    unknown = pl.LossSpec(trust=lambda t: -t.advantages * t.ratio)
    with pytest.raises(PolicyLossError, match=r"the 'trust' slot holds function\. Use"):
        explorer_page([unknown])
