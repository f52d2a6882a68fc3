"""The heads in place of those of TRL, verl and OpenRLHF, on stand-ins for the frameworks: numbers,
gradients, calls that stay with the framework, and that everything can be undone.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib import import_module
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from hf_models import built, gradients, most_rows, own_logits, small_config, token_ids
from walk import walked

import policyloss as pl
from policyloss.compat import verl
from policyloss.compat.trl import head as trl_head

IDS = token_ids(2, 7)
LABELS = IDS.masked_fill(torch.arange(7) < 3, -100)


def llama(**changes: Any) -> Any:
    transformers = pytest.importorskip("transformers")
    return built(transformers.LlamaForCausalLM, small_config(transformers.LlamaConfig, **changes))


@pytest.fixture
def trl(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """As much of TRL as the seat touches: its function, and a trainer's module that imported it."""
    calls: list[tuple[Any, ...]] = []

    def theirs(*args: Any) -> None:
        calls.append(args)

    modules = {
        name: ModuleType(name)
        for name in ("trl", "trl.trainer", trl_head.UTILS, trl_head.DISTILLATION, "trl.rloo")
    }
    utils: Any = modules[trl_head.UTILS]
    utils.add_fused_lm_head, utils.FusedCausalLMOutput = theirs, SimpleNamespace
    modules["trl.rloo"].add_fused_lm_head = theirs  # type: ignore[attr-defined]
    modules[trl_head.DISTILLATION]._chunked_divergence_loss = lambda: None  # type: ignore[attr-defined]
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    yield SimpleNamespace(utils=utils, rloo=modules["trl.rloo"], theirs=theirs, calls=calls)
    trl_head.uninstall_head()


def test_trl_s_forward_scores_the_labels(trl: Any) -> None:
    model = llama()
    every = (own_logits(model, IDS) / 0.7).log_softmax(-1)
    mask = LABELS[:, 1:] != -100
    expected = every.gather(-1, IDS[:, 1:, None]).squeeze(-1).masked_fill(~mask, 0)
    (expected.sum() * 2).backward()
    theirs = gradients(model)
    trl_head.add_fused_lm_head(model, temperature=0.7, outputs=("log_probs", "entropy"))
    out = model(input_ids=IDS, labels=LABELS, fused_lm_head=True)
    torch.testing.assert_close(out.log_probs, expected.float())
    entropy = -(every.exp() * every).sum(-1).masked_fill(~mask, 0)
    torch.testing.assert_close(out.entropy, entropy.float())
    torch.testing.assert_close(out.loss, -expected.float().sum() / 8)
    (out.log_probs.sum() * 2).backward()
    torch.testing.assert_close(gradients(model), theirs, rtol=1e-6, atol=1e-7)
    plain = model(input_ids=IDS).logits  # without the fused head the model is as it was
    torch.testing.assert_close((plain[:, :-1] / 0.7).log_softmax(-1), every.detach())


def test_trl_s_forward_computes_a_loss_in_the_same_pass(trl: Any) -> None:
    model = llama()
    trl_head.add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    tensors = {"advantages": torch.tensor([1.0, -0.5]), "mask": torch.ones(2, 4).bool()}

    def score(*head: Any, **options: Any) -> pl.HeadOutput:
        return pl.linear_policy_loss("gspo", *head, "current", **tensors, **options)

    with trl_head.in_one_pass(model, score, count=4) as one_pass:
        out = model(input_ids=IDS, labels=LABELS, fused_lm_head=True)
    assert out.loss is one_pass.loss
    assert not out.log_probs.requires_grad
    assert out.log_probs.shape == (2, 6)
    assert not out.log_probs[:, :2].any()
    one_pass.loss.backward()
    ours = gradients(model)
    logp = model(input_ids=IDS, labels=LABELS, fused_lm_head=True).log_probs[:, -4:]
    pl.policy_loss("gspo", logp, "current", **tensors).loss.backward()
    torch.testing.assert_close(ours, gradients(model), rtol=1e-5, atol=1e-8)


