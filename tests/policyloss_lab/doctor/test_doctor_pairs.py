"""What pairs alone may say: a cause that they can tell, healthy noise, or what to pass next."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from benchmarks.doctor_cases import FAULTS, SMALL, Source

import policyloss_lab as lab
from policyloss_lab.diagnosis.pairs import noise_shape

RECORDED = Path(__file__).parents[2] / "recorded" / "doctor"
SOURCE = Source(RECORDED / "rollouts", RECORDED / "models")
# From pairs alone all of these look like noise that is larger at unlikely tokens.
ALIKE = ("stale_weights", "dropout", "bos", "template", "positions", "weights_fp8", "weights_int8")


def noisy(scale: float, seed: int, rows: int = 32, columns: int = 30) -> dict[str, torch.Tensor]:
    """Probabilities of a language model, and an engine whose log-probabilities have noise of
    Student's t with 4 degrees of freedom, of this scale at unlikely tokens.
    """
    draw = torch.Generator().manual_seed(seed)
    old = torch.rand(rows, columns, generator=draw).pow(0.2).clamp(1e-3, 0.9999).log()
    normal = torch.randn(rows, columns, 5, generator=draw)
    t4 = normal[..., 0] / normal[..., 1:].square().mean(-1).sqrt()
    return {"old_logp": old, "rollout_logp": old + scale * noise_shape(old) * t4}


@pytest.mark.parametrize("scale", [1e-6, 0.005, 0.015, 0.03, 0.04])
def test_noise_of_half_precision_is_healthy(scale: float) -> None:
    """Of 960 tokens some ten lie beyond four scales; heavy tails are no sickness."""
    verdicts = [lab.doctor(**noisy(scale, seed)).cause for seed in range(8)]
    assert verdicts == ["healthy"] * 8


def test_the_floor_is_the_bf16_noise_of_large_logits() -> None:
    """Logits from 16 to 32 have steps of 1/8 in bf16, on both sides."""
    step = torch.tensor(16.0).bfloat16().nextafter(torch.tensor(32.0).bfloat16()) - 16
    floor = lab.doctor(**noisy(0.01, 0)).floor
    assert floor == pytest.approx(math.sqrt(2) * float(step) / math.sqrt(12), rel=0.03)


def test_larger_noise_is_unexplained_and_names_the_missing_argument() -> None:
    verdict = lab.doctor(**noisy(0.3, 0))
    assert verdict.cause == "not_explained"
    assert "Pass model=, ids= and prompts=" in verdict.remedy
    assert "not tested without model=" in verdict.evidence[1]
    assert [place.tag for place in verdict.places] == ["network"]


def test_a_few_wild_tokens_are_no_noise() -> None:
    pairs = noisy(0.005, 0)
    pairs["rollout_logp"][::4, 7] -= 1.0
    assert lab.doctor(**pairs).cause == "not_explained"


@pytest.mark.parametrize("name", ALIKE)
def test_no_cause_is_named_that_pairs_cannot_tell(name: str) -> None:
    arguments = FAULTS[name](SOURCE, 0, SMALL).arguments
    assert lab.doctor(**arguments).cause in ("not_explained", "healthy")
