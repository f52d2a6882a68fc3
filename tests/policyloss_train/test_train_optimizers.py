"""AdamW with moments of 8 bits: torchao's steps, a state of plain tensors, and runs that resume."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from train_loop_ranks import lines, resume, train

from policyloss.errors import InputError
from policyloss_train.config import TrainConfig
from policyloss_train.optimizers import (
    MasterAdamW,
    adamw,
    load_optimizer_state,
    optimizer_state,
    torchao,
)

try:
    torchao()
    MISSING = False
except InputError:
    MISSING = True
needs_torchao = pytest.mark.skipif(MISSING, reason="needs the package torchao")
OPTIONS: dict[str, Any] = {"lr": 0.01, "betas": (0.8, 0.9), "weight_decay": 0.1}


def eight_bits(weight: nn.Parameter, **options: Any) -> torch.optim.Optimizer:
    return MasterAdamW([weight], torchao()[0], **{**OPTIONS, **options})


def fresh(dtype: torch.dtype = torch.float32) -> tuple[nn.Linear, torch.optim.Optimizer]:
    """A weight of 64 blocks, and a bias that is too small for one."""
    torch.manual_seed(0)
    module = nn.Linear(64, 256).to(dtype)
    config = TrainConfig(optimizer="adamw8bit", betas=(0.8, 0.9), weight_decay=0.1)
    return module, adamw(module, 0.01, config)


def stepped(module: nn.Linear, optimizer: Any, first: int, last: int) -> None:
    for i in range(first, last):
        torch.manual_seed(i)
        for weight in module.parameters():
            weight.grad = torch.randn_like(weight)
        optimizer.step()


@needs_torchao
def test_its_steps_are_torchaos() -> None:
    module, optimizer = fresh()
    twin, _ = fresh()
    theirs = torchao()[0](twin.parameters(), **OPTIONS)
    with torch.compiler.set_stance("force_eager"):
        stepped(twin, theirs, 0, 5)
    start = module.weight.detach().clone()
    stepped(module, optimizer, 0, 5)
    assert torch.equal(module.weight, twin.weight)
    assert torch.equal(module.bias, twin.bias)
    # And they are those of AdamW, but for the rounding of moments to 8 bits.
    plain, _ = fresh()
    stepped(plain, torch.optim.AdamW(plain.parameters(), **OPTIONS), 0, 5)
    moved, expected = module.weight - start, plain.weight - start
    assert 0 < (moved - expected).norm() < 0.05 * expected.norm()


@needs_torchao
def test_the_stored_state_has_8_bits_and_is_made_of_plain_tensors() -> None:
    """64·256 codes of one byte and 64 scales of four, for either moment; the bias keeps 256 numbers
    of four bytes.
    """
    module, optimizer = fresh()
    stepped(module, optimizer, 0, 1)

    def size(weight: str) -> int:
        tensors = optimizer_state(module, optimizer).items()
        state = [x for name, x in tensors if name.startswith(weight) and x.dim()]
        assert {type(x) for x in state} == {Tensor}
        return sum(x.numel() * x.element_size() for x in state)

    assert size("weight") == 2 * (64 * 256 + 64 * 4)
    assert size("bias") == 2 * 256 * 4


@needs_torchao
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_it_goes_on_bit_for_bit(dtype: torch.dtype) -> None:
    module, optimizer = fresh(dtype)
    stepped(module, optimizer, 0, 3)
    tensors = optimizer_state(module, optimizer)
    twin, other = fresh(dtype)
    twin.load_state_dict(module.state_dict())
    stored = {name: x.clone() for name, x in tensors.items()}
    load_optimizer_state(twin, other, stored)
    stepped(module, optimizer, 3, 6)
    stepped(twin, other, 3, 6)
    for ours, theirs in zip(module.parameters(), twin.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    pairs = [optimizer_state(module, optimizer), optimizer_state(twin, other)]
    assert pairs[0].keys() == pairs[1].keys()
    assert all(torch.equal(x, pairs[1][key]) for key, x in pairs[0].items())
    assert ("weight/master" in pairs[0]) == (dtype == torch.bfloat16)


@needs_torchao
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_compiled_step_on_a_gpu_is_that_of_the_cpu_and_goes_on_bit_for_bit() -> None:
    gradients = [torch.randn(256, 64, generator=torch.Generator().manual_seed(i)) for i in range(6)]
    weights = [nn.Parameter(torch.ones(256, 64, device=device)) for device in ("cpu", "cuda")]
    optimizers = [eight_bits(weight) for weight in weights]
    for gradient in gradients:
        for weight, optimizer in zip(weights, optimizers, strict=True):
            weight.grad = gradient.to(weight.device)
            optimizer.step()
    torch.testing.assert_close(weights[1].detach().cpu(), weights[0].detach(), rtol=0, atol=2e-3)
    module, again = nn.Linear(64, 256, bias=False, device="cuda"), nn.Linear(64, 256, bias=False)
    again.cuda().load_state_dict(module.state_dict())
    first, second = (eight_bits(m.weight) for m in (module, again))
    for gradient in gradients[:3]:
        module.weight.grad = gradient.cuda()
        first.step()
    again.load_state_dict(module.state_dict())
    load_optimizer_state(again, second, optimizer_state(module, first))
    for gradient in gradients[3:]:
        for m, optimizer in ((module, first), (again, second)):
            m.weight.grad = gradient.cuda()
            optimizer.step()
    assert torch.equal(module.weight, again.weight)


@needs_torchao
def test_small_steps_add_up_in_bfloat16() -> None:
    """As those of `MasterAdamW`: a hundred steps of 1e-4 are one of 0.01."""
    weight = nn.Parameter(torch.ones(16, 256, dtype=torch.bfloat16))
    optimizer = eight_bits(weight, lr=1e-4, betas=(0.9, 0.99), weight_decay=0.0)
    for _ in range(100):
        weight.grad = torch.ones_like(weight)
        optimizer.step()
    assert set((1 - weight.detach().float()).flatten().tolist()) == {0.01171875}


@needs_torchao
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("weight/exp_avg_scale", torch.ones(63)),
        ("weight/exp_avg_scale", torch.ones(64, dtype=torch.int32)),
        ("weight/exp_avg", torch.zeros(64, 256, dtype=torch.uint8)),
        ("weight/exp_avg", torch.zeros(256, 64, dtype=torch.int64)),
    ],
)
def test_a_state_that_does_not_fit_is_refused(name: str, value: Tensor) -> None:
    module, optimizer = fresh()
    stepped(module, optimizer, 0, 1)
    tensors = optimizer_state(module, optimizer)
    with pytest.raises(InputError, match="in the checkpoint is"):
        load_optimizer_state(module, optimizer, {**tensors, name: value})


@needs_torchao
@pytest.mark.slow
def test_a_run_with_it_resumes_to_the_byte(model: str, tmp_path: Path) -> None:
    options = {"model": model, "optimizer": "adamw8bit"}
    assert train(tmp_path / "whole", **options, steps=4) == 0
    assert train(tmp_path / "cut", **options, steps=2) == 0
    assert resume(tmp_path / "cut", extend=4) == 0
    files = [tmp_path / run / "metrics.jsonl" for run in ("whole", "cut")]
    assert files[0].read_bytes() == files[1].read_bytes()
    last = [
        tmp_path / run / "checkpoints" / "step_000004" / "rank00000.safetensors"
        for run in ("whole", "cut")
    ]
    assert last[0].read_bytes() == last[1].read_bytes()
    codes = load_file(last[0])
    name = "policy_optimizer/model.model.layers.0.mlp.up_proj.weight/exp_avg"
    assert codes[name].dtype == torch.uint8


@needs_torchao
@pytest.mark.slow
def test_it_learns(tmp_path: Path) -> None:
    options = {"reward": None, "warmup_steps": None, "prompts": 16, "group_size": 8}
    options |= {"steps": 30, "eval_every": 30, "eval_prompts": 128, "rollouts_every": 0}
    assert train(tmp_path / "run", **options, optimizer="adamw8bit") == 0
    accuracy = [row["eval/accuracy"] for row in lines(tmp_path / "run") if "eval/accuracy" in row]
    assert accuracy[-1] > accuracy[0] + 0.2


@pytest.mark.parametrize(
    ("options", "says"),
    [({"parallel": "fsdp"}, "use ddp, or adamw"), ({"dtype": "float64"}, "computes in float32")],
)
def test_unsupported_settings_are_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(InputError, match=says):
        TrainConfig(optimizer="adamw8bit", **options)


def test_a_package_that_is_missing_is_named_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "torchao.optim", None)
    assert train(tmp_path / "run", optimizer="adamw8bit") == 2
    assert "pip install 'policyloss-train[optimizers]'" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
