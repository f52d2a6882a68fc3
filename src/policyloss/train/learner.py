"""One step of learning: from scored completions to updated weights.

The order of things, which every policy-gradient method of the field shares: freeze what the old
policy, the reference and the critic say of the completions; turn rewards into advantages; then take
several optimizer steps on them, each divided by its own global counts (`policyloss.accumulate`), so
that neither micro-batches nor ranks change the gradient.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn

import policyloss as pl
from policyloss.metrics import Metrics
from policyloss.train.adapter import without_adapter
from policyloss.train.advantages import Judged, judge
from policyloss.train.attention import Attention
from policyloss.train.batches import Pack, minibatches
from policyloss.train.config import TrainConfig
from policyloss.train.distributed import Ranks, synchronised, unwrapped
from policyloss.train.finite import NotFiniteError, nonfinite_gradient, nonfinite_tokens
from policyloss.train.models import Critic, load_weights, logit_form, parts, weights
from policyloss.train.routing import Routing
from policyloss.train.run.checkpoint import count_from, subtree
from policyloss.train.run.optimizer_state import load_optimizer_state, optimizer_state

Head = Callable[[Tensor, Tensor, Tensor | None, float | None], Any]


class Policy(nn.Module):
    """A causal language model as the loss sees it. One forward, so that DDP and FSDP can wrap it.

    attention: how sequences go through it.
    """

    def __init__(self, model: Any, attention: Attention) -> None:
        super().__init__()
        self.model, self.attention = model, attention

    def forward(self, micro: Any, head: Head) -> Any:
        """`head(hidden, weight, bias, softcap)` of the tokens of a micro-batch; hidden: `[N, H]`.

        The head is called in here because a sharded weight is whole inside a forward only.
        """
        body, weight, bias = parts(self.model)
        scale, softcap = logit_form(self.model)
        hidden = self.attention.hidden(body, micro)
        return head(hidden if scale == 1 else hidden * scale, weight, bias, softcap)


@dataclass
class Learned:
    """What a step did. metrics: of the policy, summed over its updates and merged over ranks;
    values: of the critic.

    skipped: updates of policy or critic that were not made, because a number was not finite. logp:
    `[N]` of this rank's pack, as the loss last saw them.
    """

    metrics: dict[str, float]
    values: dict[str, float]
    updates: int
    grad_norm: float
    critic_grad_norm: float
    skipped: int
    pack: Pack
    logp: Tensor


@dataclass
class Learner:
    """The policy, its critic, reference and teacher (if there are), and how they learn.

    `updates` counts optimizer steps over the run, `skipped_in_a_row` those that were skipped since
    the last good one. `warn` is told of each. stores_frozen: whether weights that are never trained
    are written to checkpoints; they need not be where loading the model gives them again. The
    reference is None for a policy with adapters, which is its own without them.
    """

    config: TrainConfig
    spec: pl.LossSpec
    ranks: Ranks
    policy: nn.Module
    optimizer: torch.optim.Optimizer
    reference: nn.Module | None = None
    critic: nn.Module | None = None
    critic_optimizer: torch.optim.Optimizer | None = None
    teacher: nn.Module | None = None
    updates: int = field(default=0)
    skipped_in_a_row: int = 0
    stores_frozen: bool = True
    routing: Routing | None = None
    warn: Callable[[str], None] = warnings.warn

    def start_copies(self) -> None:
        """Let the reference be the policy as it is now, and the critic read tokens as it does."""
        if self.reference is not None:
            self.reference.load_state_dict(self.policy.state_dict())
        if isinstance(self.critic, Critic):
            self.critic.start_from(self.policy.model)

    def state(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Tensors and numbers for a checkpoint. Of a sharded module, this rank's part."""
        tensors: dict[str, Any] = {}
        numbers: dict[str, Any] = {
            "updates": self.updates,
            "skipped_in_a_row": self.skipped_in_a_row,
        }
        for name, module, optimizer in self._trained():
            moments, numbers[f"{name}_optimizer"] = optimizer_state(module, optimizer)
            tensors |= {name: self._stored(module), f"{name}_optimizer": moments}
        if self.reference is not None:
            tensors["reference"] = weights(self.reference)
        return tensors, numbers

    def load_state(self, tensors: Mapping[str, Tensor], numbers: Mapping[str, Any]) -> None:
        """Continue where `state` was taken."""
        for name, module, optimizer in self._trained():
            load_weights(self._stored(module), subtree(tensors, name))
            moments = subtree(tensors, f"{name}_optimizer")
            load_optimizer_state(module, optimizer, moments, numbers[f"{name}_optimizer"])
        if self.reference is not None:
            load_weights(weights(self.reference), subtree(tensors, "reference"))
        self.updates = count_from(numbers, "updates")
        self.skipped_in_a_row = count_from(numbers, "skipped_in_a_row")

    def layout(self) -> dict[str, Any]:
        """How tensors of a checkpoint lie on the ranks: the moments of an optimizer as their
        parameters do.
        """
        return {
            f"{name}{kind}": self._stored(module)
            for name, module, _ in self._trained()
            for kind in ("", "_optimizer")
        }

    def load_policy(self, tensors: Mapping[str, Tensor]) -> None:
        """Give the policy alone the weights of a checkpoint."""
        load_weights(self._stored(unwrapped(self.policy)), subtree(tensors, "policy"))

    def _stored(self, module: nn.Module) -> dict[str, Tensor]:
        """The weights of a module that a checkpoint holds."""
        return {
            name: x for name, x in weights(module).items() if self.stores_frozen or x.requires_grad
        }

    def _trained(self) -> list[tuple[str, nn.Module, torch.optim.Optimizer]]:
        """What learns, by its name in a checkpoint, without the wrapper of DDP: other numbers of
        ranks have none.
        """
        trained = [("policy", unwrapped(self.policy), self.optimizer)]
        if self.critic is not None and self.critic_optimizer is not None:
            trained.append(("critic", unwrapped(self.critic), self.critic_optimizer))
        return trained

    def learn(
        self,
        pack: Pack,
        indices: Sequence[int],
        total: int,
        step: int,
        greedy: Tensor | None = None,
    ) -> Learned:
        """Update the weights with this rank's sequences.

        indices: which of the `total` sequences of all ranks they are, so that every cut into ranks
        makes the same minibatches.
        """
        pack = self._frozen(pack.to(self.ranks.device))
        place = {index: i for i, index in enumerate(indices)}
        shares = [
            [place[index] for index in chosen if index in place]
            for epoch in range(self.config.epochs)
            for chosen in minibatches(
                total, self.config.minibatches, seed=_mixed(self.config.seed, step, epoch)
            )
        ]
        # A loss that is measured before its first backward reads the old ones there already; so do
        # the advantages of a teacher. With a teacher's distributions there is one way to the loss.
        early = self.spec.needs_statistics or self.advantages_by_teacher
        fresh = self.config.old_logp == "recompute" and not early and self.spec.divergence is None
        old_logp = self._old_logp(pack, shares[0] if fresh else ())
        judged = self._judged(pack.with_tokens(old_logp=old_logp), greedy)
        pack = pack.with_tokens(advantages=judged.advantages)
        if judged.returns is not None:
            pack = pack.with_tokens(returns=judged.returns)
        metrics, values = Metrics(), Metrics()
        norms: list[float] = []
        critic_norms: list[float] = []
        logp = list(torch.split(torch.zeros_like(old_logp), pack.lengths))
        updates = skipped = 0
        for mine in shares:
            first = fresh and not updates
            frozen = pack if first else pack.with_tokens(old_logp=old_logp)
            update_metrics, norm, new_logp, good = self._update(
                frozen, mine, train=step >= self.config.critic_steps
            )
            skipped += not good
            metrics, norms = metrics + update_metrics, [*norms, norm]
            _put(logp, new_logp)
            if first:
                old = list(torch.split(old_logp, pack.lengths))
                _put(old, new_logp)
                old_logp = torch.cat(old)
            if self.critic is not None:
                value_metrics, critic_norm, good = self._update_critic(pack, mine)
                skipped += not good
                values, critic_norms = values + value_metrics, [*critic_norms, critic_norm]
            updates += 1
        pack = pack.with_tokens(old_logp=old_logp)
        self.updates += updates - skipped
        routes = {} if self.routing is None else self.routing.busiest(self.ranks)
        return Learned(
            self._computed(metrics, updates) | routes,
            self._computed(values, updates),
            updates,
            _mean(norms),
            _mean(critic_norms),
            skipped,
            pack,
            torch.cat(logp),
        )

    @torch.no_grad()
    def _frozen(self, pack: Pack) -> Pack:
        """The pack with what the reference and the critic say of it, before anything is updated."""
        if "ref_logp" in self.spec.reads:
            policy: Any = unwrapped(self.policy)
            with nullcontext() if self.reference is not None else without_adapter(policy.model):
                reference = self.reference or self.policy
                ref_logp = self._of_pack(pack, partial(self.logprobs, reference))
            pack = pack.with_tokens(ref_logp=ref_logp)
        if self.teacher is not None:
            teacher_logp = self._of_pack(pack, partial(self.logprobs, self.teacher))
            pack = pack.with_tokens(teacher_logp=teacher_logp)
        if self.critic is not None:
            pack = pack.with_tokens(old_values=self._of_pack(pack, self._values))
        return pack

    @property
    def advantages_by_teacher(self) -> bool:
        """Whether the teacher speaks through the advantages: it does where the loss reads none."""
        taught = any(getattr(part, "teaches", False) for part in self.spec.pulls)
        return self.teacher is not None and not taught

    @torch.no_grad()
    def _teacher_of(self, micro: Any) -> pl.Teacher | None:
        """The teacher's hidden states at a micro-batch, and its head; None if the loss reads none.

        They are made for each micro-batch anew, so that no more of them are held.
        """
        if self.teacher is None or self.spec.divergence is None:
            return None

        def head(
            hidden: Tensor, weight: Tensor, bias: Tensor | None, softcap: float | None
        ) -> pl.Teacher:
            return pl.Teacher(hidden, weight, bias, self.config.temperature, softcap)

        teacher: pl.Teacher = self.teacher(micro, head)
        return teacher

    @torch.no_grad()
    def _old_logp(self, pack: Pack, first: Sequence[int]) -> Tensor:
        """The log-probabilities of the policy before its first update, or of the sampler, `[N]`.

        first: the sequences of the first update, which need no forward of their own: the policy
        that they are trained with is the old one. They are 0 until it is made.
        """
        if self.config.old_logp == "rollout":
            return pack.tokens["rollout_logp"]
        later = sorted(set(range(len(pack.lengths))) - set(first))
        old_logp = list(torch.split(torch.zeros_like(pack.tokens["rollout_logp"]), pack.lengths))
        share = pack.select(later) if later else Pack.nothing().to(self.ranks.device)
        if any(self.ranks.gather(bool(later))):
            values = self._of_pack(share, partial(self.logprobs, self.policy))
            if later:
                _put(old_logp, dict(zip(later, torch.split(values, share.lengths), strict=True)))
        return torch.cat(old_logp)

    def _of_pack(self, pack: Pack, of_micro: Callable[[Any], Tensor]) -> Tensor:
        """`of_micro` of every micro-batch, `[N]`. Ranks run equally often, because the forward of a
        sharded module is a collective.
        """
        parts = self._cut(pack.lengths)
        most = max(self.ranks.gather(len(parts)))
        rows: dict[int, Tensor] = {}
        for part in [*parts, *[parts[-1]] * (most - len(parts))]:
            share = pack.select(part)
            values = of_micro(share.micro_batch()).float()
            rows |= dict(zip(part, torch.split(values, share.lengths), strict=True))
        return torch.cat([rows[i] for i in range(len(pack.lengths))])

    def logprobs(self, policy: nn.Module, micro: Any) -> Tensor:
        """The log-probabilities that a policy gives to the targets of a micro-batch, `[N]`."""
        logp: Tensor = policy(micro, partial(self._logprobs_head, micro)).logp
        return logp

    def _logprobs_head(
        self, micro: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, softcap: float | None
    ) -> Any:
        return pl.linear_logprobs(
            hidden,
            weight,
            micro["targets"],
            bias,
            self.config.temperature,
            entropy=True,
            mask=micro["mask"],
            softcap=softcap,
            support=micro["support"],
        )

    def _loss_head(
        self,
        micro: Any,
        step: pl.Accumulation,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        softcap: float | None,
    ) -> tuple[Tensor, Tensor]:
        """The loss of a micro-batch of `step`, and its log-probabilities; its metrics are merged
        into the step's.

        Without `old_logp`, the policy is the old one.
        """
        targets, temperature, support = (
            micro["targets"],
            self.config.temperature,
            micro["support"],
        )
        more: dict[str, Any] = {} if "old_logp" in micro else {"old_logp": "current"}
        teacher = self._teacher_of(micro)
        if self.config.head == "fused":
            options = {**micro.arguments(), **more, "softcap": softcap, "temperature": temperature}
            options |= {"teacher": teacher, "support": support}
            out = pl.linear_policy_loss(step.spec, hidden, weight, targets, bias=bias, **options)
            step.add(out.metrics)
            return out.loss, out.logp
        logits, mask = nn.functional.linear(hidden, weight, bias), micro["mask"]
        now = pl.logprobs(
            logits, targets, temperature, entropy=True, mask=mask, softcap=softcap, support=support
        )
        if self.spec.divergence is not None and teacher is not None:
            more["divergence"] = pl.linear_divergence(
                hidden,
                weight,
                teacher,
                **self.spec.divergence.measure._asdict(),
                temperature=temperature,
                mask=mask,
                bias=bias,
                softcap=softcap,
            )
        return micro.loss(now.logp, entropy=now.entropy, **more), now.logp.detach()

    def _values(self, micro: Any) -> Tensor:
        assert self.critic is not None
        values: Tensor = self.critic(micro).float()
        return values

    def _judged(self, pack: Pack, greedy: Tensor | None) -> Judged:
        # A rank without completions has one that nothing is learned from.
        if self.config.estimator == "remax":
            greedy = torch.zeros(1) if greedy is None or not greedy.numel() else greedy
        greedy = None if greedy is None else greedy.to(self.ranks.device)
        values = pack.tokens.get("old_values")
        return judge(
            self.config,
            pack,
            values=values,
            greedy=greedy,
            group=self.ranks.statistics,
            by_teacher=self.advantages_by_teacher,
        )

    def _micro_batches(self, pack: Pack, mine: list[int]) -> tuple[list[Pack], list[list[int]]]:
        """The chosen sequences of this rank as packs, and which ones each holds; a rank that has
        none gets an empty one.
        """
        if not mine:
            empty = pack.select([0])
            return [empty.with_tokens(mask=torch.zeros_like(empty.tokens["mask"]))], [[]]
        parts = self._cut([pack.lengths[i] for i in mine])
        members = [[mine[i] for i in part] for part in parts]
        return [pack.select(chosen) for chosen in members], members

    def _cut(self, lengths: list[int]) -> list[list[int]]:
        """Which sequences go through the policy together."""
        return self.attention.cut(lengths, self.config.micro_tokens)

    @property
    def attention(self) -> Attention:
        """How sequences go through the policy."""
        policy: Any = unwrapped(self.policy)
        attention: Attention = policy.attention
        return attention

    def _update(
        self, pack: Pack, mine: list[int], train: bool
    ) -> tuple[Metrics, float, dict[int, Tensor], bool]:
        """One optimizer step of the policy, and what it saw: the log-probabilities of each
        sequence. → also whether it was made.
        """
        packs, members = self._micro_batches(pack, mine)
        current = partial(self.logprobs, self.policy)
        step = pl.accumulate(
            self.spec, [p.micro_batch() for p in packs], group=self.ranks.group, logp=current
        )
        logp_of: dict[int, Tensor] = {}
        # A rank with fewer micro-batches than another gets empty ones,
        # of which nothing is remembered.
        for micro, part, chosen in zip_longest(step, packs, members):
            with synchronised(self.policy, micro.is_last):
                loss, logp = self.policy(micro, partial(self._loss_head, micro, step))
                loss.backward()
            if chosen:
                logp_of |= dict(zip(chosen, torch.split(logp, part.lengths), strict=True))
        metrics = step.reduce_metrics()
        norm, good = self._stepped(
            self.policy,
            self.optimizer,
            metrics,
            lambda: nonfinite_tokens(pack, mine, logp_of),
            train,
        )
        return metrics, norm, logp_of, good

    def _update_critic(self, pack: Pack, mine: list[int]) -> tuple[Metrics, float, bool]:
        """One optimizer step of the critic, on the same sequences."""
        assert self.critic is not None
        assert self.critic_optimizer is not None
        packs, _ = self._micro_batches(pack, mine)
        step = pl.accumulate(_COUNTING, [p.micro_batch() for p in packs], group=self.ranks.group)
        metrics = Metrics()
        for micro in step:
            with synchronised(self.critic, micro.is_last):
                out = pl.value_loss(
                    self._values(micro),
                    micro["returns"],
                    micro["old_values"],
                    micro["mask"],
                    clip=self.config.value_clip or None,
                    cu_seqlens=micro["cu_seqlens"],
                    totals=step.counts,
                )
                out.loss.backward()  # type: ignore[no-untyped-call]
            metrics = metrics + out.metrics
        metrics = metrics if self.ranks.group is None else metrics.all_reduce(self.ranks.group)
        norm, good = self._stepped(
            self.critic, self.critic_optimizer, metrics, lambda: nonfinite_tokens(pack, mine, {})
        )
        return metrics, norm, good

    def _stepped(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        metrics: Metrics,
        tokens: Callable[[], str],
        train: bool = True,
    ) -> tuple[float, bool]:
        """Clip, step, forget the gradients. → the gradient's norm before it was clipped, and
        whether the step was made.

        It is not where loss or norm is not finite: on no rank, because both are the same on all.
        tokens: which ones were to blame.
        """
        parameters = [p for p in module.parameters() if p.grad is not None]
        total = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        norm = float(total.full_tensor() if hasattr(total, "full_tensor") else total)
        loss = float(metrics["loss"])
        good = math.isfinite(norm) and math.isfinite(loss)
        if not good:
            self._skip(loss, norm, tokens() or nonfinite_gradient(module))
        elif train:
            nn.utils.clip_grads_with_norm_(parameters, self.config.grad_clip or math.inf, total)
            optimizer.step()
            self.skipped_in_a_row = 0
        optimizer.zero_grad(set_to_none=True)
        return norm, good

    def _skip(self, loss: float, norm: float, why: str) -> None:
        """Say what was not finite, on which rank, and end the run if it was so too often."""
        self.skipped_in_a_row += 1
        shares = self.ranks.gather(why)
        several = self.ranks.world > 1
        reasons = "; ".join(
            f"rank {rank}: {share}" if several else share
            for rank, share in enumerate(shares)
            if share
        )
        text = f"an update was skipped: its loss is {loss:.4g} and its gradient norm {norm:.4g}" + (
            f"; {reasons}" if reasons else ""
        )
        self.warn(f"{text}.")
        if self.skipped_in_a_row >= self.config.nonfinite_limit:
            raise NotFiniteError(
                f"{self.skipped_in_a_row} updates in a row were not finite (--nonfinite-limit); of "
                f"the last, {text}."
            )

    @staticmethod
    def _computed(metrics: Metrics, updates: int) -> dict[str, float]:
        """As floats; the loss is the mean over the updates."""
        return {name: x / updates if name == "loss" else x for name, x in metrics.compute().items()}


_COUNTING = pl.preset("ppo")  # a value loss needs the counts of the step, which no spec changes


def _put(rows: list[Tensor], values: Mapping[int, Tensor]) -> None:
    """Replace some of the rows."""
    for i, x in values.items():
        rows[i] = x.to(rows[i].dtype)


def _mean(numbers: list[float]) -> float:
    return sum(numbers) / len(numbers) if numbers else 0.0


def _mixed(seed: int, step: int, epoch: int) -> int:
    """One seed of three numbers."""
    return (seed * 1_000_003 + step) * 1_009 + epoch


def rate(config: TrainConfig, step: int) -> float:
    """The share of the learning rate at a step: a rise over `lr_warmup` steps,
    then the schedule.
    """
    if step < config.lr_warmup:
        return (step + 1) / config.lr_warmup
    done = (step - config.lr_warmup) / max(config.steps - config.lr_warmup, 1)
    return {"constant": 1.0, "linear": 1 - done, "cosine": 0.5 * (1 + math.cos(math.pi * done))}[
        config.schedule
    ]
