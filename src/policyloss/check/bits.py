"""`bits_check`: whether a log-probability depends on its neighbours, down to the last bit.

A function is batch-invariant if a sequence gets the same bits alone and at any index of any batch.
Only then can the log-probabilities of a trainer and an engine be equal, and only then does a
difference show that the two programs differ.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from policyloss.arguments import description
from policyloss.errors import InputError
from policyloss.notebook import TableReport

LogProbFunction = Callable[[list[Any]], Sequence[Any]]
_WIDE = torch.float64
_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
_BEYOND = 1 << 62  # the distance of a number from NaN
_FARTHEST = 1 << 61  # larger distances are capped here


@dataclass(frozen=True)
class BitsResult:
    """Two runs of the same sequences, compared bit by bit.

    name: the difference between the runs. tokens: the number of compared log-probabilities.
    different: how many of them differ in a bit. first: sequence and token of the first difference,
    in the order of tokens; values: the two numbers there. ulps: the largest distance, in units of
    the last place. histogram: {limit: the number of distances up to it and above the last limit}.
    """

    name: str
    tokens: int
    different: int
    first: tuple[int, int] | None
    values: tuple[float, float] | None
    ulps: int
    histogram: dict[int, int]
    dtype: torch.dtype

    def sentence(self) -> str:
        """Where the first bits differ, and by how much."""
        if self.first is None or self.values is None:
            return f"all {self.tokens} log-probabilities have the same bits."
        digits = 17 if self.dtype == torch.float64 else 9
        expected, actual = (f"{x:.{digits}g}" for x in self.values)
        sequence, token = self.first
        steps = ", ".join(
            f"{n} against NaN" if most >= _BEYOND else f"{n} by {'at most ' * (most > 2)}{most}"
            for most, n in self.histogram.items()
        )
        return (
            f"{self.different} of {self.tokens} log-probabilities have other bits. The first is "
            f"token {token} of sequence {sequence}: {actual} where {expected} was expected. They "
            f"differ by units in the last place: {steps}."
        )


@dataclass(frozen=True)
class BitsReport(TableReport):
    """The result of `bits_check`; `str()` gives a readable report.

    arrangements: the tested function against itself, one result per way of batching.
    against: the comparison with another function or recorded numbers, or None. not_numbers: how
    many log-probabilities are NaN; two NaN count as equal.
    """

    columns = ("run", "tokens", "other bits", "most ulps")
    arrangements: tuple[BitsResult, ...]
    against: BitsResult | None
    sequences: int
    not_numbers: int = 0

    @property
    def is_invariant(self) -> bool:
        """Whether a sequence's log-probabilities had the same bits in every batch."""
        return not any(result.different for result in self.arrangements)

    @property
    def is_equal(self) -> bool:
        """Whether `against` found the same bits; True if it is None."""
        return self.against is None or not self.against.different

    def raise_if_different(self) -> None:
        """For tests: raise an AssertionError with the report if any bit differs."""
        if not (self.is_invariant and self.is_equal):
            raise AssertionError(str(self))

    def _contents(self) -> tuple[str, list[tuple[str, int, int, str]], list[str]]:
        results = [*self.arrangements, *([] if self.against is None else [self.against])]
        rows = [
            (r.name, r.tokens, r.different, "NaN" if r.ulps >= _BEYOND else str(r.ulps))
            for r in results
        ]
        return self._headline(), rows, self._paragraphs()

    def _headline(self) -> str:
        of = f"{self.sequences} sequences, {self.arrangements[0].tokens} log-probabilities"
        if self.arrangements[0].different:
            return f"The function does not give the same bits twice ({of})."
        verdict = "is" if self.is_invariant else "is not"
        text = f"The function {verdict} batch-invariant ({of})."
        if self.against is None:
            return text
        return f"{text} Against the other log-probabilities, {self.against.sentence()}"

    def _paragraphs(self) -> list[str]:
        differences = [
            f"{result.name[:1].upper()}{result.name[1:]}: {result.sentence()}"
            for result in self.arrangements
            if result.different
        ]
        n, tokens = self.not_numbers, self.arrangements[0].tokens
        nan = [f"{n} of the {tokens} log-probabilities are NaN."] if n else []
        return [*differences, *nan, *self._advice()]

    def _advice(self) -> list[str]:
        """A remedy for the most basic difference; empty without a difference."""
        if self.arrangements[0].different:
            return [
                "Find what changes from call to call before anything else: dropout (call "
                "model.eval()), sampling without a seed, a cache, or additions whose order a GPU "
                "chooses (torch.use_deterministic_algorithms(True))."
            ]
        if not self.is_invariant:
            return [
                "Some product or sum takes its order from the shape of the batch. For the head and "
                "the loss, run the function within `with policyloss.exact():`; for the body of the "
                "model, give it one sequence per call, or kernels that are batch-invariant."
            ]
        if not self.is_equal:
            return [
                "Both sides compute another function, or the same one in another order: compare "
                "their hidden states, then their logits, then their log-softmax. docs/bits.md does "
                "so for an engine."
            ]
        return []


