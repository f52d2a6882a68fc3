"""The data of a report: exact numbers from run directories,
and from partial ones everything that can be had, with notes.
"""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from report_runs import realistic_run, rollout, write_lines, write_run

import policyloss as pl
from policyloss import output as writing
from policyloss.cli import main
from policyloss.errors import InputError
from policyloss_lab.report import collect, render, write_report
from policyloss_lab.report.markup import escape
from policyloss_lab.report.rollouts import read_rollouts
from policyloss_lab.runs.lock import Lock


@pytest.fixture(scope="module")
def two_runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("runs")
    return [
        realistic_run(folder / "first", steps=40),
        realistic_run(folder / "second", steps=40, loss="gspo", seed=1, critic=True),
    ]


def test_the_numbers_of_a_small_run(tmp_path: Path) -> None:
    metrics = [
        {
            "step": 0,
            "reward/mean": 0.25,
            "tokens": 100.0,
            "eval/accuracy": 0.5,
            "ratio_histogram": {"edges": [0.5, 1, 2], "counts": [3, 1]},
        },
        {
            "step": 1,
            "reward/mean": 0.5,
            "tokens": 140.0,
            "ratio_histogram": {"edges": [0.5, 1, 2], "counts": [0, 4]},
        },
        {"step": 2, "reward/mean": 0.375, "tokens": 60.0},
        {"step": 3, "eval/accuracy": 0.75},
    ]
    timing = [{"step": s, "step_s": 1.5, "tokens_per_s": 80.0} for s in range(3)]
    run = write_run(tmp_path / "run", metrics, timing=timing, config={"steps": 3})
    data = collect([run])
    (found,) = data["runs"]
    assert data["schema"] == 1
    assert found["label"] == "run"
    assert found["metrics"]["reward/mean"] == {"step": [0, 1, 2], "value": [0.25, 0.5, 0.375]}
    assert found["metrics"]["eval/accuracy"] == {"step": [0, 3], "value": [0.5, 0.75]}
    assert "ratio_histogram" not in found["metrics"]
    assert found["ratio_histogram"] == {
        "edges": [0.5, 1, 2],
        "step": [0, 1],
        "counts": [[3, 1], [0, 4]],
    }
    assert found["timing"]["tokens_per_s"] == {"step": [0, 1, 2], "value": [80.0, 80.0, 80.0]}
    assert found["summary"] == {
        "model": "tiny",
        "task": "sort",
        "engine": None,
        "steps": 3,
        "planned_steps": 3,
        "state": "finished",
        "seconds": 4.5,  # 3 · 1.5
        "tokens": 300.0,  # 100 + 140 + 60
        "held_out": {"first": 0.5, "first_step": 0, "last": 0.75, "last_step": 3, "best": 0.75},
        "accuracy": None,
        "reward": {"first": 0.25, "first_step": 0, "last": 0.375, "last_step": 2, "best": 0.5},
    }
    assert found["loss"]["name"] == "dapo"
    assert found["loss"]["text"] == str(pl.explain("dapo"))
    assert found["loss"]["explain"] == pl.explain("dapo").to_dict()
    assert found["notes"] == ["rollouts.jsonl does not exist."]


def test_differences_between_runs(two_runs: list[Path]) -> None:
    differences = collect(two_runs)["differences"]
    assert differences["config"] == [
        {"key": "loss", "values": ["dapo", "gspo"]},
        {"key": "seed", "values": ["0", "1"]},
        {"key": "lr", "values": ["0.001", "0.002"]},
    ]
    assert differences["environment"] == []
    (loss,) = differences["loss"]
    assert (loss["a"], loss["b"], loss["text"]) == ("first", "second", str(pl.diff("dapo", "gspo")))
    assert collect(two_runs[:1])["differences"] == {"config": [], "environment": [], "loss": []}


def test_a_setting_that_one_run_lacks_differs_from_null(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / "a", [], config={"x": {"y": None}}), write_run(tmp_path / "b", [])]
    assert collect(runs)["differences"]["config"] == [{"key": "x.y", "values": ["null", None]}]


