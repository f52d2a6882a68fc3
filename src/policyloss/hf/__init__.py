"""Any causal language model of Hugging Face, without its logits: `policy_loss` and `logprobs`.

    import policyloss as pl

    out = pl.hf.policy_loss(
        model, "dapo", ids, attention_mask, old_logp=old_logp, advantages=advantages, mask=mask
    )
    out.loss.backward()

The model runs unchanged, inside its wrappers; only its output head is replaced while it runs, by
`linear_policy_loss` or `linear_logprobs`. This package does not import transformers.

output_head  the module of the head, its matrices, and the transformation of its logits
forward      the model's forward with another head, and whether it keeps sequences apart
one_call     the arguments of a call, aligned with the predicted tokens
calls        the public functions
"""

from policyloss.hf.calls import explain_plan, logprobs, policy_loss

__all__ = ["explain_plan", "logprobs", "policy_loss"]
