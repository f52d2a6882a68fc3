"""Tables (CSV) of one run or of several, in the layouts that W&B and trackio export."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import policyloss as pl
from policyloss.cli import main
from policyloss_lab import limits
from policyloss_lab.report import collect
from policyloss_lab.report.command import LiveServer


def run_of(path: str | Path) -> dict[str, Any]:
    (run,) = collect([path])["runs"]
    out: dict[str, Any] = run
    return out


def test_a_table_of_one_run(tmp_path: Path) -> None:
    panel = tmp_path / "panel.csv"
    panel.write_text(
        '"Step","run-1 - train/reward","run-1 - train/reward__MIN"\n"1","0.5","0"\n"2","0.75","0"\n'
    )
    run = run_of(panel)
    assert run["metrics"] == {"reward/mean": {"step": [1, 2], "value": [0.5, 0.75]}}
    assert (run["label"], run["path"]) == ("panel.csv", str(panel))
    panel.write_text("step,train/reward,run\n1,0.5,first\n2,0.75,first\n")
    assert run_of(panel)["metrics"]["reward/mean"]["value"] == [0.5, 0.75]


def test_a_chart_of_wandb_with_several_runs_is_several_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The layout of a chart's export: the x axis, then the columns of one run after the other. A
    cell is empty where a run has no point. A run's name may contain the separator before a metric.
    """
    chart = tmp_path / "wandb_export.csv"
    chart.write_text(
        '"Step","lr - 0.1 - train/reward","lr - 0.1 - train/reward__MIN",'
        '"lr - 0.1 - train/reward__MAX","b/2, new - train/reward","b/2, new - train/reward__MIN",'
        '"b/2, new - train/reward__MAX"\n'
        '"1","0.5","0.4","0.6","","",""\n"2","","","","0.25","0.25","0.25"\n"3","NaN","","","1","1","1"\n'
    )
    out = tmp_path / "page.html"
    assert main(["report", str(chart), "--out", str(out)]) == 0
    assert capsys.readouterr().out == f"{out}: 2 runs; open it in a browser.\n"
    first, second = collect([chart])["runs"]
    assert (first["label"], second["label"]) == ("lr - 0.1", "b/2, new")
    assert first["metrics"] == {"reward/mean": {"step": [1, 3], "value": [0.5, None]}}
    assert second["metrics"] == {"reward/mean": {"step": [2, 3], "value": [0.25, 1]}}
    assert first["names"] == {"reward/mean": "train/reward"}
    # Each alone, by the path that the data has of it.
    assert second["path"] == f"{chart}#b/2, new"
    assert run_of(second["path"])["metrics"] == second["metrics"]
    with pytest.raises(pl.InputError, match=r"holds no run 'c'; it holds 'lr - 0.1', 'b/2, new'"):
        collect([f"{chart}#c"])


def test_an_export_over_another_axis_has_a_step_for_each_run(tmp_path: Path) -> None:
    """W&B then adds the step of each run. Runs may have the same name."""
    chart = tmp_path / "epochs.csv"
    chart.write_text(
        "epoch,a - _step,a - _step__MIN,a - _step__MAX,a - kl,a - _step,a - kl,a - reward\n"
        "0.5,10,10,10,0.1,20,0.2,7\n1.0,30,30,30,0.3,,,\n"
    )
    first, second = collect([chart])["runs"]
    assert (first["label"], second["label"]) == ("a", "a (2)")
    assert first["metrics"]["policy/kl_ref"] == {"step": [10, 30], "value": [0.1, 0.3]}
    assert second["metrics"]["policy/kl_ref"] == {"step": [20], "value": [0.2]}
    assert second["metrics"]["reward/mean"] == {"step": [20], "value": [7]}
    assert "reward/mean" not in first["metrics"]
    assert first["metrics"]["epoch"] == {"step": [10, 30], "value": [0.5, 1.0]}
    assert second["metrics"]["epoch"] == {"step": [20], "value": [0.5]}
    chart.write_text("epoch,step,a - kl,b - kl\n0.5,1,0.1,\n1.0,2,,0.2\n")
    first, second = collect([chart])["runs"]
    assert first["metrics"]["epoch"] == {"step": [1], "value": [0.5]}  # it ended there
    assert second["metrics"]["epoch"] == {"step": [2], "value": [1.0]}


def test_the_charts_of_a_folder_are_joined_by_run(tmp_path: Path) -> None:
    (tmp_path / "kl.csv").write_text("Step,a - kl,b - kl\n1,0.1,0.2\n")
    (tmp_path / "reward.csv").write_text("Step,b - reward,c - reward\n1,5,6\n")
    runs = {run["label"]: run["metrics"] for run in collect([tmp_path])["runs"]}
    assert {name: {m: x["value"] for m, x in got.items()} for name, got in runs.items()} == {
        "a": {"policy/kl_ref": [0.1]},
        "b": {"policy/kl_ref": [0.2], "reward/mean": [5]},
        "c": {"reward/mean": [6]},
    }


def test_the_runs_of_a_trackio_chart_are_drawn_side_by_side(tmp_path: Path) -> None:
    chart = tmp_path / "chart.csv"  # the runs below each other
    chart.write_text("step,train/reward,run\n1,0.5,first\n2,0.75,first\n1,0.25,second\n")
    first, second = collect([chart])["runs"]
    assert (first["label"], second["label"]) == ("first", "second")
    assert first["metrics"]["reward/mean"] == {"step": [1, 2], "value": [0.5, 0.75]}
    assert second["metrics"]["reward/mean"] == {"step": [1], "value": [0.25]}


