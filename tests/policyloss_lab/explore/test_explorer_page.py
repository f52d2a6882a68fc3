"""The explorer as a person uses it: sliders, links, keys, drags, hostile links, small screens."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any
from urllib.parse import parse_qs, quote, urlsplit

import pytest
import torch

import policyloss as pl
from policyloss.errors import PolicyLossError

Open = Callable[..., Any]
CURVE = '#token svg[data-sign="1"][data-of="loss"] path.line'
# The step that the page begins with.
RATIOS = [1.05, 0.9, 1.3, 1.0, 0.8, 1.1, 1.15, 0.85, 1.4]
WEIGHTS = [1.0, 1.1, 0.9, 1.0, 1.6, 1.0, 0.95, 1.0, 1.05]


def python_of(page: Any, place: int = 0) -> pl.LossSpec:
    """The spec that the page's Python makes."""
    scope: dict[str, Any] = {}
    exec(page.locator(".python").nth(place).text_content(), scope)
    spec: pl.LossSpec = scope["spec"]
    return spec


def link_of(page: Any, contains: str = "") -> str:
    """The fragment of the address, once it holds a text."""
    page.wait_for_function(
        "(text) => decodeURIComponent(location.hash).includes(text)", arg=contains
    )
    return "#" + urlsplit(page.url).fragment


def open_editor(page: Any, place: int = 0) -> None:
    page.locator("#editors summary").nth(place).click()


def rows_of(page: Any, table: str) -> list[list[str]]:
    rows: list[list[str]] = page.locator(f"{table} tbody tr").evaluate_all(
        "(rows) => rows.map((row) => [...row.cells].map((cell) => cell.textContent))"
    )
    return rows


def test_a_slider_changes_the_curve_the_formula_and_the_python(open_page: Open) -> None:
    page = open_page("#loss=ppo")
    before = page.locator(CURVE).get_attribute("d")
    assert page.locator("#preset-0").input_value() == "ppo"
    assert rows_of(page, "#reading")[0][-1] == "A > 0: above 1.2; A < 0: below 0.8"
    open_editor(page)
    slider = page.get_by_label("eps_high", exact=True)
    slider.focus()
    page.keyboard.press("ArrowRight")
    assert page.locator(CURVE).get_attribute("d") != before
    assert page.locator("#preset-0").input_value() == ""
    assert python_of(page) == pl.LossSpec(trust=pl.Clip(0.2, 0.205))
    assert "1 + 0.205" in page.locator(".formula").inner_text()
    assert rows_of(page, "#reading")[0][-1] == "A > 0: above 1.205; A < 0: below 0.8"
    assert page.evaluate("document.activeElement.id") == slider.get_attribute("id")
    page.get_by_label("eps_high, exact value").fill("0.2")
    page.keyboard.press("Enter")
    assert page.locator("#preset-0").input_value() == "ppo"
    assert page.locator(CURVE).get_attribute("d") == before


def test_a_number_beyond_its_limit_is_refused_and_explained(open_page: Open) -> None:
    page = open_page("#loss=ppo")
    open_editor(page)
    page.get_by_label("eps_low, exact value").fill("-1")
    page.keyboard.press("Enter")
    problem = "Clip.eps_low must be at least 0, got -1."
    assert page.get_by_role("alert").text_content() == problem
    assert page.get_by_label("eps_low, exact value").get_attribute("aria-invalid") == "true"
    assert python_of(page) == pl.preset("ppo")


