"""Every causal-LM architecture of transformers against its own logits: log-probabilities, loss and
gradients.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_models import batch_for, built, gradients, own_logits, small_config, token_ids
from torch import Tensor

import policyloss as pl

PAGE = Path(__file__).resolve().parents[3] / "docs" / "models.md"
# A tied head, biases, a soft cap, a factor that divides and one that multiplies, factors and caps
# in their nested configuration, experts, positions that are learned, and no positions at all.
FEW = (
    *("llama", "gpt2", "phi", "gemma2", "granite", "cohere", "hyperclovax", "gemma3"),
    *("mixtral", "opt", "bloom", "bert", "falcon_h1", "xlstm"),
)
SPEC = pl.preset("dapo", entropy_coef=0.01)


def architectures() -> dict[str, Any]:
    """The model class of each type."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    return {config.model_type: model for config, model in MODEL_FOR_CAUSAL_LM_MAPPING.items()}


def by_its_own_logits(model: Any) -> dict[str, Tensor]:
    """Log-probabilities, entropies, the loss, and the gradients of all parameters."""
    ids = token_ids()
    batch = batch_for(ids, next(model.parameters()).dtype)
    out = pl.logprobs(own_logits(model, ids), ids[:, 1:], 0.7, entropy=True, mask=batch["mask"])
    loss = pl.policy_loss(SPEC, out.logp, entropy=out.entropy, **batch).loss
    loss.backward()
    numbers = {"logp": out.logp, "entropy": out.entropy, "loss": loss, **gradients(model)}
    return {name: x.detach() for name, x in numbers.items()}


def without_logits(model: Any) -> dict[str, Tensor]:
    """The same numbers by `pl.hf`."""
    ids = token_ids()
    batch = batch_for(ids, next(model.parameters()).dtype)
    out = pl.hf.policy_loss(model, SPEC, ids, temperature=0.7, **batch)
    out.loss.backward()
    numbers = {"logp": out.logp, "entropy": out.entropy, "loss": out.loss, **gradients(model)}
    return {name: x.detach() for name, x in numbers.items()}


def furthest(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    """The largest difference, relative to the largest number of its tensor. Differences within one
    rounding of the model's largest number do not count: a gradient that is zero in exact
    arithmetic, as that of a bias of the keys, consists of such rounding alone.
    """
    assert ours.keys() == theirs.keys()
    assert any(bool(x.any()) for name, x in theirs.items() if "weight" in name)
    largest = {name: x.abs().max() for name, x in theirs.items()}
    rounding = torch.finfo(torch.float64).eps * max(largest.values())
    gaps = {name: (ours[name] - x).abs().max() for name, x in theirs.items()}
    relative = [0.0 if gap <= rounding else gap / largest[name] for name, gap in gaps.items()]
    return float(torch.tensor(relative).max())  # a NaN of any tensor shows


@pytest.mark.parametrize("name", FEW)
def test_an_architecture_gives_its_own_numbers(name: str) -> None:
    model_class = architectures()[name]
    model = built(model_class, small_config(model_class.config_class))
    # xLSTM computes parts in float32, whatever its weights are.
    gap = furthest(without_logits(model), by_its_own_logits(model))
    assert gap < (1e-5 if name == "xlstm" else 1e-11)


def outcome(model_class: Any) -> str:
    """ "" if the model's numbers are right; else why not, in a few words."""
    try:
        model: Any = built(model_class, small_config(model_class.config_class))
        theirs = by_its_own_logits(model)
    except Exception:
        return "not built"
    try:
        gap = furthest(without_logits(model), theirs)
    except pl.InputError:
        return "refused"
    return "" if gap < 2e-5 else f"off by {gap:.1e}"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_every_architecture_gives_its_own_numbers_or_is_on_the_page() -> None:
    """What cannot be built small or cannot be split is in docs/models.md, with its reason."""
    every = architectures()
    outcomes = {name: outcome(model_class) for name, model_class in every.items()}
    listed = dict(re.findall(r"^\| `([\w-]+)` \| (not built|refused) \|", PAGE.read_text(), re.M))
    assert {name: why for name, why in outcomes.items() if why} == listed
    works = len(every) - len(listed)
    assert f"{works} of {len(every)}" in PAGE.read_text()
