"""The completions of a report: their groups and branches, and the page as a person uses it."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from browser import needs_browser
from report_runs import rollout, write_lines, write_run

import policyloss as pl
from policyloss_lab.completions import BRANCHES
from policyloss_lab.report import collect, render
from policyloss_lab.report.rollouts import with_branches
from policyloss_lab.report.view import groups_of, view

Open = Callable[..., Any]


def stored(step: int, text: str, reward: float, **more: Any) -> dict[str, Any]:
    """A row whose tokens are the words of a text, and whose ratios are those in `ratio`."""
    tokens = [f"{word} " for word in text.split()]
    n = len(tokens)
    ratio = more.pop("ratio", [1.0] * n)
    row = {
        **rollout(step, tokens, reward=reward),
        "completion": text,
        "logp": [math.log(r) - 1 for r in ratio],
        "old_logp": [-1.0] * n,
        "rollout_logp": [-1.0] * n,
        "ratio": ratio,
        "advantage": more.get("token_advantage", [0.0])[0],
        "token_advantage": [1.0] * n,
        "ids": list(range(n)),
        "clipped": [r > 1.28 for r in ratio],
        **more,
    }
    return {name: x for name, x in row.items() if x is not None}


# ---------------------------------------------------------------- groups


def test_groups_have_the_numbers_of_their_rows(tmp_path: Path) -> None:
    rows = [
        stored(1, "a b", 0.0, group=0, finished=False),
        stored(1, "a b c d", 1.0, group=0),
        stored(1, "x", 0.5, group=1, groups=9),
        stored(2, "a", 0.25, group=0),
    ]
    run = write_run(tmp_path / "run", [], rollouts=rows)
    write_lines(run / "answers.jsonl", [stored(1, "h", 1.0, group=0, prompt="held out")])
    groups = groups_of(collect([run])["runs"][0])
    facts = [
        (g["step"], g["held_out"], g["of"], g["reward"], g["spread"], g["length"], g["cut"])
        for g in groups
    ]
    assert facts == [
        (1, False, None, 0.5, 0.5, 3.0, 1),
        (1, False, 9, 0.5, None, 1.0, 0),
        (1, True, None, 1.0, None, 1.0, 0),
        (2, False, None, 0.25, None, 1.0, 0),
    ]
    assert [len(g["rows"]) for g in groups] == [2, 1, 1, 1]


def test_rows_without_a_group_are_grouped_by_their_prompt(tmp_path: Path) -> None:
    """As other trainers store them, with nothing but texts and rewards."""
    texts = [("p", "one"), ("q", "two"), ("p", "three")]
    rows = [{"step": 1, "prompt": p, "completion": c, "reward": 1.0} for p, c in texts]
    run = write_run(tmp_path / "run", [], rollouts=rows)
    groups = groups_of(collect([run])["runs"][0])
    assert [(g["prompt"], [row["completion"] for row in g["rows"]]) for g in groups] == [
        ("p", ["one", "three"]),
        ("q", ["two"]),
    ]
    assert [g["length"] for g in groups] == [None, None]


def test_a_column_that_does_not_change_is_one_value(tmp_path: Path) -> None:
    row = stored(1, "a b", 1.0, entropy=[0.5, 0.25], mask=[True, True], ids=[7, 8])
    run = write_run(tmp_path / "run", [], rollouts=[row])
    (group,) = groups_of(collect([run])["runs"][0])
    (found,) = group["rows"]
    assert found["entropy"] == [0.5, 0.25]
    assert found["ids"] == [7, 8]
    assert found["mask"] is True
    assert found["token_advantage"] == found["ratio"] == 1.0
    assert found["ref_logp"] is None
    assert found["branch"] == list(BRANCHES).index("plain")


def test_the_runs_of_a_page_share_its_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four runs of 100 tokens on a page of 80: each has 20."""
    monkeypatch.setattr("policyloss_lab.limits.ALL_TOKENS", 80)
    rows = [stored(step, "a b c d e f g h i j", 1.0) for step in range(10)]
    runs = [write_run(tmp_path / f"run{i}", [], rollouts=rows) for i in range(4)]
    kept = [[row["step"] for row in run["rollouts"]] for run in collect(runs)["runs"]]
    assert kept == [[4, 9]] * 4
    assert len(collect(runs[:1])["runs"][0]["rollouts"]) == 5  # every second one


