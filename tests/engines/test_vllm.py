"""Runs with a real vLLM, in the trainer's process and as a server, on a CPU: `make engines`.

They learn the built-in task, record the weights that sampled each completion, and survive kill −9
of the trainer and of the server.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.engines
PATIENCE_S = 900.0  # for a start of vLLM, or a run of some steps, on a machine that does more
# The task and the model of `policyloss train`, with fewer prompts and larger steps.
OPTIONS = {
    "steps": 8,
    "lr": 1e-3,
    "max_new_tokens": 16,
    "eval_prompts": 128,
    "checkpoint_every": 1,
    "rollouts_every": 1,
    "rollouts_rows": 64,
}


def lines(out: Path, name: str = "metrics") -> list[dict[str, Any]]:
    file = out / f"{name}.jsonl"
    text = file.read_text() if file.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


class Process:
    """A process and all its children, which `kill` ends by SIGKILL; its output is in a file."""

    def __init__(self, words: list[str], log: Path, **variables: str) -> None:
        self.log = log
        environment = {
            **os.environ,
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "OMP_NUM_THREADS": "1",  # threads that wait for each other crawl on a busy machine
            **variables,
        }
        with log.open("ab") as file:
            self.process = subprocess.Popen(
                [sys.executable, *words],
                stdout=file,
                stderr=file,
                env=environment,
                start_new_session=True,
            )

    def kill(self) -> None:
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def ended(self) -> int:
        """Its exit code."""
        return self.process.wait(timeout=PATIENCE_S)

    def until(self, done: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not done():
            assert self.process.poll() is None, self.log.read_text()[-3000:]
            assert time.monotonic() < deadline, self.log.read_text()[-3000:]
            time.sleep(0.2)


TRAIN = ("-m", "policyloss", "train")
TRANSFER = Path(__file__).resolve().parents[1] / "workers/transfer_on_cpu.py"


def trainer(out: Path, command: Sequence[str] = TRAIN, **options: Any) -> Process:
    words = [*command, "--out", str(out)]
    for name, value in options.items():
        words += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
    return Process(words, out.with_suffix(".log"))


def assert_sampled_by_the_policy(out: Path) -> None:
    """Step s + 1 was sampled with the weights of s steps, and vLLM's log-probabilities are those of
    the learner before its first update, in float32.

    99 of 100 tokens are within 1e-5. The largest of thousands is what float32 leaves of this model:
    of 7,471 tokens, vLLM was at most 3.0e-5 and transformers 1.4e-5 from float64, 3.2e-7 on average
    both. One stale matrix is 1e-2.
    """
    rows = lines(out, "rollouts")
    assert {(row["step"], row["weights"]) for row in rows} == {(s + 1, s) for s in range(8)}
    gaps = sorted(
        abs(x - y)
        for row in rows
        for x, y in zip(row["rollout_logp"], row["old_logp"], strict=True)
    )
    assert len(gaps) > 1000
    assert gaps[len(gaps) * 99 // 100] <= 1e-5
    assert gaps[-1] <= 2e-4


def assert_learned(out: Path) -> None:
    rows = lines(out)
    assert [row["step"] for row in rows] == list(range(9))
    assert rows[-1]["eval/accuracy"] > rows[0]["eval/accuracy"] + 0.1
    assert all(row["skipped"] == 0 for row in rows[1:])


def test_in_the_process_of_a_trainer_that_is_killed(tmp_path: Path) -> None:
    out = tmp_path / "run"
    first = trainer(out, model="tiny32", rollout="vllm", **OPTIONS)
    first.until(lambda: len(lines(out)) >= 4)
    first.kill()
    assert trainer(out, resume=True).ended() == 0
    assert_learned(out)
    assert_sampled_by_the_policy(out)
    assert not list((out / "rollout_weights").glob("*"))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The policy of a run of one step, as a folder that a server can serve."""
    code = """if True:
        import sys, torch
        from policyloss_train.models import load_model
        from policyloss_train.tasks import make_task
        from policyloss_train.setup import WARMUP_STEPS, warm_up
        task = make_task("sort", reward=None, seed=0)
        model, tokenizer = load_model("tiny32", task, dtype=torch.float32, device="cpu", seed=0)
        warm_up(model, tokenizer, task, steps=WARMUP_STEPS, seed=0)
        model.save_pretrained(sys.argv[1])
        tokenizer.save_pretrained(sys.argv[1])
    """
    folder = tmp_path_factory.mktemp("served") / "model"
    assert Process(["-c", code, str(folder)], folder.with_suffix(".log")).ended() == 0
    return folder


