"""One call of a loss on numbers written as lists, and what comes out:
what most tests of single numbers need.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import policyloss as pl


@dataclass(frozen=True)
class Result:
    """The loss, its gradient with respect to logp (and to entropy, if that was given),
    and the metrics as floats.
    """

    loss: float
    grad: Tensor
    entropy_grad: Tensor | None
    metrics: dict[str, float]


def rows(numbers: Any) -> Tensor:
    """Numbers as float64 `[B, T]`: a scalar is one token, a flat list one sequence."""
    x = torch.as_tensor(numbers, dtype=torch.float64)
    return x.reshape(1, -1) if x.dim() < 2 else x


def evaluate(
    spec: pl.LossSpec, logp: Any, old_logp: Any, advantages: Any, mask: Any = None, **others: Any
) -> Result:
    """`policy_loss` in float64 on lists. `others` are further arguments of `policy_loss`;
    log-probs may be lists too.
    """
    leaf = rows(logp).clone().requires_grad_()
    for name in ("rollout_logp", "ref_logp", "teacher_logp", "entropy"):
        if others.get(name) is not None:
            others[name] = rows(others[name])
    entropy = others.get("entropy")
    if entropy is not None:
        others["entropy"] = entropy = entropy.clone().requires_grad_()
    valid = torch.ones(leaf.shape, dtype=torch.bool) if mask is None else rows(mask) != 0
    old = None if old_logp is None else rows(old_logp)
    a = torch.as_tensor(advantages, dtype=torch.float64)
    out = pl.policy_loss(
        spec, leaf, old, rows(a) if a.numel() == leaf.numel() else a, valid, **others
    )
    out.loss.backward()
    return Result(
        out.loss.item(), leaf.grad, None if entropy is None else entropy.grad, out.metrics.compute()
    )


def at_ratio(
    spec: pl.LossSpec, ratio: Any, advantages: Any, logp: Any = -1.0, **others: Any
) -> Result:
    """`evaluate` with `old_logp` chosen so that each token's ratio is `ratio`."""
    now, r = rows(logp), rows(ratio)
    now = now.expand(r.shape) if now.numel() == 1 else now
    return evaluate(spec, now, now - r.log(), advantages, **others)


def weighted(spec: pl.LossSpec, weights: Any, advantages: Any = -1.0, **others: Any) -> Result:
    """`evaluate` at ratio 1 with `rollout_logp` chosen so that each token's
    `exp(old_logp - rollout_logp)` is the given weight.

    At ratio 1 and A = −1 every token's surrogate is 1,
    so loss and gradients are the weights of the tokens.
    """
    w = rows(weights)
    logp = torch.full_like(w, -1.0)
    a = (
        torch.full_like(w, float(advantages))
        if not isinstance(advantages, (list, Tensor))
        else advantages
    )
    return evaluate(spec, logp, logp, a, rollout_logp=logp - w.log(), **others)


def assert_loss(result: Result, loss: float, grad: Any = None) -> None:
    """Loss (and gradient) equal to numbers computed by hand, to the rounding of float64."""
    assert abs(result.loss - loss) <= 1e-12 * max(1.0, abs(loss)), (
        f"loss {result.loss!r}, by hand {loss!r}"
    )
    if grad is not None:
        torch.testing.assert_close(result.grad, rows(grad), rtol=1e-12, atol=1e-12)
