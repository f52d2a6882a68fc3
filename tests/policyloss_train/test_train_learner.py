"""One step of learning, against the same step written out by hand:
each sequence alone through the model, one padded batch.

Plain gradient descent with a rate of 1 takes the place of AdamW,
so that the weights move by exactly the gradient.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from walk import walked

import policyloss as pl
from policyloss_train.attention import Rows
from policyloss_train.batches import Pack
from policyloss_train.config import TrainConfig
from policyloss_train.distributed import Ranks
from policyloss_train.learner import Learned, Learner
from policyloss_train.optimizers import rate
from policyloss_train.policy import PLANS, Critic, Policy
from policyloss_train.sampler import Sample

VOCABULARY, TEMPERATURE = 23, 0.8
HERE = Ranks(0, 1, torch.device("cpu"))
# Prompt tokens, completion tokens, group.
SHAPES = [
    (3, 4, 0),
    (5, 1, 0),
    (2, 6, 1),
    (3, 3, 1),
    (1, 5, 2),
    (4, 2, 2),
]
REWARDS = [1.0, 0.0, 0.25, 1.0, 0.0, 0.5]


def llama(seed: int) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        initializer_range=0.3,
    )
    return LlamaForCausalLM(config).double().eval()


def gpt2(seed: int) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(seed)
    config = GPT2Config(
        vocab_size=VOCABULARY, n_embd=16, n_layer=2, n_head=2, n_positions=32, initializer_range=0.3
    )
    return GPT2LMHeadModel(config).double().eval()


def seen_alone(model: Any, s: Sample) -> tuple[Tensor, Tensor]:
    """Log-probabilities and entropies of the completion, `[L]` each: the model on this one
    sequence, all logits, in float64.
    """
    whole = torch.cat([s.prompt_ids, s.completion_ids])
    logits = model(input_ids=whole[None], use_cache=False).logits[0, s.prompt_ids.shape[0] - 1 : -1]
    all_logp = (logits / TEMPERATURE).log_softmax(-1)
    return all_logp.gather(1, s.completion_ids[:, None])[:, 0], -(all_logp.exp() * all_logp).sum(-1)


def alone(model: Any, s: Sample) -> Tensor:
    return seen_alone(model, s)[0]


@torch.no_grad()
def samples(model: Any) -> list[Sample]:
    """Random tokens whose sampler was another policy:
    its log-probabilities are up to 0.8 away, so that clipping fires.
    """
    g = torch.Generator().manual_seed(5)
    found = []
    for (prompt, length, group), reward in zip(SHAPES, REWARDS, strict=True):
        ids = torch.randint(VOCABULARY, (prompt + length,), generator=g)
        bare = Sample(0, group, ids[:prompt], ids[prompt:], torch.zeros(length), True, "", reward)
        noise = torch.rand(length, generator=g) * 1.6 - 0.8
        found.append(
            Sample(
                0,
                group,
                ids[:prompt],
                ids[prompt:],
                (alone(model, bare) + noise).float(),
                True,
                "",
                reward,
            )
        )
    return found


def learner(model: Any, spec: pl.LossSpec, **options: Any) -> Learner:
    """With gradient descent of rate 1. `reference` and `critic` are used if the loss or the
    advantage needs them.
    """
    options = {
        "minibatches": 1,
        "grad_clip": 0.0,
        "old_logp": "rollout",
        "temperature": TEMPERATURE,
        **options,
    }
    config = TrainConfig(**options)
    policy = Policy(model, Rows())
    made = Learner(config, spec, HERE, policy, torch.optim.SGD(policy.parameters(), lr=1.0))
    if "ref_logp" in spec.reads:
        made.reference = Policy(llama(9), Rows()).requires_grad_(False)
    if config.with_critic:
        made.critic = Critic(model, Rows())
        nn.init.normal_(made.critic.head.weight, generator=torch.Generator().manual_seed(2))
        made.critic_optimizer = torch.optim.SGD(made.critic.parameters(), lr=0.01)
    return made


def learn(made: Learner, batch: list[Sample], step: int = 0) -> Learned:
    return made.learn(Pack.of(batch), range(len(batch)), len(batch), step)


def parameters(module: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in module.named_parameters()}


def padded(rows: list[Tensor]) -> Tensor:
    return nn.utils.rnn.pad_sequence(rows, batch_first=True)


def by_hand(
    model: Any, spec: pl.LossSpec, batch: list[Sample], advantages: Tensor, reference: Any = None
) -> Any:
    """The loss of the whole batch as one padded call,
    and its gradient by the name of the weight.
    """
    # One forward for both: Llama's norms round to float32, forward and backward,
    # and two would round twice.
    logp, entropy = (
        padded(list(rows)) for rows in zip(*(seen_alone(model, s) for s in batch), strict=True)
    )
    mask = padded([torch.ones(s.completion_ids.shape[0], dtype=torch.bool) for s in batch])
    with torch.no_grad():
        old = padded([s.rollout_logp.double() for s in batch])
        ref = (
            None
            if reference is None
            else padded([alone(reference, s).float().double() for s in batch])
        )
    group_ids = torch.tensor([s.group for s in batch])
    more = {"rollout_logp": old} if "rollout_logp" in spec.reads else {}
    out = pl.policy_loss(
        spec,
        logp,
        old,
        advantages,
        mask,
        ref_logp=ref,
        entropy=entropy,
        group_ids=group_ids,
        totals="local",
        **more,
    )
    names, weights = zip(*model.named_parameters(), strict=True)
    return out, dict(zip(names, torch.autograd.grad(out.loss, weights), strict=True))


def group_advantages() -> Tensor:
    """Reward minus the mean of the pair: ±½ of (1, 0), ±⅜ of (¼, 1), ±¼ of (0, ½)."""
    return torch.tensor([0.5, -0.5, -0.375, 0.375, -0.25, 0.25], dtype=torch.float64)


LOSSES = {
    "ppo": pl.preset("ppo"),
    "ppo with entropy": pl.preset("ppo").replace(entropy_coef=0.1),
    "gspo": pl.preset("gspo"),
    # The fractions of the papers choose no token of 21.
    # Both need to know the whole step before its first backward.
    "clip_cov": pl.preset("clip_cov").replace(
        trust=pl.CovClip(0.2, 0.2, fraction=0.3, cov_low=0.01, cov_high=9.0)
    ),
    "kl_cov": pl.preset("kl_cov").replace(trust=pl.CovKL(fraction=0.3, coef=1.0)),
    "grpo with reference": pl.preset("grpo").replace(kl=pl.KL("k3", 0.2)),
    "prompt mean": pl.preset("dapo").replace(aggregate=pl.PromptMean()),
}


@pytest.fixture(scope="module")
def expected() -> dict[str, Any]:
    """By loss: the metrics and the gradient of the hand-written step."""
    model = llama(1)
    batch = samples(model)
    found = {}
    for name, spec in LOSSES.items():
        out, gradient = by_hand(
            model, spec, batch, group_advantages(), llama(9) if "ref_logp" in spec.reads else None
        )
        found[name] = (out.metrics.compute(), gradient)
    return found


@walked("head", ["fused", "sparse", "logits"])
@walked("micro_tokens", [7, 20, 10**6])
@walked("name", LOSSES)
def test_an_update_is_the_gradient_of_the_whole_batch(
    name: str, micro_tokens: int, head: str, expected: dict[str, Any], monkeypatch: Any
) -> None:
    """However the batch is cut and whichever head is used; sparse with an eps that keeps all.
    31 places in all: up to 7 are six packs, 20 are two.
    """
    monkeypatch.setitem(PLANS, "sparse", pl.Plan("sparse", eps=1e-14))
    model = llama(1)
    before = parameters(model)
    made = learner(model, LOSSES[name], advantage="dr_grpo", micro_tokens=micro_tokens, head=head)
    learned = learn(made, samples(model))
    metrics, gradient = expected[name]
    after = parameters(model)
    assert max(g.abs().max() for g in gradient.values()) > 1e-3
    for key, g in gradient.items():
        torch.testing.assert_close(
            before[key] - after[key], g, rtol=1e-9, atol=1e-10, msg=lambda m, key=key: f"{key}: {m}"
        )
    norm = torch.stack([g.norm() for g in gradient.values()]).norm().item()
    assert learned.grad_norm == pytest.approx(norm, rel=1e-9)
    for key in metrics.keys() & learned.metrics.keys() - {"tokens"}:
        assert learned.metrics[key] == pytest.approx(metrics[key], rel=1e-9, abs=1e-10), key
    assert {"loss", "ratio_max", "entropy"} <= learned.metrics.keys()
    assert learned.metrics.get("clip_fraction", 1.0) > 0


@pytest.mark.parametrize("make", [llama, gpt2])
def test_a_pack_does_not_look_across_sequences(make: Any) -> None:
    model = make(3)
    batch = samples(model)
    with torch.no_grad():
        micro = Pack.of(batch).micro_batch()
        made = learner(model, pl.preset("ppo"), advantage="dr_grpo")
        found = made.logprobs(made.policy, micro)[micro["mask"]]
        torch.testing.assert_close(
            found, torch.cat([alone(model, s) for s in batch]), rtol=0, atol=1e-12
        )
        values = Critic(model, Rows())
        nn.init.normal_(values.head.weight)
        single = [values(Pack.of([s]).micro_batch()) for s in batch]
        torch.testing.assert_close(values(micro), torch.cat(single), rtol=0, atol=1e-12)


def test_every_sequence_is_seen_once_in_an_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[int]] = []
    update = Learner._update

    def noted(self: Learner, pack: Pack, own: list[int], train: bool) -> Any:
        seen.append(own)
        return update(self, pack, own, train)

    monkeypatch.setattr(Learner, "_update", noted)
    model = llama(1)
    made = learner(model, pl.preset("dapo"), advantage="dr_grpo", epochs=2, minibatches=4)
    made.optimizer.param_groups[0]["lr"] = 0.0
    learned = learn(made, samples(model))
    assert learned.updates == made.updates == len(seen) == 8
    for epoch in (seen[:4], seen[4:]):
        assert sorted(i for part in epoch for i in part) == list(range(6))
    assert seen[:4] != seen[4:]
    assert learned.metrics["tokens"] == 2 * 21  # 4 + 1 + 6 + 3 + 5 + 2 tokens, twice


def test_later_updates_start_from_the_weights_of_the_ones_before() -> None:
    """Three epochs of one minibatch are three steps by hand,
    all against the log-probabilities of the first.
    """
    spec, model = pl.preset("ppo"), llama(1)
    batch, twin = samples(model), copy.deepcopy(model)
    made = learner(model, spec, advantage="dr_grpo", epochs=3)
    learned = learn(made, batch)
    losses, norms = [], []
    for i in range(3):
        if i == 2:
            last = torch.cat([alone(twin, s) for s in batch])
        out, gradient = by_hand(twin, spec, batch, group_advantages())
        losses.append(out.loss.item())
        norms.append(torch.stack([g.norm() for g in gradient.values()]).norm().item())
        with torch.no_grad():
            for name, p in twin.named_parameters():
                p -= gradient[name]
    for name, p in twin.named_parameters():
        torch.testing.assert_close(dict(model.named_parameters())[name], p, rtol=1e-8, atol=1e-9)
    assert learned.metrics["loss"] == pytest.approx(sum(losses) / 3, rel=1e-9)
    assert learned.grad_norm == pytest.approx(sum(norms) / 3, rel=1e-9)
    found = learned.logp[learned.pack.tokens["mask"]]
    torch.testing.assert_close(found.double(), last.detach(), rtol=0, atol=1e-6)


def test_gradients_are_clipped_to_a_norm() -> None:
    model = llama(1)
    before, batch = parameters(model), samples(model)
    learned = learn(learner(model, pl.preset("ppo"), advantage="dr_grpo", grad_clip=0.01), batch)
    moved = (
        torch.stack([(before[k] - p).norm() for k, p in parameters(model).items()]).norm().item()
    )
    assert learned.grad_norm > 0.02  # the reported norm is the one before clipping
    assert moved == pytest.approx(0.01, rel=1e-4)  # torch divides by the norm plus 1e-6


def test_old_log_probabilities_are_the_policy_s_or_the_sampler_s() -> None:
    model = llama(1)
    batch = samples(model)
    with torch.no_grad():
        own = torch.cat([alone(model, s) for s in batch])
    sampler = torch.cat([s.rollout_logp for s in batch]).double()
    assert (own - sampler).abs().max() > 0.5
    for source, expected_logp in (("recompute", own), ("rollout", sampler)):
        made = learner(
            copy.deepcopy(model),
            pl.preset("ppo"),
            advantage="dr_grpo",
            old_logp=source,
            micro_tokens=9,
        )
        tokens = learn(made, batch).pack.tokens
        torch.testing.assert_close(
            tokens["old_logp"][tokens["mask"]].double(), expected_logp, rtol=0, atol=1e-6
        )


def test_the_reference_does_not_change() -> None:
    model = llama(1)
    made = learner(model, LOSSES["grpo with reference"], advantage="dr_grpo", epochs=2)
    batch = samples(model)
    with torch.no_grad():
        frozen = torch.cat([alone(llama(9), s) for s in batch])
    for step in range(2):
        tokens = learn(made, batch, step).pack.tokens
        torch.testing.assert_close(
            tokens["ref_logp"][tokens["mask"]].double(), frozen, rtol=0, atol=1e-6
        )
    assert made.reference is not None
    start = llama(9).state_dict()
    assert all(
        torch.equal(x, start[k.removeprefix("model.")])
        for k, x in made.reference.state_dict().items()
    )


GAMMA, LAM, CLIP, CRITIC_LR = 0.9, 0.8, 0.02, 0.01


def returns_by_hand(values: Tensor, reward: float) -> Tensor:
    """δ_t = r_t + γ V_{t+1} − V_t with the reward at the last token; A_t = δ_t + γ λ A_{t+1};
    the return is A_t + V_t.
    """
    advantage, found = 0.0, []
    for t in reversed(range(values.shape[0])):
        last = t == values.shape[0] - 1
        delta = (reward if last else GAMMA * values[t + 1].item()) - values[t].item()
        advantage = delta + GAMMA * LAM * advantage
        found.append(advantage + values[t].item())
    return torch.tensor(found[::-1], dtype=torch.float64)


def test_the_critic_learns_the_clipped_value_loss() -> None:
    """Two steps by hand of the mean over tokens of ½ max((V − R)², (clip(V, V_old ± c) − R)²)."""
    model = llama(1)
    batch = samples(model)
    made = learner(
        model,
        pl.preset("ppo"),
        advantage="gae",
        epochs=2,
        gamma=GAMMA,
        lam=LAM,
        value_clip=CLIP,
        micro_tokens=20,
        lr=0.0,
        critic_steps=9,
    )
    twin: Any = copy.deepcopy(made.critic)
    critic: Any = made.critic

    def values() -> list[Tensor]:
        rows = []
        for s in batch:
            rows.append(twin(Pack.of([s]).micro_batch())[s.prompt_ids.shape[0] - 1 :])
        return rows

    learned = learn(made, batch)
    old = torch.cat(values()).detach().float().double()
    returns = torch.cat(
        [
            returns_by_hand(v, s.reward)
            for v, s in zip(
                old.split([s.completion_ids.shape[0] for s in batch]), batch, strict=True
            )
        ]
    )
    losses, clipped = [], 0
    for _ in range(2):
        v = torch.cat(values())
        near = v.clamp(old - CLIP, old + CLIP)
        clipped = int(((near - returns) ** 2 > (v - returns) ** 2).sum())
        loss = 0.5 * torch.maximum((v - returns) ** 2, (near - returns) ** 2).mean()
        losses.append(loss.item())
        loss.backward()
        with torch.no_grad():
            for p in twin.parameters():
                p -= CRITIC_LR * p.grad
                p.grad = None
    assert clipped >= 5  # or the clip was not tested
    for a, b in zip(critic.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    assert learned.values["loss"] == pytest.approx(sum(losses) / 2, rel=1e-5)
    assert learned.critic_grad_norm > 0


def test_at_first_only_the_critic_may_learn() -> None:
    model = llama(1)
    made = learner(model, pl.preset("ppo"), advantage="gae", critic_steps=2)
    assert made.critic is not None
    batch, policy, critic = samples(model), parameters(model), parameters(made.critic)
    learned = learn(made, batch, step=1)
    assert learned.grad_norm > 0
    assert all(torch.equal(p, policy[name]) for name, p in model.named_parameters())
    assert not torch.equal(made.critic.head.weight, critic["head.weight"])
    learn(made, batch, step=2)
    assert not any(
        torch.equal(p, policy[name]) for name, p in model.named_parameters() if p.dim() == 2
    )


def test_the_learning_rate_by_hand() -> None:
    """Two steps up, then from 1 at step 2 down over the 8 that are left: at step 4 a quarter is
    done, at step 6 half, at 9 ⅞.
    """
    config = {
        s: TrainConfig(steps=10, lr_warmup=2, schedule=s, out=Path("x"))
        for s in ("constant", "linear", "cosine")
    }
    shares = {s: [rate(c, step) for step in (0, 1, 2, 4, 6, 9)] for s, c in config.items()}
    assert shares["constant"] == [0.5, 1, 1, 1, 1, 1]
    assert shares["linear"] == [0.5, 1, 1, 0.75, 0.5, 0.125]
    # ½ (1 + cos(π/4)) = 0.853553, ½ (1 + cos(π/2)) = ½, ½ (1 + cos(7π/8)) = 0.0380602
    assert shares["cosine"] == pytest.approx([0.5, 1, 1, 0.8535534, 0.5, 0.0380602], abs=1e-7)
    assert rate(TrainConfig(steps=4), 0) == 1
