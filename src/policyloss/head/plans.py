"""Plans: the order of the head's matmuls, the memory they use, and the choice of a plan.

Legend: N rows that must be computed, of which N_g have a gradient; V vocabulary entries, D hidden
size. One unit of matmul is 2·N·V·D floating-point operations.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from policyloss.arguments import check_integer, check_number
from policyloss.errors import InputError, unknown_name
from policyloss.head.backward import (
    BackwardInputs,
    GradientSums,
    GradientTypes,
    HeadGradients,
    gradients_by_columns,
    gradients_from_stash,
    gradients_in_parts,
)
from policyloss.head.head import Head
from policyloss.head.matmul import CPU_BYTES, WIDE_BYTES
from policyloss.head.softmax_rows import explain_kernels
from policyloss.head.sparse import SparseSums, gradients_by_sampling
from policyloss.head.teacher.comparison import Comparison

# Rows of logits held at a time. On a GPU larger windows mean fewer passes over the accumulated
# weight gradient; beyond 4096 there is little left to gain. The forward alone has no such passes,
# and the least-memory plan wants them small.
GPU_ROWS, GPU_FORWARD_ROWS, GPU_LEAST_ROWS = 4096, 2048, 768
# Where the gradients of all logits fit into so many bytes, in half precision, they are gathered:
# the weight's gradient is then one product, and needs no float32 sum. Windows of logits may be
# smaller, but still take the device longer than the host.
GATHER_BYTES, GATHER_ROWS = 5 << 30, 3072
# Of the gradients of the rows that "sparse" multiplies completely, in half precision. While they
# wait, the gradient of a large weight, which takes 1 GiB, is not there yet.
SPARSE_BYTES = 18 << 27
GPU_COLUMN_BYTES = 224 << 20  # of logits in the backward of recompute, all rows by some columns
LEAST_ROWS = 128
# The share of free memory that a plan may count on; the rest is the caller's and the allocator's.
SHARE, STASH_SHARE = 0.8, 0.25
CHOSEN = "chosen by the caller"

BackwardRoutine = Callable[[BackwardInputs], HeadGradients]


class PlanKind(NamedTuple):
    """The plans of one name, and the routines that compute their gradient.

    sums: whether the forward of `linear_policy_loss` adds up the gradients of windows
    (`Plan.start_sums`). backward, exact: the routine of a backward, and the one within `exact()`.
    """

    name: str
    sums: bool
    backward: BackwardRoutine | None
    exact: BackwardRoutine | None


ONE_PASS = PlanKind("one_pass", True, None, None)
SPARSE = PlanKind("sparse", True, gradients_by_sampling, None)
RECOMPUTE = PlanKind("recompute", False, gradients_by_columns, gradients_in_parts)
STASH = PlanKind("stash", False, gradients_from_stash, None)
# Computes no gradient, unless the caller passes it to a call that needs one.
FORWARD = PlanKind("forward", True, gradients_by_columns, gradients_in_parts)
KINDS = {kind.name: kind for kind in (ONE_PASS, SPARSE, RECOMPUTE, STASH, FORWARD)}


@dataclass(frozen=True)
class Plan:
    """How a function such as `linear_policy_loss` computes the LM head and its gradient.

    `explain_plan` returns the one that the library would choose; pass it as `plan=`, with other
    `rows` or `columns` if you like (`dataclasses.replace`).

    name: "one_pass" computes the gradient in the forward, window by window (3 matmuls); "recompute"
    keeps nothing and computes the logits again in the backward (4); "stash" keeps the probabilities
    in the dtype of `weight` (3); "forward" has no backward (1); "sparse" keeps a few entries of
    each row and makes an unbiased estimate of the gradient from them (see `eps` and `seed`): one
    matmul, and two more for the rows with too many kept entries.
    rows: rows of logits in one window, at least 1; for "sparse", 0 lets the library choose.
    columns: the number of vocabulary entries that the backward of "recompute" handles at a time, at
    least 1 there. gathered: the number of rows of the logits' gradient that "one_pass" and
    "sparse" collect, in half precision, for one matmul; 0: one matmul per window. eps, seed: for
    "sparse". An entry with a probability of at least eps is kept; a smaller p becomes eps with
    probability p/eps, else 0. The draw depends on the seed and on the token.
    The library sets the rest. tokens: the number of rows (tokens); computed: how many of them have
    computed logits; with_gradient: how many have a gradient. matmuls: an upper bound, in units of
    one matmul of `tokens`·V·D, including those of a teacher. extra_bytes: an upper estimate of the
    memory beyond inputs and gradients. reason: why this plan. kernels: the code used for rows of
    logits.
    """

    name: str
    rows: int = 0
    columns: int = 0
    gathered: int = 0
    eps: float = 1e-3
    seed: int = 0
    tokens: int = 0
    computed: int = 0
    with_gradient: int = 0
    matmuls: float = 0.0
    extra_bytes: int = 0
    reason: str = ""
    kernels: str = ""

    @property
    def kind(self) -> PlanKind:
        """The `PlanKind` of this name, with its backward routines."""
        return KINDS[self.name]

    def start_sums(self, head: Head, wanted: GradientTypes, all_gathered: bool) -> GradientSums:
        """New accumulators, to which each window adds its gradients."""
        if self.kind is SPARSE:
            return SparseSums(head, wanted, self.gathered, self)
        return GradientSums(head, wanted, self.gathered, all_gathered)

    def __str__(self) -> str:
        windows = -(-self.computed // self.rows) if self.rows else 0
        rows = f"the gradients of {self.gathered} rows of logits"
        kept = f"; {rows} are kept and multiplied together" if self.gathered else ""
        return (
            f"{self.name}: {self.reason}\n"
            f"  {self.tokens} tokens, {self.computed} computed, "
            f"{self.with_gradient} with gradient\n"
            f"  {windows} window(s) of at most {self.rows} rows; "
            f"{self.matmuls:.2f} matmuls of tokens x vocabulary x hidden{kept}\n"
            f"  about {self.extra_bytes / 2**20:.0f} MiB beyond inputs and gradients"
            + (f"\n  rows of logits by {self.kernels}" if self.kernels else "")
        )


class Work(NamedTuple):
    """The work of a call: the gradients it needs, its rows, and the teacher of the rows.

    tokens, computed, with_gradient: how many rows the call has, computes and differentiates. logp:
    whether it returns the log-probabilities. longest: the number of rows of the longest sequence
    that a window must hold.
    """

    wanted: GradientTypes
    tokens: int
    computed: int
    with_gradient: int
    comparison: Comparison | None
    logp: bool = True
    longest: int = 1

    @property
    def weight_gradient(self) -> bool:
        """Whether weight or bias get a gradient."""
        return self.wanted.weight is not None or self.wanted.bias is not None

    @property
    def any_gradient(self) -> bool:
        """Whether there is a backward."""
        return self.wanted.hidden is not None or self.weight_gradient

    @property
    def compares_logits(self) -> bool:
        """Whether a window holds a teacher's logits too."""
        return self.comparison is not None and self.comparison.known is None


