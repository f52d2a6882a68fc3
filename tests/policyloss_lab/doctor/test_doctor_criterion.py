"""The criterion of the doctor: the scale that it fits, and the price of freedom."""

from __future__ import annotations

import math

import pytest
import torch

from policyloss_lab.diagnosis.hypothesis import ROUNDING, misfit
from policyloss_lab.diagnosis.pairs import noise_shape

ONES = torch.ones(1000, dtype=torch.float64)


def t4(n: int, scale: float) -> torch.Tensor:
    """Draws of Student's t with 4 degrees of freedom."""
    draw = torch.Generator().manual_seed(0)
    normal = torch.randn(n, 5, generator=draw, dtype=torch.float64)
    return scale * normal[:, 0] / normal[:, 1:].square().mean(1).sqrt()


def test_the_shape_of_noise_is_the_probability_of_the_other_tokens():
    logp = torch.tensor([math.log(0.25), math.log(0.999), -50.0], dtype=torch.float64)
    torch.testing.assert_close(noise_shape(logp), torch.tensor([0.75, 0.02, 1.0]).double())


def test_the_scale_of_known_noise_is_found_again():
    """1,000 draws know a scale to about 3 %."""
    assert misfit(t4(1000, 0.3), ONES, 0).scale == pytest.approx(0.3, rel=0.1)


def test_a_few_wild_tokens_do_not_move_the_scale():
    x = t4(1000, 0.3)
    before = misfit(x, ONES, 0).scale
    x[:10] = 100.0
    assert misfit(x, ONES, 0).scale == pytest.approx(before, rel=0.1)


def test_the_scale_follows_the_shape():
    x = t4(1000, 0.3)
    shape = torch.linspace(0.1, 2.0, 1000, dtype=torch.float64)
    assert misfit(x * shape, shape, 0).scale == pytest.approx(misfit(x, ONES, 0).scale, rel=1e-6)
    assert misfit(x * shape, shape, 0).score < misfit(x * shape, ONES, 0).score


def test_every_free_number_costs_the_logarithm_of_the_tokens():
    x = t4(1000, 0.3)
    price = misfit(x, ONES, 3).score - misfit(x, ONES, 1).score
    assert price == pytest.approx(2 * math.log(1000))


def test_the_score_is_the_density_of_student_t():
    """Two residuals of ±1 with scale 1: log f(1) = log(3/8) − 5/2·log(5/4) = −1.538690…."""
    x = torch.tensor([1.0, -1.0], dtype=torch.float64)
    found = misfit(x, torch.ones(2, dtype=torch.float64), 0)
    u = 1 / found.scale
    log_density = math.log(3 / 8) - 2.5 * math.log1p(u * u / 4) - math.log(found.scale)
    assert found.score == pytest.approx(-4 * log_density + math.log(2), rel=1e-9)


def test_tokens_without_evidence_count_like_the_others():
    x = t4(1000, 0.3)
    part = x.clone()
    part[::2] = torch.nan
    whole, half = misfit(x, ONES, 0), misfit(part, ONES, 0)
    assert half.score == pytest.approx(whole.score, rel=0.1)


def test_equal_numbers_have_the_scale_of_rounding():
    assert misfit(torch.zeros(10, dtype=torch.float64), ONES[:10], 0).scale == ROUNDING


def test_the_scale_is_the_one_of_most_likelihood_where_most_tokens_are_exact():
    """600 of 1,000 residuals are 1e-9 and the others about 1e-3: a scale of rounding would call
    each of the others a miracle.
    """
    x = t4(1000, 1e-3)
    x[:600] = 1e-9
    left = misfit(x, ONES, 0)
    assert 1e-5 < left.scale < 1e-3
    scales = torch.logspace(-7, 0, 200, dtype=torch.float64)
    u = x / scales[:, None]
    logs = math.log(3 / 8) - 2.5 * torch.log1p(u * u / 4) - scales.log()[:, None]
    assert left.score <= float(-2 * logs.sum(1).max()) + math.log(1000) + 1e-2