@pytest.mark.parametrize(
    ("asked", "eps_high", "name"),
    [
        ("dapo", 0.28, "dapo"),
        ("dapo", 0.3, "dapo, changed"),
        ("my_loss.json", 0.28, "dapo"),  # a file that holds a preset
        ("ppo", 0.28, "dapo"),  # ppo, changed until it was dapo
    ],
)
def test_a_loss_has_its_name(tmp_path: Path, asked: str, eps_high: float, name: str) -> None:
    run = write_run(tmp_path / "a", [], config={"loss": asked})
    stored = json.loads((run / "config.json").read_text())
    stored["loss"]["trust"]["eps_high"] = eps_high
    (run / "config.json").write_text(json.dumps(stored))
    assert collect([run])["runs"][0]["loss"]["name"] == name


def test_runs_of_one_name_get_labels_of_their_own(tmp_path: Path) -> None:
    a, b = write_run(tmp_path / "x" / "run", []), write_run(tmp_path / "y" / "run", [])
    assert [run["label"] for run in collect([a, b, b])["runs"]] == [
        "x/run",
        "y/run (1)",
        "y/run (2)",
    ]


def test_numbers_that_are_not_finite_are_gaps_with_a_note(tmp_path: Path) -> None:
    """For any spelling of NaN. A plain null means that nothing was measured, and is not a gap."""
    lines = [
        '{"step": 0, "a": 1.0, "b": null}',
        '{"step": 1, "a": NaN}',
        '{"step": 2, "a": -Infinity}',
        '{"step": 3, "a": null, "nonfinite": {"a": "nan"}}',
        '{"step": 4, "a": "nan"}',
        '{"step": 5, "a": 2}',
    ]
    run = write_run(tmp_path / "run", [])
    (run / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    data = collect([run])
    assert data["runs"][0]["metrics"] == {
        "a": {"step": [0, 1, 2, 3, 4, 5], "value": [1.0, None, None, None, None, 2]}
    }
    assert "a was NaN or infinite at 4 step(s), first at step 1." in data["runs"][0]["notes"]
    json.dumps(data, allow_nan=False)
    assert "first at step 1" in render(data)


def test_a_half_written_line_is_left_out_and_broken_ones_are_named(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [])
    (run / "metrics.jsonl").write_bytes(
        b'{"step": 0, "a": 1}\n[1]\n\xff\xfe\n{"step": 1, "a": 2}\n{"step": 2, "a": 3'
    )
    found = collect([run])["runs"][0]
    assert found["metrics"] == {"a": {"step": [0, 1], "value": [1, 2]}}
    assert "The last line of metrics.jsonl is half-written and was left out." in found["notes"]
    assert (
        "metrics.jsonl has 2 line(s) that are no JSON object, left out; the first is line 2."
        in found["notes"]
    )


def test_a_step_written_twice_counts_as_last_written(tmp_path: Path) -> None:
    run = write_run(
        tmp_path / "run", [{"step": 0, "a": 1}, {"step": 1, "a": 2}, {"step": 1, "a": 5}, {"a": 9}]
    )
    found = collect([run])["runs"][0]
    assert found["metrics"] == {"a": {"step": [0, 1], "value": [1, 5]}}
    assert "metrics.jsonl has 1 step(s) more than once; the last ones count." in found["notes"]
    assert "metrics.jsonl has 1 line(s) without a step, left out." in found["notes"]


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({"config.json": "{}"}, "metrics.jsonl does not exist."),
        ({"metrics.jsonl": '{"step": 0, "a": 1}\n'}, "config.json does not exist."),
        ({"config.json": '{"config": {"st', "metrics.jsonl": ""},
         "config.json cannot be read: JSONDecodeError."),
        ({"config.json": "[1]"}, "config.json holds a list instead of an object."),
        ({"config.json": '{"config": [], "loss": 5}'},
         "The loss in config.json cannot be explained"),
        ({"config.json": "[" * 100_000}, "config.json cannot be read: RecursionError."),
        ({"config.json": "{}", "metrics.jsonl": '{"step": 0, "a": 1' + "0" * 400 + "}\n"},
         "a was NaN or infinite at 1 step(s)"),
        ({"metrics.jsonl": '{"step": 0, "ratio_histogram": {"edges": [2, 1], "counts": [3]}}\n'},
         "1 ratio histogram(s) have"),
        ({"config.json": "{}", "rollouts.jsonl": '{"step": 0, "tokens": 7, "ratio": {}}\n'},
         "timing.jsonl does not exist."),
    ],
)  # fmt: skip
def test_partial_runs_give_a_page_with_notes(
    tmp_path: Path, files: dict[str, str], said: str
) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    data = collect([tmp_path])
    assert any(said in note for note in data["runs"][0]["notes"]), data["runs"][0]["notes"]
    page = render(json.loads(json.dumps(data, allow_nan=False)))
    assert escape(said) in page
    assert page.endswith("</html>\n")


