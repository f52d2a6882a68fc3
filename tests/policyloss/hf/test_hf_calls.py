"""`pl.hf` in use: alignment, padding, packs, wrappers, models that it refuses. No logits
are made.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hf_models import batch_for, built, gradients, most_rows, own_logits, small_config, token_ids
from torch import Tensor, nn

import policyloss as pl

IDS = token_ids(3, 9)
BATCH = batch_for(IDS, torch.float64)
SPEC = pl.preset("dapo")


def llama(**changes: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    return built(LlamaForCausalLM, small_config(LlamaConfig, **changes))


def expected_logp(model: Any, ids: Tensor, **inputs: Any) -> Tensor:
    every = own_logits(model, ids, **inputs).log_softmax(-1)
    return every.gather(-1, ids[:, 1:, None]).squeeze(-1)


class Plain(nn.Module):
    """A minimal model: an embedding, a head, and a function of its logits."""

    def __init__(self, after: Callable[[Tensor], Any] = lambda z: z, head: Any = None) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.body = nn.Embedding(60, 16, dtype=torch.float64)
        self.lm_head = head or nn.Linear(16, 60, dtype=torch.float64)
        self.after, self.config = after, SimpleNamespace()

    def get_output_embeddings(self) -> Any:
        return self.lm_head

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Any:
        return SimpleNamespace(logits=self.after(self.lm_head(self.body(input_ids))))


def test_the_shift_by_hand() -> None:
    """Two tokens: the hidden state of the first predicts the second.

    Token 0 gives logits (0, 2) and token 1 gives (0, −2): both predict the other with log σ(2).
    """
    model = Plain(head=nn.Linear(16, 2, bias=True, dtype=torch.float64))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        model.body.weight[:2, 0] = torch.tensor([1.0, -1.0])
        model.lm_head.weight[1, 0] = 2.0
    logp = pl.hf.logprobs(model, torch.tensor([[0, 1], [1, 0]])).logp
    assert logp.tolist() == [[pytest.approx(-0.126928011, abs=1e-9)]] * 2


def test_padding_on_either_side_is_not_seen() -> None:
    model, row = llama(), IDS[:1, :5]
    alone = expected_logp(model, row)[0]
    padded, live = torch.zeros(2, 9, dtype=torch.long), torch.zeros(2, 9, dtype=torch.long)
    padded[0, :5], padded[1, 4:] = row, row
    live[0, :5], live[1, 4:] = 1, 1
    out = pl.hf.logprobs(model, padded, live, entropy=True)
    torch.testing.assert_close(out.logp[0, :4], alone)
    torch.testing.assert_close(out.logp[1, 4:], alone)
    # Padding alone would predict the first token of the left-padded row.
    assert not out.logp[0, 4:].any()
    assert not out.logp[1, :4].any()
    kept = pl.hf.logprobs(model, padded, live, logits_to_keep=6).logp
    torch.testing.assert_close(kept, out.logp[:, -6:])  # fewer rows: products may round otherwise


@pytest.mark.parametrize("head", ["fused", "logits"])
def test_a_mixture(head: Any) -> None:
    """The streams of a model, from its head and from its logits, are those of its own logp."""
    model, demo = llama(), torch.arange(8).expand(3, 8) % 3 == 0
    ce = pl.Stream(pl.LossSpec(trust=pl.Unbounded("logp")), 0.4, mask="demo", advantage=1.0)
    mixture, extras = pl.Mixture({"rl": SPEC, "ce": ce}), {"demo": demo}
    out = pl.hf.policy_loss(model, mixture, IDS, **BATCH, extras=extras, head=head)
    out.loss.backward()
    ours = gradients(model)
    expected = pl.policy_loss(mixture, expected_logp(model, IDS), **BATCH, extras=extras)
    torch.testing.assert_close(out.loss, expected.loss)
    expected.loss.backward()
    for name, gradient in gradients(model).items():
        torch.testing.assert_close(ours[name], gradient)
    numbers = out.metrics.compute()
    assert numbers["ce/loss"] == pytest.approx(expected.metrics["ce/loss"].item())


def refusal(function: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    """The sentence of the error that a call raises, or "" if it raises none."""
    try:
        function(*args, **kwargs)
    except pl.InputError as error:
        return str(error)
    return ""


def test_a_token_that_no_token_predicts_is_refused() -> None:
    """Padding and the token after it, with every kind of mask, by every function and head."""
    model, wrong = llama(), {}
    right = (torch.arange(9) < torch.tensor([9, 5, 7])[:, None]).long()
    for side, live in (("right", right), ("left", right.flip(1))):
        predicted = (live[:, 1:] * live[:, :-1]).bool()
        after = live[:, 1:].bool() & ~predicted
        masks = {"": predicted, "is 0": torch.ones(3, 8).bool()}
        if after.any():
            masks["follow padding"] = live[:, 1:]
        for words, mask in masks.items():
            for keep, head in ((None, "fused"), (7, "fused"), (None, "logits")):
                given = {**BATCH, "mask": mask}
                cut = {k: x[:, -keep:] if keep and x.dim() > 1 else x for k, x in given.items()}
                options: Any = {"logits_to_keep": keep, "head": head}
                loss = refusal(pl.hf.policy_loss, model, SPEC, IDS, live, **cut, **options)
                logp = refusal(pl.hf.logprobs, model, IDS, live, mask=cut["mask"], **options)
                for name, text in (("policy_loss", loss), ("logprobs", logp)):
                    if (words not in text) if words else text:
                        wrong[f"{name}, {side}, {words or 'right mask'}, {options}"] = text
    assert not wrong
    everything = {**BATCH, "mask": masks["is 0"]}
    text = refusal(pl.hf.policy_loss, model, SPEC, IDS, right, **everything)
    assert "mask is True at 6 tokens where attention_mask is 0" in text


def test_positions_that_begin_again_need_cu_seqlens() -> None:
    """A row of several sequences that are called one: refused, by every way to pass positions."""
    model, lengths = llama(), torch.tensor([9, 4, 6])
    pack = torch.cat([IDS[i, :n] for i, n in enumerate(lengths)])[None]
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    batch = batch_for(pack, torch.float64)
    calls = {
        "position_ids": {"position_ids": positions},
        "model_inputs": {"model_inputs": {"position_ids": positions}},
        "padded": {"position_ids": positions, "attention_mask": torch.ones_like(pack)},
    }
    for name, call in calls.items():
        for said in (
            refusal(pl.hf.policy_loss, model, "gspo", pack, **batch, **call),
            refusal(pl.hf.logprobs, model, pack, **call),
        ):
            assert "position_ids begin again at 2 places" in said, name
    mask = batch["mask"].index_fill(1, torch.tensor([8, 12]), False)
    pl.hf.policy_loss(
        model,
        "gspo",
        pack,
        position_ids=positions,
        cu_seqlens=torch.tensor([0, 9, 13, 19]),
        **{**batch, "mask": mask, "advantages": torch.ones(3, dtype=torch.float64)},
    )
    # One sequence per row, counted as transformers counts positions with padding.
    live = torch.ones_like(IDS).index_fill(1, torch.tensor([0, 1]), 0)
    counted = (live.cumsum(-1) - 1).masked_fill(live == 0, 1)
    assert pl.hf.logprobs(model, IDS, live, position_ids=counted).logp[:, 2:].all()


@pytest.mark.parametrize("name", ["grpo", "gspo"])
def test_a_pack_is_its_sequences(name: str) -> None:
    """Loss and gradients of three sequences in one row, and of the same three padded."""
    model, lengths = llama(), [9, 4, 6]
    spec = pl.preset(name).replace(kl=None)
    live = torch.arange(9) < torch.tensor(lengths)[:, None]
    mask = BATCH["mask"] & live[:, 1:]
    rows = pl.hf.policy_loss(model, spec, IDS, live.long(), **{**BATCH, "mask": mask})
    rows.loss.backward()
    theirs = gradients(model)
    pack = torch.cat([IDS[i, :n] for i, n in enumerate(lengths)])[None]

    def packed(x: Tensor) -> Tensor:
        gap = x.new_zeros(1)  # the first token of the next sequence, which nothing predicts
        parts = [torch.cat([x[i, : n - 1], gap]) for i, n in enumerate(lengths)]
        return torch.cat(parts)[None, :-1]

    tensors = {"old_logp": packed(BATCH["old_logp"]), "mask": packed(mask)}
    cu_seqlens = torch.tensor([0, 9, 13, 19])
    one = {"advantages": BATCH["advantages"], "cu_seqlens": cu_seqlens, **tensors}
    out = pl.hf.policy_loss(model, spec, pack, **one)
    out.loss.backward()
    torch.testing.assert_close(out.loss, rows.loss)
    assert out.logp.shape == (1, 18)
    torch.testing.assert_close(out.logp, packed(rows.logp))
    torch.testing.assert_close(gradients(model), theirs)
    with pytest.raises(pl.InputError, match=r"mask is True at 2 tokens that begin a packed"):
        pl.hf.policy_loss(model, spec, pack, **{**one, "mask": torch.ones(1, 18).bool()})
    first = pl.hf.logprobs(model, pack, cu_seqlens=cu_seqlens).logp[0, [8, 12]]
    assert first.tolist() == [0.0, 0.0]
    warmth = torch.rand(3, 8, dtype=torch.float64) + 0.5
    logp = pl.hf.logprobs(model, pack, cu_seqlens=cu_seqlens, temperature=packed(warmth) + 1).logp
    alone = pl.hf.logprobs(model, IDS, live.long(), temperature=warmth + 1).logp
    torch.testing.assert_close(logp, packed(alone))


def test_the_last_tokens_alone() -> None:
    model = llama()
    kept = {name: x if x.dim() == 1 else x[:, -3:] for name, x in BATCH.items()}
    every = {**BATCH, "mask": BATCH["mask"].clone()}
    every["mask"][:, :-3] = False
    few = pl.hf.policy_loss(model, SPEC, IDS, logits_to_keep=3, **kept)
    many = pl.hf.policy_loss(model, SPEC, IDS, **every)
    torch.testing.assert_close(few.loss, many.loss)
    torch.testing.assert_close(few.logp, many.logp[:, -3:])
    with pytest.raises(pl.InputError, match="from 1 to 8"):
        pl.hf.logprobs(model, IDS, logits_to_keep=9)


def test_a_temperature_per_token_and_a_scale() -> None:
    from transformers import CohereConfig, CohereForCausalLM

    model: Any = built(CohereForCausalLM, small_config(CohereConfig, logit_scale=0.3))
    warmth = torch.rand(3, 8, dtype=torch.float64) + 0.5
    logits = own_logits(model, IDS) / warmth[..., None]
    expected = logits.log_softmax(-1).gather(-1, IDS[:, 1:, None]).squeeze(-1)
    torch.testing.assert_close(pl.hf.logprobs(model, IDS, temperature=warmth).logp, expected)


@pytest.mark.parametrize(("capped_first", "factor"), [(True, 0.5), (False, 0.5), (False, 2.0)])
def test_a_cap_and_a_scale_in_either_order(capped_first: bool, factor: float) -> None:
    def after(z: Tensor) -> Tensor:
        if capped_first:
            return factor * 5 * torch.tanh(z / 5)
        return 5 * torch.tanh(factor * z / 5)

    model = Plain(after)
    model.config = SimpleNamespace(logits_scaling=factor, final_logit_softcapping=5.0)
    with torch.no_grad():
        model.lm_head.weight.mul_(20)
        expected = after(model.lm_head(model.body(IDS)))[:, :-1].log_softmax(-1)
    found = pl.hf.logprobs(model, IDS).logp
    torch.testing.assert_close(found, expected.gather(-1, IDS[:, 1:, None]).squeeze(-1))


def test_a_frozen_and_a_tied_head() -> None:
    model = llama(tie_word_embeddings=True)
    model.tie_weights()
    assert model.lm_head.weight is model.model.embed_tokens.weight
    pl.policy_loss(SPEC, expected_logp(model, IDS), **BATCH).loss.backward()
    theirs = gradients(model)
    pl.hf.policy_loss(model, SPEC, IDS, **BATCH).loss.backward()
    torch.testing.assert_close(gradients(model), theirs)
    model.lm_head.weight.requires_grad_(False)
    pl.hf.policy_loss(model, SPEC, IDS, **BATCH).loss.backward()
    assert "model.embed_tokens.weight" not in gradients(model)


def test_no_logits_are_made() -> None:
    """Windows of 16 rows; the model's own forward makes all 120."""
    model, ids = llama(), token_ids(5, 25)
    batch = batch_for(ids, torch.float64)
    plan = pl.Plan("one_pass", rows=16, columns=0)
    ours = most_rows(
        60, lambda: pl.hf.policy_loss(model, SPEC, ids, plan=plan, **batch).loss.backward()
    )
    assert ours <= 32  # the gradient of the weight has as many rows as it has columns
    assert most_rows(60, lambda: own_logits(model, ids)) == 125


