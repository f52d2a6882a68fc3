"""Small models of images and text, built from their configurations, against their own logits: with
pixel values in the batch, and with text alone.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hf_models import SIZES, batch_for, built, gradients, most_rows, own_logits, token_ids
from torch import Tensor

import policyloss as pl

IMAGE, FIRST, LAST = 5, 6, 7  # the tokens of an image, and the marks around them
PATCH, SIDE = 4, 8  # pixels
SPEC = pl.preset("dapo", entropy_coef=0.01)
ROWS = 16
_TEXT = {
    name: SIZES[name]
    for name in (
        *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
        *("num_key_value_heads", "max_position_embeddings", "vocab_size", "pad_token_id"),
    )
} | {"head_dim": 8, "eos_token_id": 1, "bos_token_id": 1}
_VISION = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": SIDE,
    "patch_size": PATCH,
}


def pixels(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def with_images(count: int) -> Tensor:
    """Two rows of 20 tokens, with `count` tokens for an image behind the first two."""
    ids = token_ids(2, 20).clamp(min=10)
    ids[:, 2], ids[:, 3 : 3 + count], ids[:, 3 + count] = FIRST, IMAGE, LAST
    return ids


def llava() -> tuple[Any, Tensor, dict[str, Tensor]]:
    from transformers import LlavaConfig, LlavaForConditionalGeneration

    config = LlavaConfig(
        text_config={"model_type": "llama", **_TEXT},
        vision_config={"model_type": "clip_vision_model", **_VISION},
        image_token_index=IMAGE,
    )
    ids = with_images((SIDE // PATCH) ** 2)
    model = built(LlavaForConditionalGeneration, config)
    return model, ids, {"pixel_values": pixels(2, 3, SIDE, SIDE)}


def gemma3() -> tuple[Any, Tensor, dict[str, Tensor]]:
    """Its logits are capped, and the tokens of an image see each other in both directions."""
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    config = Gemma3Config(
        text_config={**_TEXT, "final_logit_softcapping": 5.0, "sliding_window": 8},
        vision_config=_VISION,
        mm_tokens_per_image=4,
        image_token_index=IMAGE,
        boi_token_index=FIRST,
        eoi_token_index=LAST,
    )
    ids = with_images(4)
    inputs = {"pixel_values": pixels(2, 3, SIDE, SIDE), "token_type_ids": (ids == IMAGE).long()}
    model: Any = built(Gemma3ForConditionalGeneration, config)
    with torch.no_grad():  # begins as zeros, which would hide the images
        model.model.multi_modal_projector.mm_input_projection_weight.copy_(pixels(16, 32))
    return model, ids, inputs


def qwen2_vl() -> tuple[Any, Tensor, dict[str, Tensor]]:
    """Its positions have three dimensions, which it counts from the sizes of the images."""
    from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration

    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
    config = Qwen2VLConfig(
        text_config={**_TEXT, "rope_parameters": rope},
        vision_config={
            "depth": 2,
            "embed_dim": 16,
            "num_heads": 2,
            "mlp_ratio": 2,
            "patch_size": PATCH,
            "hidden_size": 32,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
        },
        image_token_id=IMAGE,
        vision_start_token_id=FIRST,
        vision_end_token_id=LAST,
        video_token_id=8,
    )
    # 4 × 4 patches of two frames of 3 colours, merged two by two: 4 tokens of each image.
    sizes = torch.tensor([[1, 4, 4], [1, 4, 4]])
    ids = with_images(4)
    inputs = {
        "pixel_values": pixels(32, 2 * 3 * PATCH**2),
        "image_grid_thw": sizes,
        "mm_token_type_ids": (ids == IMAGE).long(),
    }
    return built(Qwen2VLForConditionalGeneration, config), ids, inputs


MODELS = {"llava": llava, "gemma3": gemma3, "qwen2_vl": qwen2_vl}


def numbers(model: Any, loss: Tensor, **of_tokens: Tensor) -> dict[str, Tensor]:
    loss.backward()
    every = {"loss": loss, **of_tokens, **gradients(model)}
    return {name: x.detach() for name, x in every.items()}


def by_its_own_logits(model: Any, ids: Tensor, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    batch = batch_for(ids, torch.float64)
    out = pl.logprobs(own_logits(model, ids, **inputs), ids[:, 1:], entropy=True)
    loss = pl.policy_loss(SPEC, out.logp, entropy=out.entropy, **batch).loss
    live = batch["mask"]
    return numbers(model, loss, logp=out.logp * live, entropy=out.entropy * live)


def without_logits(
    model: Any, ids: Tensor, inputs: dict[str, Tensor], padding: Tensor | None = None
) -> dict[str, Tensor]:
    plan = pl.Plan("one_pass", rows=ROWS, columns=0)
    out = pl.hf.policy_loss(
        *(model, SPEC, ids, padding),
        model_inputs=inputs,
        plan=plan,
        **batch_for(ids, torch.float64),
    )
    return numbers(model, out.loss, logp=out.logp, entropy=out.entropy)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("images", [True, False])
def test_a_model_of_images_gives_its_own_numbers_without_logits(name: str, images: bool) -> None:
    model, ids, inputs = MODELS[name]()
    ids, inputs = (ids, inputs) if images else (token_ids(2, 20).clamp(min=10), {})
    theirs = by_its_own_logits(model, ids, inputs)
    vision = [part for part in theirs if "vision" in part or "visual" in part]
    assert any(theirs[part].any() for part in vision) == images
    torch.testing.assert_close(without_logits(model, ids, inputs), theirs, rtol=1e-9, atol=1e-12)
    every = torch.ones_like(ids)
    torch.testing.assert_close(
        without_logits(model, ids, inputs, every), theirs, rtol=1e-9, atol=1e-12
    )
    # The transposed weight of the head has 32 rows.
    assert most_rows(60, lambda: without_logits(model, ids, inputs)) <= 2 * ROWS
    assert most_rows(60, lambda: own_logits(model, ids, **inputs)) == ids.numel()


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("images", [True, False])
def test_padding_on_the_left_is_not_seen(name: str, images: bool) -> None:
    """Prompts of several lengths are padded on the left before images are answered about."""
    model, ids, inputs = MODELS[name]()
    ids, inputs = (ids, inputs) if images else (token_ids(2, 20).clamp(min=10), {})
    alone = pl.hf.logprobs(model, ids, model_inputs=inputs).logp

    def padded(x: Tensor) -> Tensor:
        return torch.nn.functional.pad(x, (3, 0))

    wider = {name: padded(x) if x.shape == ids.shape else x for name, x in inputs.items()}
    out = pl.hf.logprobs(model, padded(ids), padded(torch.ones_like(ids)), model_inputs=wider).logp
    # Positions are turned in float32, whatever the weights are.
    torch.testing.assert_close(out[:, 3:], alone, rtol=1e-5, atol=1e-6)
    assert not out[:, :2].any()


@pytest.mark.filterwarnings("ignore:.*tie")
@pytest.mark.parametrize("name", MODELS)
def test_an_adapter_of_the_language_model(name: str) -> None:
    from peft import LoraConfig, get_peft_model

    model, ids, inputs = MODELS[name]()
    targets = r".*language_model.*\.(q_proj|v_proj)|lm_head"
    adapter = LoraConfig(r=4, target_modules=targets, task_type="CAUSAL_LM")
    adapted: Any = get_peft_model(model, adapter, autocast_adapter_dtype=False)
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.normal_(0, 0.3, generator=torch.Generator().manual_seed(1))
    theirs = by_its_own_logits(adapted, ids, inputs)
    assert sum("lora" in part for part in theirs) == 10  # two layers, two each, and the head
    torch.testing.assert_close(without_logits(adapted, ids, inputs), theirs, rtol=1e-9, atol=1e-12)
