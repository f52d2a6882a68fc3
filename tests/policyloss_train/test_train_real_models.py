"""What large models need: adapters, half precision, checkpointed gradients, a compiled body, and a
folder that other programs load.
"""

from __future__ import annotations

import copy
import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from test_train_attention import make
from test_train_learner import HERE, LOSSES, alone, learn, learner, llama, samples
from test_train_loop import assert_same_run
from torch import Tensor, nn
from torch._dynamo import lookup_backend
from train_loop_ranks import lines, resume, train

import policyloss as pl
from policyloss.cli import main
from policyloss.errors import InputError
from policyloss_train.attention import Rows
from policyloss_train.config import TrainConfig
from policyloss_train.learner import Learner
from policyloss_train.models import (
    _compile_forward,
    add_adapter,
    checkpoint_gradients,
    compile_blocks,
    merged_weights,
    tiny_tokenizer,
    train_base,
    without_adapter,
)
from policyloss_train.optimizers import MasterAdamW, adamw, load_optimizer_state, optimizer_state
from policyloss_train.policy import Critic, Policy, Routing
from policyloss_train.tasks import make_task

LORA = {"lora_rank": 2, "lora_alpha": 8.0}


def adapted(seed: int = 1) -> Any:
    """A model with adapters that have learned something."""
    made = llama(seed)
    add_adapter(made, TrainConfig(**LORA))
    g = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for name, p in made.named_parameters():
            if "lora_B" in name:
                p.copy_(torch.randn(p.shape, generator=g, dtype=torch.float64) * 0.3)
    return made


def logits(made: Any) -> torch.Tensor:
    out: torch.Tensor = made(input_ids=torch.arange(9)[None], use_cache=False).logits
    return out.detach()


# --- adapters


def test_fresh_adapters_change_nothing_follow_from_the_seed_and_are_all_that_is_trained() -> None:
    made, twin, other = llama(1), llama(1), llama(1)
    state = torch.random.get_rng_state()
    add_adapter(made, TrainConfig(**LORA))
    assert torch.equal(torch.random.get_rng_state(), state)
    torch.manual_seed(99)
    add_adapter(twin, TrainConfig(**LORA))
    add_adapter(other, TrainConfig(**LORA, seed=1))
    weights = [dict(x.named_parameters()) for x in (made, twin, other)]
    assert all(torch.equal(p, weights[1][name]) for name, p in weights[0].items())
    trained = [name for name, p in weights[0].items() if p.requires_grad]
    assert len(trained) == 2 * 7 * 2  # A and B of seven linear layers in each of two blocks
    assert not torch.equal(weights[0][trained[0]], weights[2][trained[0]])
    assert torch.equal(logits(made), logits(llama(1)))
    assert not made.training


def test_targets_by_name() -> None:
    made = llama(1)
    add_adapter(made, TrainConfig(**LORA, lora_target=("q_proj", "v_proj")))
    trained = {name.split(".")[-4] for name, p in made.named_parameters() if p.requires_grad}
    assert trained == {"q_proj", "v_proj"}
    with pytest.raises(InputError, match=r"--lora-target nothing: .*not found"):
        add_adapter(llama(1), TrainConfig(**LORA, lora_target=("nothing",)))
    with pytest.raises(InputError, match="--lora-alpha and --lora-target need --lora-rank"):
        TrainConfig(lora_alpha=3.0)


def test_merged_weights_give_the_same_logits_without_adapters() -> None:
    made, plain = adapted(), llama(9)
    assert (logits(made) - logits(llama(1))).abs().max() > 0.1
    merged = merged_weights(made)
    assert merged.keys() == plain.state_dict().keys()
    plain.load_state_dict(merged)
    torch.testing.assert_close(logits(plain), logits(made), rtol=1e-10, atol=1e-10)
    with without_adapter(made):
        assert torch.equal(logits(made), logits(llama(1)))
    plain.load_state_dict(merged_weights(llama(1)))
    assert torch.equal(logits(plain), logits(llama(1)))


