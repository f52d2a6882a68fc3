"""Presets that learn from a teacher; each note names the code the formula was compared with."""

from __future__ import annotations

import math

from policyloss.catalogue.named_loss import Preset, preset_from_text
from policyloss.parts.aggregate import SeqMeanTokenMean, TokenMean
from policyloss.parts.kl import KL, Divergence
from policyloss.parts.ratio import TokenRatio
from policyloss.parts.trust import Unbounded
from policyloss.spec import LossSpec

_NO_REWARD = Unbounded("logp")
_ALONE = "no policy term of its own: 0 advantages leave the teacher alone, others add a reward"
_GKD_MEAN = "GKD, arXiv 2306.13649, equation 2: mean over outputs of token means"

TAUGHT: tuple[Preset, ...] = (
    preset_from_text(
        LossSpec(trust=Unbounded("ratio"), aggregate=TokenMean()),
        """opd: On-policy distillation on the sampled tokens: the teacher's preference as advantage
        paper: arXiv 2601.02780
        trust: arXiv 2601.02780, section on multi-teacher distillation: the policy gradient with
            importance weights
        aggregate: token mean; the paper takes the mean of each response first
        advantage (opd): arXiv 2601.02780, equation 8: log of the teacher's over the student's
            probability of the sampled token, without gradient
        note: Compared with the code of NeMo-RL and the documentation of slime. The paper drops
            tokens whose weight leaves a band: correction=Band(0.2, 5.0) has slime's numbers.""",
    ),
    preset_from_text(
        LossSpec(
            trust=_NO_REWARD,
            kl=KL("k1", 1.0, grad="k2", anchor="teacher", clamp=None),
            aggregate=TokenMean(),
        ),
        f"""opd_kl: On-policy distillation on the sampled tokens: the reverse KL of the live student
        paper: TRL SDPO and SDFT, sampled_token; prime-rl ref_kl
        trust: {_ALONE}
        kl: -sg(teacher_logp - logp)·logp has this gradient, and the KL itself is reported instead
            of that product
        aggregate: token mean
        note: Compared with the code of TRL and OPSD. prime-rl's ratio, mask and pull to the sampler
            are left out.""",
    ),
    preset_from_text(
        LossSpec(trust=Unbounded("logp"), aggregate=TokenMean()),
        """iw_opd: IW-OPD: on-policy distillation with less weight behind a prefix that went apart
        paper: arXiv 2606.22600
        trust: TRL's iw_opd: -A·logp, no ratio
        aggregate: TRL's iw_opd: divided by the tokens of the step
        advantage (iw_opd): IW-OPD, arXiv 2606.22600, algorithm 1: the teacher's preference times
            1 + gamma·(1 - share of the disagreement before the token); gamma 0.5 is TRL's default
        note: Compared with TRL's code, not with the paper's text. The same loss as gpg; the
            advantages make the difference.""",
    ),
    preset_from_text(
        LossSpec(
            trust=Unbounded("ratio"), kl=KL("k2", 5e-3, anchor="teacher"), aggregate=TokenMean()
        ),
        """kdrl: KDRL: a reward and a teacher, the policy gradient plus a reverse KL on sampled
            tokens
        paper: arXiv 2506.02208
        trust: KDRL, arXiv 2506.02208, section 2.1: GRPO's importance-weighted policy gradient
        kl: KDRL, equation 8 and appendix A.3: the reverse KL to the teacher by k2, whose gradient
            is unbiased
        kl.coef: KDRL, section 3.3: begins at 5e-3 (and is lowered linearly to 1e-3)
        aggregate: KDRL: divided by the tokens of all outputs
        advantage (grpo): KDRL: GRPO's advantages of a rule-based reward
        note: Compared with quotations of the paper and an implementation by others. The teacher's
            share is kl.coef; scale the advantages to weigh the reward.""",
    ),
    preset_from_text(
        LossSpec(
            trust=_NO_REWARD,
            kl=KL(
                "k1",
                1.0,
                grad="k2",
                weight="detached_ratio",
                weight_max=2.0,
                anchor="teacher",
                clamp=None,
            ),
            aggregate=SeqMeanTokenMean(),
        ),
        f"""sdpo: SDPO: the model with feedback in its context teaches the model without, token by
            token
        paper: arXiv 2601.20802
        trust: {_ALONE}
        kl: TRL's SDPO: distillation_mode 'sampled_token', alpha 1 (the reverse KL)
        kl.weight: the authors' code and TRL's: times the truncated ratio, without its gradient
        kl.weight_max: the authors' is_clip and TRL's distillation_is_clip, 2
        aggregate: TRL's SDPO: mean over sequences of token means (the authors' code: token mean)
        note: Compared with the code of TRL and of the authors. Their runs compare the student's 100
            or 20 most probable entries and a tail, by the JSD at 0.5 or the reverse KL:
            kl=Divergence('jsd', 1.0, weight='ratio', weight_max=2.0, top='student', k=100).
            teacher_logp is the same model's, read with the feedback in its prompt.""",
    ),
    preset_from_text(
        LossSpec(trust=_NO_REWARD, kl=Divergence("reverse", 1.0), aggregate=TokenMean()),
        f"""opd_exact: On-policy distillation by the exact reverse KL over the whole vocabulary
        paper: NeMo-RL distillation; TRL DistillationTrainer
        trust: {_ALONE}
        kl: KL(student‖teacher) of the next token; TRL's DistillationTrainer: beta 1
        aggregate: TRL's DistillationTrainer: divided by the tokens of the step
        note: Compared with TRL's code.""",
    ),
    preset_from_text(
        LossSpec(trust=_NO_REWARD, kl=Divergence("jsd", 1.0), aggregate=SeqMeanTokenMean()),
        f"""gkd: GKD: the generalised Jensen-Shannon divergence on the student's own completions
        paper: arXiv 2306.13649
        trust: {_ALONE}
        kl: GKD, arXiv 2306.13649, equation 1: the mixture of student and teacher
        kl.beta: TRL GKDConfig: beta 0.5
        aggregate: {_GKD_MEAN}
        note: Compared with TRL's code, which divides by tokens.""",
    ),
    preset_from_text(
        LossSpec(trust=_NO_REWARD, kl=Divergence("forward", 1.0), aggregate=SeqMeanTokenMean()),
        f"""gkd_forward: GKD with the forward KL: the student covers what the teacher would say
        paper: arXiv 2306.13649
        trust: {_ALONE}
        kl: GKD, arXiv 2306.13649, section 3: KL(teacher‖student), its JSD at beta 0
        aggregate: {_GKD_MEAN}
        note: Compared with TRL's code at beta 0.""",
    ),
    preset_from_text(
        LossSpec(trust=_NO_REWARD, kl=Divergence("reverse", 1.0), aggregate=SeqMeanTokenMean()),
        f"""gkd_reverse: GKD with the reverse KL: the student avoids what the teacher would not say
        paper: arXiv 2306.13649
        trust: {_ALONE}
        kl: GKD, arXiv 2306.13649, section 3: KL(student‖teacher), its JSD at beta 1
        aggregate: {_GKD_MEAN}
        note: Compared with TRL's code at beta 1. opd_exact is the same divergence averaged over
            tokens.""",
    ),
    preset_from_text(
        LossSpec(trust=_NO_REWARD, kl=Divergence("generalised", 1.0), aggregate=TokenMean()),
        f"""mopd_topk: Generalised KL on the entries that the teacher sent
        paper: arXiv 2606.30406
        trust: {_ALONE}
        kl: arXiv 2606.30406, equation 5: a sum that is smallest where student and teacher are
            equal, although the entries hold less than the whole mass
        aggregate: token mean
        note: Compared with equation 5 as ms-swift's issue 10079 quotes it. The teacher is a TopK;
            with a teacher of all entries this is the reverse KL.""",
    ),
    preset_from_text(
        LossSpec(trust=_NO_REWARD, kl=Divergence("forward", 1.0), aggregate=TokenMean()),
        f"""opsd: OPSD: the model that sees the solution teaches the model that does not
        paper: arXiv 2601.18734
        trust: {_ALONE}
        kl: OPSD, arXiv 2601.18734, version 3, table 3: the forward KL over the whole vocabulary
        aggregate: the authors' code: divided by the tokens of the batch
        note: Compared with the authors' first code, whose scripts take the JSD at 0.5, and with
            their answer that later runs take the forward KL (issue 14). They also cap each entry's
            term at 0.05, which this loss does not. The teacher is the same model with the solution
            in its prompt.""",
    ),
    preset_from_text(
        LossSpec(
            ratio=TokenRatio(log_clamp=(-20.0, math.log(2.0))),
            trust=_NO_REWARD,
            kl=Divergence("jsd", 1.0, weight="ratio"),
            aggregate=SeqMeanTokenMean(),
        ),
        f"""sdft: SDFT: the model with a demonstration in its context teaches the model without
        paper: arXiv 2601.19897
        ratio: TRL's SDFT: distillation_is_clip 2, the log-ratio no lower than -20
        trust: {_ALONE}
        kl: TRL's SDFT, alpha 0.5, with distillation_mode 'full_logits'
        kl.weight: TRL's SDFT: times the truncated ratio, without its gradient
        aggregate: TRL's SDFT: mean over sequences of token means
        note: Compared with TRL's code, whose default compares the student's 100 most probable
            entries, normalised over themselves: preset('sdft', top='student', k=100,
            rest='renormalise'). The paper writes the reverse KL, and its authors
            say that their results come from the forward KL (idanshen/Self-Distillation, issue 5):
            preset('sdft', kind='forward').""",
    ),
)
