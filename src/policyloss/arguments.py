"""The checks of arguments; each error names the argument, its value, and a value that fits.

They check types, dtypes, shapes and devices, and never read a tensor's values, so they cost no host
sync.
"""

from __future__ import annotations

import functools
import inspect
import math
import threading
from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import contextmanager
from types import UnionType
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

import torch
import torch.distributed as dist
from torch import Tensor

from policyloss.errors import InputError, PolicyLossError, safe_repr, unknown_name

Kind = Literal["number", "float", "integer", "any"]
F = TypeVar("F", bound=Callable[..., Any])
_WANTED: dict[str, str] = {
    "any": "a tensor",
    "number": "a tensor of real numbers",
    "float": "a floating-point tensor",
    "integer": "a tensor of integers",
}


_traced = threading.local()


def is_compiling() -> bool:
    """Whether `torch.compile` or `tracing` traces this call, so that tensors have no values."""
    return torch.compiler.is_compiling() or getattr(_traced, "depth", 0) > 0


@contextmanager
def tracing() -> Iterator[None]:
    """A context in which `is_compiling` holds in this thread: the library traces itself."""
    _traced.depth = getattr(_traced, "depth", 0) + 1
    try:
        yield
    finally:
        _traced.depth -= 1


def refuse_transforms() -> None:
    """Raise inside a transform of `torch.func`, which cannot use gradients saved in a forward."""
    if not is_compiling() and torch._C._are_functorch_transforms_active():
        raise InputError(
            "policyloss cannot run inside a transform of torch.func (grad, vmap, jvp, …), because "
            "it saves its derivatives with its values: call it outside, and differentiate by "
            "loss.backward() or torch.autograd.grad."
        )


def description(x: Any) -> str:
    """How an error describes a wrong value: dtype and shape of a tensor, else type and value."""
    if isinstance(x, Tensor):
        return f"dtype {x.dtype} and shape {tuple(x.shape)}"
    return f"{type(x).__name__} {safe_repr(x)}"


def fits_kind(x: Tensor, kind: Kind) -> bool:
    """Whether a dtype is of this kind. A bool is a number, but no integer and no float."""
    if kind == "float":
        return x.is_floating_point()
    if kind == "integer":
        return not (x.is_floating_point() or x.is_complex() or x.dtype == torch.bool)
    return kind == "any" or not x.is_complex()


def check_tensor(
    name: str, x: Any, kind: Kind = "number", like: tuple[str, Tensor] | None = None
) -> None:
    """Raise unless `x` is a dense tensor of this kind, on the device of `like` (name, tensor)."""
    if not isinstance(x, Tensor) or not fits_kind(x, kind):
        raise InputError(f"{name} must be {_WANTED[kind]}, got {description(x)}.")
    if x.layout != torch.strided:
        raise InputError(
            f"{name} must be a dense tensor, got the layout {x.layout}; pass {name}.to_dense()."
        )
    if like is not None and x.device != like[1].device:
        raise InputError(
            f"{name} is on {x.device} and {like[0]} on {like[1].device}; move them to one device."
        )


def check_like(
    name: str,
    x: Any,
    like: tuple[str, Tensor],
    kind: Kind = "number",
    fix: str = "they must be equal",
) -> None:
    """Raise unless `x` has the shape and the device of `like`, another argument with its name."""
    check_tensor(name, x, kind, like)
    if x.shape != like[1].shape:
        raise InputError(
            f"{name} has shape {tuple(x.shape)} but {like[0]} has {tuple(like[1].shape)}; {fix}."
        )


def is_number(value: Any) -> bool:
    """Whether `value` is a Python number that a float can hold; a bool is a flag, not a number."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    try:
        float(value)
    except OverflowError:
        return False
    return True


def check_number(
    name: str,
    value: Any,
    *,
    above: float | None = None,
    least: float | None = None,
    most: float | None = None,
    below: float | None = None,
    finite: bool = False,
    error: type[PolicyLossError] = InputError,
    hint: str = "",
) -> float:
    """`value` if it is a number within the bounds, not NaN, and finite if `finite`."""
    tail = f" {hint}" if hint else ""
    if not is_number(value):
        raise error(f"{name} must be a number, got {description(value)}.{tail}")
    rule = ""
    if math.isnan(value) or (finite and math.isinf(value)):
        rule = "finite"
    elif above is not None and not value > above:
        rule = f"> {above:g}"
    elif least is not None and not value >= least:
        rule = f">= {least:g}"
    elif most is not None and not value <= most:
        rule = f"<= {most:g}"
    elif below is not None and not value < below:
        rule = f"< {below:g}"
    if rule:
        raise error(f"{name} must be {rule}, got {value!r}.{tail}")
    return cast(float, value)


def check_integer(name: str, value: Any, least: int) -> int:
    """`value` if it is a Python integer of at least `least` that 64 bits can hold."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise InputError(f"{name} must be an integer, got {description(value)}.")
    if not least <= value < 2**63:
        raise InputError(
            f"{name} must be an integer >= {least} and below 2**63, got {description(value)}."
        )
    return value


