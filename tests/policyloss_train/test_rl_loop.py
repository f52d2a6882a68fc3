"""The algorithm in one file: its first step against a formula written out here,
and (slow) that it learns.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

import policyloss as pl

FILE = Path(__file__).resolve().parents[2] / "examples/rl_loop.py"


@pytest.fixture(scope="module")
def loop() -> ModuleType:
    spec = importlib.util.spec_from_file_location("rl_loop", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["rl_loop"] = module  # its dataclasses look themselves up there
    spec.loader.exec_module(module)
    return module


def test_rewards_by_hand(loop: ModuleType) -> None:
    end = loop.END
    prompts = torch.tensor([[3, 1, 4, 1, loop.EQUALS]] * 4)
    completions = torch.tensor(
        [[1, 1, 3, 4, end], [1, 1, 3, end, end], [4, 1, 3, 1, end], [end] * 5]
    )
    # right are: all five; three (END came too early, so the last place was not written);
    # the second and third and END; none
    assert loop.reward(prompts, completions).tolist() == pytest.approx([1.0, 3 / 5, 3 / 5, 0.0])
    assert loop.written(completions).sum(dim=1).tolist() == [5, 4, 5, 1]


def test_held_out_prompts_are_not_trained_on(loop: ModuleType) -> None:
    train, held_out = ({tuple(row) for row in part.tolist()} for part in loop.make_prompts())
    assert (len(train), len(held_out), len(train & held_out)) == (9_500, 500, 0)


def test_the_first_step_is_the_plain_policy_gradient(loop: ModuleType) -> None:
    """The ratio of a policy to itself is exactly 1, where no clip holds:
    loss = −Σ A / n, gradient that of −Σ A·logp / n.
    """
    torch.manual_seed(1)
    policy = loop.Policy()
    batch = loop.collect(policy, loop.make_prompts()[0], loop.Settings(prompts=4, samples=6))
    assert not batch.old_logp.requires_grad
    sampled = batch.completions.masked_fill(~batch.mask, loop.END)
    assert torch.equal(sampled, batch.completions)  # after END there is only END
    groups = batch.rewards.view(4, 6)
    centred = (groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-6)
    torch.testing.assert_close(batch.advantages, centred.flatten(), atol=1e-5, rtol=1e-5)

    n = batch.mask.sum()
    weights = batch.advantages[:, None] * batch.mask
    logp = loop.logp_of(policy, batch.prompts, batch.completions)
    expected = torch.autograd.grad(-(weights * logp).sum() / n, list(policy.parameters()))

    parameters = list(policy.parameters())
    before = [p.detach().clone() for p in parameters]
    # Gradients are clipped to norm 1.
    scale = min(1.0, 1.0 / (torch.stack([g.norm() for g in expected]).norm().item() + 1e-6))
    metrics = loop.update(policy, torch.optim.SGD(parameters, lr=1.0), pl.preset("dapo"), batch)
    assert metrics["ratio_mean"] == metrics["ratio_max"] == metrics["ratio_min"] == 1.0
    assert metrics["clip_fraction"] == 0.0
    assert metrics["tokens"] == n
    assert metrics["loss"] == pytest.approx((-weights.sum() / n).item(), abs=1e-6)
    for p, old, gradient in zip(parameters, before, expected, strict=True):
        torch.testing.assert_close(p.detach(), old - scale * gradient, atol=1e-6, rtol=1e-4)


def test_a_short_run_prints_its_progress(loop: ModuleType) -> None:
    """Two runs of one seed are the same run; the second update of a step
    has left the policy that sampled.
    """
    said: list[str] = []
    settings = loop.Settings(steps=2, prompts=2, samples=4, lr=1e-2)
    first, before, _ = loop.train(settings, said.append)
    second, _, _ = loop.train(settings, lambda line: None)
    assert all(
        torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True)
    )
    assert said[0].startswith(f"before: held-out accuracy {before:.3f}, 102,284 weights, loss dapo")
    (progress,) = [line for line in said if line.startswith("step    2")]
    assert float(progress.split("ratio_max ")[1].split()[0]) > 1.0
    shown = loop.show(first, torch.tensor([[3, 1, 4, 1, loop.EQUALS]]))
    assert shown.startswith("3141=")
    assert len(shown) == 10


def test_it_fits_on_a_few_screens_and_uses_no_trainer() -> None:
    text = FILE.read_text()
    assert len(text.splitlines()) <= 300
    imports = [
        line.split()[1].partition(".")[0]
        for line in text.splitlines()
        if line.startswith(("import ", "from "))
    ]
    assert set(imports) <= {
        "__future__",
        "argparse",
        "time",
        "collections",
        "dataclasses",
        "random",
        "torch",
        "policyloss",
    }
    assert "policyloss_train" not in text


@pytest.mark.slow
def test_it_learns_to_sort(loop: ModuleType) -> None:
    _, before, after = loop.train(loop.Settings(), print)
    assert before < 0.05
    assert after >= 0.9