def test_a_path_without_a_run_is_an_error_that_names_the_missing_files(tmp_path: Path) -> None:
    write_run(tmp_path / "runs" / "a", [])
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    cases = {
        "empty": "empty holds no run. Looked for: a folder that `policyloss train` or "
        "policyloss_lab.Recorder wrote (config.json, metrics.jsonl); trainer_state.json",
        "runs": "runs holds runs: a; give them as paths.",
        "gone": "does not exist; give the folder or the file of a run.",
        "file": "file holds no run. Looked for",
    }
    for name, said in cases.items():
        with pytest.raises(InputError, match=re.escape(said)):
            collect([tmp_path / name])
    with pytest.raises(InputError, match="paths is empty"):
        collect([])
    with pytest.raises(InputError, match="is one path"):
        collect(str(tmp_path))


def test_whether_a_run_is_still_going(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [{"step": 0, "a": 1}], config={"steps": 2})

    def state() -> str:
        return str(collect([run])["runs"][0]["summary"]["state"])

    assert state() == "stopped"
    lock = Lock(run)
    assert state() == "running"
    left = lock.path.read_text()
    lock.release()
    for contents, expected in [
        (left, "stopped"),  # of a process that was killed
        (json.dumps({"pid": 1, "host": "elsewhere"}), "running"),
        ("{half", "stopped"),
        ("[" * 4_000, "stopped"),
    ]:
        (run / "lock").write_text(contents)
        assert state() == expected, contents
    (run / "lock").unlink()
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 1, "a": 1}\n')
    assert collect([run])["runs"][0]["summary"]["state"] == "finished"


@pytest.mark.parametrize(
    ("edges", "counts", "kept"),
    [
        ([1, 2, 4, 8], [1, 2, 3], [1, 2, 4, 8]),
        ([0, 2, 4, 8], [1, 2, 3], [1, 2, 4, 8]),  # 2²/4
        ([2, 4, 8, math.inf], [1, 2, 3], [2, 4, 8, 16]),  # 8²/4
        ([2, 4], [1, 2, 3], [1, 2, 4, 8]),  # the outer counts are beyond the edges
        ([2], [1, 2], None),  # one edge does not define a bin
        ([2, 4, 8], [1, 2, 3, 4], [1, 2, 4, 8, 16]),
        ([1, 2], [1, 2, 3, 4], None),
        ([1, 1, 2], [1, 2], None),
        ([-1, 1, 2], [1, 2], None),
        ([1, 2], ["x"], None),
        ([1, 2], [math.nan], None),
    ],
)
def test_edges_of_histograms(
    tmp_path: Path, edges: list[Any], counts: list[Any], kept: list[float] | None
) -> None:
    run = write_run(
        tmp_path / "run", [{"step": 0, "ratio_histogram": {"edges": edges, "counts": counts}}]
    )
    found = collect([run])["runs"][0]["ratio_histogram"]
    assert found == (None if kept is None else {"edges": kept, "step": [0], "counts": [counts]})


