"""A report of a huge run: its content and its memory are bounded, and notes list the omissions."""

from __future__ import annotations

import json
import math
import os
import sys
import tracemalloc
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from package_imports import imports_of, loads
from report_runs import rollout, write_lines, write_run

from policyloss.cli import main
from policyloss_lab import limits
from policyloss_lab.report import collect, render
from policyloss_lab.report.view import view
from policyloss_lab.runs import lock


def run_of(folder: Path) -> dict[str, Any]:
    (run,) = collect([folder])["runs"]
    found: dict[str, Any] = run
    return found


def test_parts_of_many_findings_are_read(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [{"step": 1, "reward/mean": 1.0}])
    finding = {"step": 1, "cause": "copy", "evidence": "e" * 3_000, "remedy": "", "severity": ""}
    write_lines(run / "findings.jsonl", [finding] * 400)  # 1.2 MB
    found = run_of(run)
    assert len(found["health"]) == limits.NOTES
    assert any("findings.jsonl has 1 MiB" in note for note in found["notes"])


def test_a_text_is_shown_up_to_its_limit(tmp_path: Path) -> None:
    """The page of a token of a megabyte is as small as the page of a token of 201 characters."""
    tokens = ["a" * 200, "b" * 201, "c" * 1_000_000]
    row = rollout(0, tokens, prompt="p" * 20_000, answer="q" * 20_001)
    data = collect(
        [write_run(tmp_path / "run", [], rollouts=[{**row, "completion": "r" * 3_000_000}])]
    )
    (found,) = data["runs"][0]["rollouts"]
    assert found["tokens"] == ["a" * 200, "b" * 200 + "…", "c" * 200 + "…"]
    assert found["prompt"] == "p" * 20_000
    assert found["answer"] == "q" * 20_000 + "…"
    assert found["completion"] == "r" * 20_000 + "…"
    notes = data["runs"][0]["notes"]
    assert (
        "2 text(s) longer than 20,000 characters are shown up to there; the rest is left out."
        in notes
    )
    assert (
        "2 token(s) longer than 200 characters are shown up to there; the rest is left out."
        in notes
    )
    assert len(render(data)) < 200_000


def test_a_line_that_is_too_long_is_skipped_in_bounded_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("policyloss_lab.limits.LINE_BYTES", 1_000_000)
    run = write_run(tmp_path / "run", [{"step": 0, "a": 1}])
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 1, "a": 2, "text": "' + "x" * 30_000_000 + '"}\n{"step": 2, "a": 3}\n')
    tracemalloc.start()
    found = run_of(run)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert found["metrics"] == {"a": {"step": [0, 2], "value": [1, 3]}}
    assert "metrics.jsonl has 1 line(s) of more than 0.954 MiB, left out." in found["notes"]
    assert peak < 10_000_000  # a line of 30 MB was passed over


def test_of_a_large_file_evenly_spaced_parts_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """20,000 rows of 29 bytes, of which 512 parts of 64 bytes may be read: two or three rows each,
    from the first step to the last.
    """
    run = write_run(tmp_path / "run", [])
    (run / "metrics.jsonl").write_text(
        "".join(f'{{"step": {s:5d}, "a": {s:7d}}}\n' for s in range(20_000))
    )
    monkeypatch.setattr(limits, "METRIC_BYTES", 512 * 64)
    monkeypatch.setattr(limits, "LEAST_BYTES", 0)
    found = run_of(run)
    steps = found["metrics"]["a"]["step"]
    assert steps == found["metrics"]["a"]["value"]
    assert (steps[0], steps[-1]) == (0, 19_999)
    assert 2 * 512 <= len(steps) <= 4 * 512
    assert max(b - a for a, b in pairwise(steps)) < 45  # 20,000 / 512 = 39
    assert (
        "metrics.jsonl has 0 MiB; parts of it that are evenly spaced were read, about 1 MiB, and "
        "the rest was left out." in found["notes"]
    )


