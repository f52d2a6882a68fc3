"""The float64 answers that every provider is compared with, and the check before its timing.

Legend: N rows, V vocabulary, D hidden size; z logits, p = softmax z, H entropy, g = ∂L/∂logp,
h = ∂L/∂H.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.head_data import DUAL, EPS, Case, block_rows, logit_blocks

ENTROPY_COEF = 0.01
# GSPO's own range (3e-4) would leave whole sequences without gradient here: zeros would be timed.
GSPO_EPS = 0.2


class Result(NamedTuple):
    """The result of a provider, with None for outputs that it does not have. `logp` and `d_hidden`
    may hold the live rows only.
    """

    loss: Tensor | None = None
    logp: Tensor | None = None
    entropy: Tensor | None = None
    d_hidden: Tensor | None = None
    d_weight: Tensor | None = None


class Exact(NamedTuple):
    """The float64 loss, the statistics of every row [N], d_hidden [N, D] and d_weight [V, D]."""

    loss: Tensor
    logp: Tensor
    entropy: Tensor
    d_hidden: Tensor
    d_weight: Tensor


Formula = Callable[[Tensor, Tensor, Case], Tensor]


def _clipped(ratio: Tensor, advantages: Tensor) -> Tensor:
    """max(−A·r, −A·clip(r)): PPO's loss per token."""
    return torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1 - EPS, 1 + EPS))


def _token_mean(per_token: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask, per_token, 0).sum() / mask.sum()


def clip(logp: Tensor, entropy: Tensor, case: Case) -> Tensor:
    """PPO's clip without the dual bound, token mean."""
    return _token_mean(
        _clipped((logp - case.old_logp).exp(), case.token_advantages.to(logp.dtype)), case.mask
    )


def dual_clip(logp: Tensor, entropy: Tensor, case: Case) -> Tensor:
    """PPO with dual clip, token mean."""
    advantages = case.token_advantages.to(logp.dtype)
    per_token = _clipped((logp - case.old_logp).exp(), advantages)
    return _token_mean(
        torch.where(advantages < 0, torch.minimum(per_token, -DUAL * advantages), per_token),
        case.mask,
    )


def dual_clip_and_entropy(logp: Tensor, entropy: Tensor, case: Case) -> Tensor:
    """The same less an entropy bonus that has a gradient."""
    return dual_clip(logp, entropy, case) - ENTROPY_COEF * _token_mean(entropy, case.mask)


def gspo(logp: Tensor, entropy: Tensor, case: Case) -> Tensor:
    """The geometric mean ratio of a sequence, clipped; mean over sequences.
    Only for cases without mask.
    """
    ratio = (logp - case.old_logp).mean(-1).exp()
    advantages = case.advantages.to(ratio.dtype)
    return torch.maximum(
        -advantages * ratio, -advantages * ratio.clamp(1 - GSPO_EPS, 1 + GSPO_EPS)
    ).mean()


LOSSES: dict[str, Formula] = {
    "clip": clip,
    "dual clip": dual_clip,
    "entropy": dual_clip_and_entropy,
    "gspo": gspo,
}


def exact(case: Case, loss: str) -> Exact:
    """The loss and its gradients in float64, some rows at a time:
    dz = g·(1_y − p) − h·p·(log p + H).
    """
    statistics = case.statistics
    logp, entropy = (
        x.view(case.mask.shape).clone().requires_grad_()
        for x in (statistics.logp, statistics.entropy)
    )
    value = LOSSES[loss](logp, entropy, case)
    found = torch.autograd.grad(value, (logp, entropy), allow_unused=True)
    g, h = (None if x is None else x.flatten() for x in found)
    assert g is not None
    moved = (g if h is None else g.abs() + h.abs()).nonzero().squeeze(-1)
    hidden, weight = case.hidden.detach().flatten(0, 1), case.weight.detach().double()
    d_hidden = torch.zeros(hidden.shape, dtype=torch.float64, device=hidden.device)
    d_weight = torch.zeros_like(weight)
    for part, z in logit_blocks(hidden[moved], weight):
        rows = moved[part]
        logprob = z.sub_(statistics.lse[rows, None])
        p = logprob.exp()
        dz = p * -g[rows, None]
        dz.scatter_add_(1, case.ids.flatten()[rows, None], g[rows, None])
        if h is not None:
            dz -= h[rows, None] * p * (logprob + statistics.entropy[rows, None])
        d_hidden[rows] = dz @ weight
        d_weight.addmm_(dz.T, hidden[rows].double())
    return Exact(value.detach(), statistics.logp, statistics.entropy, d_hidden, d_weight)


def forward_only(case: Case) -> Exact:
    """The statistics only, without gradients to compare."""
    none = torch.empty(0, device=case.hidden.device)
    return Exact(none, case.statistics.logp, case.statistics.entropy, none, none)


def errors(
    result: Result, answer: Exact, case: Case, skipped: Tensor | None = None
) -> dict[str, float]:
    """How far `result` is from the float64 answer: absolute (loss), root mean square (logp,
    entropy), relative (gradients).

    `skipped` [N]: rows without statistics, as requested from the provider.
    """
    live = case.rows if skipped is None else (case.mask.flatten() & ~skipped).nonzero().squeeze(-1)
    found = {}
    if result.loss is not None:
        found["loss"] = (result.loss.detach().double() - answer.loss).abs().item()
    for name in ("logp", "entropy"):
        value = getattr(result, name)
        if value is not None:
            flat = value.detach().flatten().double()
            flat = flat if flat.numel() == live.numel() else flat[live]
            found[name] = (flat - getattr(answer, name)[live]).square().mean().sqrt().item()
    if result.d_hidden is not None:
        actual, expected = result.d_hidden.flatten(0, -2), answer.d_hidden
        if actual.shape != expected.shape and case.index is not None:
            states = torch.zeros_like(actual, dtype=expected.dtype)
            expected = states.index_add_(0, case.index.flatten(), expected)
        elif actual.shape != expected.shape:
            expected = expected[case.rows]
        found["d_hidden"] = relative(actual, expected)
    if result.d_weight is not None:
        found["d_weight"] = relative(result.d_weight, answer.d_weight)
    return found


