"""Three paths through the code, each a list of functions that a real call enters in that order.

To change a walk, change its tuple of stops. To follow a function that moved, change its import in
the same place.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch

import policyloss as pl
from docs.architecture_imports import SOURCE, first_sentence


@dataclass(frozen=True)
class Walk:
    """A path through the code. call: runs it, on the smallest example. stops: functions, each
    entered after the one before it.
    """

    title: str
    about: str
    call: Callable[[], Any]
    stops: tuple[Callable[..., Any], ...]


@dataclass(frozen=True)
class Stop:
    """A function on the path: its name, its file relative to src, and the first sentence of
    its docstring.
    """

    name: str
    file: str
    about: str


def loss_walk() -> Walk:
    """From log-probabilities to the loss."""
    from policyloss.functional.aggregate import weighted_total
    from policyloss.functional.trust import clipped
    from policyloss.inputs import Inputs
    from policyloss.loss import pipeline, policy_loss, token_losses
    from policyloss.policy_metrics import policy_metrics

    spec = pl.LossSpec(correction=pl.Truncate(2.0), kl=pl.KL("k3", 0.01))

    def call() -> None:
        logp, advantages, mask = (
            torch.full((2, 3), -1.0),
            torch.ones(2),
            torch.ones(2, 3, dtype=torch.bool),
        )
        pl.policy_loss(
            spec,
            logp.requires_grad_(),
            logp.detach(),
            advantages,
            mask,
            rollout_logp=logp.detach(),
            ref_logp=logp.detach(),
        )

    stops = (
        policy_loss,
        Inputs.of,
        Inputs.tokens,
        pipeline,
        pl.Truncate.__call__,
        pl.TokenRatio.__call__,
        token_losses,
        pl.Clip.__call__,
        clipped,
        pl.KL.__call__,
        pl.TokenMean.__call__,
        weighted_total,
        policy_metrics,
    )
    about = (
        "`pl.policy_loss` with a correction and a KL term. A loss is a straight line over the "
        "slots of its spec."
    )
    return Walk("A tensor to the loss", about, call, stops)


def head_walk() -> Walk:
    """From hidden states to the gradient of the weight."""
    from policyloss.functional.precomputed import _KnownGradients, with_known_gradients
    from policyloss.head.backward import GradientSums
    from policyloss.head.head import Head
    from policyloss.head.linear import head_and_sources
    from policyloss.head.loss import linear_policy_loss
    from policyloss.head.matmul import rounded_product
    from policyloss.head.plans import loss_plan
    from policyloss.head.softmax_rows import row_gradient, row_partials
    from policyloss.head.windows import TokenBatch, batch_of, run_windows, token_windows
    from policyloss.loss import loss_of, token_losses

    def call() -> None:
        hidden, weight = (torch.ones(*shape, requires_grad=True) for shape in ((2, 3, 4), (5, 4)))
        ids, mask = torch.zeros(2, 3, dtype=torch.int64), torch.ones(2, 3, dtype=torch.bool)
        out = pl.linear_policy_loss(
            "dapo", hidden, weight, ids, torch.full((2, 3), -1.0), torch.ones(2), mask
        )
        out.loss.backward()

    stops = (
        linear_policy_loss,
        head_and_sources,
        batch_of,
        loss_plan,
        token_windows,
        run_windows,
        Head.forward,
        row_partials,
        TokenBatch.gradients,
        token_losses,
        GradientSums.add,
        row_gradient,
        rounded_product,
        GradientSums.gradients,
        loss_of,
        with_known_gradients,
        _KnownGradients.backward,
    )
    about = (
        "`pl.linear_policy_loss` and `backward()`. The gradient of a window is computed while its "
        "logits exist; the backward only scales it."
    )
    return Walk("Hidden states to the gradient of the weight", about, call, stops)


def training_walk() -> Walk:
    """One step of the reference trainer."""
    from policyloss_train import collect, learner, loop, policy
    from policyloss_train.config import TrainConfig
    from policyloss_train.rollout.session import BuiltIn
    from policyloss_train.tasks.rewards import score_completion

    sizes: dict[str, Any] = {
        "prompts": 1,
        "group_size": 2,
        "minibatches": 2,  # the first update has no old policy but itself
        "max_new_tokens": 2,
        "eval_prompts": 1,
    }

    def call() -> None:
        with tempfile.TemporaryDirectory() as folder:
            config = TrainConfig(
                steps=1, warmup_steps=0, device="cpu", out=Path(folder) / "run", **sizes
            )
            loop.train(config, pl.preset("dapo"))

    stops = (
        loop.train,
        loop.Training._step,
        loop.Collector.collect,
        collect.Rollout.samples,
        BuiltIn.generate,
        score_completion,
        loop.Pack.of,
        learner.Learner.learn,
        learner.judge,
        pl.accumulate,
        policy.Policy.forward,
        pl.linear_policy_loss,
        pl.Accumulation.reduce_metrics,
        learner.Learner._step_optimizer,
        loop.score_answers,
        loop.RunDir.log,
        loop.resume.store,
    )
    about = "`policyloss train` with one step: sample, score, judge, update, write down."
    return Walk("One training step", about, call, stops)


@cache
def walks() -> tuple[tuple[Walk, list[Stop]], ...]:
    """Every walk with its stops; each walk runs once in a process."""
    return tuple((walk, walked(walk)) for walk in (loss_walk(), head_walk(), training_walk()))


def walked(walk: Walk) -> list[Stop]:
    """Run the walk. Raises if a stop is not entered after the one before it."""
    functions: list[Any] = [inspect.unwrap(stop) for stop in walk.stops]
    with (
        _entered({function.__code__ for function in functions}) as order,
        _quiet(),
        torch.random.fork_rng(devices=[]),
    ):
        walk.call()
    position, stops = -1, []
    for function in functions:
        name = function.__qualname__
        try:
            position = order.index(function.__code__, position + 1)
        except ValueError:
            before = stops[-1].name if stops else "the start"
            raise LookupError(
                f"{walk.title}: after {before}, {name} is not reached there "
                "(docs/architecture_walks.py)"
            ) from None
        file = Path(function.__code__.co_filename).resolve().relative_to(SOURCE).as_posix()
        stops.append(Stop(name, file, first_sentence(_docstring(function))))
    return stops


def _docstring(function: Any) -> str | None:
    """The function's docstring; for a method without one, the docstring of its class."""
    owner = getattr(sys.modules[function.__module__], function.__qualname__.split(".")[0])
    return inspect.getdoc(function) if function.__doc__ else inspect.getdoc(owner)


@contextmanager
def _entered(wanted: set[CodeType]) -> Iterator[list[CodeType]]:
    """The wanted functions that are entered inside, in order."""
    order: list[CodeType] = []

    def look(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code in wanted:
            order.append(frame.f_code)

    before = sys.getprofile()
    sys.setprofile(look)
    try:
        yield order
    finally:
        sys.setprofile(before)


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress the call's output."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        yield
