"""The benchmarks of the plan "sparse": every mode on tiny sizes, and their arithmetic by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks import sparse, sparse_cases, sparse_learning, sparse_trained
from benchmarks.head_data import Shape
from walk import walked


def timed(plan: str, ms: float, ratio: float = 0.5, beyond: float = 1.0) -> dict[str, Any]:
    return {"plan": plan, "ms": ms, "of_three_matmuls": ratio, "beyond_gib": beyond}


def test_targets_by_hand() -> None:
    case = {"rows": [timed("one_pass", 90.0, 1.1), timed("sparse, eps 1e-3", 45.0, 0.55, 1.7)]}
    heads = [{"head": "one_pass", "added": 0.05}, {"head": "sparse, eps 1e-3", "added": 0.029}]
    found: dict[str, Any] = {
        "drawn": [case, case],
        "trained": {"cases": [{"name": "a text", **case}]},
        "step": {"model": "1.7B", "tokens": 65536, "rows": heads},
    }
    lines = sparse.targets(found, "cuda")
    assert [t["measured"] for t in lines] == [0.55, 1.7, 0.55, 1.7, 0.5, pytest.approx(2.9)]
    assert [t["met"] for t in lines] == [True, False, False, False, True, True]
    (line,) = sparse.targets({"drawn": [case]}, "cpu")
    assert (line["id"], line["measured"], line["met"]) == ("C5", 0.5, True)  # 45 / 90


def test_the_fitted_policy_has_the_entropies() -> None:
    case = sparse_cases.make_case(Shape(4, 64, 2000, 16), "cpu", (0.5, 1.5))
    entropy = case.statistics.entropy
    assert float(entropy.median()) == pytest.approx(0.5, abs=0.1)
    assert float(entropy.mean()) == pytest.approx(1.5, abs=0.3)


def test_a_wider_hidden_state_has_the_same_logits() -> None:
    how = sparse_trained.QUICK
    learned, other = sparse_trained.read_texts(how, "cpu")
    assert not torch.equal(learned[:50], other[:50])
    model, record = sparse_trained.train_model(how, learned, 0.2)
    assert record["tokens"] == record["steps"] * 4 * 32
    narrow, wide = (sparse_trained.make_case(how, model, other, size) for size in (32, 64))
    assert (narrow.hidden.shape[-1], wide.hidden.shape[-1]) == (32, 64)
    torch.testing.assert_close(wide.hidden @ wide.weight.T, narrow.hidden @ narrow.weight.T)


def test_two_modes_in_one_file(tmp_path: Path) -> None:
    out = tmp_path / "sparse.json"
    for mode in ("drawn", "step"):
        sparse.main(["--quick", "--mode", mode, "--rounds", "1", "--out", str(out)])
    found = json.loads(out.read_text())
    assert [len(case["rows"]) for case in found["drawn"]] == [3, 3]
    assert [row["head"] for row in found["step"]["rows"]][1:] == ["one_pass", "sparse, eps 1e-3"]
    assert 0 < found["step"]["gradient_error"] < 0.1


# Learning -----------------------------------------------------------------------------------------


def test_differences_by_hand() -> None:
    """Pairs of +0.1 and −0.3: means of two draws are 0.1, −0.1 and −0.3."""
    found = sparse_learning.difference([0.6, 0.2], [0.5, 0.5])
    assert found == pytest.approx({"mean": -0.1, "low": -0.3, "high": 0.1})


@walked("arm", [arm for arm in sparse_learning.ARMS if arm != sparse_learning.EXACT])
def test_every_arm_is_compared_with_the_exact_run_of_its_seed(arm: str) -> None:
    runs = [
        {"arm": name, "seed": seed, "start": 0.1, "accuracy": x, "late_reward": x}
        for seed in (1, 0)
        for name in sparse_learning.ARMS
        for x in [0.5 + 0.2 * seed + 0.1 * (name == arm)]
    ]
    rows = {row["arm"]: row for row in sparse_learning.compare(runs)}
    change = rows[arm]["difference"]["accuracy"]
    assert change == pytest.approx({"mean": 0.1, "low": 0.1, "high": 0.1})
    assert rows[arm]["late_reward"] == pytest.approx(0.7)
    assert "difference" not in rows[sparse_learning.EXACT]


def test_the_summary_of_a_run() -> None:
    lines: list[dict[str, Any]] = [{"step": 0, "eval/accuracy": 0.2}]
    lines += [{"step": i, "reward/mean": i / 20, "policy/sparse_noise": 0.1} for i in range(1, 21)]
    lines[-1]["eval/accuracy"] = 0.9
    found = sparse_learning.summary(lines)
    assert (found["start"], found["accuracy"]) == (0.2, 0.9)
    assert found["late_reward"] == pytest.approx(0.775)  # 11/20 to 20/20
    assert found["sparse_noise"] == pytest.approx(0.1)
    assert "sparse_entries" not in found
