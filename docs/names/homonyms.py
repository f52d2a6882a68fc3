"""Names that mean different things in different frameworks, as data; each meaning is a spec where a
spec can express it.

`docs/names.md` prints them with their numbers on `BATCH`; tests check that the meanings of one name
give different numbers, and that a meaning ascribed to a framework with a drop-in has the drop-in's
numbers.
"""

from __future__ import annotations

from docs.names.meanings import Homonym, Meaning, Same
from docs.names.step_homonyms import STEP_HOMONYMS
from policyloss.parts.aggregate import (
    LengthWeighted,
    PromptMean,
    SeqMeanTokenMean,
    SeqMeanTokenSum,
    SeqMeanTokenSumNorm,
    TokenSumNorm,
)
from policyloss.parts.kl import KL
from policyloss.parts.ratio import SequenceRatio, TokenRatio
from policyloss.parts.trust import (
    Clip,
    DetachedClip,
    GeometricClip,
    ProbabilityBand,
    Quadratic,
    TwoSidedClip,
)
from policyloss.spec import LossSpec

_RATIO = "(batch['logp'] - batch['old_logp']).exp()"
_UNCLAMPED = TokenRatio(log_clamp=None)
_CLIP = Clip(0.2, 0.2)
_MEAN_OF_MEANS = SeqMeanTokenMean()


