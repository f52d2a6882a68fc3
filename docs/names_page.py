"""Writes docs/names.md: the names of options and parts in each framework, and names with several
meanings.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor

import policyloss as pl
from docs.markdown import GENERATED, fenced, join, table
from docs.names.called import FRAMEWORKS, REQUIRED, Argument, Cell, Option
from docs.names.homonyms import HOMONYMS, SAME
from docs.names.meanings import BATCH, REWARDS, Homonym, Meaning, Same
from docs.names.options import OPTIONS
from policyloss.explanations.formula import VOCABULARY, formula, names_in
from policyloss.explanations.framework_names import ELSEWHERE, FrameworkNames


def names_page() -> str:
    """The page."""
    about = (
        "The names of options and parts in each framework, and the words that mean different "
        "things in two of them. `pl.explain(spec)` lists the names of one loss; "
        "[frameworks.md](frameworks.md) shows how to use this library inside each framework."
    )
    return join(
        "# Names",
        GENERATED,
        about,
        "Contents: [options and their defaults](#options), [what each framework calls "
        "it](#what-each-framework-calls-it), [one name, several "
        "meanings](#one-name-several-meanings).",
        options_section(),
        elsewhere_section(),
        homonyms_section(),
    )


# Options ------------------------------------------------------------------------------------------


def options_section() -> str:
    """The names of each option, with its default."""
    about = (
        "`name=default` is an option of the framework, `function(argument=default)` an argument; "
        "one without a default is required. verl: `actor.` stands for `actor_rollout_ref.actor.`, "
        "functions "
        "are those of `verl.trainer.ppo.core_algos` and `rollout_corr_helper`, as of 0.9.1. "
        "OpenRLHF 0.11.2, TRL 1.16.0 (`GRPOConfig`), ColossalChat as of 0.5.0 "
        "(`coati.distributed.loss`; `models.` for `coati.models.loss`). `pl.LossSpec()` is PPO: "
        "`Clip(0.2, 0.2)` and `TokenMean()`."
    )
    heading = ["option", "policyloss", *FRAMEWORKS]
    tables = []
    for group, rows in OPTIONS.items():
        cells = [
            [row.what, *(_cell(row.cell(who)) for who in ("policyloss", *FRAMEWORKS))]
            for row in rows
        ]
        tables += [f"### {group}", table(heading, cells)]
    return join("## Options", about, *tables)


def _cell(cell: Cell) -> str:
    lines: list[str] = []
    for function, said in groupby(
        cell, key=lambda one: one.function if isinstance(one, Argument) else ""
    ):
        if function:
            lines.append(f"`{function}({', '.join(_argument(one) for one in said)})`")
        else:
            lines += [
                f"`{one.name}={one.default!r}`" if isinstance(one, Option) else str(one)
                for one in said
            ]
    return "<br>".join(lines)


def _argument(said: Any) -> str:
    return said.parameter if said.default is REQUIRED else f"{said.parameter}={said.default!r}"


# Parts --------------------------------------------------------------------------------------------


def elsewhere_section() -> str:
    """The names of each part in each framework, one table per kind of part."""
    about = (
        "How each part is selected. In verl any preset can also be selected by its own name, "
        '`loss_mode="policyloss/<preset>"`, and in TRL any loss given as `policy_loss=`: see '
        "[frameworks.md](frameworks.md)."
    )
    parts: dict[str, list[list[str]]] = {}
    for entry in ELSEWHERE:
        parts.setdefault(entry.part, []).append([entry.what, *_by_framework(entry)])
    heading = ["meaning", *FRAMEWORKS, "others"]
    tables = [
        text
        for part, rows in parts.items()
        for text in (f"### {part.capitalize() if part != 'KL' else part}", table(heading, rows))
    ]
    return join("## What each framework calls it", about, *tables)


def _by_framework(entry: FrameworkNames) -> list[str]:
    """The entry's names: a cell for each framework with a drop-in, and one for all others."""
    cells, others = dict.fromkeys(FRAMEWORKS, ""), []
    for who, said in entry.names.items():
        first, *rest = who.split(", ")
        if first in cells:
            cells[first] = said
            others += [f"{', '.join(rest)}: as TRL"] if rest else []
        else:
            others.append(f"{who}: {said}")
    return [*cells.values(), "; ".join(others)]


# Homonyms -----------------------------------------------------------------------------------------


class Measured(NamedTuple):
    """The result of a meaning on the batch: a loss and its gradient, or other numbers."""

    loss: Tensor | None
    gradient: Tensor | None
    values: Tensor | None


