"""The evidence: every preset is run, a stopped run continues, medians are medians, and the page
shows the contents of the file.
"""

from __future__ import annotations

import json
import signal
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest
from benchmarks import evidence, evidence_large
from benchmarks.evidence_plan import (
    CLIP_LOSSES,
    CLIP_RATES,
    COMMON,
    PLANS,
    Job,
    Plan,
    clip_study,
    jobs,
)
from docs.evidence_figure import Chart

from docs import evidence_page
from policyloss.catalogue import PRESETS
from policyloss.errors import InputError

GPU = {"gpu": "a GPU", "torch": "2"}


def made(job: Job, accuracies: tuple[float, ...] = (0.4, 0.95), **more: Any) -> dict[str, Any]:
    """A record as `train_one` gives it, of a run that was never made:
    evaluated every 5 steps, 2 seconds a step.
    """
    metrics: list[dict[str, Any]] = [
        {
            "step": 5 * i,
            "eval/accuracy": x,
            "grad_norm": 1.0,
            "policy/loss": 0.1,
            "policy/ratio_max": 2.0,
        }
        for i, x in enumerate(accuracies)
    ]
    timing = [
        {"step": step, "step_s": 2.0 if step else 100.0} for step in range(5 * len(accuracies))
    ]
    return {
        **evidence._named(job),
        **evidence.summary(metrics, timing, with_curves=job.study != "presets"),
        **more,
    }


def a_job(preset: str = "grpo", seed: int = 0, **common: Any) -> Job:
    return Job("presets", preset, seed, PLANS[preset], {**COMMON, **common})


def test_every_preset_is_run_with_options_that_go_together() -> None:
    assert list(PLANS) == list(PRESETS)
    everything = jobs(seeds=3)
    assert len(everything) == 3 * (len(PRESETS) + len(CLIP_RATES) * len(CLIP_LOSSES))
    assert (
        len({job.key for job in everything})
        == len({job.fingerprint for job in everything})
        == len(everything)
    )
    assert all(job.config(Path("x")).steps <= 60 for job in everything)
    assert all(job.plan.why for job in everything)
    critics = {
        job.preset
        for job in everything
        if job.study == "presets" and job.config(Path("x")).with_critic
    }
    assert critics == {"ppo", "ppo_dual_clip", "decoupled_ppo"}


def test_the_study_of_dual_clip_changes_the_clip_alone() -> None:
    for lr in CLIP_RATES:
        chosen = [job for job in jobs(1, ["dual_clip"]) if job.study == clip_study(lr)]
        configs = [{**job.config(Path("x")).to_dict(), "loss": None} for job in chosen]
        assert len(chosen) == 3
        assert all(config == configs[0] for config in configs)
        assert configs[0]["lr"] == lr
        # Recomputed, the ratio would be 1 at the first update however old they are.
        assert configs[0]["old_logp"] == "rollout"
        assert {job.spec.replace(trust=chosen[0].spec.trust) for job in chosen} == {chosen[0].spec}


def test_another_number_is_another_experiment() -> None:
    job = a_job()
    others = [
        Plan(job.plan.options, {"trust.eps_high": 0.3}),
        Plan({**job.plan.options, "lr": 0.01}),
    ]
    marks = {
        job.fingerprint,
        *(Job("presets", "grpo", 0, plan).fingerprint for plan in others),
        a_job(seed=1).fingerprint,
    }
    assert len(marks) == 4
    assert (
        Job("presets", "grpo", 0, Plan(job.plan.options, why="said otherwise")).fingerprint
        == job.fingerprint
    )


def test_only_some(capsys: pytest.CaptureFixture[str]) -> None:
    assert [job.key for job in jobs(2, ["grpo"])] == [
        ("presets", "grpo", 0),
        ("presets", "grpo", 1),
    ]
    with pytest.raises(InputError, match=r"grpu.*grpo"):
        jobs(1, ["grpu"])
    with pytest.raises(InputError, match="--seeds must be at least 1, got 0"):
        jobs(0)
    with pytest.raises(SystemExit):
        evidence.main(["--only", "grpu"])
    assert "error: unknown preset 'grpu'" in capsys.readouterr().err


