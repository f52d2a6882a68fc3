"""For any run directory, a report is a page or our own error: never a traceback, never a value that
JSON lacks.
"""

from __future__ import annotations

import json
import os
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from report_runs import folder_in_memory, rollout

import policyloss as pl
from policyloss.cli import main
from policyloss_lab.completions import BRANCHES
from policyloss_lab.report import collect

FILES = (
    "config.json",
    "environment.json",
    "metrics.jsonl",
    "timing.jsonl",
    "rollouts.jsonl",
    "answers.jsonl",
    "lock",
)
NAN = float("nan")
STORED = {
    **rollout(1, ["a", "b"]),
    "groups": 4,
    "finish_reason": "end",
    "ref_logp": [-0.5, -0.25],
    "teacher_logp": [-0.5, -0.25],
    "entropy": [0.5, 0.25],
    "mask": [True, False],
    "branch": ["upper", "plain"],
}
WRONG: list[Any] = [
    None, True, False, 0, -1, 1.5, NAN, float("inf"), -float("inf"), 1e308, -1e308, 5e-324, 10**400,
    -(10**400), 2**53, 2**63,
    "", "nan", "text", "\ud800", "\x00\x1b[31m", "</script><script>", "é\u202e", "x" * 30_000, [],
    {}, [NAN], [[]], {"a": NAN},
    {"edges": [0, 0, 0, 0], "counts": [1, 1, 1]},
    {"edges": [1e308, 1.5e308, 1.6e308, float("inf")], "counts": [1, 1, 10**400]},
    {"nan": {"": [None, True, "x", {"y": 1e308}]}},
]  # fmt: skip
COLUMNS = ("ids", "logp", "ratio", "clipped", "entropy", "ref_logp", "mask", "branch")
METRICS = {
    "step": 1,
    "reward/mean": 0.5,
    "tokens": 3,
    "eval/accuracy": 0.5,
    "policy/kl_ref": 0.1,
    "nonfinite": {"a": "nan"},
}
TIMING = {"step": 1, "step_s": 0.5, "tokens_per_s": 3.0}
HISTOGRAM = {"ratio_histogram": {"edges": [0.5, 1, 2], "counts": [1, 2]}}
wrong = st.sampled_from(WRONG)


def broken(value: Any) -> st.SearchStrategy[Any]:
    """`value` with some of its parts, at any depth, replaced by something wrong."""
    places = list(_places(value))
    inside = st.tuples(st.sampled_from(places[1:]) | st.sampled_from(places), wrong)
    return st.lists(inside, max_size=4).map(lambda changes: _changed(value, changes))


def _places(value: Any, at: tuple[Any, ...] = ()) -> Any:
    yield at
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _places(item, (*at, key))
    elif isinstance(value, list):
        for i, item in enumerate(value[:2]):
            yield from _places(item, (*at, i))


def _changed(value: Any, changes: list[tuple[tuple[Any, ...], Any]]) -> Any:
    value = json.loads(json.dumps(value))
    for at, replacement in changes:
        if not at:
            return replacement
        inner = value
        # The first change may have taken away the place of the second.
        with suppress(LookupError, TypeError):
            for key in at[:-1]:
                inner = inner[key]
            inner[at[-1]] = json.loads(json.dumps(replacement))  # the next change may be inside
    return value


def encoded(value: Any) -> bytes:
    return json.dumps(value).encode()


def lines(value: Any) -> st.SearchStrategy[bytes]:
    row = broken(value).map(encoded)
    return st.lists(row | row | row | st.binary(max_size=20), min_size=1, max_size=4).map(
        b"\n".join
    )


config = {
    "policyloss": "0.1.0",
    "config": {"loss": "dapo", "steps": 2, "model": {"name": "m"}},
    "loss": pl.preset("dapo").to_dict(),
}
gspo = {**config, "loss": pl.preset("gspo").to_dict()}
LOCK = {"pid": os.getpid(), "host": "h", "began": "x"}
contents = {
    "config.json": (broken(config) | broken(gspo)).map(encoded),
    "environment.json": broken({"python": "3", "nested": {"a": [1]}}).map(encoded),
    "metrics.jsonl": lines({**METRICS, **HISTOGRAM}),
    "timing.jsonl": lines(TIMING),
    "rollouts.jsonl": lines(STORED),
    "answers.jsonl": lines(STORED),
    "lock": broken(LOCK).map(encoded),
}
mess = st.binary(max_size=40) | st.sampled_from(
    [b"[" * 100_000, b'{"a":' * 5_000, b"\xff\xfe\x00", b"1" * 5_000, b'{"config": ']
)
contents = {name: inside | inside | inside | mess for name, inside in contents.items()}
# Hypothesis leaves out optional keys half of the time.
FIRST = (
    "rollouts.jsonl",
    "metrics.jsonl",
)
directories = st.fixed_dictionaries(
    {name: contents[name] for name in FIRST},
    optional={name: contents[name] for name in FILES if name not in FIRST},
) | st.fixed_dictionaries({}, optional=contents)