def test_the_reference_of_a_policy_with_adapters_is_the_model_without_them() -> None:
    made, spec = adapted(), LOSSES["grpo with reference"]
    options = {"minibatches": 1, "temperature": 0.8, "advantage": "dr_grpo"}
    policy = Policy(made, Rows())
    trained = [p for p in policy.parameters() if p.requires_grad]
    one = Learner(TrainConfig(**LORA, **options), spec, HERE, policy, torch.optim.SGD(trained, 1.0))
    batch = samples(llama(1))
    frozen = torch.cat([alone(llama(1), s) for s in batch]).detach()
    before = {name: p.detach().clone() for name, p in made.named_parameters()}
    tokens = learn(one, batch).pack.tokens
    torch.testing.assert_close(
        tokens["ref_logp"][tokens["mask"]].double(), frozen, rtol=0, atol=1e-6
    )
    for name, p in made.named_parameters():
        assert torch.equal(p, before[name]) == ("lora" not in name), name


def test_a_critic_starts_from_the_adapted_model() -> None:
    critic = Critic(llama(1), Rows())
    critic.start_from(adapted())
    ids = torch.arange(6)[None]
    torch.testing.assert_close(
        critic.body(input_ids=ids).last_hidden_state,
        adapted().base_model(input_ids=ids).last_hidden_state,
        rtol=1e-10,
        atol=1e-10,
    )


def test_warm_up_trains_the_model_under_the_adapters() -> None:
    made = adapted()
    with train_base(made):
        assert torch.equal(logits(made), logits(llama(1)))
        flags = {name: p.requires_grad for name, p in made.named_parameters()}
        assert all(flag == ("lora" not in name) for name, flag in flags.items())
    assert all(p.requires_grad == ("lora" in name) for name, p in made.named_parameters())


def test_a_run_with_adapters_stores_them_alone_and_resumes_to_the_byte(
    model: str, tmp_path: Path
) -> None:
    spec = pl.preset("grpo").replace(kl=pl.KL("k3", 0.1))
    (tmp_path / "loss.json").write_text(json.dumps(spec.to_dict()))
    options = {"model": model, "loss": tmp_path / "loss.json", **LORA}
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert train(whole, **options, steps=4) == 0
    assert train(cut, **options, steps=2) == 0
    assert resume(cut, extend=4) == 0
    assert_same_run(cut, whole)
    stored = load_file(whole / "checkpoints" / "step_000004" / "rank00000.safetensors")
    names = [name for name in stored if name.startswith("policy/")]
    assert names
    assert all(".lora_" in name for name in names)
    assert not [name for name in stored if name.startswith("reference/")]
    assert lines(whole)[-1]["policy/kl_ref"] > 0


def test_after_a_warm_up_the_model_under_the_adapters_is_stored_too(tmp_path: Path) -> None:
    out = tmp_path / "run"
    assert train(out, **LORA, steps=1, warmup_steps=3) == 0
    stored = load_file(next((out / "checkpoints").glob("step_*")) / "rank00000.safetensors")
    assert "policy/model.model.layers.0.mlp.up_proj.base_layer.weight" in stored
    assert main(["sample", str(out), "sort 12=", "--number", "1"]) == 0


# --- half precision


def test_small_steps_add_up_in_float32_masters() -> None:
    """The next number after 1 is 1.0078 in bfloat16: a hundred steps of 1e-4 are one of 0.01."""
    steps = {}
    for kind in (torch.optim.AdamW, MasterAdamW):
        weight = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
        optimizer = kind([weight], lr=1e-4, betas=(0.9, 0.99), weight_decay=0.0)
        for _ in range(100):
            weight.grad = torch.ones_like(weight)
            optimizer.step()
        steps[kind] = (1 - weight.detach().float()).tolist()
    assert steps[torch.optim.AdamW] == [0.0] * 3
    assert steps[MasterAdamW] == [0.01171875] * 3  # 3/256: 0.99 lies between 253/256 and 254/256


