"""The plan "sparse" against "one_pass" and three bare matmuls, on peaked distributions.

    python -m benchmarks.sparse --device cuda --mode drawn|trained|step
        [--out benchmarks/results/sparse_cuda.json]

Modes: drawn, made-up policies with stated entropies; trained, the distributions of a model that is
trained here for `--seconds`; step, a whole training step. A file that exists keeps the results of
the other modes.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness import environment, table, write_json
from benchmarks.head import targets_table
from benchmarks.head_data import Shape
from benchmarks.head_targets import target
from benchmarks.sparse_cases import make_case, measure

# Median and mean of the entropies of the rows, and the target of each.
POLICIES = {(0.50, 1.56): 0.60, (0.23, 0.76): 0.50}
SHAPES = {"cuda": Shape(8, 2048, 151936, 4096), "cpu": Shape(4, 128, 16384, 1024)}
QUICK = Shape(2, 32, 2000, 32)
ONE_PASS, SPARSE = "one_pass", "sparse, eps 1e-3"


def cases_table(found: dict[str, Any]) -> str:
    """The rows of one batch."""
    lines = [["plan", "ms", "/ matmuls", "kernels", "GiB", "beyond", "entries", "dense", "errors"]]
    for r in found["rows"]:
        kernels = r["kernels_of_three_matmuls"]
        lines.append(
            [
                r["plan"],
                f"{r['ms']:.2f}",
                f"{r['of_three_matmuls']:.3f}",
                f"{kernels:.3f}" if kernels else "-",
                f"{r['extra_gib']:.2f}",
                f"{r['beyond_gib']:.2f}",
                f"{r.get('sparse_entries', 0):.1f}",
                f"{r.get('sparse_dense_rows', 1):.1%}",
                " ".join(f"{e:.1e}" for e in r["errors"]),
            ]
        )
    entropies = "entropies: median {median:.2f}, mean {mean:.2f}".format(**found["entropy"])
    return f"{found.get('name', '')} {entropies}\n{table(lines)}"


def targets(found: dict[str, Any], device: str) -> list[dict[str, Any]]:
    """T17 of a GPU, and C5 of a CPU."""
    drawn = [{r["plan"]: r for r in case["rows"]} for case in found.get("drawn", ())]
    if device == "cpu":
        ratios = [rows[SPARSE]["ms"] / rows[ONE_PASS]["ms"] for rows in drawn]
        return [target("C5", "time / one_pass", "<=", 0.6, max(ratios, default=None))]
    lines = []
    for ((median, mean), reach), rows in zip(POLICIES.items(), drawn, strict=False):
        about = f"median entropy {median}, mean {mean}: "
        ratio = rows[SPARSE]["of_three_matmuls"]
        lines.append(target("T17", f"{about}time / three bare matmuls", "<=", reach, ratio))
        beyond = rows[SPARSE]["beyond_gib"]
        what = f"{about}memory beyond window and d weight, GiB"
        lines.append(target("T17", what, "<=", 1.5, beyond))
    for case in found.get("trained", {}).get("cases", ()):
        rows = {r["plan"]: r for r in case["rows"]}
        ratio = rows[SPARSE]["ms"] / rows[ONE_PASS]["ms"]
        what = f"trained model, {case['name']}: time / one_pass"
        lines.append(target("T17", what, "<=", 0.8, ratio))
    if "step" in found:
        added = {r["head"]: 100 * r["added"] for r in found["step"]["rows"]}
        what = f"whole step of {found['step']['model']}, {found['step']['tokens']} tokens: added, %"
        lines.append(target("T17", what, "<=", 3, added[SPARSE]))
    return lines


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.sparse",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--device", choices=SHAPES, default="cpu")
    parser.add_argument("--mode", choices=("drawn", "trained", "step"), default="drawn")
    parser.add_argument("--quick", action="store_true", help="tiny sizes: does it run?")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=60, help="of training")
    parser.add_argument("--out", type=Path, help="where the JSON is written")
    options = parser.parse_args(argv)
    device, quick, rounds = options.device, options.quick, options.rounds
    found: dict[str, Any] = {}
    if options.out is not None and options.out.is_file():
        found = json.loads(options.out.read_text(encoding="utf-8"))
    found["environment"] = environment()
    if options.mode == "drawn":
        shape = QUICK if quick else SHAPES[device]
        found["drawn"] = [measure(make_case(shape, device, goal), rounds) for goal in POLICIES]
        print(*map(cases_table, found["drawn"]), sep="\n")
    elif options.mode == "trained":
        from benchmarks.sparse_trained import measure_trained

        found["trained"] = measure_trained(device, quick, options.seconds, rounds)
        print(*map(cases_table, found["trained"]["cases"]), sep="\n")
    else:
        from benchmarks.sparse_step import measure_step

        found["step"] = measure_step(device, quick, min(rounds, 3))
    found["targets"] = targets(found, device)
    print(targets_table(found["targets"]))
    if options.out is not None:
        write_json(options.out, found)


if __name__ == "__main__":
    main()
