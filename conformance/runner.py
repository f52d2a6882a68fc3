"""Runs the cases of a function on both sides and counts:
worst differences, declared defects, failures.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from conformance.cases import DTYPES, Case, Side, cases, run_side
from conformance.compare import TOLERANCE, Difference, compare, is_finite
from conformance.suite import GRADIENT, Defect, Function, Inputs, Outputs

# The errors that our side raises on purpose. Any other is a bug, even where the framework raises
# too.
DELIBERATE = (ValueError, NotImplementedError, AssertionError)
KEPT_FAILURES = 20
ENOUGH = 10  # declared cases in which a defect must show, whatever the seed


@dataclass
class DefectTally:
    """How often a defect was declared, how often it showed in the numbers,
    and the first case in which it did.
    """

    instead: str
    declared: int = 0
    seen: int = 0
    example: dict[str, Any] | None = None


@dataclass
class Score:
    """The score of one function.

    compared: cases with at least one output compared. refused: cases in which both sides raised.
    undefined: cases that a defect covers whole. worst: the worst difference per dtype and output
    ("gradient of x" for gradients). failures: everything that fails the run.
    """

    name: str
    compared: int = 0
    refused: int = 0
    undefined: int = 0
    worst: dict[str, dict[str, float]] = field(
        default_factory=lambda: {dtype: {} for dtype in DTYPES}
    )
    defects: dict[str, DefectTally] = field(default_factory=dict)
    refusals: Counter[str] = field(default_factory=Counter)
    failures: list[dict[str, Any]] = field(default_factory=list)
    failed: int = 0

    @property
    def total(self) -> int:
        """Every case that ran."""
        return self.compared + self.refused + self.undefined

    def fail(self, what: str, case: Case | None = None, **details: Any) -> None:
        """Count a failure, and keep it if it is among the first."""
        self.failed += 1
        if len(self.failures) < KEPT_FAILURES:
            self.failures.append({"what": what, **details, **(case.describe() if case else {})})


def run_function(
    function: Function, shift: int = 0, every: int = 1, tick: Callable[[int], None] = lambda n: None
) -> Score:
    """The cases of a function, compared: all, or one in so many; `tick` is called with the number
    of finished cases.
    """
    score = Score(function.name)
    differentiated: set[str] = set()
    for done, case in enumerate(cases(function, shift, every=every), 1):
        inputs = case.inputs(function)
        differentiated |= set(function.differentiate) & set(inputs)
        judge(score, function, case, inputs)
        tick(done)
    close(score, function, differentiated, whole=shift == 0 and every == 1)
    return score


def judge(score: Score, function: Function, case: Case, inputs: Inputs) -> None:
    """Run one case on both sides and enter it in the score."""
    theirs = run_side(function.theirs, function, inputs, case.options, case.seed)
    ours = run_side(function.ours, function, inputs, case.options, case.seed)
    defects = declared_defects(function, case, inputs)
    for defect in defects:
        score.defects.setdefault(defect.reason, DefectTally(defect.instead)).declared += 1
    if ours.error is not None and not isinstance(ours.error, DELIBERATE):
        score.fail("ours broke", case, ours=ours.refusal, theirs=theirs.refusal or "ran")
        score.compared += 1
    elif ours.error is not None and theirs.error is not None and not defects:
        score.refused += 1
        score.refusals[f"theirs {theirs.refusal} | ours {ours.refusal}"] += 1
    elif ours.error is not None or theirs.error is not None:
        _one_side_raised(score, case, ours, theirs, defects)
    else:
        _both_ran(score, case, ours, theirs, defects)


def close(
    score: Score, function: Function, differentiated: Iterable[str], whole: bool = True
) -> None:
    """Checks that need every case: unused names, no comparison, defects that never showed.

    whole: every case of the default seed ran. Otherwise a rare defect may by chance not show
    in a few declared cases.
    """
    if unused := set(function.differentiate) - set(differentiated):
        score.fail(f"no case has the input {', '.join(sorted(unused))} to differentiate in")
    if score.compared == 0:
        score.fail("no case was compared")
    for reason, tally in score.defects.items():
        if tally.seen == 0 and (whole or tally.declared >= ENOUGH):
            score.fail(
                "stale defect: their numbers equal ours in every declared case",
                reason=reason,
                declared=tally.declared,
            )


def declared_defects(function: Function, case: Case, inputs: Inputs) -> tuple[Defect, ...]:
    """The known defects of the framework in this case."""
    found = function.defect(case.options, inputs)
    if found is None:
        return ()
    return (found,) if isinstance(found, Defect) else tuple(found)


def _one_side_raised(
    score: Score, case: Case, ours: Side, theirs: Side, defects: tuple[Defect, ...]
) -> None:
    whole = next((defect for defect in defects if defect.outputs is None), None)
    if whole is None or ours.error is not None:
        score.compared += 1
        sides = {"ours": ours.refusal or "ran", "theirs": theirs.refusal or "ran"}
        score.fail(
            "one side raised" if whole is None else "ours raised where a defect says that it runs",
            case,
            **sides,
        )
        return
    score.undefined += 1
    for name, value in everything(ours).items():
        if not is_finite(value):
            score.fail(
                "ours is not finite although a defect declares our result", case, output=name
            )
    _seen(score, whole, case, {"error": {"theirs": theirs.refusal, "ours": _example(ours)}})


def _both_ran(
    score: Score, case: Case, ours: Side, theirs: Side, defects: tuple[Defect, ...]
) -> None:
    tolerance, worst = TOLERANCE[DTYPES[case.dtype]], score.worst[case.dtype]
    shown: dict[str, dict[str, Any]] = {}
    compared = False
    for name, difference, value in _differences(ours, theirs):
        defect = next((defect for defect in defects if covers(defect, name)), None)
        if defect is None:
            compared = True
            worst[name] = max(worst.get(name, 0.0), difference.worst)
            if difference.worst > tolerance:
                score.fail("different", case, output=name, **_details(difference))
            continue
        if not is_finite(value):
            score.fail(
                "ours is not finite although a defect declares our result",
                case,
                output=name,
                **_details(difference),
            )
        if difference.worst > tolerance:
            shown.setdefault(defect.reason, {})[name] = {
                "theirs": difference.theirs,
                "ours": difference.ours,
            }
    for defect in defects:
        if defect.reason in shown:
            _seen(score, defect, case, shown[defect.reason])
    score.compared += compared
    score.undefined += not compared


def _differences(ours: Side, theirs: Side) -> Iterator[tuple[str, Difference, Any]]:
    """Every output and gradient of either side: its name, the difference, and our value."""
    mine, other = everything(ours), everything(theirs)
    for name in {**other, **mine}:
        if name not in mine or name not in other:
            missing = Difference(
                math.inf, None, None, f"only {'theirs' if name in other else 'ours'} has it"
            )
            yield name, missing, mine.get(name)
        else:
            yield name, compare(mine[name], other[name]), mine[name]
    if theirs.differentiable and not ours.differentiable:
        yield (
            GRADIENT,
            Difference(
                math.inf, "no gradient", "a gradient", "our loss does not require a gradient"
            ),
            None,
        )


def everything(side: Side) -> Outputs:
    """The outputs of a side, and its gradients as "gradient of x"."""
    return side.outputs | {f"{GRADIENT} of {name}": x for name, x in side.gradients.items()}


def covers(defect: Defect, name: str) -> bool:
    """Whether a defect concerns this output; "gradient of x" goes under "gradient"."""
    if defect.outputs is None:
        return True
    return name in defect.outputs or (name.startswith(GRADIENT) and GRADIENT in defect.outputs)


def _seen(score: Score, defect: Defect, case: Case, values: dict[str, Any]) -> None:
    tally = score.defects[defect.reason]
    tally.seen += 1
    if tally.example is None:
        tally.example = case.describe() | {"values": values}


def _details(difference: Difference) -> dict[str, Any]:
    details = {"difference": difference.worst, "theirs": difference.theirs, "ours": difference.ours}
    return details | ({"problem": difference.problem} if difference.problem else {})


def _example(side: Side) -> dict[str, Any]:
    """The single numbers a side gave."""
    flat = {
        name: x.item() if hasattr(x, "numel") and x.numel() == 1 else x
        for name, x in side.outputs.items()
    }
    return {name: x for name, x in flat.items() if x is None or isinstance(x, (int, float, str))}
