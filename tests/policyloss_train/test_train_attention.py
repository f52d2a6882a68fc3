"""Sequences that go through a model together have the numbers of each alone,
whichever way they go.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import train_loop_ranks
from torch import Tensor, nn
from walk import walked

from policyloss.errors import InputError
from policyloss_train import attention
from policyloss_train.attention import Alone, Packed, Rows, choose
from policyloss_train.batches import Pack
from policyloss_train.sampler import Sample, sample

LENGTHS = (9, 2, 5, 1, 7)  # places: tokens less one
SIZES = {
    "vocab_size": 31,
    "hidden_size": 32,  # eight for each head, as torch's kernel wants it
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 1,
}
EXPERTS = "eager"  # the faster ones know no float64
WINDOW = 3  # shorter than most sequences, so that a window that is one off shows


def make(kind: str, dtype: torch.dtype = torch.float64) -> Any:
    """A small model whose weights are far enough from 0 that attention matters."""
    import transformers as t

    heads = {"head_dim": 8}
    layers = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": WINDOW}
    gemma2 = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
    wide = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 31}
    ends = {"pad_token_id": 0, "bos_token_id": None, "eos_token_id": 1}
    config: Any = {
        "llama": lambda: t.LlamaConfig(**SIZES),
        "qwen3": lambda: t.Qwen3Config(**SIZES, **heads),
        "mistral window": lambda: t.MistralConfig(**SIZES, sliding_window=WINDOW),
        "gemma2": lambda: t.Gemma2Config(**SIZES, **heads, **layers, **gemma2),
        "gemma3": lambda: t.Gemma3TextConfig(**SIZES, **heads, **layers),
        "mixtral": lambda: t.MixtralConfig(**SIZES, **experts),
        "qwen3_moe": lambda: t.Qwen3MoeConfig(
            **SIZES, **heads, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16
        ),
        "granite": lambda: t.GraniteConfig(**SIZES, logits_scaling=4.0),
        "gpt2": lambda: t.GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=31, **ends),
        "opt": lambda: t.OPTConfig(**wide, ffn_dim=32, word_embed_proj_dim=16, **ends),
    }[kind]()
    torch.manual_seed(1)
    model = t.AutoModelForCausalLM.from_config(config, experts_implementation=EXPERTS)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.2 * torch.randn_like(weight))
    return model.to(dtype).eval()


KINDS = (
    "llama",
    "qwen3",
    "mistral window",
    "gemma2",
    "gemma3",
    "mixtral",
    "granite",
    "gpt2",
    "opt",
)
VARLEN = tuple(kind for kind in KINDS if kind != "gemma2")  # it has no soft cap


def pack() -> Pack:
    g = torch.Generator().manual_seed(2)
    rows = [torch.randint(2, 31, (n + 1,), generator=g) for n in LENGTHS]
    return Pack.of(
        [Sample(0, i, x[:1], x[1:], torch.zeros(len(x) - 1), True, "") for i, x in enumerate(rows)]
    )


def alone(body: nn.Module, batch: Pack) -> Tensor:
    """Each sequence by itself, by nothing but the model's own call."""
    rows = batch.tokens["ids"].split(batch.lengths)
    return torch.cat([body(input_ids=x[None], use_cache=False).last_hidden_state[0] for x in rows])


def gradients(model: Any, hidden: Tensor) -> dict[str, Tensor]:
    """Gradients of a number to which every hidden state contributes differently."""
    g = torch.Generator().manual_seed(3)
    weight = torch.randn(hidden.shape, generator=g, dtype=torch.float64).to(hidden)
    model.zero_grad()
    (hidden * weight).sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def per_sequence(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    ends: Tensor,
    longest: int,
    scale: float | None,
    window: int,
) -> Tensor:
    """What torch's kernel computes, one sequence at a time: `[N, heads, D]`."""
    rows = []
    assert longest == ends.diff().max()
    for begin, end in zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True):
        q, k, v = (x[begin:end].transpose(0, 1)[None] for x in (query, key, value))
        place = torch.arange(end - begin)
        back = place[:, None] - place
        mask = (back >= 0) & ((back <= window) | (window < 0))
        out = nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, scale=scale, enable_gqa=True
        )
        rows.append(out[0].transpose(0, 1))
    return torch.cat(rows)


@pytest.fixture
def norms_in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gemma's norms compute in float32, gradients and all, whose sums depend on the order."""
    single = Tensor.float
    monkeypatch.setattr(Tensor, "float", lambda x: x if x.dtype == torch.float64 else single(x))


