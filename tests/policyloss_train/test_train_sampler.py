"""Sampling against transformers' own generate, against separate forward passes and against
distributions worked out by hand.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from policyloss.errors import InputError
from policyloss.hf.output_head import measuring
from policyloss_train.collect import mean_outcomes
from policyloss_train.command import evaluate
from policyloss_train.drawing import Rule, draw, support
from policyloss_train.sampler import Sample, encode, end_ids, sample, uniforms

VOCAB = 24
EOS = 2
LETTERS = "abcdefghijklmnopqrstu"  # ids 3, 4, …
# 1 to 9 tokens, some twice.
PROMPTS = [
    "a",
    "kbc",
    "defghijkl",
    "kbc",
    "mn",
    "a",
    "opqrst",
    "defghijkl",
]


@cache
def letters() -> Any:
    """One token per letter."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocab = {
        "<pad>": 0,
        "<bos>": 1,
        "<eos>": EOS,
        **{letter: i for i, letter in enumerate(LETTERS, start=3)},
    }
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    names = {"eos_token": "<eos>", "pad_token": "<pad>", "bos_token": "<bos>"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, padding_side="left", **names)


def llama(**options: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    ids = {"bos_token_id": 1, "eos_token_id": EOS, "pad_token_id": 0}
    return _spread(
        LlamaForCausalLM(
            LlamaConfig(vocab_size=VOCAB, max_position_embeddings=40, **sizes, **ids, **options)
        )
    )


def gpt2(**options: Any) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    ids = {"bos_token_id": 1, "eos_token_id": EOS, "pad_token_id": 0}
    return _spread(
        GPT2LMHeadModel(
            GPT2Config(
                vocab_size=VOCAB, n_positions=40, n_embd=32, n_layer=2, n_head=4, **ids, **options
            )
        )
    )


def _spread(model: Any) -> Any:
    """Weights wide enough that tokens, positions and padding all matter,
    and that no two logits are nearly equal.
    """
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.normal_(0, 0.15, generator=generator)
    return model.eval()


FAMILIES = {"rotary positions": llama, "absolute positions": gpt2}
family = pytest.mark.parametrize("make", FAMILIES.values(), ids=FAMILIES.keys())


def sampled(
    model: Any, texts: list[str], *, limit: int = 8, rule: Rule | None = None, **options: Any
) -> list[Sample]:
    rule = rule or Rule(temperature=1.0)
    given = {"uniforms": uniforms(0, 0, len(texts), limit), "batch_tokens": 10_000, **options}
    prompts = [(100 + i, 10 + i, text) for i, text in enumerate(texts)]
    numbers = {"temperature": rule.temperature, "top_p": rule.top_p, "top_k": rule.top_k}
    return sample(model, letters(), prompts, max_new_tokens=limit, **numbers, **given)


def forced(model: Any, ids: Tensor) -> Tensor:
    """Logits [L, V] of one unpadded forward pass without a cache."""
    with torch.no_grad():
        logits: Tensor = model(input_ids=ids[None], use_cache=False).logits[0]
    return logits


def scripted(model: Any, prompt: str, completion: list[int]) -> Tensor:
    """Uniforms [len(completion)] that make `completion` the sample:
    the middle of each token's step of the CDF.
    """
    ids = torch.tensor(encode(letters(), [prompt])[0] + completion)
    p = forced(model, ids)[-len(completion) - 1 : -1].double().softmax(-1)
    tokens = torch.tensor(completion)[:, None]
    return (p.cumsum(-1).gather(-1, tokens) - p.gather(-1, tokens) / 2).squeeze(-1)


# --- greedy ---


@family
@pytest.mark.parametrize("ends", [False, True])
def test_greedy_equals_generate(make: Any, ends: bool) -> None:
    model = make()
    batch = letters()(PROMPTS, padding=True, return_tensors="pt")
    inputs = {
        "input_ids": batch["input_ids"],
        "attention_mask": batch["attention_mask"],
        "do_sample": False,
        "max_new_tokens": 12,
    }
    if ends:  # some rows stop early: two letters of the free run become end tokens too
        free = model.generate(**inputs)[:, batch["input_ids"].shape[1] :]
        model.generation_config.eos_token_id = [EOS, int(free[1, 2]), int(free[2, 5])]
    expected = []
    for row in model.generate(**inputs)[:, batch["input_ids"].shape[1] :].tolist():
        stop = next(
            (t for t, token in enumerate(row) if token in end_ids(model, letters())), len(row) - 1
        )
        expected.append(row[: stop + 1])
    got = sampled(model, PROMPTS, limit=12, rule=Rule(temperature=0.0), uniforms=None)
    assert [s.completion_ids.tolist() for s in got] == expected
    # The five distinct prompts have different completions.
    assert len({tuple(row) for row in expected}) == 5
    assert len({len(row) for row in expected}) >= (3 if ends else 1)


@family
def test_a_tiny_temperature_is_greedy(make: Any) -> None:
    model = make()
    greedy = sampled(model, PROMPTS, rule=Rule(temperature=0.0), uniforms=None)
    cold = sampled(model, PROMPTS, rule=Rule(temperature=1e-30))
    assert [s.completion_ids.tolist() for s in cold] == [s.completion_ids.tolist() for s in greedy]
    assert all((s.rollout_logp == 0).all() for s in cold)  # log 1


def test_a_tiny_temperature_does_not_overflow() -> None:
    # 1e9 / 1e-30 alone would be infinite in float32
    token, logp, _ = draw(torch.tensor([[0.0, 1e9, 3.0]]), torch.tensor([0.9]), Rule(1e-300))
    assert (token.item(), logp.item()) == (1, 0.0)


# --- log-probs ---


@family
@pytest.mark.parametrize(
    "rule", [Rule(1.0), Rule(0.7, top_p=0.8, top_k=10), Rule(1.5, top_k=2), Rule(0.0)], ids=str
)
def test_rollout_logp_is_that_of_a_separate_pass_over_the_whole_vocabulary(
    make: Any, rule: Rule
) -> None:
    model = make()
    for got in sampled(model, PROMPTS, limit=10, rule=rule):
        n = len(got.completion_ids)
        logits = forced(model, torch.cat([got.prompt_ids, got.completion_ids]))[-n - 1 : -1]
        expected = (
            (logits.double() / (rule.temperature or 1.0))
            .log_softmax(-1)
            .gather(-1, got.completion_ids[:, None])[:, 0]
        )
        assert got.rollout_logp.dtype == torch.float32
        torch.testing.assert_close(got.rollout_logp.double(), expected, atol=1e-5, rtol=0)


def test_half_precision_logits_are_read_in_float32() -> None:
    logits = torch.randn(64, 300, generator=torch.Generator().manual_seed(1)).bfloat16()
    u = uniforms(0, 0, 64, 1)[:, 0]
    for rule in (Rule(0.9), Rule(0.9, top_p=0.7), Rule(0.0)):
        low, full = draw(logits, u, rule), draw(logits.float(), u, rule)
        assert torch.equal(low[0], full[0])
        assert torch.equal(low[1], full[1])


# --- the distribution ---


def test_support_by_hand() -> None:
    p = torch.tensor([[0.1, 0.4, 0.2, 0.3]])

    def kept(top_p: float, top_k: int, p: Tensor = p) -> list[int]:
        return support(p, top_p, top_k)[0].nonzero()[:, 0].tolist()

    assert kept(1.0, 0) == [0, 1, 2, 3]
    assert kept(1.0, 1) == [1]
    assert kept(1.0, 3) == [1, 2, 3]
    assert kept(1.0, 9) == [0, 1, 2, 3]  # more than there are
    assert kept(1e-9, 0) == [1]  # never empty
    assert kept(0.39, 0) == [1]
    assert kept(0.41, 0) == [1, 3]  # 0.4 does not reach 0.41; 0.4 + 0.3 does
    assert kept(0.71, 0) == [1, 2, 3]
    assert kept(0.91, 0) == [0, 1, 2, 3]
    # top-k first: of 0.4 and 0.3 the first holds 0.4 / 0.7 = 0.571 of the mass
    assert kept(0.57, 2) == [1]
    assert kept(0.58, 2) == [1, 3]
    ties = torch.tensor([[0.25, 0.25, 0.25, 0.25]])
    assert kept(1.0, 2, ties) == [0, 1]
    assert kept(0.5, 0, ties) == [0, 1]  # 0.25 + 0.25 reaches 0.5
    assert kept(0.51, 0, ties) == [0, 1, 2]
    # The sure one, then the lowest of the tied.
    assert kept(1.0, 2, torch.tensor([[0.2, 0.4, 0.2, 0.2]])) == [
        0,
        1,
    ]
    rows = support(torch.tensor([[0.1, 0.4, 0.2, 0.3], [0.97, 0.01, 0.01, 0.01]]), 0.6, 0)
    # Each row its own count.
    assert rows.tolist() == [
        [False, True, False, True],
        [True, False, False, False],
    ]


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        (Rule(1.0), [0.1, 0.4, 0.2, 0.3]),
        (Rule(0.5), [1 / 30, 16 / 30, 4 / 30, 9 / 30]),  # p² / Σ p²: 0.01, 0.16, 0.04, 0.09 of 0.30
        (Rule(1.0, top_k=2), [0, 4 / 7, 0, 3 / 7]),
        (Rule(1.0, top_p=0.8), [0, 4 / 9, 2 / 9, 3 / 9]),
        (
            Rule(0.5, top_p=0.9, top_k=3),
            [0, 16 / 29, 4 / 29, 9 / 29],
        ),  # of 16, 9, 4: (16 + 9) / 29 = 0.862 < 0.9, so all three
        (
            Rule(0.5, top_p=0.85, top_k=3),
            [0, 16 / 25, 0, 9 / 25],
        ),  # 0.862 reaches 0.85; of all four it would be 25 / 30 = 0.833
    ],
)
def test_equal_steps_of_uniforms_give_each_token_its_share(
    rule: Rule, expected: list[float]
) -> None:
    n = 1000
    logits = torch.tensor([0.1, 0.4, 0.2, 0.3], dtype=torch.float64).log().expand(n, 4)
    token, logp, _ = draw(logits, (torch.arange(n, dtype=torch.float64) + 0.5) / n, rule)
    share = torch.bincount(token, minlength=4) / n
    torch.testing.assert_close(
        share.double(), torch.tensor(expected, dtype=torch.float64), atol=1 / n, rtol=0
    )
    assert (token.diff() >= 0).all()  # the inverse of a CDF over token ids
    whole = (logits[0] / rule.temperature).log_softmax(-1)
    torch.testing.assert_close(logp, whole[token], atol=1e-12, rtol=0)


