"""Single tokens of a run: the distribution of ratios, and some completions token by token.

The log stores complete groups of a step, chosen by `choose_groups`, and the groups of the task's
first prompts whenever they are trained on; and the answers to the first held-out prompts at every
evaluation. So a reader sees examples of a step, and how the completions of one prompt change.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import policyloss as pl
from policyloss_lab.completions import BRANCHES, choose_groups, token_branches
from policyloss_train.batches import Pack
from policyloss_train.config import TrainConfig
from policyloss_train.distributed import Ranks, Say
from policyloss_train.learner import Learned
from policyloss_train.sampler import Sample
from policyloss_train.tasks import Example, Task

FOLLOWED = 2  # the first training prompts: their groups are stored whenever they are trained on
ANSWERS = 8  # the first held-out prompts: their answers are stored at every evaluation
_OF_POLICIES = ("rollout_logp", "ref_logp", "teacher_logp")
_NAMES = tuple(BRANCHES)
# Edges of ratios, evenly spaced in the logarithm; outliers go to the first and the last bin.
EDGES = torch.logspace(-3, 3, 61, base=2.0, dtype=torch.float64)


def ratio_histogram(learned: Learned, ranks: Ranks) -> dict[str, list[float]]:
    """The histogram of the ratio to the old policy, over all ranks."""
    tokens = learned.pack.tokens
    ratio = (learned.logp - tokens["old_logp"])[tokens["mask"]].double().exp().cpu()
    place = torch.bucketize(ratio, EDGES[1:-1])
    counts = torch.bincount(place, minlength=EDGES.shape[0] - 1).double()
    counts = ranks.sum(counts.to(ranks.device)).cpu()
    return {"edges": EDGES.tolist(), "counts": counts.tolist()}


@dataclass
class TokenLog:
    """The rows of rollouts.jsonl and answers.jsonl of a run, each up to `--rollouts-mib`.

    ends: the tokens that end a completion. warn: called once if that limit leaves out rows.
    """

    config: TrainConfig
    spec: pl.LossSpec
    task: Task
    tokenizer: Any
    ends: Sequence[int]
    warn: Say
    warned: bool = False

    def rollouts(
        self, step: int, samples: Sequence[Sample], learned: Learned, *, due: bool, size: int
    ) -> list[dict[str, Any]]:
        """The rows of a step: the most informative groups if `due`, and those of first prompts."""
        chosen = stored_groups(samples, self.config.rollouts_rows if due else 0)
        if not chosen:
            return []
        places = [place for group in chosen for place in group]
        pack = learned.pack.with_tokens(logp=learned.logp, entropy=learned.entropy)
        pack = pack.with_tokens(
            clipped=find_clipped(pack, self.spec),
            branch=token_branches(self.spec, **_arguments(pack)),
        )
        parts = iter(_parts(pack.select(places).to(torch.device("cpu"))))
        of_step = {"groups": len({s.group for s in samples})}
        rows = [
            [
                {**self._row(step, samples[i], self.task.train), **of_step, **_numbers(next(parts))}
                for i in group
            ]
            for group in chosen
        ]
        return self._fitting("rollouts", step, rows, self.config.rollouts_every, size)

    def answers(self, step: int, samples: Sequence[Sample], size: int) -> list[dict[str, Any]]:
        """The rows of one evaluation. samples: the scored answers to held-out prompts."""
        groups = []
        for s in samples:
            numbers = {"group": s.example, "rollout_logp": _short(s.rollout_logp)}
            groups.append([{**self._row(step, s, self.task.held_out), **numbers}])
        return self._fitting("answers", step, groups, self.config.eval_every, size)

    def _row(self, step: int, s: Sample, examples: Sequence[Example]) -> dict[str, Any]:
        """The fields of a completion that do not depend on learning."""
        example, ids = examples[s.example], s.completion_ids.tolist()
        words = {token: self.tokenizer.decode([token]) for token in set(ids)}
        ended = "end" if ids[-1] in self.ends else "stop"
        return {
            "step": step,
            "example": s.example,
            "group": s.group,
            "weights": s.version,
            "prompt": example.prompt,
            "completion": s.text,
            "answer": example.answer,
            "reward": s.reward,
            "finished": s.finished,
            "finish_reason": ended if s.finished else "length",
            "ids": ids,
            "tokens": [words[token] for token in ids],
            **({} if s.turn_ids is None else {"turn_ids": s.turn_ids.tolist()}),
        }

    def _fitting(
        self, name: str, step: int, groups: list[list[dict[str, Any]]], every: int, size: int
    ) -> list[dict[str, Any]]:
        """The groups' rows that fit into this step's share of the space; the first may use all."""
        left = self.config.rollouts_mib * 2**20 - size
        steps = self.config.steps // every - (step - 1) // every if every else 1
        share = left / max(steps, 1)
        stored: list[dict[str, Any]] = []
        skipped, used = 0, 0
        for group in groups:
            more = sum(len(json.dumps(row)) + 1 for row in group)
            if used + more <= (share if stored else left):
                stored, used = stored + group, used + more
            else:
                skipped += 1
        if skipped and not self.warned:
            self.warned = True
            self.warn(
                f"{name}.jsonl leaves out {skipped} of {len(groups)} groups of step {step}, so "
                f"that it stays below --rollouts-mib {self.config.rollouts_mib:g}; other steps may "
                "store fewer groups, too."
            )
        return sorted(stored, key=lambda row: row["group"])


def stored_groups(samples: Sequence[Sample], rows: int) -> list[list[int]]:
    """The indices of the samples of each group to store: first the groups of followed prompts, then
    the most informative groups, about `rows` samples in all, at least one unless `rows` is 0.
    """
    groups: dict[int, list[int]] = {}
    for place, s in enumerate(samples):
        groups.setdefault(s.group, []).append(place)
    every = list(groups.values())
    if not every:
        return []
    count = max(rows * len(every) // len(samples), 1) if rows else 0
    chosen = choose_groups([[samples[i].reward for i in group] for group in every], count)
    followed = [i for i, group in enumerate(every) if samples[group[0]].example < FOLLOWED]
    return [every[i] for i in dict.fromkeys([*followed, *chosen])]


def _numbers(part: Mapping[str, Tensor]) -> dict[str, Any]:
    """The learner's numbers for the tokens of one completion."""
    logp, old, advantage = part["logp"], part["old_logp"], part["advantages"]
    written = part["turn_ids"] >= 0 if "turn_ids" in part else slice(None)
    of_others = [name for name in _OF_POLICIES if name in part]
    if not part["entropy"].isnan().any():  # a server reports none
        of_others.append("entropy")
    return {
        "advantage": advantage[written].mean().item(),
        "logp": _short(logp),
        "old_logp": _short(old),
        **{name: _short(part[name]) for name in of_others},
        "ratio": _short((logp - old).exp()),
        "token_advantage": _short(advantage),
        "mask": part["mask"].tolist(),
        "clipped": part["clipped"].tolist(),
        "branch": [_NAMES[code] for code in part["branch"].tolist()],
    }