def bits_check(
    fn: LogProbFunction,
    sequences: Sequence[Any],
    *,
    against: LogProbFunction | Sequence[Any] | None = None,
) -> BitsReport:
    """Check that the bits of a sequence's log-probabilities do not depend on the rest of its batch.

    With `against`, also find the first token whose bits differ from another engine's:

        print(pl.bits_check(logprobs_of_trainer, sequences, against=logprobs_of_engine))

    fn: takes a list of sequences, pads or packs them in any way, and returns the log-probabilities
    of each, 1-D (a tensor or numbers). sequences: the input of `fn`, one entry per sequence: token
    ids, or anything else, of different lengths. against: another such function, or recorded
    log-probabilities, 1-D for each sequence; both are compared in the narrower dtype.
    `fn` is called with all sequences, twice; then one by one, in reverse order, in pairs, and with
    every sequence duplicated: about `2·S + 4` calls for S sequences.
    """
    for name, function in {"fn": fn, "against": against}.items():
        if isinstance(function, type) or (name == "fn" and not callable(function)):
            raise InputError(
                f"{name} must be a function that takes a list of sequences and returns the "
                f"log-probabilities of each, got {description(function)}."
            )
    if not isinstance(sequences, (list, tuple)):
        raise InputError(f"sequences must be a list of sequences, got {description(sequences)}.")
    sequences = list(sequences)
    if not sequences:
        raise InputError("sequences is empty; pass at least one, and better several.")
    n = len(sequences)
    everyone = list(range(n))
    arrangements = {
        "once more": [everyone],
        "alone": [[i] for i in everyone],
        "in the reverse order": [everyone[::-1]],
        "with one other": [[i, (i + 1) % n] for i in everyone],
        "every sequence twice": [everyone * 2],
    }
    expected = _run(fn, sequences, [everyone], "fn", "all together")
    if not any(x.numel() for x in expected):
        raise InputError("fn returned no log-probability at all; pass sequences that have some.")
    results = tuple(
        _compare_runs(name, expected, _run(fn, sequences, calls, "fn", name))
        for name, calls in arrangements.items()
    )
    other = None
    if callable(against):
        theirs = _run(against, sequences, [everyone], "against", "all together")
        other = _compare_runs("against", theirs, expected)
    elif against is not None:
        other = _compare_runs("against", _numbers(against, n, "against"), expected)
    return BitsReport(results, other, n, sum(int(x.isnan().sum()) for x in expected))


def _run(
    fn: LogProbFunction, sequences: list[Any], calls: list[list[int]], argument: str, run: str
) -> list[Tensor]:
    """The log-probabilities of each sequence, from one call of `fn` for each entry of `calls`.

    calls: the indices of the sequences in each call; if a sequence is in several, the last one
    counts. argument, run: the names of `fn` and of this run in an error.
    """
    results: dict[int, Tensor] = {}
    for members in calls:
        try:
            answer = fn([sequences[i] for i in members])
        except Exception as error:
            if sys.version_info >= (3, 11):
                which = f"sequence {members[0]}" if len(members) == 1 else f"{len(members)}"
                called = f"bits_check called {argument} with {which} of {len(sequences)}"
                error.add_note(f"{called} (run: {run}).")
            raise
        numbers = _numbers(answer, len(members), f"the result of {argument}")
        results.update(zip(members, numbers, strict=True))
    return [results[i] for i in range(len(sequences))]


