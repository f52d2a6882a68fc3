"""What the doctor refuses, and what it does with a great many tokens."""

from __future__ import annotations

import json
import struct
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import policyloss as pl
import policyloss_lab as lab
from policyloss.cli import main
from policyloss_lab.diagnosis.tokens import doctor_batch


def healthy(rows: int = 8, columns: int = 40, noise: float = 1e-6) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    p = torch.rand(rows, columns, generator=draw).clamp(1e-3, 0.999)
    old = p.log()
    return {
        "old_logp": old,
        "rollout_logp": old + noise * torch.randn(old.shape, generator=draw),
        "mask": torch.ones(rows, columns, dtype=torch.bool),
    }


def spoiled(**changes: Any) -> dict[str, Any]:
    return {**healthy(), **changes}


def with_value(name: str, value: float, where: Any) -> dict[str, Any]:
    arguments = healthy()
    arguments[name][where] = value
    return arguments


FIRST = (slice(None), 0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (with_value("rollout_logp", torch.nan, FIRST), "8 of 320 valid tokens, all of them the fi"),
        (with_value("old_logp", -torch.inf, (2, 3)), r"1 of 320 .* in row 2, column 3"),
        (spoiled(old_logp=torch.zeros(3, 3)), r"old_logp has shape \(3, 3\) but rollout_logp"),
        (spoiled(mask=torch.zeros(8, 40)), "mask has no valid token"),
        (spoiled(mask=torch.full((8, 40), 2)), "values other than 0 and 1"),
        (spoiled(old_logp=None), "pass old_logp= or logp="),
        (spoiled(rollout_logp=torch.rand(8, 40) + 1), "above 0 at most valid tokens"),
        (spoiled(rollout_logp=[[0.0]]), "rollout_logp must be a floating-point tensor"),
        ({k: v[:1, :5] for k, v in healthy().items()}, "5 valid tokens are too few"),
        ({k: v[:1, :1] for k, v in healthy().items()}, "1 valid tokens are too few"),
        (spoiled(model=torch.nn.Linear(2, 2)), r"model= needs ids= of shape \[B, T\]"),
        (spoiled(rollout_ids=torch.zeros(2, 2)), "pass both, of one"),
    ],
)
def test_a_verdict_on_nothing_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(pl.InputError, match=message):
        lab.doctor(**arguments)


def test_tokens_that_the_engine_calls_impossible_are_counted() -> None:
    found = lab.doctor(**with_value("rollout_logp", -torch.inf, (0, 0)))
    assert found.tokens == 319
    assert any("1 tokens have rollout_logp = -inf" in sentence for sentence in found.evidence)


def test_a_million_tokens_take_seconds() -> None:
    arguments = healthy(1000, 1000)
    arguments["rollout_logp"] = arguments["rollout_logp"].roll(1, 1)
    start = time.process_time()
    found = lab.doctor(**arguments)
    assert found.cause == "shift"
    assert found.tokens <= 65536
    assert time.process_time() - start < 30


def test_equal_bits_alone_are_no_copy() -> None:
    """An engine with the trainer's kernels gives them; numbers of padding, which no engine
    computes, show a copy.
    """
    same = {**healthy(), "rollout_logp": healthy()["old_logp"].clone()}
    found = lab.doctor(**same)
    assert found.healthy
    assert any("equal bit for bit" in sentence for sentence in found.evidence)
    assert found.remedy.startswith("Confirm that rollout_logp comes from the engine")
    same["mask"][:, 30:] = False
    assert lab.doctor(**same).cause == "copy"
    same["rollout_logp"][:, 30:] = 0.0
    assert lab.doctor(**same).healthy


# As each framework holds it: verl's DataProto has a mapping, TRL's inputs are one, and OpenRLHF's
# Experience has attributes, of which some are None.
HOLDERS = {
    "verl": (
        lambda names: SimpleNamespace(batch=names),
        ("rollout_log_probs", "old_log_probs", "response_mask", "responses"),
    ),
    "trl": (
        lambda names: names,
        ("sampling_per_token_logps", "old_per_token_logps", "completion_mask", "completion_ids"),
    ),
    "openrlhf": (
        lambda names: SimpleNamespace(**names, values=None),
        ("rollout_log_probs", "action_log_probs", "action_mask", "sequences"),
    ),
}


@pytest.mark.parametrize("framework", HOLDERS)
def test_a_batch_of_a_framework_is_read_in_one_line(framework: str) -> None:
    a = healthy()
    hold, names = HOLDERS[framework]
    late, ids = a["rollout_logp"].roll(1, 1), torch.zeros(8, 60, dtype=torch.long)
    tensors = (late, a["old_logp"], a["mask"].long(), ids)
    found = doctor_batch(hold(dict(zip(names, tensors, strict=True))))
    assert found.cause == "shift"
    assert found.tokens == 320