# ---------------------------------------------------------------- branches


def branches(rows: Sequence[Mapping[str, Any]], spec: pl.LossSpec, folder: Path) -> list[Any]:
    """The branches in a report of a run with this loss and these rows."""
    run = write_run(folder / "run", [], rollouts=rows)
    config = json.loads((run / "config.json").read_text())
    (run / "config.json").write_text(json.dumps({**config, "loss": spec.to_dict()}))
    return [row["branch"] for row in collect([run])["runs"][0]["rollouts"]]


def test_branches_follow_from_the_stored_numbers_and_the_loss(tmp_path: Path) -> None:
    """DAPO's bounds are 0.8 and 1.28, and the band keeps weights of 0.5 to 2."""
    spec = pl.preset("dapo").replace(correction=(pl.Band(0.5, 2.0),))
    ratio = [1.0, 1.3, 0.7, 1.3]
    rows = [
        stored(1, "a b c d", 1.0, ratio=ratio, mask=[True, True, True, False]),
        stored(1, "a b c d", 0.0, ratio=ratio, token_advantage=[-1.0] * 4),
        stored(1, "a b c d", 0.0, ratio=ratio, token_advantage=[0.0] * 4),
        # Weights exp(old − rollout) of 1 and e.
        stored(1, "a b", 1.0, rollout_logp=[-1.0, -2.0]),
        stored(1, "a b", 1.0, branch=["dual", "nonsense"]),  # stored branches count
        stored(1, "a b", 1.0, rollout_logp=[None, -1.0]),  # the band cannot be judged
        stored(1, "a b", 1.0, rollout_logp=[None, -1.0], mask=[False, True]),
    ]
    assert branches(rows, spec, tmp_path) == [
        ["plain", "upper", "plain", "masked"],
        ["plain", "plain", "lower", "plain"],
        ["no_advantage"] * 4,
        ["plain", "rejected"],
        ["dual", None],
        [None, None],
        ["masked", "plain"],
    ]


def test_a_loss_that_ranks_the_step_leaves_branches_unknown(tmp_path: Path) -> None:
    spec = pl.preset("ppo").replace(trust=pl.CovClip(fraction=0.5))
    assert branches([stored(1, "a b", 1.0)], spec, tmp_path) == [[None, None]]


def test_a_sequence_ratio_is_that_of_each_row(tmp_path: Path) -> None:
    """GSPO's bound is 1 + 4e-4: the mean log-ratio of the first row is beyond it."""
    rows = [stored(1, "a b", 1.0, ratio=[2.0, 1.0]), stored(1, "a b", 1.0)]
    spec = pl.preset("gspo")
    assert branches(rows, spec, tmp_path) == [["upper", "upper"], ["plain", "plain"]]


def test_without_a_loss_there_are_no_branches() -> None:
    row = {"tokens": ["a"], "branch": [None], "mask": [None], "logp": [1.0]}
    assert with_branches([row], {"spec": None, "explain": None}) == [row]