def test_masters_take_the_steps_of_adamw_in_float32() -> None:
    g = torch.Generator().manual_seed(0)
    start = torch.randn(5, 4, generator=g).bfloat16()
    half, full = nn.Parameter(start.clone()), nn.Parameter(start.float())
    options: dict[str, Any] = {"lr": 0.01, "betas": (0.8, 0.9), "weight_decay": 0.1}
    optimizers = [MasterAdamW([half], **options), torch.optim.AdamW([full], **options)]
    for _ in range(5):
        gradient = torch.randn(5, 4, generator=g).bfloat16()
        half.grad, full.grad = gradient, gradient.float()
        for optimizer in optimizers:
            optimizer.step()
    torch.testing.assert_close(optimizers[0].state[half]["master"], full.detach())
    assert torch.equal(half.detach(), optimizers[0].state[half]["master"].bfloat16())


def test_masters_are_stored_and_go_on_bit_for_bit() -> None:
    def stepped(module: nn.Linear, optimizer: Any, first: int, last: int) -> None:
        for i in range(first, last):
            torch.manual_seed(i)
            module.weight.grad = torch.randn_like(module.weight)
            optimizer.step()

    def fresh() -> tuple[nn.Linear, Any]:
        torch.manual_seed(0)
        module = nn.Linear(3, 2, bias=False).bfloat16()
        return module, adamw(module, 1e-3, TrainConfig())

    module, optimizer = fresh()
    assert isinstance(optimizer, MasterAdamW)
    stepped(module, optimizer, 0, 3)
    tensors = optimizer_state(module, optimizer)
    assert tensors["weight/master"].dtype == torch.float32
    twin, other = fresh()
    with torch.no_grad():
        twin.weight.copy_(module.weight)
    stored = {name: x.clone() for name, x in tensors.items()}
    load_optimizer_state(twin, other, stored)
    stepped(module, optimizer, 3, 6)
    stepped(twin, other, 3, 6)
    assert torch.equal(other.state[twin.weight]["master"], optimizer.state[module.weight]["master"])


@pytest.mark.slow
def test_a_run_in_bfloat16_resumes_to_the_byte(model: str, tmp_path: Path) -> None:
    options = {"model": model, "dtype": "bfloat16"}
    assert train(tmp_path / "whole", **options, steps=4) == 0
    assert train(tmp_path / "cut", **options, steps=2) == 0
    assert resume(tmp_path / "cut", extend=4) == 0
    assert_same_run(tmp_path / "cut", tmp_path / "whole")


# --- memory and time