@pytest.fixture
def varlen_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The way "varlen" with a kernel that runs here."""
    monkeypatch.setattr(attention, "_varlen", per_sequence)
    monkeypatch.setattr(attention, "_unavailable", lambda name, model: "")


def assert_as_alone(model: Any, way: Any, budget: int) -> None:
    """Hidden states and gradients of all weights, over all micro-batches of the way."""
    body, batch = model.base_model, pack()
    expected = alone(body, batch)
    expected_gradients = gradients(model, expected)
    rows: dict[int, Tensor] = {}
    for part in way.cut(batch.lengths, budget):
        share = batch.select(part)
        rows |= zip(part, way.hidden(body, share.micro_batch()).split(share.lengths), strict=True)
    hidden = torch.cat([rows[i] for i in range(len(LENGTHS))])
    torch.testing.assert_close(hidden, expected, rtol=0, atol=1e-10)
    assert (expected[:9] - expected[9:18]).abs().max() > 0.1  # sequences differ, so a mix shows
    found = gradients(model, hidden)
    assert found.keys() == expected_gradients.keys()
    for name, gradient in expected_gradients.items():
        torch.testing.assert_close(
            found[name], gradient, rtol=1e-8, atol=1e-9, msg=lambda m, name=name: f"{name}: {m}"
        )


@pytest.mark.usefixtures("varlen_on_cpu")
def test_rounding_of_any_depth_and_width_passes_and_a_mix_does_not() -> None:
    """Sound models pass in every dtype; models that ignore the starts of sequences never do."""
    import transformers as t

    sizes = {name: x for name, x in SIZES.items() if name not in ("hidden_size", "head_dim")}
    shapes = ((2, 64, 0.3), (24, 64, 0.2), (2, 512, 0.1))
    wrong: list[str] = []
    for layers, width, scale in shapes:
        sizes |= {"num_hidden_layers": layers, "hidden_size": width, "initializer_range": scale}
        torch.manual_seed(1)
        model = t.LlamaForCausalLM(t.LlamaConfig(**sizes)).eval()
        forward = model.model.forward
        for dtype in (torch.float32, torch.bfloat16):
            model.to(dtype)
            for way in ("rows", "varlen", "alone"):
                try:
                    choose(model, way)
                except InputError as error:
                    wrong.append(f"{layers} × {width}, {dtype}: {error}")
            model.model.forward = lambda cu_seq_lens_q=None, forward=forward, **named: forward(
                **named
            )
            with pytest.raises(InputError, match=r"differ by .* --attention alone takes"):
                choose(model, "varlen")
            model.model.forward = forward
            choose(model, "rows")
    assert not wrong, "\n".join(wrong)


def test_the_limit_of_rounding_grows_with_the_model() -> None:
    """24 layers of 64 columns may differ by 4·√(24·64) = 156.8 roundings."""
    import transformers as t

    config = t.LlamaConfig(**SIZES | {"num_hidden_layers": 24})
    model = SimpleNamespace(base_model=None, dtype=torch.float32, config=config)
    states = torch.ones(8, 64)

    def difference(roundings: int) -> str:
        off: Any = SimpleNamespace(hidden=lambda body, micro: states * (1 + roundings * 2**-23))
        return attention._difference(model, off, {}, states)

    assert difference(156) == ""
    assert "differ by 1.88e-05 from one sequence alone (up to 1)" in difference(158)


@walked("kind", KINDS)
@walked("budget", [1000, 12])
@pytest.mark.usefixtures("norms_in_float64")
def test_padded_rows_are_each_sequence_alone(kind: str, budget: int) -> None:
    assert_as_alone(make(kind), Rows(), budget)


def test_one_sequence_at_a_time_is_right_for_a_model_that_reads_ahead(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = make("llama")
    read_ahead(model, monkeypatch)
    way, sentence = choose(model, "alone")
    assert (way, sentence) == (Alone(), "attention: alone")
    assert_as_alone(model, way, 1000)


@walked("kind", VARLEN)
@walked("budget", [1000, 12])
@pytest.mark.usefixtures("varlen_on_cpu", "norms_in_float64")
def test_sequences_in_one_row_are_each_sequence_alone(kind: str, budget: int) -> None:
    model = make(kind)
    way, _ = choose(model, "varlen")
    assert_as_alone(model, way, budget)


@pytest.mark.usefixtures("varlen_on_cpu")
def test_gradient_checkpointing_runs_the_same_attention_again() -> None:
    model = make("llama")
    way, _ = choose(model, "varlen")
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()  # transformers checkpoints in training alone; there is no dropout here
    assert_as_alone(model, way, 1000)


@pytest.mark.usefixtures("varlen_on_cpu", "norms_in_float64")
def test_an_unsupported_attention_falls_back_with_a_message() -> None:
    model = make("gemma2")
    assert choose(model)[0] == Rows()  # on a CPU nothing else is tried, so nothing needs telling
    before = model.config._attn_implementation
    with pytest.raises(InputError, match=r"--attention varlen: varlen: it has no softcap"):
        choose(model, "varlen")
    assert model.config._attn_implementation == before
    assert_as_alone(model, Rows(), 1000)


@pytest.mark.usefixtures("varlen_on_cpu")
def test_a_model_that_does_not_tell_its_attention_where_sequences_begin_falls_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = make("llama")
    forward = type(model.model).forward

    def forgetful(self: Any, cu_seq_lens_q: Any = None, **named: Any) -> Any:
        return forward(self, **named)

    monkeypatch.setattr(type(model.model), "forward", forgetful)
    with pytest.raises(InputError, match=r"varlen: its hidden states differ by .* from one seq"):
        choose(model, "varlen")


def test_a_missing_attention_is_refused() -> None:
    with pytest.raises(
        InputError, match=r"LlamaForCausalLM.*--attention varlen: varlen: needs CUDA"
    ):
        choose(make("llama"), "varlen")
    with pytest.raises(InputError, match="--attention flash: flash: needs CUDA"):
        choose(make("llama"), "flash")
    assert choose(make("llama")) == (Rows(), "attention: rows")


def read_ahead(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every state of a sequence read the whole of it."""
    forward = type(model.model).forward

    def ahead(self: Any, *args: Any, **named: Any) -> Any:
        out = forward(self, *args, **named)
        out.last_hidden_state = out.last_hidden_state + out.last_hidden_state.mean(1, keepdim=True)
        return out

    monkeypatch.setattr(type(model.model), "forward", ahead)