def batch() -> dict[str, Tensor]:
    """The batch of the page, in float64."""
    return {name: _tensor(rows) for name, rows in BATCH.items()}


def _tensor(rows: list[Any]) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64 if _is_float(rows) else None)


def _is_float(rows: list[Any]) -> bool:
    return isinstance(rows[0][0] if isinstance(rows[0], list) else rows[0], float)


def measured(meaning: Meaning) -> Measured | None:
    """The result of the meaning on the batch; None where it is only described."""
    if meaning.spec is not None:
        return Measured(*loss_and_gradient(meaning.spec, batch(), meaning.counted), None)
    if not meaning.expression:
        return None
    names = {
        "pl": pl,
        "batch": batch(),
        "metric": metric,
        **{name: _tensor(x) for name, x in REWARDS.items()},
    }
    return Measured(
        None, None, torch.as_tensor(eval(meaning.expression, names), dtype=torch.float64)
    )


def metric(trust: Any, name: str) -> float:
    """A metric of a loss on the batch."""
    given: dict[str, Any] = batch()
    return pl.policy_loss(pl.LossSpec(trust=trust), **given).metrics.compute()[name]


def loss_and_gradient(
    spec: pl.LossSpec, given: dict[str, Tensor], counted: str
) -> tuple[Tensor, Tensor]:
    """The loss of a batch and its gradient in logp, with the counts of `Meaning.counted`."""
    logp = given["logp"].clone().requires_grad_()
    tensors: dict[str, Any] = {**given, "logp": logp}
    if counted == "micro":
        first, second = (
            pl.policy_loss(spec, **half, totals="local").loss for half in halves(tensors)
        )
        loss = (first + second) / 2
    elif counted == "rows":
        loss = pl.policy_loss(
            spec, **tensors, totals=pl.Totals(int(given["mask"].sum()), len(logp))
        ).loss
    else:
        loss = pl.policy_loss(spec, **tensors).loss
    (gradient,) = torch.autograd.grad(loss, logp)
    return loss.detach(), gradient


def halves(given: dict[str, Any]) -> list[dict[str, Any]]:
    """The batch as two micro-batches."""
    return [{name: x[rows] for name, x in given.items()} for rows in (slice(0, 2), slice(2, 4))]


def homonyms_section() -> str:
    """Names with several meanings, the result of each on one batch, and how they differ."""
    about = (
        "Each name below means several things. The numbers show that they differ: each is the "
        "result of a meaning on the batch printed here, in float64 (‖∇‖ is the length of the "
        "gradient in `logp`), computed when the page is written. The formulas are those of "
        "`pl.explain`, "
        "without the lines that all meanings share."
    )
    same = [f"- {one.says} (`{_changed(one.a)}` and `{_changed(one.b)}`)" for one in SAME]
    same.append(
        "- SAPO's temperature where the advantage is 0 (EasyR1 takes the positive one): the loss "
        "is 0 with either."
    )
    return join(
        "## One name, several meanings",
        about,
        fenced(batch_code(), "python"),
        *(homonym_section(homonym) for homonym in HOMONYMS),
        "### Different words for the same thing",
        "\n".join(same),
        "### Words of the formulas",
        "\n".join(
            f"- `{meaning.partition(': ')[0]}`: {meaning.partition(': ')[2]}"
            for meaning in _vocabulary()
        ),
    )


def batch_code() -> str:
    """Python that makes the batch and the rewards of the page."""
    tensors = [f'    "{name}": {_tensor_code(x)},' for name, x in BATCH.items()]
    rewards = [f"{name} = {_tensor_code(x)}" for name, x in REWARDS.items()]
    return "\n".join([_HEAD, "batch = {", *tensors, "}", *rewards, _METRIC])


_HEAD = """\
import torch

import policyloss as pl


def rows(*numbers):
    return torch.tensor(numbers, dtype=torch.float64)

"""
_METRIC = """

def metric(trust, name):
    return pl.policy_loss(pl.LossSpec(trust=trust), **batch).metrics.compute()[name]"""


def _tensor_code(x: list[Any]) -> str:
    if isinstance(x[0], list):
        flags = isinstance(x[0][0], bool)
        lists = ", ".join(f"[{', '.join(str(int(n) if flags else n) for n in row)}]" for row in x)
        return f"rows({lists}){'.bool()' if flags else ''}"
    return f"torch.tensor({x!r}{', dtype=torch.float64' if _is_float(x) else ''})"


