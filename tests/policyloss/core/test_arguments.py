"""Every public function, with every argument spoiled in every way: a result, or an error of ours
that names the argument.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

import torch
from fuzz_calls import BY_MEANING, CASES, DISAGREES, NEVER_A_TENSOR, NEVER_RIGHT, PLAIN, spoiled
from walk import walked

import policyloss as pl


def outcome(function: Any, arguments: dict[str, Any], names: Iterable[str] = ()) -> str:
    """What a call gives: a result, an error of ours that names one of `names`, one that does not,
    or another error.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            function(**arguments)
    except pl.PolicyLossError as error:
        return "named" if any(name in str(error) for name in names) else f"unnamed: {error}"
    except Exception as error:
        return f"raw {type(error).__name__}: {error}".splitlines()[0]
    return "result"


@walked("name", CASES)
def test_a_spoiled_argument_gives_a_result_or_an_error_that_names_it(name: str) -> None:
    function, arguments = CASES[name]
    assert outcome(function, arguments) == "result", "the call itself must be right"
    wrong = []
    alone = sum(isinstance(x, torch.Tensor) for x in arguments.values()) == 1
    for spoilt, right in arguments.items():
        is_tensor = isinstance(right, torch.Tensor)
        for what, value in {**PLAIN, **(spoiled(right) if is_tensor else {})}.items():
            seen = outcome(
                function,
                {**arguments, spoilt: value},
                [BY_MEANING, *(arguments if what in DISAGREES else [spoilt])],
            )
            never = (
                is_tensor
                and what in NEVER_A_TENSOR | NEVER_RIGHT
                and not (alone and what == "on another device")
            )
            if not (seen == "named" or (seen == "result" and not never)):
                wrong.append(f"{spoilt} = {what}: {seen}")
    assert not wrong, f"{len(wrong)} of {name}:\n" + "\n".join(wrong)


# What is not called with a user's own values: results, protocols and errors; parts without a field;
# what trains or reads modules.
NO_CALLS = {
    *(
        "Accumulation",
        "MicroBatch",
        "CompiledLoss",
        "Corrected",
        "HeadOutput",
        "LogProbs",
        "LossOutput",
        "PartitionReport",
        "Plan",
    ),
    *(
        "Surrogate",
        "Tokens",
        "InputError",
        "PolicyLossError",
        "SpecError",
        "Diagnosis",
        "RunDiagnosis",
        "doctor_run",
        "presets",
        "partition_check",
    ),
    *(
        "LengthWeighted",
        "LocalSeqMeanTokenMean",
        "LocalTokenMean",
        "PromptMean",
        "SeqMeanTokenMean",
        "SeqMeanTokenSum",
        "TokenMean",
        "TokenSum",
    ),
    *("advantage", "compat", "functional", "hf", "report", "ESTIMATORS", "GAE"),
    *("BitsReport", "WhatIf", "exact", "unfused"),
}


def test_every_public_function_is_among_the_calls() -> None:
    called = {name.partition(" ")[0].partition(",")[0].partition(".")[0] for name in CASES}
    public = {*pl.__all__, *pl.advantage.__all__}
    assert public - called - NO_CALLS == set()
    assert public & called & NO_CALLS == set()
