"""The warnings of a hook about the options of its framework, each once in a process."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

from policyloss.catalogue import as_spec, presets_equal_to
from policyloss.catalogue.nearest import nearest_preset
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
    name: str,
    loss: LossSpec | str,
    estimator: str | None,
    setting: str,
    fix: Callable[[str], str],
) -> None:
    """Warn if `loss`, or the preset that it is a change of, is defined with other advantages than
    the framework computes.

    name: what the framework calls the loss. estimator: the function of `policyloss.advantage` that
    computes what the framework computes, or None if there is none. setting: the option that
    decides, with its value. fix: how to get the advantages of an estimator, or "" if there is no
    way.
    """
    spec = as_spec(loss)
    preset, exact = nearest_preset(spec)
    if preset is None or preset.advantage is None:
        return
    # Without an origin, a spec is as much any preset with the same numbers.
    alike = (preset,) if spec.origin else presets_equal_to(preset.spec)
    if any(p.advantage in (None, estimator) for p in alike):
        return
    if not isinstance(loss, str):
        name = f"{name}, {'' if exact else 'a change of '}the preset {preset.name!r},"
    are = f"those of advantage.{estimator}" if estimator else "others"
    advice = f"; {text}" if (text := fix(preset.advantage)) else ""
    source = preset.sources["advantage"]
    warn_once(
        f"{name} is defined with the advantages of advantage.{preset.advantage} ({source}), and "
        f"{setting} makes {are}{advice}."
    )
