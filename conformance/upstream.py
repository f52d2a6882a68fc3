"""Runs the frameworks' own unit tests with our functions in place of theirs.

`python -m conformance.upstream --peer verl`, in that framework's environment. The tests come from
its wheel. They run three times: unchanged; with the drop-ins in place; and once more for every
drop-in that a test reaches, with its results spoiled, which shows whether these tests check its
numbers at all.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import inspect
import io
import os
import sys
import sysconfig
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib import import_module, metadata
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from conformance import standins
from conformance.environments import PEERS, Peer
from policyloss.compat.hooks import swap

NOT_DROP_INS = (
    *("check_config", "install", "register", "uninstall"),
    *("install_head", "uninstall_head", "register_distillation"),
)
# Modules that a run leaves behind and the next one must import again. OpenRLHF's tests load its
# files under names of their own.
OF_THE_TESTS = ("tests", "_openrlhf_loss_test", "_openrlhf_kl_test")


@dataclass
class Reached:
    """Which tests called which drop-ins, and the drop-in whose results are spoiled now."""

    test: str = ""
    spoiled: str = ""
    tests: dict[str, set[str]] = field(default_factory=dict)

    def watch(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, with its calls recorded under `name`."""

        @functools.wraps(function)
        def watched(*args: Any, **kwargs: Any) -> Any:
            self.tests.setdefault(name, set()).add(self.test)
            result = function(*args, **kwargs)
            return spoil(result) if self.spoiled == name else result

        return watched


@dataclass
class Plugin:
    """Collects pytest's results: the outcome of each test, and the files that import a missing
    package.

    place: called when the tests are imported.
    """

    reached: Reached
    place: Callable[[], None]
    passed: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)
    unimported: set[str] = field(default_factory=set)

    def pytest_collectreport(self, report: Any) -> None:
        """A file was imported, or could not be."""
        if report.failed:
            self.unimported.add(report.nodeid)

    def pytest_collection_finish(self) -> None:
        """The modules of the tests are imported, and have bound the functions that they test."""
        self.place()

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """A test begins."""
        self.reached.test = nodeid

    def pytest_runtest_logreport(self, report: Any) -> None:
        """A part of a test ended: its set-up, its call, its end."""
        if report.failed:
            self.failed.add(report.nodeid)
        elif report.when == "call" and report.passed:
            self.passed.add(report.nodeid)


def spoil(value: Any) -> Any:
    """The same value with wrong numbers: a tensor, a number, or a container of them."""
    if isinstance(value, torch.Tensor):
        if value.dtype == torch.bool:
            return ~value
        return value * 1.5 + 0.25 if value.is_floating_point() else value + 1
    if isinstance(value, float):
        return value * 1.5 + 0.25
    if isinstance(value, dict):
        return {key: spoil(x) for key, x in value.items()}
    return type(value)(spoil(x) for x in value) if type(value) in (tuple, list) else value


def drop_ins(peer: Peer) -> dict[str, Any]:
    """The functions and classes that replace the framework's own."""
    package = import_module(f"policyloss.compat.{peer.name}")
    found = {name: getattr(package, name) for name in package.__all__ if name not in NOT_DROP_INS}
    return {
        name: x
        for name, x in found.items()
        if inspect.isfunction(x) or (inspect.isclass(x) and hasattr(x, "forward"))
    }


def watch_all(peer: Peer, reached: Reached) -> None:
    """Record every call of a drop-in, before they are put in place."""
    for name, ours in drop_ins(peer).items():
        if inspect.isclass(ours):
            ours.forward = reached.watch(name, ours.forward)  # type: ignore[attr-defined]
        else:
            swap(f"policyloss.compat.{peer.name}", [(ours, reached.watch(name, ours))])


def put_in_place(peer: Peer) -> Callable[[], None]:
    """Install the drop-ins; returns a function to call after the tests are imported."""
    package = import_module(f"policyloss.compat.{peer.name}")
    package.install()
    if peer.name != "openrlhf":
        return lambda: None
    modules = [import_module(f"openrlhf.models.{name}") for name in ("loss", "utils")]
    placed = {
        name: getattr(m, name) for m in modules for name in drop_ins(peer) if hasattr(m, name)
    }

    def place() -> None:
        for module in of_the_tests():
            for name, ours in placed.items():
                if hasattr(module, name):
                    setattr(module, name, ours)

    return place


