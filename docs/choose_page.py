"""Makes docs/choose.md, "Which loss should I use?", and the form on the site, from the rules of
`policyloss.choose`.
"""

from __future__ import annotations

import json
from typing import Any

from docs.markdown import GENERATED, fenced, join, linked, table
from policyloss.choose import QUESTIONS, RULES, Choice, ChoiceRule, all_choices, choose

# The place of the form on the site; plain Markdown has only the sentence.
FORM = "In a terminal, `policyloss choose --help` asks the same questions."


def choose_page() -> str:
    """The page."""
    about = (
        "Answer as many questions about your run as you can. The result is a loss, with a reason "
        "and a source for each part. It is a starting point: change a part if your run needs it, "
        "and let [the doctor](doctor.md) read the run. [The stress chart](stress.md) shows which "
        "losses survive which difficulty on a small task."
    )
    example = 'print(choose(updates="stale", engine="separate", model="moe"))'
    return join(
        "# Which loss should I use?",
        GENERATED,
        about,
        FORM,
        "## The questions",
        table(["question", "answer", "meaning"], _question_rows()),
        "## With a reward and no critic",
        usual_table(),
        "## Every rule",
        "Of the rules that name a loss, the first that fits decides. Every other rule that fits "
        "changes a slot of it, or only adds a note.",
        table(["where", "then", "because", "source"], [_rule_row(rule) for rule in RULES]),
        "## In Python",
        fenced(f"from policyloss.choose import choose\n\n{example}", "python"),
    )


def _question_rows() -> list[list[str]]:
    return [
        [f"{question.text} (`{question.name}`)" if i == 0 else "", f"`{name}`", meaning]
        for question in QUESTIONS
        for i, (name, meaning) in enumerate(question.answers.items())
    ]


def usual_table() -> str:
    """The loss for the answers that differ most often."""
    answers = {question.name: question.answers for question in QUESTIONS}
    rows = [
        [answers["model"][model], answers["updates"][updates], answers["engine"][engine], cell]
        for model in answers["model"]
        for updates in answers["updates"]
        for engine in answers["engine"]
        for cell in [_code_cell(choose(model=model, updates=updates, engine=engine))]
    ]
    return table(["model", "policy", "sampled by", "loss"], rows)


def _code_cell(choice: Choice) -> str:
    return f"`{choice.code}` ([`{choice.preset}`](presets/{choice.preset}.md))"


def _rule_row(rule: ChoiceRule) -> list[str]:
    where = ", ".join(
        f"{name} is {' or '.join(f'`{value}`' for value in values.split('|'))}"
        for name, values in rule.when.items()
    )
    preset = f"[`{rule.preset}`](presets/{rule.preset}.md)" if rule.preset else ""
    slots = ", ".join(f"`{slot}={part}`" for slot, part in rule.slots.items())
    return [where or "elsewhere", preset or slots, rule.why, linked(rule.citation)]


def form() -> str:
    """The form, for the site: the script fills it from the data, which holds every answer."""
    reasons: dict[tuple[str, str], int] = {}
    choices: dict[str, Any] = {}
    frameworks: dict[str, dict[str, list[str]]] = {}
    for choice in all_choices():
        frameworks.setdefault(choice.code, choice.elsewhere())
        choices[" ".join(choice.answers.values())] = {
            "code": choice.code,
            "preset": choice.preset,
            "reasons": [reasons.setdefault(reason, len(reasons)) for reason in choice.reasons],
            "advantages": choice.advantages,
            "reads": choice.reads,
        }
    data = {
        "questions": [question._asdict() for question in QUESTIONS],
        "reasons": [list(reason) for reason in reasons],
        "choices": choices,
        "frameworks": frameworks,
    }
    text = json.dumps(data, ensure_ascii=False).replace("<", "\\u003c")
    return join(
        '<form id="choose-form" class="pst-js-only"></form>',
        f'<script type="application/json" id="choose-data">{text}</script>',
        FORM,
    )
