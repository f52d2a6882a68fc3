"""`--engine tinker:URL`, with a server in this process in the place of the package `tinker`."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import fake_tinker
import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook
from train_loop_ranks import resume, train

import policyloss as pl
from policyloss_train.arguments import read_arguments
from policyloss_train.batches import Pack
from policyloss_train.command import eval_command
from policyloss_train.config import TrainConfig
from policyloss_train.distributed import Ranks
from policyloss_train.learner import Learned
from policyloss_train.models import load_model
from policyloss_train.sampler import Sample
from policyloss_train.setup import build
from policyloss_train.tasks import make_task
from policyloss_train.tinker.learner import ServerLearner, ServerSampler
from policyloss_train.tinker.service import LostServerError, Service

URL = "tinker:http://127.0.0.1:1"
HERE = Ranks(0, 1, torch.device("cpu"))


@pytest.fixture
def server(model: str, monkeypatch: pytest.MonkeyPatch) -> fake_tinker.Server:
    task = make_task("sort", reward=None, seed=0)
    loaded, _ = load_model(model, task, dtype=torch.float32, device="cpu", seed=0)
    served = fake_tinker.Server(loaded, model)
    monkeypatch.setitem(sys.modules, "tinker", served.module())
    return served


def config(model: str, **options: Any) -> TrainConfig:
    fixed: dict[str, Any] = {"engine": URL, "model": model, "max_new_tokens": 8, "lr": 1e-3}
    return TrainConfig(**{**fixed, **options})


def lines(out: Path, name: str = "metrics") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / f"{name}.jsonl").read_text().splitlines()]


def some_samples() -> list[Sample]:
    generator = torch.Generator().manual_seed(0)

    def draw(count: int) -> torch.Tensor:
        return torch.randint(0, 20, (count,), generator=generator)

    return [
        Sample(
            0,
            i // 2,
            draw(3 + i),
            draw(2 + 2 * i),
            -torch.rand(2 + 2 * i, generator=generator),
            True,
            "",
            i % 2,
        )
        for i in range(4)
    ]


def learned(config: TrainConfig, spec: pl.LossSpec) -> tuple[Learned, Any]:
    """The result of one step of two updates, and the policy."""
    setup = build(config, spec, HERE, say=lambda text: None, warn=lambda text: None)
    setup.learner.start_copies()
    pack = Pack.of(some_samples())
    return setup.learner.learn(pack, range(4), 4, 0), setup.learner.policy


def weights_of(optimizer: torch.optim.Optimizer) -> list[Any]:
    """The parameters that the next step changes."""
    return [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]


@pytest.mark.parametrize("reduction", ["sum", "mean"])
@pytest.mark.parametrize("loss", ["dapo", "grpo", "gspo", "tis", "clip_cov"])
def test_a_server_learns_as_the_learner_does(
    server: fake_tinker.Server, model: str, loss: str, reduction: str
) -> None:
    server.reduction = reduction
    options = config(model, loss=loss, advantage="grpo")
    spec = pl.preset(loss)
    local = dataclasses.replace(options, engine="built-in")
    gradients: list[list[torch.Tensor]] = []
    handle = register_optimizer_step_pre_hook(
        lambda optimizer, *_: gradients.append([p.grad.clone() for p in weights_of(optimizer)])
    )
    (here, policy), (there, remote) = learned(local, spec), learned(options, spec)
    handle.remove()
    trained = here.pack.tokens["mask"]
    torch.testing.assert_close(there.logp[trained], here.logp[trained], atol=1e-5, rtol=0)
    torch.testing.assert_close(there.pack.tokens["advantages"], here.pack.tokens["advantages"])
    assert there.grad_norm == pytest.approx(here.grad_norm, rel=1e-4)
    for name in ("loss", "tokens", "clip_fraction"):
        assert there.metrics[name] == pytest.approx(here.metrics[name], abs=1e-5)
    for update, share in ((0, 1e-5), (1, 1e-3)):  # the second one starts from other roundings
        for x, y in zip(gradients[update - 2], gradients[update], strict=True):
            torch.testing.assert_close(x, y, atol=share * float(y.abs().max()), rtol=0)
    weights = (remote.model.parameters(), policy.model.parameters())
    for x, y, gradient in zip(*weights, gradients[0], strict=True):
        # AdamW's first step has the sign of the gradient, which rounding decides near 0.
        settled = gradient.abs() > 1e-3 * gradient.abs().max()
        torch.testing.assert_close(x[settled], y[settled], atol=2e-5, rtol=0)


def test_an_update_that_is_not_finite_is_not_sent(server: fake_tinker.Server, model: str) -> None:
    spec = pl.preset("dapo")
    setup = build(config(model, minibatches=1), spec, HERE, print, print)
    learner: Any = setup.learner
    learner.start_copies()
    samples = [dataclasses.replace(s, reward=float("nan")) for s in some_samples()]
    server.requests.clear()
    assert learner.learn(Pack.of(samples), range(4), 4, 0).skipped == 1
    assert set(server.requests) == {"forward"}


def test_a_server_with_wrong_gradients_is_refused(
    server: fake_tinker.Server, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.nn.utils, "get_total_norm", lambda grads: torch.tensor(1.0))
    with pytest.raises(pl.InputError, match="not proportional"):
        Service(config(model)).measure()


def test_a_server_whose_gradients_cannot_be_checked_is_named(
    server: fake_tinker.Server, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.nn.utils, "get_total_norm", lambda grads: torch.tensor(torch.nan))
    said: list[str] = []
    options = config(model, grad_clip=0.0)
    ServerLearner.connect(options, pl.preset("dapo"), HERE, print, said.append)
    assert len(said) == 1
    assert "were not checked" in said[0]


def test_a_server_that_does_not_clip(server: fake_tinker.Server, model: str) -> None:
    server.clips = False
    with pytest.raises(pl.InputError, match=r"--grad-clip 1; add --grad-clip 0"):
        Service(config(model)).measure()
    Service(config(model, grad_clip=0.0)).measure()


def test_a_server_with_another_model(server: fake_tinker.Server, model: str) -> None:
    server.name = "Qwen/Qwen3-8B"
    with pytest.raises(pl.InputError, match=r"serves Qwen/Qwen3-8B, not --model"):
        Service(config(model))


def test_a_server_that_is_slow_or_down(server: fake_tinker.Server, model: str) -> None:
    service = Service(config(model, rollout_timeout=0.2))
    server.slow = 1.0
    with pytest.raises(LostServerError, match=r"did not answer create_.* in 0.2 s \(--rollout-t"):
        service.create()
    server.slow, server.down = 0.0, True
    with pytest.raises(LostServerError, match=r"failed at create_.*: ConnectionError: nobody"):
        service.create()


def run(model: str, out: Path, **options: Any) -> int:
    return train(
        out, **{"engine": URL, "model": model, "steps": 4, "warmup_steps": None, **options}
    )


def test_a_run_and_its_resumption(
    server: fake_tinker.Server, model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, whole = tmp_path / "run", tmp_path / "whole"
    assert run(model, whole) == 0
    assert run(model, out, steps=2) == 0
    assert len(server.checkpoints) == 5  # three of one run and two of the other
    assert resume(out, extend=4) != 0
    assert f"name it yourself: --engine {URL}" in capsys.readouterr().err
    assert resume(out, extend=4, engine=URL) == 0
    assert [row["step"] for row in lines(out)] == list(range(5))
    assert any(row["grad_norm"] > 0 for row in lines(out)[1:])
    assert lines(out) == lines(whole)
    assert "entropy" not in lines(out, "rollouts")[0]
    with pytest.raises(pl.InputError, match="are on the server"):
        eval_command([str(out), "--reward", "exact"])


@pytest.mark.parametrize(
    ("kind", "method", "call"),
    [  # both after the checkpoint of 2
        pytest.param(ServerLearner, "learn", 3, marks=pytest.mark.slow),
        (ServerSampler, "generate", 4),
    ],
)
def test_a_server_that_is_killed_in_a_run(
    server: fake_tinker.Server,
    model: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: type,
    method: str,
    call: int,
) -> None:
    out, whole = tmp_path / "run", tmp_path / "whole"
    assert run(model, whole) == 0
    intact, calls = getattr(kind, method), iter(range(100))

    def killed(self: Any, *arguments: Any) -> Any:
        if next(calls) == call:
            server.kill()
        return intact(self, *arguments)

    monkeypatch.setattr(kind, method, killed)
    assert run(model, out) == 0
    assert next(calls) > call
    assert lines(out) == lines(whole)


def test_a_server_that_stays_down(
    server: fake_tinker.Server,
    model: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def down(self: Any, *arguments: Any) -> Learned:
        server.down = True
        raise LostServerError("the server is gone.")

    monkeypatch.setattr(ServerLearner, "learn", down)
    assert run(model, tmp_path / "run") != 0
    said = capsys.readouterr().err
    assert "stopped in step 1: the Tinker server" in said
    assert f"--engine {URL}" in said


def test_old_checkpoints_of_the_server_are_deleted(
    server: fake_tinker.Server, model: str, tmp_path: Path
) -> None:
    run(model, tmp_path / "run", checkpoint_every=1, keep=2)
    assert [path.rpartition("-")[2] for path in server.checkpoints] == ["4", "6", "8"]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ("--engine tinkr:http://a", "--engine must be built-in, or tinker:URL"),
        ("--model tiny", "--model tiny is made in this process"),
        ("--temperature 0.8", "--temperature 0.8: the server computes"),
        ("--top-p 0.9", "--top-p 0.9"),
        ("--top-k 5", "--top-k 5"),
        ("--rollout vllm", "--rollout vllm: the server that learns also samples"),
        ("--advantage gae", "--advantage gae: the server trains no critic"),
        ("--teacher DIR", "--teacher DIR: the server holds one model"),
        ("--warmup-steps 5", "--warmup-steps 5"),
        ("--lora-rank 8 --lora-alpha 2", "--lora-alpha 2"),
        ("--lora-rank 8 --lora-target q_proj", "--lora-target"),
        ("--optimizer adamw8bit", "--optimizer adamw8bit"),
        ("--dtype bfloat16", "--dtype bfloat16"),
        ("--micro-tokens 9", "--micro-tokens 9"),
        ("--compile", "--compile"),
        ("--loss.entropy-coef 0.1", "reads the entropy"),
        ("--loss gkd", "reads the divergence"),
        ("--loss kdrl", "it reads a teacher, and the server holds one model"),
        ("--loss opd", "it reads a teacher, and the server holds one model"),
    ],
)
def test_options_that_a_server_cannot_honour(arguments: str, reason: str) -> None:
    start = ["--engine", URL, "--model", "M", "--max-new-tokens", "8"]
    with pytest.raises(pl.InputError) as caught:
        read_arguments([*start, *arguments.split()])
    assert reason in str(caught.value)


def test_the_package_is_missing(
    tmp_path: Path,
    model: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(sys.modules, "tinker", None)
    assert run(model, tmp_path / "run") != 0
    assert "pip install 'policyloss-train[tinker]'" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