def _short(x: Tensor) -> list[float]:
    """Numbers with nine digits, which identify a float32 and are half as long as Python's."""
    return [float(f"{value:.9g}") for value in x.tolist()]


def _arguments(pack: Pack) -> dict[str, Tensor]:
    """The arguments of a loss that the pack holds."""
    names = ("logp", "old_logp", "advantages", "mask", "ages", *_OF_POLICIES)
    tokens = {name: pack.tokens[name] for name in names if name in pack.tokens}
    return {**tokens, "cu_seqlens": pack.cu_seqlens, "group_ids": pack.sequences["group_ids"]}


def find_clipped(pack: Pack, spec: pl.LossSpec) -> Tensor:
    """`[N]` bool: True at each token with a nonzero advantage but no gradient, because of the trust
    region or a correction. The derivative by logp of the loss without its KL and entropy terms is
    exactly 0 at such a token.
    """
    t, logp = pack.tokens, pack.tokens["logp"].clone().requires_grad_()
    tensors: dict[str, Any] = {**_arguments(pack), "logp": logp}
    with torch.enable_grad():
        bare = spec.replace(kl=None, entropy_coef=0.0)
        out = pl.policy_loss(bare, **tensors, totals="local")
        (slope,) = torch.autograd.grad(out.loss, logp)
    return t["mask"] & (slope == 0) & (t["advantages"] != 0)


def _parts(pack: Pack) -> list[dict[str, Tensor]]:
    """The completion tokens of each sequence, trained on or not."""
    parts = {name: torch.split(x, pack.lengths) for name, x in pack.tokens.items()}
    places = enumerate(parts["completion"])
    return [{name: x[i][inside] for name, x in parts.items()} for i, inside in places]