def test_a_line_longer_than_a_part_does_not_end_the_reading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A line of 3 MB in the middle: the parts that fall into it give nothing, the others do."""
    rows = [json.dumps({"step": s, "a": s}) + "\n" for s in range(100_000)]
    rows[50_000] = json.dumps({"step": 50_000, "text": "x" * 3_000_000}) + "\n"
    run = write_run(tmp_path / "run", [])
    (run / "metrics.jsonl").write_text("".join(rows))
    monkeypatch.setattr(limits, "METRIC_BYTES", 100_000)
    monkeypatch.setattr(limits, "LEAST_BYTES", 0)
    steps = run_of(run)["metrics"]["a"]["step"]
    assert (steps[0], steps[-1]) == (0, 99_999)
    assert sum(s < 50_000 for s in steps) > 500
    assert sum(s > 50_000 for s in steps) > 500


def test_rows_beyond_the_index_are_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The notes about the rows before them are still complete."""
    monkeypatch.setattr(limits, "INDEXED", 3)
    rollouts = [rollout(s, ["x"]) for s in range(5)]
    run = write_run(tmp_path / "run", [], rollouts=rollouts)
    (run / "rollouts.jsonl").write_text("broken\n" + (run / "rollouts.jsonl").read_text())
    found = run_of(run)
    assert [row["step"] for row in found["rollouts"]] == [0, 1, 2]
    assert (
        "rollouts.jsonl has more than 3 rows; the rows after them were left out." in found["notes"]
    )
    assert (
        "rollouts.jsonl has 1 line(s) that are no JSON object, left out; the first is line 1."
        in found["notes"]
    )


def test_too_many_metrics_keep_the_metrics_of_charts(tmp_path: Path) -> None:
    """Thirty thousand names took a minute. The expected ones are kept even if they come last."""
    many = {f"odd/{i}": float(i) for i in range(30_000)}
    rows = [{"step": s, "x" * 201: 1.0, **many, "reward/mean": 0.5, "tokens": 10} for s in range(2)]
    run = write_run(tmp_path / "run", rows)
    data = collect([run])
    found = data["runs"][0]
    assert set(found["metrics"]) == {f"odd/{i}" for i in range(300)} | {"reward/mean", "tokens"}
    assert found["summary"]["tokens"] == 20
    (note,) = [n for n in found["notes"] if "too many metrics" in n]
    assert "302 are shown" in note
    # 30,000 − 300, and the one whose name is too long.
    assert note.endswith("and 29,701 were left out.")
    assert len(view(data)["panels"]) == 302


def test_a_long_series_is_thinned_and_its_summary_is_of_all_points(tmp_path: Path) -> None:
    """12,001 steps, an evaluation every 10th: the thinned line of each keeps its last point, its
    lowest, its highest and its gap, and no number is lost.
    """
    steps = 12_001
    rows: list[dict[str, Any]] = [
        {"step": s, "tokens": 2, "reward/mean": 0.25} for s in range(steps)
    ]
    for s in range(0, steps, 10):
        rows[s]["eval/accuracy"] = 0.5
    rows[7_777] |= {"reward/mean": 0.75, "tokens": float("nan")}
    rows[7_778]["reward/mean"] = -0.25
    rows[-1]["reward/mean"] = 0.5
    found = run_of(write_run(tmp_path / "run", rows))
    reward = found["metrics"]["reward/mean"]
    assert len(reward["step"]) <= 5_000
    assert (reward["step"][-1], reward["value"][-1]) == (12_000, 0.5)
    # One of every 3 · 12,001 / 5,000 ≈ 8 points stands for those that are equal; in the stretch
    # from 7,776, two are not.
    expected = sorted({*range(0, steps, 8), 7_777, 7_778} - {7_776})
    assert reward["step"] == expected
    assert [v for v in reward["value"] if v != 0.25] == [0.75, -0.25, 0.5]
    tokens = found["metrics"]["tokens"]
    assert tokens["value"][tokens["step"].index(7_777)] is None
    # The sums up to a step are of all points, too: 2 a step, one of which was NaN.
    sums = dict(zip(*found["progress"]["tokens"].values(), strict=True))
    assert all(total == 2 * (step + (step < 7_777)) for step, total in sums.items())
    assert sums[12_000] == 24_000
    assert found["metrics"]["eval/accuracy"]["step"] == list(range(0, steps, 10))
    assert found["summary"]["steps"] == steps
    assert found["summary"]["tokens"] == 24_000  # 2 · 12,000; one was NaN
    assert found["summary"]["reward"] == {
        "first": 0.25,
        "first_step": 0,
        "last": 0.5,
        "last_step": 12_000,
        "best": 0.75,
    }
    assert "tokens was NaN or infinite at 1 step(s), first at step 7777." in found["notes"]
    assert any(
        "have up to 12,001 points; about 5,000 of each are drawn" in note for note in found["notes"]
    )


