"""The charts in a real browser, used as a person uses them: bands, differences, zoom, crosshair,
units, files, many runs, the keyboard, print, a live page, a notebook.
"""

from __future__ import annotations

import csv
import io
import re
import threading
import xml.etree.ElementTree as ET
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from browser import needs_browser
from report_runs import realistic_run, write_run

import policyloss_lab as lab
from policyloss_lab.report import collect, command, render
from policyloss_lab.report.markup import asset
from policyloss_lab.report.page import ASSETS

Open = Callable[..., Any]


@pytest.fixture
def open_page(tab: Any, tmp_path: Path) -> Open:
    """Opens the page of some runs, or an address."""

    def opened(
        runs: Sequence[Path] | str, address: str = "", width: int = 1280, height: int = 1000
    ) -> Any:
        tab.set_viewport_size({"width": width, "height": height})
        if not isinstance(runs, str):
            file = tmp_path / "report.html"
            file.write_text(render(collect(runs)), encoding="utf-8")
            runs = file.as_uri()
        tab.goto(runs + address)
        return tab

    return opened


def small_run(path: Path, rewards: Sequence[float | None], **settings: Any) -> Path:
    """10 tokens and 2 seconds at the first step, 20 and 4 at the second, …"""
    rows = [
        {"step": s, "reward/mean": r, "grad_norm": 1.0 + s, "tokens": 10 * (s + 1)}
        for s, r in enumerate(rewards)
    ]
    for row in rows:
        if row["reward/mean"] is None:
            row["nonfinite"] = {"reward/mean": "nan"}
    timing = [{"step": s, "step_s": 2.0 * (s + 1)} for s in range(len(rewards))]
    return write_run(path, rows, timing=timing, config=settings)


@pytest.fixture
def seeds(tmp_path: Path) -> list[Path]:
    """Two seeds of one setting, and another setting."""
    return [
        small_run(tmp_path / "a1", [0, 1, 2, 3], seed=1),
        small_run(tmp_path / "a2", [2, 3, 4, 9], seed=2),
        small_run(tmp_path / "b", [1, 1, 1, 1], seed=1, lr=0.5),
    ]


def figure(page: Any, title: str) -> Any:
    return page.locator("figure.chart", has=page.get_by_role("heading", name=title, exact=True))


def picture(page: Any, title: str) -> Any:
    return figure(page, title).locator("> svg")


def at(page: Any, title: str, share: float, height: float = 0.5) -> tuple[float, float]:
    """The place of that share of the x axis on the screen."""
    svg = picture(page, title)
    svg.scroll_into_view_if_needed()
    box = svg.bounding_box()
    left, right = box["x"] + 46, box["x"] + box["width"] - 10
    return left + share * (right - left), box["y"] + height * box["height"]


def tip(page: Any, title: str, share: float) -> list[str]:
    """The text of the tip with the pointer at that share of the x axis."""
    page.mouse.move(*at(page, title, share))
    box = page.locator("#tip")
    rows: list[str] = box.locator("> *").all_inner_texts()
    return [" ".join(row.split()) for row in rows]


def ticks(page: Any, title: str) -> list[str]:
    """The labels of the x axis."""
    texts: list[str] = picture(page, title).locator("text.tick:not(.end)").all_text_contents()
    return texts


def address(page: Any) -> str:
    """The part of the address that holds the view."""
    text: str = page.evaluate("location.hash")
    return text


def zoom_of(page: Any) -> list[float]:
    """The ends of the zoom, as the address holds them."""
    match = re.search(r"zoom=([\d.]+)%2C([\d.]+)", address(page))
    assert match is not None, address(page)
    return [float(end) for end in match.groups()]


@needs_browser
def test_seeds_are_a_band_with_mean_and_range(open_page: Open, seeds: list[Path]) -> None:
    page = open_page(seeds)
    # (0 + 2)/2 and (3 + 9)/2; the range of each.
    assert tip(page, "Reward", 0.0) == ["step 0", "dapo · 2 seeds 1 (0 to 2)", "b 1"]
    assert tip(page, "Reward", 1.0) == ["step 3", "dapo · 2 seeds 6 (3 to 9)", "b 1"]
    assert picture(page, "Reward").locator("path.range").count() == 1
    page.get_by_label("Seeds as a band").uncheck()
    assert tip(page, "Reward", 1.0) == ["step 3", "a1 3", "a2 9", "b 1"]
    assert picture(page, "Reward").locator("path.range").count() == 0
    assert "bands=0" in address(page)


