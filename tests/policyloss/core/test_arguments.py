"""Every public function, with every argument spoiled in every way: a result, or an error of ours
that names the argument.
"""

from __future__ import annotations

from fuzz_calls import CASES, problems_of
from walk import walked

import policyloss as pl


@walked("name", CASES)
def test_a_spoiled_argument_gives_a_result_or_an_error_that_names_it(name: str) -> None:
    wrong = problems_of(*CASES[name])
    assert not wrong, f"{len(wrong)} of {name}:\n" + "\n".join(wrong)


# Names that are not called with a user's values: results, protocols and errors; parts without a
# field;
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
        "TurnMean",
        "WeightMean",
    ),
    *("advantage", "compat", "functional", "hf", "preference", "report", "ESTIMATORS", "GAE"),
    *("BitsReport", "WhatIf", "exact", "unfused"),
}


def test_every_public_function_is_among_the_calls() -> None:
    called = {name.partition(" ")[0].partition(",")[0].partition(".")[0] for name in CASES}
    public = {*pl.__all__, *pl.advantage.__all__}
    assert public - called - NO_CALLS == set()
    assert public & called & NO_CALLS == set()
