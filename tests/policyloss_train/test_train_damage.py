"""Damaged run directories and options that make no sense:
the outcome is success, or one clear message and exit code 2.

Faults go through the command line in this process, so that every error that is not meant for the
user fails the test; only the test of every value in config.json reads the file without a command
around it.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import random
import resource
import shutil
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from json_places import assert_all_handled, changed, leaves
from safetensors.torch import load_file, save_file
from walk import in_shares

from policyloss.cli import main
from policyloss.errors import PolicyLossError
from policyloss_train import chat
from policyloss_train.command import save_policy
from policyloss_train.config import TrainConfig
from policyloss_train.models import tiny_tokenizer
from policyloss_train.run.resume import resume_command, stored_options
from policyloss_train.tasks import make_task
from policyloss_train.time_limit import TimeIsUp, call_within

DEEP = b"[" * 100_000 + b"]" * 100_000
VALUES: tuple[Any, ...] = (
    *(
        None,
        True,
        -1,
        0,
        2**63,
        10**400,
        1e308,
        "",
        "x",
        "x\0y",
        "\ud800",
        "../..",
        [],
        [1],
        {},
        {"a": 1},
        {"float": "nan"},
    ),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of three thousand weights, a task of twelve prompts, and a run of two steps with
    everything that can be stored.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    place = tmp_path_factory.mktemp("damage")
    rows = [
        {"prompt": f"{n}=", "answer": str(n), "split": "held_out" if n > 9 else "train"}
        for n in range(12)
    ]
    (place / "task.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokenizer = tiny_tokenizer(make_task(str(place / "task.jsonl"), reward="exact", seed=0))
    torch.manual_seed(0)
    size = {
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
    }
    end = {
        "pad_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "bos_token_id": None,
    }
    LlamaForCausalLM(
        LlamaConfig(vocab_size=len(tokenizer), max_position_embeddings=64, **size, **end)
    ).save_pretrained(place / "model")
    tokenizer.save_pretrained(place / "model")
    options = {
        "loss": "ppo",
        "staleness": 1,
        "prompts": 1,
        "group-size": 2,
        "max-new-tokens": 2,
        "eval-prompts": 1,
        "steps": 2,
    }
    options |= {
        "checkpoint-every": 1,
        "task": place / "task.jsonl",
        "reward": "exact",
        "model": place / "model",
    }
    words = [str(word) for name, value in options.items() for word in (f"--{name}", value)]
    assert outcome(["train", "--out", str(place / "run"), *words]) == ""
    return place


def outcome(arguments: list[str]) -> str:
    """ "" if the command ends as it should: by success, or by exit code 2 and one message.
    Else a description.
    """
    out, err = io.StringIO(), io.StringIO()
    with (
        warnings.catch_warnings(),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        warnings.simplefilter("ignore")
        try:
            code: Any = main(arguments)
        except SystemExit as error:
            code = error.code
        except BaseException:
            return traceback.format_exc()
    rows = [
        row
        for row in err.getvalue().splitlines()
        if row.startswith("policyloss: ") and "warning: " not in row[:24]
    ]
    if code == 0 and not rows:
        return ""
    return "" if code == 2 and len(rows) == 1 else f"exit code {code}, and said {err.getvalue()!r}"


def copied(folder: Path, where: Path) -> Path:
    return Path(shutil.copytree(folder / "run", where))


COMMANDS = (["train", "--resume", "--out"], ["eval", "--prompts", "2"], ["sample", "--number", "1"])


def commands(run: Path, number: int) -> list[str]:
    command = COMMANDS[number % len(COMMANDS)]
    return [*command, str(run)]


# ---------------------------------------------------------------- files


# Parts of a test whose cases are many and alike; the first meets every place and every value.
SLOW = pytest.mark.slow
THIRDS = pytest.mark.parametrize(
    "third", [0, pytest.param(1, marks=SLOW), pytest.param(2, marks=SLOW)]
)
HALVES = pytest.mark.parametrize("half", [0, pytest.param(1, marks=SLOW)])


@THIRDS
def test_every_value_of_a_configuration(folder: Path, tmp_path: Path, third: int) -> None:
    """The reader returns a configuration or raises our error, for all values at all places, without
    a command around it.
    """
    data = json.loads((folder / "run" / "config.json").read_text())
    results: dict[str, str] = {}
    for i, path in enumerate(leaves(data)):
        for value in [*VALUES, "missing"][(third - i) % 3 :: 3]:
            (tmp_path / "config.json").write_text(json.dumps(changed(data, path, value)))
            name = f"{path} = {str(value)[:20]!r}"
            try:
                stored_options(tmp_path)
                results[name] = ""
            except PolicyLossError:
                results[name] = ""
            except BaseException:
                results[name] = traceback.format_exc()
    assert_all_handled(results, least=400)


def test_configurations_on_the_command_line(folder: Path, tmp_path: Path) -> None:
    """Values of the right type that mean nothing, and some of the wrong one,
    each with one of the commands.
    """
    data = json.loads((folder / "run" / "config.json").read_text())
    # No count of steps among them: a large one is a long run, and no fault.
    names = (
        "task",
        "model",
        "reward",
        "loss",
        "advantage",
        "device",
        "dtype",
        "seed",
        "betas",
        "max_new_tokens",
        "success",
    )
    values = (
        "",
        "x",
        "\ud800",
        "..:x",
        "nonsense:1",
        "a/b",
        ".jsonl",
        10**400,
        1e308,
        [1, 1],
        -1,
        None,
        2**62,
    )
    run = copied(folder, tmp_path / "run")
    random.seed(0)
    cases = random.sample([(name, value) for name in names for value in values], 48)
    results = {}
    for i, (name, value) in enumerate(cases):
        (run / "config.json").write_text(json.dumps(changed(data, ("config", name), value)))
        results[f"{name} = {str(value)[:20]!r}, {COMMANDS[i % 3][0]}"] = outcome(commands(run, i))
    assert_all_handled(results, least=48)


RAW = {
    "empty": b"",
    "deep": DEEP,
    "deep in an object": b'{"step": 1, "x": ' + DEEP + b"}\n",
    "a list": b"[1, 2]",
    "a number": b"1" * 5000,
    "bytes": bytes(range(256)),
    "null": b"null",
}


@HALVES
def test_files_that_hold_something_else(folder: Path, tmp_path: Path, half: int) -> None:
    """Every file of a run with every kind of contents, and each one missing."""
    names = [
        str(path.relative_to(folder / "run"))
        for path in sorted((folder / "run").rglob("*"))
        if path.is_file()
    ]
    names = [name for name in names if "tensorboard" not in name and "step_000001" not in name] + [
        "lock"
    ]
    results = {}
    kinds = [*RAW, "missing", "cut", "a folder"]
    cases = [(name, kind) for i, name in enumerate(names) for kind in kinds[(half + i) % 2 :: 2]]
    for i, (name, kind) in enumerate(cases):
        run = copied(folder, tmp_path / "run")
        file = run / name
        held = file.read_bytes() if file.exists() else b"{}"
        file.unlink(missing_ok=True)
        if kind == "a folder":
            file.mkdir()
        elif kind != "missing":
            file.write_bytes(held[: len(held) // 2] if kind == "cut" else RAW[kind])
        results[f"{name} is {kind}"] = outcome(commands(run, i))
        shutil.rmtree(run)
    assert_all_handled(results, least=35)


def signed(path: Path, body: Any) -> None:
    """Write the index of a checkpoint whose sums are right:
    by someone who wants it to be believed.
    """
    for name in body["files"] if isinstance(body.get("files"), dict) else ():
        file = path / str(name)
        if file.is_file():
            sizes = {
                "bytes": file.stat().st_size,
                "sha256": hashlib.sha256(file.read_bytes()).hexdigest(),
            }
            body["files"][name] = {**body["files"][name], **sizes}
    data = json.dumps(body).encode()
    head = b'{"sha256": "%s", "checkpoint": ' % hashlib.sha256(data).hexdigest().encode()
    (path / "checkpoint.json").write_bytes(head + data + b"}")


@in_shares(2)
def test_numbers_of_a_checkpoint(share: int, folder: Path, tmp_path: Path) -> None:
    """Sound in its sums, and another value somewhere, or none."""
    run = copied(folder, tmp_path / "run")
    shutil.rmtree(run / "checkpoints" / "step_000001")
    path = run / "checkpoints" / "step_000002"
    body = json.loads((path / "checkpoint.json").read_text())["checkpoint"]
    values = ("missing", None, -1, 10**400, "\ud800", [], {"a": 1})
    cases = [(place, value) for place in leaves(body) if place[0] != "files" for value in values]
    random.seed(1)
    top = [
        (place, value)
        for place, value in cases
        if len(place) < 3 and value in ("missing", -1) and place[0] != "tensors"
    ]
    numbers, tensors = (
        [case for case in cases if case[0][0] == part] for part in ("numbers", "tensors")
    )
    results = {}
    chosen = [*top, *random.sample(numbers, 24), *random.sample(tensors, 8)]
    for place, value in chosen[share::2]:
        held = {file: file.read_bytes() for file in run.rglob("*") if file.is_file()}
        signed(path, changed(body, place, value))
        results[f"{place} = {str(value)[:20]!r}"] = outcome(
            ["train", "--resume", "--extend", "3", "--out", str(run)]
        )
        shutil.rmtree(run)
        for file, data in held.items():
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(data)
    assert_all_handled(results, least=20)


def test_tensors_of_a_checkpoint(folder: Path, tmp_path: Path) -> None:
    """Missing, of another shape or kind, one too many;
    and shapes of a million million in the index.
    """
    results = {}
    whole = load_file(folder / "run" / "checkpoints" / "step_000002" / "rank00000.safetensors")
    kinds = (
        "policy/model.lm_head.weight",
        "policy_optimizer/model.lm_head.weight/exp_avg",
        "queue/0/prompt_ids",
        "critic/head.bias",
    )
    changes: dict[str, Any] = {
        "missing": lambda x: None,
        "shape": lambda x: torch.zeros(3, 3),
        "kind": lambda x: torch.zeros(
            x.shape, dtype=torch.int64 if x.is_floating_point() else torch.float32
        ),
        "huge": lambda x: (
            torch.full(x.shape, 3e38) if x.is_floating_point() else torch.full(x.shape, 2**62)
        ),
    }
    for name in kinds:
        for kind, change in changes.items():
            run = copied(folder, tmp_path / "run")
            shutil.rmtree(run / "checkpoints" / "step_000001")
            path = run / "checkpoints" / "step_000002"
            other = change(whole[name])
            tensors = {key: x for key, x in whole.items() if key != name} | (
                {} if other is None else {name: other}
            )
            save_file(tensors, path / "rank00000.safetensors")
            body = json.loads((path / "checkpoint.json").read_text())["checkpoint"]
            del body["tensors"][name]
            if other is not None:  # the index describes the contents of the file
                piece = {"file": "rank00000.safetensors", "first": 0, "rows": other.shape[0]}
                dtype = str(other.dtype).removeprefix("torch.")
                body["tensors"][name] = {
                    "shape": list(other.shape),
                    "dtype": dtype,
                    "pieces": [piece],
                }
            signed(path, body)
            results[f"{name} {kind}"] = outcome(
                ["train", "--resume", "--extend", "3", "--out", str(run)]
            )
            shutil.rmtree(run)
    for shape in ([10**12], [10**12, 10**12], [-1], ["x"], 10**400):
        run = copied(folder, tmp_path / "run")
        path = run / "checkpoints" / "step_000002"
        body = json.loads((path / "checkpoint.json").read_text())["checkpoint"]
        piece = {"file": "rank00000.safetensors", "first": 0, "rows": 10**12}
        body["tensors"] = {
            "policy/model.lm_head.weight": {"shape": shape, "dtype": "float32", "pieces": [piece]}
        }
        signed(path, body)
        results[f"shape {str(shape)[:20]}"] = outcome(
            ["sample", str(run), "--checkpoint", str(path)]
        )
        shutil.rmtree(run)
    assert_all_handled(results, least=21)


def test_models_that_are_damaged(folder: Path, tmp_path: Path) -> None:
    results = {}
    run = folder / "run"
    for name in (
        "model.safetensors",
        "config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "generation_config.json",
    ):
        for kind in ("empty", "a list", "bytes", "null", "cut"):
            model = Path(shutil.copytree(folder / "model", tmp_path / "model"))
            data = (model / name).read_bytes()
            (model / name).write_bytes(data[: len(data) // 2] if kind == "cut" else RAW[kind])
            results[f"{name} is {kind}"] = outcome(
                ["sample", str(run), "--model", str(model), "--number", "1"]
            )
            shutil.rmtree(model)
    for words in (
        {"vocab_size": 5},
        {"vocab_size": 10**12},
        {"hidden_size": "x"},
        {"num_attention_heads": 3},
        {"model_type": "x"},
    ):
        model = Path(shutil.copytree(folder / "model", tmp_path / "model"))
        config = json.loads((model / "config.json").read_text())
        (model / "config.json").write_text(json.dumps(config | words))
        results[f"{words}"] = outcome(["sample", str(run), "--model", str(model), "--number", "1"])
        shutil.rmtree(model)
    assert_all_handled(results, least=30)


# ---------------------------------------------------------------- options

TRAIN: tuple[tuple[str, ...], ...] = (
    *(("--seed", str(n)) for n in (2**63, -1, 2**32, 10**400)),
    *(("--lr", x) for x in ("1e38", "inf", "nan", "-1", "1e400", str(10**400))),
    *(("--betas", *pair) for pair in (("1", "1"), ("-1", "0"), ("nan", "0"), ("0", "inf"))),
    *(("--device", x) for x in ("nonsense", "cuda:99", "meta", "cuda", "cpu:x", "")),
    *(
        ("--reward", x)
        for x in (
            "..:x",
            ".:x",
            "a b:c",
            ":",
            "os:getcwd",
            "no_such_module:f",
            "json:nothing",
            "\udcff:x",
            "sys:exit",
        )
    ),
    *(
        ("--task", x)
        for x in (
            "nope",
            "",
            "reasoning_gym:",
            "x.jsonl",
            "\udcff.jsonl",
            "a" * 5000 + ".jsonl",
            ".jsonl",
        )
    ),
    *(("--model", x) for x in ("", "/nowhere", "./x", "\udcff", "a b c", "../../..", "x" * 500)),
    *(("--out", x) for x in ("/proc/nowhere", "/dev/null/x", "a" * 5000)),
    *(("--loss", x) for x in ("", "nope", "nope.json", "/dev/null", "\udcff")),
    *(("--loss.trust.eps-high", x) for x in ("x", "1e400", str(10**400), "[]", "nan")),
    *(("--max-new-tokens", x) for x in (str(10**12), "100", "-1")),
    *(
        (f"--{name}", x)
        for name in ("prompts", "steps", "keep", "eval-prompts", "micro-tokens")
        for x in ("-5", "0", str(10**400))
    ),
    *(
        (f"--{name}", "inf")
        for name in (
            "temperature",
            "weight-decay",
            "grad-clip",
            "reward-timeout",
            "heartbeat",
            "rank-timeout",
            "gamma",
        )
    ),
    *(
        (f"--{name}", "nan")
        for name in (
            "temperature",
            "weight-decay",
            "top-p",
            "lam",
            "success",
            "rank-timeout",
            "value-clip",
        )
    ),
    ("--extend", "5"),
    ("--dtype", "float8"),
    ("--track", "nobody"),
    ("--advantage", "\udcff"),
    ("positional",),
)
EVALUATE = (
    *(("--prompts", x) for x in ("-5", "0", "x", str(10**400))),
    *(("--show", x) for x in ("-1", "x")),
    *(("--checkpoint", x) for x in ("", "/", "/dev/null", "nope", "\udcff", "/proc/self")),
    *(("--reward", x) for x in ("..:x", "nope", "os:getcwd")),
    *(("--success", x) for x in ("nan", "x", "1e400")),
    ("--task", "/dev/zero.jsonl"),
    ("--device", "nonsense"),
)
SAMPLE = (
    *(("--number", x) for x in ("-5", "0", str(10**15), str(10**400))),
    *(("--temperature", x) for x in ("-1", "nan", "inf", "1e-50")),
    *(("--seed", x) for x in ("-1", str(2**63), str(10**400))),
    *((x,) for x in ("\udcff", "\ud800\udc00", "", "x" * 10_000, "\0")),
)


def test_options_that_make_no_sense(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    few = [
        "--steps",
        "1",
        "--prompts",
        "1",
        "--group-size",
        "2",
        "--minibatches",
        "1",
        "--eval-prompts",
        "1",
        "--max-new-tokens",
        "2",
    ]
    common = [
        *few,
        "--task",
        str(folder / "task.jsonl"),
        "--reward",
        "exact",
        "--model",
        str(folder / "model"),
    ]
    results = {}
    for i, words in enumerate(TRAIN):
        arguments = ["train", "--out", str(tmp_path / f"run{i}"), *common, *words]
        results[f"train {[word[:30] for word in words]}"] = outcome(arguments)
    for name, rows in (("eval", EVALUATE), ("sample", SAMPLE)):
        for words in rows:
            results[f"{name} {[word[:30] for word in words]}"] = outcome(
                [name, str(folder / "run"), *words]
            )
    assert_all_handled(results, least=120)


def test_names_that_are_not_utf_8(folder: Path, tmp_path: Path) -> None:
    """A run in a folder whose name is not UTF-8 continues, is evaluated and sampled from."""
    run = copied(folder, tmp_path / "\udcff run")
    results = {command[0]: outcome([*command, str(run)]) for command in COMMANDS}
    results["extend"] = outcome(["train", "--resume", "--extend", "3", "--out", str(run)])
    assert_all_handled(results, least=4)


def test_a_clock_that_stands_still(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = copied(folder, tmp_path / "run")
    monkeypatch.setattr(time, "perf_counter", lambda: 7.0)
    monkeypatch.setattr(time, "time", lambda: 7.0)
    assert outcome(["train", "--resume", "--extend", "3", "--out", str(run)]) == ""
    last = json.loads((run / "timing.jsonl").read_text().splitlines()[-1])
    assert last["step_s"] == 0
    assert "tokens_per_s" not in last


# ---------------------------------------------------------------- runs of strangers

LOOPS = "{% for a in range(99999) %}" * 3 + "{{ messages }}" + "{% endfor %}" * 3


def limited(arguments: list[str], seconds: float = 20.0) -> str:
    """`outcome`, which also reports a command that takes longer."""
    try:
        return call_within(seconds, outcome, arguments)
    except TimeIsUp:
        return f"took longer than {seconds} s"


def test_paths_of_a_foreign_run_are_neither_read_nor_opened(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its config.json may name any path as the chat template, and a service; its folder may hold a
    template that never ends. No command hangs, opens a service or carries a file out.
    """
    opened: list[Any] = []

    def service(**about: Any) -> None:
        opened.append(about)
        if "/" in about.get("id", about["name"]):
            raise ValueError("Invalid run ID")  # as wandb does

    for name in ("wandb", "trackio"):
        module = SimpleNamespace(init=service, log=lambda *a, **b: None, finish=lambda: None)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(chat, "TEMPLATE_S", 0.1)
    secret, pipe, sparse = tmp_path / "secret", tmp_path / "pipe", tmp_path / "sparse"
    secret.write_text("the secret {{ messages }}")
    os.mkfifo(pipe)
    with sparse.open("wb") as file:
        file.truncate(1 << 40)
    model = Path(shutil.copytree(folder / "model", tmp_path / "model"))
    tokenizer = json.loads((model / "tokenizer_config.json").read_text())
    looping = json.dumps({**tokenizer, "chat_template": LOOPS})
    (model / "tokenizer_config.json").write_text(looping)
    changes: dict[str, dict[str, Any]] = {
        f"chat_template = {path}": {"chat_template": str(path)}
        for path in (secret, pipe, sparse, tmp_path, "/dev/urandom", "/proc/self/mem", "\0", "")
    }
    changes["a model whose template loops"] = {"model": str(model), "system_prompt": "x"}
    changes |= {f"track = {name}": {"track": name} for name in ("wandb", "trackio")}
    data = json.loads((folder / "run" / "config.json").read_text())
    run = copied(folder, tmp_path / "run")
    exported = tmp_path / "exported"
    results = {}
    for name, change in changes.items():
        contents = {**data, "config": {**data["config"], **change}}
        (run / "config.json").write_text(json.dumps(contents))
        for command in (*COMMANDS, ["export"]):
            words = [*command, str(run), *([str(exported)] if command == ["export"] else [])]
            result = limited(words)
            if exported.exists():
                texts = [file.read_bytes() for file in exported.rglob("*") if file.is_file()]
                result = "it was exported" if any(b"the secret" in text for text in texts) else ""
                shutil.rmtree(exported)
            results[f"{name}, {command[0]}"] = result or ("opened a service" if opened else "")
            opened.clear()
    files = {
        "a template that loops": LOOPS.encode(),
        "a template of bytes": bytes(range(256)),
        "a template that is no template": b"{% for %}",
        "no template": None,
    }
    chatting = json.dumps({**data, "config": {**data["config"], "chat_template": "t.jinja"}})
    (run / "config.json").write_text(chatting)
    for name, text in files.items():
        if text is not None:
            (run / "chat_template.jinja").write_bytes(text)
        for command in (*COMMANDS, ["export"]):
            words = [*command, str(run), *([str(exported)] if command == ["export"] else [])]
            results[f"{name}, {command[0]}"] = limited(words)
        (run / "chat_template.jinja").unlink(missing_ok=True)
    (run / "config.json").write_text(json.dumps(data))
    for identity in ("a/b", "../x", "", " ", "x" * 999, "\x1b[2J", 5, None, ["a"], {"a": 1}, True):
        (run / "track.json").write_text(json.dumps({"id": identity}))
        words = [*COMMANDS[0], str(run), "--track", "wandb"]
        results[f"id {identity!r:.12}"] = limited(words)
    assert_all_handled(results, least=70)
    (run / "track.json").unlink()
    opened.clear()
    assert outcome([*COMMANDS[0], str(run), "--track", "wandb"]) == ""
    assert len(opened) == 1
    assert resume_command(TrainConfig(track="wandb")).endswith(" --track wandb")


