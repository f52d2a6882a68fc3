"""`what_if`: tries losses on stored tokens and returns a `WhatIf`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from policyloss import notebook
from policyloss.arguments import description
from policyloss.catalogue import PRESETS, AnyLoss, as_spec
from policyloss.errors import InputError, PolicyLossError, match_name, unknown_name
from policyloss.output import section
from policyloss.spec import LossSpec
from policyloss_lab.whatif.outcome import LIMITED, Limits, Outcome, Remedy, outcome_of, remedies
from policyloss_lab.whatif.tokens import StoredTokens, read
from policyloss_lab.whatif.weights import EachToken, HeadWeight, Parameters, Products, weights_for

YOURS = "yours"
SAME_WEIGHTS = 0.05  # nats, the largest median gap from stored to recomputed log-probabilities


@dataclass(frozen=True)
class WhatIf:
    """The result of `what_if`: a comparison of losses on the same tokens.

    outcomes: one for each loss that could be tried, yours first if there is one. refused: {name:
    reason} of the other losses. by_token: the cosines between the losses' gradients with
    respect to the log-probability of each token, and the change of each sequence's log-probability
    by a step along each. by_model: the same with the parameters of a model, or None. through: the
    parameters of `by_model`, "head" or (all) "parameters"; "tokens" without a model. remedies: the
    changes that cure the problems of your loss.
    """

    tokens: StoredTokens
    outcomes: tuple[Outcome, ...]
    refused: Mapping[str, str]
    by_token: Products
    by_model: Products | None = None
    through: str = EachToken.name
    remedies: tuple[Remedy, ...] = ()
    notes: tuple[str, ...] = ()

    def __getitem__(self, name: str) -> Outcome:
        """The outcome of a loss by its name; yours is called "yours"."""
        names = {outcome.name: outcome for outcome in self.outcomes}
        if name in names:
            return names[name]
        if name in self.refused:
            raise InputError(f"{name} could not be tried: {self.refused[name]}")
        raise InputError(unknown_name("loss", name, names))

    @property
    def products(self) -> Products:
        """`by_model` if there is a model, else `by_token`."""
        return self.by_token if self.by_model is None else self.by_model

    def rows(self) -> list[dict[str, Any]]:
        """One row for each loss: its numbers by name, None if undefined."""
        change = self.products.unit_change.tolist()
        cosine, by_model = self.by_token.cosine[:, 0].tolist(), self.by_model
        return [
            {
                "name": outcome.name,
                "loss": outcome.metrics.get("loss"),
                "effective": outcome.effective,
                "lost": outcome.lost,
                "limited": outcome.share(*LIMITED),
                "rejected": outcome.share("rejected"),
                "norm": outcome.norm,
                "mass": outcome.masses(self.tokens),
                "cosine": cosine[i],
                "model_cosine": None if by_model is None else float(by_model.cosine[i, 0]),
                "change": change[i],
            }
            for i, outcome in enumerate(self.outcomes)
        ]

    def to_dict(self) -> dict[str, Any]:
        """The result as plain data: a row for each loss, all cosines, remedies, notes."""
        return {
            "tokens": int(self.tokens.inputs.mask.sum()),
            "sequences": self.tokens.lengths.shape[0],
            "through": self.through,
            "losses": self.rows(),
            "cosine": self.by_token.cosine.tolist(),
            "model_cosine": None if self.by_model is None else self.by_model.cosine.tolist(),
            "refused": dict(self.refused),
            "remedies": [
                {
                    "problem": r.problem.name,
                    "measured": r.problem.sentence,
                    "change": r.change,
                    "sentence": r.sentence,
                    "spec": None if r.spec is None else r.spec.to_dict(),
                }
                for r in self.remedies
            ],
            "notes": list(self.notes),
        }

    def to_json(self) -> str:
        """`to_dict` as text."""
        return json.dumps(self.to_dict(), indent=2, ensure_ascii=False)

    def __str__(self) -> str:
        columns, rows = self.table()
        lines = [[column.name for column in columns], *rows]
        widths = [max(len(line[i]) for line in lines) for i in range(len(columns))]
        shown = [
            "  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])]).rstrip()
            for line in lines
        ]
        legend = [f"- {column.name}: {column.meaning}" for column in columns[1:]]
        refused = [f"- {why[:-1]}: {', '.join(names)}" for why, names in self.not_tried().items()]
        about = section("", [f"{self.about}.", *(f"Note: {note}" for note in self.notes)])
        parts = [section("Verdict", self.verdict()), "\n".join(shown), section("Columns", legend)]
        parts += [section("Not tried", refused)] if refused else []
        return "\n\n".join([about, *parts])

    def _repr_html_(self) -> str:
        columns, rows = self.table()
        refused = [f"{', '.join(names)}: {why}" for why, names in self.not_tried().items()]
        table = notebook.table([column.name for column in columns], rows)
        verdict = notebook.html_list([*self.verdict(), *self.notes])
        return verdict + table + notebook.html_list(refused)

    @property
    def about(self) -> str:
        """How many tokens and sequences, and `through`, as text."""
        count, sequences = int(self.tokens.inputs.mask.sum()), self.tokens.lengths.shape[0]
        return f"{count:,} tokens of {sequences:,} sequences, {THROUGH_WORDS[self.through]}"

    def verdict(self) -> list[str]:
        """A sentence for each problem of your loss, or one sentence if there is none."""
        if self.outcomes[0].name != YOURS:
            return ["None: no loss of yours is among these."]
        wrong = [f"- {problem} {cure}" for problem, cure in self.problems()]
        return wrong or ["Nothing is wrong with your loss on these tokens."]

    def problems(self) -> list[tuple[str, str]]:
        """Pairs of sentences: problems of your loss, and the one change that cures them."""
        problems: dict[str, list[str]] = {}
        for remedy in self.remedies:
            problems.setdefault(remedy.sentence, []).append(remedy.problem.sentence)
        texts = [("; ".join(sentences), cure) for cure, sentences in problems.items()]
        return [(f"{text[0].upper()}{text[1:]}.", cure) for text, cure in texts]

    def table(self) -> tuple[list[Column], list[list[str]]]:
        """The columns that hold a number for any loss, and each loss's row as strings."""
        rows = [cells(row) for row in self.rows()]
        shown = [i for i in range(len(COLUMNS)) if any(row[i] != UNKNOWN for row in rows)]
        return [COLUMNS[i] for i in shown], [[row[i] for i in shown] for row in rows]

    def not_tried(self) -> dict[str, list[str]]:
        """{reason: the losses that could not be tried}."""
        names: dict[str, list[str]] = {}
        for name, why in self.refused.items():
            names.setdefault(why, []).append(name)
        return names


