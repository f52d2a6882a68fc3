"""A Tinker server: calls with a time limit, its gradients, and options that it cannot honour."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import TimeoutError as LateError  # the built-in one, from Python 3.11 on
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from policyloss.commands import flag
from policyloss.errors import InputError, visible
from policyloss_train.models import TINY
from policyloss_train.rollout.protocol import RolloutError
from policyloss_train.time_limit import start_thread

if TYPE_CHECKING:
    from policyloss_train.config import TrainConfig

PREFIX = "tinker:"
INSTALL = "pip install 'policyloss-train[tinker]'"
T = TypeVar("T")


class LostServerError(RolloutError):
    """A server did not answer, refused a call, or no longer holds the policy."""


class Row(NamedTuple):
    """One sequence: the tokens that the model reads, and the tokens that it predicts, `[T]`."""

    ids: Tensor
    targets: Tensor


def sdk() -> Any:
    """The package tinker."""
    try:
        import tinker
    except ImportError as error:
        raise InputError(f"--engine tinker:URL needs the package tinker: {INSTALL}.") from error
    return tinker


class Service:
    """A connection to a server.

    reduction: how the server reduces a loss, which decides how the gradient with respect to the
    log-probabilities is sent. "sum": the gradient is sent as the weights of cross_entropy, which
    the API defines as a sum over tokens. "mean": SkyRL's JAX backend divides the cross entropy of a
    sequence by the sum of its weights, which is meaningless for weights of mixed signs, and
    averages the sequences. There the gradient is sent as the advantages of importance_sampling at
    ratio 1, whose weights are all 1, so the divisor is known and can be multiplied back.
    """

    def __init__(self, config: TrainConfig) -> None:
        self._config, self._url = config, config.engine.removeprefix(PREFIX)
        self.tinker, self.reduction = sdk(), "sum"
        self.connect()

    def connect(self) -> None:
        """Open a new session; raise if the server does not serve the model."""
        # A server of your own takes any key, but the package demands one.
        key = os.environ.get("TINKER_API_KEY", "tml-none")
        self._client = self.call(
            "a new session", lambda: self.tinker.ServiceClient(base_url=self._url, api_key=key)
        )
        answer = self.call("get_server_capabilities", self._client.get_server_capabilities)
        served = [model.model_name for model in answer.supported_models]
        if self._config.model not in served:
            raise InputError(
                f"the Tinker server {self._url} serves {', '.join(map(str, served))}, not --model "
                f"{self._config.model}; name one of these."
            )

    def call(self, request: str, function: Callable[[], T]) -> T:
        """The result of a blocking call. Some calls of the package wait without a limit, so they
        run in a thread that is left behind if the time is up.
        """
        seconds = self._config.rollout_timeout
        try:
            return start_thread(function).result(seconds)
        except (LateError, TimeoutError) as error:
            late = f"did not answer {request} in {seconds:g} s (--rollout-timeout)"
            raise LostServerError(f"the Tinker server {self._url} {late}.") from error
        except Exception as error:  # the package raises its own errors, and httpx's
            text = visible(f"{type(error).__name__}: {error}")[:500]
            failed = f"the Tinker server {self._url} failed at {request}"
            raise LostServerError(f"{failed}: {text}.") from error

    def create(self, path: str | None = None) -> Any:
        """A policy: the model with new adapters, or one of `save`, with its optimizer."""
        client, config = self._client, self._config
        if path is not None:
            load = client.create_training_client_from_state_with_optimizer
            return self.call(f"load_state of {path}", lambda: load(path))
        return self.call(
            "create_lora_training_client",
            lambda: client.create_lora_training_client(
                config.model, rank=config.lora_rank, seed=config.seed, train_unembed=False
            ),
        )

    def save(self, policy: Any, name: str) -> str:
        """Store weights and optimizer on the server; returns the path of the checkpoint there."""
        answer: Any = self.call("save_state", lambda: policy.save_state(name).result())
        return str(answer.path)

    def delete(self, path: str) -> None:
        """Delete a checkpoint on the server."""
        rest = self._client.create_rest_client()
        delete = rest.delete_checkpoint_from_tinker_path
        self.call(f"the deletion of {path}", lambda: delete(path).result())

    def logprobs(self, policy: Any, rows: Sequence[Row]) -> list[Tensor]:
        """The log-probabilities of the targets of each row, `[T]`."""
        data = [self._datum(row, weights=torch.zeros(len(row.ids))) for row in rows]
        out: Any = self.call("forward", lambda: policy.forward(data, "cross_entropy").result())
        logp = [torch.tensor(one["logprobs"].data).float() for one in out.loss_fn_outputs]
        if [len(x) for x in logp] != [len(row.ids) for row in rows]:
            raise LostServerError(
                f"the Tinker server {self._url} returned {[len(x) for x in logp]!s:.80} "
                f"log-probabilities for {[len(row.ids) for row in rows]!s:.80} tokens."
            )
        return logp

    def backward(
        self, policy: Any, rows: Sequence[Row], logp: Sequence[Tensor], slopes: Sequence[Tensor]
    ) -> None:
        """Add the gradient of a loss with the derivatives `slopes` by `logp`, for a whole step."""
        if self.reduction == "sum":
            name = "cross_entropy"
            data = [self._datum(r, weights=-x) for r, x in zip(rows, slopes, strict=True)]
        else:
            name = "importance_sampling"
            data = [
                self._datum(row, logprobs=now, advantages=-x * len(x) * len(rows))
                for row, now, x in zip(rows, logp, slopes, strict=True)
            ]
        self.call("forward_backward", lambda: policy.forward_backward(data, name).result())

    def step(self, policy: Any, lr: float, clip: float) -> float:
        """One step of AdamW; returns the norm of the gradient, NaN if the server reports none."""
        config = self._config
        adam = self.tinker.AdamParams(
            learning_rate=lr,
            beta1=config.betas[0],
            beta2=config.betas[1],
            eps=1e-8,
            weight_decay=config.weight_decay,
            grad_clip_norm=clip,
        )
        answer: Any = self.call("optim_step", lambda: policy.optim_step(adam).result())
        norms = [x for name, x in (answer.metrics or {}).items() if "grad" in name]
        return float(norms[0]) if norms else math.nan

    def measure(self) -> bool:
        """Find out how the server reduces a loss, and whether it clips gradients, on a policy that
        is thrown away. Raise if its gradients would be wrong, or would not be clipped. False if the
        server reports no norm of the gradient, so that the API's sum is assumed.
        """
        policy, config = self.create(), self._config
        if config.grad_clip:  # the first step, because moments of others would move the weights
            before = self._probe(policy, [(4, 2.0)])
            self.step(policy, lr=1e-2, clip=1e-20)
            if not torch.equal(before, self.logprobs(policy, [_row(4)])[0]):
                raise InputError(
                    f"the Tinker server {self._url} does not clip gradients, so it cannot honour "
                    f"--grad-clip {config.grad_clip:g}; add --grad-clip 0."
                )
        for self.reduction in ("sum", "mean"):
            # In all, 1 + 3 = 4 times the gradient of the short row against 2 times.
            several = self._norm(policy, [(4, 1.0), (8, 3.0)])
            single = self._norm(policy, [(4, 2.0)])
            if math.isnan(single) or abs(several - 2 * single) <= 0.05 * single:
                return not math.isnan(single)
        raise InputError(
            f"the gradients of the Tinker server {self._url} are not proportional to the gradients "
            f"that it is given (norms {several:.4g} and {single:.4g} where the first must be twice "
            "the second), so no loss can be learned with it."
        )

    def _norm(self, policy: Any, parts: Sequence[tuple[int, float]]) -> float:
        """The norm of the gradient of `_probe`."""
        self._probe(policy, parts)
        return self.step(policy, lr=0.0, clip=0.0)

    def _probe(self, policy: Any, parts: Sequence[tuple[int, float]]) -> Tensor:
        """Send a row for each (length, factor) of `parts`, and add the gradient of
        −factor · Σ logp of its first four tokens. Returns the log-probabilities of the first row.
        """
        rows = [_row(length) for length, _ in parts]
        logp = self.logprobs(policy, rows)
        slopes = [-factor * (torch.arange(length) < 4).float() for length, factor in parts]
        self.backward(policy, rows, logp, slopes)
        return logp[0]

    def _datum(self, row: Row, **inputs: Tensor) -> Any:
        tokens = self.tinker.ModelInput.from_ints(row.ids.tolist())
        tensors = {"target_tokens": row.targets, **inputs}
        return self.tinker.Datum(model_input=tokens, loss_fn_inputs=tensors)


def _row(length: int) -> Row:
    """A sequence of small token ids, which every vocabulary has."""
    ids = torch.arange(length + 1) % 7
    return Row(ids[:-1], ids[1:])


_THERE = "the server's side decides that"
_REFUSED = {
    "rollout": "the server that learns also samples",
    "temperature": "the server computes log-probabilities at temperature 1",
    "top_p": "the server does not report the tokens that it kept",
    "top_k": "the server does not report the tokens that it kept",
    "teacher": "the server holds one model",
    "critic_steps": "the server trains no critic",
    "warmup_steps": "the weights are on the server",
    "lora_alpha": "the server sets the scale of its adapters",
    "lora_target": "the server chooses the layers of its adapters",
    "optimizer": "the server has AdamW",
    **dict.fromkeys(("dtype", "attention", "gradient_checkpointing", "compile", "head"), _THERE),
    **dict.fromkeys(("micro_tokens", "sampling_tokens", "rollout_memory", "parallel"), _THERE),
}


def server_problems(config: TrainConfig) -> Iterator[str]:
    """Options that a Tinker server cannot honour, each a sentence with its remedy."""
    if not config.engine.startswith((f"{PREFIX}http://", f"{PREFIX}https://")):
        yield (
            "--engine must be built-in, or tinker:URL with the address of a server, such as "
            f"tinker:http://localhost:8000; got {config.engine!r}."
        )
    if config.model in TINY:
        yield (
            f"--engine {config.engine} trains a model that the server has; --model {config.model} "
            "is made in this process. Name the server's model."
        )
    for name, why in _REFUSED.items():
        value = getattr(config, name)
        if value != getattr(type(config), name) and not (name == "warmup_steps" and not value):
            yield f"--engine {config.engine} cannot honour {flag(name)} {value}: {why}. Omit it."
    if config.with_critic:
        yield (
            f"--engine {config.engine} cannot honour --advantage gae: the server trains no critic. "
            "Use an advantage without one, such as grpo."
        )
