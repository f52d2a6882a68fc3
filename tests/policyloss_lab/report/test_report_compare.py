"""Runs side by side: groups, equal runs, changed settings, and whether they learn."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from report_runs import write_run

from policyloss_lab.report import collect, render, sections
from policyloss_lab.report.compare import coinciding
from policyloss_lab.report.markup import in_sentence
from policyloss_lab.report.verdict import WORDS, verdict_of
from policyloss_lab.report.view import view


def made(folder: Path, name: str, last: float = 0.5, **settings: Any) -> Path:
    prompts = {"eval/prompts": n} if (n := settings.pop("prompts", None)) else {}
    metrics = [
        {"step": 0, "eval/accuracy": 0.25, "reward/mean": 0.0, **prompts},
        {"step": 1, "eval/accuracy": last, "reward/mean": last, **prompts},
    ]
    loss = settings.pop("loss", "dapo")
    return write_run(folder / name, metrics, loss=loss, config=settings)


def test_runs_that_differ_in_the_seed_alone_are_one_group(tmp_path: Path) -> None:
    runs = [
        made(tmp_path, "a", 0.5, seed=1, out="runs/a", lr=1e-3),
        made(tmp_path, "b", 0.75, seed=1, out="runs/b", lr=3e-3),
        made(tmp_path, "c", 1.0, seed=2, out="runs/c", lr=1e-3),
        made(tmp_path, "d", 0.5, seed=1, lr=1e-3, loss="gspo"),
        made(tmp_path, "e", 0.75, seed=3, nested={"run_name": "x", "seed": 7}, lr=1e-3),
    ]
    groups = collect(runs)["groups"]
    assert [(g["label"], g["runs"]) for g in groups] == [
        ("dapo, lr 0.001 · 3 seeds", [0, 2, 4]),
        ("b", [1]),
        ("d", [3]),
    ]
    # 0.5, 1 and 0.75 at the end.
    assert groups[0]["end"] == {"metric": "held_out", "mean": 0.75, "low": 0.5, "high": 1.0}
    assert groups[1]["end"] is None


def test_a_loss_that_was_changed_is_another_setting(tmp_path: Path) -> None:
    runs = [made(tmp_path, name, seed=i) for i, name in enumerate("ab")]
    stored = json.loads((runs[1] / "config.json").read_text())
    stored["loss"]["trust"]["eps_high"] = 0.5
    (runs[1] / "config.json").write_text(json.dumps(stored))
    assert [group["runs"] for group in collect(runs)["groups"]] == [[0], [1]]


def test_a_run_without_settings_is_alone(tmp_path: Path) -> None:
    runs = [made(tmp_path, name) for name in "ab"]
    for run in runs:
        (run / "config.json").unlink()
    assert [group["runs"] for group in collect(runs)["groups"]] == [[0], [1]]


def test_many_settings_and_equal_seeds_in_the_name_of_a_group(tmp_path: Path) -> None:
    settings = {f"k{i}": 1 for i in range(5)}
    runs = [made(tmp_path, name, seed=0, **settings) for name in "ab"]
    runs.append(made(tmp_path, "c", seed=0, **{f"k{i}": 2 for i in range(5)}))
    assert collect(runs)["groups"][0]["label"] == "dapo, k0 1, k1 1, k2 1, … · 2 runs"


def test_runs_that_coincide_are_named(tmp_path: Path) -> None:
    runs = [made(tmp_path, "a"), made(tmp_path, "b", 0.75), made(tmp_path, "c")]
    data = collect(runs)
    assert data["identical"] == [[0, 2]]
    page = sections.verdict(data)
    assert "a and c coincide: every metric is the same at every step" in page
    # Of "reward/mean", the first value of all is the same, and the last of two.
    assert view(data)["same"] == {"eval/accuracy": [[0, 2]], "reward/mean": [[0, 2]]}


def test_lines_coincide_metric_by_metric_in_steps_and_values() -> None:
    def run(**series: tuple[list[int], list[float | None]]) -> dict[str, Any]:
        return {
            "steps": [steps for steps, _ in series.values()],
            "series": {key: [i, values] for i, (key, (_, values)) in enumerate(series.items())},
        }

    runs = [
        run(x=([0, 1], [1.0, None]), y=([0, 1], [1.0, 2.0])),
        run(y=([0, 2], [1.0, 2.0]), x=([0, 1], [1.0, None])),  # y has other steps
        run(x=([0, 1], [1.0, 1.0])),
        run(x=([0, 1], [1.0, 1.0])),
    ]
    assert coinciding(runs) == {"x": [[0, 1], [2, 3]]}


def test_names_in_a_sentence() -> None:
    assert in_sentence(["a"]) == "a"
    assert in_sentence(["a", "b", "c"]) == "a, b and c"
    assert in_sentence(list("abcdef")) == "a, b, c, d, e and f"
    assert in_sentence(list("abcdefg")) == "a, b, c, d, e and 2 more"


def table_of(page: str, title: str) -> str:
    return page.split(f"<h3>{title}</h3>", 1)[1].split("</table>", 1)[0]


def test_settings_that_differ_come_first_and_defaults_are_marked(tmp_path: Path) -> None:
    runs = [made(tmp_path, "a", lr=1e-3), made(tmp_path, "b", lr=5e-3)]
    for run in runs:
        stored = json.loads((run / "config.json").read_text())
        stored["defaults"] = {"lr": 1e-3, "steps": 60, "task": "sort", "seed": 0}
        (run / "config.json").write_text(json.dumps(stored))
    page = sections.settings(collect(runs), "config")
    different, changed = table_of(page, "Different"), table_of(page, "Set by hand")
    assert page.index("Different") < page.index("Set by hand") < page.index("All 7")
    mark = ' <span class="quiet">(default)</span>'
    assert f"lr<td><bdi>0.001</bdi>{mark}<td><bdi>0.005</bdi></tbody>" in different
    assert "<th scope=row>steps<td><bdi>2</bdi><td><bdi>2</bdi></tbody>" in changed
    assert "task" not in different + changed  # the default in both
    complete = page.split("All 7", 1)[1]
    assert f"task<td><bdi>sort</bdi>{mark}" in complete
    # The default of the model is not stored.
    assert "model<td><bdi>tiny</bdi><td>" in complete


def curve(values: Sequence[float | None]) -> dict[str, list[Any]]:
    return {"step": list(range(len(values))), "value": list(values)}


def judged(
    metrics: dict[str, dict[str, list[Any]]],
    prompts: int | None = None,
    state: str = "finished",
    planned: int | None = None,
) -> dict[str, str]:
    steps = max((len(c["step"]) for c in metrics.values()), default=0)
    summary = {"steps": steps, "planned_steps": planned, "state": state}
    if prompts is not None:
        evaluated = metrics["eval/accuracy"]["step"]
        logged = {"step": evaluated, "value": [prompts] * len(evaluated)}
        metrics = {**metrics, "eval/prompts": logged}
    return verdict_of(metrics, summary)


def test_a_held_out_accuracy_that_rises_by_more_than_chance() -> None:
    """98 prompts: 49 right is q = 50/100 and 73.5 is 74.5/100, so the variances are 0.25/98 and
    0.745·0.255/98, and two standard errors are 2·√((0.25 + 0.189975)/98) = 0.134.
    """
    assert judged({"eval/accuracy": curve([0.5, 0.6, 0.75])}, 98) == {
        "state": "learns",
        "sentence": "Learns: held-out accuracy rose from 50.0 % at step 0 to 75.0 % at step 2 "
        "(+25 ± 13 percentage points).",
    }
    # 12 points up are within 2·√((0.25 + 0.2361)/98) = 14 points; with 10 times the prompts, 4.5.
    within = {"eval/accuracy": curve([0.5, 0.62])}
    assert judged(within, 98)["state"] == "unclear"
    assert judged(within, 98)["sentence"].endswith("(+12 ± 14 percentage points).")
    assert judged(within, 980)["state"] == "learns"
    # 2 points up are 2 ± 4.5: less than a quarter of the 50 points that could be gained.
    assert judged({"eval/accuracy": curve([0.5, 0.52])}, 980)["sentence"].endswith(
        "(+2 ± 4.5 percentage points), no more than chance."
    )


def test_the_prompts_that_were_evaluated_decide_and_not_an_option(tmp_path: Path) -> None:
    """One right answer more of n. Two standard errors are 2·√(Σ q(1 − q)/n) with q = 1/(n + 2) and
    2/(n + 2): of 7 prompts 2·√((8/81 + 14/81)/7) = 39 points.
    """
    for n, words in {7: "(+14.3 ± 39 percentage", 1: "(+100 ± 1.3e+02", 20: "(+5 ± 16"}.items():
        prompts = {"eval/prompts": n}
        rows = [
            {"step": 0, "eval/accuracy": 0.0, **prompts},
            {"step": 9, "eval/accuracy": 1 / n, **prompts},
        ]
        run = write_run(tmp_path / f"run{n}", rows, config={"eval_prompts": 256})
        verdict = collect([run])["runs"][0]["verdict"]
        state = "flat" if n == 20 else "unclear"
        assert (verdict["state"], words in verdict["sentence"]) == (state, True), (n, verdict)
    # Without that number the noise of two evaluations is unknown.
    for row in rows:
        del row["eval/prompts"]
    old = write_run(tmp_path / "old", rows, config={"eval_prompts": 256})
    assert collect([old])["runs"][0]["verdict"]["state"] == "early"


def test_accuracy_and_reward_that_disagree_are_both_named() -> None:
    rising = [0.02 + 0.3 * i / 19 + 0.01 * (-1) ** i for i in range(20)]
    constant = [0.5 + 0.01 * (-1) ** i for i in range(20)]
    few, rose, fell = curve([0.0, 1 / 7]), curve([0.2, 0.9]), curve([0.9, 0.2])
    for accuracy, prompts, reward, state, words in (
        # A reward that rose 16 times learns, although no answer is right.
        (curve([0.0, 0.0]), 980, rising, "learns", "Learns: the mean reward rose .*; but held-out"),
        (few, 7, rising, "learns", "Learns: the mean reward rose .*; but held-out accuracy is 0.0"),
        (few, 7, rising[::-1], "worse", "Gets worse: the mean reward fell .*; but held-out"),
        (few, 7, constant, "unclear", r"Cannot tell: held-out accuracy is 0.0 % .* points\)\.$"),
        (
            curve([0.2, 0.9]),
            98,
            rising[::-1],
            "learns",
            "Learns: held-out .*; but the mean .* fell",
        ),
        (fell, 98, rising, "worse", "Gets worse: held-out .*; but the mean .* rose"),
        (rose, 98, rising, "learns", r"Learns: held-out accuracy [^;]*$"),
    ):
        found = judged({"eval/accuracy": accuracy, "reward/mean": curve(reward)}, prompts)
        assert found["state"] == state, (words, found)
        assert re.match(words, found["sentence"]), (words, found)


def test_the_table_shows_the_numbers_of_the_verdict(tmp_path: Path) -> None:
    """One step of a noisy reward may fall while its level rises: 30 steps, means of 6."""
    rewards = [0.2 + 0.02 * i + 0.02 * (-1) ** i for i in range(30)]
    rewards[0], rewards[-1] = 0.9, 0.1
    rows = [{"step": i, "reward/mean": r} for i, r in enumerate(rewards)]
    data = collect([write_run(tmp_path / "run", rows)])
    first, last = sum(rewards[:6]) / 6, sum(rewards[-6:]) / 6
    assert last > first
    assert data["runs"][0]["levels"]["reward"] == {
        "first": pytest.approx(first),
        "first_step": 0,
        "last": pytest.approx(last),
        "last_step": 29,
        "best": pytest.approx(max(sum(rewards[i : i + 6]) / 6 for i in range(25))),
        "over": 6,
    }
    table = sections.overview(data["runs"])
    assert "means of 6 steps, step 0 → step 29" in table
    assert "0.363 →</span> <b>0.62<" in table


def test_an_accuracy_that_fell_or_lost_its_gain() -> None:
    fell = judged({"eval/accuracy": curve([0.5, 0.2])}, 98)
    assert fell["state"] == "worse"
    assert fell["sentence"].startswith("Gets worse: held-out accuracy fell from 50.0 % at step 0")
    lost = judged({"eval/accuracy": curve([0.2, 0.9, 0.4])}, 98)
    assert lost["state"] == "worse"
    assert "reached 90.0 % at step 1 and fell to 40.0 % at step 2 (−50 ±" in lost["sentence"]
    # A loss of a tenth of the gain is not a fall.
    assert judged({"eval/accuracy": curve([0.2, 0.9, 0.83])}, 980)["state"] == "learns"


def test_nothing_left_to_learn() -> None:
    assert judged({"eval/accuracy": curve([1.0, 0.99])}, 256)["state"] == "solved"
    # 256 of 256 twice: no chance of a change, and no division by it.
    assert judged({"eval/accuracy": curve([1.0, 1.0])}, 256)["state"] == "solved"


def test_a_reward_is_judged_by_its_first_and_last_fifth() -> None:
    """20 values that alternate by ±0.5 around a level: the neighbours differ by 1, so the variance
    of one is 19·1/2/19 = 0.5 where the level is constant, and a mean of 4 has two standard errors
    of 2·√(2·0.5/4) = 1.
    """
    flat = [(-1) ** i / 2 for i in range(20)]
    assert judged({"reward/mean": curve(flat)})["sentence"] == (
        "Cannot tell: the mean reward is 0 in steps 0 to 3 and 0 in steps 16 to 19 (+0 ± 1)."
    )
    # A gain of 1 is less than a quarter of a beginning of 5.
    assert judged({"reward/mean": curve([5 + x for x in flat])})["sentence"] == (
        "Does not learn: the mean reward is 5 in steps 0 to 3 and 5 in steps 16 to 19 (+0 ± 1), "
        "no more than chance."
    )
    assert judged({"reward/mean": curve([0.0] * 20)})["state"] == "flat"
    # Of 1000 steps around 0 the error is 0.1, less than a quarter of the noise of a step, 0.71.
    assert judged({"reward/mean": curve(flat * 50)})["state"] == "flat"
    rising = [x + 0.2 * i for i, x in enumerate(flat)]
    # The means are 0.3 and 3.5. Neighbours differ by −0.8 and 1.2 in turns, 10 and 9 times, so the
    # variance is (10·0.64 + 9·1.44)/2/19 = 0.5095, and two standard errors are 1.0.
    assert judged({"reward/mean": curve(rising)}) == {
        "state": "learns",
        "sentence": "Learns: the mean reward rose from 0.3 in steps 0 to 3 to 3.5 in steps 16 to "
        "19 (+3.2 ± 1).",
    }
    assert judged({"reward/mean": curve(rising[::-1])})["state"] == "worse"
    # One gap in it, and an infinite value elsewhere, change nothing.
    assert (
        judged({"reward/mean": curve([*rising, None]), "x": curve([math.inf])})["state"] == "learns"
    )


def test_too_early_and_unmeasured() -> None:
    assert judged({"reward/mean": curve([0.0, 1.0])}) == {
        "state": "early",
        "sentence": "Too early to tell: 2 steps were logged.",
    }
    assert judged({"grad_norm": curve([1.0])})["state"] == "unclear"
    assert judged({"eval/accuracy": curve([0.5])}, 256)["state"] == "early"
    noise = {"reward/mean": curve([(-1) ** i / 2 for i in range(20)])}
    running = judged(noise, state="running", planned=100)
    assert running["sentence"].startswith("Too early to tell: 20 of 100 steps are done; the mean")
    assert judged(noise, state="running", planned=30)["state"] == "unclear"
    assert judged(noise, state="stopped", planned=100)["state"] == "unclear"


def test_the_verdict_leads_the_page(tmp_path: Path) -> None:
    """One run: its sentence. Several: how many of which, the worst as the sign, seeds together."""
    one = collect([made(tmp_path, "a", 0.75, seed=0, prompts=256)])
    page = render(one)
    assert page.index("Learns: held-out accuracy rose") < page.index("<table")
    runs = [
        tmp_path / "a",
        made(tmp_path, "b", 0.5, seed=1, prompts=256),
        made(tmp_path, "c", 0.0, seed=0, prompts=256, lr=9),
    ]
    head = sections.verdict(collect(runs))
    assert (
        '<p class="verdict worse"><i aria-hidden="true">▼</i>Learns: 2 of 3 runs; gets worse'
        in head
    )
    assert (
        "<bdi>dapo · 2 seeds</bdi></b>: learns: 2 of 2. Held-out accuracy at the end: 62.5 % on "
        "average, from 50.0 % to 75.0 %." in head
    )
    assert "<bdi>c</bdi></b>: Gets worse: held-out accuracy fell from 25.0 % at step 0" in head


def test_every_state_has_words_and_a_mark() -> None:
    assert set(sections._MARKS) == set(WORDS)


def test_many_runs_have_a_short_head(tmp_path: Path) -> None:
    runs = [made(tmp_path, f"r{i:02d}", prompts=256, lr=i) for i in range(12)]
    head = sections.verdict(collect(runs))
    visible, folded = head.split("<details>")
    # The twelfth line states that all of them coincide.
    assert (visible.count("<li>"), folded.count("<li>")) == (8, 5)
    assert "r00, r01, r02, r03, r04 and 7 more coincide" in folded


@pytest.mark.parametrize("count", [3, 4])
def test_many_healthy_runs_share_a_line(tmp_path: Path, count: int) -> None:
    metrics = [{"step": s, "reward/mean": 0.1 + 0.02 * s} for s in range(30)]
    runs = [write_run(tmp_path / f"r{i}", metrics) for i in range(count)]
    page = sections.health(collect(runs)["runs"])
    assert page.count("<li>") == (3 if count == 3 else 1)
    assert ("No symptom in 4 runs: r0, r1, r2 and r3" in page) == (count == 4)
