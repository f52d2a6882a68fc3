"""`choose`: which loss fits a run, by what its owner knows about it, with the reasons and sources.

The rules are data. Of those that name a preset, the first that fits decides; every other rule that
fits changes a slot, or only says something. `policyloss choose` and the page of the documentation
that asks the same questions read them from here.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any, NamedTuple

from policyloss.errors import InputError, unknown_name
from policyloss.explain.diff import part_text
from policyloss.explain.explanation import explain, section
from policyloss.parts.correction import Band, Truncate
from policyloss.presets import find_preset, preset
from policyloss.spec import LossSpec


class Question(NamedTuple):
    """What is asked, and the answers by their short names; the first one is the default."""

    name: str
    text: str
    answers: dict[str, str]


QUESTIONS = (
    Question(
        "signal",
        "What does the model learn from?",
        {
            "reward": "a reward of each completion",
            "teacher_tokens": "a teacher's log-probabilities of the sampled tokens",
            "teacher_distribution": "a teacher's whole distribution, or its k best entries",
            "reward_and_teacher": "a reward, and a teacher's log-probabilities beside it",
        },
    ),
    Question("critic", "Is there a critic?", {"no": "no", "yes": "yes, a value for each token"}),
    Question(
        "updates",
        "How far is the policy from the one that sampled the batch?",
        {
            "several": "several optimizer steps on each batch",
            "one": "one optimizer step on each batch, then new completions",
            "stale": "completions are one or more batches old, as in asynchronous training",
        },
    ),
    Question(
        "engine",
        "Who samples the completions?",
        {
            "separate": "an inference engine such as vLLM or SGLang",
            "same": "the model that is trained, with the same code",
        },
    ),
    Question("model", "Which model?", {"dense": "dense", "moe": "a mixture of experts"}),
    Question(
        "length",
        "How long are the completions?",
        {"long": "thousands of tokens, and of very different length", "short": "short, or alike"},
    ),
)


@dataclass(frozen=True)
class Rule:
    """Holds where every question of `when` has one of its answers.

    why: one or two sentences. source: who says so; empty for the source of the preset. preset: the
    loss to begin with. slots: what to put into its slots. anchor: what its ratio is to.
    """

    when: dict[str, str]
    why: str
    source: str = ""
    preset: str = ""
    slots: dict[str, Any] = field(default_factory=dict)
    anchor: str = ""

    def fits(self, answers: Mapping[str, str]) -> bool:
        """Whether it holds for these answers; `a|b` in `when` means either."""
        return all(answers[name] in values.split("|") for name, values in self.when.items())

    @property
    def cited(self) -> str:
        """Who says so."""
        return self.source or find_preset(self.preset).paper


_REWARD = "reward|reward_and_teacher"
_TIS = "Yao et al. 2025, 'Your efficient RL framework secretly brings you off-policy RL training'"
RULES = (
    Rule(
        {"signal": "teacher_distribution"},
        "A whole distribution says more about a token than one log-probability does. This is its "
        "exact reverse KL on the student's own completions; compute it in the head.",
        preset="opd_exact",
    ),
    Rule(
        {"signal": "teacher_tokens"},
        "The sampled tokens estimate the reverse KL to the teacher. The value is k1 and the "
        "gradient that of k2, because the gradient of k1 itself pulls nowhere.",
        preset="opd_kl",
    ),
    Rule(
        {"signal": "reward_and_teacher"},
        "The policy gradient of the reward and a pull to the teacher in one loss; kl.coef weighs "
        "the teacher.",
        preset="kdrl",
    ),
    Rule(
        {"critic": "yes"},
        "A critic gives each token an advantage of its own, so each token needs its own ratio. The "
        "dual clip bounds what a token with a negative advantage and a large ratio can do.",
        preset="ppo_dual_clip",
    ),
    Rule(
        {"model": "moe", "updates": "several"},
        "Experts are routed anew in every forward, which makes the ratios of single tokens jump. "
        "The geometric mean over the sequence evens that out.",
        "GSPO, arXiv 2507.18071",
        preset="gspo",
    ),
    Rule(
        {"updates": "stale"},
        "A clip silences the tokens whose ratio left its band, and with old completions these are "
        "many. CISPO bounds their weight and keeps their gradient, also with experts. The band of "
        "GSPO is narrower than what engine and trainer differ by.",
        "MiniMax-M1, a mixture of experts, arXiv 2506.13585; ScaleRL, arXiv 2510.13786",
        preset="cispo",
    ),
    Rule(
        {"updates": "one"},
        "On the first step the ratio is 1, where every clipped loss has the gradient of the plain "
        "policy gradient. So a clip would change nothing.",
        preset="gpg",
    ),
    Rule(
        {},
        "The clip leaves more room upwards than downwards, so that unlikely tokens can still gain "
        "probability, which keeps the entropy from collapsing.",
        "DAPO, arXiv 2503.14476",
        preset="dapo",
    ),
    Rule(
        {"signal": _REWARD, "updates": "one|several", "engine": "separate", "model": "dense"},
        "The engine's probabilities differ from the trainer's although the weights are the same. A "
        "truncated importance weight corrects for it; it needs rollout_logp from the engine.",
        f"{_TIS}; 2 is the default of verl, SkyRL and slime",
        slots={"correction": Truncate(2.0)},
    ),
    Rule(
        {"signal": _REWARD, "updates": "one|several", "engine": "separate", "model": "moe"},
        "With experts, engine and trainer disagree about a few tokens by large factors. Such "
        "tokens get no gradient; it needs rollout_logp from the engine.",
        "IcePop (Ring-1T, arXiv 2510.18855)",
        slots={"correction": Band(0.5, 5.0)},
    ),
    Rule(
        {"signal": _REWARD, "updates": "stale", "engine": "separate"},
        "The weights that sampled are gone when the batch is trained on, so only what the engine "
        "reported describes the policy that sampled. The ratio to rollout_logp holds staleness and "
        "mismatch together, and needs no correction.",
        "LlamaRL, arXiv 2505.24034: the ratio to the policy that sampled",
        anchor="rollout",
    ),
    Rule(
        {"signal": _REWARD, "updates": "stale", "engine": "same"},
        "old_logp must be that of the policy that sampled, so store it with the completions.",
        "the definition of the ratio",
    ),
    Rule(
        {"signal": "reward", "critic": "no", "length": "long"},
        "Where lengths differ, the average decides how much a token of a long answer counts; look "
        "at the page on denominators before you change it.",
        "DAPO, arXiv 2503.14476; Dr. GRPO, arXiv 2503.20783",
    ),
    Rule(
        {"signal": "reward", "critic": "yes", "length": "long"},
        "With lam below 1 a reward at the end hardly reaches the first of thousands of tokens: "
        "compute the critic's returns with gae(lam=1.0).",
        "VC-PPO, arXiv 2503.01491",
    ),
)


class Reason(NamedTuple):
    """A sentence, and who says so."""

    text: str
    source: str


@dataclass(frozen=True)
class Choice:
    """The loss for some answers. preset: the one it begins with. slots: what was changed in it."""

    answers: dict[str, str]
    preset: str
    slots: dict[str, Any]
    reasons: tuple[Reason, ...]

    @property
    def spec(self) -> LossSpec:
        """The loss."""
        return preset(self.preset).replace(**self.slots)

    @property
    def code(self) -> str:
        """The same as Python."""
        text = f'pl.preset("{self.preset}")'
        if not self.slots:
            return text
        changes = ", ".join(f"{slot}=pl.{part_text(part)}" for slot, part in self.slots.items())
        return f"{text}.replace({changes})"

    @property
    def advantages(self) -> str:
        """Which advantages go with it."""
        if self.answers["signal"].startswith("teacher"):
            return "zeros: the teacher is the only signal."
        if self.answers["critic"] == "yes":
            return "advantage.gae, with the values of the critic."
        return explain(self.preset).advantages

    def elsewhere(self) -> dict[str, list[str]]:
        """What each framework calls its parts."""
        names: dict[str, list[str]] = {}
        for entry in explain(self.spec).elsewhere:
            for framework, name in entry.names.items():
                names.setdefault(framework, []).append(f"{entry.part}: {name}")
        return names

    def to_dict(self) -> dict[str, Any]:
        """The same as plain data."""
        return {
            "answers": self.answers,
            "preset": self.preset,
            "code": self.code,
            "spec": self.spec.to_dict(),
            "advantages": self.advantages,
            "reads": list(self.spec.reads),
            "reasons": [reason._asdict() for reason in self.reasons],
        }

    def __str__(self) -> str:
        asked = [f"- {q.text} {q.answers[self.answers[q.name]]}." for q in QUESTIONS]
        return "\n\n".join(
            section(title, lines)
            for title, lines in (
                ("", [f"  {self.code}"]),
                ("Because", [f"- {text} ({source})" for text, source in self.reasons]),
                ("Reads", [", ".join(("logp", "advantages", "mask", *self.spec.reads))]),
                ("Advantages", [self.advantages]),
                ("Your answers", asked),
            )
        )


def choose(**answers: str) -> Choice:
    """The loss for these answers to `QUESTIONS`; a question that is left out has its default."""
    complete = {q.name: answers.pop(q.name, next(iter(q.answers))) for q in QUESTIONS}
    if answers:
        raise InputError(unknown_name("question", next(iter(answers)), list(complete)))
    for question in QUESTIONS:
        if complete[question.name] not in question.answers:
            raise InputError(
                f"{question.name} is {complete[question.name]!r}; the answers are "
                f"{', '.join(map(repr, question.answers))}."
            )
    fitting = [rule for rule in RULES if rule.fits(complete)]
    base = next(rule for rule in fitting if rule.preset)
    slots = {slot: part for rule in fitting for slot, part in rule.slots.items()}
    for rule in fitting:
        if rule.anchor:
            ratio: Any = preset(base.preset).ratio
            slots["ratio"] = replace(ratio, anchor=rule.anchor)
    reasons = [Reason(rule.why, rule.cited) for rule in fitting if rule is base or not rule.preset]
    return Choice(complete, base.preset, slots, tuple(reasons))


def all_choices() -> list[Choice]:
    """The choice for every combination of answers."""
    names = [question.name for question in QUESTIONS]
    combinations = product(*(question.answers for question in QUESTIONS))
    return [choose(**dict(zip(names, answers, strict=True))) for answers in combinations]


def choose_command(argv: Sequence[str]) -> int:
    """`policyloss choose`: the loss for what is known about a run, with the reasons."""
    lines = [
        f"--{q.name}: {q.text}\n" + "\n".join(f"    {k:<22}{v}" for k, v in q.answers.items())
        for q in QUESTIONS
    ]
    parser = argparse.ArgumentParser(
        prog="policyloss choose",
        description="Name a loss for what you know about your run, with the reasons.",
        epilog="The questions; the first answer is the default.\n\n" + "\n".join(lines),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    for question in QUESTIONS:
        parser.add_argument(f"--{question.name}", choices=list(question.answers))
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    options = vars(parser.parse_args(argv))
    as_json = options.pop("json")
    choice = choose(**{name: value for name, value in options.items() if value is not None})
    text = json.dumps(choice.to_dict(), indent=2, ensure_ascii=False) if as_json else str(choice)
    print(text, flush=True)
    return 0
