"""Find the preset that equals a loss, or from which it differs least."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from policyloss.catalogue import PRESETS, Preset, presets_equal_to
from policyloss.parts.data import VARIANTS, has_fields, kind
from policyloss.spec import LossSpec

# Numbers that guard `exp`, not part of any paper's loss.
GUARDS = ("log_clamp", "token_clamp", "clamp", "value_clamp", "floor")
# Fields by which a drop-in keeps a framework's last digits.
ROUNDING = ("epsilon", "as_written")
_FURTHEST = 4  # the largest distance of a small change


def nearest_preset(spec: LossSpec) -> tuple[Preset | None, bool]:
    """The preset that equals `spec`, and True; or a preset that differs little, and False.

    A small change keeps the kind of the trust region and changes few other things. Among presets
    that all fit, the one that `spec` was made from is right; otherwise the nearest one, or None.
    """
    same = {preset.name: 0.0 for preset in presets_equal_to(spec)}
    fitting = same or {
        name: cost
        for name, preset in PRESETS.items()
        if type(preset.spec.trust) is type(spec.trust)
        and (cost := distance(spec, preset.spec)) <= _FURTHEST
    }
    origin = spec.origin if spec.origin in fitting else None
    name = origin or min(fitting, key=lambda name: fitting[name], default=None)
    return PRESETS.get(name or ""), bool(same)


def distance(a: LossSpec, b: LossSpec) -> float:
    """How far `a` is from `b`: the total cost of the changes that lead from `b` to `a`.

    Changes to the ratio, the corrections and the average cost most, because these define a loss. To
    add or remove a KL term costs little, because any loss is also used without one; a KL term
    towards a teacher costs more. Guards cost next to nothing. If `b` sets no horizon, any horizon
    of `a` costs nothing.
    """
    total = 0.5 * (a.rejected != b.rejected) + 0.5 * (a.entropy_coef != b.entropy_coef)
    for slot in VARIANTS:
        if slot == "ratio" and not (a.reads_ratio or b.reads_ratio):
            continue
        mine, theirs = a.parts_in(slot), b.parts_in(slot)
        if [kind(p) for p in mine] != [kind(p) for p in theirs]:
            taught = any(getattr(p, "teaches", False) for p in (*mine, *theirs))
            total += _TEACHER if taught else _ADDED if not theirs else _EXCHANGED[slot]
            continue
        for x, y in zip(mine, theirs, strict=True):
            if not has_fields(x):
                total += 2.0 * (x != y)
                continue
            total += sum(
                _price_of(f, getattr(x, f.name), getattr(y, f.name, f.default))
                for f in dataclasses.fields(x)
            )
    return total


# The price of a part in the place of another, or of none in its place.
_EXCHANGED = {"ratio": 2.0, "trust": 2.0, "correction": 2.0, "aggregate": 1.5, "kl": 0.6}
_ADDED = 0.9
_TEACHER = 1.4  # of a pull to a teacher, there or not there


def _price_of(field: Any, mine: Any, theirs: Any) -> float:
    """The price of one changed field: low for a guard, highest for a choice."""
    if mine == theirs or (field.name == "horizon" and theirs is None):
        return 0.0
    if field.name in (*GUARDS, *ROUNDING):
        return 0.05
    if theirs is None:
        return 0.5
    if "None" in str(field.type) and mine is not None:
        return 0.3  # an optional part's number does not define the loss
    numbers = isinstance(mine, (int, float)) and isinstance(theirs, (int, float))
    if numbers and max(abs(mine), abs(theirs)) < math.inf:
        return float(0.6 + 0.1 * abs(mine - theirs) / (abs(mine) + abs(theirs)))
    return 1.1
