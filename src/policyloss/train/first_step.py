"""The first step of a run: whether the engine's log-probabilities are those of the trainer."""

from __future__ import annotations

from policyloss.doctor import doctor
from policyloss.errors import InputError
from policyloss.train.batches import Pack


def mismatch_of(pack: Pack) -> str | None:
    """What is wrong with the ratio of a policy that was not updated yet; None if nothing is, or
    the step has too few tokens to tell.
    """
    tokens = pack.tokens
    try:
        verdict = doctor(
            rollout_logp=tokens["rollout_logp"],
            old_logp=tokens["old_logp"],
            mask=tokens["mask"],
            cu_seqlens=pack.cu_seqlens,
        )
    except InputError:
        return None
    if verdict.cause in ("healthy", "copy"):  # one program may compute both alike to the bit
        return None
    return (
        "the ratio of the unchanged policy is not 1: the sampler's log-probabilities are not the "
        f"trainer's. {verdict.title} (confidence {verdict.confidence:.0%}): "
        f"{verdict.evidence[-1]}. {verdict.remedy} `policyloss doctor` on rollouts.jsonl says more."
    )
