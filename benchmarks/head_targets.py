"""The targets of the head, each with one number of the run and its limit."""

from __future__ import annotations

from typing import Any

from benchmarks import head_logits
from benchmarks.head_providers import (
    DENSE,
    FORWARD,
    IN_TURNS,
    MASKED,
    ONE,
    OURS,
    QUARTER,
    SHARED,
    THREE,
    TREE,
    UNROLLED,
)

GIB, MIB = 2**30, 2**20
Groups = dict[str, dict[str, dict[str, Any]]]


def target(
    name: str,
    what: str,
    sense: str,
    reach: float,
    measured: float | None,
    stretch: float | None = None,
) -> dict[str, Any]:
    """One line; `measured` None: a provider was not run or not admitted."""

    def holds(bound: float | None) -> bool | None:
        if measured is None or bound is None:
            return None
        return measured <= bound if sense == "<=" else measured >= bound

    return {
        "id": name,
        "what": what,
        "sense": sense,
        "reach": reach,
        "stretch": stretch,
        "measured": measured,
        "met": holds(reach),
        "stretch_met": holds(stretch),
    }


class Figures:
    """Looks figures up; a missing figure is None, and so is a number computed from it."""

    def __init__(self, groups: Groups) -> None:
        self.groups = groups

    def of(self, group: str, name: str, what: str = "median_ms") -> float | None:
        """One figure of one provider."""
        return self.groups.get(group, {}).get(name, {}).get(what)

    def ratio(self, group: str, above: str, below: str, what: str = "median_ms") -> float | None:
        """One provider's figure over another's, in the same group and so in the same loop."""
        a, b = self.of(group, above, what), self.of(group, below, what)
        return a / b if a is not None and b else None

    def size(self, group: str, name: str, unit: int) -> float | None:
        """Memory beyond inputs and outputs."""
        found = self.of(group, name, "extra_bytes")
        return None if found is None else found / unit

    def errors(self, name: str) -> float | None:
        """The largest error of this kind over all providers of ours."""
        ours = [
            p["errors"][name]
            for group in self.groups.values()
            for p in group.values()
            if p["kind"] == "ours" and name in p["errors"]
        ]
        return max(ours, default=None)


def cuda_targets(groups: Groups) -> list[dict[str, Any]]:
    """T1 to T7 and T10."""
    f = Figures(groups)
    three = f"time / {THREE}"
    long = [
        f.ratio(DENSE, n, OURS)
        for n in ("policyloss, GSPO", "policyloss, GSPO, two long sequences")
    ]
    same = [p["same_bits"] for group in groups.values() for p in group.values() if "same_bits" in p]
    masked = f"policyloss, {QUARTER}"
    return [
        target("T1", three, "<=", 1.12, f.ratio(DENSE, OURS, THREE), 1.05),
        target("T1", "extra memory, GiB", "<=", 5.4, f.size(DENSE, OURS, GIB)),
        target("T1", "times faster than Liger", ">=", 8, f.ratio(DENSE, "Liger GRPO", OURS)),
        target(
            "T1",
            "times faster than verl's Triton head",
            ">=",
            1.6,
            f.ratio(DENSE, "verl, Triton", OURS),
        ),
        target(
            "T1",
            "times faster than cut-cross-entropy",
            ">=",
            1.6,
            f.ratio(DENSE, "cut-cross-entropy", OURS),
        ),
        target(
            "T1",
            "times faster than eager PyTorch",
            ">=",
            1.1,
            f.ratio(DENSE, "eager PyTorch", OURS),
        ),
        target(
            "T1",
            "extra memory / eager PyTorch's",
            "<=",
            0.2,
            f.ratio(DENSE, OURS, "eager PyTorch", "extra_bytes"),
        ),
        target(
            "T2",
            "half masked, a quarter of the sequences at zero advantage: time / dense",
            "<=",
            0.46,
            f.ratio(MASKED, masked, OURS),
            0.43,
        ),
        target("T3", "GSPO: time / PPO", "<=", 1.05, _worst(long), 1.0),
        target(
            "T4",
            "with an entropy bonus: time / without",
            "<=",
            1.05,
            f.ratio(DENSE, "policyloss, entropy bonus", OURS),
        ),
        target(
            "T5",
            "least memory: extra memory, GiB",
            "<=",
            0.8,
            f.size(DENSE, "policyloss, recompute", GIB),
            0.5,
        ),
        target(
            "T5",
            "least memory: time / one pass",
            "<=",
            1.45,
            f.ratio(DENSE, "policyloss, recompute", OURS),
        ),
        target(
            "T6",
            f"forward only: time / {ONE}",
            "<=",
            1.10,
            f.ratio(IN_TURNS, "policyloss", ONE),
            1.03,
        ),
        target(
            "T6", "forward only: extra memory, GiB", "<=", 1.2, f.size(FORWARD, "policyloss", GIB)
        ),
        *_logits_targets(f),
        _tree(f),
        target("T10", "log-prob error (RMS)", "<=", 2e-5, f.errors("logp")),
        target("T10", "d hidden, relative error", "<=", 3e-3, f.errors("d_hidden")),
        target("T10", "d weight, relative error", "<=", 3e-3, f.errors("d_weight")),
        target(
            "T10",
            "share of our providers with the same bits in two runs",
            ">=",
            1,
            sum(same) / len(same) if same else None,
        ),
    ]


