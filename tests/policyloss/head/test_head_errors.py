"""Bad input to the head gets an error that names the argument, its value and the remedy; never a
wrong number.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from head_cases import DEVICE, leaf, make_head_batch, peaked_case
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from walk import walked

import policyloss as pl
from cases import PRESETS

CASE = peaked_case(6, 33, 8, torch.float32)
BATCH = make_head_batch(seed=1, dtype=torch.float32)


def linear(**changes: Any) -> Any:
    arguments = {"hidden": CASE.hidden, "weight": CASE.weight, "ids": CASE.ids, **changes}
    return pl.linear_logprobs(**arguments).logp


def logits(**changes: Any) -> Any:
    arguments = {"logits": CASE.hidden @ CASE.weight.T, "ids": CASE.ids, **changes}
    return pl.logprobs(**arguments).logp


def loss(spec: Any = PRESETS["ppo"], **changes: Any) -> Any:
    arguments = {
        "hidden": leaf(BATCH.hidden),
        "weight": leaf(BATCH.weight),
        "ids": BATCH.ids,
        **BATCH.kwargs,
        **changes,
    }
    return pl.linear_policy_loss(spec, **arguments)


def ids_with(value: int, like: torch.Tensor) -> torch.Tensor:
    """`like` with one entry changed, at a place that counts."""
    ids = like.clone()
    if like.dim() == 1:
        ids[2] = value
    else:
        ids[tuple(BATCH.tokens.mask.nonzero()[3].tolist())] = value
    return ids


def said(call: Callable[[], Any], *words: str) -> None:
    """`call` raises an InputError that contains all the words."""
    with pytest.raises(pl.InputError) as caught:
        call()
    missing = [word for word in words if word not in str(caught.value)]
    assert not missing, f"{missing} not in: {caught.value}"


@walked("value", [-100, -1, 33, 10**12])
def test_an_id_outside_the_vocabulary(value: int) -> None:
    said(lambda: linear(ids=ids_with(value, CASE.ids)), "ids", str(value), "33", "mask")
    said(lambda: logits(ids=ids_with(value, CASE.ids)), "ids", str(value), "33", "mask")
    said(lambda: loss(ids=ids_with(value, BATCH.ids)), "ids", str(value), "33", "mask")


def test_an_id_outside_the_vocabulary_is_found_under_a_mask_that_has_it() -> None:
    mask = torch.tensor([0, 1, 1, 1, 0, 0], dtype=torch.bool, device=DEVICE)
    said(lambda: linear(ids=ids_with(-1, CASE.ids), mask=mask), "ids", "-1")
    said(lambda: logits(ids=ids_with(-1, CASE.ids), mask=mask), "ids", "-1")
    mask[2] = False
    assert linear(ids=ids_with(-1, CASE.ids), mask=mask)[2] == 0
    assert logits(ids=ids_with(-1, CASE.ids), mask=mask)[2] == 0


@walked("call", [linear, logits], ids=["linear_logprobs", "logprobs"])
def test_ids_of_another_shape_or_kind(call: Any) -> None:
    said(lambda: call(ids=CASE.ids[:4]), "ids", "(4,)", "(6,)")
    said(lambda: call(ids=CASE.ids.unsqueeze(0)), "ids", "(1, 6)", "(6,)")
    said(lambda: call(ids=CASE.ids.float()), "ids", "float32")
    said(lambda: call(ids=CASE.ids.bool()), "ids", "bool")
    said(lambda: call(ids=CASE.ids.tolist()), "ids", "list")


@walked("call", [linear, logits], ids=["linear_logprobs", "logprobs"])
def test_a_mask_that_does_not_fit(call: Any) -> None:
    said(lambda: call(mask=torch.ones(5, dtype=torch.bool, device=DEVICE)), "mask", "(5,)", "(6,)")
    said(lambda: call(mask=[1] * 6), "mask", "list")


@pytest.mark.skipif(DEVICE.type != "cpu", reason="values of a mask are read on a CPU only")
def test_a_mask_of_weights() -> None:
    said(lambda: linear(mask=torch.full((6,), 0.5)), "mask")
    said(lambda: loss(mask=BATCH.kwargs["mask"] * 2.0), "mask")


def test_matrices_that_do_not_fit() -> None:
    said(lambda: linear(weight=CASE.weight[:, :5]), "hidden", "weight", "(6, 8)", "(33, 5)")
    said(lambda: linear(weight=CASE.weight.T), "weight", "(8, 33)")
    said(lambda: linear(hidden=CASE.hidden[0], ids=CASE.ids[0]), "hidden", "(8,)")
    said(lambda: linear(weight=CASE.weight.reshape(33, 2, 4)), "weight", "(33, 2, 4)")
    said(lambda: linear(bias=CASE.bias[:-1]), "bias", "(32,)", "33")
    said(lambda: linear(bias=CASE.bias.unsqueeze(0)), "bias", "(1, 33)")
    said(lambda: loss(weight=BATCH.weight[:, :5]), "hidden", "weight")
    said(lambda: logits(logits=CASE.hidden[0]), "logits", "(8,)")


def test_dtypes_that_do_not_fit() -> None:
    said(
        lambda: linear(weight=CASE.weight.bfloat16()),
        "hidden",
        "float32",
        "weight",
        "bfloat16",
        "autocast",
    )
    said(lambda: linear(hidden=CASE.hidden.double()), "float64", "float32")
    said(lambda: linear(hidden=CASE.hidden.long()), "hidden", "int64")
    said(lambda: linear(weight=CASE.weight.int()), "weight", "int32")
    said(lambda: linear(hidden=CASE.hidden.tolist()), "hidden", "list")
    said(
        lambda: logits(logits=torch.zeros(6, 33, dtype=torch.int64, device=DEVICE)),
        "logits",
        "int64",
    )
    with torch.autocast(DEVICE.type, dtype=torch.bfloat16):
        assert linear(weight=CASE.weight.bfloat16()).dtype == torch.float32


@pytest.mark.skipif(DEVICE.type == "cpu", reason="needs two devices")
def test_tensors_on_two_devices() -> None:
    said(lambda: linear(weight=CASE.weight.cpu()), "weight", "cpu", "cuda")
    said(lambda: linear(ids=CASE.ids.cpu()), "ids", "cpu", "cuda")
    said(lambda: logits(ids=CASE.ids.cpu()), "ids", "cpu", "cuda")


@walked("call", [linear, logits, loss], ids=["linear_logprobs", "logprobs", "linear_policy_loss"])
@walked("value", [0.0, -1.0, float("nan"), float("inf")])
def test_an_invalid_temperature_is_refused(call: Any, value: float) -> None:
    said(lambda: call(temperature=value), "temperature")
    shape = BATCH.ids.shape if call is loss else CASE.ids.shape
    said(lambda: call(temperature=torch.full(shape, value, device=DEVICE)), "temperature")


@walked("call", [linear, logits], ids=["linear_logprobs", "logprobs"])
def test_temperatures_that_do_not_fit(call: Any) -> None:
    said(lambda: call(temperature=torch.ones(5, device=DEVICE)), "temperature", "(5,)", "(6,)")
    said(lambda: call(temperature=torch.ones(6, 1, device=DEVICE)), "temperature", "(6, 1)", "(6,)")
    said(
        lambda: call(temperature=torch.ones(6, device=DEVICE, requires_grad=True)),
        "temperature",
        "grad",
    )
    said(
        lambda: call(temperature=torch.ones((), device=DEVICE, requires_grad=True)),
        "temperature",
        "grad",
    )


@walked("call", [linear, logits, loss], ids=["linear_logprobs", "logprobs", "linear_policy_loss"])
def test_an_invalid_softcap_is_refused(call: Any) -> None:
    for value in (0, -30.0, float("nan"), "30"):
        said(lambda value=value: call(softcap=value), "softcap")


def test_unknown_plans() -> None:
    said(lambda: linear(plan="recomptue"), "recomptue", "recompute", "stash", "auto")
    said(lambda: loss(plan="two_pass"), "two_pass", "one_pass", "recompute", "stash", "auto")
    plan = pl.explain_plan(None, leaf(CASE.hidden), CASE.weight, CASE.ids)
    said(
        lambda: linear(plan=dataclasses.replace(plan, name="nothing")),
        "nothing",
        "recompute",
        "stash",
    )
    said(
        lambda: loss(plan=dataclasses.replace(plan, name="nothing")),
        "nothing",
        "recompute",
        "stash",
    )
    said(lambda: linear(plan=dataclasses.replace(plan, rows=0)), "rows")
    said(
        lambda: linear(plan=dataclasses.replace(plan, gathered=100)),
        "gathered=100",
        "only one_pass gathers",
    )
    said(
        lambda: loss(plan=pl.Plan("one_pass", rows=8, columns=0, gathered=7)),
        "gathered=7",
        "rows=8",
        "at least as many rows",
    )
    said(lambda: loss(plan=dataclasses.replace(plan, rows=-1)), "rows")
    said(lambda: linear(plan=3), "plan", "int")
    said(lambda: loss(plan=None), "plan", "None")


def test_one_pass_is_not_for_a_loss_of_ones_own() -> None:
    said(lambda: linear(plan="one_pass"), "one_pass", "recompute", "stash")


@walked("name", ["clip_cov", "kl_cov"])
def test_one_pass_of_a_loss_that_compares_with_the_batch(name: str) -> None:
    """The error gives the reason (the whole batch) and both remedies: measure first, or another
    plan.
    """
    said(
        lambda: loss(PRESETS[name], plan="one_pass"),
        "one_pass",
        "whole batch",
        "measure",
        "recompute",
    )
    explain = {
        "hidden": leaf(BATCH.hidden),
        "weight": BATCH.weight,
        "ids": BATCH.ids,
        **BATCH.kwargs,
    }
    said(lambda: pl.explain_plan(PRESETS[name], plan="one_pass", **explain), "one_pass", "measure")


def test_a_window_too_small_for_a_sequence() -> None:
    hidden = leaf(BATCH.hidden)
    plan = pl.explain_plan(
        PRESETS["gspo"], hidden, BATCH.weight, BATCH.ids, plan="one_pass", **BATCH.kwargs
    )
    longest = int(BATCH.tokens.mask.sum(-1).max())
    said(
        lambda: loss(PRESETS["gspo"], plan=dataclasses.replace(plan, rows=longest - 1)),
        "rows",
        "sequence",
        str(longest),
    )
    assert loss(PRESETS["gspo"], plan=dataclasses.replace(plan, rows=longest)).loss.isfinite()


def test_a_stash_has_no_softcap() -> None:
    said(
        lambda: linear(hidden=leaf(CASE.hidden), plan="stash", softcap=30.0),
        "stash",
        "softcap",
        "recompute",
    )
    said(lambda: loss(plan="stash", softcap=30.0), "stash", "softcap", "recompute")


def test_the_errors_of_policy_loss_are_raised() -> None:
    said(lambda: loss(PRESETS["grpo"], ref_logp=None), "ref_logp")
    said(lambda: loss(PRESETS["tis"], rollout_logp=None), "rollout_logp")
    said(lambda: loss(old_logp=BATCH.kwargs["old_logp"][:, 1:]), "old_logp", "(7, 7)", "(7, 8)")
    said(lambda: loss(advantages=BATCH.kwargs["advantages"][:, 1:]), "advantages", "(7, 7)")
    said(lambda: loss(mask=BATCH.kwargs["mask"][1:]), "mask", "(6, 8)")
    said(lambda: loss(totals=7), "totals")
    flat = {
        name: BATCH.kwargs[name].reshape(-1)
        for name in ("old_logp", "rollout_logp", "ref_logp", "advantages", "mask")
    }
    said(
        lambda: loss(
            hidden=BATCH.hidden.reshape(-1, 8), ids=BATCH.ids.reshape(-1), group_ids=None, **flat
        ),
        "cu_seqlens",
    )
    said(lambda: loss(pl.Clip), "spec", "Clip")
    cov = PRESETS["clip_cov"]
    counted = pl.Totals.count(BATCH.kwargs["mask"])
    said(lambda: loss(cov, totals=counted), "measure")
    said(
        lambda: loss(PRESETS["ppo"].replace(aggregate=pl.PromptMean()), group_ids=None), "group_ids"
    )


def test_explaining_a_loss_needs_to_know_which_rows_matter() -> None:
    said(
        lambda: pl.explain_plan(PRESETS["ppo"], BATCH.hidden, BATCH.weight, BATCH.ids),
        "advantages",
        "mask",
    )


def test_a_weight_that_is_sharded() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        weight = distribute_tensor(CASE.weight.cpu(), mesh, [Shard(0)])
        hidden, ids = CASE.hidden.cpu(), CASE.ids.cpu()
        said(
            lambda: linear(hidden=hidden, weight=weight, ids=ids),
            "weight",
            "DTensor",
            "full_tensor",
        )
        whole = linear(hidden=hidden, weight=weight.full_tensor(), ids=ids)
        assert torch.equal(whole, linear(hidden=hidden, weight=CASE.weight.cpu(), ids=ids))
    finally:
        dist.destroy_process_group()