# ---------------------------------------------------------------- the page


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two steps of three prompts, one long completion, and answers to a held-out prompt."""
    rows = []
    for step in (10, 20):
        rows += [
            stored(step, "two and two is four", 1.0, group=0, prompt="add 2 2", answer="four",
                   ratio=[1.0, 1.5, 0.9, 1.1, 1.0], entropy=[0.1, 0.2, 0.3, 0.4, 2.0],
                   ref_logp=[-1.5] * 5, groups=16, finish_reason="end"),
            stored(step, "two and two is fish", 0.0, group=0, prompt="add 2 2", answer="four",
                   token_advantage=[-1.0] * 5, entropy=[0.5] * 5, ref_logp=[-1.0] * 5,
                   finish_reason="length", finished=False),
            stored(step, "yes", 0.0, group=1, prompt="is it so", token_advantage=[0.0]),
            stored(step, "no", 0.0, group=1, prompt="is it so", token_advantage=[0.0]),
            # Most ratios of the run are these, so the full colour stands for about 1.5.
            stored(step, "long " * 2_000, 0.5, group=2, prompt=f"write {step}",
                   ratio=[1.5] * 2_000),
        ]  # fmt: skip
    path = write_run(tmp_path_factory.mktemp("page") / "run", [{"step": 20, "a": 1}], rollouts=rows)
    answers = [
        {"step": 0, "prompt": "sort 312", "completion": "132", "reward": 0.0},
        {"step": 10, "prompt": "sort 312", "completion": "123", "reward": 1.0},
    ]
    write_lines(path / "answers.jsonl", answers)
    return path


@pytest.fixture(scope="module")
def report(run: Path) -> Path:
    file = run.parent / "report.html"
    file.write_text(render(collect([run])), encoding="utf-8")
    return file


@pytest.fixture
def page(tab: Any, report: Path) -> Open:
    """Opens the page, or that of another file."""

    def opened(address: str = "", file: Path = report) -> Any:
        tab.set_viewport_size({"width": 1280, "height": 1000})
        tab.goto("about:blank")  # another address of the same page would not reload it
        tab.goto(file.as_uri() + address)
        return tab

    return opened


def values(sheet: Any) -> dict[str, str]:
    """The page's text about the token under the pointer."""
    names, texts = (sheet.locator(f"#token-values {tag}").all_inner_texts() for tag in ("dt", "dd"))
    return dict(zip(names, texts, strict=True))


def steps_listed(sheet: Any) -> list[str]:
    return sheet.locator("#group-lines .group-line > :first-child").all_inner_texts()


@needs_browser
def test_a_group_is_shown_side_by_side(page: Open) -> None:
    """It begins with the group of the last step whose rewards differ most."""
    sheet = page()
    assert sheet.locator("#group-title").inner_text() == "Step 20"
    assert sheet.locator("#group-facts").inner_text() == (
        "2 completions · mean reward 0.5 · spread 0.5 · one of 16 groups of this step · "
        "sampled with the weights of step 19"
    )
    assert sheet.locator("#prompt").inner_text() == "add 2 2"
    assert sheet.locator("#answer").inner_text() == "four"
    heads = sheet.locator(".completion header").all_inner_texts()
    assert heads == [
        "reward 1 · advantage 0 · 5 tokens · ended by itself",
        "reward 0 · advantage -1 · 5 tokens · cut at the length limit",
    ]
    line = sheet.locator(".group-line[aria-selected=true]")
    assert line.get_by_role("gridcell").all_inner_texts()[3:] == ["0.5", "0.5", "5", "1"]


@needs_browser
def test_a_token_shows_its_numbers_and_its_branch(page: Open) -> None:
    sheet = page()
    token = sheet.locator(".tokens >> nth=0").locator(".token >> nth=1")
    token.hover()
    assert values(sheet) == {
        "token": '"and "',
        "id": "1",
        "position": "2 of 5",
        "branch": "at the upper bound",
        "policy gradient": "none",
        "ratio": "1.5",
        "advantage": "1",
        "logp": "-0.594535",
        "old_logp": "-1",
        "rollout_logp": "-1",
        "ref_logp": "-1.5",
        "entropy": "0.2",
        "old_logp − rollout_logp": "0",
        "logp − ref_logp": "0.905465",
    }
    assert sheet.locator("#token-branch").inner_text() == BRANCHES["upper"][1]
    sheet.locator("h2 >> nth=0").hover()  # away: the chosen token is shown again
    assert values(sheet)["position"] == "1 of 5"


