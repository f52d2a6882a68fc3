"""Hooks into an installed framework: replace its objects, and warn about its options."""

from __future__ import annotations

import dataclasses
import sys
import warnings
from collections.abc import Callable, Sequence
from functools import cache
from importlib import metadata
from typing import TYPE_CHECKING, Any

from policyloss.catalogue import as_spec, presets_equal_to
from policyloss.catalogue.nearest import nearest_preset
from policyloss.spec import LossSpec

# The base of a class that gets a framework's class as its second base when it is subclassed.
if TYPE_CHECKING:
    Parent = Any
else:
    Parent = object


def installed_version(package: str) -> str:
    """The release of an installed framework."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        raise ImportError(
            f"{package} is not installed here, so there is nothing to hook into; the functions of "
            f"policyloss.compat.{package} work without it."
        ) from None


def swap(package: str, pairs: Sequence[tuple[Any, Any]]) -> list[str]:
    """In every imported module of `package`, replace each global that is the first of a pair by the
    second. A name bound by `from package.module import name` is a separate global, so patching the
    module that defines it is not enough. Modules that are imported later take their names from the
    patched ones. Returns the names that changed, "module.name".
    """
    changed = []
    for module_name, module in list(sys.modules.items()):
        if module is None or not (module_name == package or module_name.startswith(f"{package}.")):
            continue
        for name, value in list(vars(module).items()):
            for old, new in pairs:
                if value is old:
                    setattr(module, name, new)
                    changed.append(f"{module_name}.{name}")
    return changed


class Patch:
    """A change to an imported framework that can be undone.

    pairs: the (original, replacement) functions; empty while the change is not installed.
    """

    def __init__(self, package: str) -> None:
        self.package = package
        self.pairs: list[tuple[Any, Any]] = []

    def apply(self) -> list[str]:
        """Replace theirs by ours wherever a module of the framework has bound it (see `swap`)."""
        return swap(self.package, self.pairs)

    def undo(self) -> None:
        """Restore theirs."""
        swap(self.package, [(new, old) for old, new in self.pairs])
        self.pairs.clear()


@cache
def warn_once(text: str) -> None:
    """Issue a `UserWarning`, unless the same one was issued before in this process."""
    warnings.warn(text, UserWarning, stacklevel=3)


def default_of(config: Any, option: str, otherwise: Any) -> Any:
    """The default of an option in a dataclass config; `otherwise` if the config has none."""
    fields = dataclasses.fields(config) if dataclasses.is_dataclass(config) else ()
    return next((field.default for field in fields if field.name == option), otherwise)


def check_advantages(
    name: str, loss: LossSpec | str, estimator: str | None, setting: str, fix: Callable[[str], str]
) -> None:
    """Warn if the framework's advantages differ from those that define `loss`.

    A variant of a preset is defined by the advantages of the preset. name: the framework's name of
    the loss. estimator: the function of `policyloss.advantage` that computes the framework's
    advantages, or None. setting: the option that chooses them, with its value. fix: returns the
    advice for an estimator, or "" if the framework does not have it.
    """
    spec = as_spec(loss)
    preset, exact = nearest_preset(spec)
    if preset is None or preset.advantage is None:
        return
    # A spec without an origin may be any preset with the same numbers.
    alike = (preset,) if spec.origin else presets_equal_to(preset.spec)
    if any(p.advantage in (None, estimator) for p in alike):
        return
    if not isinstance(loss, str):
        name = f"{name}, {'' if exact else 'a change of '}the preset {preset.name!r},"
    computed = f"those of advantage.{estimator}" if estimator else "others"
    advice = f"; {text}" if (text := fix(preset.advantage)) else ""
    source = preset.sources["advantage"]
    warn_once(
        f"{name} is defined with the advantages of advantage.{preset.advantage} ({source}), but "
        f"{setting} computes {computed}{advice}."
    )