@pytest.mark.parametrize("kind", ["llama", "gemma2", "opt"])
def test_checkpointed_gradients_are_the_same_and_dropout_stays_off(kind: str) -> None:
    plain, made = make(kind), make(kind)
    for one in (plain, made):
        for name in ("dropout", "attention_dropout"):
            if hasattr(one.config, name):
                setattr(one.config, name, 0.5)
        for module in one.modules():
            if isinstance(getattr(module, "dropout", None), float):
                module.dropout = 0.5
    checkpoint_gradients(made)
    ids = torch.arange(8)[None]
    calls = []
    layer = next(m for m in made.modules() if isinstance(m, nn.ModuleList))[0]
    layer.register_forward_pre_hook(lambda *_: calls.append(1))
    for one in (plain, made):
        one(input_ids=ids, use_cache=False).logits.square().sum().backward()
    assert len(calls) == 2  # once, and again in the backward
    expected = dict(plain.named_parameters())
    for name, p in made.named_parameters():
        assert torch.equal(p.grad, expected[name].grad), name


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch looks at it
def test_compiled_blocks_learn_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Traced as for any backend, and run without one that generates code, which takes a minute.
    The blocks share one code, and sampling, which brings a cache, goes through none of it.
    """
    traced: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        traced.append(graph)
        return lookup_backend("aot_eager")(graph, inputs)

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    _compile_forward.cache_clear()
    gradients = []
    for compiled in (False, True):
        made = llama(1)
        names, batch = {*made.state_dict()}, samples(made)
        one = learner(made, LOSSES["ppo"], advantage="dr_grpo", micro_tokens=12)
        if compiled:
            compile_blocks(made.base_model)
        assert {*made.state_dict()} == names
        before = {name: p.detach().clone() for name, p in made.named_parameters()}
        learn(one, batch)
        gradients.append({name: before[name] - p for name, p in made.named_parameters()})
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, rtol=1e-6, atol=1e-7)
    assert 0 < len(traced) <= 3  # one for the model's two blocks, again for another kind of shape
    twin = copy.deepcopy(made)
    with torch.no_grad():
        for p in twin.parameters():
            p.zero_()
        assert not twin.base_model(torch.tensor([[1, 2]]), use_cache=False).last_hidden_state.any()
    graphs = len(traced)
    assert made.generate(torch.tensor([[1, 2]]), max_new_tokens=3, do_sample=False).shape == (1, 5)
    assert len(traced) == graphs
    _compile_forward.cache_clear()


@pytest.mark.parametrize("kind", ["gemma2", "granite", "mixtral", "qwen3_moe"])
@pytest.mark.parametrize("head", ["fused", "logits"])
def test_capped_scaled_and_mixed_models_learn_from_their_own_logits(kind: str, head: str) -> None:
    """The log-probabilities of the learner are those of the model's own logits, and so is the loss:
    both heads of an unchanged policy have the ratio 1 everywhere.
    """
    made = make(kind)
    config = TrainConfig(minibatches=1, temperature=0.8, advantage="dr_grpo", head=head, lr=0.0)
    policy = Policy(made, Rows())
    one = Learner(config, pl.preset("ppo"), HERE, policy, adamw(policy, 0.0, config))
    batch = samples(llama(1))
    learned = learn(one, batch)
    with torch.no_grad():
        expected = torch.cat([alone(made, s) for s in batch])
    found = learned.logp[learned.pack.tokens["mask"]].double()
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
    assert learned.metrics["ratio_max"] == pytest.approx(1)
    assert (policy.transformation != (1.0, None)) == (kind in ("gemma2", "granite"))


# Dropout settings of a config, which must not act in learning.
DROPOUT = {"gpt2": ("resid_pdrop", "embd_pdrop", "attn_pdrop"), "mixtral": ("attention_dropout",)}


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("mixtral", {}),
        ("gpt2", {"gradient_checkpointing": True}),
        pytest.param("qwen3_moe", {"staleness": 1}, marks=pytest.mark.slow),
        pytest.param("gemma2", {"head": "logits", "top_k": 9}, marks=pytest.mark.slow),
        pytest.param("gpt2", {"loss": "ppo"}, marks=pytest.mark.slow),
    ],
)
def test_a_run_with_a_model_of_another_kind(
    kind: str, options: dict[str, Any], tmp_path: Path
) -> None:
    """Experts, a soft cap, a tied head, dropout: the ratio of the unchanged policy is 1, the
    weights learn, and the routers of one with experts are measured.
    """
    from transformers import AutoModelForCausalLM

    task = make_task("sort", reward=None, seed=0)
    config = make(kind).config
    config.vocab_size = len(tiny_tokenizer(task))
    for name in DROPOUT.get(kind, ()):
        assert hasattr(config, name)
        setattr(config, name, 0.5)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    tiny_tokenizer(task).save_pretrained(tmp_path / "model")
    assert train(tmp_path / "run", model=tmp_path / "model", steps=1, **options) == 0
    rows = lines(tmp_path / "run", "rollouts")
    gaps = [
        abs(a - b)
        for row in rows
        for a, b in zip(row["old_logp"], row["rollout_logp"], strict=True)
    ]
    assert 0 < max(gaps) < 1e-5
    row = lines(tmp_path / "run")[-1]
    assert row["grad_norm"] > 1e-3
    assert row["skipped"] == 0
    experts = kind in ("mixtral", "qwen3_moe")
    assert ("policy/router_busiest" in row) == experts
    assert 1 <= row.get("policy/router_busiest", 1) <= 2  # two of four experts


@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe"])
def test_the_load_of_the_busiest_expert_by_hand(kind: str) -> None:
    """From the router logits that the model itself returns: two of four experts for each token."""
    made = make(kind)
    routing = Routing(made)
    ids = torch.arange(2, 14)[None]
    with torch.no_grad():
        out = made(input_ids=ids, output_router_logits=True, use_cache=False)
    assert routing.busiest(HERE) == {}  # nothing is counted where nothing learns
    loads = []
    for logits_of_layer in out.router_logits:
        chosen = logits_of_layer.topk(2).indices.flatten().tolist()
        loads.append(max(chosen.count(expert) for expert in range(4)) / (24 / 4))
    made(input_ids=ids[:, :5], use_cache=False)  # two forwards of a step, of the same tokens
    routing.busiest(HERE)
    made(input_ids=ids, use_cache=False)
    assert routing.busiest(HERE) == {"router_busiest": pytest.approx(sum(loads) / 2)}
    assert max(loads) > 1
    assert routing.busiest(HERE) == {}
    assert Routing(llama(1)).busiest(HERE) == {}


# --- export


def test_an_exported_folder_is_the_policy_with_its_tokenizer_and_template(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    (tmp_path / "chat.jinja").write_text("{% for m in messages %}{{ m['content'] }}{% endfor %}")
    run, plain, folder = tmp_path / "run", tmp_path / "plain", tmp_path / "exported"
    options = {"model": model, "chat_template": tmp_path / "chat.jinja", "steps": 2}
    assert train(run, **options, **LORA, lr=0.05) == 0
    capsys.readouterr()
    assert main(["export", str(run), str(folder)]) == 0
    assert capsys.readouterr() == (f"{folder}: the policy of {run} after step 2\n", "")
    exported = AutoModelForCausalLM.from_pretrained(folder)
    assert not [name for name in exported.state_dict() if "lora" in name]
    ids = torch.arange(3, 12)[None]
    start = AutoModelForCausalLM.from_pretrained(model)(input_ids=ids).logits
    found = exported(input_ids=ids).logits
    assert (found - start).abs().max() > 1e-3  # the run has learned something
    assert AutoTokenizer.from_pretrained(folder).chat_template is not None
    # The adapter alone, on the model that the run started from, gives the same completions.
    assert main(["export", str(run), str(plain), "--adapter"]) == 0
    assert not (plain / "model.safetensors").exists()
    from peft import PeftModel

    over = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model), str(plain))
    torch.testing.assert_close(over(input_ids=ids).logits, found, rtol=1e-4, atol=1e-5)
    # The folder is a model to train on.
    shutil.rmtree(plain)
    assert train(plain, model=str(folder), steps=1) == 0


def test_invalid_exports_are_refused(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    assert train(run, model=model, steps=1) == 0
    assert main(["export", str(run), str(tmp_path / "x"), "--adapter"]) == 2
    assert "has no adapter" in capsys.readouterr().err
    assert main(["export", str(run), str(run)]) == 2
    assert "is there already" in capsys.readouterr().err
    assert main(["export", str(run)]) == 2
    assert "arguments are required: FOLDER" in capsys.readouterr().err

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("policyloss_train.command.os.rename", full)
    assert main(["export", str(run), str(tmp_path / "x")]) == 2
    assert "No space left on device" in capsys.readouterr().err

    def full_disk(*_: Any, **options: Any) -> None:
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr("transformers.PreTrainedModel.save_pretrained", full_disk)
    assert main(["export", str(run), str(tmp_path / "x")]) == 2
    assert "No space left on device" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]  # nothing half-written
