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

from docs import performance_sparse


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


# The page -----------------------------------------------------------------------------------------


def page_run() -> dict[str, Any]:
    drawn = {"sparse_entries": 20.0, "sparse_dense_rows": 0.25, "errors": [0.01, 0.02]}
    rows = [
        {**timed("one_pass", 90.0, 1.1), "kernels_of_three_matmuls": 1.08, "extra_gib": 6.0},
        {**timed("sparse, eps 1e-3", 45.0, 0.7), "kernels_of_three_matmuls": 0.6, "extra_gib": 4.0},
    ]
    rows[0]["errors"] = [0.0, 0.0]
    rows[1] |= drawn
    entropy = {"median": 0.5, "mean": 1.5}
    return {"shape": [8, 2048, 2**17, 4096], "entropy": entropy, "rows": rows, "name": "a text"}


def test_the_page_explains_the_misses_by_hand() -> None:
    case = page_run()
    heads = [{"head": "one_pass", "added": 0.05}, {"head": "sparse, eps 1e-3", "added": 0.034}]
    run = {"drawn": [case, case], "trained": {"cases": [case]}, "step": {"rows": heads}}
    explain = performance_sparse.explain_gpu
    # (1 + 2 · 0.25) / 3 = 0.5; 0.7 − 0.6 are the host's.
    for what in ("median entropy 0.5, mean 1.56: time", "trained model, a text: time"):
        text = str(explain({"what": what}, {"sparse_cuda": run}))
        assert "matmuls of 0.50 of three remain" in text
        assert "take 0.60" in text
        assert "other 0.10 is time" in text
    text = str(explain({"what": "median entropy 0.23, mean 0.76: memory"}, {"sparse_cuda": run}))
    assert "takes 2.0 GiB instead of 1.0" in text  # 2^17 · 2^12 numbers
    assert "5.0% with `one_pass` and 3.4%" in str(
        explain({"what": "whole step: added, %"}, {"sparse_cuda": run})
    )
    text = str(performance_sparse.explain_cpu({}, {"sparse_cpu": {"drawn": [case]}}))
    assert "0.50 with 25% dense rows (0.50 of the matmuls remain)" in text


def test_the_page_has_every_mode() -> None:
    training = {"weights": 107e6, "seconds": 35.0, "text_tokens": 100, "steps": 9, "tokens": 250}
    training |= {"first_loss": 11.0, "last_loss": 1.5}
    body = {"head": "body alone", "median_ms": 2000.0, "added": 0.0, "peak_bytes": 2**30}
    step = {"model": "1.7B", "tokens": 65536, "entropy": page_run()["entropy"], "rows": [body]}
    run = {
        "environment": {"gpu": "a GPU"},
        "drawn": [page_run()],
        "trained": {"training": training, "cases": [page_run()]},
        "step": {**step, "gradient_error": 0.01},
    }
    page = performance_sparse.sparse_section(run, "on a GPU", "A machine")
    assert page.count("| `sparse, eps 1e-3` | 0.70 | 0.60 | 25% | 20 | 4.00 GiB |") == 2
    assert "2.5 times through the text; the loss went from 11.0 to 1.50" in page
    assert "| body alone | 2000 ms | +0.0% | 1.0 GiB |" in page