@needs_browser
@pytest.mark.slow
def test_a_band_counts_the_runs_that_reach_a_step(open_page: Open, tmp_path: Path) -> None:
    """Seeds are compared at the same x, between their points where need be."""
    first = small_run(tmp_path / "a", [0, None, 4, 6], seed=1, steps=4)
    second = small_run(tmp_path / "b", [2, 4, 8], seed=2, steps=4)
    page = open_page([first, second])
    assert [tip(page, "Reward", x)[1] for x in (0, 1 / 3, 2 / 3, 1)] == [
        "dapo · 2 seeds 1 (0 to 2)",
        "dapo · 2 seeds 4 (4 to 4, 1 of 2)",
        "dapo · 2 seeds 6 (4 to 8)",
        "dapo · 2 seeds 6 (6 to 6, 1 of 2)",
    ]


@needs_browser
def test_the_difference_to_a_run_and_to_a_band(open_page: Open, seeds: list[Path]) -> None:
    page = open_page(seeds, "#bands=0")
    page.get_by_label("Difference to").select_option(label="b")
    assert tip(page, "Reward", 1.0) == ["step 3", "a1 2", "a2 8", "b 0"]
    assert tip(page, "Reward", 0.0) == ["step 0", "a1 -1", "a2 1", "b 0"]
    # Differences are negative, too; a log scale has no place for them.
    assert figure(page, "Gradient norm").locator(".log").is_disabled()
    page.get_by_label("Seeds as a band").check()
    page.get_by_label("Difference to").select_option(label="dapo · 2 seeds")
    assert tip(page, "Reward", 1.0) == ["step 3", "dapo · 2 seeds 0 (-3 to 3)", "b -5"]
    page.reload()
    assert tip(page, "Reward", 1.0)[2] == "b -5"  # the address holds the view


@needs_browser
def test_tokens_and_time_as_x_and_the_step_that_a_click_chooses(
    open_page: Open, seeds: list[Path]
) -> None:
    page = open_page(seeds, "#bands=0")
    page.get_by_label("Over", exact=True).select_option("tokens")
    # 10, 30, 60 and 100 tokens up to steps 0 to 3: from 10 to 100, 60 lies at 50/90.
    assert tip(page, "Reward", 50 / 90) == ["60 tokens", "a1 2", "a2 4", "b 1"]
    assert picture(page, "Reward").locator("text.unit").text_content() == "tokens"
    page.mouse.click(*at(page, "Reward", 50 / 90))
    assert "step=2" in address(page)
    page.get_by_label("Over", exact=True).select_option("seconds")
    assert tip(page, "Reward", 1.0)[0] == "20 s"  # 2 + 4 + 6 + 8
    assert ticks(page, "Reward")[-1].endswith(" s")


@needs_browser
@pytest.mark.slow
def test_a_run_without_tokens_is_not_drawn_over_tokens(open_page: Open, tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [{"step": s, "reward/mean": s} for s in range(3)])
    page = open_page([run], "#x=tokens")
    assert "the runs logged no tokens" in picture(page, "Reward").text_content()


