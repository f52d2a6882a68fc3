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
    """A loss specification that means nothing: a bad number, an unknown name, parts that clash."""


class InputError(PolicyLossError):
    """Tensors that do not fit the call: a missing argument, a wrong shape, dtype or layout."""


def match_name(name: str, valid: Iterable[str]) -> str | None:
    """The entry of `valid` that `name` means: letter case and "-" for "_" make no difference."""
    by_spelling = {_one_spelling(known): known for known in valid}
    return by_spelling.get(_one_spelling(name)) if isinstance(name, str) else None


def _one_spelling(name: str) -> str:
    return name.strip().lower().replace("-", "_")


class InputTypeError(InputError, TypeError):
    """A value of a type that means nothing here; a `TypeError` too, for callers that expect one."""


def unknown_name(kind: str, name: object, valid: Iterable[str]) -> str:
    """The sentence for a name that is not one of `valid`, with the closest valid name if any."""
    names = sorted(valid)
    by_spelling = {_one_spelling(known): known for known in names}
    near = get_close_matches(_one_spelling(name), by_spelling, n=1) if isinstance(name, str) else []
    close, shown = [by_spelling[key] for key in near], safe_repr(name)
    hint = f"; did you mean {close[0]!r}?" if close else "."
    return f"unknown {kind} {shown}{hint} Valid: {', '.join(names)}."


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
