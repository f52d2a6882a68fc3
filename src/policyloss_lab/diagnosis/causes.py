"""What each cause is called, what to do about it, and which correction would have bounded it."""

from __future__ import annotations

from typing import NamedTuple

from policyloss.parts.correction import Band, Reject, SequenceMask, Truncate

Correction = Truncate | Band | SequenceMask | Reject


class Cause(NamedTuple):
    """title: a few words. remedy: what to do. correction: parts that bound the damage until then;
    None where a weight would only hide a bug.
    """

    title: str
    remedy: str
    correction: tuple[Correction, ...] | None = None


TIS = (Truncate(2.0),)
ICEPOP = (Band(0.5, 5.0),)
STALE = (Truncate(2.0), SequenceMask(0.5, 2.0, weight=None))

CAUSES: dict[str, Cause] = {
    "healthy": Cause("healthy", "Nothing needs to be done."),
    "not_explained": Cause(
        "not explained",
        "No known cause fits. Pass model= and prompts=, or more tokens; compare one sequence by "
        "hand, token by token.",
        ICEPOP,
    ),
    "temperature": Cause(
        "a temperature on one side only",
        "Score with the temperature that the engine samples with (pl.logprobs(…, temperature=τ)), "
        "and let the engine report processed log-probabilities (vLLM: "
        'logprobs_mode="processed_logprobs"), or sample at temperature 1.',
        TIS,
    ),
    "top_p": Cause(
        "top-p renormalised on one side only",
        "Sample with top_p=1, or let the engine report raw log-probabilities, or normalise over "
        "the kept tokens on both sides.",
        TIS,
    ),
    "top_k": Cause(
        "top-k renormalised on one side only",
        "Sample without top_k, or let the engine report raw log-probabilities, or normalise over "
        "the kept tokens on both sides.",
        TIS,
    ),
    "min_p": Cause(
        "min-p renormalised on one side only",
        "Sample without min_p, or let the engine report raw log-probabilities, or normalise over "
        "the kept tokens on both sides.",
        TIS,
    ),
    "shift": Cause(
        "numbers one token off",
        "logits[:, t] predict the token at t + 1: slice logits[:, :-1] and ids[:, 1:], once, and "
        "check that the engine's list begins with the first sampled token.",
    ),
    "rows_permuted": Cause(
        "rows in another order",
        "Sort both sides by a request id before they are put side by side; an engine returns "
        "requests in the order in which they finish.",
    ),
    "reencoded": Cause(
        "the text was encoded again",
        "Keep the token ids that the engine sampled, and train on those; text that is decoded and "
        "encoded again is cut into other tokens.",
        (Reject("k3", "max", high=0.5),),
    ),
    "prompt_in_mask": Cause(
        "prompt tokens in the mask",
        "Let the mask begin at the first sampled token; the engine has no number for the prompt.",
    ),
    "end_token": Cause(
        "the end token",
        "Let both sides count the end token, or neither: the engine samples it, and lists it only "
        "if it is asked to.",
    ),
    "padding_in_mask": Cause(
        "padding in the mask", "Let the mask end with the end token of each row."
    ),
    "copy": Cause(
        "rollout_logp is a copy of old_logp",
        "Pass what the engine reported as rollout_logp. If the engine's numbers are meant to serve "
        "as old_logp, no correction can see a mismatch.",
    ),
    "bos": Cause(
        "the first token (BOS) doubled or missing",
        "Encode prompts once, with add_special_tokens=False after a chat template, and hand ids to "
        "the engine, not text.",
        ICEPOP,
    ),
    "template": Cause(
        "another prompt or chat template",
        "Render the template once, and hand the same token ids to both sides.",
        ICEPOP,
    ),
    "stale_weights": Cause(
        "weights of another step",
        "Check that the engine receives the weights after every update, that its prefix cache is "
        "emptied then, and that the number of steps it lags behind is the one you chose.",
        STALE,
    ),
    "logp_bf16": Cause(
        "log-probabilities stored in bf16",
        "Keep log-probabilities in float32 from the softmax on.",
        TIS,
    ),
    "logp_fp16": Cause(
        "log-probabilities stored in fp16",
        "Keep log-probabilities in float32 from the softmax on.",
        TIS,
    ),
    "logits_bf16": Cause(
        "logits rounded to bf16",
        "Compute the head in float32 (vLLM: head_dtype), or upcast logits before the softmax.",
        TIS,
    ),
    "logits_fp16": Cause(
        "logits rounded to fp16", "Upcast logits to float32 before the softmax.", TIS
    ),
    "weights_bf16": Cause(
        "weights in bf16 on one side only",
        "Use one dtype on both sides: score with bf16 weights, or serve float32.",
        TIS,
    ),
    "weights_fp16": Cause("weights in fp16 on one side only", "Use one dtype on both sides.", TIS),
    "weights_int8": Cause(
        "weights in int8 on one side only",
        "Expect a mismatch from quantised rollouts, and correct for it, or serve the trainer's "
        "dtype.",
        STALE,
    ),
    "weights_fp8": Cause(
        "weights in fp8 on one side only",
        "Expect a mismatch from quantised rollouts, and correct for it, or serve the trainer's "
        "dtype.",
        STALE,
    ),
    "adapter_missing": Cause(
        "an adapter that one side does not have",
        "Load the adapter into the engine after every update, or merge it into the weights that "
        "are sent.",
        ICEPOP,
    ),
    "adapter_merged": Cause(
        "an adapter merged into rounded weights",
        "Merge in float32 and round once, or serve base and adapter apart, as the trainer does.",
        TIS,
    ),
    "softcap": Cause(
        "a soft cap missing or doubled",
        "Apply final_logit_softcapping exactly once on both sides; fused heads take it as an "
        "argument.",
        TIS,
    ),
    "positions": Cause(
        "padding that counts",
        "Pass attention_mask, and position_ids = attention_mask.cumsum(-1) - 1, when rows are "
        "padded on the left.",
        ICEPOP,
    ),
    "dropout": Cause(
        "dropout while scoring", "Call model.eval() before log-probabilities are computed.", TIS
    ),
    "router": Cause(
        "other experts for some tokens",
        "Replay the engine's routing in the trainer, keep routers in float32, and mask tokens with "
        "a large ratio.",
        ICEPOP,
    ),
    "vocab_shard": Cause(
        "a shard of the vocabulary",
        "Reduce maximum and sum over all ranks of the vocabulary-parallel group, and check the "
        "offset of each rank's ids.",
    ),
}
