"""Rewards: numbers for completions, 1 for a correct answer. Every failure is reported."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from numbers import Real
from typing import Any, NoReturn

from policyloss.errors import InputError, PolicyLossError, safe_repr, unknown_name
from policyloss_train.tasks.base import Example, Reward, Task, normalise_spaces
from policyloss_train.time_limit import TimeIsUp, call_within
from policyloss_train.user_code import load_code

LARGEST = 1e15  # the largest reward; the sum of a run's squared rewards must fit into float32


class RewardError(PolicyLossError):
    """A reward function failed on one completion."""

    def __init__(self, reward: str, example: Example, completion: str, error: str) -> None:
        super().__init__(
            f"the reward {reward!r} {error}; prompt {example.prompt!r}, completion {completion!r}."
        )


def make_reward(name: str) -> Reward:
    """`exact`, `math`, or `module:function`: a function `(example, completion) → number`. It must
    return a number of at most 1e15; any other value, and any exception, becomes a `RewardError`.
    """
    if name in _BUILT_IN:
        return check_reward(name, _BUILT_IN[name]())
    if ":" in name:
        function = load_code(name, "the reward")
        if not callable(function):
            raise InputError(f"the reward {name!r} is {safe_repr(function)}, which is no function.")
        return check_reward(name, function)
    raise InputError(
        unknown_name("reward", name, _BUILT_IN) + " Or module:function for a function of your own."
    )


def check_reward(name: str, function: Any) -> Reward:
    """`function` as a reward called `name`: its errors and its NaNs become `RewardError`s."""

    def reward(example: Example, completion: str) -> float:
        try:
            with _exit_raised():
                value = function(example, completion)
        # A reward that calls `sys.exit` would end the run as if it had succeeded.
        except (Exception, SystemExit) as error:
            problem = f"raised {type(error).__name__}: {safe_repr(error, str)}"
            raise RewardError(name, example, completion, problem) from error
        number = _number(value)
        if not abs(number) <= LARGEST:
            problem = f"returned {safe_repr(value)} ({type(value).__name__})"
            raise RewardError(name, example, completion, f"{problem} where a finite number belongs")
        return number

    return reward


@contextmanager
def _exit_raised() -> Iterator[None]:
    """Make `os._exit` raise a `SystemExit`, because it would end the run without a message.
    A process forked from this one may still end itself.
    """
    end, process = os._exit, os.getpid()

    def leave(code: int) -> NoReturn:
        if os.getpid() != process:
            end(code)
        raise SystemExit(f"os._exit({code})")

    os._exit = leave  # type: ignore[assignment]
    try:
        yield
    finally:
        os._exit = end


def score_completion(task: Task, example: Example, completion: str, seconds: float) -> float:
    """The task's score; a `RewardError` if it fails or takes over `seconds` (0: no limit)."""
    try:
        return float(call_within(seconds, task.score, example, completion))
    except TimeIsUp:
        raise RewardError(
            task.name, example, completion, f"took longer than {seconds:g} s (--reward-timeout)"
        ) from None


def tolerant_reward(
    task: Task, seconds: float, warn: Callable[[str], None], failed: float = 0.0
) -> Reward:
    """The task's score, or `failed` and a warning if it fails, so that a run goes on."""

    def score(example: Example, completion: str) -> float:
        try:
            return score_completion(task, example, completion, seconds)
        except RewardError as error:
            warn(str(error))
            return failed

    return score


def _number(x: object) -> float:
    """`x` as a float; NaN if it is not a number, or too large for a float."""
    try:
        return float(x) if isinstance(x, Real) else math.nan
    except Exception:  # a user's number type may raise anything
        return math.nan


def _exact(example: Example, completion: str) -> float:
    """1 if the completion is the answer, up to white space; else 0."""
    return float(normalise_spaces(completion) == normalise_spaces(example.answer))


def _math() -> Reward:
    """1 if a completion ends in an expression (also LaTeX) equal to the answer; else 0."""
    try:
        from math_verify import parse, verify
    except ImportError as error:
        raise InputError("the reward 'math' needs math-verify: pip install math-verify.") from error

    def reward(example: Example, completion: str) -> float:
        # Dollars make math-verify read the whole answer, not only the 2 of 2\sqrt{3}.
        marked = "$" in example.answer or "\\boxed" in example.answer
        answer = parse(example.answer if marked else f"${example.answer}$")
        if not answer:
            raise InputError(f"the answer {example.answer!r} cannot be read as mathematics")
        return float(verify(answer, parse(completion)))

    return reward


_BUILT_IN = {"exact": lambda: _exact, "math": _math}
