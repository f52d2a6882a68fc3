"""Preference losses: DPO, KTO, ORPO, CPO and their relatives, composed of score, margin and link.

`policyloss.preference_loss(spec, logp, ref_logp, mask)` computes them.
"""

from policyloss.preference.loss import preference_totals
from policyloss.preference.named_losses import preset, presets
from policyloss.preference.parts import (
    Hinge,
    Logistic,
    LogisticOrExponential,
    ReverseKL,
    Score,
    Sigmoid,
    Square,
    Term,
)
from policyloss.preference.spec import PreferenceSpec

__all__ = [
    "Hinge",
    "Logistic",
    "LogisticOrExponential",
    "PreferenceSpec",
    "ReverseKL",
    "Score",
    "Sigmoid",
    "Square",
    "Term",
    "preference_totals",
    "preset",
    "presets",
]
