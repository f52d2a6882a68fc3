"""Pure functions of tensors: parts are made of them, and a loss of yours can be, too.

The functions do not depend on specs. Token-shaped means `[B, T]` or packed `[N]`. A function that
needs the bounds of sequences takes a `Sequences`.
"""

from policyloss.functional.aggregate import per_sequence_mean, reciprocal, weighted_sum
from policyloss.functional.correction import any_in_sequence, importance_weight, reduced, within
from policyloss.functional.kl import binary_divergence, estimate, with_gradient
from policyloss.functional.masking import bound, compute_dtype, difference, fill
from policyloss.functional.ratio import bounded_exp
from policyloss.functional.segments import Sequences, group_sum
from policyloss.functional.trust import (
    clipped,
    covariance,
    detached_clipped,
    gamma_weighted,
    geometric_clipped,
    outside_band,
    quadratic,
    soft_gated,
    tapered_negative,
    two_sided_clipped,
)

__all__ = [
    "Sequences",
    "any_in_sequence",
    "binary_divergence",
    "bound",
    "bounded_exp",
    "clipped",
    "compute_dtype",
    "covariance",
    "detached_clipped",
    "difference",
    "estimate",
    "fill",
    "gamma_weighted",
    "geometric_clipped",
    "group_sum",
    "importance_weight",
    "outside_band",
    "per_sequence_mean",
    "quadratic",
    "reciprocal",
    "reduced",
    "soft_gated",
    "tapered_negative",
    "two_sided_clipped",
    "weighted_sum",
    "with_gradient",
    "within",
]
