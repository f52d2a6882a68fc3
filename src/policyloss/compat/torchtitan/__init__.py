"""Any token-level loss of this library as the loss of torchtitan's RL trainer.

torchtitan packs several samples into a row and may cut rows into chunks, without their bounds, so
a token's loss must not depend on other tokens. It counts the tokens of a step over all ranks, and
sums gradients and metrics.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any

from torch import Tensor

from policyloss.catalogue import as_spec
from policyloss.compat.engines import fitting_spec, mean_records, sampled_logp
from policyloss.loss import policy_loss
from policyloss.mixture import read_loss
from policyloss.parts.aggregate import TokenMean
from policyloss.records import Stat
from policyloss.spec import LossSpec
from policyloss.totals import Totals

__all__ = ["checked_spec"]  # PolicyLoss is not here, so that `import *` works without torchtitan

LOSS = "torchtitan.components.loss"


def checked_spec(loss: str) -> LossSpec:
    """The preset or the JSON file `loss` as a spec; an error if torchtitan cannot run it."""
    passes = ("old_logp", "rollout_logp")
    spec, limits = as_spec(read_loss(loss)), {"sampler_is_old": True, "single_tokens": True}
    return fitting_spec("torchtitan", spec, passes, (TokenMean,), **limits)


@cache
def loss_class() -> type[Any]:
    """`PolicyLoss`, a subclass of the installed torchtitan's `BaseLoss`."""
    titan = import_module(LOSS)

    class PolicyLoss(titan.BaseLoss):  # type: ignore[misc,name-defined]  # torchtitan has no types
        """`PolicyTrainer.Config(loss=PolicyLoss.Config(loss="dapo"))`, alone or as the inner loss
        of a `ChunkedLossWrapper`.
        """

        @dataclass(kw_only=True, slots=True)
        class Config(titan.BaseLoss.Config):  # type: ignore[misc,name-defined]
            """loss: the name of a preset, or the path of a spec in JSON."""

            loss: str

        def __init__(self, config: Any, *, compile_config: Any = None) -> None:
            self.spec = checked_spec(config.loss)

        def __call__(
            self,
            logits: Tensor,
            labels: Tensor,
            global_valid_tokens: float | Tensor | None = None,
            *,
            generator_logprobs: Tensor,
            advantages: Tensor,
            loss_mask: Tensor,
        ) -> tuple[Tensor, dict[str, Tensor]]:
            """logits: `[B, L, V]`; the others `[B, L]`. A token without a finite log-probability
            of the generator is left out, as torchtitan does when it counts.
            """
            tokens = 1 if global_valid_tokens is None else global_valid_tokens
            logp = titan.compute_logprobs(logits, labels)
            out = policy_loss(
                self.spec,
                logp,
                **sampled_logp(self.spec, generator_logprobs),
                advantages=advantages,
                mask=loss_mask & generator_logprobs.isfinite(),
                totals=Totals(tokens or 1, 1),
                metrics="basic",
            )
            shares = {
                key: Stat(mean.sum, logp.new_tensor(tokens or 1)).value
                for key, mean in mean_records(out.metrics).items()
            }
            return out.loss, {"loss/mean": out.loss.detach(), **shares}

    return PolicyLoss


def __getattr__(name: str) -> Any:
    if name == "PolicyLoss":
        return loss_class()
    raise AttributeError(
        f"policyloss.compat.torchtitan has no {name!r}; there are PolicyLoss, {__all__[0]}."
    )