@needs_browser
def test_zoom_by_drag_wheel_keyboard_and_back(open_page: Open, tmp_path: Path) -> None:
    run = small_run(tmp_path / "run", [float(s) for s in range(101)])
    page = open_page([run], "#smooth=0")
    page.mouse.move(*at(page, "Reward", 0.2))
    page.mouse.down()
    page.mouse.move(*at(page, "Reward", 0.3))
    page.mouse.move(*at(page, "Reward", 0.4))
    assert picture(page, "Reward").locator("rect.selection").count() == 1
    page.mouse.up()
    assert page.get_by_role("button", name="Show all of it").is_visible()
    assert zoom_of(page) == pytest.approx([20, 40], abs=0.3)
    assert ticks(page, "Reward")[0] == ticks(page, "Gradient norm")[0] == "20"
    heights = [float(t) for t in picture(page, "Reward").locator("text.end").all_text_contents()]
    assert 18 < min(heights) < max(heights) < 42  # the y axis follows the visible points
    assert not re.search("[#&]step=", address(page))  # a drag is no click: no step was chosen
    page.mouse.move(*at(page, "Reward", 0.5))
    page.mouse.wheel(0, -1)  # without a key, the wheel scrolls
    assert zoom_of(page) == pytest.approx([20, 40], abs=0.3)
    before = address(page)
    page.keyboard.down("Control")
    page.mouse.move(*at(page, "Reward", 0.5))
    page.mouse.wheel(0, -100)
    page.keyboard.up("Control")
    page.wait_for_function("before => location.hash !== before", arg=before)
    assert zoom_of(page) == pytest.approx([22, 38], abs=0.3)  # 0.8 of 20, around 30
    page.mouse.dblclick(*at(page, "Reward", 0.5))
    assert ticks(page, "Reward")[-1] == "100"
    picture(page, "Reward").focus()
    page.keyboard.press("+")
    middle = zoom_of(page)
    assert middle[1] - middle[0] == pytest.approx(50, abs=0.3)  # half of it
    page.keyboard.press("0")
    assert ticks(page, "Reward")[-1] == "100"
    assert page.get_by_role("button", name="Show all of it").is_hidden()


@needs_browser
def test_zeros_on_a_log_axis_are_not_smoothed_into_a_decay(open_page: Open, tmp_path: Path) -> None:
    """The KL from the reference is 0.1 in the first two steps and 0 in eight others."""
    rows = [{"step": s, "policy/kl_ref": 0.1 if s < 2 else 0.0} for s in range(10)]
    page = open_page([write_run(tmp_path / "run", rows)], "#smooth=0.6")
    assert tip(page, "KL estimates", 1 / 9) == ["step 1", "run 0.1"]
    assert tip(page, "KL estimates", 2 / 9) == ["step 2", "run 0"]
    assert tip(page, "KL estimates", 1.0) == ["step 9", "run 0"]
    figure(page, "KL estimates").get_by_role("button", name="log").click()
    # Off the log axis it is an average: 0.6⁸·(1 − 0.6²)·0.1/(1 − 0.6¹⁰)
    assert tip(page, "KL estimates", 1.0) == ["step 9", "run 0.001081"]


@needs_browser
def test_the_crosshair_is_on_every_chart_at_the_same_place(
    open_page: Open, seeds: list[Path]
) -> None:
    page = open_page(seeds)
    tip(page, "Reward", 2 / 3)
    crosses = page.locator("figure[data-panel] > svg > line.cross")
    assert crosses.count() >= 3
    for i in range(crosses.count()):
        if not crosses.nth(i).is_visible():
            continue  # in the section that is folded
        cross = crosses.nth(i)
        width = cross.evaluate("node => node.ownerSVGElement.viewBox.baseVal.width")
        assert float(cross.get_attribute("x1")) == pytest.approx(46 + (width - 56) * 2 / 3, abs=0.1)
        assert cross.get_attribute("visibility") == "visible"
    page.mouse.move(2, 2)
    assert crosses.first.get_attribute("visibility") == "hidden"


def saved(page: Any, title: str, kind: str) -> tuple[str, str]:
    with page.expect_download() as download:
        figure(page, title).get_by_role("button", name=kind).click()
    path = download.value.path()
    return download.value.suggested_filename, Path(path).read_text(encoding="utf-8")


@needs_browser
def test_a_chart_is_saved_as_csv(open_page: Open, tmp_path: Path) -> None:
    """The logged numbers, without smoothing and averages. A name that a spreadsheet would take for
    a formula has a quote before it.
    """
    runs = [
        small_run(tmp_path / '=cmd|"x"', [0.5, None], seed=1),
        small_run(tmp_path / "a,b", [2.0, 3.0], seed=2),
    ]
    page = open_page(runs, "#smooth=0.9")
    name, text = saved(page, "Reward", "CSV")
    assert name == "reward.csv"
    assert list(csv.reader(io.StringIO(text))) == [
        ["run", "metric", "step", "tokens", "seconds", "value"],
        ['\'=cmd|"x"', "reward/mean", "0", "10", "2", "0.5"],
        ['\'=cmd|"x"', "reward/mean", "1", "30", "6", ""],
        ["a,b", "reward/mean", "0", "10", "2", "2"],
        ["a,b", "reward/mean", "1", "30", "6", "3"],
    ]


