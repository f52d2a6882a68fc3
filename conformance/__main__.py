"""`python -m conformance`: everything, one table. `… run --peer verl`: one framework at one
release. `… replay`: one case again.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

from conformance import driver, one, record, report
from conformance.environments import HOME, PEERS, BuildError


def main(words: list[str] | None = None) -> int:
    """Run the command the words name; the exit status is 1 if anything differs."""
    words = sys.argv[1:] if words is None else words
    named = bool(words) and (words[0] in COMMANDS or words[0] in ("-h", "--help"))
    arguments = _parser().parse_args(words if named else ["all", *words])
    try:
        return COMMANDS[arguments.command](arguments)
    except BuildError as error:
        print(error, file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m conformance", description=__doc__)
    commands = parser.add_subparsers(dest="command")
    every = commands.add_parser("all", help="every framework and release (the default)")
    every.add_argument("--peer", action="append", help="only this framework (may be repeated)")
    every.add_argument("--release", action="append", help="only this release (may be repeated)")
    every.add_argument("--out", type=Path, help="where the results are written")
    run = commands.add_parser("run", help="one framework at one release")
    replay = commands.add_parser(
        "replay", help="one case again, as a failure describes it, both sides printed"
    )
    records = commands.add_parser(
        "record", help="write the cases that the tests replay without any framework"
    )
    records.add_argument("--peer", choices=PEERS)
    records.add_argument(
        "--release", help="only this release, for the process that gathers records"
    )
    records.add_argument(
        "--json", type=Path, help="write the records here, for the process that gathers them"
    )
    for command in (run, replay):
        command.add_argument("--peer", required=True, choices=PEERS)
        command.add_argument("--release", help="default: the pinned one")
        command.add_argument("--function", help="only functions whose name contains this")
    run.add_argument(
        "--every", type=int, default=1, help="of a function with many cases, run one in so many"
    )
    run.add_argument(
        "--json", type=Path, help="write the result here, for the process that gathers results"
    )
    for command in (every, run):
        command.add_argument("--seed", type=int, default=0, help="draws other batches")
    replay.add_argument(
        "--case",
        required=True,
        type=json.loads,
        help='JSON: {"seed": …, "kind": …, "dtype": …, "options": {…}}',
    )
    return parser


def _all(arguments: argparse.Namespace) -> int:
    peers = driver.chosen(arguments.peer)
    if arguments.release and len(peers) != 1:
        sys.exit("--release is of one framework: give --peer once.")
    results = driver.run_everything(
        peers, ["run", "--seed", str(arguments.seed)], arguments.release
    )
    programs = driver.run_programs(peers)
    # The committed results are those of a whole run with the default seed.
    whole = not (arguments.peer or arguments.release or arguments.seed)
    out = arguments.out or (driver.RESULTS if whole else HOME / "results.json")
    one.write_json(out, {"results": results, "programs": programs})
    print(f"wrote {out}\n")
    for program in programs:
        print(f"{program['name']}\n{program['output']}")
    status = _report(results, whole=True)
    failed = [program["name"] for program in programs if program["status"]]
    print("\n".join(f"FAILED: {name}" for name in failed))
    return 1 if failed else status


def _run(arguments: argparse.Namespace) -> int:
    peer = PEERS[arguments.peer]
    version = arguments.release or peer.release
    one.enter(peer, version)
    show = _progress if arguments.json else _quiet
    result = one.compare_all(
        peer, version, arguments.seed, arguments.function, show, arguments.every
    )
    if arguments.json:
        one.write_json(arguments.json, result)
        return 0
    return _report([result], whole=arguments.function is None)


def _replay(arguments: argparse.Namespace) -> int:
    peer = PEERS[arguments.peer]
    version = arguments.release or peer.release
    one.enter(peer, version)
    for function in one.applicable(peer, version, arguments.function):
        print(one.replay(function, arguments.case))
    return 0


def _record(arguments: argparse.Namespace) -> int:
    if arguments.json:
        peer = PEERS[arguments.peer]
        one.enter(peer, arguments.release)
        one.write_json(arguments.json, one.record_all(peer, arguments.release))
        return 0
    for peer in driver.chosen([arguments.peer] if arguments.peer else None):
        if peer.steps:
            merged: dict[str, list[record.Record]] = {}
            for result in driver.run_everything([peer], ["record"]):
                for name, found in result["recorded"].items():
                    merged.setdefault(name, []).extend(found)
                if "signatures" in result:
                    record.write_signatures(peer, result["signatures"])
            print(f"wrote {record.write(peer.name, merged)}")
    return 0


def _report(results: list[report.Result], whole: bool) -> int:
    print(report.table(results))
    if listed := report.defects(results):
        print(f"\nPeer defects, listed and not compared:\n{listed}")
    wrong = report.problems(results, whole)
    print(
        "\n"
        + (
            "\n".join(["FAILED", *wrong])
            if wrong
            else "every compared case is within 1e-12 (float64) and 1e-6 (float32)"
        )
    )
    return 1 if wrong else 0


_last_shown = 0.0


def _progress(done: int, total: int) -> None:
    global _last_shown
    if done == total or time.monotonic() - _last_shown > 1:
        _last_shown = time.monotonic()
        print(driver.PROGRESS, done, total, flush=True)


def _quiet(done: int, total: int) -> None:
    """Show no progress: the table comes soon."""


COMMANDS = {"all": _all, "run": _run, "replay": _replay, "record": _record}

if __name__ == "__main__":
    sys.exit(main())
