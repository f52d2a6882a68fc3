"""The warnings of a hook about the options of its framework, each once in a process."""

from __future__ import annotations

import dataclasses
import warnings
from functools import cache
from typing import Any

from policyloss.presets import PRESETS, defined_with, presets_equal_to
from policyloss.spec import LossSpec


@cache
def warn_once(text: str) -> None:
    """Issue a `UserWarning`, unless the same one was issued before."""
    warnings.warn(text, UserWarning, stacklevel=3)


def default_of(config: Any, option: str, otherwise: Any) -> Any:
    """The default of an option of a framework: the config's, if that is a dataclass with it."""
    fields = dataclasses.fields(config) if dataclasses.is_dataclass(config) else ()
    return next((field.default for field in fields if field.name == option), otherwise)


def check_advantages(
    name: str, loss: LossSpec | str, estimator: str | None, setting: str, fix: str
) -> None:
    """Warn if `loss` is defined with other advantages than the framework computes.

    name: what the framework calls the loss. estimator: the function of `policyloss.advantage` that
    computes what the framework computes, or None if there is none. setting: the option that
    decides, with its value. fix: how to get the right advantages, or "" if there is no way.
    """
    wanted = defined_with(loss)
    if wanted is None or wanted == estimator:
        return
    preset = PRESETS[loss] if isinstance(loss, str) else presets_equal_to(loss)[0]
    called = name if isinstance(loss, str) else f"{name}, the preset {preset.name!r},"
    are = f"those of advantage.{estimator}" if estimator else "others"
    advice = f"; {fix}" if fix else ""
    source = preset.sources["advantage"]
    warn_once(
        f"{called} is defined with the advantages of advantage.{wanted} ({source}), and {setting} "
        f"makes {are}{advice}."
    )