@pytest.mark.slow
def test_a_loss_is_built_part_by_part(open_page: Open) -> None:
    page = open_page("#loss=ppo")
    open_editor(page)
    page.locator("#loss-0-ratio").select_option("SequenceRatio")
    page.locator("#loss-0-trust").select_option("SoftGate")
    page.locator("#loss-0-correction-0").select_option("Band")
    page.locator("#loss-0-rejected").select_option("renormalise")
    page.locator("#loss-0-kl-0").select_option("KL")
    page.locator("#loss-0-kl-0-estimator").select_option(label="k1")
    page.locator("#loss-0-aggregate").select_option("SeqMeanTokenMean")
    spec = pl.LossSpec(
        ratio=pl.SequenceRatio(),
        trust=pl.SoftGate(),
        correction=pl.Band(0.5, 5.0),
        rejected="renormalise",
        kl=pl.KL("k1", 0.04),
        aggregate=pl.SeqMeanTokenMean(),
    )
    assert python_of(page) == spec
    # A choice that needs a number brings it, and one that forbids it takes it away.
    page.locator("#loss-0-kl-0-weight").select_option(label="detached_ratio")
    page.locator("#loss-0-kl-0-weight_max-off").uncheck()
    weighted = pl.KL("k1", 0.04, weight="detached_ratio", weight_max=2.0)
    assert python_of(page) == spec.replace(kl=weighted)
    page.locator("#loss-0-kl-0-weight").select_option(label="none")
    assert python_of(page) == spec
    # Parts that do not fit together are refused in the words of the library.
    page.locator("#loss-0-trust").select_option("GeometricClip")
    assert "ratio must be TokenRatio" in page.get_by_role("alert").text_content()
    assert page.locator("#loss-0-trust").input_value() == "SoftGate"
    page.locator("#loss-0-correction-0").select_option("")
    assert python_of(page) == spec.replace(correction=(), rejected="keep")


def test_a_link_restores_the_view(open_page: Open) -> None:
    spec = pl.LossSpec(
        trust=pl.BySign(pl.Unbounded("current"), pl.Clip(math.inf, 0.5, dual=4.0)),
        correction=(pl.Truncate(3.0), pl.Veto(1e-3, 9.0)),
        kl=(pl.KL("k3", 0.1), pl.Divergence("jsd", 0.5)),
        entropy_coef=0.01,
        aggregate=pl.SeqMeanTokenSumNorm(64),
    )
    page = open_page(f"#loss={quote(json.dumps(spec.to_dict()))}&loss=gspo&theme=dark&zoom=1")
    assert python_of(page) == spec
    page.get_by_label("ratio π / π_old, token 2 of sequence 1").press("PageUp")
    page.get_by_label("size of the advantage, exact value").fill("2")
    page.keyboard.press("Enter")
    again = open_page(link_of(page, "advantage=2"))
    assert python_of(again) == spec
    assert python_of(again, 1) == pl.preset("gspo")
    for table in ("#reading", "#step-table"):
        assert rows_of(again, table) == rows_of(page, table)
    assert again.locator("html").get_attribute("data-theme") == "dark"
    curves = [each.locator("path.line").first.get_attribute("d") for each in (page, again)]
    assert curves[0] == curves[1]


def expected_weights(spec: pl.LossSpec, ratios: list[float]) -> list[float]:
    """−∂loss/∂logp of the page's step, by `policy_loss`: 6 and 3 tokens, the first in two turns."""
    mask = torch.tensor([[True] * 3 + [False] + [True] * 3, [True] * 3 + [False] * 4])
    old = torch.full(mask.shape, math.log(0.2), dtype=torch.float64)

    def placed(values: list[float]) -> torch.Tensor:
        logs = torch.tensor(values, dtype=torch.float64).log()
        return torch.zeros_like(old).masked_scatter(mask, logs)

    logp = (old + placed(ratios)).requires_grad_()
    out = pl.policy_loss(
        spec.for_run(6),
        logp,
        old,
        torch.tensor([1.0, -1.0], dtype=torch.float64),
        mask,
        rollout_logp=old - placed(WEIGHTS),
        ref_logp=old,
        group_ids=torch.zeros(2, dtype=torch.int64),
    )
    (gradient,) = torch.autograd.grad(out.loss, logp)
    return (-gradient[mask]).tolist()


def shown_weights(page: Any) -> list[float]:
    return [float(row[-1].split(" ")[0]) for row in rows_of(page, "#step-table")]