def test_an_odd_model_is_refused_and_can_be_used_with_its_logits() -> None:
    model = Plain(lambda z: z.square())
    with pytest.raises(pl.InputError, match=r"logit_scale, .*final_logit_softcapping.*'logits'"):
        pl.hf.logprobs(model, IDS)
    expected = model(IDS).logits[:, :-1].log_softmax(-1).gather(-1, IDS[:, 1:, None])[..., 0]
    assert "forward" not in vars(model.lm_head)  # the head is as it was
    for head in ("auto", "logits"):
        torch.testing.assert_close(pl.hf.logprobs(model, IDS, head=head).logp, expected)
        out = pl.hf.policy_loss(model, SPEC, IDS, head=head, **BATCH)
        torch.testing.assert_close(out.loss, pl.policy_loss(SPEC, expected, **BATCH).loss)
    plan = pl.hf.explain_plan(model, SPEC, IDS, **BATCH)
    assert plan.name == "logits"
    assert "in an unknown way" in plan.reason
    assert pl.hf.explain_plan(llama(), SPEC, IDS, **BATCH).name == "one_pass"
    with pytest.raises(pl.InputError, match="unknown head 'fast'"):
        pl.hf.logprobs(model, IDS, head="fast")  # type: ignore[call-overload]


class Twice(Plain):
    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Any:
        hidden = self.body(input_ids)
        return SimpleNamespace(logits=self.lm_head(hidden) + self.lm_head(hidden))


