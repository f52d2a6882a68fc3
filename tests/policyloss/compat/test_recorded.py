"""The drop-ins against the frameworks' own numbers, recorded with their inputs:
the proof where no framework is installed.
"""

from __future__ import annotations

import ast
import copy
import sys

import pytest
from conformance import forms, release, signatures
from conformance.environments import PEERS
from conformance.record import (
    RECORDED,
    is_recordable,
    needs_framework,
    recorded_signatures,
    replay,
)
from conformance.runner import run_function
from recorded_cases import NAMES, entries, entry, recorded
from walk import walked

TOLERANCE = 1e-12
# verl computes the statistics of this estimator in float32 for any input, and their last digit
# depends on the processor on which the numbers were recorded (seen: one rounding, 5.7e-8, on
# another one).
IN_FLOAT32 = {("verl", "advantage grpo_vectorized"): 2.0**-23}


@pytest.fixture(autouse=True)
def no_framework(monkeypatch):
    """An import of a framework fails here, even where it is installed."""
    for name in ("verl", "openrlhf", "trl", "coati"):
        monkeypatch.setitem(sys.modules, name, None)


def of_the_pinned_release(peer):
    return [f for f in entries(peer) if f.releases is None or PEERS[peer].release in f.releases]


def worst(peer, name, cases):
    """The worst difference over recorded cases, and where it is."""
    found = []
    for case in cases:
        for output, difference in replay(entry(peer, name, case["release"]), case).items():
            found.append((difference, output, case["release"], case["kind"], str(case["options"])))
    return max(found)


@walked(("peer", "name"), NAMES, ids=lambda word: word)
def test_ours_gives_the_recorded_numbers(peer, name):
    cases = recorded(peer)[name]
    assert cases
    in_float32 = entry(peer, name, PEERS[peer].release).dtypes == ("float32",)
    tolerance = 1e-6 if in_float32 else IN_FLOAT32.get((peer, name), TOLERANCE)
    assert worst(peer, name, cases)[0] <= tolerance, worst(peer, name, cases)


@walked("peer", [peer.name for peer in PEERS.values() if peer.steps])
def test_every_function_of_the_pinned_release_is_recorded(peer):
    release.set_current(PEERS[peer].release)
    expected = {
        f.name for f in of_the_pinned_release(peer) if not needs_framework(f) and is_recordable(f)
    }
    of_the_release = {
        name
        for name, cases in recorded(peer).items()
        if any(c["release"] == PEERS[peer].release for c in cases)
    }
    assert of_the_release == expected


@walked("peer", ["verl", "openrlhf", "trl"])
def test_our_signatures_are_the_recorded_ones(peer):
    release.set_current(PEERS[peer].release)
    described = recorded_signatures(PEERS[peer])
    assert described["release"] == PEERS[peer].release
    assert signatures.check(peer, described, of_the_pinned_release(peer)) == []


def test_openrlhf_takes_either_family_of_arguments():
    shown = recorded_signatures(PEERS["openrlhf"])["callables"][
        "openrlhf.models.loss:PolicyLoss.__init__"
    ]["parameters"]
    newer = {name: ast.literal_eval(default) for name, _, default in shown}
    assert list(newer)[5:] == [
        "is_correction_level",
        "is_correction_mode",
        "is_correction_gating",
        "is_correction_threshold",
    ]
    assert forms.constructor_problems(newer, "0.11.2") == []
    older = dict(list(newer.items())[:5])
    older |= {
        "enable_vllm_is_correction": False,
        "vllm_is_truncated_threshold": None,
        "vllm_is_correction_type": "tis",
    }
    for version in ("0.11.1", "0.11.0"):
        assert forms.constructor_problems(older, version) == []


def test_every_pinned_callable_of_verl_is_recorded_with_its_results():
    found = recorded_signatures(PEERS["verl"])["callables"]
    assert found["verl.trainer.ppo.core_algos:compute_policy_loss"]["returns"] == ["4 values"]
    assert found["verl.trainer.ppo.core_algos:compute_value_loss"]["returns"] == ["2 values"]
    assert sum("POLICY_LOSS_REGISTRY" in name for name in found) == 12
    assert sum("ADV_ESTIMATOR_REGISTRY" in name for name in found) == 14
    # apply_bypass_mode changes its argument and returns nothing;
    # every other callable was seen to return something.
    assert {name.rpartition(":")[2] for name, one in found.items() if not one["returns"]} == {
        "apply_bypass_mode"
    }


def changed(peer, path, change):
    """The recorded signatures of a framework, one callable's parameters changed
    as a new release might.
    """
    described = copy.deepcopy(recorded_signatures(PEERS[peer]))
    change(described["callables"][path])
    return described


VALUE_LOSS = "verl.trainer.ppo.core_algos:compute_value_loss"


@walked(
    ("change", "words"),
    [
        (
            lambda one: one["parameters"].append(["kind", "POSITIONAL_OR_KEYWORD", "'mse'"]),
            "kind='mse'",
        ),
        (lambda one: one["parameters"].pop(), "compute_value_loss"),
        (lambda one: one["parameters"].reverse(), "compute_value_loss"),
        (
            lambda one: one["parameters"][5].__setitem__(2, "'token-sum'"),
            "loss_agg_mode='token-sum'",
        ),
        (lambda one: one["parameters"][0].__setitem__(0, "values_now"), "values_now"),
        (lambda one: one["parameters"][5].__setitem__(1, "KEYWORD_ONLY"), "compute_value_loss"),
    ],
)
def test_a_signature_that_drifts_fails(change, words):
    problems = signatures.check_parameters("verl", changed("verl", VALUE_LOSS, change))
    assert len(problems) == 1
    assert words in problems[0]