def homonym_section(homonym: Homonym) -> str:
    """One name: its meanings, the numbers, how the formulas differ, and the specs."""
    found = [measured(meaning) for meaning in homonym.meanings]
    rows = [[m.who, m.says, *_numbers(x)] for m, x in zip(homonym.meanings, found, strict=True)]
    return join(
        f"### {homonym.name}",
        homonym.about,
        table(["who", "means", "loss or value", "‖∇‖"], rows),
        differing_lines(homonym),
        code_block(homonym),
    )


def _numbers(found: Measured | None) -> list[str]:
    if found is None:
        return ["", ""]
    if found.loss is not None and found.gradient is not None:
        return [_shown(found.loss.item()), _shown(found.gradient.norm().item())]
    assert found.values is not None
    return [", ".join(map(_shown, found.values.reshape(-1).tolist())), ""]


def _shown(x: float) -> str:
    """Six digits; a number within rounding of 0 is 0."""
    return f"{round(x, 12) + 0.0:.6g}"


def differing_lines(homonym: Homonym) -> str:
    """The lines of the formulas that not all meanings share, as a block;
    "" where there is nothing to compare.
    """
    formulas = {m.who: printed_lines(m) for m in homonym.meanings if m.spec is not None}
    if len(formulas) < 2:
        return ""
    shared = set.intersection(*map(set, formulas.values()))
    blocks = [
        line
        for who, lines in formulas.items()
        for line in (who, *(f"  {one}" for one in lines if one not in shared))
    ]
    return fenced("\n".join(blocks), "text")


def printed_lines(meaning: Meaning) -> list[str]:
    """The formula of a meaning, with the names of its counts."""
    assert meaning.spec is not None
    lines = [str(line) for line in formula(meaning.spec).lines]
    if meaning.counted == "rows":
        lines[-1] = re.sub(r"\bB\b", "rows", lines[-1])
    elif meaning.counted == "micro":
        lines[-1] = re.sub(r"\bN\b", "n", lines[-1])
    return lines


def code_block(homonym: Homonym) -> str:
    """The meanings as Python: a spec, or a value, below a comment that names the framework."""
    lines = []
    for m in homonym.meanings:
        if m.spec is not None:
            lines += [f"# {m.who}{_COUNTED[m.counted]}", _wrapped(f"spec = {code(m.spec)}")]
        elif m.expression:
            lines += [f"# {m.who}", f"value = {m.expression}"]
    return fenced("\n".join(lines), "python")


_COUNTED = {
    "step": "",
    "rows": "; totals=pl.Totals(9, 4)",
    "micro": "; each half of the batch, then their mean",
}
_WIDTH = 132


def _wrapped(line: str) -> str:
    """The line as a formatter leaves it: its arguments on a line of their own if it is too long."""
    if len(line) <= _WIDTH:
        return line
    before, _, arguments = line.partition("(")
    return f"{before}(\n    {arguments.removesuffix(')')}\n)"


def code(value: Any) -> str:
    """A spec, a part or a plain value as Python; fields that have their default are left out."""
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, tuple):
        return code(value[0]) if len(value) == 1 else f"({', '.join(map(code, value))})"
    if not dataclasses.is_dataclass(value):
        return "math.inf" if value == math.inf else repr(value)
    said = []
    for f in dataclasses.fields(value):
        x = getattr(value, f.name)
        if x != f.default:
            said.append(code(x) if f.default is dataclasses.MISSING else f"{f.name}={code(x)}")
    return f"pl.{type(value).__name__}({', '.join(said)})"


def _changed(spec: pl.LossSpec) -> str:
    """The slots of a spec that are not PPO's, as Python."""
    return code(spec).removeprefix("pl.LossSpec(").removesuffix(")")


def _vocabulary() -> list[str]:
    lines = [
        line
        for h in HOMONYMS
        for m in h.meanings
        if m.spec is not None
        for line in printed_lines(m)
    ]
    used = {name for line in lines for name in names_in(line.partition(" = ")[2])}
    words = VOCABULARY | {"rows": "rows: sequences of the whole step, also those without a token"}
    return [meaning for word, meaning in words.items() if word in used]


def same_numbers(same: Same) -> list[tuple[Tensor, Tensor]]:
    """Loss and gradient of both forms."""
    given = batch()
    if same.by_sequence:
        given["advantages"] = given["advantages"][:, :1].expand_as(given["logp"]).clone()
    return [loss_and_gradient(spec, given, "step") for spec in (same.a, same.b)]
