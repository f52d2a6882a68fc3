"""A named loss, and how its sources are written down."""

from __future__ import annotations

import re
import textwrap
from dataclasses import dataclass

from policyloss.parts.trust import Clip
from policyloss.spec import LossSpec


@dataclass(frozen=True)
class Preset:
    """A named loss.

    sources: slot or slot.field → where the choice or number comes from; "advantage" → that of
    `advantage`.
    advantage: the estimator of `policyloss.advantage` that the loss is defined with; None if it
    goes with any.
    """

    name: str
    title: str
    paper: str
    spec: LossSpec
    sources: dict[str, str]
    note: str = ""
    advantage: str | None = None


def described(
    name: str, title: str, paper: str, spec: LossSpec, sources: str, note: str = ""
) -> Preset:
    """A preset with its sources as text: "slot.field: source", "advantage (its estimator): source".

    A line that is indented further continues the one above.
    """
    by_key, advantage = {}, None
    for entry in re.split(r"\n(?! )", textwrap.dedent(sources).strip()):
        key, _, source = " ".join(entry.split()).partition(": ")
        if key.startswith("advantage"):
            key, _, advantage = key.rstrip(")").partition(" (")
        by_key[key] = source
    object.__setattr__(spec, "origin", name)
    return Preset(name, title, paper, spec, by_key, note, advantage)


# What many presets share: PPO's clip, and where its width comes from.
CLIP = Clip(0.2, 0.2)
PPO_EPSILON = "Schulman et al. 2017, arXiv 1707.06347, table 1: epsilon 0.2 scored best"