# ---------------------------------------------------------------- data, rewards, exports


def test_texts_with_half_a_character(folder: Path, tmp_path: Path) -> None:
    """JSON may hold half of a surrogate pair, and so may a word of a command line; no tokenizer
    reads it.
    """
    (tmp_path / "chat.jinja").write_text(
        "{% for m in messages %}{{ m.role + m.content }}{% endfor %}"
    )
    chatting = ("--chat-template", str(tmp_path / "chat.jinja"))
    half, tiny = "x\ud800", ("--model", "tiny")

    def rows(**change: Any) -> list[dict[str, Any]]:
        good = [{"prompt": f"{n}=", "answer": str(n)} for n in range(20)]
        if "messages" in change:
            del good[3]["prompt"]
        return [*good[:3], good[3] | change, *good[4:]]

    def said(**message: str) -> dict[str, Any]:
        return {"messages": [{"role": "user", "content": "x", **message}]}

    cases: dict[str, tuple[Any, ...]] = {
        "a prompt": (rows(prompt=half),),
        "a prompt of tiny": (rows(prompt=half), *tiny),
        "a prompt that is skipped": (rows(prompt=half), *tiny, "--unusable", "skip"),
        "an answer": (rows(answer=half),),
        "an answer of tiny": (rows(answer=half), *tiny),
        "an answer of the warm-up": (rows(answer=half), "--warmup-steps", "1"),
        "something else": (rows(other=half), *tiny),
        "another key": (rows(**{half: 1}), *tiny),
        "a split": (rows(split=half),),
        "a message": (rows(**said(content=half)), *chatting),
        "a role": (rows(**said(role=half)), *chatting),
        "a system prompt": (rows(), "--system-prompt", half, *chatting),
        "a stop text": (rows(), "--stop", half),
        "a chat template": (rows(), "--chat-template", half),
    }
    few = "--steps 1 --prompts 1 --group-size 2 --minibatches 1 --eval-prompts 1 --max-new-tokens 2"
    common = [*few.split(), "--reward", "exact", "--model", str(folder / "model")]
    results = {}
    for i, (name, (lines, *words)) in enumerate(cases.items()):
        task = tmp_path / f"{i}.jsonl"
        task.write_text("".join(json.dumps(line) + "\n" for line in lines))
        out = ["--out", str(tmp_path / f"run{i}"), "--task", str(task)]
        results[name] = outcome(["train", *out, *common, *words])
    assert_all_handled(results, least=14)


