"""Gradients through a model: against one backward pass for each token, and against a real step."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

import policyloss as pl
import policyloss_lab as lab
from policyloss.errors import InputError
from policyloss_lab.whatif.tokens import StoredTokens
from policyloss_lab.whatif.weights import EachToken, HeadWeight, Parameters, weights_for

VOCABULARY = 24
LENGTHS, PROMPTS = (3, 5, 2), ([1, 2], [3], [4, 5, 6])


def small_model(kind: str = "llama", **options: Any) -> Any:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(
        kind,
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=32,
        pad_token_id=0,
        tie_word_embeddings=False,
        **options,
    )
    return transformers.AutoModelForCausalLM.from_config(config).eval()


def tokens_for(model: Any, temperature: float = 1.0) -> StoredTokens:
    """Ten tokens of three sequences, one of them not trained on, as the model scores them."""
    g = torch.Generator().manual_seed(1)
    count = sum(LENGTHS)
    mask = torch.ones(count, dtype=torch.bool)
    mask[4] = False
    tokens = StoredTokens.of(
        {
            "logp": torch.zeros(count),
            "old_logp": torch.zeros(count),
            "advantages": torch.randn(count, generator=g),
            "mask": mask,
            "ids": torch.randint(1, VOCABULARY, (count,), generator=g),
            "prompts": PROMPTS,
            "cu_seqlens": torch.tensor([0, *LENGTHS]).cumsum(0),
        }
    )
    logp = Parameters(model, temperature).logp(tokens)
    old = logp + 0.1 * torch.randn(count, generator=g, dtype=torch.float64) * mask
    return tokens.replace(inputs=tokens.inputs.replace(logp=logp, old_logp=old))


def logp_by_hand(model: Any, tokens: StoredTokens, temperature: float = 1.0) -> Tensor:
    """The log-softmax of the model's own logits, sequence by sequence."""
    assert tokens.ids is not None
    out = []
    for prompt, ids in zip(PROMPTS, torch.split(tokens.ids, LENGTHS), strict=True):
        row = torch.cat([torch.tensor(prompt), ids])[None]
        logits = model(input_ids=row).logits[0, len(prompt) - 1 : -1] / temperature
        out.append(logits.log_softmax(1)[torch.arange(len(ids)), ids])
    return torch.cat(out)


def jacobian(model: Any, weights: list[Tensor], tokens: StoredTokens, warmth: float) -> Tensor:
    """`∂logp/∂θ` `[N, P]`, a backward pass for each token, 0 where one is not trained on."""
    logp = logp_by_hand(model, tokens, warmth)
    rows = []
    for x in logp:
        parts = torch.autograd.grad(x, weights, retain_graph=True, allow_unused=True)
        pairs = zip(parts, weights, strict=True)
        rows.append(
            torch.cat([torch.zeros(w.numel()) if p is None else p.flatten() for p, w in pairs])
        )
    return torch.stack(rows).double() * tokens.inputs.mask[:, None]


KINDS = (
    ("llama", {}, 1.0),
    ("llama", {}, 0.7),
    ("gemma2", {"final_logit_softcapping": 2.0}, 0.7),
    ("cohere", {"logit_scale": 0.5}, 1.3),
)


@pytest.mark.parametrize(("kind", "options", "warmth"), KINDS)
def test_products_equal_one_backward_pass_per_token(
    kind: str, options: dict[str, Any], warmth: float
) -> None:
    model = small_model(kind, **options)
    tokens = tokens_for(model, warmth)
    with torch.no_grad():
        stored = tokens.inputs.logp[tokens.inputs.mask]
        by_hand = logp_by_hand(model, tokens, warmth)[tokens.inputs.mask].double()
    assert torch.allclose(stored, by_hand, atol=1e-5)
    g = torch.randn(4, len(tokens.inputs.mask), generator=torch.Generator().manual_seed(2)).double()
    head = [model.get_output_embeddings().weight]
    every = [p for p in model.parameters() if p.requires_grad]
    for tangent, weights in ((Parameters(model, warmth), every), (HeadWeight(model, warmth), head)):
        j = jacobian(model, weights, tokens, warmth)
        products = tangent.products(g * tokens.inputs.mask, tokens)
        through = g @ j
        assert torch.allclose(products.gram, through @ through.T, rtol=1e-3, atol=1e-5)
        assert torch.allclose(products.change, -tokens.sums(through @ j.T), rtol=1e-3, atol=1e-5), (
            tangent.name
        )