HOMONYMS = (
    Homonym(
        "cispo",
        "A bounded ratio times logp, the ratio without gradient. The bound is a distance from 1, "
        "or a ratio.",
        (
            Meaning(
                "verl, NeMo-RL",
                "the band 1 - clip_ratio_low … 1 + clip_ratio_high; 0.2 by default, so the lower "
                "bound acts too",
                LossSpec(trust=DetachedClip(0.8, 1.2)),
            ),
            Meaning(
                "TRL, Liger, Unsloth, Axolotl, ms-swift",
                "at most epsilon_high itself, no lower bound; unset, every weight is capped at "
                "epsilon = 0.2",
                LossSpec(_UNCLAMPED, DetachedClip(0.0, 0.2)),
            ),
            Meaning(
                "SkyRL",
                "the band 1 - 0 … 1 + 5: no weight below 1",
                LossSpec(trust=DetachedClip(1.0, 6.0)),
            ),
            Meaning(
                "preset `cispo`",
                "MiniMax-M1: at most 5, no lower bound",
                LossSpec(trust=DetachedClip(0.0, 5.0)),
            ),
            Meaning(
                "TorchRL's `CISPOLoss`",
                "another loss: -clip(r)·A, the gradient through the clip, no logp; a clipped token"
                " has no gradient",
                expression=(
                    f"-({_RATIO}.clamp(0.8, 1.2) * batch['advantages'])[batch['mask']].mean()"
                ),
            ),
        ),
    ),
    Homonym(
        "gspo",
        "PPO's clip on the sequence's ratio. The gradient goes through the mean of the sequence, "
        "or each token keeps its own; they agree only if the advantage is constant in a sequence "
        "and every sequence counts the same.",
        (
            Meaning(
                "OpenRLHF, NeMo-RL, slime",
                "through the mean; mean over sequences",
                LossSpec(SequenceRatio(log_clamp=None), _CLIP, aggregate=_MEAN_OF_MEANS),
            ),
            Meaning(
                'TRL, importance_sampling_level="sequence"',
                'through the mean; averaged by loss_type, whose default "dapo" counts a sequence '
                "by its length",
                LossSpec(SequenceRatio(log_clamp=None), _CLIP),
            ),
            Meaning(
                "verl up to 0.9.0, SkyRL",
                "each token its own gradient; always the mean over sequences in verl",
                LossSpec(
                    SequenceRatio("token", log_clamp=(None, 10.0)), _CLIP, aggregate=_MEAN_OF_MEANS
                ),
            ),
            Meaning(
                "verl from 0.9.1",
                "each token its own gradient; averaged by loss_agg_mode, by default over tokens",
                LossSpec(SequenceRatio("token", log_clamp=(None, 10.0)), _CLIP),
            ),
            Meaning(
                "preset `gspo`",
                "the paper: through the mean, and a clip of 3e-4 and 4e-4 where all of the above "
                "inherit PPO's 0.2",
                LossSpec(SequenceRatio(), Clip(3e-4, 4e-4), aggregate=_MEAN_OF_MEANS),
            ),
        ),
    ),
    Homonym(
        "grpo",
        "As a loss. (As an advantage, see below.)",
        (
            Meaning(
                "preset `grpo`",
                "the paper: mean of token means, k3 at 0.04 in the loss",
                LossSpec(trust=_CLIP, kl=KL("k3", 0.04), aggregate=_MEAN_OF_MEANS),
            ),
            Meaning(
                "TRL",
                "no KL by default; empty rows count, each micro-batch is averaged by itself",
                LossSpec(_UNCLAMPED, _CLIP, aggregate=_MEAN_OF_MEANS),
                counted="rows",
            ),
            Meaning(
                "verl",
                "only the advantages: the loss stays vanilla, a token mean with dual clip at 3 and "
                "no KL",
                LossSpec(trust=Clip(0.2, 0.2, dual=3.0)),
            ),
            Meaning(
                "ColossalChat",
                "k3 at 0.01, unclamped, in the loss; empty rows count",
                LossSpec(
                    _UNCLAMPED, _CLIP, kl=KL("k3", 0.01, clamp=None), aggregate=_MEAN_OF_MEANS
                ),
                counted="rows",
            ),
        ),
    ),
    Homonym(
        "dapo",
        "The paper's loss is two changes to GRPO: a higher upper clip and a token mean.",
        (
            Meaning(
                "preset `dapo`, ColossalChat, open-instruct",
                "both: 0.2 and 0.28; token mean",
                LossSpec(trust=Clip(0.2, 0.28)),
            ),
            Meaning(
                "TRL",
                "the token mean only; the clip stays 0.2 unless epsilon_high is set",
                LossSpec(_UNCLAMPED, _CLIP),
            ),
            Meaning("torchtitan, Fireworks", "the clip only"),
        ),
    ),
    Homonym(
        "token mean, bnpo",
        "The sum over tokens over their number — in the step, or in each micro-batch, which makes "
        "the gradient depend on the cut.",
        (
            Meaning(
                "verl, OpenRLHF, preset `bnpo`, TRL's `dapo`", "of the step", LossSpec(trust=_CLIP)
            ),
            Meaning(
                "TRL's `bnpo`, SkyRL's `token_mean_legacy`, torchtune",
                "of each micro-batch, then their mean",
                LossSpec(trust=_CLIP),
                counted="micro",
            ),
        ),
    ),
    Homonym(
        "seq-mean-token-mean",
        "The mean over sequences of their token means. Does a row without a valid token count? "
        "verl, OpenRLHF and ColossalChat also add 1e-8 to every length, which acts on float64 "
        "masks only.",
        (
            Meaning(
                "verl, OpenRLHF",
                "no",
                LossSpec(trust=_CLIP, aggregate=_MEAN_OF_MEANS),
            ),
            Meaning(
                "TRL, ColossalChat, SkyRL",
                "yes",
                LossSpec(trust=_CLIP, aggregate=_MEAN_OF_MEANS),
                counted="rows",
            ),
        ),
    ),
    Homonym(
        "seq-mean-token-sum-norm",
        "Dr. GRPO's average: a token sum over a constant length. Divided by the number of "
        "sequences as well, or not. (The constant here is the padded width, 4.)",
        (
            Meaning(
                "verl",
                "over sequences and the constant: loss_scale_factor, or the padded width",
                LossSpec(trust=_CLIP, aggregate=SeqMeanTokenSumNorm(4)),
            ),
            Meaning(
                "ROLL, Trinity-RFT",
                "over the constant only",
                LossSpec(trust=_CLIP, aggregate=TokenSumNorm(4)),
            ),
            Meaning(
                "TRL's `dr_grpo`, SkyRL",
                "over rows, also empty ones, and the constant: max_completion_length, max_seq_len",
                LossSpec(trust=_CLIP, aggregate=SeqMeanTokenSumNorm(4)),
                counted="rows",
            ),
            Meaning(
                "tunix",
                "over sequences only, unless a constant is set",
                LossSpec(trust=_CLIP, aggregate=SeqMeanTokenSum()),
            ),
        ),
    ),
    Homonym(
        "prompt_mean",
        "Which mean comes first.",
        (
            Meaning(
                "SkyRL",
                "token mean of each prompt's group, then over prompts",
                LossSpec(trust=_CLIP, aggregate=PromptMean()),
            ),
            Meaning(
                "TorchRL",
                "token mean of each sample, then over samples",
                LossSpec(trust=_CLIP, aggregate=_MEAN_OF_MEANS),
            ),
        ),
    ),
    Homonym(
        "dual clip",
        "A largest ratio c for negative advantages.",
        (
            Meaning("verl", "c = 3, always on", LossSpec(trust=Clip(0.2, 0.2, dual=3.0))),
            Meaning("OpenRLHF, NeMo-RL, AReaL, slime", "off unless set", LossSpec(trust=_CLIP)),
            Meaning(
                "ROLL", "c = 1 + 2·pg_clip, 1.4 at 0.2", LossSpec(trust=Clip(0.2, 0.2, dual=1.4))
            ),
        ),
    ),
    Homonym(
        "luspo",
        "A sequence's loss times its length.",
        (
            Meaning(
                'TRL, importance_sampling_level="sequence"',
                "the paper: GSPO's ratio",
                LossSpec(SequenceRatio(log_clamp=None), _CLIP, aggregate=LengthWeighted()),
                counted="rows",
            ),
            Meaning(
                "TRL's default level",
                "the token's ratio: PPO with a token sum",
                LossSpec(_UNCLAMPED, _CLIP, aggregate=LengthWeighted()),
                counted="rows",
            ),
            Meaning("Liger 0.8.5", "at token level averaged over padding too"),
        ),
    ),
    Homonym(
        "gmpo, geo_mean",
        "The clip is in log space.",
        (
            Meaning(
                "verl",
                "clip_ratio, 0.2 by default; the mean over all rows of the micro-batch",
                LossSpec(_UNCLAMPED, GeometricClip(0.2, 0.2), aggregate=_MEAN_OF_MEANS),
                counted="rows",
            ),
            Meaning(
                "preset `gmpo`, TRL",
                "0.4",
                LossSpec(trust=GeometricClip(0.4, 0.4), aggregate=_MEAN_OF_MEANS),
            ),
        ),
    ),
    Homonym(
        "dppo",
        "A token counts while its probability is near its anchor's.",
        (
            Meaning(
                "verl",
                "near the old policy; the ratio stopped and capped by clip_ratio_c = 3",
                LossSpec(trust=ProbabilityBand("tv", 0.2, 0.2, cap=3.0)),
            ),
            Meaning(
                "SkyRL, prime-rl",
                "near the rollout policy; the ratio with its gradient, no cap",
                LossSpec(TokenRatio("rollout"), ProbabilityBand("tv", 0.2, 0.2, form="ratio")),
            ),
        ),
    ),
    Homonym(
        "dro",
        "Direct reward optimisation; Fireworks' page spells it distributionally robust.",
        (
            Meaning(
                "verl (beta 0.1), ROLL's kimi15",
                "with one half before the square",
                LossSpec(_UNCLAMPED, Quadratic(0.1)),
            ),
            Meaning(
                "Trinity-RFT's rec with k2",
                "without the half",
                LossSpec(_UNCLAMPED, Quadratic(0.2)),
            ),
            Meaning(
                "Fireworks",
                "the pull only where the advantage is not 0; a rollout weight does not touch it",
            ),
        ),
    ),
    Homonym(
        "k3, low_var_kl",
        "eᵈ - d - 1 with d = ref_logp - logp, here at coefficient 0.1 and with one token at d = "
        "-13.",
        (
            Meaning(
                "verl, OpenRLHF, SkyRL",
                "the estimate at most 10, no gradient beyond",
                LossSpec(trust=_CLIP, kl=KL("k3", 0.1, value_clamp=10.0)),
            ),
            Meaning(
                "NeMo-RL",
                "the estimate at most 10, with the score term, which its clamp of d at ±20 takes "
                "away where it acts",
                LossSpec(trust=_CLIP, kl=KL("k3", 0.1, grad="score", value_clamp=10.0)),
            ),
            Meaning(
                "ColossalChat, slime's `k3`",
                "no clamp",
                LossSpec(trust=_CLIP, kl=KL("k3", 0.1, clamp=None)),
            ),
            Meaning(
                "TRL",
                "no clamp, and multiplied by the ratio with its gradient (use_bias_correction_kl)",
                LossSpec(trust=_CLIP, kl=KL("k3", 0.1, weight="ratio", clamp=None)),
            ),
        ),
    ),
    *STEP_HOMONYMS,
)

SAME = (
    Same(
        "TRL's delta is the dual clip, as long as it lies above 1 + epsilon_high.",
        LossSpec(trust=TwoSidedClip(3.0, 0.2, 0.2)),
        LossSpec(trust=Clip(0.2, 0.2, dual=3.0)),
    ),
    Same(
        "LUSPO's average is the token sum, mean over sequences.",
        LossSpec(SequenceRatio(), _CLIP, aggregate=LengthWeighted()),
        LossSpec(SequenceRatio(), _CLIP, aggregate=SeqMeanTokenSum()),
    ),
    Same(
        "GSPO's two gradients agree where the advantage is constant within a sequence and every "
        "sequence counts the same.",
        LossSpec(SequenceRatio(), _CLIP, aggregate=_MEAN_OF_MEANS),
        LossSpec(SequenceRatio("token"), _CLIP, aggregate=_MEAN_OF_MEANS),
        by_sequence=True,
    ),
)