@contextlib.contextmanager
def lowered(limit: int, value: int) -> Iterator[None]:
    """`ulimit`, for a while."""
    soft, hard = resource.getrlimit(limit)
    resource.setrlimit(limit, (value, hard))
    try:
        yield
    finally:
        resource.setrlimit(limit, (soft, hard))


def test_exports_that_fail_leave_nothing(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("kept")
    Path("dangling").symlink_to("nowhere")
    before = sorted(os.listdir())
    results = {}

    def exported(name: str, target: str = "exported", limit: Any = None) -> None:
        with lowered(*limit) if limit else contextlib.nullcontext():
            result = outcome(["export", str(folder / "run"), target])
        if not result and target in ("exported", "x" * 255):  # it may have had all it needs
            shutil.rmtree(target, ignore_errors=True)
        left = sorted({*os.listdir()} - {*before})
        results[name] = result or (f"left {left}" if left else "")

    names = (
        "x\0y",
        "\udcff",
        "x" * 300,
        "..",
        "/",
        "",
        "file",
        "file/x",
        "dangling",
        "/dev/null/x",
    )
    for name in (*names, "x" * 255, "/proc/nowhere/x"):
        exported(f"name {name!r:.20}", name)
    for size in (0, 1, 300, 1000, 4000):
        exported(f"ulimit -f {size}", limit=(resource.RLIMIT_FSIZE, size))
    lowest = os.dup(0)
    os.close(lowest)
    for more in range(4):
        limit = (resource.RLIMIT_NOFILE, lowest + more)
        exported(f"{more} files", limit=limit)
        with lowered(*limit):
            result = outcome([*COMMANDS[0], str(folder / "run")])
        results[f"{more} files, train"] = result

    def full(*_: Any, **options: Any) -> None:
        raise Exception("File too large (os error 27)")  # as tokenizers raise it

    with monkeypatch.context() as patch:
        patch.setattr("transformers.PreTrainedTokenizerBase.save_pretrained", full)
        exported("a tokenizer that cannot be written")
    assert_all_handled(results, least=20)
    assert outcome(["export", str(folder / "run"), "exported"]) == ""
    assert Path("exported/model.safetensors").is_file()


class Stub:
    """A model, or a tokenizer, of one file."""

    def save_pretrained(self, folder: Path) -> None:
        (Path(folder) / "weights").write_text("x")

    def modules(self) -> list[Any]:
        return []


def test_the_next_export_removes_the_files_of_a_killed_one(tmp_path: Path) -> None:
    target = tmp_path / "exported"
    child = os.fork()
    if child == 0:
        os.rename = lambda *names: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment]
        save_policy(Stub(), Stub(), target)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    (left,) = tmp_path.iterdir()
    assert (left / "weights").exists()
    living = left.with_name(left.name.replace(str(child), str(os.getppid())))
    shutil.copytree(left, living)
    save_policy(Stub(), Stub(), target)
    assert sorted(tmp_path.iterdir()) == sorted([living, target])