def test_another_number_of_return_values_fails():
    release.set_current(PEERS["verl"].release)
    described = changed("verl", VALUE_LOSS, lambda one: one["returns"].__setitem__(0, "3 values"))
    described["callables"] = {VALUE_LOSS: described["callables"][VALUE_LOSS]}
    value_loss = [entry("verl", "compute_value_loss", PEERS["verl"].release)]
    assert signatures.check_returns("verl", described, value_loss) == [
        f"{VALUE_LOSS}: theirs returns 3 values, ours 2 values"
    ]


def test_a_new_or_missing_name_in_a_registry_fails():
    registry = "verl.trainer.ppo.core_algos:POLICY_LOSS_REGISTRY"
    described = copy.deepcopy(recorded_signatures(PEERS["verl"]))
    described["callables"][f"{registry}[new]"] = described["callables"][f"{registry}[gspo]"]
    del described["callables"][f"{registry}[dro]"]
    problems = signatures.check_parameters("verl", described)
    assert f"{registry}[new]: only the framework has it" in problems
    assert f"{registry}[dro]: only we have it" in problems


def test_a_new_field_of_grpo_config_fails():
    fields = recorded_signatures(PEERS["trl"])["fields"]
    assert forms.field_problems(fields) == []
    assert forms.field_problems(fields | {"new_trick": 0.5}) == [
        "GRPOConfig.new_trick is new: does it make the loss?"
    ]
    assert forms.field_problems({k: v for k, v in fields.items() if k != "delta"}) == [
        "GRPOConfig.delta is gone"
    ]
    assert forms.field_problems(fields | {"epsilon": 0.1}) == [
        "GRPOConfig.epsilon is 0.1 by default, ours 0.2"
    ]


def test_a_hook_of_trl_s_trainer_that_changed_fails():
    described = recorded_signatures(PEERS["trl"])
    hook = "trl:GRPOTrainer._compute_loss"
    other = changed(
        "trl", hook, lambda one: one["parameters"].append(["scale", "POSITIONAL_OR_KEYWORD", "1.0"])
    )
    assert signatures.check_hooks("trl", described, described) == []
    assert signatures.check_hooks("trl", other, described) == [
        f"{hook} is not as it was recorded: (model, inputs, scale=1.0)"
    ]


def test_a_new_argument_of_openrlhf_fails():
    assert forms.constructor_problems({"clip_eps_low": 0.2, "magic": 1}, "0.11.2") == [
        "PolicyLoss has a new argument: magic"
    ]
    assert (
        forms.constructor_problems({"clip_eps_low": 0.3}, "0.11.2")[0]
        == "PolicyLoss without arguments: clip_eps_low is 0.2, not 0.3"
    )


@walked("function", entries("colossalai"), ids=lambda function: function.name)
def test_colossalchat_is_compared_whole(function):
    """Its package is on no index, so all there is of it is recorded,
    and all of it is compared here.
    """
    release.set_current(PEERS["colossalai"].release)
    score = run_function(function)
    assert score.failures == []
    assert score.compared >= 12


def perturbed(case, factor):
    """The case with one recorded number moved: the loss,
    or the first number of the first tensor.
    """
    moved = copy.deepcopy(case)
    outputs = moved["outputs"]
    name = (
        "loss"
        if "loss" in outputs
        else next(n for n, x in outputs.items() if isinstance(x, dict) and x["tensor"] == "float64")
    )
    outputs[name]["numbers"][0] += factor * max(1.0, abs(outputs[name]["numbers"][0]))
    return moved


@walked("name", ["compute_policy_loss_vanilla", "agg_loss", "compute_value_loss"])
def test_a_recorded_number_that_is_off_by_1e_11_fails(name):
    case = next(c for c in recorded("verl")[name] if "loss" in c.get("outputs", ()))
    assert worst("verl", name, [case])[0] <= TOLERANCE
    assert worst("verl", name, [perturbed(case, 1e-11)])[:2] == (
        pytest.approx(1e-11, rel=0.1),
        "loss",
    )


def test_a_recorded_gradient_that_is_off_fails():
    case = copy.deepcopy(
        next(c for c in recorded("verl")["compute_policy_loss"] if c["kind"] == "full")
    )
    case["outputs"]["gradient of log_prob"]["numbers"][-1] += 1e-11
    assert worst("verl", "compute_policy_loss", [case])[1] == "gradient of log_prob"


def test_a_missing_output_fails():
    case = copy.deepcopy(
        next(c for c in recorded("verl")["compute_policy_loss"] if c["kind"] == "full")
    )
    del case["outputs"]["ppo_kl"]
    assert worst("verl", "compute_policy_loss", [case])[0] == float("inf")


def test_numbers_where_the_framework_raised_fail():
    case = copy.deepcopy(
        next(c for c in recorded("verl")["compute_policy_loss"] if c["kind"] == "full")
    )
    del case["outputs"]
    case["raises"] = "ValueError: no"
    assert worst("verl", "compute_policy_loss", [case])[0] == float("inf")


def test_the_records_stay_small():
    assert sum(path.stat().st_size for path in RECORDED.glob("*.json")) < 1_500_000


@walked(
    ("peer", "theirs", "ours"),
    [
        ("trl", signatures.ADD_FUSED_HEAD, "policyloss.compat.trl.head:add_fused_lm_head"),
        ("openrlhf", signatures.ACTOR_FORWARD, "policyloss.compat.openrlhf.hook:actor_forward"),
    ],
)
def test_a_head_has_the_parameters_of_the_replaced_function(peer, theirs, ours):
    recorded_parameters = recorded_signatures(PEERS[peer])["callables"][theirs]["parameters"]
    assert signatures.parameters(signatures.resolve(ours)) == recorded_parameters
