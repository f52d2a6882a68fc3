"""What is wrong with a loss on these tokens, and the smallest change that cures it.

One number of the spec is changed at a time, all of them by the same factor, from small factors to
large ones; the first factor at which a change cures is the smallest relative change. Where no
number cures, parts of presets take the place of the spec's.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from policyloss.catalogue import PRESETS
from policyloss.errors import PolicyLossError
from policyloss.explanations.difference import diff
from policyloss.spec import LossSpec
from policyloss_lab.whatif.outcome import Outcome, outcome_of
from policyloss_lab.whatif.tokens import StoredTokens

FACTORS = (1.1, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0, 4.0, 5.0, 7.0, 10.0)
# Parts that take the place of a spec's, with the preset that they are taken from.
PARTS = {
    "correction": ("tis", "icepop", "seq_mask_tis"),
    "trust": ("dapo", "cispo", "up_grpo", "ppo_dual_clip"),
}


@dataclass(frozen=True)
class Limits:
    """From where on something counts as wrong. lost: the share of the on-policy gradient that no
    longer arrives. effective: the smallest effective sample size. mismatch: the KL (k3) from the
    trainer's policy to the engine's, in nats per token, that a loss may leave uncorrected.
    """

    lost: float = 0.2
    effective: float = 0.5
    mismatch: float = 0.01


class Problem(NamedTuple):
    """name: "lost", "effective", "mismatch" or "advantages". sentence: what was measured."""

    name: str
    sentence: str


class Remedy(NamedTuple):
    """The loss with one change. change: what was changed, in words. sentence: what it does."""

    problem: Problem
    spec: LossSpec | None
    change: str
    sentence: str


def problems(outcome: Outcome, limits: Limits) -> tuple[Problem, ...]:
    """What is wrong, each with its measure; nothing if all is well."""
    out = []
    lost, effective = outcome.lost, outcome.effective
    if lost is not None and lost > limits.lost:
        out.append(
            Problem(
                "lost",
                f"{lost:.0%} of the gradient is cut off by the trust region or rejected "
                f"(limit {limits.lost:.0%})",
            )
        )
    if effective is not None and effective < limits.effective:
        out.append(
            Problem(
                "effective",
                f"the effective sample size is {effective:.2f} of the tokens (limit "
                f"{limits.effective:.2f}): ratios and weights let few tokens decide",
            )
        )
    kl = outcome.metrics.get("kl_rollout_k3", 0.0)
    if not kl <= limits.mismatch and "rollout_logp" not in outcome.spec.reads:
        out.append(
            Problem(
                "mismatch",
                f"engine and trainer are {kl:.3g} nats per token apart (limit "
                f"{limits.mismatch:g}), and the loss does not correct for it",
            )
        )
    return tuple(out)


def remedies(outcome: Outcome, tokens: StoredTokens, limits: Limits) -> tuple[Remedy, ...]:
    """The smallest change against each problem, which brings no other with it."""
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
            return Remedy(
                problem,
                outcome.spec,
                words,
                f"The smallest {change} that cures it: {words}. Then {_measures(outcome)}.",
            )
    return Remedy(problem, None, "", "No change of a single number or part cures it.")


def _measures(outcome: Outcome) -> str:
    lost = 0.0 if outcome.lost is None else outcome.lost
    effective = 1.0 if outcome.effective is None else outcome.effective
    return f"{lost:.0%} of the gradient is cut off and the effective sample size is {effective:.2f}"


def _changes(spec: LossSpec) -> Iterator[tuple[str, list[tuple[str, LossSpec]]]]:
    """Changed specs in groups of equal size, the smallest change first."""
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
    """Where a spec as plain data holds numbers, and which. Averages and pulls change nothing that
    is measured here, and a clamp against overflow is no way to limit a step.
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
    """The spec with the part of a preset; None if it has it already, or if that does not fit."""
    try:
        changed = spec.replace(**{slot: getattr(PRESETS[name].spec, slot)})
    except PolicyLossError:
        return None
    return None if changed == spec else changed
