"""For any files of another trainer, a report is a page or our own error, and no text of the files
becomes an element of the page.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from report_runs import folder_in_memory
from test_report_fuzz import _check_numbers, _refuse, broken
from test_report_page import HOSTILE, Tags
from test_report_readers import TRL, prime_rl

from policyloss.cli import main
from policyloss_lab.report import collect, render

STATE = {
    "global_step": 2,
    "log_history": [{"step": 1, "reward": 0.5, "loss": 1.0}, {"step": 2, "eval_reward": 0.5}],
    "max_steps": 4,
}
TEXT_FILES: dict[str, Any] = {
    "trainer_state.json": STATE,
    "log.jsonl": {"step": 1, "data": {"critic/score/mean": 0.5, "actor/entropy": 1.0}},
    "rollouts/3.jsonl": {"input": "a", "output": "b", "gts": "c", "score": 1.0, "step": 3},
    "token_exports/step_3/rank_0.jsonl": prime_rl(3),
    "media/completions_3_0a.table.json": {
        "columns": ["step", "prompt", "completion", "right", "advantage"],
        "data": [[3, "a", "b", 1.0, 0.5], [3, "a", "c", 0.0, -0.5]],
    },
}


def database(path: Path, *rows: dict[str, Any], name: str = "run") -> None:
    """A project as trackio stores it."""
    with sqlite3.connect(path) as base:
        base.execute("CREATE TABLE metrics (id INTEGER PRIMARY KEY, run_name, step, metrics)")
        base.execute("CREATE TABLE configs (run_name, config)")
        for step, row in enumerate(rows, 1):
            values = (name, step, json.dumps(row))
            base.execute("INSERT INTO metrics (run_name, step, metrics) VALUES (?, ?, ?)", values)
    base.close()


def events(folder: Path, tags: list[str]) -> Path:
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(folder)) as writer:
        for step in (1, 2):
            for tag in tags:
                writer.add_scalar(tag, step / 2, step)
    return next(folder.glob("events*"))


@pytest.fixture(scope="module")
def binaries(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """Small files of each binary format."""
    folder = tmp_path_factory.mktemp("binaries")
    database(folder / "p.db", {"reward": 1.0}, {"completions": {"_value": [{"prompt": "a"}]}})
    return {
        "p.db": (folder / "p.db").read_bytes(),
        "events.out.tfevents.1": events(folder / "board", ["train/reward", "kl"]).read_bytes(),
        "completions/completions_00001.parquet": (
            TRL / "completions/completions_00001.parquet"
        ).read_bytes(),
    }


def drawn(files: dict[str, bytes]) -> int:
    """Draw a folder with these files; the exit code. A page must be right, an error ours."""
    with folder_in_memory() as name:
        run, page, data = (Path(name) / part for part in ("run", "page.html", "data.json"))
        for file, content in files.items():
            (run / file).parent.mkdir(parents=True, exist_ok=True)
            (run / file).write_bytes(content)
        code = main(["report", str(run), "--out", str(page), "--json", str(data)])
        assert code in (0, 2)
        assert page.exists() == (code == 0)
        if code == 0:
            assert page.read_text(encoding="utf-8").endswith("</html>\n")
            _check_numbers(json.loads(data.read_text(), parse_constant=_refuse))
        return code


def broken_lines(name: str) -> st.SearchStrategy[tuple[str, bytes]]:
    row = broken(TEXT_FILES[name]).map(lambda value: json.dumps(value).encode())
    content = st.lists(row | row | st.binary(max_size=20), min_size=1, max_size=3).map(b"\n".join)
    return st.tuples(st.just(name), content)


@given(st.sampled_from(list(TEXT_FILES)).flatmap(broken_lines))
def test_broken_text_files(file: tuple[str, bytes]) -> None:
    drawn(dict([file]))


@pytest.mark.parametrize(
    "name", ["p.db", "events.out.tfevents.1", "completions/completions_00001.parquet"]
)
@given(data=st.data())
def test_broken_binary_files(binaries: dict[str, bytes], name: str, data: st.DataObject) -> None:
    content = bytearray(binaries[name])
    changes = st.tuples(st.integers(0, len(content) - 1), st.integers(0, 255))
    for place, byte in data.draw(st.lists(changes, max_size=8)):
        content[place] = byte
    end = data.draw(st.just(len(content)) | st.integers(1, len(content)))
    drawn({name: bytes(content[:end])})


def test_the_binary_files_are_read_as_they_are(binaries: dict[str, bytes]) -> None:
    assert {name: drawn({name: content}) for name, content in binaries.items()} == dict.fromkeys(
        binaries, 0
    )


@pytest.mark.parametrize(
    "content", [b'step,reward\n1,2\n"', b"step,x\n" + b"1," * 5_000, b"step:1 - a:nan - b:inf"]
)
def test_broken_tables_and_consoles(content: bytes) -> None:
    drawn({"export.csv": content})


def hostile_state(folder: Path) -> None:
    log = [{"step": s, **dict.fromkeys(HOSTILE, 1.0)} for s in (1, 2)]
    (folder / "trainer_state.json").write_text(json.dumps({"log_history": log}))


def hostile_lines(folder: Path) -> None:
    (folder / "log.jsonl").write_text(
        "".join(json.dumps({"step": s, **dict.fromkeys(HOSTILE, 1.0)}) + "\n" for s in (1, 2))
    )


def hostile_dumps(folder: Path) -> None:
    rows = [{"input": x, "output": x, "gts": x, "score": 1.0, "step": 1, x: 1.0} for x in HOSTILE]
    (folder / "1.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def hostile_tokens(folder: Path) -> None:
    (folder / "rank_0.jsonl").write_text(json.dumps(prime_rl(1, token_ids=[0, *HOSTILE[:2]])))


def hostile_table(folder: Path) -> None:
    rows = [[1, text, text, 1.0] for text in HOSTILE]
    table = {"columns": ["step", "prompt", "completion", HOSTILE[0]], "data": rows}
    (folder / "c_1_0a.table.json").write_text(json.dumps(table))


def hostile_parquet(folder: Path) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    texts = [text.encode("utf-8", "replace").decode() for text in HOSTILE]
    table = {"prompt": texts, "completion": texts, texts[0]: [1.0] * len(texts)}
    parquet.write_table(pa.table(table), folder / "completions_1.parquet")


def hostile_csv(folder: Path) -> None:
    quoted = ",".join('"' + text.replace('"', '""') + '"' for text in HOSTILE[:6])
    (folder / "export.csv").write_text(f"step,{quoted}\n1{',1' * 6}\n", encoding="utf-8")


def hostile_console(folder: Path) -> None:
    parts = " - ".join(f"{text}:1.0" for text in HOSTILE[:6])
    (folder / "log.txt").write_text(f"step:1 - {parts}\nstep:2 - {parts}\n")


def hostile_events(folder: Path) -> None:
    events(folder, [text for text in HOSTILE if "\ud800" not in text])


def hostile_database(folder: Path) -> None:
    rows = [{"prompt": text, "completion": text} for text in HOSTILE]
    numbers = dict.fromkeys(HOSTILE, 1.0)
    database(folder / "p.db", numbers, {"c": {"_value": rows}}, name=HOSTILE[0])


@pytest.mark.parametrize(
    "write",
    [
        *(hostile_state, hostile_lines, hostile_dumps, hostile_tokens, hostile_table),
        *(hostile_parquet, hostile_csv, hostile_console, hostile_events, hostile_database),
    ],
    ids=lambda write: write.__name__,
)
def test_hostile_texts_of_other_trainers_are_inert(
    tmp_path: Path, write: Callable[[Path], None]
) -> None:
    write(tmp_path)
    data = collect([tmp_path])
    (run,) = data["runs"]
    shown = json.dumps([run["metrics"], run["rollouts"]])
    assert any(word in shown for word in ("owned", "#<script")), "the texts reached the page"
    page = render(data)
    page.encode("utf-8")
    tags = Tags(page)
    assert tags.count["script"] == 2
    assert not {"img", "iframe", "link"} & set(tags.count)
    names = {name for _, name, _ in tags.attributes}
    assert not {name for name in names if name.startswith("on") or name in ("src", "href", "style")}


def test_a_database_that_never_answers_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("policyloss_lab.logs.trackers._MOST_STEPS", 2)
    with sqlite3.connect(tmp_path / "p.db") as base:
        base.execute(
            "CREATE VIEW metrics AS WITH RECURSIVE n(id) AS (SELECT 1 UNION ALL SELECT id + 1 FROM "
            "n) SELECT id, 'run' AS run_name, id AS step, '{}' AS metrics FROM n"
        )
    base.close()
    assert main(["report", str(tmp_path), "--out", str(tmp_path / "page.html")]) == 2