def relative(found: Tensor, expected: Tensor) -> float:
    """|found − expected| / |expected| (Frobenius), in float64, some rows at a time;
    NaN if either is.
    """
    step = max(1, 2**27 // max(1, expected[:1].numel()))
    above = below = torch.zeros((), dtype=torch.float64, device=expected.device)
    for start in range(0, expected.shape[0], step):
        part = expected[start : start + step]
        above = above + (found[start : start + step].double() - part).square().sum()
        below = below + part.square().sum()
    return (above / below).sqrt().item()


# Ours on a GPU: float32 statistics and gradients rounded to bfloat16 once. An entropy contains the
# rounding of every logit, a log-prob that of two: any head with float32 logits has an error of some
# 4e-5.
OURS_BF16 = {"loss": 2e-5, "logp": 2e-5, "entropy": 1e-4, "d_hidden": 3e-3, "d_weight": 3e-3}
# The error of float32 arithmetic where no number is larger than a logit.
FLOOR = {"loss": 1e-6, "logp": 2e-6, "entropy": 5e-6, "d_hidden": 2e-6, "d_weight": 2e-6}


def limits(yardstick: dict[str, float], ours: bool, dtype: torch.dtype) -> dict[str, float]:
    """The allowed errors of a provider: twice the errors of the plain line in the dtype of the
    inputs; ours in bfloat16 has its own limits.
    """
    if ours and dtype == torch.bfloat16:
        return OURS_BF16
    # The errors of a loss may cancel over its tokens to any small number, so its limit is that of a
    # log-prob.
    known = {**yardstick, "loss": max(yardstick.get("loss", 0.0), yardstick.get("logp", 0.0))}
    return {name: max(2 * error, FLOOR[name]) for name, error in known.items()}


def refusal(found: dict[str, float], allowed: dict[str, float]) -> str | None:
    """Why a provider with these errors is not timed; None if it may be. NaN is refused."""
    wrong = [
        f"{name} is off by {error:.1e} (limit {allowed[name]:.1e})"
        for name, error in found.items()
        if not error <= allowed[name]
    ]
    return "wrong answer, not timed: " + "; ".join(wrong) if wrong else None


def plain_line(case: Case, loss: str, backward: bool = True) -> Result:
    """`log_softmax(hidden @ weight.T)` in the dtype of the inputs throughout: the yardstick of that
    dtype.
    """
    with torch.set_grad_enabled(backward):
        logprob = (case.hidden @ case.weight.T).log_softmax(-1)
        logp = logprob.gather(-1, case.ids.unsqueeze(-1)).squeeze(-1).float()
        entropy = (
            (logprob.exp() * logprob).sum(-1).neg().float()
            if loss == "entropy" or not backward
            else torch.zeros_like(logp)
        )
        if not backward:
            return Result(logp=logp, entropy=entropy)
        value = LOSSES[loss](logp, entropy, case)
        d_hidden, d_weight = torch.autograd.grad(value, (case.hidden, case.weight))
    return Result(value, logp, entropy if loss == "entropy" else None, d_hidden, d_weight)


def poison(device: str) -> None:
    """Fill the memory of the next allocations with NaN, so that an unwritten buffer shows in the
    answer.
    """
    if device != "cuda":
        return  # On a CPU, `poisoned` makes torch fill its allocations.
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    large = torch.full((int(free * 0.5) // 4,), torch.nan, device="cuda")
    small = [torch.full((2**17,), torch.nan, device="cuda") for _ in range(256)]
    torch.cuda.synchronize()
    del large, small


class poisoned:  # noqa: N801 (a context manager)
    """Within it, allocated memory holds NaN until it is written."""

    def __init__(self, device: str) -> None:
        self.device = device

    def __enter__(self) -> None:
        poison(self.device)
        if self.device == "cpu":
            torch.use_deterministic_algorithms(True, warn_only=True)

    def __exit__(self, *_: object) -> None:
        if self.device == "cpu":
            torch.use_deterministic_algorithms(False)


def exact_logits(
    logits: Tensor, ids: Tensor, g: Tensor, h: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """From logits [R, V]: float64 logp and entropy [R], and d logits for the gradients g of logp
    and h of entropy (in float32).
    """
    logp, entropy = (
        torch.empty(logits.shape[0], dtype=torch.float64, device=logits.device) for _ in range(2)
    )
    gradient = torch.empty(logits.shape, dtype=torch.float32, device=logits.device)
    step = block_rows(logits.shape[1], logits.device.type)
    for start in range(0, logits.shape[0], step):
        part = slice(start, start + step)
        logprob = logits[part].double().log_softmax(-1)
        p = logprob.exp()
        logp[part] = logprob.gather(-1, ids[part, None]).squeeze(-1)
        entropy[part] = -(p * logprob).sum(-1)
        dz = p * -g[part, None].double() - h[part, None].double() * p * (
            logprob + entropy[part, None]
        )
        gradient[part] = dz.scatter_add_(1, ids[part, None], g[part, None].double()).float()
    return logp, entropy, gradient
