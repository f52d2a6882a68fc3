"""A named loss, and how its sources are written down."""

from __future__ import annotations

import inspect
import re
from dataclasses import dataclass

from policyloss.parts.trust import Clip
from policyloss.spec import LossSpec


@dataclass(frozen=True)
class Preset:
    """A named loss.

    sources: maps a slot or "slot.field" to the source of that choice or number, and "advantage" to
    the source of `advantage`.
    advantage: the estimator of `policyloss.advantage` that the loss is defined with; None for any.
    """

    name: str
    title: str
    paper: str
    spec: LossSpec
    sources: dict[str, str]
    note: str = ""
    advantage: str | None = None


def preset_from_text(spec: LossSpec, text: str) -> Preset:
    """A preset from text: a "name: title" line, a "paper: …" line, and lines of sources.

    There is a source for each "slot" or "slot.field" and for "advantage (its estimator)". A "note:
    …" may follow. A line that is indented further continues the one above.
    """
    entries = re.split(r"\n(?! )", inspect.cleandoc(text))
    (name, title), *others = (" ".join(entry.split()).split(": ", 1) for entry in entries)
    values, advantage = dict(others), None
    for key in [key for key in values if key.startswith("advantage")]:
        advantage = key.partition(" (")[2].rstrip(")")
        values["advantage"] = values.pop(key)
    paper, note = values.pop("paper"), values.pop("note", "")
    object.__setattr__(spec, "origin", name)
    return Preset(name, title, paper, spec, values, note, advantage)


# What many presets share: PPO's clip, and where its width comes from.
CLIP = Clip(0.2, 0.2)
PPO_EPSILON = "Schulman et al. 2017, arXiv 1707.06347, table 1: epsilon 0.2 scored best"
