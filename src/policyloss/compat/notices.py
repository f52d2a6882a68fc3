"""What a hook says about the options of its framework: each sentence once in a process."""

from __future__ import annotations

import warnings
from functools import cache

from policyloss.presets import PRESETS, defined_with
from policyloss.spec import LossSpec


@cache
def warn_once(text: str) -> None:
    """A `UserWarning`, unless the same one was given before."""
    warnings.warn(text, UserWarning, stacklevel=3)


def check_advantages(name: str, loss: LossSpec | str, made: str | None, setting: str, fix: str) -> None:
    """Warn if `loss` is defined with other advantages than the framework makes.

    name: what the framework calls the loss. made: the estimator of `policyloss.advantage` that stands for what it makes, or None
    if there is none. setting: the option that decides, as it is set. fix: how to get the others, or "" if there is no way.
    """
    wanted = defined_with(loss)
    if wanted is None or wanted == made:
        return
    source = PRESETS[loss].sources["advantage"] if isinstance(loss, str) else ""
    because = f" ({source})" if source else ""
    are = f"those of advantage.{made}" if made else "others"
    advice = f"; {fix}" if fix else ""
    warn_once(f"{name} is defined with the advantages of advantage.{wanted}{because}, and {setting} makes {are}{advice}.")
