"""One step of learning: from scored completions to updated weights.

Every policy-gradient method has this order: compute log-probabilities of the old policy and the
reference, and values of the critic; turn rewards into advantages; then make several optimizer
steps. The loss of each step is divided by the counts of all its micro-batches on all ranks
(`policyloss.accumulate`), so that neither micro-batches nor ranks change the gradient.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import policyloss as pl
from policyloss.metrics import Metrics
from policyloss_train.advantages import judge
from policyloss_train.attention import Attention
from policyloss_train.batches import Pack, minibatches
from policyloss_train.config import TrainConfig
from policyloss_train.distributed import Ranks, Say, synchronise, unwrap
from policyloss_train.models import load_weights, weights, without_adapter
from policyloss_train.optimizers import load_optimizer_state, optimizer_state
from policyloss_train.policy import Critic, Routing, logprobs, loss_and_numbers
from policyloss_train.run.checkpoint import count_from, subtree
from policyloss_train.watch import NotFiniteError, nonfinite_gradient, nonfinite_tokens

Rows = dict[int, Tensor]  # one number per token, by sequence


class Update(NamedTuple):
    """One optimizer step. norm: the norm of the gradient before clipping. applied: False if
    the step was skipped because a number was not finite.
    """

    metrics: Metrics
    norm: float
    applied: bool


@dataclass
class Learned:
    """The result of a step. metrics, values: the metrics of policy and critic, over all updates
    and ranks. skipped: skipped updates. logp, entropy: `[N]` of `pack`, from the last loss.
    """

    metrics: dict[str, float]
    values: dict[str, float]
    updates: int
    grad_norm: float
    critic_grad_norm: float
    skipped: int
    pack: Pack
    logp: Tensor
    entropy: Tensor


@dataclass
class Learner:
    """The policy and its optional critic, reference and teacher, and their training.

    `updates` counts optimizer steps over the run, `skipped_in_a_row` the skipped steps since the
    last good one; every skipped step calls `warn`. stores_frozen: whether checkpoints hold the
    weights that are never trained, which is unnecessary if loading the model restores them. The
    reference is None for a policy with adapters: the model without adapters is the reference.
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
    warn: Say = warnings.warn

    def start_copies(self) -> None:
        """Copy the current policy into the reference, and its body into the critic."""
        if self.reference is not None:
            self.reference.load_state_dict(self.policy.state_dict())
        if isinstance(self.critic, Critic):
            self.critic.start_from(self.policy.model)

    def state(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Tensors and numbers for a checkpoint; of a sharded module, this rank's part."""
        tensors: dict[str, Any] = {}
        for name, module, optimizer in self._trained_modules():
            tensors[name] = self._stored_weights(module)
            tensors[f"{name}_optimizer"] = optimizer_state(module, optimizer)
        if self.reference is not None:
            tensors["reference"] = weights(self.reference)
        return tensors, {"updates": self.updates, "skipped_in_a_row": self.skipped_in_a_row}

    def load_state(self, tensors: Mapping[str, Tensor], numbers: Mapping[str, Any]) -> None:
        """Load the result of `state`."""
        for name, module, optimizer in self._trained_modules():
            load_weights(self._stored_weights(module), subtree(tensors, name))
            load_optimizer_state(module, optimizer, subtree(tensors, f"{name}_optimizer"))
        if self.reference is not None:
            load_weights(weights(self.reference), subtree(tensors, "reference"))
        self.updates = count_from(numbers, "updates")
        self.skipped_in_a_row = count_from(numbers, "skipped_in_a_row")

    def layout(self) -> dict[str, Any]:
        """The sharding of a checkpoint's tensors; moments are sharded like their parameters."""
        return {
            f"{name}{kind}": self._stored_weights(module)
            for name, module, _ in self._trained_modules()
            for kind in ("", "_optimizer")
        }

    def load_policy(self, tensors: Mapping[str, Tensor]) -> None:
        """Load the weights of a checkpoint into the policy only."""
        load_weights(self._stored_weights(unwrap(self.policy)), subtree(tensors, "policy"))

    def _stored_weights(self, module: nn.Module) -> dict[str, Tensor]:
        """The weights of a module that a checkpoint holds."""
        every = weights(module)
        return {name: x for name, x in every.items() if self.stores_frozen or x.requires_grad}

    def _trained_modules(self) -> list[tuple[str, nn.Module, torch.optim.Optimizer]]:
        """The trained modules, by their names in a checkpoint, without the wrapper of DDP."""
        trained = [("policy", unwrap(self.policy), self.optimizer)]
        if self.critic is not None and self.critic_optimizer is not None:
            trained.append(("critic", unwrap(self.critic), self.critic_optimizer))
        return trained

    def learn(self, pack: Pack, indices: Sequence[int], total: int, step: int) -> Learned:
        """Update the weights with this rank's sequences.

        indices: the index of each sequence among the `total` sequences of all ranks, so that the
        minibatches do not depend on the number of ranks.
        """
        config, pack = self.config, self._add_frozen(pack.to(self.ranks.device))
        place = {index: i for i, index in enumerate(indices)}
        seed = (config.seed * 1_000_003 + step) * 1_009
        shares = [
            [place[index] for index in chosen if index in place]
            for epoch in range(config.epochs)
            for chosen in minibatches(total, config.minibatches, seed + epoch)
        ]
        # The statistics of a loss and the advantages of a teacher read old_logp before the first
        # backward. A loss that compares distributions always takes old_logp.
        early = self.spec.needs_statistics or self.advantages_by_teacher
        fresh = config.old_logp == "recompute" and not early and self.spec.divergence is None
        old_logp = self._old_logp(pack, shares[0] if fresh else ())
        known, group = pack.with_tokens(old_logp=old_logp), self.ranks.statistics
        advantages, returns = judge(config, known, group, by_teacher=self.advantages_by_teacher)
        pack = pack.with_tokens(advantages=advantages)
        if returns is not None:
            pack = pack.with_tokens(returns=returns)
        return self._make_updates(pack, shares, old_logp, fresh, train=step >= config.critic_steps)

    def _make_updates(
        self, pack: Pack, shares: list[list[int]], old_logp: Tensor, fresh: bool, train: bool
    ) -> Learned:
        """Make an update with each of `shares`, lists of sequences. fresh: the first update
        computes the old log-probabilities of its share. train: False leaves the policy unchanged.
        """
        policy_updates: list[Update] = []
        critic_updates: list[Update] = []
        logp = list(torch.split(torch.zeros_like(old_logp), pack.lengths))
        entropy = list(logp)
        for mine in shares:
            first = fresh and not policy_updates
            frozen = pack if first else pack.with_tokens(old_logp=old_logp)
            update, new_logp, new_entropy = self._update(frozen, mine, train)
            policy_updates.append(update)
            _put(logp, new_logp)
            _put(entropy, new_entropy)
            if first:
                old = list(torch.split(old_logp, pack.lengths))
                _put(old, new_logp)
                old_logp = torch.cat(old)
            if self.critic is not None:
                critic_updates.append(self._update_critic(pack, mine))
        skipped = sum(not update.applied for update in (*policy_updates, *critic_updates))
        self.updates += len(policy_updates) - skipped
        routes = {} if self.routing is None else self.routing.busiest(self.ranks)
        (metrics, norm), (values, critic_norm) = _summary(policy_updates), _summary(critic_updates)
        return Learned(
            metrics | routes,
            values,
            len(policy_updates),
            norm,
            critic_norm,
            skipped,
            pack.with_tokens(old_logp=old_logp),
            torch.cat(logp),
            torch.cat(entropy),
        )

    @torch.no_grad()
    def _add_frozen(self, pack: Pack) -> Pack:
        """The pack with the numbers of reference, teacher and critic, before any update."""
        if "ref_logp" in self.spec.reads:
            policy: Any = unwrap(self.policy)
            with nullcontext() if self.reference is not None else without_adapter(policy.model):
                reference = self.reference or self.policy
                ref_logp = self._of_pack(pack, partial(self.logprobs, reference))
            pack = pack.with_tokens(ref_logp=ref_logp)
        if self.teacher is not None:
            teacher_logp = self._of_pack(pack, partial(self.logprobs, self.teacher))
            pack = pack.with_tokens(teacher_logp=teacher_logp)
        if self.critic is not None:
            pack = pack.with_tokens(old_values=self._of_pack(pack, self.critic))
        return pack

    @property
    def advantages_by_teacher(self) -> bool:
        """Whether there is a teacher and the advantages, not the loss, read it."""
        taught = any(getattr(part, "teaches", False) for part in self.spec.kl_parts)
        return self.teacher is not None and not taught

    @torch.no_grad()
    def _old_logp(self, pack: Pack, first: Sequence[int]) -> Tensor:
        """The log-probabilities of the policy before its first update, or of the sampler, `[N]`.

        first: the sequences of the first update. They need no extra forward, because the policy
        of that update is the old policy; until then, their entries are 0.
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
        """`of_micro` of every micro-batch, `[N]`. All ranks run equally many forwards, because the
        forward of a sharded module is a collective.
        """
        parts = self.attention.cut(pack.lengths, self.config.micro_tokens)
        most = max(self.ranks.gather(len(parts)))
        rows: dict[int, Tensor] = {}
        for part in [*parts, *[parts[-1]] * (most - len(parts))]:
            share = pack.select(part)
            values = of_micro(share.micro_batch()).float()
            rows |= dict(zip(part, torch.split(values, share.lengths), strict=True))
        return torch.cat([rows[i] for i in range(len(pack.lengths))])

    def logprobs(self, policy: nn.Module, micro: Any) -> Tensor:
        """The log-probabilities of the targets of a micro-batch under a policy, `[N]`."""
        return logprobs(policy, micro, self.config.temperature)

    def _micro_batches(self, pack: Pack, mine: list[int]) -> tuple[list[Pack], list[list[int]]]:
        """The sequences `mine` of this rank as packs, and the indices of the sequences in each
        pack; a rank without sequences gets an empty pack.
        """
        if not mine:
            empty = pack.select([0])
            return [empty.with_tokens(mask=torch.zeros_like(empty.tokens["mask"]))], [[]]
        lengths = [pack.lengths[i] for i in mine]
        parts = self.attention.cut(lengths, self.config.micro_tokens)
        members = [[mine[i] for i in part] for part in parts]
        return [pack.select(chosen) for chosen in members], members

    @property
    def attention(self) -> Attention:
        """The way in which sequences run through the policy."""
        policy: Any = unwrap(self.policy)
        attention: Attention = policy.attention
        return attention

    def _update(self, pack: Pack, mine: list[int], train: bool) -> tuple[Update, Rows, Rows]:
        """One optimizer step of the policy, and the log-probabilities and entropies by sequence."""
        packs, members = self._micro_batches(pack, mine)
        current = partial(self.logprobs, self.policy)
        batches = [p.micro_batch() for p in packs]
        step = pl.accumulate(self.spec, batches, group=self.ranks.group, logp=current)
        logp_of: Rows = {}
        entropy_of: Rows = {}
        # A rank with fewer micro-batches than another rank runs empty micro-batches
        # and drops their results.
        for micro, part, chosen in zip_longest(step, packs, members):
            with synchronise(self.policy, micro.is_last):
                loss, *x = loss_and_numbers(self.policy, micro, step, self.config, self.teacher)
                loss.backward()  # type: ignore[no-untyped-call]
            if chosen:
                logp, entropy = (torch.split(numbers, part.lengths) for numbers in x)
                logp_of |= dict(zip(chosen, logp, strict=True))
                entropy_of |= dict(zip(chosen, entropy, strict=True))
        nonfinite = partial(nonfinite_tokens, pack, mine, logp_of)
        metrics = step.reduce_metrics()
        update = self._step_optimizer(self.policy, self.optimizer, metrics, nonfinite, train)
        return update, logp_of, entropy_of

    def _update_critic(self, pack: Pack, mine: list[int]) -> Update:
        """One optimizer step of the critic, on the same sequences."""
        assert self.critic is not None
        assert self.critic_optimizer is not None
        packs, _ = self._micro_batches(pack, mine)
        step = pl.accumulate(_COUNTING, [p.micro_batch() for p in packs], group=self.ranks.group)
        metrics = Metrics()
        for micro in step:
            with synchronise(self.critic, micro.is_last):
                out = pl.value_loss(
                    self.critic(micro).float(),
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
        nonfinite = partial(nonfinite_tokens, pack, mine, {})
        return self._step_optimizer(self.critic, self.critic_optimizer, metrics, nonfinite)

    def _step_optimizer(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        metrics: Metrics,
        tokens: Callable[[], str],
        train: bool = True,
    ) -> Update:
        """Clip, step, clear the gradients. If loss or norm is not finite, the step is skipped
        on all ranks alike, because all ranks have the same loss and norm. tokens: returns a
        description of the tokens that are not finite. train: False skips the step, too.
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
        return Update(metrics, norm, good)

    def _skip(self, loss: float, norm: float, why: str) -> None:
        """Warn of the numbers that are not finite, by rank; raise after too many such updates."""
        self.skipped_in_a_row += 1
        text = f"an update was skipped: its loss is {loss:.4g} and its gradient norm {norm:.4g}"
        for rank, share in enumerate(self.ranks.gather(why)):
            if share:
                text += f"; rank {rank}: {share}" if self.ranks.world > 1 else f"; {share}"
        self.warn(f"{text}.")
        if self.skipped_in_a_row >= self.config.nonfinite_limit:
            limit = f"{self.skipped_in_a_row} updates in a row were not finite (--nonfinite-limit)"
            raise NotFiniteError(f"{limit}; of the last, {text}.")


_COUNTING = pl.preset("ppo")  # a value loss needs only the step's counts, equal for every spec


def _put(rows: list[Tensor], values: Mapping[int, Tensor]) -> None:
    """Replace some of the rows."""
    for i, x in values.items():
        rows[i] = x.to(rows[i].dtype)


def _summary(updates: Sequence[Update]) -> tuple[dict[str, float], float]:
    """The metrics of several updates together, and their norm; the loss and the norm are means."""
    n, norm = max(len(updates), 1), sum(update.norm for update in updates)
    metrics = sum((update.metrics for update in updates), Metrics()).compute()
    return {name: x / n if name == "loss" else x for name, x in metrics.items()}, norm / n
