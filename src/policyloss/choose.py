"""`choose`: the loss that fits a run, from answers to a few questions, with reasons and sources.

The rules are data. The first rule that fits and names a preset decides; every other rule that fits
changes a slot or adds a remark. `policyloss choose` and a page of the documentation read them.

`losses.json` holds every preset and every loss that `choose` can return, as data, so the command
works without torch. `make docs` writes the file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from policyloss.commands import JSON, Argument, read_words
from policyloss.errors import InputError, unknown_name
from policyloss.output import section

if TYPE_CHECKING:
    from policyloss.spec import LossSpec


@cache
def read_losses() -> dict[str, Any]:
    """The contents of `losses.json`: the presets, and the losses to choose, by their code."""
    data: dict[str, Any] = json.loads(Path(__file__).with_name("losses.json").read_bytes())
    return data


class Question(NamedTuple):
    """A question, and its answers by their short names; the first answer is the default."""

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
            "reward_and_teacher": "a reward, and also a teacher's log-probabilities",
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
class ChoiceRule:
    """A rule. It fits if every question in `when` was answered as `when` states.

    why: the reason, in one or two sentences. source: the source of the rule; empty for the source
    of the preset. preset: the loss to begin with. slots: the parts to put into slots of the preset,
    as code.
    """

    when: dict[str, str]
    why: str
    source: str = ""
    preset: str = ""
    slots: dict[str, str] = field(default_factory=dict)

    def fits(self, answers: Mapping[str, str]) -> bool:
        """Whether the rule fits these answers; `a|b` in `when` means answer a or answer b."""
        return all(answers[name] in values.split("|") for name, values in self.when.items())

    @property
    def citation(self) -> str:
        """The source of the rule."""
        return self.source or str(read_losses()["presets"][self.preset]["paper"])


_REWARD = "reward|reward_and_teacher"
_TIS = "Yao et al. 2025, 'Your efficient RL framework secretly brings you off-policy RL training'"
RULES = (
    ChoiceRule(
        {"signal": "teacher_distribution"},
        "A whole distribution holds more information than one log-probability. This is its "
        "exact reverse KL on the student's own completions; compute it in the head.",
        preset="opd_exact",
    ),
    ChoiceRule(
        {"signal": "teacher_tokens"},
        "The sampled tokens estimate the reverse KL to the teacher. The value is k1 and the "
        "gradient that of k2, because the gradient of k1 itself pulls nowhere.",
        preset="opd_kl",
    ),
    ChoiceRule(
        {"signal": "reward_and_teacher"},
        "The policy gradient of the reward and a pull to the teacher in one loss; kl.coef weighs "
        "the teacher.",
        preset="kdrl",
    ),
    ChoiceRule(
        {"critic": "yes"},
        "A critic gives each token an advantage of its own, so each token needs its own ratio. The "
        "dual clip bounds the loss of a token with a negative advantage and a large ratio.",
        preset="ppo_dual_clip",
    ),
    ChoiceRule(
        {"model": "moe", "updates": "several"},
        "Every forward routes the experts again, which makes the ratios of single tokens jump. "
        "The geometric mean over the sequence evens that out.",
        "GSPO, arXiv 2507.18071",
        preset="gspo",
    ),
    ChoiceRule(
        {"updates": "stale", "model": "moe"},
        "A clip silences the tokens whose ratio left its band, and with old completions these are "
        "many. CISPO bounds their weight and keeps their gradient, also with experts. The band of "
        "GSPO is narrower than what engine and trainer differ by.",
        "MiniMax-M1, a mixture of experts, arXiv 2506.13585; ScaleRL, arXiv 2510.13786",
        preset="cispo",
    ),
    ChoiceRule(
        {"updates": "one"},
        "On the first step the ratio is 1, where every clipped loss has the gradient of the plain "
        "policy gradient. So a clip would change nothing.",
        preset="gpg",
    ),
    ChoiceRule(
        {},
        "The clip leaves more room upwards than downwards, so that unlikely tokens can still gain "
        "probability, which keeps the entropy from collapsing.",
        "DAPO, arXiv 2503.14476",
        preset="dapo",
    ),
    ChoiceRule(
        {"signal": _REWARD, "updates": "one|several", "engine": "separate", "model": "dense"},
        "The engine's probabilities differ from the trainer's although the weights are the same. A "
        "truncated importance weight corrects for it; it needs rollout_logp from the engine.",
        f"{_TIS}; 2 is the default of verl, SkyRL and slime",
        slots={"correction": "pl.Truncate(high=2)"},
    ),
    ChoiceRule(
        {"signal": _REWARD, "updates": "one|several", "engine": "separate", "model": "moe"},
        "With experts, engine and trainer disagree about a few tokens by large factors. Such "
        "tokens get no gradient; it needs rollout_logp from the engine.",
        "IcePop (Ring-1T, arXiv 2510.18855)",
        slots={"correction": "pl.Band(low=0.5, high=5)"},
    ),
    ChoiceRule(
        {"signal": _REWARD, "updates": "stale", "model": "dense"},
        "A bad completion of an old policy pushes hardest where the policy has left it already, "
        "and this destroys a run. Such completions are masked, by the log-probabilities of the "
        "policy that sampled: pass them as rollout_logp, and recompute old_logp. 0.01 nats per "
        "token are above the mismatch of an engine.",
        "OPSM, DeepSeek-V3.2, arXiv 2512.02556; of all corrections on the stress chart "
        "(docs/stress.md), this one lost least with completions 16 steps old",
        slots={"correction": "pl.OPSM(delta=0.01, source='rollout')"},
    ),
    ChoiceRule(
        {"signal": _REWARD, "updates": "stale", "engine": "separate", "model": "moe"},
        "The weights that sampled are gone when the batch is trained on, so only the engine's "
        "log-probabilities describe the policy that sampled. The ratio to rollout_logp holds "
        "staleness and mismatch together, and needs no correction.",
        "LlamaRL, arXiv 2505.24034: the ratio to the policy that sampled",
        slots={"ratio": "pl.TokenRatio(anchor='rollout')"},
    ),
    ChoiceRule(
        {"signal": _REWARD, "updates": "stale", "engine": "same", "model": "moe"},
        "old_logp must be that of the policy that sampled, so store it with the completions.",
        "the definition of the ratio",
    ),
    ChoiceRule(
        {"signal": "reward", "critic": "no", "length": "long"},
        "Where lengths differ, the average decides how much a token of a long answer counts; look "
        "at the page on denominators before you change it.",
        "DAPO, arXiv 2503.14476; Dr. GRPO, arXiv 2503.20783",
    ),
    ChoiceRule(
        {"signal": "reward", "critic": "yes", "length": "long"},
        "With lam below 1 a reward at the end hardly reaches the first of thousands of tokens: "
        "compute the critic's returns with gae(lam=1.0).",
        "VC-PPO, arXiv 2503.01491",
    ),
)


class Reason(NamedTuple):
    """A sentence and its source."""

    text: str
    source: str


@dataclass(frozen=True)
class Choice:
    """The loss for some answers.

    rules: the rule that names the preset, and the other rules that fit, which change slots or add a
    remark.
    """

    answers: dict[str, str]
    rules: tuple[ChoiceRule, ...]

    @property
    def preset(self) -> str:
        """The name of the preset that the loss begins with."""
        return next(rule.preset for rule in self.rules if rule.preset)

    @property
    def reasons(self) -> tuple[Reason, ...]:
        """A reason for each rule."""
        return tuple(Reason(rule.why, rule.citation) for rule in self.rules)

    @property
    def spec(self) -> LossSpec:
        """The loss."""
        from policyloss.spec import LossSpec

        return LossSpec.from_dict(self._stored["spec"])

    @property
    def _stored(self) -> dict[str, Any]:
        stored: dict[str, Any] = read_losses()["chosen"][self.code]
        return stored

    @property
    def code(self) -> str:
        """The loss as Python code."""
        slots = [f"{slot}={part}" for rule in self.rules for slot, part in rule.slots.items()]
        changes = f".replace({', '.join(slots)})" if slots else ""
        return f'pl.preset("{self.preset}"){changes}'

    @property
    def advantages(self) -> str:
        """The advantages to use with this loss."""
        if self.answers["signal"].startswith("teacher"):
            return "zeros: the teacher is the only signal."
        if self.answers["critic"] == "yes":
            return "advantage.gae, with the values of the critic."
        return str(read_losses()["presets"][self.preset]["advantages"])

    @property
    def reads(self) -> list[str]:
        """The tensors that the loss is computed from."""
        return ["logp", "advantages", "mask", *self._stored["reads"]]

    def elsewhere(self) -> dict[str, list[str]]:
        """The names of the loss's parts in each framework."""
        from policyloss.explanations import explain

        names: dict[str, list[str]] = {}
        for entry in explain(self.spec).elsewhere:
            for framework, name in entry.names.items():
                names.setdefault(framework, []).append(f"{entry.part}: {name}")
        return names

    def to_dict(self) -> dict[str, Any]:
        """The choice as plain data."""
        return {
            "answers": self.answers,
            "preset": self.preset,
            "code": self.code,
            "spec": self._stored["spec"],
            "advantages": self.advantages,
            "reads": self._stored["reads"],
            "reasons": [reason._asdict() for reason in self.reasons],
        }

    def __str__(self) -> str:
        asked = [f"- {q.text} {q.answers[self.answers[q.name]]}." for q in QUESTIONS]
        return "\n\n".join(
            section(title, lines)
            for title, lines in (
                ("", [f"  {self.code}"]),
                ("Because", [f"- {text} ({source})" for text, source in self.reasons]),
                ("Reads", [", ".join(self.reads)]),
                ("Advantages", [self.advantages]),
                ("Your answers", asked),
            )
        )