def test_the_table_of_runs_of_wandb_has_the_last_values_of_each(tmp_path: Path) -> None:
    table = tmp_path / "runs.csv"
    table.write_text(
        '"Name","State","Created","_step","reward"\n"a","finished","2026-01-01","9","0.5"\n'
        '"b","crashed","2026-01-01","4","0.1"\n"a","finished","2026-01-02","9","0.7"\n'
    )
    runs = collect([table])["runs"]
    assert [run["label"] for run in runs] == ["a", "b", "a (2)"]
    assert [run["metrics"]["reward/mean"] for run in runs] == [
        {"step": [9], "value": [0.5]},
        {"step": [4], "value": [0.1]},
        {"step": [9], "value": [0.7]},
    ]
    table.write_text('"Name","State","reward"\n"a","finished","0.5"\n')
    with pytest.raises(pl.InputError, match=r"runs\.csv.*table of runs.*no column of steps; add"):
        collect([table])


@pytest.mark.parametrize("columns", ["Step,a - kl,b - kl,reward", "Step,a - kl,reward,b - kl"])
def test_a_column_that_fits_no_run_is_named(tmp_path: Path, columns: str) -> None:
    (tmp_path / "x.csv").write_text(f"{columns}\n1,2,3,4\n")
    with pytest.raises(pl.InputError, match=r"x\.csv.*'reward'.*no run.*'a - kl'"):
        collect([tmp_path / "x.csv"])
    (tmp_path / "x.csv").write_text("Step,reward,reward\n1,2,3\n")
    with pytest.raises(pl.InputError, match=r"x\.csv.*'reward' twice"):
        collect([tmp_path / "x.csv"])


def test_a_table_of_very_many_runs_shows_the_first(tmp_path: Path) -> None:
    rows = [f"1,{i},run{i}" for i in range(limits.RUNS + 5)]
    (tmp_path / "many.csv").write_text("\n".join(["step,reward,run", *rows]))
    runs = collect([tmp_path / "many.csv"])["runs"]
    assert [run["label"] for run in runs] == [f"run{i}" for i in range(limits.RUNS)]
    assert runs[0]["notes"] == [
        f"many.csv holds more than {limits.RUNS} runs; the others were left out."
    ]
    assert runs[1]["notes"] == []


def test_the_file_of_a_run_in_it_is_known(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`export.csv#RUN` is a part of export.csv: no page replaces it, and a live page follows it."""
    chart = tmp_path / "export.csv"
    chart.write_text("Step,a - reward,b - reward\n1,2,3\n")
    assert main(["report", f"{chart}#a", "--out", str(chart)]) == 2
    assert "is a file of the run" in capsys.readouterr().err
    with LiveServer([Path(f"{chart}#a")], port=0) as live:
        first = live.refresh()[1]
        assert live.refresh()[1] == first
        live._next = 0.0
        chart.write_text("Step,a - reward,b - reward\n1,2,3\n2,4,5\n")
        assert live.refresh()[1] != first


def test_a_run_name_for_a_file_of_one_run_is_refused(tmp_path: Path) -> None:
    (tmp_path / "log.jsonl").write_text('{"step": 1, "reward": 0.5}\n')
    with pytest.raises(pl.InputError, match=r"log\.jsonl is one run; leave out #a\."):
        collect([f"{tmp_path}/log.jsonl#a"])
    with pytest.raises(pl.InputError, match=r"none\.csv#a does not exist"):
        collect([f"{tmp_path}/none.csv#a"])


def test_completions_next_to_several_runs_belong_to_none(tmp_path: Path) -> None:
    (tmp_path / "reward.csv").write_text("Step,a - reward,b - reward\n1,2,3\n")
    (tmp_path / "1.jsonl").write_text('{"prompt": "1+1=", "completion": "2"}\n')
    runs = collect([tmp_path])["runs"]
    assert [run["rollouts"] for run in runs] == [[], []]
    assert [run["notes"] for run in runs] == [
        ["Files of completions next to a table of several runs were not read."],
        [],
    ]
    (alone,) = collect([f"{tmp_path}#b"])["runs"]
    assert [row["completion"] for row in alone["rollouts"]] == ["2"]


def test_runs_of_several_tables_have_different_names(tmp_path: Path) -> None:
    for name in ("x", "y"):
        (tmp_path / f"{name}.csv").write_text("Step,a - reward,b - reward\n1,2,3\n")
    paths = [tmp_path / "x.csv", f"{tmp_path}/y.csv#a", tmp_path / "x.csv"]
    assert [run["label"] for run in collect(paths)["runs"]] == [
        *("x.csv/a (1)", "x.csv/b (1)", "y.csv/a", "x.csv/a (2)", "x.csv/b (2)"),
    ]


def test_a_note_of_several_runs_stands_there_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("a", "b", "c"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").write_text('{"step": 1, "loss": 1}\n{"step": 2')
    out = tmp_path / "page.html"
    assert main(["report", *(str(tmp_path / name) for name in "abc"), "--out", str(out)]) == 0
    lines = capsys.readouterr().err.splitlines()
    assert "a, b and c: The last line of metrics.jsonl is half-written and was left out." in lines
    assert len(set(lines)) == len(lines)
    page = out.read_text(encoding="utf-8").partition("<script")[0]
    assert page.count("is half-written") == 1
    assert f"Notes on the data ({len(lines)})" in page