def check_flag(name: str, value: Any) -> None:
    """Raise unless `value` is True or False."""
    if not isinstance(value, bool):
        raise InputError(f"{name} must be True or False, got {description(value)}.")


def check_group(name: str, group: Any) -> None:
    """Raise unless `group` is None, or a process group of an initialised `torch.distributed`."""
    if group is None or is_compiling():
        return
    if not (dist.is_available() and dist.is_initialized()):
        raise InputError(
            f"{name} needs torch.distributed, which is not initialised: call init_process_group, "
            "or omit it."
        )
    if not isinstance(group, dist.ProcessGroup):
        raise InputError(
            f"{name} must be a process group that this rank belongs to, got {description(group)}."
        )


def check_choice(
    name: str, value: Any, valid: Iterable[str | None], error: type[PolicyLossError] = InputError
) -> None:
    """Raise unless `value` is one of the words of `valid` (or None, where that is among them)."""
    words = list(valid)
    if not (value is None or isinstance(value, str)) or value not in words:
        raise error(unknown_name(name, value, map(str, words)))


def by_annotation(
    alike: Container[str] = (),
    floating: Container[str] = (),
    also: Callable[[dict[str, Any]], None] | None = None,
) -> Callable[[F], F]:
    """A decorator that checks every argument by its annotation before the function runs.

    `Tensor`: real numbers, on the device of the first tensor. `float` and `int`: one number, of
    Python or of an array library. `bool`: True or False. A union allows any of its types. Arguments
    with another annotation (`str`, `Any`, a class) are left to the function. A compiler traces the
    function without the checks.
    alike: names of arguments that must have one shape. floating: names of arguments that must be
    floating-point. also: a function of the arguments by name, for further checks.
    """

    def decorate(function: F) -> F:
        hints = {name: _types(hint) for name, hint in get_type_hints(function).items()}
        # A word, and an argument that may also have another type, are left to the function.
        rules = {
            name: types
            for name, types in hints.items()
            if name != "return" and types <= _WORDS.keys()
        }
        names = tuple(inspect.signature(function).parameters)

        @functools.wraps(function)
        def checked(*args: Any, **kwargs: Any) -> Any:
            if not is_compiling():
                arguments = dict(zip(names, args, strict=False)) | kwargs
                _check_call(arguments, rules, alike, floating)
                if also is not None:
                    also(arguments)
            return function(*args, **kwargs)

        return cast(F, checked)

    return decorate


def _check_call(
    arguments: dict[str, Any],
    rules: dict[str, frozenset[type]],
    alike: Container[str],
    floating: Container[str],
) -> None:
    first: tuple[str, Tensor] | None = None
    first_alike: tuple[str, Tensor] | None = None
    for name, value in arguments.items():
        if name in rules:
            _check_allowed(name, value, rules[name], first)
        if not isinstance(value, Tensor):
            continue
        first = first or (name, value)
        if name in floating:
            check_tensor(name, value, "float")
        if name in alike:
            first_alike = first_alike or (name, value)
            check_like(name, value, first_alike)


def _types(hint: Any) -> frozenset[type]:
    """The types that a hint allows: the members of a union, the types of a `Literal`'s values."""
    if get_origin(hint) is Literal:
        return frozenset(type(value) for value in get_args(hint))
    if isinstance(hint, UnionType) or get_origin(hint) is Union:
        return frozenset(t for part in get_args(hint) for t in _types(part))
    return frozenset({hint})


def _check_allowed(
    name: str, value: Any, allowed: frozenset[type], first: tuple[str, Tensor] | None
) -> None:
    if value is None and type(None) in allowed:
        return
    if Tensor in allowed and (isinstance(value, Tensor) or allowed <= {Tensor, type(None)}):
        check_tensor(name, value, like=first if isinstance(value, Tensor) and value.dim() else None)
        return
    if bool in allowed and isinstance(value, bool):
        return
    if (float in allowed or int in allowed) and _is_scalar(value):
        return
    words = [word for kind, word in _WORDS.items() if kind in allowed]
    raise InputError(f"{name} must be {' or '.join(words)}, got {description(value)}.")


def check_scalar(name: str, value: Any) -> None:
    """Raise unless `value` is one number, of Python or of an array library."""
    if not _is_scalar(value):
        raise InputError(f"{name} must be a number, got {description(value)}.")


def _is_scalar(value: Any) -> bool:
    """Whether `value` is one number, of Python or of an array library (a tensor of one element)."""
    if isinstance(value, Tensor):
        return value.numel() == 1 and not value.is_complex() and not value.is_meta
    return is_number(value) or (hasattr(value, "item") and is_number(value.item()))


_WORDS: dict[type, str] = {
    Tensor: "a tensor of real numbers",
    float: "a number",
    int: "an integer",
    bool: "True or False",
    type(None): "None",
}