class Never(Plain):
    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Any:
        return SimpleNamespace(logits=self.body(input_ids) @ self.lm_head.weight.T)


class Silent(Plain):
    def get_output_embeddings(self) -> Any:
        return None


class Wrong(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 1e-3


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (lambda: Twice(), "in call 2 of a forward"),
        (lambda: Never(), "did not call the module of its get_output_embeddings"),
        (lambda: Silent(), "returns NoneType"),
        (lambda: Plain(head=Wrong(16, 60, dtype=torch.float64)), "does not give hidden @ weight.T"),
        (lambda: Plain(lambda z: z.view(3, 9, 60)), "fails where there are none"),
        (lambda: Plain(lambda z: z * 1.001), "0.001 of their size apart"),
        (lambda: nn.Linear(2, 2), "without get_output_embeddings"),
        (lambda: Plain(head=nn.Identity()), "needs a floating-point weight"),
    ],
)
def test_an_error_names_the_missing_head(model: Any, words: str) -> None:
    with pytest.raises(pl.InputError, match=words):
        pl.hf.logprobs(model(), IDS)


class Mixing(Plain):
    """Adds up all tokens before (or after) a token, padding included, and uses no positions."""

    def __init__(self, backwards: bool) -> None:
        super().__init__()
        self.backwards = backwards

    def forward(self, input_ids: Tensor, attention_mask: Any = None, **kwargs: Any) -> Any:
        hidden = self.body(input_ids)
        added = hidden.flip(1).cumsum(1).flip(1) if self.backwards else hidden.cumsum(1)
        return SimpleNamespace(logits=self.lm_head(added))