@needs_browser
def test_arrow_keys_move_between_tokens_completions_and_groups(page: Open) -> None:
    sheet = page()
    sheet.locator(".tokens >> nth=0").locator(".token >> nth=0").focus()
    for key, where in (
        ("ArrowRight", "2 of 5"), ("End", "5 of 5"), ("ArrowRight", "5 of 5"),
        ("ArrowDown", "5 of 5"), ("ArrowLeft", "4 of 5"),
    ):  # fmt: skip
        sheet.keyboard.press(key)
        assert values(sheet)["position"] == where, key
    assert values(sheet)["advantage"] == "-1"  # in the second completion
    assert "sample=1&token=3" in sheet.url
    sheet.locator(".group-line[aria-selected=true]").focus()
    sheet.keyboard.press("ArrowUp")
    assert sheet.locator("#group-title").inner_text() == "Step 10 · held-out prompt"
    sheet.keyboard.press("ArrowUp")
    assert sheet.locator("#prompt").inner_text() == "write 10"
    sheet.keyboard.press("End")
    assert sheet.locator("#prompt").inner_text() == "write 20"
    assert sheet.evaluate("document.activeElement.getAttribute('aria-selected')") == "true"
    sheet.keyboard.press("Home")
    assert sheet.locator("#group-title").inner_text() == "Step 0 · held-out prompt"


@needs_browser
def test_tokens_are_coloured_by_the_chosen_value(page: Open) -> None:
    """Colour is not the only sign: strong tokens carry + or −, and each branch has a mark."""
    sheet = page()
    offers = sheet.locator("#color option").all_inner_texts()
    assert offers == [
        "ratio", "advantage", "branch of the loss", "entropy", "surprise",
        "mismatch of trainer and sampler", "KL to the reference",
    ]  # fmt: skip
    first = sheet.locator(".tokens >> nth=0").locator(".token")

    def classes() -> list[str]:
        return [name.removeprefix("token").strip() for name in first.evaluate_all(
            "nodes => nodes.map((node) => node.className)")]  # fmt: skip

    assert classes() == ["", "clipped strong-plus", "", "", ""]
    sheet.locator("#color").select_option("entropy")
    assert classes() == ["", "clipped", "", "", "strong-plus"]
    sheet.locator("#color").select_option("clip")
    assert classes() == [
        *("branch-plain", "clipped branch-upper", "branch-plain", "branch-plain", "branch-plain")
    ]
    sign = "node => getComputedStyle(node, '::after').content"
    assert first.nth(1).evaluate(sign) == '"▲"'
    assert sheet.locator("#token-legend .token").all_inner_texts() == [
        "plain",
        "at the upper bound",
        "underlined",
    ]
    assert "color=clip" in sheet.url
    # Held-out answers have no numbers here: there is nothing to colour by, and no error.
    sheet.locator("#show").select_option("held_out")
    sheet.locator(".group-line[data-i]").first.click()
    assert sheet.locator("#color option").count() == 0
    assert sheet.locator(".completion .answer-text").inner_text() == "132"


@needs_browser
def test_groups_are_found_by_text_step_reward_spread_and_length(page: Open) -> None:
    sheet = page()
    assert steps_listed(sheet) == ["0", "10", "10", "10", "10", "20", "20", "20"]
    sheet.locator("#find").fill("FISH")
    sheet.get_by_text("2 of 8 lines").wait_for()
    assert steps_listed(sheet) == ["10", "20"]
    assert "find=FISH" in sheet.url
    sheet.locator("#find").fill("nowhere")
    sheet.wait_for_selector("text=Nothing fits this choice.")
    sheet.locator("#find").fill("")
    sheet.locator("#group-lines .group-line >> nth=7").wait_for()
    sheet.locator("#only").select_option("20")
    assert steps_listed(sheet) == ["20"] * 3
    sheet.locator("#only").select_option("")

    def column(place: int) -> list[str]:
        return sheet.locator(f"#group-lines .group-line > :nth-child({place})").all_inner_texts()

    sheet.get_by_role("button", name="Mean").click()
    assert column(5) == ["1", "0.5", "0.5", "0.5", "0.5", "0", "0", "0"]
    sheet.get_by_role("button", name="Mean").click()
    assert column(5) == ["0", "0", "0", "0.5", "0.5", "0.5", "0.5", "1"]
    heads = sheet.locator(".heads [aria-sort=ascending]")
    assert heads.all_inner_texts() == ["Mean ▴"]
    sheet.get_by_role("button", name="Tokens", exact=True).click()
    assert column(7)[:4] == ["2000", "2000", "5", "5"]
    sheet.get_by_role("button", name="Spread").click()
    assert column(6) == ["0.5", "0.5", "0", "0", "–", "–", "–", "–"]
    shown = sheet.locator("#show option").all_inner_texts()
    assert shown == [
        "all prompts (8)", "rewards that differ (2)", "equal rewards (2)",
        "something cut short (2)", "held-out prompts (2)", "seen at several steps (6)",
    ]  # fmt: skip
    sheet.locator("#show").select_option("equal")
    assert column(6) == ["0", "0"]