@pytest.mark.parametrize("name", ["dapo", "gspo", "reinforce"])
def test_a_small_step_changes_each_sequence_as_predicted(name: str) -> None:
    """The whole way: gradient descent on the real loss moves the log-probabilities by the predicted
    change times the length of the step.
    """
    model = small_model()
    tokens = tokens_for(model)
    result = lab.what_if(tokens, [name], model=model)
    assert result.through == "parameters"
    t, twin = tokens.inputs, copy.deepcopy(model)
    logp = torch.where(t.mask, logp_by_hand(twin, tokens).double(), 0.0)
    pl.policy_loss(name, **{**t.tensors(), "logp": logp}).loss.backward()  # type: ignore[no-untyped-call]
    norm = torch.cat([p.grad.flatten() for p in twin.parameters() if p.grad is not None]).norm()
    with torch.no_grad():
        for p in twin.parameters():
            if p.grad is not None:
                p -= 1e-3 * p.grad / norm
        after = torch.where(t.mask, logp_by_hand(twin, tokens).double(), 0.0)
    real = tokens.sums(after - t.logp)
    predicted = 1e-3 * result.products.unit_change[0]
    assert torch.allclose(real, predicted, rtol=0.02, atol=2e-6)


def test_a_model_of_other_weights_is_noted() -> None:
    model = small_model()
    tokens = tokens_for(model)
    assert lab.what_if(tokens, ["ppo"], model=model).notes == ()
    shifted = tokens.replace(inputs=tokens.inputs.replace(logp=tokens.inputs.logp - 1.0))
    (note,) = lab.what_if(shifted, ["ppo"], model=model).notes
    assert "1 nats from the stored ones" in note


def test_the_parameters_of_the_gradient_are_chosen_by_size(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small_model()
    size = Parameters(model).size
    monkeypatch.setattr("policyloss_lab.whatif.weights.GRADIENT_NUMBERS", 3 * size)
    assert weights_for(model, 3, 1.0, None).name == "parameters"
    assert weights_for(model, 4, 1.0, None).name == "head"
    assert weights_for(model, 4, 1.0, "parameters").name == "parameters"
    assert weights_for(model, 1, 1.0, "head").name == "head"
    assert isinstance(weights_for(model, 1, 1.0, "tokens"), EachToken)
    assert isinstance(weights_for(None, 1, 1.0, None), EachToken)


def test_a_model_without_ids_or_prompts_is_refused() -> None:
    model = small_model()
    tokens = tokens_for(model)
    with pytest.raises(InputError, match="a model needs the ids of the tokens and prompts"):
        lab.what_if(tokens.replace(ids=None), ["ppo"], model=model)
    with pytest.raises(InputError, match="prompts must hold token ids for each of 3 sequences"):
        lab.what_if(tokens.replace(prompts=[[1], [2], []]), ["ppo"], model=model)


@pytest.mark.parametrize(
    ("prompts", "first", "words"),
    [
        ([[1], ["x"], [2]], 1, "prompts must hold whole numbers"),
        ([[1], [None], [2]], 1, "prompts must hold whole numbers"),
        ([[1], [VOCABULARY], [2]], 1, f"has the ids 0 to {VOCABULARY - 1}"),
        ([[1], [2], [3]], VOCABULARY, f"has the ids 0 to {VOCABULARY - 1}"),
        ([[1], [2], [3]], -1, f"has the ids 0 to {VOCABULARY - 1}"),
    ],
)
def test_ids_outside_the_vocabulary_are_refused(prompts: Any, first: int, words: str) -> None:
    model = small_model()
    tokens = tokens_for(model)
    assert tokens.ids is not None
    ids = tokens.ids.clone()
    ids[0] = first
    for through in ("parameters", "head"):
        with pytest.raises(InputError, match=words):
            lab.what_if(
                tokens.replace(ids=ids, prompts=prompts), ["ppo"], model=model, through=through
            )