def test_a_model_that_mixes_sequences_is_refused() -> None:
    live = torch.ones_like(IDS)
    live[0, 0] = 0
    for backwards in (False, True):
        model = Mixing(backwards)
        kept, mixed = (live, live.flip(1)) if backwards else (live.flip(1), live)
        assert pl.hf.logprobs(model, IDS, torch.ones_like(IDS)).logp.isfinite().all()
        assert pl.hf.logprobs(model, IDS, kept).logp.isfinite().all()
        side = "right" if backwards else "left"
        with pytest.raises(pl.InputError, match=f"padding on the {side} apart"):
            pl.hf.logprobs(model, IDS, mixed)
        with pytest.raises(pl.InputError, match="sequences of a pack apart"):
            pl.hf.logprobs(model, IDS.reshape(1, -1), cu_seqlens=torch.tensor([0, 9, 18, 27]))


def test_a_layout_is_tried_once() -> None:
    model, seen = llama(), []
    model.register_forward_hook(lambda *_: seen.append(1))
    pack = {"input_ids": IDS.reshape(1, -1), "cu_seqlens": torch.tensor([0, 9, 18, 27])}
    for call in ({"input_ids": IDS, "attention_mask": torch.ones_like(IDS)}, pack):
        pl.hf.logprobs(model, **call)
        first = len(seen)
        pl.hf.logprobs(model, **call)
        assert len(seen) == first + 1


