"""Preference losses: DPO, KTO, ORPO, CPO and their relatives.

`policyloss.preference_loss("dpo", logp, ref_logp, mask)` computes one, by the name of a preset or
from a `PreferenceSpec`, which composes score, margin and link.
"""

import inspect

from policyloss.preference.loss import preference_totals as preference_totals
from policyloss.preference.named_losses import preset as preset
from policyloss.preference.named_losses import presets as presets
from policyloss.preference.spec import Hinge as Hinge
from policyloss.preference.spec import Logistic as Logistic
from policyloss.preference.spec import LogisticOrExponential as LogisticOrExponential
from policyloss.preference.spec import PreferenceSpec as PreferenceSpec
from policyloss.preference.spec import ReverseKL as ReverseKL
from policyloss.preference.spec import Score as Score
from policyloss.preference.spec import Sigmoid as Sigmoid
from policyloss.preference.spec import Square as Square
from policyloss.preference.spec import Term as Term

__all__ = sorted(name for name, x in vars().items() if name[0] != "_" and not inspect.ismodule(x))
