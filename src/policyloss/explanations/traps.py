"""Known traps: surprising properties of parts, and names with two meanings.

Each depends on traits of a spec (see `traits`), so that `explain` shows only the traps of the loss.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from policyloss.explanations.traits import fits, traits
from policyloss.spec import LossSpec


class Trap(NamedTuple):
    """The slot of a trap, the traits that select it (see `traits`), and its text."""

    slot: str
    needs: str
    text: str


def traps(spec: LossSpec) -> tuple[Trap, ...]:
    """The traps that concern `spec`."""
    words = traits(spec)
    return tuple(trap for trap in TRAPS if fits(trap.needs, words))


# A line that is not indented names the slot and the traits, in several alternatives if they are
# separated by "|". The text of the trap follows.
_TEXT = """
ratio: Clip anchor_old | TwoSidedClip anchor_old | CovClip anchor_old | GeometricClip anchor_old
    Clipping cannot fire on the first on-policy step: while logp equals old_logp the ratio is
    exactly 1. With one optimizer step per batch this is the plain policy gradient, and
    clip_fraction stays 0.
ratio: reads_ratio -DetachedClip -GammaWeight -TaperedNegative -Quadratic -SoftGate -form_score \
-form_logp -own_trust
    A loss of 0 does not mean no gradient: at ratio 1 the terms are -advantages, which cancel in the
    sum when the advantages are centred, and each still has its slope.
ratio: anchor_rollout
    The ratio to rollout_logp holds two things at once: how far training has moved, and how the two
    engines differ on the same weights. Clipping acts on both.
ratio: sequence_ratio
    GSPO has two gradients. Through the mean (TRL, OpenRLHF, NeMo-RL, slime) and per token with a
    stopped ratio (verl, SkyRL) agree only if the advantage is constant within a sequence and each
    token counts 1 / L.
trust: Clip sequence_ratio
    A geometric mean stays near 1, so its epsilon is two to three orders of magnitude smaller than
    PPO's. verl and SkyRL reuse their PPO default of 0.2 here, which practically never binds.
aggregate: sequence_ratio TokenMean
    GSPO averages over sequences. Under a token mean a sequence counts by its length; use
    SeqMeanTokenMean for the paper's loss.
ratio: product_ratio
    The log-ratio is a sum over the sequence, so it grows with length: a drift of 0.001 per token is
    a ratio of e at 1000 tokens. Do not mistake it for the geometric mean, which some frameworks
    also call sequence level.
trust: DetachedClip | GammaWeight | TaperedNegative | form_score | form_logp | form_probability \
| form_uncertainty
    Watch the gradient, not the value: the value is only logp times a constant, no objective, and it
    may rise while the policy improves.
trust: DetachedClip outside_clip
    Bounds called the same mean different numbers. TRL caps the ratio at epsilon_high itself, and
    with its default of 0.2 every weight is at most 0.2 (it recommends 5). verl and NeMo-RL clip to
    [1 - eps_low, 1 + eps_high]. SkyRL 0.3.0 reads its defaults 0 and 5 as distances, so [1, 6].
    Tinker takes [0, 4]. Here they are ratios.
trust: DetachedClip outside_clip
    TorchRL's CISPOLoss lets the gradient through the clamp, so clipped tokens lose theirs: that is
    not CISPO.
trust: DetachedClip outside_zero
    SkyRL's docstring says that a hard zero does not change the gradient; it does: tokens outside
    the band get none.
trust: DetachedClip outside_clip token_ratio
    ROLL's pg_variant='tis' is this loss with the band [0, 1] on logp - old_logp, not the rollout
    correction called TIS.
trust: Clip dual -aipo
    The bound c differs: verl 3.0 (and its vanilla loss cannot switch dual clip off), ROLL 1 +
    2·pg_clip, most others off.
trust: Clip token_ratio -dual -aipo
    verl's loss_mode='vanilla' always applies dual clip with c = 3, so it equals this loss only
    while no negative-advantage token has a ratio above 3.
trust: TwoSidedClip
    With delta at or above 1 + eps_high this is dual clip with dual = delta, under another name.
trust: Clip product_ratio
    RLOO is an advantage estimator everywhere but in TRL, whose RLOOTrainer is also this loss.