def test_the_ends_of_the_unit_interval() -> None:
    logits = torch.tensor([[-torch.inf, 0.0, -torch.inf, 0.0, -torch.inf]]).repeat(3, 1)
    last = 1 - 2.0**-53  # the largest number below 1
    token, _, _ = draw(logits, torch.tensor([0.0, 0.5, last], dtype=torch.float64), Rule(1.0))
    assert token.tolist() == [1, 3, 3]  # never a token of probability 0


def test_rare_tokens_after_a_sure_one_can_be_drawn() -> None:
    # e^-18 = 1.5e-8: a float32 sum that has reached 1 no longer moves,
    # and tokens 1 and 2 would never come
    rare = torch.tensor(-18.0, dtype=torch.float64).exp().item()
    steps = torch.tensor([0.5, 1 + 0.5 * rare, 1 + 1.5 * rare], dtype=torch.float64) / (
        1 + 2 * rare
    )
    token, _, _ = draw(torch.tensor([[0.0, -18.0, -18.0]]).repeat(3, 1), steps, Rule(1.0))
    assert token.tolist() == [0, 1, 2]


def test_frequencies_of_two_tokens_against_the_exact_distribution() -> None:
    model, rows = llama(), 6000
    got = sampled(model, ["kbc"] * rows, limit=2, rule=Rule(1.3, top_k=5), batch_tokens=100_000)
    exact: dict[tuple[int, ...], float] = {}
    prompt = got[0].prompt_ids
    for first, p in _top(forced(model, prompt)[-1], 1.3, 5):
        if first == EOS:
            exact[(first,)] = p
            continue
        for second, q in _top(
            forced(model, torch.cat([prompt, torch.tensor([first])]))[-1], 1.3, 5
        ):
            exact[first, second] = p * q
    seen = dict.fromkeys(exact, 0)
    for s in got:
        seen[tuple(s.completion_ids.tolist())] += 1  # a KeyError is a sample outside the support
    assert len(exact) == 25
    chi2 = sum((seen[pair] - rows * p) ** 2 / (rows * p) for pair, p in exact.items())
    assert chi2 < 51.2  # the 99.9 % point for 24 degrees of freedom


