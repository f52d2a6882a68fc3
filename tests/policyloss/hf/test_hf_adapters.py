"""Real PEFT models against their own logits: adapters in the body and on the head, merged and not,
copies that are trained instead of the head, single tokens; and adapters that no head can follow.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hf_models import batch_for, built, gradients, most_rows, own_logits, small_config, token_ids
from torch import Tensor

import policyloss as pl

BODY = ["q_proj", "v_proj", "up_proj"]
IDS = token_ids(5, 25)
SPEC = pl.preset("dapo", entropy_coef=0.01)
ROWS = 16  # of logits that a window holds
# The options of the adapter, and whether the model's head is tied to its embedding.
ADAPTERS: dict[str, tuple[dict[str, Any], bool]] = {
    "body": ({"target_modules": BODY}, False),
    "body, tied head": ({"target_modules": BODY}, True),
    "head": ({"target_modules": [*BODY, "lm_head"]}, False),
    "head alone": ({"target_modules": ["lm_head"]}, False),
    "tied head": ({"target_modules": [*BODY, "lm_head"]}, True),
    "rank-stabilised": ({"target_modules": ["lm_head"], "use_rslora": True}, False),
    "dropout": ({"target_modules": [*BODY, "lm_head"], "lora_dropout": 0.3}, False),
    "copy": ({"target_modules": BODY, "modules_to_save": ["lm_head"]}, False),
    "copies of both": (
        {"target_modules": BODY, "modules_to_save": ["lm_head", "embed_tokens"]},
        False,
    ),
    "tied copy": ({"target_modules": BODY, "modules_to_save": ["embed_tokens"]}, True),
    "tokens": ({"target_modules": BODY, "trainable_token_indices": [4, 9]}, True),
    "tokens of the head": (
        {"target_modules": BODY, "trainable_token_indices": {"lm_head": [4, 9]}},
        False,
    ),
}


def randomise(model: Any) -> None:
    """Adapters begin as zeros, which would hide them."""
    torch.manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.normal_(0, 0.3)


def llama(dtype: torch.dtype = torch.float64, **changes: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    model: Any = built(LlamaForCausalLM, small_config(LlamaConfig, **changes), dtype)
    model.tie_weights()
    return model


def adapted(config: dict[str, Any], tied: bool = False, dtype: Any = torch.float64) -> Any:
    """A small Llama with an adapter, in training mode."""
    from peft import LoraConfig, get_peft_model

    model = llama(dtype, tie_word_embeddings=tied)
    options = {"r": 4, "lora_alpha": 6, "task_type": "CAUSAL_LM", **config}
    adapter: Any = get_peft_model(model, LoraConfig(**options), autocast_adapter_dtype=False)
    randomise(adapter)
    return adapter.train()


def numbers(model: Any, out: Any, logp: Tensor, entropy: Tensor) -> dict[str, Tensor]:
    out.loss.backward()
    every = {"logp": logp, "entropy": entropy, "loss": out.loss, **gradients(model)}
    return {name: x.detach() for name, x in every.items()}


def by_its_own_logits(model: Any) -> dict[str, Tensor]:
    """Loss, log-probabilities, entropies and gradients, with the logits that PEFT's model makes."""
    batch = batch_for(IDS, torch.float64)
    torch.manual_seed(0)
    of_tokens = pl.logprobs(
        own_logits(model, IDS), IDS[:, 1:], 0.7, entropy=True, mask=batch["mask"]
    )
    out = pl.policy_loss(SPEC, of_tokens.logp, entropy=of_tokens.entropy, **batch)
    return numbers(model, out, *of_tokens)


def without_logits(model: Any) -> dict[str, Tensor]:
    """The same by `pl.hf`. It looks at a new model first, and leaves the random state alone."""
    batch = batch_for(IDS, torch.float64)
    plan = pl.Plan("one_pass", rows=ROWS, columns=0)
    torch.manual_seed(0)
    out = pl.hf.policy_loss(model, SPEC, IDS, temperature=0.7, plan=plan, **batch)
    return numbers(model, out, out.logp, out.entropy)


@pytest.mark.filterwarnings("ignore:.*tie")
@pytest.mark.parametrize("name", ADAPTERS)
def test_an_adapted_model_gives_its_own_numbers_without_logits(name: str) -> None:
    config, tied = ADAPTERS[name]
    model = adapted(config, tied)
    theirs = by_its_own_logits(model)
    assert len(theirs) > 3, "nothing is trained"
    torch.testing.assert_close(without_logits(model), theirs, rtol=1e-11, atol=1e-13)
    assert most_rows(60, lambda: without_logits(model)) <= 3 * ROWS
    assert most_rows(60, lambda: by_its_own_logits(model)) == 125


@pytest.mark.filterwarnings("ignore:.*tie")
@pytest.mark.parametrize("name", ["head", "copy", "tokens of the head"])
def test_an_adapter_that_is_off_is_the_model_without_it(name: str) -> None:
    """The reference policy of a run with adapters."""
    model = adapted(*ADAPTERS[name])
    with model.disable_adapter():
        ours = pl.hf.logprobs(model, IDS).logp
        theirs = own_logits(model, IDS).log_softmax(-1).gather(-1, IDS[:, 1:, None])[..., 0]
    torch.testing.assert_close(ours, theirs)
    assert not torch.allclose(pl.hf.logprobs(model, IDS).logp, theirs)


