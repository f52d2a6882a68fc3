"""Parses the options of verl's rollout correction: "token_k1,seq_max_k3" and "2.0", "0.5_2.0"."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from policyloss.arguments import is_number
from policyloss.errors import SpecError, safe_repr, unknown_name

TOKEN_LEVEL_ROLLOUT_RS_OPTIONS: set[str] = {"token_k1", "token_k2", "token_k3"}
SUPPORTED_ROLLOUT_RS_OPTIONS: set[str] = TOKEN_LEVEL_ROLLOUT_RS_OPTIONS | {
    *(f"seq_{how}_{estimator}" for how in ("sum", "mean") for estimator in ("k1", "k2", "k3")),
    *("seq_max_k2", "seq_max_k3"),
}


class ThresholdTypeError(SpecError, TypeError):
    """A threshold of a wrong type: a TypeError as in verl, a ValueError as every error here."""


class RejectionRule(NamedTuple):
    """Keep `low <= reduce(estimator) <= high`, in nats; None is no lower bound."""

    option: str
    estimator: str
    reduce: str
    low: float | None
    high: float


def weight_bounds(threshold: Any) -> tuple[float | None, float]:
    """`rollout_is_threshold` as (low, high).

    A number or "2.0" has no lower bound (truncation), "0.5_2.0" has one (IcePop).
    """
    _check_type("rollout_is_threshold", threshold, "such as '2.0' or '0.5_2.0'")
    low, high = _bounds("rollout_is_threshold", str(threshold).strip())
    if low is not None and low > high:
        raise SpecError(f"rollout_is_threshold must have lower <= upper, got {threshold!r}.")
    return low, high


def rejection_rules(
    rollout_rs: Any, rollout_rs_threshold: Any, refuses_empty: bool = True
) -> list[RejectionRule]:
    """The comma-separated `rollout_rs` and `rollout_rs_threshold` as rules, with one threshold for
    all options or one for each.

    For k1 the two bounds are on the ratio π_rollout/π_train ("2.0" is short for "0.5_2.0"); k2 and
    k3 have one bound, on the estimate. refuses_empty: raise for a lower bound above the upper one,
    as verl does from 0.9.0 on.
    """
    if not isinstance(rollout_rs, str):
        raise SpecError(
            f"rollout_rs must be a string of comma-separated options, got {safe_repr(rollout_rs)}."
        )
    if rollout_rs_threshold is None:
        raise SpecError(f"rollout_rs={rollout_rs!r} needs rollout_rs_threshold.")
    options = list(dict.fromkeys(_parts(rollout_rs)))
    if not options:
        raise SpecError(
            f"rollout_rs={rollout_rs!r} names no option. Valid: "
            f"{', '.join(sorted(SUPPORTED_ROLLOUT_RS_OPTIONS))}."
        )
    for option in options:
        if option not in SUPPORTED_ROLLOUT_RS_OPTIONS:
            raise SpecError(unknown_name("rollout_rs option", option, SUPPORTED_ROLLOUT_RS_OPTIONS))
    _check_type("rollout_rs_threshold", rollout_rs_threshold, "of one bound per option")
    thresholds = _parts(str(rollout_rs_threshold))
    if len(thresholds) not in (1, len(options)):
        raise SpecError(
            f"rollout_rs_threshold={rollout_rs_threshold!r} has {len(thresholds)} bounds for the "
            f"{len(options)} options of rollout_rs={rollout_rs!r}; pass one for all, or one each."
        )
    each = thresholds if len(thresholds) == len(options) else thresholds * len(options)
    return [_rule(option, text, refuses_empty) for option, text in zip(options, each, strict=True)]


def _rule(option: str, text: str, refuses_empty: bool) -> RejectionRule:
    """One option with its bound."""
    level, estimator = option.rsplit("_", 1)
    reduce = level.removeprefix("seq_")
    low, high = _bounds(f"rollout_rs_threshold for {option}", text)
    if estimator != "k1":
        if low is not None:
            raise SpecError(
                f"rollout_rs_threshold for {option} must be a single upper bound without '_', got "
                f"{text!r}."
            )
        return RejectionRule(option, estimator, reduce, None, high)
    low, high = reciprocal_band(high, low)
    if low <= 0:
        raise SpecError(
            f"rollout_rs_threshold for {option} must be a positive, finite number, got {text!r}."
        )
    if refuses_empty and low > high:
        raise SpecError(
            f"rollout_rs_threshold for {option} must have lower <= upper, got {text!r}."
        )
    return RejectionRule(option, estimator, reduce, math.log(low), math.log(high))


def reciprocal_band(high: float, low: float | None = None) -> tuple[float, float]:
    """(low, high); without `low` the band is 1/high … high, symmetric in the logarithm."""
    return (1.0 / high if low is None else low), high


def _parts(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _check_type(called: str, threshold: Any, form: str) -> None:
    if not isinstance(threshold, str) and not is_number(threshold):
        not_this = ", not a boolean" if isinstance(threshold, bool) else ""
        raise ThresholdTypeError(
            f"{called} must be a number or a string {form}{not_this}; got {safe_repr(threshold)}."
        )


def _bounds(called: str, threshold: str) -> tuple[float | None, float]:
    """(low, high) of "high" or "low_high". called: the argument that an error names."""
    try:
        numbers = [float(word) for word in threshold.split("_", 1)]
    except ValueError as error:
        raise SpecError(
            f"{called} must be a number or two joined by '_', such as '0.5_2.0', got {threshold!r}."
        ) from error
    if any(number <= 0 for number in numbers):
        raise SpecError(f"{called} must be positive, got {threshold!r}.")
    return (None, numbers[0]) if len(numbers) == 1 else (numbers[0], numbers[1])