def _top(logits: Tensor, temperature: float, k: int) -> list[tuple[int, float]]:
    best = (logits.double() / temperature).topk(k)
    return list(zip(best.indices.tolist(), best.values.softmax(-1).tolist(), strict=True))


# --- the same samples, however they are cut ---


@family
@pytest.mark.parametrize("batch_tokens", [1, 35, 60])
def test_the_batch_cut_changes_nothing(make: Any, batch_tokens: int) -> None:
    model, rule = make(), Rule(1.0, top_p=0.95)
    whole, cut = (
        sampled(model, PROMPTS, rule=rule),
        sampled(model, PROMPTS, rule=rule, batch_tokens=batch_tokens),
    )
    assert [(s.example, s.group) for s in cut] == [(100 + i, 10 + i) for i in range(len(PROMPTS))]
    for a, b, text in zip(whole, cut, PROMPTS, strict=True):
        assert (
            a.prompt_ids.tolist()
            == b.prompt_ids.tolist()
            == [LETTERS.index(letter) + 3 for letter in text]
        )
        assert a.completion_ids.tolist() == b.completion_ids.tolist()
        assert (a.finished, a.text) == (b.finished, b.text)
        torch.testing.assert_close(a.rollout_logp, b.rollout_logp, atol=1e-5, rtol=0)
    for first, second in ((0, 5), (1, 3), (2, 7)):  # equal prompts draw from their own uniforms
        assert whole[first].completion_ids.tolist() != whole[second].completion_ids.tolist()