trust: GeometricClip
    eps_low and eps_high are distances in log space: 0.4 is the band from 0.67 to 1.49. verl's
    geo_mean ends in a plain mean over the micro-batch, so its scale depends on how the batch is
    cut.
trust: ProbabilityBand
    DPPO differs by framework: verl measures against old_logp and weights logp by a stopped ratio;
    SkyRL, Stable-RL and prime-rl measure against rollout_logp, and SkyRL and prime-rl keep the
    ratio's gradient and do not cap it. verl reads the threshold from clip_ratio, and its cap of 20
    is never used, because clip_ratio_c is 3 by default.
trust: ProbabilityBand divergence_tv sides_both
    prime-rl calls this "ipo"; it has nothing to do with the preference loss IPO.
trust: CovClip
    verl and SkyRL take the means of one micro-batch on one rank and draw with an unseeded
    generator. Here both belong to the whole step: with several micro-batches, make totals with
    policyloss.measure.
trust: CovKL
    verl's docstring says a coefficient of 1.0, its configuration ships 0.1; SkyRL penalises 20 % of
    the tokens by default, verl 0.02 %. With several micro-batches, make totals with
    policyloss.measure.
trust: Quadratic
    DRO is Direct Reward Optimisation in verl; elsewhere the letters also stand for Distributionally
    Robust. A rollout weight multiplies the quadratic term too in verl and here, but not in
    Fireworks' version.
trust: TaperedNegative
    ROLL splits by the sign of the score, Trinity and this library by the sign of the advantage.
trust: TaperedNegative token_ratio
    The paper's ratio is the whole sequence's; ROLL and Trinity use the token's, as here.
    SequenceProduct gives the paper's.
correction: Truncate
    Sequence level means the product in verl, TRL, SkyRL and slime, and the geometric mean in
    ms-swift, AReaL and Fireworks. Here the two have different names.
correction: Truncate
    verl and SkyRL bound the weight from above only; NeMo-RL, slime and OpenRLHF (0.5 by default)
    bound it from below as well.
correction: SequenceMask
    What a kept token is weighted by differs: NeMo-RL, OpenRLHF and ms-swift keep the raw token
    weight, TRL the sequence's.
correction: DivergenceMask
    OpenRLHF reads a single threshold as [0, threshold]: rounding puts the binary KL of two nearly
    equal probabilities a hair below 0 at times, and such a token is dropped. Here there is no lower
    bound unless you give one.
correction: keep rejects
    A rejected token still counts in the denominator (rejected="keep"), as in TRL, slime and AReaL:
    rejecting many shrinks the step. verl's decoupled mode and ms-swift's OPSM shrink the
    denominator instead.
correction: renormalise
    The denominator counts the survivors, which the mask does not tell: with several micro-batches,
    make totals with policyloss.measure. The KL and entropy terms of rejected tokens are gone too.
correction: drop_sequence
    One rejected token removes its whole sequence, from the denominator too; long sequences are
    removed more often. With several micro-batches, make totals with policyloss.measure.
correction: Reject
    The sign of k1 differs: verl thresholds rollout_logp - old_logp, as here; AReaL the opposite.
    AReaL's k3 is also in the other direction.
correction: OPSM
    delta differs by orders of magnitude: slime 1e-4, Trinity 0.1, TRL's documentation 0.5; and so
    does what the drift is measured from: old_logp in slime and Trinity, the rollout policy in TRL,
    ms-swift and cosmos-rl.
correction: Stale
    xtuner's max_token_staleness counts the weight syncs that a token missed: with n steps between
    two syncs and max_token_staleness = k, it is max_age = (k + 1)·n - 1.
correction: TruncateRatio -anchor_rollout
    The weight divides by exp(logp - rollout_logp), which this ratio does not hold: use
    ratio=TokenRatio(anchor='rollout'), or Truncate with this one.
correction: SelfNormalise
    slime normalises by the mean of one rank, verl and this library by that of the whole step.
correction: correction KL
    The weight multiplies the policy term only. ms-swift multiplies the KL term as well.
kl: kl_k1 kl_grad_value
    The gradient of k1 is that of logp itself, zero on average over samples: it reports a KL and
    pulls nowhere. Use grad='k2' or grad='score' for a pull.