@pytest.mark.parametrize("name", ["gspo_turn", "clip_cov"])
def test_a_token_is_moved_by_keys_and_all_weights_follow(open_page: Open, name: str) -> None:
    page, spec = open_page(f"#loss={name}"), pl.preset(name)
    assert shown_weights(page) == pytest.approx(expected_weights(spec, RATIOS), rel=1e-3)
    token = page.get_by_label("ratio π / π_old, token 1 of sequence 2")
    token.focus()
    for key, value in (
        ("ArrowUp", 1.173),
        ("PageDown", 0.9775),
        ("Home", 1.0),
        ("ArrowLeft", 0.9804),
    ):
        page.keyboard.press(key)
        assert float(token.get_attribute("aria-valuenow")) == value
        moved = [*RATIOS[:6], value, *RATIOS[7:]]
        assert shown_weights(page) == pytest.approx(expected_weights(spec, moved), rel=1e-3)
    assert token.evaluate("(node) => node === document.activeElement")


@pytest.mark.slow
def test_a_token_is_dragged(open_page: Open) -> None:
    """With GSPO one token moves the weights of its sequence, with PPO its own alone."""
    for name, others_move in (("ppo", False), ("gspo", True)):
        page = open_page(f"#loss={name}&ratios={','.join(['1'] * 9)}")
        before = shown_weights(page)
        token = page.get_by_label("ratio π / π_old, token 3 of sequence 1")
        token.scroll_into_view_if_needed()
        box = token.bounding_box()
        middle = (box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
        page.mouse.move(*middle)
        page.mouse.down()
        page.mouse.move(middle[0], middle[1] + 30, steps=3)
        page.mouse.up()
        page.mouse.move(middle[0], middle[1] - 60)
        assert float(token.get_attribute("aria-valuenow")) < 0.8
        after = shown_weights(page)
        assert after[2] != before[2]
        assert (after[0] != before[0]) is others_move
        assert after[6:] == before[6:]


HOSTILE = [
    "#loss=<img src=x onerror=alert(1)>",
    '#loss={"trust":{"type":"<script>alert(1)</script>"}}',
    '#loss={"__proto__":{"polluted":1}}',
    '#loss={"trust":{"type":"__proto__"}}',
    '#loss={"trust":{"type":"Clip","eps_low":0.2,"__proto__":{"dual":3}}}',
    '#loss={"trust":{"type":"constructor"}}',
    '#loss={"trust":{"type":"Clip","eps_low":"0.2);alert(1)"}}',
    '#loss={"trust":{"type":"Clip","eps_low":1e400}}',
    '#loss={"kl":[[],[],[]]}',
    '#loss={"correction":{"length":1e9}}',
    "#loss=[1,2",
    "#loss=" + "[" * 3000,
    "#loss=toString&theme=<b>&zoom=constructor&ratios=NaN,1&read=1e999&advantage=-5&horizon=",
]


def test_a_hostile_link_is_inert(open_page: Open) -> None:
    page = open_page(HOSTILE[0])
    for fragment in HOSTILE:
        page.evaluate("(fragment) => { location.hash = fragment; }", fragment)
        refused = "() => document.getElementById('status').textContent.startsWith('The link')"
        page.wait_for_function(refused)
        assert [python_of(page, i) for i in (0, 1)] == [pl.preset("ppo"), pl.preset("gspo")]
        assert page.locator("img, b, main script").count() == 0
        assert page.evaluate("({}).polluted") is None
        assert parse_qs(link_of(page, "loss=ppo&loss=gspo")[1:]) == {"loss": ["ppo", "gspo"]}
        page.evaluate("location.hash = '#loss=cispo'")
        page.wait_for_function("document.getElementById('status').textContent === ''")
        assert python_of(page) == pl.preset("cispo")


VALUES = [-1, 0, 0.5, 1, 1.5, 2, 3, 10**9, "inf", "-inf", None, True, "k1", "token", [], {}, [1, 2]]


def test_the_page_accepts_what_the_library_accepts(page: Any) -> None:
    """Every field of every preset's parts with every value: both take it, or both refuse it.

    But see `narrower_here`.
    """
    cases = []
    for name in pl.presets():
        data = pl.preset(name).to_dict()
        for slot, part in data.items():
            parts = part if isinstance(part, list) else [part]
            for i, each in enumerate(parts):
                for field in each if isinstance(each, dict) else ():
                    for value in VALUES:
                        changed = {**each, field: value}
                        several = [*parts[:i], changed, *parts[i + 1 :]]
                        case = {slot: several if isinstance(part, list) else changed}
                        if not narrower_here(changed):
                            cases.append(json.dumps(case))
    cases = sorted(set(cases))
    accepts = page.evaluate(
        "(cases) => cases.map((data) => { try { policyloss.check(JSON.parse(data)); return true; }"
        " catch { return false; } })",
        cases,
    )
    wrong = [c for c, ok in zip(cases, accepts, strict=True) if ok is not library_accepts(c)]
    assert len(cases) > 1000
    assert not wrong, "\n".join(wrong)


def narrower_here(part: dict[str, Any]) -> bool:
    """The page alone refuses a lower bound at infinity, a weight by a tensor that it does not have,
    and an upper bound that is left to follow the lower one.
    """
    endless = part.get("low") == "inf" or part.get("cov_low") == "-inf"
    by_tensor = part["type"] == "Divergence" and part["weight"] in ("k1", "token")
    return endless or by_tensor or (part["type"] == "Clip" and part["eps_high"] is None)


def library_accepts(text: str) -> bool:
    try:
        pl.LossSpec.from_dict(json.loads(text))
    except PolicyLossError:
        return False
    return True


@pytest.mark.slow
def test_three_losses_at_most_stand_side_by_side(open_page: Open) -> None:
    page = open_page("#loss=ppo")
    add = page.get_by_role("button", name="Add a loss")
    add.click()
    page.locator("#preset-1").select_option("cispo")
    add.click()
    page.locator("#preset-2").select_option("clip_cov")
    assert add.is_disabled()
    assert page.locator(CURVE).count() == 2  # a rank over the step has no curve of one token
    assert "whole step" in rows_of(page, "#reading")[2][1]
    assert page.locator("#bars figure").count() == page.locator("#written .card").count() == 3
    page.get_by_role("button", name="Remove loss 1").click()
    assert [python_of(page, i) for i in (0, 1)] == [pl.preset("cispo"), pl.preset("clip_cov")]


def test_the_reading_is_what_pytorch_computes(open_page: Open) -> None:
    names = ["grpo", "cispo", "dppo_kl"]
    page = open_page(f"#{'&'.join(f'loss={name}' for name in names)}&read=1.1&ref=0.8&advantage=2")
    for row, name in zip(rows_of(page, "#reading"), names, strict=True):
        for sign, cells in ((1.0, row[1:3]), (-1.0, row[3:5])):
            old = torch.tensor([[math.log(0.2)]], dtype=torch.float64)
            logp = (old + math.log(1.1)).requires_grad_()
            spec = pl.preset(name).replace(aggregate=pl.TokenSum())
            advantages = torch.tensor([2 * sign], dtype=torch.float64)
            mask = torch.ones(1, 1, dtype=torch.bool)
            out = pl.policy_loss(spec, logp, old, advantages, mask, ref_logp=old - math.log(0.8))
            (gradient,) = torch.autograd.grad(out.loss, logp)
            values = [out.loss.item(), -gradient.item()]
            assert [float(cell) for cell in cells] == pytest.approx(values, rel=1e-3, abs=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("width", [360, 1200])
def test_every_control_has_a_name_and_nothing_overflows(open_page: Open, width: int) -> None:
    page = open_page("#loss=seq_mask_tis&loss=up_grpo&loss=sdpo", width=width, height=800)
    for i in range(3):
        open_editor(page, i)
    nameless = page.evaluate(
        """() => [...document.querySelectorAll("input, select, button, [role=slider], svg")]
        .filter((node) => !(node.labels?.length || node.ariaLabel || node.textContent.trim()
          || node.getAttribute("aria-labelledby"))).map((node) => node.outerHTML)"""
    )
    assert nameless == []
    ids = page.evaluate("[...document.querySelectorAll('[id]')].map((node) => node.id)")
    assert len(ids) == len(set(ids))
    assert page.evaluate("document.documentElement.scrollWidth") <= width