def of_the_tests() -> Iterator[Any]:
    """The test modules, and the modules that they load themselves."""
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] in OF_THE_TESTS and module is not None:
            yield module


def run_tests(chosen: list[str], reached: Reached, place: Callable[[], None]) -> Plugin:
    """Run tests by pytest in this process, quietly; `chosen` are paths or the ids of tests."""
    import pytest

    for module in of_the_tests():
        del sys.modules[module.__name__]
    plugin = Plugin(reached, place)
    torch.manual_seed(0)
    root = tests_folder().parent
    # No configuration and no plugins of ours, no cache in the environment,
    # and no warning turned into an error.
    options = [
        "-q",
        "-c",
        os.devnull,
        "--rootdir",
        str(root),
        "-p",
        "no:cacheprovider",
        "-W",
        "ignore",
    ]
    options.append("--continue-on-collection-errors")
    here = Path.cwd()
    os.chdir(root)  # the ids of tests are paths from here
    try:
        alone = mock.patch.dict(os.environ, {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"})
        with alone, contextlib.redirect_stdout(io.StringIO()) as output:
            status = pytest.main([*options, *chosen], plugins=[plugin])
    finally:
        os.chdir(here)
    if status not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        raise SystemExit(f"pytest ended with {status!r}:\n{output.getvalue()[-3000:]}")
    return plugin


def tests_folder() -> Path:
    """The folder of the wheel's tests."""
    return Path(sysconfig.get_paths()["purelib"]) / "tests"


def report(peer: Peer) -> tuple[list[str], bool]:
    """The results of the tests, in lines, and whether they are as expected."""
    reached = Reached()
    paths = [str(tests_folder() / path) for path in peer.tests]
    theirs = run_tests(paths, reached, lambda: None)
    watch_all(peer, reached)
    place = put_in_place(peer)
    ours = run_tests(paths, reached, place)
    broken = sorted(theirs.passed - ours.passed)
    where = ", ".join(f"tests/{path}" for path in peer.tests)
    count = len(theirs.passed | theirs.failed)
    lines = [
        (
            f"{peer.name} {metadata.version(peer.name)}, {where}: {count} tests; "
            f"{len(theirs.passed)} pass with {peer.name}'s own functions, {len(ours.passed)} with "
            "ours in their place."
        ),
        *(
            f"Left out, because it imports a package that is not installed here: {path}"
            for path in sorted(theirs.unimported)
        ),
        *(f"FAILS WITH OURS: {test}" for test in broken),
    ]
    rows = [
        (name, len(tests), noticed(reached, name, place))
        for name, tests in sorted(reached.tests.items())
    ]
    of_all = set().union(*reached.tests.values())
    lines.append(
        f"{len(of_all)} of them reach {len(rows)} drop-ins. Tests that fail when the results of "
        "one drop-in are spoiled:"
    )
    width = max((len(name) for name, *_ in rows), default=0)
    lines += [f"  {name:<{width}}  {failing:>3} of {total}" for name, total, failing in rows]
    unreached = sorted(set(drop_ins(peer)) - set(reached.tests))
    lines.append(f"No test reaches: {', '.join(unreached) or 'none is left out'}.")
    return lines, not broken and any(failing for *_, failing in rows)


def noticed(reached: Reached, name: str, place: Callable[[], None]) -> int:
    """The number of tests that reach a drop-in and fail when its results are spoiled."""
    reached.spoiled = name
    try:
        return len(run_tests(sorted(reached.tests[name]), reached, place).failed)
    finally:
        reached.spoiled = ""


def main() -> int:
    """Print the report; 1 if a test fails with ours in place,
    or if no test fails when they are spoiled.
    """
    parser = argparse.ArgumentParser(prog="python -m conformance.upstream", description=__doc__)
    parser.add_argument(
        "--peer", required=True, choices=[name for name, peer in PEERS.items() if peer.tests]
    )
    peer = PEERS[parser.parse_args().peer]
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    standins.install(peer.name, peer.release)
    lines, right = report(peer)
    print("\n".join(lines))
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