def test_summary_of_a_run() -> None:
    accuracy = {0: 0.25, 5: 0.9, 10: 0.5}
    metrics = [
        {"step": s, **({"eval/accuracy": accuracy[s]} if s in accuracy else {})} for s in range(11)
    ]
    metrics[10] |= {"policy/kl_old_k3": 0.123456, "grad_norm": None, "policy/nonfinite_tokens": 3.0}
    timing = [{"step": s, "step_s": 100.0 if s == 0 else s / 10} for s in range(11)]
    found = evidence.summary(metrics, timing)
    assert (found["start"], found["end"], found["best"]) == (0.25, 0.5, 0.9)
    # 0.1 + … + 0.5; the evaluation before step 1 is not training.
    assert found["to_goal"] == {
        "steps": 5,
        "seconds": 1.5,
    }
    assert found["seconds"] == 5.5  # 0.1 + … + 1.0
    assert found["accuracy"] == {"0": 0.25, "5": 0.9, "10": 0.5}
    assert found["final"] == {"kl_old": 0.1235, "clip_fraction": None, "grad_norm": None}
    assert found["nonfinite_tokens"] == 3
    assert "curves" not in found
    metrics[5]["eval/accuracy"] = 0.899
    assert evidence.summary(metrics, timing)["to_goal"] is None


def test_a_second_call_runs_the_missing_jobs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, asked = tmp_path / "evidence.json", []

    def work(job: Job) -> dict[str, Any]:
        asked.append(job.key[1:])
        return (
            made(job)
            if job.preset != "dapo" or len(asked) > 3
            else {**evidence._named(job), "error": "ValueError: no"}
        )

    first = [a_job("grpo"), a_job("dapo"), a_job("grpo", 1)]
    evidence.run_all(first, evidence.Results(out, 1), 1, work)
    assert asked == [("grpo", 0), ("dapo", 0), ("grpo", 1)]
    assert "[2/3] presets dapo seed 0: failed, ValueError: no" in capsys.readouterr().out

    asked[:] = [("", 0)] * 3
    changed = a_job("grpo", 1, lr=0.5)
    evidence.run_all(
        [a_job("grpo"), a_job("dapo"), changed, a_job("gspo")], evidence.Results(out, 1), 1, work
    )
    # Failed runs, runs with other settings, new runs.
    assert asked[3:] == [
        ("dapo", 0),
        ("grpo", 1),
        ("gspo", 0),
    ]
    stored = json.loads(out.read_text())
    assert [(run["preset"], run["seed"]) for run in stored["runs"]] == [
        ("dapo", 0),
        ("grpo", 0),
        ("grpo", 1),
        ("gspo", 0),
    ]
    assert stored["runs"][2]["settings"]["common"]["lr"] == 0.5
    assert len(stored["machines"]) == 1
    assert evidence.Results(out, 1).missing([a_job("grpo"), changed]) == []
    assert evidence.Results(out, 1).missing([a_job("grpo", lr=0.1)]) != []


def test_another_machine_is_recognised(tmp_path: Path) -> None:
    out = tmp_path / "evidence.json"
    evidence.Results(out, 1).add(made(a_job()))
    evidence.Results(out, 16).add(made(a_job(seed=1)))
    stored = json.loads(out.read_text())
    assert [stored["machines"][run["machine"]]["jobs"] for run in stored["runs"]] == [1, 16]


def test_an_interrupted_run_is_not_a_result(tmp_path: Path) -> None:
    results = evidence.Results(tmp_path / "evidence.json", 1)
    with pytest.raises(KeyboardInterrupt):
        evidence.run_all(
            [a_job(), a_job(seed=1)], results, 1, lambda job: made(job) if job.seed == 0 else {}
        )
    assert list(evidence.Results(results.path, 1).runs) == [("presets", "grpo", 0)]


def test_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "evidence.json"
    path.write_text('{"runs": [')
    with pytest.raises(InputError, match="is no file of this program"):
        evidence.Results(path, 1)


def test_processes_bring_every_result(tmp_path: Path) -> None:
    wanted = [a_job(seed=seed) for seed in range(5)]
    signal.alarm(60)  # a process that hangs fails the test
    try:
        found = evidence.run_all(wanted, evidence.Results(tmp_path / "evidence.json", 2), 2, made)
    finally:
        signal.alarm(0)
    assert sorted(record["seed"] for record in found) == [0, 1, 2, 3, 4]


def test_a_loss_that_cannot_be_trained_is_a_record() -> None:
    impossible = Job("presets", "grpo", 0, Plan({"task": "no such task"}, why="wrong"))
    assert "unknown task 'no such task'" in evidence.train_one(impossible)["error"]


