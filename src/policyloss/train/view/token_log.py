"""Single tokens of a run: the distribution of ratios, and some completions token by token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

import policyloss as pl
from policyloss.train.batches import Pack
from policyloss.train.distributed import Ranks
from policyloss.train.learner import Learned
from policyloss.train.sampler import Sample
from policyloss.train.tasks import Task

# Of a ratio, evenly spaced in its logarithm; the first and the last bin take what lies beyond.
EDGES = torch.logspace(-3, 3, 61, base=2.0, dtype=torch.float64)


def ratio_histogram(learned: Learned, ranks: Ranks) -> dict[str, list[float]]:
    """How often the ratio to the old policy fell between which edges, over all ranks."""
    tokens = learned.pack.tokens
    ratio = (learned.logp - tokens["old_logp"])[tokens["mask"]].double().exp().cpu()
    place = torch.bucketize(ratio, EDGES[1:-1])
    counts = torch.bincount(place, minlength=EDGES.shape[0] - 1).double()
    counts = ranks.sum(counts.to(ranks.device)).cpu()
    return {"edges": EDGES.tolist(), "counts": counts.tolist()}


def rollout_rows(
    step: int,
    samples: Sequence[Sample],
    learned: Learned,
    task: Task,
    tokenizer: Any,
    spec: pl.LossSpec,
) -> list[dict[str, Any]]:
    """Completions as rows of rollouts.jsonl. samples: the first ones of the pack."""
    if not samples:
        return []
    pack = learned.pack.with_tokens(logp=learned.logp)
    pack = pack.with_tokens(clipped=clipped(pack, spec)).select(range(len(samples)))
    pack = pack.to(torch.device("cpu"))
    rows = []
    for sample, part in zip(samples, _parts(pack), strict=True):
        example = task.train[sample.example]
        ids = sample.completion_ids.tolist()
        logp, old, advantage = part["logp"], part["old_logp"], part["advantages"]
        rows.append(
            {
                "step": step,
                "example": sample.example,
                "group": sample.group,
                "weights": sample.version,
                "prompt": example.prompt,
                "completion": sample.text,
                "answer": example.answer,
                "reward": sample.reward,
                "advantage": advantage.mean().item(),
                "finished": sample.finished,
                "ids": ids,
                "tokens": [tokenizer.decode([token]) for token in ids],
                "logp": logp.tolist(),
                "old_logp": old.tolist(),
                "rollout_logp": part["rollout_logp"].tolist(),
                "ratio": (logp - old).exp().tolist(),
                "token_advantage": advantage.tolist(),
                "clipped": part["clipped"].tolist(),
            }
        )
    return rows


def clipped(pack: Pack, spec: pl.LossSpec) -> Tensor:
    """Where the trust region or a correction leaves a token with an advantage no gradient, `[N]`
    bool: the derivative of the loss without its KL and entropy terms by logp is exactly 0 there.
    """
    t = pack.tokens
    logp = t["logp"].clone().requires_grad_()
    others: dict[str, Any] = {name: t[name] for name in ("rollout_logp", "ref_logp") if name in t}
    others |= {"cu_seqlens": pack.cu_seqlens, "group_ids": pack.sequences["group_ids"]}
    bare, old_logp = spec.replace(kl=None, entropy_coef=0.0), t["old_logp"]
    with torch.enable_grad():
        out = pl.policy_loss(
            bare, logp, old_logp, t["advantages"], t["mask"], **others, totals="local"
        )
        (slope,) = torch.autograd.grad(out.loss, logp)
    return t["mask"] & (slope == 0) & (t["advantages"] != 0)


def _parts(pack: Pack) -> list[dict[str, Tensor]]:
    """The completion tokens of each sequence, also of one that is not trained on."""
    parts = {name: torch.split(x, pack.lengths) for name, x in pack.tokens.items()}
    return [
        {name: x[i][parts["completion"][i]] for name, x in parts.items()}
        for i in range(len(pack.lengths))
    ]