def test_rollouts_are_cleaned_and_fitted_to_their_tokens(tmp_path: Path) -> None:
    row = {
        "step": 3,
        "tokens": ["a", "b"],
        "ratio": [1.5],
        "logp": [-1.0, math.nan, 7.0],
        "clipped": [1],
        "reward": math.inf,
    }
    found = collect([write_run(tmp_path / "run", [], rollouts=[row])])["runs"][0]["rollouts"]
    assert found == [
        {
            "step": 3,
            "example": None,
            "group": None,
            "groups": None,
            "weights": None,
            "prompt": "",
            "completion": "",
            "answer": "",
            "reward": None,
            "advantage": None,
            "finished": None,
            "finish_reason": None,
            "tokens": ["a", "b"],
            "ids": [None, None],
            "turn_ids": [None, None],
            "logp": [-1.0, None],
            "old_logp": [None, None],
            "rollout_logp": [None, None],
            "ref_logp": [None, None],
            "teacher_logp": [None, None],
            "entropy": [None, None],
            "ratio": [1.5, None],
            "token_advantage": [None, None],
            "mask": [None, None],
            "clipped": [True, None],
            "branch": [None, None],
        }
    ]


def test_too_many_completions_are_thinned_by_whole_groups(tmp_path: Path) -> None:
    """Ten steps of two groups of 10 tokens, 200 in all; the rewards of the second group differ."""
    rows = [
        rollout(step, ["x"] * 5, group=k, reward=float(k * i))
        for step in range(10)
        for k in range(2)
        for i in range(2)
    ]
    write_lines(tmp_path / "rollouts.jsonl", rows)

    def kept(budget: int) -> tuple[dict[int, list[int]], list[str]]:
        notes: list[str] = []
        steps: dict[int, list[int]] = {}
        for row in read_rollouts(tmp_path / "rollouts.jsonl", notes, budget):
            steps.setdefault(row["step"], []).append(row["group"])
        return steps, notes

    assert kept(200) == ({step: [0, 0, 1, 1] for step in range(10)}, [])
    # The group with a spread of every step takes 100; then the last steps get their second one.
    every = {step: [1, 1] for step in range(10)}
    assert kept(100)[0] == every
    assert kept(125)[0] == {**every, 8: [0, 0, 1, 1], 9: [0, 0, 1, 1]}
    # Every second step would be 50 tokens, every third 40.
    assert kept(45)[0] == {step: [1, 1] for step in (0, 3, 6, 9)}
    # One group is too long: its first row, which is shown in any case.
    assert kept(9)[0] == kept(3)[0] == {9: [1]}
    assert kept(45)[1] == [
        "8 of 40 completions in rollouts.jsonl are shown, from 4 of 10 steps, to keep the page "
        "small."
    ]


def test_held_out_answers_are_thinned_by_prompt(tmp_path: Path) -> None:
    """The same prompts at every step, so that they can be followed, whatever their rewards."""
    rows = [
        rollout(step, ["x"] * 10, group=k, reward=float(k == step % 3))
        for step in range(4)
        for k in range(3)
    ]
    write_lines(tmp_path / "answers.jsonl", rows)
    found = read_rollouts(tmp_path / "answers.jsonl", [], 85, by_information=False)
    assert [(row["step"], row["group"]) for row in found] == [
        (s, k) for s in range(4) for k in (0, 1)
    ]


def test_files_are_written_whole_or_not_at_all(
    two_runs: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page, data = tmp_path / "new" / "report.html", tmp_path / "report.json"
    written = write_report(two_runs, page, data)
    assert json.loads(data.read_text()) == written == collect(two_runs)
    assert page.read_text() == render(written)
    before = page.read_text()

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(writing.os, "replace", full)
    with pytest.raises(InputError, match=r"out='.*report.html' cannot be written: .*No space left"):
        write_report(two_runs[:1], page)
    assert page.read_text() == before
    assert sorted(p.name for p in page.parent.iterdir()) == ["report.html"]
    with pytest.raises(InputError, match=r"json_out='.*' is a folder"):
        write_report(two_runs[:1], page, tmp_path)


def test_the_command_writes_both_files_and_prints_their_paths(
    two_runs: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page, data = tmp_path / "page.html", tmp_path / "data.json"
    assert main(["report", *map(str, two_runs), "--out", str(page), "--json", str(data)]) == 0
    assert capsys.readouterr().out == f"{page}: 2 runs; open it in a browser.\n"
    assert page.read_text() == render(json.loads(data.read_text()))
    assert main(["report", str(tmp_path)]) == 2
    assert f"{tmp_path} holds no run. Looked for:" in capsys.readouterr().err
