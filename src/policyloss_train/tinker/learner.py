"""Learning and sampling with a policy on a Tinker server."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

import policyloss as pl
from policyloss.errors import InputError
from policyloss_train.batches import Pack
from policyloss_train.learner import Learner, Rows, Update
from policyloss_train.rollout.protocol import Completion, Engine, Prompt, Sampling, Weights
from policyloss_train.tinker.service import LostServerError, Row, Service
from policyloss_train.watch import nonfinite_tokens

if TYPE_CHECKING:
    from policyloss_train.config import TrainConfig
    from policyloss_train.distributed import Ranks, Say


class OneBatch:
    """The attention of a policy that is elsewhere: all sequences of an update go in one call."""

    name = "server"

    def cut(self, lengths: Sequence[int], tokens: int) -> list[list[int]]:
        """One micro-batch with all sequences."""
        return [list(range(len(lengths)))]


@dataclass
class ServerLearner(Learner):
    """A `Learner` whose policy and reference are policies of a server; the loss is computed here.

    The reference is a policy with untrained adapters. saved: the paths of the checkpoints on the
    server, the last one after `saved_after` updates.
    """

    service: Any = None
    saved: list[str] = field(default_factory=list)
    saved_after: int = -1

    @classmethod
    def connect(
        cls, config: TrainConfig, spec: pl.LossSpec, ranks: Ranks, say: Say, warn: Say
    ) -> ServerLearner:
        """Connect to the server of `config`, and check how it learns."""
        if ranks.world > 1:
            raise InputError(
                f"--engine {config.engine} is one client; start it without torchrun. The server "
                "has as many machines as it was started with."
            )
        service = Service(config)
        if service.measure():
            say(f"connected to {config.engine}, which reduces a loss by its {service.reduction}")
        else:
            warn(
                f"{config.engine} reports no norm of the gradient, so its gradients were not "
                "checked: a server that averages a loss instead of summing it learns wrongly."
            )
        nowhere: Any = None
        # Stands for an optimizer: the run sets its learning rate before each step.
        rate: Any = SimpleNamespace(param_groups=[{"lr": config.lr}])
        return cls(config, spec, ranks, nowhere, rate, warn=warn, service=service)

    @property
    def attention(self) -> Any:
        """The way in which sequences run through the policy."""
        return OneBatch()

    def start_copies(self) -> None:
        """Create the policy, with untrained adapters."""
        self.policy = self.service.create()
        self._start_reference()

    def _start_reference(self) -> None:
        if "ref_logp" in self.spec.reads:
            self.reference = self.service.create()

    def state(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """The path of a new checkpoint on the server, which keeps `--keep` of them."""
        if self.saved_after != self.updates:
            self.saved.append(self.service.save(self.policy, f"update-{self.updates}"))
            self.saved_after = self.updates
        # One more than the run keeps: the newest is not written yet.
        while len(self.saved) > self.config.keep + 1:
            try:
                self.service.delete(self.saved.pop(0))
            except LostServerError as error:
                self.warn(f"a checkpoint stays on the server: {error}")
        numbers = {"updates": self.updates, "skipped_in_a_row": self.skipped_in_a_row}
        return {}, {**numbers, "saved": list(self.saved)}

    def load_state(self, tensors: Mapping[str, Tensor], numbers: Mapping[str, Any]) -> None:
        """Open a session, and create the policy from the checkpoint on the server."""
        saved = numbers["saved"]
        if not saved or not all(isinstance(path, str) for path in saved):
            raise TypeError(f"saved is {saved!r:.80}, not the paths on a server")
        self.service.connect()
        self.policy = self.service.create(saved[-1])
        self._start_reference()
        self.updates, self.skipped_in_a_row = numbers["updates"], numbers["skipped_in_a_row"]
        self.saved, self.saved_after = list(saved), self.updates

    def layout(self) -> dict[str, Any]:
        """Nothing: a checkpoint of this run has no tensors of the policy."""
        return {}

    def logprobs(self, policy: Any, micro: Any) -> Tensor:
        """The log-probabilities of the targets of a micro-batch under a policy, `[N]`."""
        logp = self.service.logprobs(policy, _rows(micro))
        return torch.cat(logp).to(self.ranks.device)

    def _update(self, pack: Pack, mine: list[int], train: bool) -> tuple[Update, Rows, Rows]:
        """One optimizer step on the server. The loss sees all its sequences at once."""
        (part,), (members,) = self._micro_batches(pack, mine)
        current = partial(self.logprobs, self.policy)
        step = pl.accumulate(self.spec, [part.micro_batch()], group=self.ranks.group, logp=current)
        (micro,) = step
        logp = current(micro).requires_grad_()
        of_first: Any = {} if "old_logp" in micro else {"old_logp": "current"}
        loss = micro.loss(logp, **of_first)
        (slope,) = torch.autograd.grad(loss, logp)
        metrics, loss, logp = step.reduce_metrics(), loss.detach(), logp.detach()
        logp_of = dict(zip(members, torch.split(logp, part.lengths), strict=False))
        entropy_of = {i: torch.full_like(x, math.nan) for i, x in logp_of.items()}  # not reported
        norm = math.nan
        good = bool(torch.isfinite(loss) and torch.isfinite(slope).all())
        if good:
            each = [torch.split(x.cpu(), part.lengths) for x in (logp, slope)]
            self.service.backward(self.policy, _rows(micro), *each)
            lr = self.optimizer.param_groups[0]["lr"]
            norm = self.service.step(self.policy, lr, self.config.grad_clip)
            self.skipped_in_a_row = 0
        else:
            self._skip(float(loss), norm, nonfinite_tokens(pack, mine, logp_of))
        return Update(metrics, norm, good), logp_of, entropy_of


def _rows(micro: Mapping[str, Any]) -> list[Row]:
    """The sequences of a micro-batch."""
    ids, targets = (torch.split(micro[name].cpu(), micro["lengths"]) for name in ("ids", "targets"))
    return [Row(*row) for row in zip(ids, targets, strict=True)]


class ServerSampler(Engine):
    """Samples from the weights that the server has just saved. It does not sample while the policy
    learns: a server may load the sampler's weights into the policy.
    """

    concurrent = False

    def __init__(self, learner: ServerLearner) -> None:
        self._learner, self._version = learner, 0
        self._sampler: Any = None

    def update_weights(self, weights: Weights, version: int) -> None:
        """Save the weights on the server, and sample from these."""
        save = self._learner.policy.save_weights_and_get_sampling_client
        self._sampler = self._learner.service.call("save_weights_for_sampler", save)
        self._version = version

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling) -> list[list[Completion]]:
        """The completions of each prompt."""
        service, sampler = self._learner.service, self._sampler
        answers = [sampler.sample(**self._request(prompt, sampling)) for prompt in prompts]
        results = [service.call("sample", answer.result) for answer in answers]
        return [[self._completion(one, sampling) for one in x.sequences] for x in results]

    def _request(self, prompt: Prompt, sampling: Sampling) -> dict[str, Any]:
        tinker = self._learner.service.tinker
        parameters = tinker.SamplingParams(
            max_tokens=sampling.max_new_tokens,
            seed=prompt.seed(sampling) >> 18,  # below 2³⁰: completion i has this seed plus i
            stop=list(sampling.end_ids),
            temperature=sampling.temperature,
        )
        tokens = tinker.ModelInput.from_ints(prompt.ids)
        return {"prompt": tokens, "num_samples": prompt.number, "sampling_params": parameters}

    def _completion(self, one: Any, sampling: Sampling) -> Completion:
        ids = list(one.tokens)
        finished = bool(ids) and ids[-1] in sampling.end_ids
        return Completion(ids, list(one.logprobs or ()), finished, self._version)