def free_bytes(like: Tensor) -> int:
    """Free memory on the device of `like`, the allocator's unused blocks included."""
    if like.device.type == "cuda":
        device = like.device
        # The flat form takes half a millisecond.
        memory = torch.cuda.memory.memory_stats_as_nested_dict(device)
        free = torch.cuda.mem_get_info(device)[0]
        if not memory:
            return free
        reserved, allocated = (memory[f"{kind}_bytes"] for kind in ("reserved", "allocated"))
        return free + int(reserved["all"]["current"] - allocated["all"]["current"])
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):  # not known on every system
        return 1 << 33


def logprob_plan(head: Head, work: Work, plan: str | Plan) -> Plan:
    """The plan of `linear_logprobs`."""
    kind = _kind_of(plan, (RECOMPUTE, STASH, SPARSE))
    why = "the loss on logp is not known here"
    return _plan_without_choice(head, work, plan, kind) or _stash_or_recompute(head, work, why)


def loss_plan(head: Head, work: Work, plan: str | Plan, reach: str, why: str) -> Plan:
    """The plan of `linear_policy_loss`. reach: the tokens that a token's loss depends on, "token",
    "sequence" or "batch"; why: the reason for "batch", for messages.
    """
    kind = _kind_of(plan, (ONE_PASS, RECOMPUTE, STASH, SPARSE))
    if kind is ONE_PASS and reach == "batch":
        raise InputError(
            f"plan='one_pass' cannot run this loss: {why}. Use plan='auto', 'recompute' or 'stash'."
        )
    sequences = kind in (ONE_PASS, SPARSE) and reach == "sequence"
    if isinstance(plan, Plan) and sequences and 0 < plan.rows < work.longest:
        raise InputError(
            f"plan with rows={plan.rows} cannot run this loss: a window must hold whole sequences, "
            f"and one has {work.longest} tokens."
        )
    only = _plan_without_choice(head, work, plan, kind, reach)
    if only is not None:
        return only
    if reach == "batch":
        return _stash_or_recompute(head, work, why)
    return _one_pass(head, work, reach, forced=kind is ONE_PASS)