def test_errors_name_the_alignment_of_tensors() -> None:
    model = Plain()
    long = torch.zeros(3, 9)
    for name in ("old_logp", "mask", "ref_logp"):
        with pytest.raises(pl.InputError, match=rf"{name} has shape \(3, 9\).*input_ids\[:, 1:\]"):
            pl.hf.policy_loss(model, SPEC, IDS, **{**BATCH, name: long})
    with pytest.raises(pl.InputError, match=r"extras\['x'\] has shape"):
        pl.hf.policy_loss(model, SPEC, IDS, **BATCH, extras={"x": long})
    with pytest.raises(pl.InputError, match="attention_mask must have the shape of input_ids"):
        pl.hf.logprobs(model, IDS, long[:, 1:])
    with pytest.raises(pl.InputError, match="at least two tokens"):
        pl.hf.logprobs(model, IDS[:, :1])
    with pytest.raises(pl.InputError, match="cuts one row"):
        pl.hf.logprobs(model, IDS, cu_seqlens=torch.tensor([0, 9]))


def test_the_first_call_draws_no_random_numbers() -> None:
    """The first forward measures a model's logits with the dropout that it would have drawn."""
    from transformers import GPT2Config, GPT2LMHeadModel

    def first_two() -> list[Tensor]:
        torch.manual_seed(7)
        return [pl.hf.logprobs(model, IDS, torch.ones_like(IDS)).logp for _ in range(2)]

    model = built(GPT2LMHeadModel, small_config(GPT2Config, resid_pdrop=0.5)).train()
    modes = [module.training for module in model.modules()]
    new, known = first_two(), first_two()
    assert torch.equal(new[0], known[0])
    assert not torch.equal(new[0], new[1])
    assert [module.training for module in model.modules()] == modes


def test_wrappers_are_looked_through() -> None:
    model = Plain()
    wrapper = nn.Module()
    wrapper.module = model
    wrapper.forward = model.forward  # type: ignore[method-assign]
    torch.testing.assert_close(pl.hf.logprobs(wrapper, IDS).logp, pl.hf.logprobs(model, IDS).logp)
