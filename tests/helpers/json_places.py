"""Every place in a JSON value, and copies with another value there: what fuzzing tests walk."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any


def leaves(data: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place in a JSON value, the inner ones too."""
    if path:
        yield path
    inner = (
        data.items()
        if isinstance(data, dict)
        else enumerate(data)
        if isinstance(data, list)
        else ()
    )
    for key, value in inner:
        yield from leaves(value, (*path, key))


def changed(data: Any, path: tuple[Any, ...], value: Any) -> Any:
    """A copy with another value at `path`; the word "missing" takes it away."""
    data = copy.deepcopy(data)
    place = data
    for key in path[:-1]:
        place = place[key]
    if value == "missing":
        del place[path[-1]]
    else:
        place[path[-1]] = value
    return data


def assert_all_handled(results: dict[str, str], least: int) -> None:
    """Each result is "", or describes how the case of that name was mishandled."""
    bad = {name: text for name, text in results.items() if text}
    print(f"{len(results)} faults injected, {len(results) - len(bad)} handled")
    assert not bad, f"{len(bad)} of {len(results)}: " + "\n".join(
        f"--- {name}\n{text[-700:]}" for name, text in list(bad.items())[:14]
    )
    assert len(results) >= least
