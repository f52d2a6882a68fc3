"""Does `what_if` predict the effect of a step?

    python -m benchmarks.what_if [--seeds 4] [--steps 50] [--out FILE]

A small model learns to sort digits with DAPO, ten updates for each batch of samples, and stops in
the middle of a batch, so that ratios are spread. From there

- every preset takes one step of gradient descent, and one of AdamW with the moments of the run: the
  predicted change of each sequence's log-probability against the real one (R²), for steps of
  several sizes;
- every preset trains for 50 updates by itself: the rank correlation of the predicted gain (through
  all parameters, through the head, by token) with the change of the held-out reward.

The engine that samples is a copy of the model in bf16.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import policyloss as pl
import policyloss_lab as lab
from benchmarks.harness import environment, table, write_json
from policyloss_lab.whatif.tokens import StoredTokens, tokens_of
from policyloss_lab.whatif.weights import HeadWeight, Parameters, Products, model_batches
from policyloss_train.models import load_model
from policyloss_train.sampler import sample, uniforms
from policyloss_train.setup import warm_up
from policyloss_train.tasks import make_task

LONGEST, PROMPTS, SAMPLES, HELD_OUT = 16, 8, 8, 512
UPDATES = 10  # of each batch of samples
BASE_ROUNDS = 5  # before the batch in the middle of which the presets begin
LR = 5e-4
SIZES = (0.01, 0.1, 1.0)  # nats, the root mean square of the predicted changes


@dataclass
class World:
    """A model with its task. reference: the model that the presets start from."""

    task: Any
    tokenizer: Any
    model: Any
    reference: Any
    seed: int

    @classmethod
    def begin(cls, seed: int, warmup: int) -> World:
        """A model that has seen imperfect answers."""
        task = make_task("sort", reward=None, seed=seed, success=None)
        model, tokenizer = load_model("tiny", task, dtype=torch.float32, device="cpu", seed=seed)
        warm_up(model, tokenizer, task, steps=warmup, seed=seed)
        return cls(task, tokenizer, model, copy.deepcopy(model), seed)

    def samples(self, model: Any, examples: Sequence[Any], number: int, draw: int) -> list[Any]:
        """Completions of each example by the engine."""
        engine = copy.deepcopy(model).to(torch.bfloat16)
        rows = [(i, i, e.prompt) for i, e in enumerate(examples) for _ in range(number)]
        drawn = uniforms(self.seed, draw, len(rows), LONGEST)
        limits: dict[str, Any] = {"max_new_tokens": LONGEST, "batch_tokens": 65536}
        rule: dict[str, Any] = {"temperature": 1.0, "top_p": 1.0, "top_k": 0}
        return sample(engine, self.tokenizer, rows, uniforms=drawn, **limits, **rule)

    def collect(self, model: Any, draw: int) -> StoredTokens:
        """A batch of samples with their rewards; the policy that sampled is the old one."""
        order = torch.randperm(
            len(self.task.train), generator=torch.Generator().manual_seed(1000 * self.seed + draw)
        )
        examples = [self.task.train[i] for i in order[:PROMPTS].tolist()]
        rows = [
            {
                "ids": s.completion_ids.tolist(),
                "prompts": s.prompt_ids.tolist(),
                "logp": s.rollout_logp.tolist(),
                "rollout_logp": s.rollout_logp.tolist(),
                "reward": self.task.score(examples[s.example], s.text),
                "group": s.group,
            }
            for s in self.samples(model, examples, SAMPLES, draw)
        ]
        tokens = tokens_of(rows)
        old, ref = (Parameters(x).logp(tokens) for x in (model, self.reference))
        inputs = tokens.inputs.replace(logp=old, old_logp=old, ref_logp=ref)
        return tokens.replace(inputs=inputs, horizon=LONGEST)

    def reward(self, model: Any) -> float:
        """The mean reward of one sample for each held-out prompt."""
        examples = self.task.held_out[:HELD_OUT]
        drawn = self.samples(model, examples, 1, 10**6)
        scores = [float(self.task.score(examples[s.example], s.text)) for s in drawn]
        return sum(scores) / len(scores)


def loss_of(model: Any, spec: pl.LossSpec, tokens: StoredTokens) -> Tensor:
    """The loss of the model on a batch of samples."""
    t, device = tokens.inputs, torch.device("cpu")
    (batch,) = model_batches(tokens, device, at_once=len(tokens.lengths))
    now = pl.hf.logprobs(model, batch.ids, batch.attention_mask, mask=batch.mask).logp[batch.mask]
    logp = torch.zeros_like(t.logp).index_put((batch.place,), now.double())
    arguments: dict[str, Any] = {**t.tensors(), "logp": logp}
    return pl.policy_loss(spec, **arguments, totals="local").loss


def train(
    world: World, model: Any, spec: pl.LossSpec, optimizer: Any, updates: int, draw: int
) -> StoredTokens:
    """`updates` of the weights, ten for each batch. → the last batch."""
    for update in range(updates):
        if update % UPDATES == 0:
            tokens = world.collect(model, draw + update)
        optimizer.zero_grad()
        loss_of(model, spec, tokens).backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return tokens


def adamw(model: Any) -> torch.optim.AdamW:
    """The optimizer of every run."""
    return torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.0, betas=(0.9, 0.99))


def copied(model: Any, state: Any) -> tuple[Any, torch.optim.AdamW]:
    """The same weights and moments again."""
    twin = copy.deepcopy(model)
    optimizer = adamw(twin)
    optimizer.load_state_dict(copy.deepcopy(state))
    return twin, optimizer


def flat(weights: Sequence[Tensor]) -> Tensor:
    """All weights as one vector."""
    return torch.cat([w.detach().flatten() for w in weights])


def r_squared(real: Tensor, predicted: Tensor) -> float:
    """`1 − Σ(real − predicted)² / Σ(real − mean)²`."""
    return 1 - float(((real - predicted) ** 2).sum() / ((real - real.mean()) ** 2).sum())


def steps_of(model: Any, state: Any, spec: pl.LossSpec, tokens: StoredTokens) -> Iterator[Any]:
    """One step of each kind: predicted and real changes of all sequences, `[S]`, and its name."""
    before = Parameters(model).logp(tokens)

    def real(twin: Any) -> Tensor:
        return tokens.sums(Parameters(twin).logp(tokens) - before)

    twin, optimizer = copied(model, state)
    loss_of(twin, spec, tokens).backward()  # type: ignore[no-untyped-call]
    gradient = torch.cat([p.grad.flatten() for p in twin.parameters()])
    slope = -Parameters(model).along(gradient[None], tokens)[0]
    for size in SIZES:
        lr = size / float(slope.square().mean().sqrt())
        moved = copy.deepcopy(model)
        with torch.no_grad():
            for w, p in zip(moved.parameters(), twin.parameters(), strict=True):
                assert p.grad is not None
                w -= lr * p.grad
        yield f"sgd {size:g}", lr * slope, real(moved)
    start = flat(list(model.parameters()))
    optimizer.step()
    direction = flat(list(twin.parameters())) - start
    predicted = Parameters(model).along(direction[None], tokens)[0]
    scale = SIZES[1] / float(predicted.square().mean().sqrt())
    with torch.no_grad():  # a shorter step the same way
        for w, p in zip(twin.parameters(), model.parameters(), strict=True):
            w.copy_(p + scale * (w - p))
    yield f"adamw {SIZES[1]:g}", scale * predicted, real(twin)


def rank_correlation(a: Sequence[float], b: Sequence[float]) -> float:
    """Spearman's, with mean ranks for equal numbers; 0 for fewer than three."""
    ranks = []
    if len(a) < 3:
        return 0.0
    for values in (a, b):
        x = torch.tensor(values, dtype=torch.float64)
        below = (x[None] < x[:, None]).double().sum(1)
        ranks.append(below + (x[None] == x[:, None]).double().sum(1) / 2)
    return float(torch.corrcoef(torch.stack(ranks))[0, 1])