kl: kl_k3 kl_grad_value
    k3 estimates the value of the KL without bias; the gradient of that number is not an unbiased
    estimate of the KL's gradient (k2's is, on-policy).
kl: kl_k3
    verl clamps k3 itself to ±10 on top of its input; slime clamps only the one called low_var_kl;
    TRL clamps neither.
kl: kl_k3 kl_weight_None kl_anchor_ref
    TRL 1.16 multiplies the KL by the ratio by default; this loss does not.
kl: kl_weight_ratio
    The weight carries a gradient, so it changes the pull even where the ratio is exactly 1.
kl: kl_anchor_rollout kl_k2
    prime-rl and Kimi write the square without the one half: their 1e-3 is a coef of 2e-3 here.
kl: kl_anchor_teacher
    The tokens must be the student's own. On tokens that the teacher wrote, this estimate is of
    another divergence; use TokenRatio(anchor='teacher') and the likelihood there.
kl: kl_anchor_teacher kl_grad_value
    The gradient of an estimate is not an estimate of the gradient of the KL: grad='k2' gives the
    gradient of the reverse KL on-policy, whatever estimate is reported.
kl: divergence_reverse divergence_no_tail
    Without the tail this sum has no minimum where student and teacher are equal: the student can
    lower it by moving mass out of the entries. Use rest="entry", or kind='generalised'.
kl: divergence_forward divergence_no_tail
    Without the tail the sum may be negative, and verl holds it at 0: there it has no gradient,
    which was so in most steps of a run of theirs. Use rest="entry".
kl: divergence_generalised
    With every entry known this is the reverse KL, number for number.
kl: Divergence
    The advantages still count: pass zeros to learn from the teacher alone.
kl: Divergence
    As an advantage, the same number would train nothing: it does not depend on the sampled token,
    so its expected gradient is 0 (miles#2362). Only the sampled token's log-ratio can be an
    advantage.
entropy_coef: entropy
    Entropy is the full softmax's here; EasyR1 uses -logp, Megatron-LM -p·logp of the sampled token.
    TRL averages the bonus over tokens whatever the loss type; here it is averaged like the rest of
    the loss.
aggregate: TokenMean Clip
    The name dapo is a loss type for this average in TRL, an asymmetric clip in torchtitan, both in
    open-instruct. TRL's "bnpo" divides by each micro-batch's own tokens, which depends on how the
    batch is cut: LocalTokenMean.
aggregate: SeqMeanTokenSumNorm
    Four denominators share this name: verl divides by B and a constant (or the padded width), ROLL
    and Trinity by the width without B, tunix by B without the constant, TRL by the micro-batch's
    rows and max_completion_length.
aggregate: TokenSumNorm
    No mean over sequences: the gradient grows with the number of sequences in the step.
aggregate: TokenSum
    No mean at all: the gradient grows with the number of tokens in the step, and the learning rate
    with it.
aggregate: PromptMean
    SkyRL's prompt_mean is this one; TorchRL's prompt_mean is the mean over samples.
ratio: turn_ratio | TurnMean
    Tokens of a tool must be outside the mask: ratio, KL and denominators read every token inside,
    and a KL of tool tokens in the reward enters the return of every turn before them.
ratio: turn_ratio | TurnMean
    Rewards normalised per turn are biased if the policy decides when to stop: a trajectory that
    goes on subtracts one mean more. advantage.turn_loo is not.
aggregate: TurnMean
    The mean over turns depends on how many turns the policy takes, so it favours short good
    trajectories and long bad ones, as a mean over lengths does.
aggregate: LengthWeighted
    A sequence's mean times its length is its sum: the same weights as SeqMeanTokenSum.
aggregate: LocalTokenMean
    Divides by this call's tokens, so the gradient depends on how the batch is cut.
aggregate: LocalSeqMeanTokenMean
    Divides by this call's sequences, so the gradient depends on how the batch is cut.
"""


def _read_traps(text: str) -> Iterator[Trap]:
    for paragraph in re.split(r"\n(?! )", text.strip()):
        head, _, lines = paragraph.partition("\n")
        slot, _, alternatives = head.partition(": ")
        for needs in alternatives.split(" | "):
            yield Trap(slot, needs, " ".join(lines.split()))


TRAPS = tuple(_read_traps(_TEXT))
