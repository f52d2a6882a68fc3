"""What a hook says about the options of its framework: each sentence once in a process."""

from __future__ import annotations

import warnings
from functools import cache

from policyloss.presets import PRESETS, defined_with, presets_equal_to
from policyloss.spec import LossSpec


@cache
def warn_once(text: str) -> None:
    """A `UserWarning`, unless the same one was given before."""
    warnings.warn(text, UserWarning, stacklevel=3)


def check_advantages(name: str, loss: LossSpec | str, estimator: str | None, setting: str, fix: str) -> None:
    """Warn if `loss` is defined with other advantages than the framework makes.

    name: what the framework calls the loss. made: the estimator of `policyloss.advantage` that
    stands for what it makes, or None if there is none. setting: the option that decides, as it is
    set. fix: how to get the others, or "" if there is no way.
    """
    wanted = defined_with(loss)
    if wanted is None or wanted == estimator:
        return
    preset = PRESETS[loss] if isinstance(loss, str) else presets_equal_to(loss)[0]
    called = name if isinstance(loss, str) else f"{name}, the preset {preset.name!r},"
    are = f"those of advantage.{estimator}" if estimator else "others"
    advice = f"; {fix}" if fix else ""
    source = preset.sources["advantage"]
    warn_once(f"{called} is defined with the advantages of advantage.{wanted} ({source}), and {setting} makes {are}{advice}.")