def _numbers(x: Any, count: int, name: str) -> list[Tensor]:
    """One 1-D tensor of log-probabilities per sequence: copies, on the CPU."""
    is_list = hasattr(x, "__len__") and not isinstance(x, (str, Mapping, Set))
    if not is_list or len(x) != count:
        actual = len(x) if is_list else description(x)
        raise InputError(
            f"{name} must hold one entry per sequence, {count}, got {actual}; return the "
            "log-probabilities as a list."
        )
    tensors = []
    for i, numbers in enumerate(x):
        try:
            y = torch.as_tensor(numbers, dtype=None if isinstance(numbers, Tensor) else _WIDE)
        except (TypeError, ValueError, RuntimeError):
            raise InputError(
                f"{name} holds no numbers for sequence {i}: {type(numbers).__name__}; give its "
                "log-probabilities as floats, 1-D and without padding."
            ) from None
        if y.dim() != 1 or not y.is_floating_point() or y.dtype.itemsize not in _INTEGERS:
            raise InputError(
                f"{name} has shape {tuple(y.shape)} and dtype {y.dtype} for sequence {i}; give "
                "its log-probabilities as floats, 1-D and without padding."
            )
        # A function may return the same buffer every time.
        tensors.append(y.detach().to("cpu", copy=True))
    return tensors


def _compare_runs(name: str, expected: list[Tensor], actual: list[Tensor]) -> BitsResult:
    """Compare two runs of the same sequences."""
    for i, (a, b) in enumerate(zip(expected, actual, strict=True)):
        if a.shape != b.shape:
            raise InputError(
                f"{name}: sequence {i} has {b.shape[0]} log-probabilities, and {a.shape[0]} were "
                "expected; drop prompt tokens and padding on both sides alike."
            )
    types = {x.dtype for x in (*expected, *actual)}
    dtype = min(types, key=lambda d: (d.itemsize, d == torch.float16))
    pairs = zip(expected, actual, strict=True)
    distances = [_distances(a.to(dtype), b.to(dtype)) for a, b in pairs]
    everything = torch.cat(distances)
    places = [(int(d.nonzero()[0]), i) for i, d in enumerate(distances) if bool(d.any())]
    first = values = None
    if places:
        token, sequence = min(places)
        first = (sequence, token)
        values = (float(expected[sequence][token]), float(actual[sequence][token]))
    return BitsResult(
        name,
        everything.numel(),
        int(torch.count_nonzero(everything)),
        first,
        values,
        int(everything.max()) if everything.numel() else 0,
        _histogram(everything[everything > 0]),
        dtype,
    )


def _distances(a: Tensor, b: Tensor) -> Tensor:
    """The distance of two numbers in representable numbers of their type, int64; 0 for two NaN."""
    kind = _INTEGERS[a.dtype.itemsize]
    lowest = torch.iinfo(kind).min

    def rank(x: Tensor) -> Tensor:
        bits = x.contiguous().view(kind).to(torch.int64)
        return torch.where(bits < 0, lowest - bits, bits)

    of_a, of_b = rank(a), rank(b)
    # With opposite signs, the difference of ranks may overflow int64.
    to_zero = [x.abs().clamp(max=_FARTHEST // 2) for x in (of_a, of_b)]
    across = (of_a < 0) != (of_b < 0)
    distance = torch.where(across, to_zero[0] + to_zero[1], (of_a - of_b).abs())
    distance = distance.clamp(max=_FARTHEST)
    distance = torch.where(a.isnan() | b.isnan(), _BEYOND, distance)
    return torch.where(a.isnan() & b.isnan(), 0, distance)


def _histogram(distances: Tensor) -> dict[int, int]:
    counts: dict[int, int] = {}
    for distance in sorted(distances.tolist()):
        most = 1 << (distance - 1).bit_length()
        counts[most] = counts.get(most, 0) + 1
    return counts
