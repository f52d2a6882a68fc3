"""The arguments of drop-ins, checked under the names that their framework gives them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import update_wrapper
from typing import Any, ParamSpec, TypeVar

from policyloss.arguments import by_annotation, check_number, is_number
from policyloss.errors import SpecError
from policyloss.tokens import as_mask

F = TypeVar("F", bound=Callable[..., Any])
P = ParamSpec("P")
Call = TypeVar("Call")
Result = TypeVar("Result")
MASKS = frozenset({"response_mask", "action_mask", "loss_mask"})
# What carries a gradient, or is computed with as it is.
FLOATING = frozenset(
    {
        *("log_prob", "log_probs", "logprob", "old_log_prob", "rollout_log_prob", "log_ratio"),
        *("vpreds", "values", "loss_mat", "loss", "token_level_rewards"),
    }
)
# The arguments that hold one number per token, `[B, T]`, by the names of all frameworks.
TOKEN_SHAPED = (
    MASKS
    | FLOATING
    | {
        *("old_log_probs", "rollout_log_probs", "ref_logprob", "log_probs_base", "log_probs_old"),
        *(
            "rollout_is_weights",
            "raw_rollout_is_weights",
            "rs_statistic",
            "sum_pi_squared",
            "per_token_kl",
        ),
        *("returns", "old_values", "advantage"),
    }
)


COUNTS = frozenset({"batch_num_tokens", "global_batch_size", "total_effective_tokens_in_batch"})
BOUNDS = frozenset(
    {"cliprange", "cliprange_low", "cliprange_high", "clip_eps", "clip_eps_low", "clip_eps_high"}
)


def _check_values(arguments: dict[str, Any]) -> None:
    """Masks must hold 0 and 1, numbers must not be negative; errors use the caller's names."""
    for name, value in arguments.items():
        if name in MASKS and value is not None:
            as_mask(value, value, name)
        elif name in COUNTS and is_number(value):
            check_number(name, value, least=0)
        elif name in BOUNDS and is_number(value):
            check_number(name, value, least=0, error=SpecError)
        elif name == "cliprange_value" and is_number(value):
            check_number(name, value, above=0)
        elif name == "dp_size" and is_number(value):
            check_number(name, value, least=1, finite=True)


def drop_in_with(*, per_sequence: Sequence[str] = ()) -> Callable[[F], F]:
    """`drop_in`, for a function where these arguments hold one number per sequence."""
    return by_annotation(TOKEN_SHAPED.difference(per_sequence), FLOATING, _check_values)


def drop_in(function: F) -> F:
    """Check the arguments of a framework's function under the names that its callers know."""
    return drop_in_with()(function)


def drop_in_of(
    call: Callable[P, Call], *, ignores_others: bool = False
) -> Callable[[Callable[[Call], Result]], Callable[P, Result]]:
    """A function of one `call` as a drop-in that takes what makes the call: `call` is a dataclass
    whose fields are the arguments of the framework's function, in its order.

    ignores_others: accept any other keyword as well (the framework's `**kwargs`), and drop it.
    """
    signature = inspect.signature(call)
    names, shown = signature.parameters.keys(), list(signature.parameters.values())
    checked_call: Callable[..., Call] = drop_in(call)
    if ignores_others:
        shown.append(inspect.Parameter("kwargs", inspect.Parameter.VAR_KEYWORD))

    def decorate(body: Callable[[Call], Result]) -> Callable[P, Result]:
        def function(*args: P.args, **kwargs: P.kwargs) -> Result:
            known = {n: x for n, x in kwargs.items() if n in names} if ignores_others else kwargs
            return body(checked_call(*args, **known))

        update_wrapper(function, body, ("__module__", "__name__", "__qualname__", "__doc__"))
        # Otherwise inspect would follow __wrapped__ to the parameters of `body`.
        function.__signature__ = inspect.signature(body).replace(  # type: ignore[attr-defined]
            parameters=shown
        )
        return function

    return decorate
