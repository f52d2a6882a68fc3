"""How near a real vLLM on a CPU comes to our bits, in float32: what `docs/bits.md` reports."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.engines
WORKER = Path(__file__).resolve().parents[1] / "workers" / "bits_vllm.py"


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("bits")
    out = folder / "results.json"
    variables = {
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "OMP_NUM_THREADS": "1",
    }
    words = [sys.executable, str(WORKER), str(folder / "model"), "64", str(out)]
    done = subprocess.run(
        words, env={**os.environ, **variables}, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(json.loads(out.read_text()))


def test_both_are_batch_invariant(results):
    """Ours by its promise, vLLM because products of this size happen to be."""
    assert results["ours"]["invariant"], results["ours"]["report"]
    assert results["vllm"]["invariant"], results["vllm"]["report"]


def test_the_head_on_hidden_states_of_vllm(results):
    """The logits are the same, and so is all that differs in the sum behind the logarithm: some
    last bits.
    """
    assert results["equal from their logits"] == results["tokens"]
    different, ulps = results["head"]["against"]
    assert different < 0.2 * results["tokens"], results["head"]["report"]
    assert ulps <= 2


def test_vllm_with_our_last_two_functions_has_our_bits(results):
    """Its logits and its log-softmax are replaced; its body is its own."""
    assert results["replaced"]["against"] == [0, 0], results["replaced"]["report"]


def test_the_bodies_differ_in_last_bits(results):
    different, ulps = results["ours"]["against"]
    assert 0 < different < results["tokens"], results["ours"]["report"]
    assert ulps <= 16
