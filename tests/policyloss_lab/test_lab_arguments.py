"""The doctor and what-if, with every argument spoiled in every way: a result, or an error of ours
that names the argument.
"""

from __future__ import annotations

from typing import Any

from fuzz_calls import LOGP, MASK, OLD, PER_SEQUENCE, problems_of

import policyloss_lab as lab


def _what_if(losses: Any, spec: Any, step: Any, temperature: Any, **tokens: Any) -> Any:
    return lab.what_if(tokens, losses, spec=spec, step=step, temperature=temperature)


def test_a_spoiled_argument_of_what_if_gives_a_result_or_an_error_that_names_it() -> None:
    tokens = {"logp": LOGP, "old_logp": OLD, "advantages": PER_SEQUENCE, "mask": MASK}
    options = {"losses": ["reinforce"], "spec": "ppo", "step": None, "temperature": 1.0}
    assert problems_of(_what_if, {**tokens, **options}) == []


def test_a_spoiled_argument_of_the_doctor_gives_a_result_or_an_error_that_names_it() -> None:
    tokens = {"rollout_logp": OLD, "old_logp": LOGP, "mask": MASK}
    # Repeated: a verdict needs more tokens.
    assert problems_of(lab.doctor, {k: x.repeat(3, 2) for k, x in tokens.items()}) == []
