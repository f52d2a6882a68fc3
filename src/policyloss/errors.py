"""The errors of the library: all are `ValueError`s, so that callers need not import them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from difflib import get_close_matches

# Characters that show nothing or deceive: controls except tab and newline, direction overrides and
# isolates, zero-width characters, lone surrogates.
_UNSEEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufffe\uffff\ud800-\udfff]"
)


class PolicyLossError(ValueError):
    """Base of every error raised on purpose by this library."""


class SpecError(PolicyLossError):
    """Raised if a loss is invalid: a bad number, an unknown name, parts that do not fit."""


class InputError(PolicyLossError):
    """Raised if inputs do not fit the call: a missing argument, a wrong shape, dtype or layout."""


def match_name(name: str, valid: Iterable[str]) -> str | None:
    """The entry of `valid` that `name` means: letter case and "-" for "_" make no difference."""
    by_spelling = {_one_spelling(known): known for known in valid}
    return by_spelling.get(_one_spelling(name)) if isinstance(name, str) else None


def _one_spelling(name: str) -> str:
    return name.strip().lower().replace("-", "_")


class SpecTypeError(SpecError, TypeError):
    """A field that a part does not have; a `TypeError` too, for callers that expect one."""


class InputTypeError(InputError, TypeError):
    """A value of a type that means nothing here; a `TypeError` too, for callers that expect one."""


# The names of our fields and arguments in other libraries.
_BOTH_CLIPS = ("clip_ratio", "clip_range", "cliprange", "clip_eps", "eps_clip", "clip", "epsilon")
OTHER_WORDS = {
    "eps_low": (
        *("eps", "epsilon_low", "clip_ratio_low", "cliprange_low", "clip_eps_low", "eps_clip_low"),
        *_BOTH_CLIPS,
        "eps_clip_low_high",
    ),
    "eps_high": (
        *("epsilon_high", "clip_ratio_high", "cliprange_high", "clip_eps_high", "eps_clip_high"),
        *_BOTH_CLIPS,
        "eps_clip_low_high",
    ),
    "dual": ("clip_ratio_c", "dual_clip"),
    "horizon": ("loss_scale_factor", "max_completion_length", "max_tokens"),
    "coef": ("beta", "init_coef", "kl_loss_coef", "kl_coef", "init_kl_coef", "kl_beta"),
    "estimator": ("kl_loss_type", "kl_penalty", "kl_estimator"),
    "entropy_coef": ("entropy_coeff", "ent_coef", "entropy_loss_coef"),
    "aggregate": ("loss_agg_mode", "reduction", "loss_type"),
    "high": ("rollout_is_threshold", "tis_imp_ratio_cap", "vllm_importance_sampling_cap"),
    "ref_logp": ("log_probs_base", "ref_per_token_logps", "ref_logprobs"),
    "rollout_logp": ("sampling_per_token_logps", "inference_logprobs", "generation_logprobs"),
}


def unknown_name(kind: str, name: object, valid: Iterable[str]) -> str:
    """The sentence for a name that is not one of `valid`, with the valid names it may mean.

    These are our names for what the name means elsewhere, or else the most similar name.
    """
    names = sorted(valid)
    suggestions: list[str] = []
    if isinstance(name, str):
        spelling = _one_spelling(name)
        spelled = {_one_spelling(known): known for known in names}
        elsewhere = [ours for ours, words in OTHER_WORDS.items() if spelling in words]
        suggestions = [ours for ours in elsewhere if ours in names] or [
            spelled[near] for near in get_close_matches(spelling, spelled, n=1)
        ]
    hint = f"; did you mean {' and '.join(map(repr, suggestions))}?" if suggestions else "."
    return f"unknown {kind} {safe_repr(name)}{hint} Valid: {', '.join(names)}."


def safe_repr(value: object, form: Callable[[object], str] = repr) -> str:
    """`repr(value)`, or its `str`, cut to the length of a message; its type where it has none."""
    try:
        text = form(value)
    except (Exception, SystemExit):  # a user's object may do anything here
        return f"a value of type {type(value).__name__}"
    return text if len(text) <= 80 else f"{text[:80]}…"


def visible(text: str) -> str:
    """`text` with the number of every character that is invisible or would control a terminal."""
    return _UNSEEN.sub(lambda match: f"\\u{ord(match[0]):04x}", text)
