"""Two nodes, as two torchrun agents on this machine: a sharded policy, servers that sample, a rank
that is killed, and a run that goes on as if nothing had happened.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from fake_server import FakeServer
from train_loop_ranks import SMALL, arguments, lines, train

pytestmark = pytest.mark.slow
PATIENCE_S = 120.0
OPTIONS = {**SMALL, "steps": 4, "prompts": 3, "checkpoint_every": 1, "eval_prompts": 4, "keep": 9}


def start_nodes(command: list[str], log: Path) -> list[subprocess.Popen[bytes]]:
    """An agent for each of two nodes, with one rank each; they meet at a free port."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2"]
    words += ["--nproc-per-node", "1", "--rdzv-backend", "c10d", "--rdzv-id", str(port)]
    words += ["--rdzv-endpoint", f"localhost:{port}", "-m", "policyloss", *command]
    workers = Path(__file__).parents[1] / "workers"
    path = os.pathsep.join([str(workers), *filter(None, [os.environ.get("PYTHONPATH")])])
    variables = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    with log.open("ab") as file:
        return [
            subprocess.Popen(words, stdout=file, stderr=file, env=variables, start_new_session=True)
            for _ in range(2)
        ]


def ranks_of(agent: subprocess.Popen[bytes]) -> list[int]:
    """The processes that an agent has started."""
    text = Path(f"/proc/{agent.pid}/task/{agent.pid}/children").read_text()
    return [int(word) for word in text.split()]


def test_a_rank_of_two_nodes_is_killed_and_the_run_resumes(model: str, tmp_path: Path) -> None:
    out, alone, log = tmp_path / "nodes", tmp_path / "alone", tmp_path / "log"
    with FakeServer(model) as server:
        options = {**OPTIONS, "model": model, "rollout": server.address}
        assert train(alone, **options) == 0
        agents = start_nodes(arguments(out, {**options, "parallel": "fsdp"}), log)
        try:
            deadline = time.monotonic() + PATIENCE_S
            while not (out / "checkpoints" / "step_000002").exists():
                assert time.monotonic() < deadline, log.read_text()[-3000:]
                assert all(agent.poll() is None for agent in agents), log.read_text()[-3000:]
                time.sleep(0.02)
            os.kill(ranks_of(agents[1])[0], signal.SIGKILL)
            assert all(agent.wait(timeout=PATIENCE_S) != 0 for agent in agents)
            assert len(lines(out)) < 6
            named = {"resume": True, "reward": SMALL["reward"], "rollout": server.address}
            agents = start_nodes(arguments(out, named), log)
            codes = [agent.wait(timeout=PATIENCE_S) for agent in agents]
            assert codes == [0, 0], log.read_text()[-3000:]
        finally:
            for agent in agents:
                if agent.poll() is None:
                    os.killpg(agent.pid, signal.SIGKILL)
    rows, wanted = lines(out), lines(alone)
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4]
    for row, other in zip(rows, wanted, strict=True):
        for name in ("reward/mean", "tokens", "grad_norm", "policy/loss", "eval/accuracy"):
            if name in other:
                assert row[name] == pytest.approx(other[name], rel=1e-4, abs=1e-7), (name, row)
    assert_the_head_is_sharded(out / "checkpoints" / "step_000004")


def assert_the_head_is_sharded(checkpoint: Path) -> None:
    """Each rank wrote its half of the embedding, which is the head as well, and of its moments."""
    tensors = json.loads((checkpoint / "checkpoint.json").read_text())["checkpoint"]["tensors"]
    heads = [
        entry
        for name, entry in tensors.items()
        if "embed_tokens.weight" in name and len(entry["shape"]) == 2
    ]
    assert len(heads) >= 3
    for head in heads:
        first, second = head["pieces"]
        assert (first["file"], second["file"]) == ("rank00000.safetensors", "rank00001.safetensors")
        assert first["rows"] + second["rows"] == head["shape"][0]
        assert abs(first["rows"] - second["rows"]) <= 1