@needs_browser
def test_one_prompt_is_followed_over_the_run(page: Open) -> None:
    sheet = page("#show=held_out&step=10&group=3")
    lines = sheet.locator("#history tbody tr")
    assert lines.count() == 2
    assert lines.nth(1).get_attribute("aria-current") == "true"
    # "132" became "123": the first character and nothing else is the same.
    assert lines.nth(0).locator("bdi").inner_text() == "132"
    assert lines.nth(0).locator("mark").count() == 0
    assert lines.nth(1).locator("bdi").inner_text() == "123"
    assert lines.nth(1).locator("mark").inner_text() == "23"
    lines.nth(0).get_by_role("button").click()
    assert sheet.locator("#group-title").inner_text() == "Step 0 · held-out prompt"
    # Of two completions, the most frequent one; a prompt of one step alone has no history.
    sheet.evaluate("location.hash = '#step=10&group=0'")
    sheet.locator("#history >> text=1 of 2").first.wait_for()
    texts = sheet.locator("#history tbody td:last-child").all_inner_texts()
    assert texts == ["two and two is four 1 of 2, and 1 other"] * 2
    sheet.evaluate("location.hash = '#step=10&group=2'")
    sheet.locator("#history").wait_for(state="hidden")


@needs_browser
def test_only_visible_rows_are_built(page: Open, tmp_path: Path) -> None:
    """Of 2,000 tokens, and of 300 prompts."""
    sheet = page("#step=20&group=2")
    assert sheet.locator("#tokens").bounding_box()["y"] > 0
    sheet.locator(".tokens").scroll_into_view_if_needed()
    sheet.wait_for_timeout(100)
    first = sheet.locator(".tokens .token").count()
    assert 300 <= first <= 900
    sheet.locator(".tokens").evaluate("node => { node.scrollTop = node.scrollHeight; }")
    sheet.locator(f".tokens .token >> nth={first}").wait_for()
    sheet.locator(".tokens .token >> nth=0").focus()
    sheet.keyboard.press("End")
    assert values(sheet)["position"] == "2000 of 2000"
    assert sheet.locator(".tokens .token").count() == 2_000
    many = write_run(
        tmp_path / "many",
        [],
        rollouts=[stored(s, f"t{s}", 0.0, prompt=f"p{s}", group=0) for s in range(300)],
    )
    (tmp_path / "many.html").write_text(render(collect([many])), encoding="utf-8")
    sheet = page(file=tmp_path / "many.html")
    assert sheet.locator("#group-lines .group-line").count() < 40
    assert steps_listed(sheet)[-1] == "299"
    sheet.locator("#groups").evaluate("node => { node.scrollTop = 0; }")
    sheet.wait_for_selector("#group-lines >> text=p0")
    assert sheet.locator("#group-lines .group-line").count() < 40
    assert sheet.locator("#groups").get_attribute("aria-rowcount") == "301"