def _kind_of(plan: str | Plan, valid: tuple[PlanKind, ...]) -> PlanKind | None:
    """The kind of `plan`, None for "auto"; an error unless it is one of `valid`."""
    name = plan.name if isinstance(plan, Plan) else plan
    kind = KINDS.get(name) if isinstance(name, str) else None
    # Only the library chooses FORWARD, and a plan that it chose may be passed again.
    other = kind is FORWARD if isinstance(plan, Plan) else name == "auto"
    if kind in valid or other:
        return kind
    names = ["auto", *(kind.name for kind in valid)]
    if not isinstance(name, str):
        raise InputError(
            f"plan must be a name ({', '.join(map(repr, names))}) or a Plan, got "
            f"{type(plan).__name__}."
        )
    early = " linear_logprobs cannot use the gradient early: the loss is yours."
    message = unknown_name("plan", name, names)
    raise InputError(message + early if kind is ONE_PASS else message)


def _plan_without_choice(
    head: Head, work: Work, plan: str | Plan, kind: PlanKind | None, reach: str = "token"
) -> Plan | None:
    """The plan if the caller has chosen one or nothing needs a gradient; else None."""
    if kind is SPARSE and work.any_gradient:
        chosen = plan if isinstance(plan, Plan) else Plan(SPARSE.name)
        return _sparse(head, work, chosen, reach)
    if isinstance(plan, Plan) and kind is not SPARSE:
        return _complete_plan(head, work, plan)
    if not work.any_gradient:
        rows, reason = _rows(head, work, GPU_FORWARD_ROWS), "nothing requires a gradient"
        return _add_figures(head, work, Plan(FORWARD.name, rows, reason=reason))
    if kind is STASH:
        return _stash(head, work, CHOSEN)
    return _recompute(head, work, CHOSEN) if kind is RECOMPUTE else None


