"""The metrics of `policy_loss`, each with its formula. Every one is a record that adds up over micro-batches and ranks.

Legend: Σ over the valid tokens, n their number, lr = logp − old_logp (before any clamp), r = the ratio slot's ratio before its
clamp, w = the corrections' weight. `docs/metrics.md` is generated from `FORMULAS`.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from policyloss.functional.masking import fill
from policyloss.functional.stats import extremes, k3
from policyloss.metrics import EffectiveSampleSize, Max, Metrics, Min, Record, Stat, Sum
from policyloss.slots.correction import Combined
from policyloss.slots.trust import Surrogate
from policyloss.spec import LossSpec
from policyloss.tokens import Tokens

FORMULAS = {
    "loss": "the loss of the whole step: Σ weight·loss, without the dp_size factor; adds over micro-batches and ranks",
    "tokens": "valid tokens",
    "sequences": "sequences with at least one valid token",
    "advantage_mean": "Σ advantages / n",
    "clip_fraction": "share of valid tokens where the trust region binds on any side (upper, lower or dual)",
    "clip_fraction_upper": "share held from above: for Clip, A > 0 and r > 1 + eps_high",
    "clip_fraction_lower": "share held from below: for Clip, A < 0 and r < 1 − eps_low",
    "clip_fraction_dual": "share held by dual clip: A < 0 and r > dual",
    "ratio_mean": "Σ r / n, before clamping",
    "ratio_max": "max r, before clamping",
    "ratio_min": "min r, before clamping",
    "clamped_tokens": "valid tokens whose log-ratio lay beyond log_clamp",
    "nonfinite_tokens": "valid tokens whose loss is NaN or infinite",
    "kl_old_k1": "Σ −lr / n: estimate of KL(old‖current)",
    "kl_old_k3": "Σ (e^lr − 1 − lr) / n: estimate of KL(old‖current)",
    "kl_rollout_k1": "Σ (rollout_logp − old_logp) / n: estimate of KL(rollout‖old), engine against trainer",
    "kl_rollout_k3": "Σ (e^d − 1 − d) / n with d = old_logp − rollout_logp",
    "rollout_logp_difference_max": "max |old_logp − rollout_logp|",
    "correction_weight_mean": "Σ w / n over the valid tokens, rejected ones with w = 0",
    "correction_weight_max": "max w over the kept tokens",
    "effective_sample_size": "(Σ w)² / (n·Σ w²), rejected tokens with w = 0",
    "rejected_fraction": "share of valid tokens that some correction rejects",
    "rejected_fraction/<part>": "share of valid tokens that this correction rejects",
    "kl_ref": "Σ kl / n: the penalty's estimate before coef (weight included)",
    "entropy": "Σ entropy / n",
}


def policy_metrics(
    spec: LossSpec,
    whole: Tokens,
    t: Tokens,
    raw_log_ratio: Tensor | None,
    surrogate: Surrogate,
    corrected: Combined,
    token_loss: Tensor,
    kl: Tensor | None,
    loss: Tensor,
) -> Metrics:
    """Measure one call. `whole` is the batch before rejection, `t` after it (the same unless rejected tokens leave the mask)."""
    n = t.mask.sum()
    assert t.totals is not None
    records: dict[str, Record] = {
        "loss": Sum(loss.detach() / t.totals.dp_size),
        "tokens": Sum(n),
        "sequences": Sum(_sequences(t)),
        "advantage_mean": Stat(t.advantages.sum(), n),
        "nonfinite_tokens": Sum((t.mask & ~token_loss.isfinite()).sum()),
    }
    _clipping(records, surrogate, t.mask, n)
    if raw_log_ratio is not None:
        _ratios(records, spec, raw_log_ratio, t, n)
    if t.raw.get("old_logp") is not None:
        lr = t.log_ratio_to("old")
        records["kl_old_k1"] = Stat(-lr.sum(), n)
        records["kl_old_k3"] = Stat(k3(lr).sum(), n)
        if t.raw.get("rollout_logp") is not None:
            _mismatch(records, whole)
    _corrections(records, corrected, whole)
    if kl is not None:
        records["kl_ref"] = Stat(fill(kl, t.mask).sum(), n)
    if t.raw.get("entropy") is not None:
        records["entropy"] = Stat(t.entropy.sum(), n)
    return Metrics({name: type(r)(*(p.detach() for p in r.parts)) for name, r in records.items()})


def _sequences(t: Tokens) -> Tensor:
    """Non-empty sequences; with context parallel, this rank's share of them, so that ranks add up to the true number."""
    if t.sequences.cp_group is None:
        return (t.lengths > 0).sum()
    here = replace(t.sequences, cp_group=None).sum(t.mask.to(t.dtype))
    return (here / t.lengths.clamp(min=1)).sum()


def _clipping(records: dict[str, Record], s: Surrogate, mask: Tensor, n: Tensor) -> None:
    bound: Tensor | None = None
    for name, flag in (("upper", s.upper), ("lower", s.lower), ("dual", s.dual)):
        if flag is not None:
            flag = flag & mask
            records[f"clip_fraction_{name}"] = Stat(flag.sum(), n)
            bound = flag if bound is None else bound | flag
    if bound is not None:
        records["clip_fraction"] = Stat(bound.sum(), n)


def _ratios(records: dict[str, Record], spec: LossSpec, raw: Tensor, t: Tokens, n: Tensor) -> None:
    high, low = extremes(raw, t.mask)
    records["ratio_mean"] = Stat(torch.where(t.mask, raw.exp(), 0).sum(), n)
    records["ratio_max"] = Max(torch.where(high == -torch.inf, high, high.exp()))
    records["ratio_min"] = Min(torch.where(low == torch.inf, low, low.exp()))
    limit = getattr(spec.ratio, "log_clamp", 20.0)
    if limit is not None:
        floor, ceiling = (-limit, limit) if isinstance(limit, (int, float)) else limit
        beyond = t.mask & ((raw > (torch.inf if ceiling is None else ceiling)) | (raw < (-torch.inf if floor is None else floor)))
        records["clamped_tokens"] = Sum(beyond.sum())


def _mismatch(records: dict[str, Record], whole: Tokens) -> None:
    n, d = whole.mask.sum(), whole.log_weight()
    records["kl_rollout_k1"] = Stat(-d.sum(), n)
    records["kl_rollout_k3"] = Stat(k3(d).sum(), n)
    records["rollout_logp_difference_max"] = Max(extremes(d.abs(), whole.mask)[0])


def _corrections(records: dict[str, Record], corrected: Combined, whole: Tokens) -> None:
    n = whole.mask.sum()
    kept = whole.mask if corrected.keep is None else whole.mask & corrected.keep
    if corrected.weight is not None:
        w = fill(corrected.weight, kept)
        records["correction_weight_mean"] = Stat(w.sum(), n)
        records["correction_weight_max"] = Max(extremes(w, kept)[0])
        records["effective_sample_size"] = EffectiveSampleSize(w.sum(), (w * w).sum(), n)
    for name, keep in corrected.verdicts.items():
        records[f"rejected_fraction/{name}"] = Stat((whole.mask & ~keep).sum(), n)
    if corrected.keep is not None:
        records["rejected_fraction"] = Stat((whole.mask & ~corrected.keep).sum(), n)
