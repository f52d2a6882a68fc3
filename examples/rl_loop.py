"""Reinforcement learning of a language model in one file: model, sampler, rewards, advantages,
loss, update, evaluation.

    python examples/rl_loop.py                      about a minute on two CPU cores
    python examples/rl_loop.py --loss cispo --seed 1

The task is to sort digits: the model reads `3141=` and is to write `1134` and an end token. It is a
small transformer that begins with random weights and sees no example of an answer: it only gets a
number for each text that it wrote. Read from top to bottom; only the loss, `policy_loss`, and the
baseline of the rewards are in other files.

Comments give shapes: P prompts, G samples of each, B = P·G sequences, L tokens of a
prompt, T tokens of a completion, S = L + T, V words, D features, H heads.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import policyloss as pl

# ── The task ──────────────────────────────────────────────────────────────────────────────────────

DIGITS = 4  # in a prompt
EQUALS, END = 10, 11  # the words are the digits 0 to 9 and these two
V = 12
L = DIGITS + 1  # a prompt is its digits and EQUALS
T = DIGITS + 1  # an answer is the digits in order and END
HELD_OUT = 500  # prompts that are never trained on


def make_prompts() -> tuple[Tensor, Tensor]:
    """Every string of digits once, in an order that never changes:
    the training prompts, and the held-out ones. int64 [·, L]
    """
    digits = torch.cartesian_prod(*[torch.arange(10)] * DIGITS)
    order = torch.tensor(Random(0).sample(range(len(digits)), len(digits)))
    prompts = torch.cat([digits[order], torch.full((len(digits), 1), EQUALS)], dim=1)
    return prompts[HELD_OUT:], prompts[:HELD_OUT]


def right_answers(prompts: Tensor) -> Tensor:
    """[B, L] → the sorted digits and END, [B, T]."""
    return torch.cat(
        [prompts[:, :DIGITS].sort(dim=1).values, torch.full((len(prompts), 1), END)], dim=1
    )


def reward(prompts: Tensor, completions: Tensor) -> Tensor:
    """The share of the places of an answer that are right, [B].
    Tokens after END count as wrong.
    """
    return ((completions == right_answers(prompts)) & written(completions)).float().mean(dim=1)


def written(completions: Tensor) -> Tensor:
    """True for the tokens up to END and at END, which are the ones that the model chose.
    bool [B, T]
    """
    ends = (completions == END).long()
    return ends.cumsum(dim=1) - ends == 0


# ── The model ─────────────────────────────────────────────────────────────────────────────────────


class Block(nn.Module):
    """Attention to earlier tokens, then two layers for each token."""

    def __init__(self, features: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_layers = nn.LayerNorm(features), nn.LayerNorm(features)
        self.into_attention, self.from_attention = (
            nn.Linear(features, 3 * features),
            nn.Linear(features, features),
        )
        self.layers = nn.Sequential(
            nn.Linear(features, 4 * features), nn.GELU(), nn.Linear(4 * features, features)
        )

    def forward(self, x: Tensor) -> Tensor:
        """[B, S, D] → [B, S, D]"""
        qkv = self.into_attention(self.before_attention(x))
        # [B, H, S, D/H]
        q, k, v = (
            part.unflatten(2, (self.heads, -1)).transpose(1, 2) for part in qkv.chunk(3, dim=2)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.from_attention(mixed.transpose(1, 2).flatten(2))
        return x + self.layers(self.before_layers(x))  # type: ignore[no-any-return]


class Policy(nn.Module):
    """A transformer that gives the logits of the next token at every place."""

    def __init__(self, features: int = 64, heads: int = 4, depth: int = 2) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(V, features), nn.Embedding(L + T, features)
        self.blocks = nn.Sequential(*(Block(features, heads) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(features), nn.Linear(features, V)

    def forward(self, ids: Tensor) -> Tensor:
        """ids int64 [B, S] → logits [B, S, V]"""
        x = self.words(ids) + self.places(torch.arange(ids.shape[1]))
        return self.head(self.norm(self.blocks(x)))  # type: ignore[no-any-return]


def logp_of(policy: Policy, prompts: Tensor, completions: Tensor) -> Tensor:
    """log p of each token of a completion, given all before it, [B, T].
    The logits at a place are of the token after it.
    """
    # [B, T, V]
    logits: Tensor = policy(torch.cat([prompts, completions], dim=1)[:, :-1])[:, L - 1 :]
    return logits.log_softmax(dim=2).gather(2, completions.unsqueeze(2)).squeeze(2)


# ── Sampling ──────────────────────────────────────────────────────────────────────────────────────


@torch.no_grad()
def sample(policy: Policy, prompts: Tensor, *, greedy: bool = False) -> Tensor:
    """A completion of each prompt, [B, T]; END again and again after the first END."""
    ids = prompts
    ended = torch.zeros(len(prompts), dtype=torch.bool)
    for _ in range(T):
        logits = policy(ids)[:, -1]  # [B, V]
        token = (
            logits.argmax(dim=1)
            if greedy
            else torch.multinomial(logits.softmax(dim=1), 1).squeeze(1)
        )
        token = torch.where(ended, END, token)
        ended = ended | (token == END)
        ids = torch.cat([ids, token.unsqueeze(1)], dim=1)
    return ids[:, L:]


def accuracy(policy: Policy, prompts: Tensor) -> float:
    """The share of prompts whose greedy completion is right from beginning to end."""
    return (reward(prompts, sample(policy, prompts, greedy=True)) == 1).float().mean().item()


# ── Learning ──────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Settings:
    """The settings of a run."""

    loss: str = "dapo"
    steps: int = 200
    prompts: int = 32  # P
    samples: int = 16  # G
    updates: int = 2  # of the weights, with the samples of one step
    lr: float = 1e-3
    seed: int = 0


@dataclass(frozen=True)
class Batch:
    """The data of one step, without gradients."""

    prompts: Tensor  # int64 [B, L]
    completions: Tensor  # int64 [B, T]
    mask: Tensor  # bool [B, T]: the tokens to learn from
    old_logp: Tensor  # [B, T]: under the policy that sampled them
    rewards: Tensor  # [B]
    advantages: Tensor  # [B]


def collect(policy: Policy, train: Tensor, settings: Settings) -> Batch:
    """Sample G completions of P prompts, score them,
    and compare each with the others of its prompt.
    """
    chosen = train[torch.randint(len(train), (settings.prompts,))]  # [P, L]
    prompts = chosen.repeat_interleave(settings.samples, dim=0)  # [B, L]
    completions = sample(policy, prompts)
    rewards = reward(prompts, completions)
    # [B]: which prompt.
    group_ids = torch.arange(settings.prompts).repeat_interleave(settings.samples)
    advantages = pl.advantage.grpo(rewards, group_ids)
    with torch.no_grad():
        old_logp = logp_of(policy, prompts, completions)
    return Batch(prompts, completions, written(completions), old_logp, rewards, advantages)


def update(
    policy: Policy, optimizer: torch.optim.Optimizer, spec: pl.LossSpec, batch: Batch
) -> dict[str, float]:
    """One step of the optimizer. → the metrics of the loss, before it."""
    logp = logp_of(policy, batch.prompts, batch.completions)
    out = pl.policy_loss(spec, logp, batch.old_logp, batch.advantages, batch.mask)
    optimizer.zero_grad()
    out.loss.backward()
    nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
    optimizer.step()
    return out.metrics.compute()


def train(settings: Settings, say: Callable[[str], object] = print) -> tuple[Policy, float, float]:
    """The whole algorithm. → the policy, and its held-out accuracy before and after."""
    torch.manual_seed(settings.seed)
    spec = pl.preset(settings.loss)
    train_prompts, held_out = make_prompts()
    policy = Policy()
    optimizer = torch.optim.AdamW(policy.parameters(), lr=settings.lr, weight_decay=0.0)
    before = accuracy(policy, held_out)
    say(
        f"before: held-out accuracy {before:.3f}, {sum(p.numel() for p in policy.parameters()):,} "
        f"weights, loss {settings.loss}"
    )
    began = time.perf_counter()
    for step in range(1, settings.steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = settings.lr * min(1.0, step / 10, 2 * (1 - (step - 1) / settings.steps))
        batch = collect(policy, train_prompts, settings)
        for _ in range(settings.updates):
            metrics = update(policy, optimizer, spec, batch)
        if step % 25 == 0 or step == settings.steps:
            numbers = {
                "reward": batch.rewards.mean().item(),
                "held-out accuracy": accuracy(policy, held_out),
                "ratio_max": metrics["ratio_max"],
                "clip_fraction": metrics.get("clip_fraction", 0.0),
                "seconds": time.perf_counter() - began,
            }
            say(
                f"step {step:4d}  "
                + "  ".join(f"{name} {value:.3f}" for name, value in numbers.items())
            )
    after = accuracy(policy, held_out)
    say(f"after: held-out accuracy {after:.3f} in {time.perf_counter() - began:.0f} s")
    return policy, before, after


def show(policy: Policy, prompts: Tensor) -> str:
    """The policy's completions of some prompts, one per line."""
    words = [*"0123456789", "=", "."]
    rows = torch.cat([prompts, sample(policy, prompts, greedy=True)], dim=1).tolist()
    return "\n".join("".join(words[i] for i in row) for row in rows)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, value in vars(Settings()).items():
        parser.add_argument(
            f"--{name}", type=type(value), default=value, help="default: %(default)s"
        )
    policy, _, _ = train(Settings(**vars(parser.parse_args())))
    print(show(policy, make_prompts()[1][:5]))


if __name__ == "__main__":
    main()