def test_the_points_of_many_metrics_share_a_budget(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "POINT_BUDGET", 1_000)
    rows = [{"step": s, **{f"m{i:02d}": float(s) for i in range(50)}} for s in range(200)]
    found = run_of(write_run(tmp_path / "run", rows))
    # 1,000 / 50 points for each, so stretches of 3·200/20 = 30, each with its ends.
    ends = [step for start in range(0, 200, 30) for step in (start, min(start + 29, 199))]
    for line in found["metrics"].values():
        assert line["step"] == line["value"] == ends


def test_the_points_of_many_runs_share_a_budget(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A page of a hundred runs must open, too."""
    monkeypatch.setattr(limits, "ALL_POINTS", 1_000)
    rows = [{"step": s, "a": float(s)} for s in range(500)]
    runs = [write_run(tmp_path / f"run{i}", rows) for i in range(10)]
    for run in collect(runs)["runs"]:
        # 1,000 / 10 points, so stretches of 3·500/100 = 15.
        assert len(run["metrics"]["a"]["step"]) == 2 * math.ceil(500 / 15)
        assert any(
            "1 metric(s) of metrics.jsonl have up to 500 points; about 100" in note
            for note in run["notes"]
        )


def test_histograms_are_thinned(tmp_path: Path) -> None:
    rows = [
        {"step": s, "ratio_histogram": {"edges": [0.5, 1, 2], "counts": [s, 1]}}
        for s in range(1_500)
    ]
    found = run_of(write_run(tmp_path / "run", rows))
    assert found["ratio_histogram"]["step"] == list(range(0, 1_500, 2))
    assert found["ratio_histogram"]["counts"][3] == [6, 1]
    assert "750 of 1,500 ratio histograms are shown; the others are left out." in found["notes"]


def test_rows_and_long_texts_count_towards_the_budget(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "ROWS", 6)
    short = write_run(
        tmp_path / "short",
        [],
        rollouts=[rollout(s, ["x"], group=k) for s in range(4) for k in range(3)],
    )
    found = run_of(short)
    # One group of every step, and a second one of the last two.
    assert [row["step"] for row in found["rollouts"]] == [0, 1, 2, 2, 3, 3]
    assert (
        "6 of 12 completions in rollouts.jsonl are shown, from 4 of 4 steps, to keep the page "
        "small." in found["notes"]
    )
    monkeypatch.setattr(limits, "TOKEN_BUDGET", 100)
    long = write_run(
        tmp_path / "long", [], rollouts=[rollout(s, ["x"], prompt="p" * 256 * 60) for s in range(4)]
    )
    # Two of them would be 2 · 61 > 100.
    assert [row["step"] for row in run_of(long)["rollouts"]] == [3]
    endless = write_run(tmp_path / "endless", [], rollouts=[rollout(0, ["x"] * 101)])
    assert len(run_of(endless)["rollouts"][0]["tokens"]) == 100
    assert (
        "1 rollout(s) with more than 100 tokens are shown up to there; the rest is left out."
        in run_of(endless)["notes"]
    )


def test_settings_are_bounded(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [])
    (run / "environment.json").write_text('{"a": "' + "x" * 2**20 + '"}')
    found = run_of(run)
    assert found["environment"] == {}
    assert "environment.json is larger than 1 MiB; give a part of it." in found["notes"]


def test_the_command_line_names_omissions(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"step": i, f"m{i:02d}": math.inf} for i in range(1, 61)]
    rows = [{"step": 0, "b\x1b[31m": math.nan, "c": math.nan}, *rows]
    run = write_run(tmp_path / "run", rows, rollouts=[rollout(0, ["x" * 300])])
    assert main(["report", str(run), "--out", str(tmp_path / "page.html")]) == 0
    captured = capsys.readouterr()
    assert captured.out == f"{tmp_path / 'page.html'}: 1 run; open it in a browser.\n"
    lines = captured.err.splitlines()
    assert (
        "run: 1 token(s) longer than 200 characters are shown up to there; the rest is left out."
        in lines
    )
    assert "run: b\\u001b[31m and c were NaN or infinite at 1 step(s), first at step 0." in lines
    assert len(lines) == 21
    # 40 and the one that says how many more there are.
    assert lines[-1] == "21 more notes are on the page."
    assert len(collect([run])["runs"][0]["notes"]) == 41


def test_the_report_needs_no_trainer() -> None:
    """Nor any package that the core does without. To load a module is to run the `__init__` of its
    packages, so those count as well.
    """
    seen: set[str] = set()
    left = {"policyloss_lab.report.command", "policyloss_lab.runs.recorder"}
    while left:
        seen |= left
        left = {name for module in left for name in loads(module)} - seen
    assert not [name for name in seen if name.startswith("policyloss_train")]
    foreign = {name.partition(".")[0] for module in seen for name in imports_of(module)}
    assert not foreign & {"transformers", "numpy", "rich", "safetensors"}


@pytest.mark.skipif(sys.platform == "win32", reason="needs named pipes and links")
def test_a_link_or_a_pipe_is_no_lock(tmp_path: Path) -> None:
    """Each would make the run look alive, or keep the report waiting."""
    owner = lock.Lock(tmp_path)
    assert lock.is_held(tmp_path)
    (tmp_path / "elsewhere").write_text(owner.path.read_text())
    owner.path.unlink()
    assert not lock.is_held(tmp_path)
    owner.path.symlink_to(tmp_path / "elsewhere")
    assert not lock.is_held(tmp_path)
    owner.path.unlink()
    os.mkfifo(owner.path)
    assert not lock.is_held(tmp_path)


@pytest.mark.skipif(sys.platform == "win32", reason="needs named pipes and links")
def test_links_and_pipes_in_a_run_are_not_followed(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [{"step": 0, "a": 1}])
    write_lines(tmp_path / "secret", [rollout(0, ["secret"])])
    (run / "rollouts.jsonl").symlink_to(tmp_path / "secret")
    os.mkfifo(run / "timing.jsonl")
    os.mkfifo(run / "lock")
    (run / "environment.json").unlink()
    (run / "environment.json").mkdir()
    data = collect([run])
    found = data["runs"][0]
    assert found["rollouts"] == []
    assert found["summary"]["state"] == "finished"
    assert found["notes"] == [
        "timing.jsonl is a named pipe; only regular files are read.",
        "environment.json is a folder; only regular files are read.",
        "rollouts.jsonl is a symbolic link, which is not followed; only regular files are read.",
    ]
    assert "secret" not in render(data)
    only_links = tmp_path / "links"
    only_links.mkdir()
    (only_links / "config.json").symlink_to(run / "config.json")
    assert main(["report", str(only_links), "--out", str(tmp_path / "x.html")]) == 2
    # The folder itself was named by the caller, and may be a link.
    (tmp_path / "named").symlink_to(run)
    assert run_of(tmp_path / "named")["metrics"] == found["metrics"]


def test_the_bounds_are_documented() -> None:
    page = (Path(__file__).resolve().parents[3] / "docs/report.md").read_text(encoding="utf-8")
    table = page.split("## Bounds for large runs", 1)[1].split("\n## ", 1)[0]
    counts = (
        "DEPTH INDEXED NAMES NAME_LENGTH POINTS POINT_BUDGET ALL_POINTS "
        "HISTOGRAMS BINS TOKEN_BUDGET ALL_TOKENS ROWS"
    )
    for name in [*counts.split(), "CHARACTERS_PER_TOKEN", "TEXT_LENGTH", "TOKEN_LENGTH"]:
        assert f" {getattr(limits, name):,} " in table.replace(",\n", " \n").replace(
            ", ", " , "
        ).replace("(", " "), name
    sizes = (limits.OBJECT_BYTES // limits.MIB, limits.LINE_BYTES // limits.MIB)
    assert all(f"{size} MiB" in table for size in sizes)
    for size in (limits.METRIC_BYTES, limits.ROLLOUT_BYTES):
        assert f" {size // limits.MIB} MiB" in table
    assert "±1e150" in table