def test_train_one_trains() -> None:
    small = {
        "steps": 1,
        "prompts": 2,
        "group_size": 4,
        "warmup_steps": 2,
        "eval_prompts": 4,
        "max_new_tokens": 4,
    }
    found = evidence.train_one(
        Job(clip_study(1e-3), "ppo", 0, Plan({"advantage": "gae"}), {**COMMON, **small})
    )
    assert list(found["accuracy"]) == ["0", "1"]
    assert found["seconds"] > 0
    assert found["settings"] == {"common": {**COMMON, **small}, "own": {"advantage": "gae"}}
    assert len(found["curves"]["grad_norm"]) == 1
    assert found["curves"]["grad_norm"][0] == found["final"]["grad_norm"]


# The page -----------------------------------------------------------------------------------------


def test_median_and_range() -> None:
    assert evidence_page.spread([9.0, 1.0, 2.0], ".0f") == "2 (1 to 9)"
    assert evidence_page.spread([3.0, None, 1.0], ".0f") == "3 (1 to –)"  # never is later than 3
    assert evidence_page.spread([3.0, None, None], ".0f") == "– (3 to –)"
    assert evidence_page.spread([2.0, 2.0], ".1f") == "2.0"
    assert evidence_page.spread([1.0, 2.0], ".1f", only_median=True) == "1.5"


def curves(norms: list[float | None]) -> dict[str, Any]:
    return {
        "curves": {
            "grad_norm": norms,
            "loss": [0.1] * len(norms),
            "ratio_max": [2.0] * len(norms),
            "kl_old": norms,
        }
    }


def test_a_divergence_is_recognised() -> None:
    calm: list[float | None] = [1.0, 3.0, 50.0, 50.0, 9.0, 9.0, 9.0, 21.0]
    # median(9, 21) / median(1, 3); the middle does not count.
    assert evidence_page.late_over_early(curves(calm)) == 7.5
    assert not evidence_page.run_away(curves(calm))
    assert evidence_page.run_away(curves([1.0, 3.0, 1.0, 1.0, 1.0, 1.0, 20.0, 20.0]))
    assert evidence_page.run_away(curves([1.0, None, 1.0, 1.0]))


def pages(tmp_path: Path, runs: list[dict[str, Any]]) -> dict[str, str]:
    results = evidence.Results(tmp_path / "evidence.json", 4)
    for run in runs:
        results.add(run)
    return evidence_page.evidence_pages(tmp_path)


def test_no_page_without_results(tmp_path: Path) -> None:
    assert evidence_page.evidence_pages(tmp_path) == {}


def test_page_of_fabricated_results(tmp_path: Path) -> None:
    runs = [
        made(a_job("grpo", seed), (0.4, 0.5, end)) for seed, end in enumerate((0.92, 0.97, 0.94))
    ]
    runs += [made(a_job("gspo", 0), (0.4, 0.91)), made(a_job("gspo", 1), (0.4, 0.3))]
    runs += [{**evidence._named(a_job("dapo")), "error": "ValueError: no"}]
    for name, norms in (("ppo", [1.0, 1.0, 30.0, 40.0]), ("ppo_dual_clip", [1.0, 1.0, 2.0, 2.0])):
        job = Job(clip_study(1e-3), name, 0, Plan(why="stale"))
        runs.append(made(job, (0.4, 0.1 if name == "ppo" else 0.9), **curves(list(norms))))
    found = pages(tmp_path, runs)
    assert set(found) == {
        "docs/evidence.md",
        evidence_page.ACCURACY_FIGURE,
        evidence_page.CLIP_FIGURE,
    }
    page = found["docs/evidence.md"]
    assert (
        "**1 of 2 presets reach a held-out accuracy of 0.9 with every seed that was run.** The "
        "others: `gspo` (1 of 2 seeds)." in page
    )
    assert "whose accuracy is 0.400, 0.400, 0.400." in page
    assert "`--advantage grpo`: advantages of GRPO" in page
    # Reached at step 10 by every seed, 2 seconds a step.
    assert "| 0.940 (0.920 to 0.970) | 10 | 20 |" in page
    assert "| 0.605 (0.300 to 0.910) | – (5 to –) | – (10 to –) |" in page  # (0.91 + 0.3) / 2
    assert "`dapo`, presets, seed 0: ValueError: no" in page
    assert (
        "**The claim holds here**: the norm runs away in 1 of 1 runs of plain PPO and in 0 of 1 "
        "with dual clip." in page
    )
    assert (
        "Its largest value is 40 with plain PPO and 2 with dual clip. 1 of 1 runs of plain PPO end "
        "below" in page
    )
    assert "4 runs at a time" in page
    assert "2 to 3 seeds" in page
    for path in (evidence_page.ACCURACY_FIGURE, evidence_page.CLIP_FIGURE):
        drawn = ET.fromstring(found[path]).findall("{http://www.w3.org/2000/svg}polyline")
        # A line per run; two charts of two runs.
        assert len(drawn) == (5 if path == evidence_page.ACCURACY_FIGURE else 4)


