"""The sections of docs/performance.md about the plan "sparse", and why it misses its targets."""

from __future__ import annotations

from typing import Any

from docs.markdown import join, table

Run = dict[str, Any]
ONE_PASS, SPARSE = "one_pass", "sparse, eps 1e-3"
POLICIES = ("median entropy 0.5,", "median entropy 0.23,")
COLUMNS = [
    "plan",
    "time / three bare matmuls",
    "of it kernels",
    "rows that stay dense",
    "entries of a row",
    "memory",
    "distance of d hidden, d weight",
]


def sparse_section(run: Run, where: str, machine: str) -> str:
    """Made-up policies, a trained model and a whole step, as far as they were measured."""
    clock = "" if run["environment"]["gpu"] else " Times are processor time."
    about = f"{machine} (`python -m benchmarks.sparse`).{clock}"
    blocks = [f"## The plan `sparse` {where}", about]
    for case in run.get("drawn", ()):
        blocks += _case(case, "A made-up policy: one likely token in each row above a Zipf tail")
    trained = run.get("trained")
    if trained is not None:
        t = trained["training"]
        blocks.append(
            f"A model of {t['weights'] / 1e6:.0f} million weights, trained for "
            f"{t['seconds']:.0f} s on {t['text_tokens']:,} tokens of Python ({t['steps']} steps, "
            f"{t['tokens'] / t['text_tokens']:.1f} times through the text; the loss went from "
            f"{t['first_loss']:.1f} to {t['last_loss']:.2f}). Zeros fill its hidden states up to "
            "the larger hidden size, which changes no logit."
        )
        for case in trained["cases"]:
            blocks += _case(case, f"Its distributions, {case['name']}")
    step = run.get("step")
    if step is not None:
        rows = [
            [r["head"], f"{r['median_ms']:.0f} ms", f"{r['added']:+.1%}", _gib(r["peak_bytes"])]
            for r in step["rows"]
        ]
        blocks += [
            f"A whole step of the random {step['model']} model, {step['tokens']:,} tokens, with a "
            f"temperature of each token that makes it as sure as a policy ({_entropies(step)}). "
            f"The gradient of all weights differs by {step['gradient_error']:.1e}.",
            table(["head", "time", "head and loss add", "peak memory"], rows),
        ]
    return join(*blocks)


def _case(case: Run, about: str) -> list[str]:
    size = "{2:,} entries, hidden size {3:,}".format(*case["shape"])
    tokens = case["shape"][0] * case["shape"][1]
    rows = []
    for r in case["rows"]:
        kernels, drawn = r["kernels_of_three_matmuls"], "sparse_entries" in r
        rows.append(
            [
                f"`{r['plan']}`",
                f"{r['of_three_matmuls']:.2f}",
                f"{kernels:.2f}" if kernels else "–",
                f"{r['sparse_dense_rows']:.0%}" if drawn else "all",
                f"{r['sparse_entries']:.0f}" if drawn else "–",
                f"{r['extra_gib']:.2f} GiB",
                ", ".join(f"{e:.1e}" for e in r["errors"]) if drawn else "–",
            ]
        )
    return [f"{about}; {tokens:,} tokens, {size}; {_entropies(case)}:", table(COLUMNS, rows)]


def _entropies(found: Run) -> str:
    return "entropies: median {median:.2f}, mean {mean:.2f}".format(**found["entropy"])


def _gib(count: int | None) -> str:
    return "–" if count is None else f"{count / 2**30:.1f} GiB"