@needs_browser
def test_a_chart_is_saved_as_a_picture_that_needs_no_page(
    open_page: Open, seeds: list[Path], tmp_path: Path
) -> None:
    page = open_page(seeds)
    name, text = saved(page, "Reward", "SVG")
    assert name == "reward.svg"
    root = ET.fromstring(text)
    space = "{http://www.w3.org/2000/svg}"
    assert root.tag == f"{space}svg"
    texts = ["".join(node.itertext()) for node in root.iter(f"{space}text")]
    assert texts[0] == "Reward"
    assert texts[-2:] == ["dapo · 2 seeds", "b"]
    lines = [n for n in root.iter(f"{space}path") if "line" in n.get("class", "")]
    assert len(lines) == 2
    assert all(re.match(r"rgb\(\d+", n.get("stroke", "")) for n in lines)  # no variable of the page
    assert not re.search(r"script|href|url\(|var\(|onload", text)


@needs_browser
def test_runs_that_coincide_show_both_colours_and_say_so(open_page: Open, tmp_path: Path) -> None:
    runs = [
        small_run(tmp_path / "a", [0, 1, 2], lr=1),
        small_run(tmp_path / "b", [0, 1, 2], lr=2),
        small_run(tmp_path / "c", [2, 1, 0], lr=3),
    ]
    page = open_page(runs)
    dots = picture(page, "Reward").locator("circle.turn")
    colours = {dots.nth(i).get_attribute("class") for i in range(dots.count())}
    assert colours == {"turn run0", "turn run1"}
    assert figure(page, "Reward").locator(".same").inner_text() == "a and b coincide."
    # All three have the same gradient norm.
    assert figure(page, "Gradient norm").locator(".same").inner_text() == "a, b and c coincide."
    page.locator("#legend button", has_text="b").click()
    assert picture(page, "Reward").locator("circle.turn").count() == 0
    assert figure(page, "Reward").locator(".same").is_hidden()


@needs_browser
@pytest.mark.slow
def test_many_runs_can_be_searched_chosen_and_highlighted(open_page: Open, tmp_path: Path) -> None:
    runs = [
        small_run(tmp_path / f"{'odd' if i % 2 else 'even'}{i:02d}", [i, i + 1], lr=i)
        for i in range(20)
    ]
    page = open_page(runs)
    assert page.locator("#legend button").count() == 0
    lines = picture(page, "Reward").locator("path.line")
    assert lines.count() == 20
    assert len(tip(page, "Reward", 0)) == 14  # the step, the nearest 12, and how many more
    page.locator("#chooser summary").click()
    page.get_by_role("searchbox").fill("ODD")
    assert page.locator("#choices li:visible").count() == 10
    page.get_by_role("button", name="Only these").click()
    assert lines.count() == 10
    assert page.locator("#chooser summary").inner_text() == "Runs: 10 of 20"
    page.get_by_role("button", name="Highlight odd03").click()
    classes = (
        picture(page, "Reward")
        .locator("g")
        .evaluate_all("all => all.map((g) => g.className.baseVal)")
    )
    assert sorted(classes) == ["faded"] * 9 + ["strong"]
    page.reload()
    assert lines.count() == 10
    page.locator("#chooser summary").click()
    assert (
        page.get_by_role("button", name="Highlight odd03").get_attribute("aria-pressed") == "true"
    )
    page.get_by_role("button", name="None", exact=True).click()
    assert lines.count() == 0
    page.get_by_role("button", name="All", exact=True).click()
    assert lines.count() == 20


