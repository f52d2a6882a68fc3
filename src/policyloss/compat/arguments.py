"""The arguments of drop-ins, checked under the names of their framework, and `release=`, which
selects the numbers of an older release.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Sequence
from functools import update_wrapper
from typing import Any, ParamSpec, TypeVar

from policyloss.arguments import by_annotation, check_number, is_number
from policyloss.errors import SpecError, safe_repr
from policyloss.tokens import as_mask

F = TypeVar("F", bound=Callable[..., Any])
P = ParamSpec("P")
Arguments = TypeVar("Arguments")
Result = TypeVar("Result")

# Arguments of all frameworks, by their names.
MASKS = {"response_mask", "action_mask", "loss_mask"}
# Tensors that must be floating, because they carry a gradient or are not converted.
FLOATING = {
    *("log_prob", "log_probs", "logprob", "old_log_prob", "rollout_log_prob", "log_ratio"),
    *("vpreds", "values", "loss_mat", "loss", "token_level_rewards"),
}
# One number per token, `[B, T]`.
TOKEN_SHAPED = {
    *(*MASKS, *FLOATING, "rollout_is_weights", "raw_rollout_is_weights", "rs_statistic"),
    *("old_log_probs", "rollout_log_probs", "ref_logprob", "log_probs_base", "log_probs_old"),
    *("sum_pi_squared", "per_token_kl", "returns", "old_values", "advantage"),
}
COUNTS = {"batch_num_tokens", "global_batch_size", "total_effective_tokens_in_batch"}
BOUNDS = {
    *("cliprange", "cliprange_low", "cliprange_high", "clip_eps", "clip_eps_low", "clip_eps_high")
}


def _check_values(arguments: dict[str, Any]) -> None:
    """Check that masks hold 0 and 1 and that numbers lie in their range."""
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
    """A decorator that checks the arguments of a framework's function; errors use their names."""
    return drop_in_with()(function)


def drop_in_of(
    arguments: Callable[P, Arguments], *, ignores_others: bool = False
) -> Callable[[Callable[[Arguments], Result]], Callable[P, Result]]:
    """A decorator that turns a function of one dataclass into a drop-in.

    The drop-in takes the fields of that dataclass as its parameters. ignores_others: accept and
    drop any other keyword, as a framework's `**kwargs` does.
    """
    signature = inspect.signature(arguments)
    names, parameters = signature.parameters.keys(), list(signature.parameters.values())
    checked: Callable[..., Arguments] = drop_in(arguments)
    if ignores_others:
        parameters.append(inspect.Parameter("kwargs", inspect.Parameter.VAR_KEYWORD))

    def decorate(body: Callable[[Arguments], Result]) -> Callable[P, Result]:
        def function(*args: P.args, **kwargs: P.kwargs) -> Result:
            known = {n: x for n, x in kwargs.items() if n in names} if ignores_others else kwargs
            return body(checked(*args, **known))

        update_wrapper(function, body, ("__module__", "__name__", "__qualname__", "__doc__"))
        # Otherwise inspect would follow __wrapped__ to the parameters of `body`.
        function.__signature__ = inspect.signature(body).replace(  # type: ignore[attr-defined]
            parameters=parameters
        )
        return function

    return decorate


# 0.9.1, v0.9.1, 0.3.0.post1, 0.9.0rc1, 1.0.dev0, 0.9.1+cu128
_VERSION = re.compile(
    r"v?(?P<numbers>\d+(?:\.\d+)*)(?:[.\-_]?(?P<stage>a|b|rc|dev|post)\d*)?(?:\+[a-z0-9.]+)?",
    re.IGNORECASE,
)


def at_least(release: str | None, version: str) -> bool:
    """Whether `release` is `version` or newer; None means the current release, so True.

    Missing numbers are 0 (0.9 is 0.9.0). A pre-release (a, b, rc, dev) comes before its release, a
    .post after it, and a suffix after + is ignored.
    """
    return release is None or _sort_key(release, "release") >= _sort_key(version, "version")


def _sort_key(text: str, called: str) -> tuple[tuple[int, ...], int]:
    match = _VERSION.fullmatch(text) if isinstance(text, str) else None
    if match is None:
        raise SpecError(
            f"{called}={safe_repr(text)} is not a release; pass numbers with dots, such as "
            f'{called}="0.9.1".'
        )
    numbers = [int(n) for n in match["numbers"].split(".")]
    while numbers and numbers[-1] == 0:
        numbers.pop()
    stage = (match["stage"] or "").lower()
    return tuple(numbers), {"": 0, "post": 1}.get(stage, -1)