def test_a_model_that_reads_ahead_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Padding follows a sequence, so a model that reads it gets other numbers in padded rows."""
    model = make("llama")
    read_ahead(model, monkeypatch)
    with pytest.raises(
        InputError, match=r"rows: its hidden states differ by .* from one seq.*--attention alone "
    ):
        choose(model)


@pytest.mark.parametrize("kind", ["llama", "mistral window", "opt"])
@pytest.mark.usefixtures("varlen_on_cpu")
def test_a_model_that_learns_by_varlen_samples_as_before(kind: str) -> None:
    """Its sampler pads on the left and keeps a cache, which its own attention is for."""
    from policyloss_train.models import tiny_tokenizer
    from policyloss_train.tasks import make_task

    tokenizer = tiny_tokenizer(make_task("sort", reward=None, seed=0))
    texts = []
    for way in ("rows", "varlen"):
        model = make(kind)
        choose(model, way)
        model.resize_token_embeddings(len(tokenizer))
        torch.manual_seed(0)
        nn.init.normal_(model.get_input_embeddings().weight)
        nn.init.normal_(model.get_output_embeddings().weight)
        prompts = [(0, 0, "ab"), (1, 1, "abcdef"), (1, 1, "abcdef")]
        options: dict[str, Any] = {"max_new_tokens": 6, "top_p": 1.0, "top_k": 0}
        uniforms = torch.rand(3, 6, generator=torch.Generator().manual_seed(1))
        found = sample(
            model,
            tokenizer,
            prompts,
            temperature=1.0,
            uniforms=uniforms,
            batch_tokens=99,
            **options,
        )
        for s in found:  # the sampler's log-probabilities are the learner's
            ids = torch.cat([s.prompt_ids, s.completion_ids])
            logits = model(input_ids=ids[None], use_cache=False).logits[
                0, len(s.prompt_ids) - 1 : -1
            ]
            logp = logits.log_softmax(-1).gather(1, s.completion_ids[:, None])[:, 0]
            torch.testing.assert_close(s.rollout_logp.double(), logp, rtol=0, atol=1e-6)
        texts.append([s.completion_ids.tolist() for s in found])
    assert texts[0] == texts[1]


# --- the cut


def test_rows_are_sorted_and_cut_by_hand() -> None:
    """Budget 20. 9 8 | 8·… : 9 and 8 take 2 × 9 = 18 places; a third would take 27. 5, 5 and 4 take
    15 places with one of padding; 2 would be the fourth, 20 places with 4 of padding, a fifth: it
    fits. 1 begins another micro-batch, because 25 places are over the budget.
    """
    lengths = [5, 9, 1, 4, 8, 5, 2]
    assert Rows().cut(lengths, 20) == [[1, 4], [0, 5, 3, 6], [2]]
    # Without a limit, padding decides: 9 8 5 5 would be 36 places with 9 of padding, a quarter;
    # with 4 it is 45 with 14, more than a quarter.
    assert Rows().cut(lengths, 1000) == [[1, 4, 0, 5], [3, 6], [2]]
    assert Rows().cut([7], 3) == [[0]]


@pytest.mark.parametrize("way", [Rows(), Packed("varlen")])
@pytest.mark.parametrize("budget", [1, 8, 33, 200, 10**6])
def test_a_cut_holds_every_sequence_once_and_bounds_its_cost(way: Any, budget: int) -> None:
    lengths = torch.randint(1, 40, (200,), generator=torch.Generator().manual_seed(0)).tolist()
    cut = way.cut(lengths, budget)
    assert sorted(i for part in cut for i in part) == list(range(200))
    for part in cut:
        tokens = sum(lengths[i] for i in part)
        places = tokens if way.name == "varlen" else len(part) * max(lengths[i] for i in part)
        limit = budget * (1 + attention.SLACK) if way.name == "varlen" else budget
        assert places <= limit or len(part) == 1
        assert tokens >= 0.75 * places


def test_a_scrap_is_spread_and_parts_are_of_one_size() -> None:
    """256 sequences of 135 tokens are 34560: two parts of 17280 are a sixteenth over 16384 and no
    more. One token less of a budget, and it takes three, none of them a scrap.
    """
    assert [len(part) for part in Packed("varlen").cut([135] * 256, 16384)] == [128, 128]
    assert [len(part) for part in Packed("varlen").cut([135] * 256, 16263)] == [85, 86, 85]
    assert Packed("varlen").cut([3, 50, 4], 8) == [[0], [1], [2]]


# --- on a GPU


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("kind", VARLEN)
def test_torch_s_kernel_is_each_sequence_alone_in_bfloat16(kind: str) -> None:
    """As near to float64 as one sequence at a time in bfloat16 is, up to a factor of two."""
    exact, model = make(kind).cuda(), make(kind, torch.bfloat16).cuda()
    way, sentence = choose(model)
    assert way.name == "varlen", sentence
    batch = pack().to(torch.device("cuda"))
    expected = alone(exact.base_model, batch)
    single = alone(model.base_model, batch)
    together = way.hidden(model.base_model, batch.micro_batch())
    scale = expected.abs().max()
    error, rounding = ((x.double() - expected).abs().max() / scale for x in (together, single))
    assert error <= 2 * rounding + 0.01
    exactly, singly = gradients(exact, expected), gradients(model, single)
    actual = gradients(model, way.hidden(model.base_model, batch.micro_batch()))
    for name, gradient in exactly.items():
        # A bias of keys moves all scores of a query alike: its gradient is 0 up to rounding.
        size = exactly[name.replace("k_proj.bias", "q_proj.bias")].norm()
        error, rounding = ((x[name].double() - gradient).norm() for x in (actual, singly))
        assert error <= 2 * rounding + 0.02 * size, name


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_float32_and_soft_caps_take_rows_on_a_gpu_and_say_why() -> None:
    assert choose(make("llama", torch.float32).cuda())[1].startswith(
        "attention: rows (varlen: needs half precision, not float32"
    )
    model = make("gemma2", torch.bfloat16).cuda()
    way, sentence = choose(model)
    assert way.name in ("flash", "rows")
    assert "varlen: it has no softcap" in sentence


# --- in a run


def test_a_run_prints_and_stores_its_attention(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """At its start, and again at each resume, which may be on another machine."""
    model = train_loop_ranks.make_model(tmp_path / "model")
    out = tmp_path / "run"
    assert train_loop_ranks.train(out, model=model, steps=2, device="cpu") == 0
    assert "; attention: rows\n" in capsys.readouterr().out
    assert train_loop_ranks.resume(out, extend=3, attention="rows") == 0
    environment = json.loads((out / "environment.json").read_text())
    assert environment["attention"] == "rows"
    assert [resumed["attention"] for resumed in environment["resumed"]] == ["rows"]
