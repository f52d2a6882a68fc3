"""A user's own code, named on the command line: `module:name`, or `path/to/file.py:name`."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from policyloss.errors import InputError, safe_repr
from policyloss.spec import LossSpec


def is_reference(text: str | None) -> bool:
    """Whether `text` names code for `load_code`, and not the address of a server."""
    return text is not None and ":" in text and "://" not in text


def load_code(reference: str, role: str) -> Any:
    """The object that `module:name` or `path/to/file.py:name` names. role: for errors, e.g. "the
    reward". Modules are also searched in the current folder, as by `python -m`.
    """
    module_name, _, attribute = reference.rpartition(":")
    is_file = module_name.endswith(".py")
    is_module = all(part.isidentifier() for part in module_name.split("."))
    if not attribute.isidentifier() or not (is_file or is_module):
        form = "module:function or path/to/file.py:function"
        raise InputError(f"{role} {reference!r} is not of the form {form}.")
    try:
        path = Path(module_name).expanduser()
        module = _execute(path.resolve(strict=True)) if is_file else _module(module_name)
    except FileNotFoundError as error:
        raise InputError(f"{role} {reference!r}: there is no file {error.filename}.") from error
    # The user's code may raise anything on import.
    except (Exception, SystemExit) as error:
        raised = f"importing {module_name!r} raised {type(error).__name__}: {error}"
        raise InputError(f"{role} {reference!r}: {raised}.") from error
    if not hasattr(module, attribute):
        raise InputError(f"{role} {reference!r}: {module_name!r} has no function {attribute!r}.")
    return getattr(module, attribute)


def load_loss(reference: str) -> LossSpec:
    """A user's loss: a `LossSpec`, a function without arguments that returns one, or a function of
    `Tokens`, which fills the slot `trust` of the default loss.
    """
    value = load_code(reference, "the loss")
    if callable(value):
        required = [
            x
            for x in inspect.signature(value).parameters.values()
            if x.default is x.empty and x.kind not in (x.VAR_POSITIONAL, x.VAR_KEYWORD)
        ]
        if len(required) == 1:
            return LossSpec(trust=value)
        value = value if required else value()
    if isinstance(value, LossSpec):
        return value
    raise InputError(
        f"the loss {reference!r} is {safe_repr(value)}; give a LossSpec, a function without "
        "arguments that returns one, or a function of Tokens that returns a loss per token."
    )


def _module(name: str) -> ModuleType:
    here = str(Path.cwd())
    sys.path.insert(0, here)
    try:
        return importlib.import_module(name)
    finally:
        if here in sys.path:
            sys.path.remove(here)


@functools.cache
def _execute(path: Path) -> ModuleType:
    """Execute a file as a module, once: two options may name functions of one file."""
    spec: Any = importlib.util.spec_from_file_location(str(path), path)
    module = sys.modules[str(path)] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