def learning_section(run: Run) -> str:
    """The built-in task with and without the plan."""
    rows = []
    for r in run["rows"]:
        changes = [
            f"{d['mean']:+.3f} ({d['low']:+.3f} to {d['high']:+.3f})"
            for d in r.get("difference", {}).values()
        ]
        drawn = "sparse_noise" in r
        rows.append(
            [
                r["arm"],
                f"{r['sparse_entries']:.2f}" if drawn else "all",
                f"{r['sparse_noise']:.1%}" if drawn else "–",
                f"{r['accuracy']:.3f}",
                changes[0] if changes else "",
                f"{r['late_reward']:.3f}",
                changes[1] if changes else "",
            ]
        )
    columns = ["head", "entries of a row", "added variance", "held-out accuracy", "difference"]
    return join(
        "## Training with the plan `sparse`",
        f"`policyloss train` on its built-in task with `--head fused` and `--head sparse`, "
        f"{run['rows'][0]['seeds']} seeds of {run['steps']} steps each (`python -m "
        "benchmarks.sparse_learning`). The vocabulary has 100 tokens, so eps must be far above "
        "the default of 1e-3 for the draw to matter; the added variance is a share of the squared "
        "norm of the rows of dlogits. Differences are from the run of the same seed with `--head "
        "fused`, with a bootstrap interval of 95 % over seeds. Accuracy is of held-out prompts "
        f"after the last step; it starts at {run['rows'][0]['start']:.3f}.",
        table([*columns, "reward, last 10 steps", "difference"], rows),
    )


# Why a target is missed ---------------------------------------------------------------------------


def explain_gpu(t: Run, runs: dict[str, Run]) -> str | None:
    """Of T17."""
    run = runs["sparse_cuda"]
    if "whole step" in t["what"]:
        added = {r["head"]: r["added"] for r in run["step"]["rows"]}
        return (
            f"The head and the loss add {added[ONE_PASS]:.1%} with `one_pass` and "
            f"{added[SPARSE]:.1%} with `sparse`. The logits must be computed in any case, which is "
            "a third of the head's matmuls."
        )
    if "trained model" in t["what"]:
        cases = {c["name"]: c for c in run["trained"]["cases"]}
        case = next(c for name, c in cases.items() if name in t["what"])
        return _remaining(case, "The policy is not sure enough.")
    for name, case in zip(POLICIES, run["drawn"], strict=True):
        if name in t["what"]:
            if "memory" not in t["what"]:
                return _remaining(case, "")
            weight = case["shape"][2] * case["shape"][3]
            return (
                f"{_rows(case)[SPARSE]['sparse_dense_rows']:.0%} of the rows are dense, more than "
                "the room for their gradients holds. They are multiplied in two parts, and the "
                f"gradient of the weight is summed in float32, which takes {4 * weight / 2**30:.1f}"
                f" GiB instead of {2 * weight / 2**30:.1f}."
            )
    return None


def _rows(case: Run) -> dict[str, Run]:
    return {r["plan"]: r for r in case["rows"]}


def _remaining(case: Run, why: str) -> str:
    r = _rows(case)[SPARSE]
    dense, kernels = r["sparse_dense_rows"], r["kernels_of_three_matmuls"]
    left = (1 + 2 * dense) / 3
    return (
        f"{why} {dense:.0%} of the rows are dense, so matmuls of {left:.2f} of three remain. The "
        f"kernels of the call take {kernels:.2f}: the rest are passes over the float32 logits, "
        "whose number does not depend on the hidden size. The other "
        f"{r['of_three_matmuls'] - kernels:.2f} is time in which the device waits for the host."
    ).strip()


def explain_cpu(_: Run, runs: dict[str, Run]) -> str | None:
    """Of C5."""
    texts = []
    for case in runs["sparse_cpu"]["drawn"]:
        rows = _rows(case)
        dense = rows[SPARSE]["sparse_dense_rows"]
        texts.append(
            f"{rows[SPARSE]['ms'] / rows[ONE_PASS]['ms']:.2f} with {dense:.0%} dense rows "
            f"({(1 + 2 * dense) / 3:.2f} of the matmuls remain)"
        )
    return (
        f"The ratios are {' and '.join(texts)}. A profile by processor time shows the rest: "
        "products of few dense rows run at 0.6 of the rate, because each reads the whole weight or "
        "writes its whole gradient; the choice of entries takes a tenth of the time of `one_pass`, "
        "and the sums of rows 3 %."
    )