def test_a_false_claim_is_not_printed(tmp_path: Path) -> None:
    jobs_ = [Job(clip_study(3e-3), name, 0, Plan(why="stale")) for name in ("ppo", "ppo_dual_clip")]
    page = pages(tmp_path, [made(job, **curves([1.0, 1.0, 1.0, 1.0])) for job in jobs_])[
        "docs/evidence.md"
    ]
    assert "**The claim does not hold here in these words**" in page
    assert "### Learning rate 0.003" in page
    both = pages(tmp_path, [made(job, **curves([1.0, 1.0, 30.0, 40.0])) for job in jobs_])[
        "docs/evidence.md"
    ]
    assert (
        "**The claim does not hold here in these words**: the norm runs away in 1 of 1 runs of "
        "plain PPO and in 1 of 1" in both
    )


def test_chart_puts_numbers_where_they_belong() -> None:
    chart = Chart((100, 50, 200, 80), last=40, low=0.0, high=1.0, logarithmic=False)
    assert chart.at(0, 0.0) == (100, 130)
    assert chart.at(20, 0.75) == (200, 70)  # half the width; a quarter of the height from the top
    assert chart.at(40, 7.0) == (300, 50)  # outside: at the edge
    decades = Chart((0, 0, 10, 100), last=1, low=0.01, high=100.0, logarithmic=True)
    assert decades.at(0, 1.0)[1] == pytest.approx(50)
    assert decades.at(0, 0.0)[1] == 100


def test_large_section(tmp_path: Path) -> None:
    run = {"learn_tokens_per_s": 3000.0, "peak_bytes": 2 * 2**30, "grad_norm": [0.5]}
    other = {"learn_tokens_per_s": 2000.0, "peak_bytes": 8 * 2**30, "grad_norm": [0.501]}
    data = {
        "environment": GPU,
        "size": evidence_large.FULL.__dict__,
        "weights": 107_000_000,
        "runs": {"fused": run, "logits": other},
        "first_step": {"loss": 1e-5, "grad_norm": 0.002},
    }
    said = evidence_page.large_section(data)
    assert "1.50 times the speed with 0.25 times the peak memory" in said  # 3000/2000 and 2/8
    assert "| `--head logits` | 2,000 | 8.00 | 0.5010 |" in said


# A larger model -----------------------------------------------------------------------------------


def test_reward_is_the_share_of_even_words() -> None:
    example: Any = None
    assert evidence_large.reward(example, "w2 w3 w10 <end> w8") == 0.75
    assert evidence_large.reward(example, "") == 0.0


def test_heads_that_differ_do_not_agree() -> None:
    run = {"loss": [0.1, 9.0], "grad_norm": [2.0, 9.0]}
    # 1 % apart.
    assert evidence_large.agreement({"fused": run, "logits": {"loss": [0.1], "grad_norm": [2.02]}})[
        "agree"
    ]
    assert not evidence_large.agreement(
        {"fused": run, "logits": {"loss": [0.1], "grad_norm": [2.1]}}
    )["agree"]
    assert not evidence_large.agreement(
        {"fused": run, "logits": {"loss": [0.102], "grad_norm": [2.0]}}
    )["agree"]


def test_heads_are_run_with_the_same_options_but_one(tmp_path: Path) -> None:
    fused, logits = (
        evidence_large.options(evidence_large.FULL, head, "cuda", tmp_path).to_dict()
        for head in evidence_large.HEADS
    )
    assert {name for name in fused if fused[name] != logits[name]} == {"head", "out"}
    assert (fused["head"], logits["head"]) == ("fused", "logits")
    assert (fused["minibatches"], fused["epochs"], fused["dtype"], fused["device"]) == (
        1,
        1,
        "bfloat16",
        "cuda",
    )


def test_large_in_small(tmp_path: Path) -> None:
    out = tmp_path / "large.json"
    assert evidence_large.main(["--quick", "--out", str(out)]) == 0
    found = json.loads(out.read_text())
    fused, logits = found["runs"]["fused"], found["runs"]["logits"]
    assert found["first_step"]["loss"] < 1e-6
    # float32: the same in every step.
    assert fused["grad_norm"] == pytest.approx(logits["grad_norm"], rel=1e-5)
    assert fused["reward"] == logits["reward"]
    assert min(fused["grad_norm"]) > 0
    assert len(fused["loss"]) == 2