class Server:
    """It offers to take weights over NCCL, which it cannot on a CPU, except with `options`."""

    def __init__(self, model: Path, *options: str) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.model, self.address = model, f"http://127.0.0.1:{self.port}"
        self.options, self.log = options, model.with_suffix(f".{self.port}.log")

    def start(self) -> None:
        words = ["-m", "vllm.entrypoints.openai.api_server", "--model", str(self.model)]
        words += ["--host", "127.0.0.1", "--port", str(self.port), "--dtype", "float32"]
        words += ["--max-model-len", "256", "--enforce-eager", "--enable-scale-out"]
        words += ["--logprobs-mode", "processed_logprobs", "--max-logprobs", "200"]
        words += ["--weight-transfer-config", '{"backend": "nccl"}', *self.options]
        path = os.pathsep.join([str(TRANSFER.parent), os.environ.get("PYTHONPATH", "")])
        self.process = Process(words, self.log, VLLM_SERVER_DEV_MODE="1", PYTHONPATH=path)

    def wait(self) -> None:
        def answers() -> bool:
            with socket.socket() as asked:
                return asked.connect_ex(("127.0.0.1", self.port)) == 0

        self.process.until(answers)

    def weights(self) -> tuple[str, str]:
        """The start of a trainer that gave it weights, and the steps that these had learned."""
        with urllib.request.urlopen(f"{self.address}/weight_info") as answer:
            name = str(json.loads(answer.read())["weight_version"])
        run, _, steps = name.rpartition("-")
        return run, steps

    def answered(self, path: str, status: int = 200) -> int:
        """How often it answered a request with this status."""
        return self.log.read_text().count(f'"POST {path} HTTP/1.1" {status}')


@pytest.fixture
def server(model: Path) -> Iterator[Server]:
    one = Server(model)
    one.start()
    one.wait()
    yield one
    one.process.kill()


def test_a_server_that_is_killed(server: Server, tmp_path: Path) -> None:
    """First for longer than the trainer has patience: it stops, names the server, and resumes. Then
    for less: it waits, gives the weights to the server that came back, and goes on. The server
    samples with top-p, and reports the tokens it kept.
    """
    out = tmp_path / "run"
    options = {"model": server.model, "rollout": server.address, "top_p": 0.9, **OPTIONS}
    first = trainer(out, **options, rollout_timeout=10)
    first.until(lambda: len(lines(out)) >= 3)
    server.process.kill()
    assert first.ended() == 2
    printed = first.log.read_text()
    assert "no completions have come for 10 s (--rollout-timeout)" in printed
    assert f"the server {server.address} did not answer" in printed
    assert f"--resume --out {out} --rollout {server.address}" in printed

    server.start()
    server.wait()
    assert server.weights()[0] == ""  # the weights that it was started with
    done = len(lines(out))
    again = trainer(out, resume=True, rollout=server.address, rollout_timeout=300)
    again.until(lambda: len(lines(out)) >= done + 2)
    server.process.kill()
    server.start()
    assert again.ended() == 0
    assert server.weights()[1] == "8"  # after its second restart
    assert_learned(out)
    assert_sampled_by_the_policy(out)


def test_a_server_samples_while_the_policy_learns_and_the_trainer_is_killed(
    server: Server, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    options = {"model": server.model, "rollout": server.address, **OPTIONS, "staleness": 1}
    first = trainer(out, **options)
    first.until(lambda: len(lines(out)) >= 4)
    first.kill()
    run, _ = server.weights()
    assert trainer(out, resume=True, rollout=server.address).ended() == 0
    assert server.weights()[0] not in ("", run)  # a killed server may have left any weights
    assert server.weights()[1] == "8"
    assert_learned(out)
    rows = lines(out, "rollouts")
    wanted = {(1, 0), *((s + 1, s - 1) for s in range(1, 8))}
    assert {(row["step"], row["weights"]) for row in rows} == wanted


def test_weights_by_the_transfer_engine_of_vllm(model: Path, tmp_path: Path) -> None:
    """vLLM's engine at both ends, with a TCP store in the place of NCCL, which has no CPU."""
    server, out = (
        Server(model, "--worker-extension-cls", "transfer_on_cpu.Extension"),
        tmp_path / "run",
    )
    server.start()
    server.wait()
    try:
        options = {"model": model, "rollout": server.address, **OPTIONS}
        assert trainer(out, [str(TRANSFER)], **options).ended() == 0
        assert server.weights()[1] == "8"
        assert server.answered("/init_weight_transfer_engine") == 1
        assert server.answered("/update_weights") == 9
        assert server.answered("/collective_rpc") == 0  # which reads a folder
    finally:
        server.process.kill()
    assert_learned(out)
    assert_sampled_by_the_policy(out)


def test_a_server_that_cannot_use_nccl_reads_a_folder(server: Server, tmp_path: Path) -> None:
    """First the server refuses, as the CPU build of vLLM does; then the trainer is on a CPU."""
    options = {"model": server.model, "rollout": server.address, **OPTIONS, "steps": 1}
    for command, why in (
        ([str(TRANSFER)], "Cannot access accelerator device when none is available"),
        (TRAIN, "NCCL needs the policy on a GPU"),
    ):
        run = trainer(tmp_path / why, command, **options)
        assert run.ended() == 0
        printed = run.log.read_text()
        assert printed.count("the servers read weights from") == 1
        assert why in printed
    assert server.answered("/init_weight_transfer_engine", 500) == 1
    assert server.answered("/collective_rpc") == 4