class Column(NamedTuple):
    """A column of the table. name: in a terminal. title: on the page."""

    name: str
    title: str
    meaning: str


COLUMNS = (
    Column("loss", "loss", "the loss"),
    Column(
        "effective",
        "effective sample size",
        "effective sample size: the share of the tokens that ratio, trust region and correction "
        "let count, 1 on policy",
    ),
    Column("cut off", "gradient cut off", "share of the on-policy gradient that is cut to 0"),
    Column("limited", "tokens limited", "share of tokens at a bound of the trust region"),
    Column("rejected", "tokens rejected", "share of tokens that the correction rejects"),
    Column("A > 0", "gradient at A > 0", "share of the gradient where the advantage is above 0"),
    Column("cosine", "cosine by token", "with the first loss's gradient, a weight for each token"),
    Column("by model", "cosine by model", "the same cosine through the model"),
)
UNKNOWN = "–"
THROUGH_WORDS = {
    EachToken.name: "each log-probability a weight of its own",
    HeadWeight.name: "through the weight of the head",
    Parameters.name: "through all parameters of the model",
}


def cells(row: Mapping[str, Any]) -> list[str]:
    """A row of the table as texts, in the order of `COLUMNS`."""
    positive = row["mass"]["sign"]["advantage above 0"]
    shares = [row[name] for name in ("lost", "limited", "rejected")] + [positive]
    cosines = [row["cosine"], row["model_cosine"]]
    return [
        row["name"],
        _number(row["effective"], ".2f"),
        *(_number(x, ".0%") for x in shares),
        *(_number(x, ".3f") for x in cosines),
    ]


def _number(x: float | None, form: str) -> str:
    return UNKNOWN if x is None else format(x, form)