@needs_browser
@pytest.mark.slow
def test_the_line_under_the_pointer_is_highlighted_in_every_chart(
    open_page: Open, tmp_path: Path
) -> None:
    runs = [small_run(tmp_path / f"r{i}", [10 * i, 10 * i], lr=i) for i in range(8)]
    page = open_page(runs)
    # Rewards 0 to 70 on an axis from 0 to 73.5: the run at 70 is near the top.
    page.mouse.move(*at(page, "Reward", 0.5, height=0.08))
    strong = page.locator("figure[data-panel] g.strong")
    assert strong.count() >= 2
    assert "r7" in page.locator("#tip .nearest").inner_text()
    page.locator("#legend button", has_text="r2").hover()
    strong_line = picture(page, "Reward").locator("g.strong path")
    assert strong_line.get_attribute("class") == "line run2 thin"


@needs_browser
def test_a_chart_has_a_summary_and_its_numbers(open_page: Open, tmp_path: Path) -> None:
    page = open_page([small_run(tmp_path / "run", [1, 4, 0, 2])])
    label = picture(page, "Reward").get_attribute("aria-label")
    assert label.startswith(
        "Reward over steps. run: first 1, last 2, highest 4 at step 1, lowest 0 at step 2."
    )
    figure(page, "Reward").get_by_text("Numbers").click()
    table = figure(page, "Reward").locator(".numbers table")
    assert table.locator("tbody tr").all_inner_texts() == ["run\t1\t2\t0\t4"]
    picture(page, "Reward").focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    assert page.locator("#tip").inner_text().split() == ["step", "1", "run", "4"]
    page.keyboard.press("Enter")
    assert "step=1" in address(page)


@needs_browser
def test_labels_of_an_axis_differ_and_are_several(open_page: Open, tmp_path: Path) -> None:
    values = [(4.1512, 0.15), (4.1531, 6.0), (4.1524, 1.0)]
    rows = [{"step": s, "reward/mean": r, "grad_norm": g} for s, (r, g) in enumerate(values)]
    page = open_page([write_run(tmp_path / "run", rows)])
    labels = picture(page, "Reward").locator("text.tick.end").all_text_contents()
    assert len(set(labels)) == len(labels) >= 2
    labels = picture(page, "Gradient norm").locator("text.tick.end").all_text_contents()
    assert labels == ["0.2", "0.5", "1", "2", "5"]  # of a log scale over less than two decades


@needs_browser
@pytest.mark.slow
def test_a_chart_far_down_is_drawn_for_the_reader_and_for_the_printer(
    open_page: Open, tmp_path: Path
) -> None:
    page = open_page([realistic_run(tmp_path / "run", steps=40)], height=500)
    drawn = "figure[data-panel] > svg path.line"
    page.wait_for_function(
        f"() => document.querySelectorAll('section:not(#more) {drawn}').length >= 20"
    )
    page.emulate_media(media="print")
    assert page.locator("#bar").is_hidden()
    assert page.locator("#verdict").is_visible()
    # Nobody can open a folded section on paper, so that its charts are printed, too.
    page.evaluate(
        "const more = document.querySelector('#more details');"
        "addEventListener('beforeprint', () => { window.unfolded = more.open; })"
    )
    assert page.pdf()[:5] == b"%PDF-"
    assert page.evaluate("window.unfolded") is True
    figures = page.locator("figure[data-panel]")
    assert figures.filter(has_not=page.locator("path.line")).count() == 0
    assert page.locator("#more figure").first.is_hidden()


@needs_browser
@pytest.mark.slow
@pytest.mark.parametrize("runs", [1, 12])
def test_a_phone_shows_the_page_without_scrolling_sideways(
    open_page: Open, tmp_path: Path, runs: int
) -> None:
    made = [realistic_run(tmp_path / f"run{i}", steps=12, seed=i) for i in range(runs)]
    page = open_page(made, width=390, height=844)
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    if runs > 1:
        page.locator("#chooser summary").click()
        assert page.evaluate("document.documentElement.scrollWidth") <= 390