def _worst(ratios: list[float | None]) -> float | None:
    found = [x for x in ratios if x is not None]
    return max(found) if len(found) == len(ratios) else None


def _logits_targets(f: Figures) -> list[dict[str, Any]]:
    group, share = head_logits.GROUP, "share_of_copy_bandwidth"
    torch_pair = f.ratio(group, head_logits.TRL_TORCH, head_logits.FORWARD)
    kernel_pair = f.ratio(group, head_logits.TRL_KERNEL, head_logits.FORWARD)
    return [
        target(
            "T7",
            "from logits, forward: share of copy bandwidth",
            ">=",
            0.85,
            f.of(group, head_logits.FORWARD, share),
            0.94,
        ),
        target(
            "T7",
            "from logits, backward in place: share of copy bandwidth",
            ">=",
            0.80,
            f.of(group, head_logits.BACKWARD, share),
            0.94,
        ),
        target("T7", "times faster than TRL's pair in plain torch", ">=", 5, torch_pair),
        target("T7", "times faster than TRL's pair with its Triton kernel", ">=", 5, kernel_pair),
    ]


def _tree(f: Figures) -> dict[str, Any]:
    """Of 8 sequences that share half of their tokens, 4.5 of 8 tokens are distinct: 0.5625."""
    what = "tree of 8 branches that share half of their tokens: time / unrolled"
    return target("T18", what, "<=", 0.6, f.ratio(TREE, SHARED, UNROLLED))


def cpu_targets(groups: Groups, live: float) -> list[dict[str, Any]]:
    """C1; `live` is the share of the work of three matmuls that the masked case needs."""
    f = Figures(groups)
    rate = f.ratio(DENSE, THREE, OURS)
    masked = f.ratio(MASKED, THREE, f"policyloss, {QUARTER}")
    chunked = [name for name, p in groups.get(DENSE, {}).items() if p.get("chunked")]
    slowest = min(
        (r for name in chunked if (r := f.ratio(DENSE, name, OURS)) is not None), default=None
    )
    return [
        target("C1", "share of the matmul rate, dense", ">=", 0.85, rate),
        target(
            "C1",
            f"share of the matmul rate on live rows, {QUARTER}",
            ">=",
            0.85,
            None if masked is None else masked * live,
        ),
        target("C1", "extra memory, MiB", "<=", 64, f.size(DENSE, OURS, MIB)),
        target("C1", "times faster than the fastest chunked peer", ">=", 1.25, slowest),
        _tree(f),
    ]