@given(st.lists(directories, min_size=1, max_size=2))
def test_any_directory_gives_a_page_or_an_error_of_ours(made: list[dict[str, bytes]]) -> None:
    with folder_in_memory() as name:
        folder = Path(name)
        runs = []
        for i, files in enumerate(made):
            run = folder / f"run{i}"
            run.mkdir()
            for file, data in files.items():
                (run / file).write_bytes(data)
            runs.append(str(run))
        page, data_file = folder / "page.html", folder / "data.json"
        code = main(["report", *runs, "--out", str(page), "--json", str(data_file)])
        readable = all({"config.json", "metrics.jsonl"} & set(files) for files in made)
        # A folder without these may be a run of another trainer.
        assert code == 0 or (code == 2 and not readable)
        if code:
            assert not page.exists()
            return
        text = page.read_text(encoding="utf-8")
        assert text.endswith("</html>\n")
        island = re.search(r'id="data">(.*?)</script>', text, re.DOTALL)
        assert island is not None
        for data in (island[1], data_file.read_text(encoding="utf-8")):
            _check_numbers(json.loads(data, parse_constant=_refuse))


def _refuse(constant: str) -> None:
    raise AssertionError(f"{constant} is no JSON")


def _check_numbers(value: Any) -> None:
    """Every list of points, tokens or counts holds only values that the page's script expects."""
    for run in value["runs"]:
        for line in run["metrics"].values() if "metrics" in run else []:
            assert len(line["step"]) == len(line["value"])
            assert all(type(step) is int and abs(step) < 2**53 for step in line["step"])
            assert all(v is None or abs(v) <= 1e150 for v in line["value"])
        on_page = "answers" not in run
        for row in [] if on_page else [*run["rollouts"], *run["answers"]]:
            assert all(isinstance(token, str) and len(token) <= 201 for token in row["tokens"])
            assert all(len(row[name]) == len(row["tokens"]) for name in COLUMNS)
            assert all(v is None or v in BRANCHES for v in row["branch"])
        for group in run["rollouts"] if on_page else []:
            for name in COLUMNS:  # one value for all tokens, or one for each
                values = [row[name] for row in group["rows"] if isinstance(row[name], list)]
                assert all(len(v) in {len(row["tokens"]) for row in group["rows"]} for v in values)


@pytest.mark.parametrize(
    "field",
    [
        *("ids", "example", "group", "tokens", "logp", "reward", "prompt", "step", "clipped"),
        *("groups", "finish_reason", "ref_logp", "entropy", "mask", "branch", "finished"),
    ],
)
def test_a_wrong_value_in_any_field_of_a_rollout(field: str) -> None:
    with folder_in_memory() as name:
        run = Path(name)
        (run / "config.json").write_text("{}")
        for value in WRONG:
            inside = [value, value] if isinstance(STORED[field], list) else value
            (run / "rollouts.jsonl").write_text(
                json.dumps(rollout(0, ["c"])) + "\n" + json.dumps({**STORED, field: inside}) + "\n"
            )
            rows = collect([run])["runs"][0]["rollouts"]
            # A bad row spoils no other.
            assert ["c"] in [row["tokens"] for row in rows], repr(value)[:100]
            json.dumps(rows, allow_nan=False)


@pytest.mark.parametrize(
    ("file", "text"),
    [
        (
            "metrics.jsonl",
            '{"step": 0, "tokens": 1e308}\n{"step": 1, "tokens": 1e308}\n',
        ),  # their sum is infinite
        ("config.json", '{"config": {"steps": 1' + "0" * 400 + "}}"),  # no float can hold it
        (
            "rollouts.jsonl",
            json.dumps({**rollout(0, ["a"]), "logp": [1e308], "rollout_logp": [-1e308]}),
        ),  # their distance
        (
            "metrics.jsonl",
            json.dumps({"step": 0, "ratio_histogram": {"edges": [0, 0, 0, 0], "counts": [1, 1, 1]}})
            + "\n",
        ),
        ("metrics.jsonl", json.dumps({"step": 10**400, "a": 1}) + "\n"),
        ("metrics.jsonl", json.dumps({"step": True, "a": 1}) + "\n"),
        ("config.json", '{"config": ' + '{"a": ' * 900 + "1" + "}" * 901),
        ("environment.json", '{"a": ' + "[" * 900 + "]" * 900 + "}"),
        ("rollouts.jsonl", '{"step": 0, "tokens": [' + "[" * 900 + "]" * 900 + "]}"),
        ("rollouts.jsonl", '{"step": 0, "tokens": [1' + "0" * 4_000 + "]}"),
    ],
)
def test_numbers_and_nesting_that_overflow(tmp_path: Path, file: str, text: str) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / file).write_text(text)
    page = tmp_path / "page.html"
    assert (
        main(["report", str(tmp_path), "--out", str(page), "--json", str(tmp_path / "data.json")])
        == 0
    )
    json.loads((tmp_path / "data.json").read_text(), parse_constant=_refuse)
    assert page.read_text().endswith("</html>\n")