def _one_pass(head: Head, work: Work, reach: str, forced: bool) -> Plan:
    least = max(work.longest, LEAST_ROWS) if reach == "sequence" else LEAST_ROWS
    rows = _rows(head, work, GPU_ROWS)
    if reach == "sequence":
        rows = max(rows, work.longest)
    budget = SHARE * _free(head)
    # Gather the gradients of all rows, if they are in half precision and fit. float16 is not
    # gathered, because it is scaled window by window.
    n, size = work.with_gradient, head.weight.element_size()
    fit = min(GATHER_BYTES, STASH_SHARE * budget) // max(size * head.vocabulary.largest, 1)
    half = size < head.dtype.itemsize and head.hidden.dtype != torch.float16
    gathered = n if half and n <= fit else 0
    if gathered:
        rows = max(_rows(head, work, GATHER_ROWS), least)
    while rows > least and _one_pass_bytes(head, work, rows, gathered) > budget:
        rows = max(least, rows // 2)
    need = _one_pass_bytes(head, work, rows, gathered)
    if need > budget and not forced:
        window = f"a window of {rows} rows"
        if reach == "sequence":
            window = f"a window that holds the longest sequence, {rows} rows,"
        why = f"{window} and the sums take {need / 2**30:.1f} GiB, more than is free"
        return _recompute(head, work, why)
    known = "each token's gradient depends on its own numbers"
    if reach == "sequence":
        known = "windows hold whole sequences"
    reason = f"{known}, so it is known as soon as its logits are"
    return _add_figures(head, work, Plan(ONE_PASS.name, rows, 0, gathered, reason=reason))


def _sparse(head: Head, work: Work, plan: Plan, reach: str) -> Plan:
    """Check the caller's plan "sparse", and fill in its windows and the figures of this call."""
    check_number("plan.eps", plan.eps, above=0, below=1)
    check_integer("plan.seed", plan.seed, least=0)
    check_integer("plan.rows", plan.rows, least=0)
    if head.tiles is not None:
        raise InputError(
            "plan='sparse' draws the entries of a gradient, so its bits are not those of the other "
            "plans; within exact() use another plan."
        )
    if work.comparison is not None:
        raise InputError(
            "plan='sparse' does not take a teacher: the gradient of a divergence is not as sparse "
            "as the policy's. Use plan='auto'."
        )
    rows = plan.rows or _rows(head, work, GPU_ROWS)
    if reach == "sequence":
        rows = max(rows, work.longest)
    size = head.weight.element_size()
    half = size < head.dtype.itemsize and head.hidden.dtype != torch.float16
    fit = SPARSE_BYTES // max(size * head.vocabulary.largest, 1)
    gathered = min(max(fit, rows), work.with_gradient) if half else 0
    reason = f"{CHOSEN}; entries with p < {plan.eps:g} are drawn; the matmuls if no row is peaked"
    return _add_figures(head, work, replace(plan, rows=rows, gathered=gathered, reason=reason))


def _stash_or_recompute(head: Head, work: Work, why: str) -> Plan:
    if head.hidden.device.type != "cpu" and head.softcap is None and head.tiles is None:
        stash = _stash(head, work, f"{why}; the probabilities fit into memory")
        if stash.extra_bytes <= STASH_SHARE * _free(head):
            return stash
    return _recompute(head, work, why)


def _recompute(head: Head, work: Work, reason: str) -> Plan:
    rows = _rows(head, work, GPU_LEAST_ROWS)
    return _add_figures(head, work, Plan(RECOMPUTE.name, rows, _columns(head, work), reason=reason))


def _columns(head: Head, work: Work) -> int:
    budget = CPU_BYTES if head.hidden.device.type == "cpu" else GPU_COLUMN_BYTES
    columns = budget // (_logit_bytes(head, work) * max(work.with_gradient, 1))
    return min(max(columns // 128 * 128, 128), max(head.weight.shape[0], 1))


def _check_stash(head: Head) -> None:
    """Raise if the gradient of this head cannot be computed from kept probabilities."""
    if head.softcap is not None:
        raise InputError(
            "plan='stash' keeps probabilities, from which a softcap's slope is not known; use "
            "plan='recompute'."
        )
    if head.tiles is not None:
        raise InputError(
            "plan='stash' keeps rounded probabilities, so its gradient differs in some bits from "
            "the other plans; within exact() use plan='recompute'."
        )


def _stash(head: Head, work: Work, reason: str) -> Plan:
    _check_stash(head)
    # The backward needs more room than windows of both models' logits do.
    rows = _rows(head, work, GPU_FORWARD_ROWS if work.compares_logits else GPU_LEAST_ROWS)
    return _add_figures(head, work, Plan(STASH.name, rows, _columns(head, work), reason=reason))


def _complete_plan(head: Head, work: Work, plan: Plan) -> Plan:
    """Check the caller's plan, and fill in the figures of this call."""
    if plan.rows < 1 or plan.columns < 0:
        raise InputError(
            f"plan has rows={plan.rows}, columns={plan.columns}; give at least one row."
        )
    too_few = plan.gathered < min(plan.rows, work.with_gradient)
    half = head.hidden.dtype == torch.float16
    if plan.gathered and (plan.kind is not ONE_PASS or half or too_few):
        raise InputError(
            f"plan has gathered={plan.gathered} with name={plan.name!r}, rows={plan.rows} and "
            f"{head.hidden.dtype} hidden states; only one_pass gathers, at least as many rows as "
            "a window holds, and not in float16, which is scaled window by window. Use "
            "gathered=0."
        )
    if plan.kind is STASH:
        _check_stash(head)
    columns = plan.columns or _columns(head, work)
    bare = Plan(plan.name, plan.rows, columns, plan.gathered, reason=CHOSEN)
    return _add_figures(head, work, bare)


def _free(head: Head) -> int:
    """Free memory; with a vocabulary over several ranks, that of the rank with the least.

    All ranks must choose the same plan.
    """
    return free_bytes(head.hidden) if head.vocabulary.free is None else head.vocabulary.free


def _logit_bytes(head: Head, work: Work) -> int:
    """Bytes of a logit; of two logits where a window holds the teacher's too."""
    return head.dtype.itemsize * (1 + work.compares_logits)


def _rows(head: Head, work: Work, most: int) -> int:
    if head.hidden.device.type == "cpu":
        fit = CPU_BYTES // (_logit_bytes(head, work) * max(head.vocabulary.largest, 1))
        most = max(fit // 16 * 16, 16)
    else:
        most //= 1 + work.compares_logits
    # Tiles that are not full are multiplied as if they were.
    return most if head.tiles is None else max(most // head.tiles.rows, 1) * head.tiles.rows


def _window_bytes(head: Head, work: Work, rows: int) -> int:
    rows = min(rows, max(work.computed, 1))
    rows = rows if head.tiles is None else head.tiles.full(rows)
    of_row = head.vocabulary.largest * _logit_bytes(head, work)
    if work.computed != work.tokens:  # some hidden states, gathered
        of_row += head.hidden.shape[1] * head.hidden.element_size()
    return rows * of_row


def _accumulator_bytes(head: Head, work: Work) -> int:
    """The float32 sum of the weight's gradient, where the weight itself is narrower."""
    if not work.weight_gradient or head.weight.element_size() >= head.dtype.itemsize:
        return 0
    return head.vocabulary.largest * head.weight.shape[1] * head.dtype.itemsize


def _one_pass_bytes(head: Head, work: Work, rows: int, gathered: int) -> int:
    kept = gathered * head.vocabulary.largest * head.weight.element_size()
    sums = 0 if gathered >= work.with_gradient else _accumulator_bytes(head, work)
    return _window_bytes(head, work, rows) + kept + sums


def _add_figures(head: Head, work: Work, plan: Plan) -> Plan:
    """Fill in the figures that describe `plan`: rows, matmuls and memory."""
    backward = (work.wanted.hidden is not None) + work.weight_gradient
    forward, share = work.computed / max(work.tokens, 1), work.with_gradient / max(work.tokens, 1)
    matmul = 0.0 if work.comparison is None else work.comparison.matmul
    of_teacher = forward * matmul
    extra = _window_bytes(head, work, plan.rows)
    if plan.kind in (ONE_PASS, SPARSE):
        extra = _one_pass_bytes(head, work, plan.rows, plan.gathered)
    elif plan.kind is STASH:
        share = forward  # everything kept is multiplied
        kept = work.computed * head.vocabulary.largest * head.weight.element_size()
        extra += kept * (work.logp + (work.comparison is not None))
    elif plan.kind is RECOMPUTE:
        backward += 1
        of_teacher += share * matmul
        n, d = work.with_gradient, head.hidden.shape[1]
        sums = n * d * head.dtype.itemsize if work.wanted.hidden is not None else 0
        wide = WIDE_BYTES if _accumulator_bytes(head, work) else 0
        columns = min(plan.columns, head.weight.shape[0])
        extra = max(extra, n * columns * _logit_bytes(head, work) + sums + wide)
    else:
        backward = 0
    return replace(
        plan,
        tokens=work.tokens,
        computed=work.computed,
        with_gradient=work.with_gradient if work.any_gradient else 0,
        matmuls=forward + backward * share + of_teacher,
        extra_bytes=extra,
        reason=plan.reason
        + ("; a window holds the teacher's logits too" if work.compares_logits else ""),
        kernels=explain_kernels(head.hidden.device, head.dtype),
    )