def test_trl_s_forward_makes_no_logits(trl: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows of 16 rows, forward and backward; the model's own forward makes all 100."""
    plans = import_module("policyloss.head.plans")
    monkeypatch.setattr(plans, "CPU_BYTES", 8 * 300 * 16)
    model, ids = llama(vocab_size=300), token_ids(5, 20)
    assert most_rows(300, lambda: model(input_ids=ids)) == 100
    trl_head.add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    model(input_ids=ids, labels=ids, fused_lm_head=True)  # looks at the model

    def score(*head: Any, **options: Any) -> pl.HeadOutput:
        tensors = {"advantages": torch.ones(5), "mask": torch.ones(5, 19).bool()}
        return pl.linear_policy_loss("gspo", *head, "current", **tensors, **options)

    def per_token() -> None:
        model(input_ids=ids, labels=ids, fused_lm_head=True).log_probs.sum().backward()

    def in_one_pass() -> None:
        with trl_head.in_one_pass(model, score, count=19):
            model(input_ids=ids, labels=ids, fused_lm_head=True).loss.backward()

    # The transposed weight has 32 rows.
    assert most_rows(300, per_token) <= 32
    assert most_rows(300, in_one_pass) <= 32


def test_trl_s_seat_is_taken_and_given_back(trl: Any) -> None:
    trl_head.install_head()
    assert trl.rloo.add_fused_lm_head is trl.utils.add_fused_lm_head is trl_head.add_fused_lm_head
    trl.rloo.add_fused_lm_head("model", 1.0, False, ("log_probs", "is_top1"))  # not ours to give
    assert trl.calls == [("model", 1.0, False, ("log_probs", "is_top1"))]
    trl_head.uninstall_head()
    assert trl.rloo.add_fused_lm_head is trl.theirs
    with trl_head.installed_head():
        assert trl.rloo.add_fused_lm_head is trl_head.add_fused_lm_head
    assert trl.rloo.add_fused_lm_head is trl.theirs
    del trl.utils.add_fused_lm_head
    with pytest.raises(pl.SpecError, match=r"TRL 1\.16"):
        trl_head.install_head()


def test_trl_s_distillation_trainer_is_given_the_head(trl: Any) -> None:
    """Its loss by hand: two tokens that count, student (½, ½), teacher (¾, ¼), β = 1.

    With β = 1 the divergence is KL(student ‖ teacher) = ½·log(½ / ¾) + ½·log(½ / ¼) = 0.143841.
    """
    module = sys.modules[trl_head.DISTILLATION]
    assert f"{trl_head.DISTILLATION}._chunked_divergence_loss" in trl_head.install_head()
    hidden, heads = torch.ones(1, 3, 1), torch.tensor([[0.0], [0.0]])
    of_teacher = torch.tensor([[3.0], [1.0]]).log()
    mask = torch.tensor([[1, 1, 0]])
    loss, entropy, count = module._chunked_divergence_loss(
        hidden, hidden, heads, of_teacher, mask, 1.0
    )
    assert loss.item() == pytest.approx(0.143841, abs=1e-6)
    assert entropy.item() == pytest.approx(2 * 0.693147, abs=1e-5)
    assert count.item() == 2

    class Sharded:
        """A weight as FSDP2 keeps it, of which a rank has a part."""

        def full_tensor(self) -> torch.Tensor:
            return of_teacher

    gathered = module._chunked_divergence_loss(hidden, hidden, heads, Sharded(), mask, 1.0)
    assert gathered[0].item() == loss.item()
    trl_head.uninstall_head()
    assert module._chunked_divergence_loss() is None


@walked("dtype", [torch.float32, torch.bfloat16])
def test_verl_s_heads_by_hand(dtype: torch.dtype) -> None:
    """One hidden number and two words: logits x·(1, −1)/T, so logp of word 0 is log σ(2x/T)."""
    hidden = torch.tensor([[[0.5], [-1.0]]], dtype=dtype, requires_grad=True)
    weight = torch.tensor([[1.0], [-1.0]], dtype=dtype)
    ids = torch.tensor([[0, 0]])
    logp, entropy = verl.FusedLinearForPPO()(hidden, weight, ids, temperature=0.5)
    assert logp.dtype is torch.float32
    assert entropy.dtype is dtype
    assert logp.tolist() == [[pytest.approx(-0.126928), pytest.approx(-4.018150)]]
    flat, spread = verl.linear_cross_entropy(hidden, weight, ids, 0.5)
    assert flat.shape == spread.shape == (2,)
    torch.testing.assert_close(flat, logp.flatten())
    flat[0].backward()
    # d log σ(4x)/dx = 4·(1 − σ(2)) = 4·0.119203
    assert hidden.grad is not None
    rounding = {torch.float32: 1e-6, torch.bfloat16: 4e-3}[dtype]
    assert hidden.grad[0, 0].item() == pytest.approx(0.476812, rel=rounding)
    with pytest.raises(pl.SpecError, match="reduction='mean'"):
        verl.linear_cross_entropy(hidden, weight, ids, 0.5, "mean")
    with pytest.raises(pl.SpecError, match="impl_backend"):
        verl.FusedLinearForPPO(impl_backend="cuda")
