"""Why each missed target is missed, in the figures of the run itself.

An explanation is looked up by run and target, and reads its figures from the run. It is shown while
the target is missed; `unexplained` lists the misses without an explanation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from docs.markdown import join
from docs.performance_sparse import explain_cpu, explain_gpu

Run = dict[str, Any]
Runs = dict[str, Run]
# From a target and all runs to its explanation; None if the text does not fit the target. A figure
# that is missing in the run raises a KeyError.
Explain = Callable[[Run, Runs], str | None]

PARTS = ("head", "sparse", "divergence", "loss", "gae", "bits")
LOGITS, FORWARD = "from logits", "forward only"
IN_TURNS = "forward only, in turns with its floor"
COPY, OF_LOGITS, TRL = "copy of the logits", "policyloss, forward", "TRL pair, its Triton kernel"
THREE, ONE, OURS = "three bare matmuls", "one bare matmul", "policyloss, one pass"
MASKED = "policyloss, half masked, quarter at zero advantage"
LEVELS = {"five metrics": "policyloss, basic", "no metrics": "policyloss, no metrics"}
LIVE, COATI = "bare matmuls of the live rows", "coati's form"


def misses_section(runs: Runs) -> str:
    """A paragraph for each explanation, after the missed targets that it explains."""
    by_text: dict[str, list[str]] = {}
    for run, t, text in _explained(runs):
        bound = f"{'at most' if t['sense'] == '<=' else 'at least'} {t['reach']:g}"
        line = f"**{run}, {t['id']}, {t['what']}: {t['measured']:.3g}, should be {bound}.**"
        by_text.setdefault(text or "No explanation has been written yet.", []).append(line)
    if not by_text:
        return ""
    about = "The figures here come from the runs of the targets."
    paragraphs = (" ".join([*lines, text]) for text, lines in by_text.items())
    return join("## The misses, one by one", about, *paragraphs)


def unexplained(runs: Runs) -> list[str]:
    """The missed targets without an explanation, or with one that lacks a figure."""
    return [f"{run}, {t['id']}: {t['what']}" for run, t, text in _explained(runs) if text is None]


def targets_of(runs: Runs) -> list[tuple[str, Run]]:
    """All targets in the order of the page, each with the name of its run."""
    names = [f"{part}_{device}" for part in PARTS for device in ("cuda", "cpu")]
    return [(name, t) for name in names for t in runs.get(name, {}).get("targets", [])]


def title_of(run: str) -> str:
    """The name of a run as the page writes it: `head_cuda` is "head, GPU"."""
    part, device = run.rsplit("_", 1)
    return f"{part}, {device.replace('cuda', 'GPU').replace('cpu', 'CPU')}"


def _explained(runs: Runs) -> Iterator[tuple[str, Run, str | None]]:
    """The missed targets, each with the name of its run and its explanation, if there is one."""
    for name, t in targets_of(runs):
        if t["met"] is False:
            explain = EXPLANATIONS.get((name, t["id"]))
            try:
                text = None if explain is None else explain(t, runs)
            except KeyError:
                text = None
            yield title_of(name), t, text


# The head -----------------------------------------------------------------------------------------


def _forward_alone(t: Run, runs: Runs) -> str | None:
    if "time /" not in t["what"]:
        return None
    run = runs["head_cuda"]
    groups, shape = run["groups"], run["shape"]
    ours, bare = groups[FORWARD]["policyloss"], groups[FORWARD][ONE]
    logits = shape["sequences"] * shape["length"] * shape["vocabulary"]
    text = (
        f"The kernels of our call take {ours['kernel_ms']:.1f} ms, that of the bare matmul "
        f"{bare['kernel_ms']:.1f} ms, a ratio of {ours['kernel_ms'] / bare['kernel_ms']:.2f}. The "
        f"rest of our {ours['median_ms']:.1f} ms is the host's time before the first kernel and "
        f"between windows. The bare matmul writes bfloat16 logits, {2 * logits / 2**30:.1f} GiB; "
        f"ours are float32, {4 * logits / 2**30:.1f} GiB, and are read once more for their "
        "statistics, which is what makes the log-probabilities exact."
    )
    if IN_TURNS not in groups:
        return text
    ms = {name: x["median_ms"] for name, x in groups[IN_TURNS].items()}
    wide = ms[f"{ONE}, logits in float32"]
    return (
        f"{text} In turns with our call the bare matmul takes {ms[ONE]:.1f} ms, and "
        f"{wide:.1f} ms if its logits are float32; our call takes {ms['policyloss']:.1f} ms, "
        f"{ms['policyloss'] / wide:.2f} times that."
    )


def _from_logits(t: Run, runs: Runs) -> str | None:
    group = runs["head_cuda"]["groups"][LOGITS]
    copy, forward = group[COPY], group[OF_LOGITS]
    if "Triton kernel" in t["what"]:
        theirs = group[f"{TRL}, forward"]
        once = copy["median_ms"] / 2
        return (
            f"TRL's pair is {theirs['median_ms']:.2f} ms since it has a Triton kernel. Reading the "
            f"logits once at the speed of a copy takes {once:.2f} ms, so that no function that "
            f"reads them can be more than {theirs['median_ms'] / once:.2f} times faster. Kernel "
            f"against kernel ours is {theirs['kernel_ms'] / forward['kernel_ms']:.2f} times faster "
            f"({forward['kernel_ms']:.2f} ms against {theirs['kernel_ms']:.2f} ms)."
        )
    if "share of copy bandwidth" not in t["what"]:
        return None
    backward = "backward" in t["what"]
    ours = group["policyloss, backward in place"] if backward else forward
    # A copy reads and writes; a forward reads, a backward in place reads and writes.
    share = copy["kernel_ms"] / ours["kernel_ms"] / (1 if backward else 2)
    return (
        f"The kernel alone takes {ours['kernel_ms']:.2f} ms, which is {share:.2f} of the copy's "
        f"bandwidth. The other {ours['median_ms'] - ours['kernel_ms']:.2f} ms of the "
        f"{ours['median_ms']:.2f} ms are the host's, before the kernel starts on an idle device."
    )


def _head_on_a_cpu(t: Run, runs: Runs) -> str | None:
    groups = runs["head_cpu"]["groups"]
    if "chunked peer" in t["what"]:
        dense = groups["dense"]
        peers = {n: p["median_ms"] for n, p in dense.items() if p.get("chunked")}
        fastest = min(peers, key=lambda name: peers[name])
        bare, ours = dense[THREE]["median_ms"], dense[OURS]["median_ms"]
        return (
            f"The fastest is {fastest}, which takes {peers[fastest]:.0f} ms. The three bare "
            f"matmuls, without which nobody gets the gradients, take {bare:.0f} ms: they alone are "
            f"only {peers[fastest] / bare:.2f} times faster. Ours takes {ours:.0f} ms, and gives "
            "the entropy and all metrics besides."
        )
    if "live rows" in t["what"]:
        masked = groups["masked"]
        ours = masked[MASKED]["median_ms"]
        eager = masked[f"{MASKED.replace('policyloss', 'eager PyTorch')}, rows gathered"]
        text = (
            f"Our call takes {ours:.0f} ms; eager PyTorch, whose rows were gathered before the "
            f"clock started, takes {eager['median_ms']:.0f} ms for the same rows."
        )
        if LIVE not in masked:
            return text
        old, new = (masked[n]["median_ms"] for n in (LIVE, f"{LIVE}, d weight in new memory"))
        # The rate of any other product of the same rows follows from ours.
        return (
            f"{text} Bare products of exactly these rows reach {t['measured'] * ours / old:.2f} of "
            "the rate of the dense ones, because products of fewer rows are slower per row, and "
            f"{t['measured'] * ours / new:.2f} if the gradient of the weight goes to new memory, "
            "as that of every call must: the system clears each page of it first, which costs the "
            f"same for few rows as for many ({new - old:.0f} ms of {new:.0f} ms). Our call takes "
            f"{ours / new:.2f} times as long as these."
        )
    if "share of the matmul rate, dense" in t["what"]:
        dense = groups["dense"]
        return (
            f"The call takes {dense[OURS]['median_ms']:.0f} ms, the three bare matmuls "
            f"{dense[THREE]['median_ms']:.0f} ms in memory that is there already. Passes over the "
            "logits and the pages of a new gradient are the rest."
        )
    return None


# The loss -----------------------------------------------------------------------------------------


def _fused_loss(t: Run, runs: Runs) -> str | None:
    run = runs["loss_cuda"]
    times = {name: x["median_ms"] for name, x in run["times"].items()}
    compiled, direct = times["policyloss, compiled_loss"], times["policyloss, value_and_gradient"]
    few, many = run["scaling"][0], run["scaling"][-1]
    ms = [row["policyloss"] * row["tokens"] / 1e6 for row in (few, many)]
    text = (
        f"This is the host's time: a call of `policy_loss` took {ms[0]:.2f} ms for "
        f"{few['tokens']:.0e} tokens and {ms[1]:.2f} ms for {many['tokens']:.0e}. "
    )
    if "with backward()" in t["what"]:
        return text + (
            f"The same numbers without autograd, by `value_and_gradient`, take {direct:.2f} ms; "
            f"the other {compiled - direct:.2f} ms of {compiled:.2f} ms are the guards of "
            f"`torch.compile` and `backward()`. Uncompiled, `policy_loss` with `backward()` takes "
            f"{times['policyloss']:.2f} ms."
        )
    if "value_and_gradient" in t["what"]:
        return text + (
            f"`value_and_gradient` takes {direct:.2f} ms: the check of the arguments and the "
            "launch of two kernels."
        )
    return None


def _loss_within_torch_compile(t: Run, runs: Runs) -> str | None:
    if "torch.compile" not in t["what"]:
        return None
    times = {name: x["median_ms"] for name, x in runs["loss_cuda"]["times"].items()}
    compiled, theirs = times["policyloss, basic, torch.compile"], times["verl, torch.compile"]
    return (
        f"Under torch.compile our call takes {compiled:.2f} ms and verl's {theirs:.2f} ms; at this "
        "size both are the time that the host takes to enter the compiled function and its "
        "backward, and ours returns metrics that add up over ranks. As it is, without "
        f"torch.compile, our call takes {times['policyloss, basic']:.2f} ms, because "
        "`policy_loss` has kernels of its own on a GPU."
    )


def _eager_loss(t: Run, runs: Runs) -> str | None:
    run = runs["loss_cpu"]
    none = LEVELS["no metrics"]
    if "peak memory" in t["what"]:
        mb = {name: x / 1e6 for name, x in run["peak_extra_bytes"].items()}
        levels = f" It is {mb[none]:.1f} MB without any metric." if none in mb else ""
        return (
            f"The peak is {mb['policyloss']:.1f} MB, which the loss itself takes: the dual bound, "
            f"and the two slopes that are kept for the backward.{levels} coati's form "
            f"({mb[COATI]:.1f} MB) has no dual bound. Of those that compute the same loss, verl "
            f"holds {mb['verl']:.1f} MB and OpenRLHF {mb['openrlhf']:.1f} MB. `compiled_loss` "
            f"needs {mb['policyloss, compiled_loss']:.1f} MB."
        )
    if COATI not in t["what"]:
        return None
    ms = {name: x["median_ms"] for name, x in run["times"].items()}
    speed = {name: ms[COATI] / x for name, x in ms.items()}
    levels = "".join(f", {speed[n]:.2f} times with {how}" for how, n in LEVELS.items() if n in ms)
    return (
        "coati's form computes one metric and a smaller loss. Ours is "
        f"{speed['policyloss']:.2f} times as fast with all metrics{levels}; `compiled_loss`, which "
        f"has all metrics, is {speed['policyloss, compiled_loss']:.2f} times as fast. verl and "
        f"OpenRLHF, which compute the same loss as ours, are {speed['verl']:.2f} and "
        f"{speed['openrlhf']:.2f} times as fast."
    )


# The same bits ------------------------------------------------------------------------------------


def _same_bits(device: str) -> Explain:
    def explain(t: Run, runs: Runs) -> str | None:
        run = runs[f"bits_{device}"]
        case = run["cases"][t["what"].removesuffix(": exact / default")]
        times = {mode: x["median_ms"] for mode, x in case["times"].items()}
        rows = max(case["bits"]["default"].values())
        return (
            f"The call takes {times['default']:.1f} ms by default and {times['exact']:.1f} ms "
            f"within `exact()`. The difference, {times['exact'] - times['default']:.1f} ms, is "
            f"the cost of multiplying rows in tiles of {run['tile']} for any batch, and of summing "
            f"over {run['parts']} parts of the vocabulary in a fixed order. By default {rows} "
            "rows had other bits in another order or company; within `exact()` none had."
        )

    return explain


EXPLANATIONS: dict[tuple[str, str], Explain] = {
    ("head_cuda", "T6"): _forward_alone,
    ("head_cuda", "T7"): _from_logits,
    ("head_cpu", "C1"): _head_on_a_cpu,
    ("loss_cuda", "T8"): _fused_loss,
    ("loss_cuda", "T14"): _loss_within_torch_compile,
    ("loss_cpu", "C2"): _eager_loss,
    ("sparse_cuda", "T17"): explain_gpu,
    ("sparse_cpu", "C5"): explain_cpu,
    ("bits_cuda", "T15"): _same_bits("cuda"),
    ("bits_cpu", "T15"): _same_bits("cpu"),
}