def what_if(
    source: str | Path | Mapping[str, Any] | StoredTokens,
    losses: Sequence[AnyLoss] | Mapping[str, AnyLoss] | None = None,
    *,
    spec: AnyLoss | None = None,
    step: int | str | None = None,
    model: Any = None,
    temperature: float = 1.0,
    through: str | None = None,
    limits: Limits | None = None,
) -> WhatIf:
    """Compare losses on the same tokens.

        tokens = {"logp": logp, "old_logp": old_logp, "advantages": advantages, "mask": mask}
        result = lab.what_if(tokens, ["ppo", "gspo", "cispo"], spec="dapo")
        print(result)  # a row for each loss (docs/what_if.md)
        result["gspo"].gradient  # of the loss with respect to each log-probability

    source: a run directory, a .jsonl or .safetensors file of tokens (docs/what_if.md lists the
    names), or the arguments of `policy_loss` by name, padded `[B, T]` or packed `[N]`; optionally
    "rewards" `[S]`, and for a model "ids" (one per token) and "prompts", a list of token ids for
    each sequence. losses: presets or specs to try, by default every preset. spec: your loss, with
    which the others are compared; by default, that of the run directory, else none. step: the
    stored step of a run to use, or "all"; by default, the last step with a nonzero advantage.

    model: a Hugging Face model, to compare the gradients of its weights. temperature: the sampler's
    temperature, for the model's log-probabilities. through: the variables to differentiate by:
    "parameters" (all parameters of the model), "head" (the weight of its head) or "tokens" (the
    log-probabilities, without the model). The default is "tokens" without a model; with a model, it
    is "parameters" if the gradients of all losses hold at most 2²⁸ numbers together, else "head".
    limits: thresholds of the warnings about `spec` (`policyloss_lab.whatif.Limits`).
    """
    if through is not None and through not in THROUGH_WORDS:
        raise InputError(unknown_name("through", through, THROUGH_WORDS))
    if model is None and through not in (None, EachToken.name):
        raise InputError(f"through={through!r} needs a model: pass one, or leave it out.")
    if isinstance(source, Mapping):
        source = StoredTokens.of(source)
    tokens = source if isinstance(source, StoredTokens) else read(Path(source), step)
    notes = list(tokens.notes)
    yours = _yours(tokens, spec, notes)
    outcomes, refused = [], {}
    for name, loss in {**yours, **_losses_by_name(losses)}.items():
        try:
            outcomes.append(outcome_of(name, loss, tokens))
        except PolicyLossError as error:
            refused[name] = str(error)
    if not outcomes:
        reasons = "; ".join(f"{name}: {why}" for name, why in refused.items())
        raise InputError(f"no loss could be tried on these tokens: {reasons}")
    gradients = torch.stack([outcome.gradient for outcome in outcomes])
    by_token = EachToken().products(gradients, tokens)
    weights = weights_for(model, len(outcomes), temperature, through)
    by_model = None
    if not isinstance(weights, EachToken):
        by_model = weights.products(gradients, tokens)
        apart = Parameters(model, temperature).logp(tokens) - tokens.inputs.logp
        if (gap := float(apart[tokens.inputs.mask].abs().median())) > SAME_WEIGHTS:
            notes.append(
                f"The model's log-probabilities of these tokens are {gap:.2g} nats from the stored "
                "ones (median): it does not have the weights that the tokens were stored with."
            )
    cures: tuple[Remedy, ...] = ()
    if yours and outcomes[0].name == YOURS:
        cures = remedies(outcomes[0], tokens, limits or Limits())
    return WhatIf(
        tokens, tuple(outcomes), refused, by_token, by_model, weights.name, cures, tuple(notes)
    )


def _yours(tokens: StoredTokens, spec: AnyLoss | None, notes: list[str]) -> dict[str, LossSpec]:
    """{"yours": your loss}; {} and a note if it cannot be read."""
    if spec is not None:
        return {YOURS: as_spec(spec)}
    if tokens.loss is None:
        return {}
    try:
        return {YOURS: LossSpec.from_dict(tokens.loss)}
    except (PolicyLossError, TypeError, AttributeError, RecursionError) as error:
        notes.append(f"The loss of the run cannot be read: {error}")
        return {}


def _losses_by_name(losses: Any) -> dict[str, LossSpec]:
    if losses is None:
        return {name: preset.spec for name, preset in PRESETS.items()}
    if isinstance(losses, (str, LossSpec)) or not isinstance(losses, (Sequence, Mapping)):
        raise InputError(f"losses must be a list or dict of losses, got {description(losses)}.")
    if isinstance(losses, Mapping):
        return {str(name): as_spec(loss, "losses") for name, loss in losses.items()}
    out = {}
    for i, loss in enumerate(losses):
        name = (match_name(loss, PRESETS) or loss) if isinstance(loss, str) else f"loss {i + 1}"
        out[name] = as_spec(loss, "losses")
    return out
