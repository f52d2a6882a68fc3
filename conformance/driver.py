"""Compares with every framework and release, two processes at a time, and reports."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from conformance.environments import (
    PEERS,
    ROOT,
    Peer,
    child_environment,
    ensure,
    ensure_release,
    interpreter,
)
from conformance.report import Program, Result

PROCESSES = 2
EVERY = 3  # at other releases than the pinned one, one case in so many
RESULTS = Path(__file__).resolve().parent / "results" / "conformance.json"
PROGRESS = "progress"  # the first word of a child's progress lines: "progress 120 4000"


class Board:
    """Shows the progress of the running processes: a line every few seconds, and one for each that
    ends.
    """

    def __init__(self, every: float = 20.0) -> None:
        self._running: dict[str, str] = {}
        self._lock = threading.Lock()
        self._start = self._last = time.monotonic()
        self._every = every

    def update(self, name: str, state: str) -> None:
        """Record the progress of `name`; show all running processes every few seconds."""
        with self._lock:
            self._running[name] = state
            if time.monotonic() - self._last > self._every:
                self._last = time.monotonic()
                self._say(" · ".join(f"{one} {how}" for one, how in self._running.items()))

    def finish(self, name: str, outcome: str) -> None:
        """Show that `name` ended."""
        with self._lock:
            self._running.pop(name, None)
            self._say(f"{name}: {outcome}")

    def _say(self, text: str) -> None:
        print(f"[{time.monotonic() - self._start:4.0f}s] {text}", flush=True)


def run_everything(
    peers: list[Peer], arguments: list[str], releases: list[str] | None = None
) -> list[Result]:
    """The result of every framework at every release (or at the given releases), in the order of
    the tables.
    """
    work = []
    for peer in peers:
        ensure(peer)
        for release in releases or peer.releases:
            work.append((peer, release, ensure_release(peer, release)))
    board = Board()
    with ThreadPoolExecutor(PROCESSES) as pool:
        return list(pool.map(lambda one: run_child(one[0], one[1], one[2], arguments, board), work))


def run_child(
    peer: Peer, release: str, path: Path | None, arguments: list[str], board: Board
) -> Result:
    """One process for one framework and release; raises with the end of its output if it has no
    result.
    """
    name = f"{peer.name} {release}"
    tail: list[str] = []
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "result.json"
        which = ["--peer", peer.name, "--release", release, "--json", str(out)]
        which += ["--every", str(EVERY)] if arguments[0] == "run" and release in peer.others else []
        command = [str(interpreter(peer)), "-m", "conformance", *arguments, *which]
        board.update(name, "starts")
        environment = child_environment(peer, release, path)
        stdout, stderr = subprocess.PIPE, subprocess.STDOUT
        with subprocess.Popen(
            command, cwd=ROOT, env=environment, text=True, stdout=stdout, stderr=stderr
        ) as child:
            for line in child.stdout or ():
                if line.startswith(PROGRESS):
                    _, done, total = line.split()
                    board.update(name, f"{done}/{total}")
                else:
                    tail = [*tail, line][-40:]
        if not out.is_file():
            board.finish(
                name, f"ended with status {child.returncode} and no result:\n{''.join(tail)}"
            )
            raise SystemExit(f"{name} came to no result; see above.")
        result: Result = json.loads(out.read_text())
    board.finish(name, outcome(result))
    return result


def run_programs(peers: list[Peer]) -> list[Program]:
    """Run the programs that compare more than functions: whole trainings, the frameworks' own
    tests, and the code on the pages.
    """
    board = Board()
    work = [(peer, [module]) for peer in peers for module in peer.programs]
    work += [(peer, ["conformance.upstream", "--peer", peer.name]) for peer in peers if peer.tests]
    work += [(peer, ["conformance.snippets", "--peer", peer.name]) for peer in peers]
    with ThreadPoolExecutor(PROCESSES) as pool:
        return list(pool.map(lambda one: run_program(one[0], one[1], board), work))


def run_program(peer: Peer, words: list[str], board: Board) -> Program:
    """One module run in the framework's environment; its exit status is the verdict."""
    name = " ".join(words)
    board.update(name, "runs")
    # The pages' code starts processes of the environments itself.
    python = sys.executable if words[0] == "conformance.snippets" else str(interpreter(peer))
    command = [python, "-m", *words]
    done = subprocess.run(
        command, cwd=ROOT, env=child_environment(), capture_output=True, text=True, check=False
    )
    board.finish(name, "passed" if done.returncode == 0 else "FAILED")
    return {
        "name": name,
        "status": done.returncode,
        "output": (done.stdout if done.returncode == 0 else done.stdout + done.stderr)[-6000:],
    }


def outcome(result: Result) -> str:
    """A result in one line."""
    if "recorded" in result:
        return f"{sum(map(len, result['recorded'].values()))} cases recorded"
    cases, failed = (sum(f[key] for f in result["functions"]) for key in ("cases", "failed"))
    return f"{cases} cases compared, {failed} failures"


def chosen(names: list[str] | None) -> list[Peer]:
    """The frameworks of these names; all for None."""
    unknown = set(names or ()) - set(PEERS)
    if unknown:
        sys.exit(f"no framework called {', '.join(sorted(unknown))}; there are {', '.join(PEERS)}.")
    return [PEERS[name] for name in names or PEERS]
