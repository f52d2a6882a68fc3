"""Many cases inside one test: pytest takes longer to start a test than most losses take."""

from __future__ import annotations

import functools
import inspect
import itertools
import traceback
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest

Case = tuple[str, dict[str, Any]]
only_first = False  # whether a walk ends at its first failure, as `pytest -x` does


def walked(
    names: str | Sequence[str],
    cases: Iterable[Any],
    ids: Callable[[Any], str] | Iterable[str] | None = None,
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """As `pytest.mark.parametrize`, but one test runs all cases, then fails with the name and the
    traceback of each case that failed. Fixtures are shared by the cases of a test.
    """
    arguments = [n.strip() for n in names.split(",")] if isinstance(names, str) else list(names)
    values = [case if len(arguments) > 1 else (case,) for case in cases]
    given = ids if ids is None or callable(ids) else list(ids)
    level: list[Case] = []
    for i, case in enumerate(values):
        name = given[i] if isinstance(given, list) else "-".join(map(given or _short, case))
        level.append((name, dict(zip(arguments, case, strict=True))))

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        body = getattr(test, "walked_body", test)
        levels = [level, *getattr(test, "walked_levels", ())]

        @functools.wraps(body)
        def walk(**fixtures: Any) -> None:
            _run(body, list(itertools.product(*reversed(levels))), fixtures)

        signature = inspect.signature(test)
        left = [p for name, p in signature.parameters.items() if name not in arguments]
        walk.__signature__ = signature.replace(parameters=left)  # type: ignore[attr-defined]
        walk.walked_body, walk.walked_levels = body, levels  # type: ignore[attr-defined]
        return walk

    return decorate


def in_shares(count: int) -> pytest.MarkDecorator:
    """Give the test `share`, a number below `count`: it takes every case whose number has this
    remainder. The slow tests take the shares after the first.
    """
    rest = [pytest.param(share, marks=pytest.mark.slow) for share in range(1, count)]
    return pytest.mark.parametrize("share", [0, *rest])


def _short(value: Any) -> str:
    return str(getattr(value, "__name__", value))[:60]


def _run(
    body: Callable[..., None], cases: list[tuple[Case, ...]], fixtures: dict[str, Any]
) -> None:
    """Run every case; a skip counts as a failure, because it would hide the cases behind it."""
    assert cases, "there is no case to walk"
    failures = []
    for case in cases:
        arguments = {name: value for _, part in case for name, value in part.items()}
        try:
            body(**arguments, **fixtures)
        except (Exception, pytest.fail.Exception, pytest.skip.Exception) as e:
            text = "".join(traceback.format_exception(type(e), e, e.__traceback__.tb_next))
            failures.append(f"[{'-'.join(name for name, _ in case)}]\n{text}")
            if only_first:
                break
    if failures:
        head = f"{len(failures)} of {len(cases)} cases failed"
        pytest.fail("\n".join([head, *failures]), pytrace=False)