@needs_browser
def test_a_live_page_follows_its_run_and_keeps_the_view(
    open_page: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "EVERY", 100)
    monkeypatch.setattr(command, "_SHARE", 0)
    run = small_run(tmp_path / "run", [float(s) for s in range(40)])
    with command.LiveServer([run], port=0) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            page = open_page(server.url, "#smooth=0&zoom=10,30", height=700)
            page.locator("#live", has_text="Live: up to date").wait_for()
            page.evaluate("scrollTo(0, 300); window.here = true")
            with (run / "metrics.jsonl").open("a") as file:
                file.write('{"step": 40, "reward/mean": 77, "grad_norm": 1, "tokens": 1}\n')
            # Means of 8 of 41 steps: 0 to 7, and 33 to 39 with 77.
            page.locator(".runs", has_text="3.5 → 41.1").wait_for()
            assert page.evaluate("window.here")  # the same page, not reloaded
            assert page.evaluate("scrollY") == 300
            assert ticks(page, "Reward")[-1] == "30"
            page.get_by_role("button", name="Show all of it").click()
            assert tip(page, "Reward", 1.0) == ["step 40", "run 77"]
            with (run / "metrics.jsonl").open("a") as file:
                file.write('{"step": 41, "reward/mean": 78, "policy/entropy": 0.5}\n')
            figure(page, "Entropy").wait_for()  # a chart that the page had no place for
            assert "smooth=0" in address(page)
        finally:
            server.shutdown()
            thread.join()
    page.locator("#live", has_text="no answer").wait_for()


@needs_browser
@pytest.mark.slow
def test_a_live_page_may_ask_nobody_else(browser: Any, tmp_path: Path) -> None:
    run = small_run(tmp_path / "run", [0.0, 1.0])
    with command.LiveServer([run], port=0) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            page = browser.new_page()
            page.goto(server.url)
            asked = "address => fetch(address, {mode: 'no-cors'}).then(() => 'sent', String)"
            assert "Failed to fetch" in page.evaluate(asked, "http://127.0.0.1:1/")
            assert page.evaluate(asked, server.url) == "sent"
            page.close()
        finally:
            server.shutdown()
            thread.join()


@needs_browser
def test_a_notebook_shows_a_report_that_cannot_reach_it(tab: Any, tmp_path: Path) -> None:
    shown = lab.report.show(small_run(tmp_path / "<b>&\"'", [1.0, 2.0]), height=500)
    assert repr(shown).startswith("the report of <b>&\"'; a notebook draws it")
    tab.set_viewport_size({"width": 900, "height": 700})
    tab.set_content(f"<title>notebook</title>{shown._repr_html_()}")
    frame = tab.frame_locator("iframe")
    # A chart below the edge of its frame is drawn when it comes into sight.
    frame.locator("figure[data-panel='0']").scroll_into_view_if_needed()
    frame.locator("figure[data-panel='0'] path.line").first.wait_for()
    assert frame.locator(".runs tbody th").inner_text() == "<b>&\"'"
    assert tab.locator("iframe").bounding_box()["height"] == 500
    frame.get_by_label("Over", exact=True).select_option(
        "tokens"
    )  # the view changes without an address
    assert frame.locator("#unit").input_value() == "tokens"
    inside = tab.frames[1]
    assert (
        inside.evaluate("() => { try { return parent.document.title } catch { return 'no' } }")
        == "no"
    )


@needs_browser
def test_charts_are_drawn_when_a_page_without_a_box_gets_one(tab: Any, tmp_path: Path) -> None:
    """As in a frame that is laid out after its script ran: the window sends no event for it."""
    file = tmp_path / "report.html"
    html = render(collect([small_run(tmp_path / "run", [1.0, 2.0])]))
    file.write_text(html.replace("<body", "<body hidden", 1), encoding="utf-8")
    tab.goto(file.as_uri())
    line = tab.locator("figure[data-panel='0'] path.line").first
    assert line.count() == 0
    tab.evaluate("document.body.hidden = false")
    line.wait_for()


def test_no_name_of_the_scripts_is_declared_twice() -> None:
    """They share one scope, where the later of two functions would silently win."""
    names: list[str] = []
    for script in ASSETS[1:]:
        text = asset(script)
        names += re.findall(r"^(?:async )?function (\w+)", text, re.MULTILINE)
        for line in re.findall(r"^(?:const|let) (.*)", text, re.MULTILINE):
            names += re.findall(r"(?:^|, )(\w+) = ", line.split("=>")[0])
    assert len(names) > 60
    assert sorted(names) == sorted(set(names))