@needs_browser
def test_the_page_fits_a_phone_and_prints(page: Open) -> None:
    sheet = page("#color=advantage")
    sheet.set_viewport_size({"width": 390, "height": 800})
    assert sheet.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert not sheet.locator(".heads > :nth-child(6)").is_visible()
    aside = sheet.locator("aside")
    position = "node => getComputedStyle(node).position"
    assert aside.evaluate(position) == "static"
    sheet.locator(".tokens .token >> nth=1").click()  # a tapped token keeps its numbers in sight
    assert aside.evaluate(position) == "sticky"
    sheet.emulate_media(media="print")
    assert not sheet.locator("#groups").is_visible()
    assert sheet.locator(".tokens").first.evaluate("n => getComputedStyle(n).maxHeight") == "none"


@needs_browser
def test_a_screen_reader_gets_descriptions(page: Open) -> None:
    sheet = page()
    grid = sheet.get_by_role("grid", name="Prompts and their completions")
    assert grid.get_by_role("row").count() == 9  # with the line of heads
    assert grid.get_by_role("columnheader").count() == 8
    listbox = sheet.get_by_role("listbox", name="Completion 2: reward 0")
    assert listbox.get_by_role("option").count() == 5
    assert listbox.get_by_role("option").first.get_attribute("aria-setsize") == "5"
    # One stop of the tab key for each completion and one for the table.
    for where in (".tokens >> nth=0", ".tokens >> nth=1", "#group-lines"):
        assert sheet.locator(where).locator("[tabindex='0']").count() == 1, where
    assert sheet.locator("#token-values").get_attribute("aria-live") == "polite"


@needs_browser
def test_a_page_without_tokens_offers_no_colours(page: Open, tmp_path: Path) -> None:
    rows = [{"step": 1, "prompt": "p", "completion": "some text", "reward": 1.0}]
    data = collect([write_run(tmp_path / "run", [], rollouts=rows)])
    assert view(data)["scales"] == {}
    (tmp_path / "texts.html").write_text(render(data), encoding="utf-8")
    sheet = page(file=tmp_path / "texts.html")
    assert "some text" in sheet.locator("#completions").inner_text()
    for what in ("#color", "#token-legend", "aside"):
        assert sheet.locator(what).is_hidden(), what


# ---------------------------------------------------------------- turns


@pytest.fixture
def in_turns(tmp_path: Path) -> Path:
    """A call, two tokens of a tool, and an answer. Numbers at the tool's tokens mean nothing."""
    turns = {"turn_ids": [0, 0, -1, -1, 1], "mask": [True, True, False, False, True]}
    ratio = [1.0, 1.1, 50.0, 50.0, 1.0]
    row = stored(1, "a ? x y b", 1.0, **turns, ratio=ratio, clipped=[False] * 5, group=0)
    return write_run(tmp_path / "run", [{"step": 1, "a": 1}], rollouts=[row])


def test_tokens_of_a_tool_have_no_numbers(in_turns: Path) -> None:
    data = collect([in_turns])
    ((row,),) = (group["rows"] for group in groups_of(data["runs"][0]))
    assert row["turn_ids"] == [0, 0, -1, -1, 1]
    assert row["ratio"] == [1.0, 1.1, None, None, 1.0]
    assert view(data)["scales"]["ratio"] < math.log(50)


@needs_browser
def test_turns_are_shown_apart(page: Open, in_turns: Path) -> None:
    file = in_turns.parent / "report.html"
    file.write_text(render(collect([in_turns])), encoding="utf-8")
    sheet = page(file=file)
    assert "5 tokens · 2 turns" in sheet.locator(".completion header").inner_text()
    boxes = sheet.locator(".tokens .token")
    classes = [box.get_attribute("class") for box in boxes.all()]
    assert [name == "token environment" for name in classes] == [False, False, True, True, False]
    colours = [box.evaluate("box => getComputedStyle(box).backgroundColor") for box in boxes.all()]
    assert colours[2] == colours[3] not in (colours[0], colours[4])
    boxes.nth(2).hover()
    assert values(sheet)["turn"] == "the environment's"
    assert "ratio" not in values(sheet)
    boxes.nth(4).hover()
    assert values(sheet)["turn"] == "2"
    assert "written by the environment" in sheet.locator("#token-legend").inner_text()
    assert "not trained on" not in sheet.locator("#token-legend").inner_text()
