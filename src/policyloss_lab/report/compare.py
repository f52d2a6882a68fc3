"""What differs between runs: their settings, key by key, and their losses, by `policyloss.diff`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from policyloss.catalogue import PRESETS
from policyloss.errors import PolicyLossError
from policyloss.explanations import Explanation, diff, explain
from policyloss.spec import LossSpec
from policyloss_lab.report.reading import Notes, strict

# What a text that is no loss can make of reading, explaining or comparing it.
_NO_LOSS = (
    PolicyLossError,
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)


def flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Nested settings as {"a.b": JSON text}; a list is one value."""
    out: dict[str, str] = {}
    for key, value in settings.items():
        if isinstance(value, Mapping) and value:
            out |= flat(value, f"{prefix}{key}.")
        else:
            out[f"{prefix}{key}"] = (
                value
                if isinstance(value, str)
                else json.dumps(value, ensure_ascii=False, default=str)
            )
    return out


def differences(settings: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """[{"key", "values": [text of each run, None where it has no such key]}] for the keys whose
    values are not all the same.
    """
    tables = [flat(s) for s in settings]
    keys = dict.fromkeys(key for table in tables for key in table)
    rows = [{"key": key, "values": [table.get(key) for table in tables]} for key in keys]
    return [row for row in rows if any(value != row["values"][0] for value in row["values"])]


def loss_card(spec: Any, config: Mapping[str, Any], notes: Notes) -> dict[str, Any]:
    """{"name", "spec", "explain": `Explanation.to_dict()`, "text": its page}; the last two are None
    if the spec cannot be read.
    """
    asked = config.get("loss")
    asked = asked if isinstance(asked, str) and asked else "unknown"
    card: dict[str, Any] = {"name": asked, "spec": spec, "explain": None, "text": None}
    if spec is None:
        return card
    if spec == {"code": asked}:
        notes.append(f"The loss is code, {asked}, which a report does not run.")
        return card
    try:
        explanation = explain(LossSpec.from_dict(spec))
        explained = strict(explanation.to_dict(), "The explanation of the loss", notes)
        text = str(explanation)
    except _NO_LOSS as error:
        notes.append(f"The loss in config.json cannot be explained: {error}")
        return card
    return {
        "name": _loss_name(asked, explanation),
        "spec": spec,
        "explain": explained,
        "text": text,
    }


def _loss_name(asked: str, explanation: Explanation) -> str:
    """The run's name for its loss if that is right, else the preset that is nearest."""
    if explanation.preset is not None:
        return asked if asked in explanation.also else explanation.preset
    base = asked if asked in PRESETS else explanation.near
    return f"{base}, changed" if base else "custom"


def loss_differences(runs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """[{"a": label, "b": label, "text", "changes", "notes"}]: each other loss against the first."""
    known = [run for run in runs if run["loss"]["explain"] is not None]
    rows: list[dict[str, Any]] = []
    specs = [run["loss"]["spec"] for run in known[:1]]
    for run in known[1:]:
        if run["loss"]["spec"] in specs:
            continue
        specs.append(run["loss"]["spec"])
        try:
            result = diff(LossSpec.from_dict(specs[0]), LossSpec.from_dict(run["loss"]["spec"]))
        except _NO_LOSS as error:
            run["notes"].append(
                f"The loss cannot be compared with that of {known[0]['label']}: {error}"
            )
            continue
        if not result.equal:
            rows.append(
                {
                    "a": known[0]["label"],
                    "b": run["label"],
                    "text": str(result),
                    **{name: result.to_dict()[name] for name in ("changes", "notes")},
                }
            )
    return rows
