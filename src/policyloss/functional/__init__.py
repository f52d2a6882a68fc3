"""Pure functions of tensors, such as PPO's surrogate `clipped`, of which the parts are made.

Your own loss can call them, too. The functions do not depend on specs. Token-shaped means `[B, T]`
or packed `[N]`. A function that needs the bounds of sequences takes a `Sequences`.
"""

import inspect

from policyloss.functional.aggregate import per_sequence_mean as per_sequence_mean
from policyloss.functional.aggregate import reciprocal as reciprocal
from policyloss.functional.aggregate import weighted_sum as weighted_sum
from policyloss.functional.correction import any_in_sequence as any_in_sequence
from policyloss.functional.correction import importance_weight as importance_weight
from policyloss.functional.correction import reduced as reduced
from policyloss.functional.correction import within as within
from policyloss.functional.kl import binary_divergence as binary_divergence
from policyloss.functional.kl import estimate as estimate
from policyloss.functional.kl import with_gradient as with_gradient
from policyloss.functional.masking import bound as bound
from policyloss.functional.masking import compute_dtype as compute_dtype
from policyloss.functional.masking import difference as difference
from policyloss.functional.masking import fill as fill
from policyloss.functional.ratio import bounded_exp as bounded_exp
from policyloss.functional.segments import Sequences as Sequences
from policyloss.functional.segments import group_sum as group_sum
from policyloss.functional.trust import clipped as clipped
from policyloss.functional.trust import covariance as covariance
from policyloss.functional.trust import detached_clipped as detached_clipped
from policyloss.functional.trust import gamma_weighted as gamma_weighted
from policyloss.functional.trust import geometric_clipped as geometric_clipped
from policyloss.functional.trust import outside_band as outside_band
from policyloss.functional.trust import quadratic as quadratic
from policyloss.functional.trust import soft_gated as soft_gated
from policyloss.functional.trust import tapered_negative as tapered_negative
from policyloss.functional.trust import two_sided_clipped as two_sided_clipped

__all__ = sorted(name for name, x in vars().items() if name[0] != "_" and not inspect.ismodule(x))
