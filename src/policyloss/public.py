"""Every public name of the library. `import policyloss` reads them from here when one is used."""

from policyloss import advantage, compat, functional, hf, preference
from policyloss.accumulation import Accumulation, MicroBatch, accumulate
from policyloss.advantage import gae, group_advantages, whiten
from policyloss.catalogue import preset, presets
from policyloss.check.bits import BitsReport, bits_check
from policyloss.check.loss import check_loss
from policyloss.check.partition import PartitionReport, partition_check
from policyloss.compiled import CompiledLoss, compiled_loss, explain_path, unfused
from policyloss.controllers import AdaptiveEntropy, AdaptiveKL
from policyloss.errors import InputError, PolicyLossError, SpecError
from policyloss.explanations import diff, explain
from policyloss.functional.exact import exact
from policyloss.head.head import LogProbs
from policyloss.head.linear import linear_logprobs
from policyloss.head.logits import logprobs
from policyloss.head.loss import HeadOutput, explain_plan, linear_policy_loss
from policyloss.head.plans import Plan
from policyloss.head.teacher.divergence import divergence, linear_divergence
from policyloss.loss import LossOutput, aggregate_tokens, measure, policy_loss
from policyloss.metrics import Metrics
from policyloss.mismatch import Mismatch
from policyloss.mixture import Mixture, Stream
from policyloss.parts.aggregate import (
    LengthWeighted,
    LocalSeqMeanTokenMean,
    LocalTokenMean,
    PromptMean,
    SeqMeanTokenMean,
    SeqMeanTokenSum,
    SeqMeanTokenSumNorm,
    TokenMean,
    TokenSum,
    TokenSumNorm,
    TurnMean,
    WeightMean,
)
from policyloss.parts.correction import (
    OPSM,
    Band,
    Corrected,
    DivergenceMask,
    MomentBudget,
    Reject,
    SelfNormalise,
    SequenceMask,
    Stale,
    Truncate,
    TruncateRatio,
    Veto,
)
from policyloss.parts.kl import KL, Divergence
from policyloss.parts.ratio import (
    MixedRatio,
    SegmentRatio,
    SequenceProduct,
    SequenceRatio,
    TokenRatio,
)
from policyloss.parts.trust import (
    BySign,
    Clip,
    CovClip,
    CovKL,
    DetachedClip,
    FutureKL,
    GammaWeight,
    GeometricClip,
    ProbabilityBand,
    Quadratic,
    Regression,
    SoftGate,
    Surrogate,
    TaperedNegative,
    TwoSidedClip,
    Unbounded,
)
from policyloss.preference.loss import preference_loss
from policyloss.records import Stat
from policyloss.spec import LossSpec
from policyloss.teacher import Teacher, TopK
from policyloss.tokens import Tokens
from policyloss.totals import GroupTokens, Totals
from policyloss.value import value_loss

__all__ = [
    "KL",
    "OPSM",
    "Accumulation",
    "AdaptiveEntropy",
    "AdaptiveKL",
    "Band",
    "BitsReport",
    "BySign",
    "Clip",
    "CompiledLoss",
    "Corrected",
    "CovClip",
    "CovKL",
    "DetachedClip",
    "Divergence",
    "DivergenceMask",
    "FutureKL",
    "GammaWeight",
    "GeometricClip",
    "GroupTokens",
    "HeadOutput",
    "InputError",
    "LengthWeighted",
    "LocalSeqMeanTokenMean",
    "LocalTokenMean",
    "LogProbs",
    "LossOutput",
    "LossSpec",
    "Metrics",
    "MicroBatch",
    "Mismatch",
    "MixedRatio",
    "Mixture",
    "MomentBudget",
    "PartitionReport",
    "Plan",
    "PolicyLossError",
    "ProbabilityBand",
    "PromptMean",
    "Quadratic",
    "Regression",
    "Reject",
    "SegmentRatio",
    "SelfNormalise",
    "SeqMeanTokenMean",
    "SeqMeanTokenSum",
    "SeqMeanTokenSumNorm",
    "SequenceMask",
    "SequenceProduct",
    "SequenceRatio",
    "SoftGate",
    "SpecError",
    "Stale",
    "Stat",
    "Stream",
    "Surrogate",
    "TaperedNegative",
    "Teacher",
    "TokenMean",
    "TokenRatio",
    "TokenSum",
    "TokenSumNorm",
    "Tokens",
    "TopK",
    "Totals",
    "Truncate",
    "TruncateRatio",
    "TurnMean",
    "TwoSidedClip",
    "Unbounded",
    "Veto",
    "WeightMean",
    "accumulate",
    "advantage",
    "aggregate_tokens",
    "bits_check",
    "check_loss",
    "compat",
    "compiled_loss",
    "diff",
    "divergence",
    "exact",
    "explain",
    "explain_path",
    "explain_plan",
    "functional",
    "gae",
    "group_advantages",
    "hf",
    "linear_divergence",
    "linear_logprobs",
    "linear_policy_loss",
    "logprobs",
    "measure",
    "partition_check",
    "policy_loss",
    "preference",
    "preference_loss",
    "preset",
    "presets",
    "unfused",
    "value_loss",
    "whiten",
]
