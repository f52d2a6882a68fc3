"""Homonyms outside of the policy term: rollout corrections, metrics, advantages. See `homonyms`."""

from __future__ import annotations

import math

from docs.names.meanings import Homonym, Meaning
from policyloss.parts.aggregate import SeqMeanTokenMean
from policyloss.parts.correction import OPSM, Band, Reject, SequenceMask, Truncate
from policyloss.parts.ratio import SequenceProduct
from policyloss.parts.trust import Clip, DetachedClip
from policyloss.spec import LossSpec

_CLIP = Clip(0.2, 0.2)


def _metric(trust: str, name: str) -> str:
    return f'metric({trust}, "{name}")'


STEP_HOMONYMS = (
    Homonym(
        "tis",
        "Truncated importance sampling: the weight exp(old_logp - rollout_logp), bounded — on "
        "which sides, and is it that weight?",
        (
            Meaning("verl, SkyRL", "at most 2", LossSpec(trust=_CLIP, correction=Truncate(2.0))),
            Meaning(
                "OpenRLHF",
                "between 0.5 and 5: a token the trainer finds unlikely is weighted up",
                LossSpec(trust=_CLIP, correction=Truncate(5.0, low=0.5, log_clamp=None)),
            ),
            Meaning(
                "TRL's `token_truncate`",
                "at most 3",
                LossSpec(trust=_CLIP, correction=Truncate(3.0, log_clamp=None)),
            ),
            Meaning(
                "ROLL's pg_variant",
                "another thing: -sg[min(r, 1)]·A·logp",
                LossSpec(trust=DetachedClip(0.0, 1.0)),
            ),
        ),
    ),
    Homonym(
        "sequence-level importance sampling",
        "The whole sequence's weight: the product of its tokens' weights, or their geometric mean.",
        (
            Meaning(
                'verl\'s rollout_is="sequence", SkyRL',
                "the product, at most 2",
                LossSpec(trust=_CLIP, correction=Truncate(2.0, level="product")),
            ),
            Meaning(
                "TRL's `sequence_truncate`",
                "the product, at most 3",
                LossSpec(trust=_CLIP, correction=Truncate(3.0, level="product", log_clamp=None)),
            ),
            Meaning(
                "ms-swift's `sequence_truncate`, AReaL, Fireworks",
                "the geometric mean (at most 2 in ms-swift)",
                LossSpec(trust=_CLIP, correction=Truncate(2.0, level="geomean")),
            ),
        ),
    ),
    Homonym(
        "sequence_mask, seq-mask-tis",
        "Sequences outside a band are dropped: by which ratio, and what weight do the others keep?",
        (
            Meaning(
                "TRL's `sequence_mask`",
                "by the product, at most 3; the others keep the product",
                LossSpec(
                    trust=_CLIP,
                    correction=SequenceMask(0.0, 3.0, "product", "sequence", log_clamp=None),
                ),
            ),
            Meaning(
                "OpenRLHF, NeMo-RL",
                "by the geometric mean, 0.5 to 5 in OpenRLHF; the others keep each token's own "
                "weight, not truncated",
                LossSpec(trust=_CLIP, correction=SequenceMask(0.5, 5.0, log_clamp=None)),
            ),
            Meaning("open-instruct", "by the geometric mean; the others keep it, truncated"),
        ),
    ),
    Homonym(
        "icepop",
        "A token outside the band gets no gradient. Does it still count?",
        (
            Meaning(
                "verl, OpenRLHF, TRL's `token_mask`, NeMo-RL",
                "yes: the denominator stays",
                LossSpec(trust=_CLIP, correction=Band(0.5, 5.0)),
            ),
            Meaning(
                "xtuner, RLinf",
                "no: it leaves the mask, as in verl's rollout_rs",
                LossSpec(trust=_CLIP, correction=Band(0.5, 5.0), rejected="renormalise"),
            ),
        ),
    ),
    Homonym(
        "k1 rejection",
        'Bounds "0.6_1.4" on a ratio of the two engines: which one is above the line?',
        (
            Meaning(
                "verl",
                "π_rollout / π_train",
                LossSpec(
                    trust=_CLIP,
                    correction=Reject("k1", low=math.log(0.6), high=math.log(1.4)),
                    rejected="renormalise",
                ),
            ),
            Meaning(
                "AReaL",
                "π_train / π_rollout",
                LossSpec(
                    trust=_CLIP,
                    correction=Reject("k1", low=-math.log(1.4), high=-math.log(0.6)),
                    rejected="renormalise",
                ),
            ),
        ),
    ),
    Homonym(
        "off-policy sequence masking",
        "Sequences that drifted lose their tokens with a negative advantage: drifted from whom? "
        "(Here with a bound of 1e-4.)",
        (
            Meaning(
                "slime, TRL without vLLM",
                "from the old policy",
                LossSpec(trust=_CLIP, correction=OPSM(1e-4)),
            ),
            Meaning(
                "TRL with vLLM, ms-swift, cosmos-rl",
                "from the rollout policy",
                LossSpec(trust=_CLIP, correction=OPSM(1e-4, source="rollout")),
            ),
        ),
    ),
    Homonym(
        "clip fraction",
        "The share of tokens that are clipped, as a metric.",
        (
            Meaning(
                "verl, OpenRLHF, TRL, SkyRL, AReaL",
                "where the clip takes the gradient away: outside the band on the side the "
                "advantage pushes",
                expression=_metric("pl.Clip(0.2, 0.2)", "clip_fraction"),
            ),
            Meaning(
                "verl's and SkyRL's `cispo`, agilerl",
                "anywhere outside the band",
                expression=_metric("pl.DetachedClip(0.8, 1.2)", "clip_fraction"),
            ),
            Meaning(
                "TorchRL",
                "anywhere outside the band, over padding too",
                expression=_metric("pl.DetachedClip(0.8, 1.2)", "clip_fraction")
                + ' * batch["mask"].double().mean()',
            ),
        ),
    ),
    Homonym(
        "ppo_kl",
        "How far the policy moved from the old one, as a metric.",
        (
            Meaning(
                "verl (clamped at ±20), OpenRLHF (not clamped), slime",
                "the mean of old_logp - logp, k1",
                expression=_metric("pl.Clip(0.2, 0.2)", "kl_old_k1"),
            ),
            Meaning(
                "verl's `kl_cov`",
                "the mean of |logp - old_logp|",
                expression='(batch["logp"] - batch["old_logp"]).abs()[batch["mask"]].mean()',
            ),
            Meaning(
                "TRL's asynchronous trainer",
                "k3",
                expression=_metric("pl.Clip(0.2, 0.2)", "kl_old_k3"),
            ),
        ),
    ),
    Homonym(
        "rloo",
        "Leave-one-out.",
        (
            Meaning(
                "verl's `rloo`",
                "an advantage; a group of one keeps its reward",
                expression='pl.advantage.rloo(rewards, prompt, single="raw")',
            ),
            Meaning(
                "verl's `rloo_vectorized`, SkyRL",
                "an advantage; a group of one gets 0",
                expression="pl.advantage.rloo(rewards, prompt)",
            ),
            Meaning(
                "TRL's RLOOTrainer, preset `rloo_loss`",
                "a loss as well: PPO's clip on the sequence's likelihood ratio",
                LossSpec(SequenceProduct(), _CLIP, aggregate=SeqMeanTokenMean()),
            ),
        ),
    ),
    Homonym(
        "grpo, as an advantage",
        "The reward less the mean of its group, over the group's standard deviation.",
        (
            Meaning(
                "verl",
                "1e-6 added to the sample deviation; a group of one keeps its reward",
                expression='pl.advantage.grpo(rewards, prompt, single="raw")',
            ),
            Meaning(
                "TRL, ColossalChat",
                "1e-4 added to it",
                expression="pl.advantage.grpo(rewards, prompt, eps=1e-4)",
            ),
            Meaning(
                "open-instruct",
                "1e-8 added to the population deviation",
                expression="pl.advantage.grpo(rewards, prompt, eps=1e-8, ddof=0)",
            ),
            Meaning(
                "NeMo-RL",
                "mean and deviation of the others",
                expression="pl.advantage.grpo_loo(rewards, prompt)",
            ),
            Meaning(
                "prime-rl, Tinker, Dr. GRPO",
                "no deviation",
                expression="pl.advantage.dr_grpo(rewards, prompt)",
            ),
        ),
    ),
    Homonym(
        "pass@k",
        "An advantage for the best of k samples.",
        (
            Meaning(
                "verl's and EasyR1's `grpo_passk`",
                "the best sample gets its lead over the second best, the others 0",
                expression="pl.advantage.passk_max_gap(rewards, prompt)",
            ),
            Meaning(
                "xtuner",
                "every sample gets its contribution to the best of k, over all choices of k (here "
                "2)",
                expression="pl.advantage.passk_combinatorial(rewards, prompt, k=2)",
            ),
        ),
    ),
)