@pytest.mark.parametrize(
    ("batch_tokens", "prefills"),
    [
        # prompts of 9, 9, 6, 3, 3, 2, 1, 1 tokens, and 8 to come: 60 // (9 + 8) = 3 rows, then 60
        # // (3 + 8) = 5; each prompt once
        (60, [(2, 9), (3, 3)]),
        (
            51,
            [(2, 9), (3, 3), (1, 1)],
        ),  # 51 // 17 = 3; 51 // 11 = 4: "kbc" twice, "mn", "a"; the other "a"
        (
            16,
            [(1, 9), (1, 9), (1, 6), (1, 3), (1, 3), (1, 2), (1, 1), (1, 1)],
        ),  # a row that is too long goes alone
    ],
)
def test_batches_keep_to_the_token_budget(
    batch_tokens: int, prefills: list[tuple[int, int]]
) -> None:
    model, seen = gpt2(), []

    def record(_: Any, __: Any, inputs: dict[str, Any]) -> None:
        if inputs["past_key_values"].get_seq_length() == 0:
            seen.append(tuple(inputs["input_ids"].shape))

    model.register_forward_pre_hook(record, with_kwargs=True)
    sampled(model, PROMPTS, batch_tokens=batch_tokens)
    assert seen == prefills


def test_two_ranks_sample_the_tokens_of_one() -> None:
    model, limit = llama(), 8
    drawn = uniforms(7, 3, len(PROMPTS), limit)
    one = sampled(model, PROMPTS, uniforms=drawn)
    two = [sampled(model, PROMPTS[rank::2], uniforms=drawn[rank::2]) for rank in range(2)]
    for row, s in enumerate(one):
        assert s.completion_ids.tolist() == two[row % 2][row // 2].completion_ids.tolist()


def test_uniforms_depend_on_seed_step_and_place_only() -> None:
    u = uniforms(3, 5, 40, 50)
    assert u.dtype == torch.float64
    assert torch.equal(u, uniforms(3, 5, 40, 50))
    assert torch.equal(u[:7], uniforms(3, 5, 7, 50))
    others = [
        uniforms(5, 3, 40, 50),
        uniforms(4, 5, 40, 50),
        uniforms(3, 6, 40, 50),
        uniforms(3 + 2**32, 5, 40, 50),
    ]
    for other in others:
        assert not (u == other).any()
    assert 0 <= u.min() < 0.002
    assert 0.998 < u.max() < 1
    # The standard error of 2000 uniforms.
    assert abs(u.mean() - 0.5) < 4 * (1 / 12 / u.numel()) ** 0.5


# --- the end of a completion ---


@family
def test_rows_end_where_their_end_token_is(make: Any) -> None:
    model, stop = make(), LETTERS.index("e") + 3
    # "e" is an ordinary letter for the tokenizer.
    model.generation_config.eos_token_id = [
        EOS,
        stop,
    ]
    a, b = LETTERS.index("a") + 3, LETTERS.index("b") + 3
    scripts = {"mn": [EOS], "a": [a, b, stop], "kbc": [b, b, b, b], "opqrst": [a, a, b, EOS]}
    drawn = torch.zeros(len(scripts), 4, dtype=torch.float64)
    for row, (prompt, completion) in enumerate(scripts.items()):
        drawn[row, : len(completion)] = scripted(model, prompt, completion)
    got = sampled(model, list(scripts), limit=4, uniforms=drawn)
    assert [s.completion_ids.tolist() for s in got] == list(scripts.values())
    assert [s.text for s in got] == ["", "ab", "bbbb", "aab"]  # no end token, special or not
    assert [s.finished for s in got] == [True, True, False, True]
    assert [len(s.rollout_logp) for s in got] == [1, 3, 4, 4]


def test_no_work_for_rows_that_have_ended_or_are_repeated() -> None:
    model, seen = llama(), []
    b = LETTERS.index("b") + 3
    scripts = [
        ("kbc", [EOS]),
        ("kbc", [b, EOS]),
        ("kbc", [b, b, b, EOS]),
        ("mn", [b, EOS]),
        ("mn", [EOS]),
    ]
    drawn = torch.zeros(5, 6, dtype=torch.float64)
    for row, (prompt, completion) in enumerate(scripts):
        drawn[row, : len(completion)] = scripted(model, prompt, completion)
    model.register_forward_pre_hook(
        lambda _, __, inputs: seen.append(tuple(inputs["input_ids"].shape)), with_kwargs=True
    )
    got = sampled(model, [prompt for prompt, _ in scripts], limit=6, uniforms=drawn)
    assert [s.completion_ids.tolist() for s in got] == [completion for _, completion in scripts]
    # two distinct prompts of up to three tokens; then the rows that go on: three, one, one;
    # then none
    assert seen == [(2, 3), (3, 1), (1, 1), (1, 1)]


def test_the_last_token_is_not_fed() -> None:
    model, calls = llama(), []
    script = [LETTERS.index("b") + 3] * 5
    drawn = scripted(model, "kbc", script)[None]
    model.register_forward_pre_hook(lambda *_: calls.append(1))
    (got,) = sampled(model, ["kbc"], limit=5, uniforms=drawn)
    assert got.completion_ids.tolist() == script
    assert len(calls) == 5


def test_end_ids_of_model_and_tokenizer() -> None:
    model = llama()
    assert end_ids(model, letters()) == [EOS]
    model.generation_config.eos_token_id = [9, 4]
    assert end_ids(model, letters()) == [EOS, 4, 9]
    model.generation_config.eos_token_id = None
    assert end_ids(model, letters()) == [EOS]


# --- files left behind ---


def test_dropout_is_off_and_every_mode_is_restored() -> None:
    plain, noisy = gpt2(), gpt2(resid_pdrop=0.5, embd_pdrop=0.5, attn_pdrop=0.5)
    noisy.train()
    noisy.transformer.h[1].eval()  # a part frozen on purpose
    before = [module.training for module in noisy.modules()]
    expected = [s.completion_ids.tolist() for s in sampled(plain, PROMPTS)]
    assert [s.completion_ids.tolist() for s in sampled(noisy, PROMPTS)] == expected
    assert [module.training for module in noisy.modules()] == before
    with measuring(noisy):
        assert not any(module.training for module in noisy.modules())
    nn.init.constant_(noisy.lm_head.weight, float("nan"))
    with pytest.raises(InputError):
        sampled(noisy, PROMPTS)
    assert [module.training for module in noisy.modules()] == before


def test_samples_can_be_trained_on_and_own_their_memory() -> None:
    model = llama()
    got = sampled(model, PROMPTS)
    assert torch.is_grad_enabled()
    for s in got:
        for tensor in (s.prompt_ids, s.completion_ids, s.rollout_logp):
            assert not tensor.is_inference()
            assert not tensor.requires_grad
            assert tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
    starts = [
        tensor.data_ptr()
        for s in got
        for tensor in (s.prompt_ids, s.completion_ids, s.rollout_logp)
    ]
    assert len(set(starts)) == len(starts)
    ids = torch.cat([got[0].prompt_ids, got[0].completion_ids])
    model(input_ids=ids[None], labels=ids[None]).loss.backward()
    assert all(
        weight.grad is not None and weight.grad.isfinite().all() for weight in model.parameters()
    )


def test_no_prompts_no_samples() -> None:
    assert sampled(llama(), []) == []


# --- bad input ---


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompts": [(31, 0, "")]}, "example 31 .* has no token"),
        (
            {"prompts": [(31, 0, "a" * 37)]},
            "37 tokens, which with --max-new-tokens 4 .* 40 positions",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_bad_input_is_named(changes: dict[str, Any], message: str) -> None:
    given = {
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "max_new_tokens": 4,
        "batch_tokens": 100,
        "uniforms": torch.zeros(1, 4),
    }
    arguments = {"prompts": [(0, 0, "abc")], **given, **changes}
    with pytest.raises(InputError, match=message):
        sample(llama(), letters(), arguments.pop("prompts"), **arguments)


def test_the_longest_prompt_that_fits() -> None:
    assert len(sampled(gpt2(), ["a" * 36], limit=4, rule=Rule(0.0))[0].completion_ids) <= 4


@pytest.mark.parametrize("rule", [Rule(1.0), Rule(1.0, top_p=0.5), Rule(0.0)], ids=str)
def test_broken_weights_are_reported(rule: Rule) -> None:
    model = llama()
    nn.init.constant_(model.lm_head.weight, float("nan"))
    with pytest.raises(InputError, match="NaN or infinite logits"):
        sampled(model, ["abc", "d"], rule=rule)


def test_a_model_without_a_key_value_cache_is_refused() -> None:
    from transformers import MambaConfig, MambaForCausalLM

    model = MambaForCausalLM(
        MambaConfig(vocab_size=VOCAB, hidden_size=8, num_hidden_layers=1, state_size=2)
    )
    with pytest.raises(InputError, match="MambaForCausalLM keeps no past_key_values"):
        sampled(model, ["abc"])


# --- evaluation ---


@dataclass(frozen=True)
class Question:
    id: int
    prompt: str
    answer: str


def likeness(example: Any, completion: str) -> float:
    """Full score for the answer itself, half for its first letter."""
    return 1.0 if completion == example.answer else 0.5 * (completion[:1] == example.answer[:1])


def test_evaluation_by_hand() -> None:
    model = llama()
    says = [s.text for s in sampled(model, ["a", "kbc", "mn"], limit=5, rule=Rule(0.0))]
    wrong = next(letter for letter in LETTERS if letter != says[2][:1])
    examples = [
        Question(8, "a", says[0]),
        Question(3, "kbc", says[1][:1] + "?"),
        Question(5, "mn", wrong),
    ]
    results = evaluate(model, letters(), examples, likeness, max_new_tokens=5, batch_tokens=20)  # type: ignore[arg-type]
    outcomes = [(r.reward, len(r.completion_ids)) for r in results]
    got = mean_outcomes(outcomes, success=1.0)
    assert [r.example for r in results] == [8, 3, 5]
    assert [r.text for r in results] == says
    assert [r.reward for r in results] == [1.0, 0.5, 0.0]
    assert (got["accuracy"], got["reward"]) == (1 / 3, 0.5)  # one of three; (1 + 0.5 + 0) / 3
    assert got["length"] == sum(len(r.completion_ids) for r in results) / 3
    assert mean_outcomes(outcomes, success=0.5)["accuracy"] == 2 / 3
    with pytest.raises(InputError, match="example 77 "):
        evaluate(
            model, letters(), [Question(77, "", "")], likeness, max_new_tokens=5, batch_tokens=20
        )  # type: ignore[arg-type]


def test_means_of_an_evaluation() -> None:
    rows = [(1.0, 2), (0.25, 4), (1.0, 9)]
    # 2 of 3; (1 + 0.25 + 1) / 3; (2 + 4 + 9) / 3
    means = {"accuracy": 2 / 3, "reward": 0.75, "length": 5.0}
    assert mean_outcomes(rows, success=1.0) == means