def different(result: lab.WhatIf) -> list[int]:
    """The losses that have a gradient, each direction once."""
    assert result.by_model is not None
    cosine = result.by_model.cosine
    chosen: list[int] = []
    for i, outcome in enumerate(result.outcomes):
        if outcome.norm > 0 and all(float(cosine[i, j]) < 0.9999 for j in chosen):
            chosen.append(i)
    return chosen


def gains(products: Products, tokens: StoredTokens) -> list[float]:
    """The predicted gain of each loss: `Σ_s A_s·Δ_s`, with A_s the mean advantage of sequence s and
    Δ_s the first-order change of its log-probability for a step of length 1.
    """
    counts = tokens.sums(tokens.inputs.mask.double()).clamp(min=1)
    advantages = tokens.sums(tokens.inputs.advantages) / counts
    out: list[float] = (products.unit_change @ advantages).tolist()
    return out


def study(seed: int, steps: int, warmup: int, say: Any = print) -> Iterator[dict[str, Any]]:
    """Both measurements for one seed; yields the results so far after each loss."""
    world = World.begin(seed, warmup)
    model = world.model
    optimizer = adamw(model)
    base = pl.preset("dapo")
    train(world, model, base, optimizer, BASE_ROUNDS * UPDATES, draw=0)
    world.reference = copy.deepcopy(model)
    tokens = train(world, model, base, optimizer, UPDATES // 2, draw=10_000)
    state = optimizer.state_dict()
    tokens = tokens.replace(
        inputs=tokens.inputs.replace(logp=Parameters(model).logp(tokens)), horizon=LONGEST
    )
    result = lab.what_if(tokens, model=model)
    chosen = different(result)
    losses = [result.outcomes[i] for i in chosen]
    gradients = torch.stack([outcome.gradient for outcome in losses])
    predicted = {
        "parameters": gains(Parameters(model).products(gradients, tokens), tokens),
        "head": gains(HeadWeight(model).products(gradients, tokens), tokens),
        "tokens": [gains(result.by_token, tokens)[i] for i in chosen],
    }
    before = world.reward(model)
    say(
        f"seed {seed}: {int(tokens.inputs.mask.sum())} tokens, {len(losses)} losses of "
        f"{len(result.outcomes)}, held-out reward {before:.3f}"
    )
    rows: list[dict[str, Any]] = []
    for k, outcome in enumerate(losses):
        pairs = list(steps_of(model, state, outcome.spec, tokens))
        twin, moments = copied(model, state)
        train(world, twin, outcome.spec, moments, steps, draw=20_000)
        rows.append(
            {
                "name": outcome.name,
                "r_squared": {name: r_squared(real, guess) for name, guess, real in pairs},
                "predicted": {name: values[k] for name, values in predicted.items()},
                "effective": outcome.effective,
                "lost": outcome.lost,
                "reward": world.reward(twin),
            }
        )
        say(f"  {outcome.name}: {rows[-1]['r_squared']} {rows[-1]['reward']:.3f}")
        real = [row["reward"] for row in rows]
        correlations = {
            kind: rank_correlation(values[: k + 1], real) for kind, values in predicted.items()
        }
        yield {
            "seed": seed,
            "tokens": int(tokens.inputs.mask.sum()),
            "sequences": len(tokens.lengths),
            "reward_before": before,
            "losses": rows,
            "rank_correlation": correlations,
        }


def main(argv: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--steps", type=int, default=50, help="updates of each preset")
    parser.add_argument("--warmup", type=int, default=200, help="supervised steps of the model")
    parser.add_argument("--out", type=Path, help="write the results here")
    args = parser.parse_args(argv)
    studies: list[dict[str, Any]] = []
    for seed in range(args.seeds):
        studies.append({})
        for so_far in study(seed, args.steps, args.warmup):
            studies[-1] = so_far
            if args.out is not None:
                data = {"environment": environment(), "steps": args.steps, "studies": studies}
                write_json(args.out, data)
    names = list(studies[0]["losses"][0]["r_squared"])
    rows = [["seed", *(f"least R², {name}" for name in names), "rank correlations"]]
    for one in studies:
        worst = [min(row["r_squared"][n] for row in one["losses"]) for n in names]
        rows.append([str(one["seed"]), *(f"{x:.4f}" for x in worst), str(one["rank_correlation"])])
    print(table(rows))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