def test_merging_changes_no_number() -> None:
    """A merged adapter that is then turned off is taken out of the weight again, as PEFT does."""
    model = adapted(ADAPTERS["head"][0])
    apart = pl.hf.logprobs(model, IDS).logp
    with model.disable_adapter():
        off = pl.hf.logprobs(model, IDS).logp
    model.merge_adapter()
    torch.testing.assert_close(pl.hf.logprobs(model, IDS).logp, apart)
    with model.disable_adapter():
        torch.testing.assert_close(pl.hf.logprobs(model, IDS).logp, off)
    merged = model.merge_and_unload()
    torch.testing.assert_close(pl.hf.logprobs(merged, IDS).logp, apart)


def test_two_adapters_add_up() -> None:
    from peft import LoraConfig

    model = adapted({"target_modules": ["lm_head"]})
    model.add_adapter("second", LoraConfig(r=2, target_modules=["lm_head"], lora_alpha=8))
    model.base_model.set_adapter(["default", "second"])
    model.double()
    randomise(model)
    torch.testing.assert_close(without_logits(model), by_its_own_logits(model))


def test_a_bias_of_the_adapter_is_added() -> None:
    from peft import LoraConfig, get_peft_model
    from transformers import PhiConfig, PhiForCausalLM

    config = LoraConfig(r=4, target_modules=["lm_head"], lora_bias=True)
    phi: Any = built(PhiForCausalLM, small_config(PhiConfig))
    assert phi.lm_head.bias is not None
    model: Any = get_peft_model(phi, config, autocast_adapter_dtype=False)
    randomise(model)
    ours = without_logits(model)
    assert any("lora_B.default.bias" in name for name in ours)
    torch.testing.assert_close(ours, by_its_own_logits(model))


def test_a_small_update_of_a_rounded_head_is_not_lost() -> None:
    """Weights of 1 in bfloat16 have no room for an update of 2⁻¹⁰; the adapter's product does."""
    model = adapted({"target_modules": ["lm_head"], "lora_alpha": 4}, dtype=torch.bfloat16)
    head = model.get_output_embeddings()
    with torch.no_grad():
        head.base_layer.weight.fill_(1.0)
        head.lora_A.default.weight.zero_()[0, 0] = 1.0
        head.lora_B.default.weight.zero_()[7, 0] = 2.0**-10
    caught: list[Tensor] = []
    head.register_forward_pre_hook(lambda module, inputs: caught.append(inputs[0].detach()))
    logp = pl.hf.logprobs(model, IDS.new_full((1, 2), 7)).logp
    # All logits are equal but that of word 7, which is `step` above: logp = step − log(59 + eˢᵗᵉᵖ),
    # and without the update −log 60.
    step = float(caught[-1][0, 0, 0]) * 2.0**-10
    expected = step - math.log(59 + math.exp(step))
    assert abs(expected + math.log(60)) > 1e-4
    assert logp.item() == pytest.approx(expected, abs=2e-6)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ("DoraConfig", "DoraLinearVariant"),
        ("LoHaConfig", "loha"),
        ("AdaLoraConfig", "adalora"),
    ],
)
def test_an_adapter_that_is_no_product_is_refused(config: str, words: str) -> None:
    """These begin as no change at all, so that comparing products would not show them."""
    import peft

    options: dict[str, Any] = {"target_modules": ["lm_head"]}
    if config == "DoraConfig":
        options |= {"use_dora": True}
    if config == "AdaLoraConfig":
        options |= {"total_step": 10}
    made = getattr(peft, "LoraConfig" if config == "DoraConfig" else config)(**options)
    model = peft.get_peft_model(llama(), made, autocast_adapter_dtype=False)
    with pytest.raises(pl.InputError, match=rf"(?i){words}.*head='logits'"):
        pl.hf.logprobs(model, IDS)
    theirs = own_logits(model, IDS).log_softmax(-1).gather(-1, IDS[:, 1:, None])[..., 0]
    torch.testing.assert_close(pl.hf.logprobs(model, IDS, head="auto").logp, theirs)


def test_positions_reach_a_wrapped_model() -> None:
    """GPT-2 learns its positions, and the signature of PEFT's model does not show that it takes
    them.
    """
    from peft import LoraConfig, get_peft_model
    from transformers import GPT2Config, GPT2LMHeadModel

    gpt2: Any = built(GPT2LMHeadModel, small_config(GPT2Config))
    config = LoraConfig(target_modules=["c_attn"], fan_in_fan_out=True, task_type="CAUSAL_LM")
    model: Any = get_peft_model(gpt2, config).eval()
    row = IDS[:1, :6]
    padded = torch.cat([torch.zeros_like(row[:, :3]), row], 1)
    live = (torch.arange(9) >= 3)[None].long()
    alone = own_logits(model, row).log_softmax(-1).gather(-1, row[:, 1:, None])[..., 0]
    torch.testing.assert_close(pl.hf.logprobs(model, padded, live).logp[:, 3:], alone)