def choose(**answers: str) -> Choice:
    """Choose a loss by answers to `QUESTIONS`; a question that is left out has its default."""
    complete = {q.name: answers.pop(q.name, next(iter(q.answers))) for q in QUESTIONS}
    if answers:
        raise InputError(unknown_name("question", next(iter(answers)), list(complete)))
    for question in QUESTIONS:
        if complete[question.name] not in question.answers:
            known, value = ", ".join(map(repr, question.answers)), complete[question.name]
            raise InputError(f"{question.name} is {value!r}; the answers are {known}.")
    fitting = [rule for rule in RULES if rule.fits(complete)]
    base = next(rule for rule in fitting if rule.preset)
    return Choice(complete, tuple(rule for rule in fitting if rule is base or not rule.preset))


def all_choices() -> list[Choice]:
    """The choice for every combination of answers."""
    names = [question.name for question in QUESTIONS]
    combinations = product(*(question.answers for question in QUESTIONS))
    return [choose(**dict(zip(names, answers, strict=True))) for answers in combinations]


def _argument(question: Question) -> Argument:
    answers = "; ".join(
        name if name == meaning else f"{name}: {meaning}"
        for name, meaning in question.answers.items()
    )
    kind = Literal[tuple(question.answers)]  # type: ignore[valid-type]
    first = next(iter(question.answers))
    return Argument(question.name, kind, first, f"{question.text} {answers}.")


ARGUMENTS = [*map(_argument, QUESTIONS), JSON]


def choose_command(words: Sequence[str]) -> int:
    """`policyloss choose`: the loss that fits a run, with the reasons."""
    answers = read_words("choose", ARGUMENTS, words)
    as_json = answers.pop(JSON.name, JSON.default)
    choice = choose(**answers)
    text = json.dumps(choice.to_dict(), indent=2, ensure_ascii=False) if as_json else str(choice)
    print(text, flush=True)
    return 0
