"""One loss on stored tokens: `Outcome`, with numbers from the gradient of `policy_loss`, the
problems of the loss on these tokens, and the smallest change that cures each problem.

To find that change, one number of the spec is multiplied or divided by a factor, from small factors
to large ones; the first factor that cures is the smallest relative change. If no number cures,
parts of presets replace parts of the spec.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from policyloss.catalogue import PRESETS
from policyloss.errors import InputError, PolicyLossError
from policyloss.explanations.difference import diff
from policyloss.inputs import DIFFERENTIATED, Inputs
from policyloss.loss import policy_loss
from policyloss.spec import LossSpec
from policyloss_lab.completions import BRANCHES, CODES, token_branches
from policyloss_lab.whatif.tokens import StoredTokens

RATIO_EDGES = (0.5, 0.8, 0.95, 1.05, 1.25, 2.0)
POSITIONS = 10  # parts of a sequence
SIGNS = ("advantage below 0", "no advantage", "advantage above 0")
LIMITED = ("upper", "lower", "dual", "dropped")


@dataclass(frozen=True)
class Outcome:
    """The effect of one loss on N tokens.

    gradient: `∂loss/∂logp_t`, `[N]`; gradient descent makes a token with a negative entry likelier.
    policy: the gradient without the kl slot and without the entropy bonus. on_policy: the value of
    `policy` if current, old and rollout policy were equal (every ratio and correction weight 1), so
    that `importance` is the effect of ratio, trust region and correction. branch: `[N]`, indices in
    `BRANCHES`. metrics: of the call of the loss.
    """

    name: str
    spec: LossSpec
    gradient: Tensor
    policy: Tensor
    on_policy: Tensor
    branch: Tensor
    metrics: Mapping[str, float]

    @property
    def importance(self) -> Tensor:
        """`policy / on_policy` of the tokens with an on-policy gradient, `[M]`."""
        moved = self.on_policy != 0
        return self.policy[moved] / self.on_policy[moved]

    @property
    def lost(self) -> float | None:
        """The share of the on-policy gradient, `Σ|on_policy|`, at tokens whose `policy` is exactly
        0; None if the policy term has no gradient.
        """
        mass = self.on_policy.abs()
        total = float(mass.sum())
        return float(mass[self.policy == 0].sum()) / total if total else None

    @property
    def effective(self) -> float | None:
        """The effective sample size, `(Σu)² / (M·Σu²)` with u the importance of M tokens: 1 if
        every token counts equally, 1/M if only one token counts.
        """
        u = self.importance
        squares = float((u * u).sum())
        return float(u.sum()) ** 2 / (u.shape[0] * squares) if squares else None

    @property
    def norm(self) -> float:
        """The length of the gradient by log-probabilities."""
        return float(self.gradient.norm())

    def share(self, *branches: str) -> float:
        """The share of trained tokens that took one of these branches."""
        trained = self.branch[self.branch != CODES["masked"]]
        codes = torch.tensor([CODES[name] for name in branches])
        return float(torch.isin(trained, codes).double().mean())

    def masses(self, tokens: StoredTokens) -> dict[str, dict[str, float]]:
        """The distribution of the gradient: shares of `Σ|gradient|` by sign of the advantage, by
        ratio to the old policy and by position in the sequence; and shares of `Σ|on_policy|` by
        branch, which show the effect of bounds and rejections.
        """
        out = {}
        for kind, (names, places) in buckets(tokens, self.branch).items():
            mass = (self.on_policy if kind == "branch" else self.gradient).abs()
            total = float(mass.sum()) or 1.0
            shares = [float(mass[places == i].sum()) / total for i in range(len(names))]
            pairs = zip(names, shares, strict=True)
            out[kind] = {name: x for name, x in pairs if x or kind != "branch"}
        return out


def buckets(tokens: StoredTokens, branch: Tensor) -> dict[str, tuple[tuple[str, ...], Tensor]]:
    """The names of buckets, and the bucket of each token, `[N]`, -1 for masked tokens, by kind."""
    t, mask = tokens.inputs, tokens.inputs.mask
    out: dict[str, tuple[tuple[str, ...], Tensor]] = {}
    out["sign"] = (SIGNS, t.advantages.sign().long() + 1)
    if t.old_logp is not None:
        edges = torch.tensor(RATIO_EDGES, dtype=torch.float64)
        low, high = (0.0, *RATIO_EDGES), (*RATIO_EDGES, float("inf"))
        names = tuple(f"{a:g}–{b:g}" for a, b in zip(low, high, strict=True))
        names = (f"< {RATIO_EDGES[0]:g}", *names[1:-1], f"> {RATIO_EDGES[-1]:g}")
        out["ratio"] = (names, torch.bucketize((t.logp - t.old_logp).exp(), edges))
    # The rank of each trained token in its sequence.
    assert t.cu_seqlens is not None
    row, counted = tokens.sequence, mask.double().cumsum(0) - mask.double()
    before = counted[t.cu_seqlens[:-1][row]]
    lengths = tokens.sums(mask.double()).clamp(min=1)[row]
    place = ((counted - before) * POSITIONS / lengths).long().clamp(max=POSITIONS - 1)
    step = 100 // POSITIONS
    parts = tuple(f"{step * i}–{step * (i + 1)} %" for i in range(POSITIONS))
    out["position"] = (parts, place)
    out["branch"] = (tuple(BRANCHES), branch)
    return {kind: (names, places.where(mask, -1)) for kind, (names, places) in out.items()}


def outcome_of(name: str, spec: LossSpec, tokens: StoredTokens) -> Outcome:
    """Try a loss on these tokens; an `InputError` names the tensors that were not stored."""
    t = tokens.inputs
    missing = [argument for argument in spec.reads if getattr(t, argument) is None]
    if missing:
        raise InputError(f"it reads {' and '.join(missing)}, which was not stored.")
    spec = spec.for_run(tokens.horizon or int(tokens.lengths.max()))
    bare = spec.replace(kl=None, entropy_coef=0.0)
    sampled = [x for x in ("old_logp", "rollout_logp") if getattr(t, x) is not None]
    gradient, metrics = _gradient(spec, t)
    policy = gradient if bare == spec else _gradient(bare, t)[0]
    on_policy, _ = _gradient(bare, t.replace(**dict.fromkeys(sampled, t.logp)))
    branch = token_branches(bare, **_arguments(t))
    return Outcome(name, spec, gradient, policy, on_policy, branch, metrics)


def _arguments(t: Inputs) -> dict[str, Any]:
    return {"old_logp": None, **t.tensors()}


def _gradient(spec: LossSpec, t: Inputs) -> tuple[Tensor, dict[str, float]]:
    """`∂loss/∂logp`, `[N]`, and the metrics of the call."""
    arguments, slope = _arguments(t), None
    for name in ("logp", *DIFFERENTIATED):
        if arguments.get(name) is not None:
            arguments[name] = arguments[name].clone().requires_grad_()
    with torch.enable_grad():
        out = policy_loss(spec, **arguments, totals="local")
        if out.loss.requires_grad:
            (slope,) = torch.autograd.grad(out.loss, arguments["logp"], allow_unused=True)
    # A divergence from a teacher's distribution does not pass through the sampled token.
    return torch.zeros_like(t.logp) if slope is None else slope, out.metrics.compute()


FACTORS = (1.1, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0, 4.0, 5.0, 7.0, 10.0)
# The presets with parts that may replace a part of the spec, by slot.
PARTS = {
    "correction": ("tis", "icepop", "seq_mask_tis"),
    "trust": ("dapo", "cispo", "up_grpo", "ppo_dual_clip"),
}


@dataclass(frozen=True)
class Limits:
    """The limits of a healthy loss. lost: the largest share of the on-policy gradient that may be
    lost. effective: the smallest effective sample size. mismatch: the largest KL (k3) from the
    trainer's policy to the engine's, in nats per token, that a loss may leave uncorrected.
    """

    lost: float = 0.2
    effective: float = 0.5
    mismatch: float = 0.01


class Problem(NamedTuple):
    """name: "lost", "effective", "mismatch" or "advantages". sentence: the measurement in words."""

    name: str
    sentence: str


class Remedy(NamedTuple):
    """The loss with one change. change: in words. sentence: the effect of the change."""

    problem: Problem
    spec: LossSpec | None
    change: str
    sentence: str


def problems(outcome: Outcome, limits: Limits) -> tuple[Problem, ...]:
    """The problems of a loss on its tokens, each with its measurement."""
    lost, effective = _measure(outcome)
    kl = outcome.metrics.get("kl_rollout_k3", 0.0)
    flags = {
        "lost": lost > limits.lost,
        "effective": effective < limits.effective,
        "mismatch": not kl <= limits.mismatch and "rollout_logp" not in outcome.spec.reads,
    }
    sentences = {
        "lost": f"{lost:.0%} of the gradient is cut off by the trust region or rejected "
        f"(limit {limits.lost:.0%})",
        "effective": f"the effective sample size is {effective:.2f} of the tokens (limit "
        f"{limits.effective:.2f}): ratios and weights let few tokens decide",
        "mismatch": f"engine and trainer are {kl:.3g} nats per token apart (limit "
        f"{limits.mismatch:g}), and the loss does not correct for it",
    }
    return tuple(Problem(name, sentences[name]) for name, wrong in flags.items() if wrong)


def _measure(outcome: Outcome) -> tuple[float, float]:
    """The lost share and the effective sample size, 0 and 1 if the policy term has no gradient."""
    lost, effective = outcome.lost, outcome.effective
    return 0.0 if lost is None else lost, 1.0 if effective is None else effective


def remedies(outcome: Outcome, tokens: StoredTokens, limits: Limits) -> tuple[Remedy, ...]:
    """The smallest change that cures each problem and causes no other."""
    known = problems(outcome, limits)
    names = {problem.name for problem in known}

    def cured(spec: LossSpec, problem: Problem) -> Outcome | None:
        try:
            changed = outcome_of(outcome.name, spec, tokens)
        except PolicyLossError:
            return None
        left = {p.name for p in problems(changed, limits)}
        return changed if problem.name not in left and left <= names else None

    cures = tuple(_remedy(problem, outcome.spec, cured) for problem in known)
    if outcome.spec.follows_advantage and not bool(tokens.inputs.advantages.any()):
        problem = Problem("advantages", "every advantage is 0, so the loss pushes no token")
        cure = "No change of the loss cures it: take a step in which rewards differ."
        return (*cures, Remedy(problem, None, "", cure))
    return cures


def _remedy(
    problem: Problem, spec: LossSpec, cured: Callable[[LossSpec, Problem], Outcome | None]
) -> Remedy:
    for change, candidates in _changes(spec):
        better = [
            (words, outcome)
            for words, candidate in candidates
            if (outcome := cured(candidate, problem)) is not None
        ]
        if better:
            words, outcome = max(better, key=lambda pair: pair[1].effective or 0.0)
            lost, effective = _measure(outcome)
            sentence = (
                f"The smallest {change} that cures it: {words}. Then {lost:.0%} of the gradient is "
                f"cut off and the effective sample size is {effective:.2f}."
            )
            return Remedy(problem, outcome.spec, words, sentence)
    return Remedy(problem, None, "", "No change of a single number or part cures it.")


def _changes(spec: LossSpec) -> Iterator[tuple[str, list[tuple[str, LossSpec]]]]:
    """Changed specs, in groups of changes of equal size, the smallest change first."""
    if not spec.is_data:
        return
    data = spec.to_dict()
    for factor in FACTORS:
        yield (
            "change of a number",
            [
                (f"{'.'.join(map(str, path))} {value:g} → {number:g}", changed)
                for path, value in _numbers(data)
                for number in (value * factor, value / factor)
                if (changed := _with_number(data, path, float(f"{number:.3g}"))) is not None
            ],
        )
    for slot, names in PARTS.items():
        yield (
            "change of a part",
            [
                (_part_words(spec, changed, name), changed)
                for name in names
                if (changed := _with_part(spec, slot, name)) is not None
            ],
        )


def _part_words(spec: LossSpec, changed: LossSpec, name: str) -> str:
    (change,) = diff(spec, changed).changes
    return f"{change.slot} {change.a} → {change.b}, as the preset {name} has it"


def _numbers(data: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[Any, float]]:
    """(path, number) of each number in a spec as plain data. Averages and pulls are left out,
    because they change no measurement; so is the clamp against overflow.
    """
    if isinstance(data, (int, float)) and not isinstance(data, bool):
        if data != 0 and path[0] in ("ratio", "trust", "correction") and path[-1] != "log_clamp":
            yield path, float(data)
    elif isinstance(data, (dict, list)):
        for key, value in data.items() if isinstance(data, dict) else enumerate(data):
            yield from _numbers(value, (*path, key))


def _with_number(data: Any, path: tuple[Any, ...], number: float) -> LossSpec | None:
    changed = copy.deepcopy(data)
    owner = changed
    for key in path[:-1]:
        owner = owner[key]
    owner[path[-1]] = number
    try:
        return LossSpec.from_dict(changed)
    except PolicyLossError:  # the part refuses this number
        return None


def _with_part(spec: LossSpec, slot: str, name: str) -> LossSpec | None:
    """The spec with a part of a preset; None if it is the same part or does not fit."""
    try:
        changed = spec.replace(**{slot: getattr(PRESETS[name].spec, slot)})
    except PolicyLossError:
        return None
    return None if changed == spec else changed