def test_a_batch_without_a_side_is_refused() -> None:
    a = healthy()
    with pytest.raises(pl.InputError, match="the engine's log-probabilities are missing"):
        doctor_batch({"old_log_probs": a["old_logp"]})


# The command --------------------------------------------------------------------------------------


def lines_of(arguments: dict[str, torch.Tensor]) -> str:
    rows = zip(arguments["rollout_logp"].tolist(), arguments["old_logp"].tolist(), strict=True)
    return "\n".join(json.dumps({"rollout_logp": r, "old_logp": o}) for r, o in rows)


def test_the_command_has_an_exit_code_for_each_kind_of_verdict(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "tokens.jsonl"
    file.write_text(lines_of(healthy()))
    assert main(["doctor", str(file)]) == 0
    assert capsys.readouterr().out.startswith("healthy")
    shifted = healthy()
    shifted["rollout_logp"] = shifted["rollout_logp"].roll(1, 1)
    file.write_text(lines_of(shifted))
    assert main(["doctor", str(file), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["cause"] == "shift"
    file.write_text(lines_of(healthy(noise=0.3)))
    assert main(["doctor", str(file)]) == 3


def tensors_file(dtype: str, shape: list[int], place: tuple[int, int] = (0, 8)) -> bytes:
    """A safetensors file of eight bytes whose header says this of both sides."""
    entry = {"dtype": dtype, "shape": shape, "data_offsets": place}
    header = json.dumps({"rollout_logp": entry, "old_logp": entry}).encode()
    return struct.pack("<Q", len(header)) + header + bytes(8)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", '{"rollout_logp": [1], "x": 2}', "the trainer's log-probabilities are missing"),
        ("a.jsonl", '{"rollout_logp": [-1.0], "old_logp": [-1.0, -2.0]}', "row 1: old_logp has 2"),
        ("a.jsonl", '{"rollout_logp": ["a"], "old_logp": ["b"]}', "holds more than numbers"),
        ("a.jsonl", '{"rollout_logp": [-1.0], "old_logp": [-1.0]}\nno', "line 2, is not a JSON"),
        ("a.jsonl", '{"rollout_logp": [-1.0], "old_logp": [-1.0]}', "1 valid tokens are too few"),
        ("a.jsonl", '{"rollout_logp": [NaN], "old_logp": [-1.0]}', "NaN or infinite at 1 of 1"),
        ("a.jsonl", '{"rollout_logp": [], "old_logp": []}', "mask has no valid token"),
        ("a.jsonl", '{"rollout_logp": [-1.0], "old_logp": 3}', "no list under 'old_logp'"),
        ("a.safetensors", "", "is not a valid safetensors file"),
        ("a.safetensors", tensors_file("F32", [9, 9]), "is not a valid safetensors file"),
        ("a.safetensors", tensors_file("F32", [2], (8, 99)), "is not a valid safetensors file"),
        ("a.safetensors", tensors_file("Q7", [2]), "is not a valid safetensors file"),
        ("a.safetensors", tensors_file("I32", [2]), "must be a floating-point tensor"),
        ("a.safetensors", "not one", "is not a valid safetensors file"),
        ("a.pt", "x", "may be a pickle"),
        ("a.csv", "what,is\nthis,file", "it is not the log of a run"),
    ],
)
def test_a_file_of_another_format_is_named(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    name: str,
    content: str | bytes,
    message: str,
) -> None:
    data = content if isinstance(content, bytes) else content.encode()
    (tmp_path / name).write_bytes(data)
    assert main(["doctor", str(tmp_path / name)]) == 2
    assert message in capsys.readouterr().err


def test_safetensors_are_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = {k: v for k, v in healthy().items() if k != "mask"}
    header, body = {}, b""
    for name, x in a.items():
        data = x.numpy().tobytes()
        place = [len(body), len(body) + len(data)]
        header[name] = {"dtype": "F32", "shape": list(x.shape), "data_offsets": place}
        body += data
    text = json.dumps(header).encode()
    (tmp_path / "a.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + body)
    assert main(["doctor", str(tmp_path / "a.safetensors")]) == 0
    assert "320 tokens" in capsys.readouterr().out


# Where people meet it -----------------------------------------------------------------------------


def test_a_report_shows_the_health_of_a_run(tmp_path: Path) -> None:
    from policyloss_lab.report import collect, render

    run = tmp_path / "run"
    run.mkdir()
    rows = [{"step": s, "reward/mean": s / 20, "truncated": 0.9} for s in range(1, 21)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = collect([run])
    assert [row["cause"] for row in data["runs"][0]["health"]] == ["truncation"]
    assert "<summary>Health: 1 symptom</summary>" in render(data)
    (run / "metrics.jsonl").write_text(json.dumps(rows[0]) + "\n")
    assert "<summary>Health" not in render(collect([run]))
