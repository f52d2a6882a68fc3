"""The differential suite's own machinery: it must see every kind of difference,
and a defect must be one.
"""

from __future__ import annotations

import importlib
import json
import math
from dataclasses import replace

import pytest
import torch
from conformance import __main__ as command
from conformance import (
    cases,
    driver,
    environments,
    one,
    peers,
    record,
    release,
    report,
    returned,
    signatures,
    standins,
)
from conformance.compare import compare, flatten
from conformance.inputs import KINDS, draw
from conformance.runner import run_function
from conformance.suite import Defect, Function
from walk import walked

F64 = torch.float64


def mean_square(inputs, options):
    """A toy loss: mean over valid tokens of scale·x², with one metric of each kind."""
    x, mask = inputs["x"], inputs["mask"]
    loss = (options["scale"] * x.square() * mask).sum() / mask.sum().clamp(min=1)
    return {
        "loss": loss,
        "scale": options["scale"],
        "label": "square",
        "nothing": None,
        "kept": mask.bool(),
    }


def batch_inputs(batch, options):
    return {"x": batch.logp, "mask": batch.mask}


TOY = Function(
    "toy",
    [{"scale": 0.5}, {"scale": 2.0}],
    batch_inputs,
    mean_square,
    mean_square,
    differentiate=("x",),
)


def twin(**changes):
    """The toy function with a changed framework side: each change maps an output to the framework's
    other value.
    """

    def theirs(inputs, options):
        outputs = mean_square(inputs, options)
        return outputs | {name: change(outputs[name]) for name, change in changes.items()}

    return replace(TOY, theirs=theirs)


def whats(score):
    return {failure["what"] for failure in score.failures}


def test_equal_sides_pass_in_every_kind_and_both_dtypes():
    score = run_function(TOY)
    assert score.failures == []
    assert score.total == score.compared == 2 * len(KINDS) * 2  # options × kinds × dtypes
    assert score.worst["float64"] == {
        "loss": 0,
        "scale": 0,
        "label": 0,
        "nothing": 0,
        "kept": 0,
        "gradient of x": 0,
    }


def test_a_difference_of_1e_11_fails_in_float64_only():
    score = run_function(twin(loss=lambda x: x + 1e-11))
    assert {failure["dtype"] for failure in score.failures} == {"float64"}
    # The loss is below 1 in many cases, so the difference is relative to 1 there.
    assert score.worst["float64"]["loss"] == pytest.approx(1e-11, rel=1e-3)


def test_a_difference_of_1e_13_passes():
    assert run_function(twin(loss=lambda x: x + 1e-13)).failures == []


@walked(
    ("output", "change", "problem"),
    [
        ("nothing", lambda x: 0.0, "theirs is a float, ours a NoneType"),
        ("scale", lambda x: None, "theirs is a NoneType, ours a float"),
        ("scale", torch.tensor, "theirs is a float32[], ours a float"),
        ("scale", bool, "theirs is a bool, ours a float"),
        ("label", str.upper, "not equal"),
        ("kept", lambda x: x.float(), "theirs is float32["),
        ("kept", lambda x: x[:, :-1], "theirs is bool["),
        ("loss", lambda x: x.float().double() if x.dtype == F64 else x.double(), ""),
        ("loss", lambda x: x * math.nan, ""),
        ("loss", lambda x: x + math.inf, ""),
    ],
)
def test_every_kind_of_difference_is_seen(output, change, problem):
    score = run_function(twin(**{output: change}))
    assert whats(score) == {"different"}
    assert all(failure["output"] in (output, "gradient of x") for failure in score.failures)
    assert problem in score.failures[0].get("problem", "")


def test_an_output_of_one_side_only_is_a_difference():
    score = run_function(replace(TOY, ours=lambda i, o: mean_square(i, o) | {"extra": 1.0}))
    assert score.failures[0]["problem"] == "only ours has it"
    score = run_function(replace(TOY, theirs=lambda i, o: mean_square(i, o) | {"extra": 1.0}))
    assert score.failures[0]["problem"] == "only theirs has it"


def test_nan_is_not_equal_to_nan_and_infinity_is_equal_to_itself():
    nan, inf = torch.tensor([1.0, math.nan]), torch.tensor([1.0, math.inf])
    assert compare(nan, nan.clone()).worst == math.inf
    assert compare(math.nan, math.nan).worst == math.inf
    assert compare(inf, inf.clone()).worst == 0
    assert compare(inf, -inf).worst == math.inf
    assert compare(-math.inf, -math.inf).worst == 0


def test_a_difference_is_relative_to_the_framework_s_value_above_one():
    # |8 − 10| / max(1, |10|) = 0.2 and |0.5 − 0.25| / max(1, 0.25) = 0.25: the second is the worst.
    worst = compare(torch.tensor([8.0, 0.5]), torch.tensor([10.0, 0.25]))
    assert (worst.worst, worst.ours, worst.theirs) == (0.25, 0.5, 0.25)
    assert compare(8, 10.0).worst == 0.2


def test_nested_outputs_are_compared_by_name():
    assert flatten({"m": {"a": 1.0, "b": {"c": None}}, "r": (2.0, 3.0)}) == {
        "m.a": 1.0,
        "m.b.c": None,
        "r.0": 2.0,
        "r.1": 3.0,
    }


def test_a_gradient_difference_with_equal_losses_fails():
    def other_gradient(inputs, options):
        outputs = mean_square(inputs, options)
        extra = inputs["x"].sum() * 1e-9
        return outputs | {"loss": outputs["loss"] + extra - extra.detach()}

    score = run_function(replace(TOY, theirs=other_gradient))
    assert {failure["output"] for failure in score.failures if failure["dtype"] == "float64"} == {
        "gradient of x"
    }
    assert score.worst["float64"]["gradient of x"] == pytest.approx(1e-9, rel=1e-3)


def test_a_loss_without_gradient_fails_even_where_the_gradient_is_zero():
    masked = replace(
        TOY, kinds=("all_masked",), ours=lambda i, o: mean_square({**i, "x": i["x"].detach()}, o)
    )
    assert run_function(masked).failures[0]["problem"] == "our loss does not require a gradient"


def test_the_gradient_of_a_loss_per_token_is_taken_with_random_weights():
    # Σx and Σ(x + x' − x') with x' a permutation have the same plain gradient;
    # random weights distinguish y = x from y = flip(x).
    function = Function(
        "rows",
        [{}],
        batch_inputs,
        lambda i, o: {"loss": i["x"]},
        lambda i, o: {"loss": i["x"]},
        differentiate=("x",),
    )
    assert run_function(function).failures == []
    flipped = replace(
        function, theirs=lambda i, o: {"loss": i["x"] + (i["x"].flip(1) - i["x"].flip(1).detach())}
    )
    assert {failure["output"] for failure in run_function(flipped).failures} == {"gradient of x"}


def refuse(inputs, options):
    raise ValueError("no")


def test_one_side_that_raises_is_a_failure_and_two_are_agreement():
    assert whats(run_function(replace(TOY, theirs=refuse))) == {"one side raised"}
    assert whats(run_function(replace(TOY, ours=refuse))) == {"one side raised"}
    both = replace(TOY, ours=lambda i, o: refuse(i, o) if o["scale"] == 2 else mean_square(i, o))
    both = replace(both, theirs=both.ours)
    score = run_function(both)
    assert (score.failures, score.refused, score.compared) == ([], 20, 20)


def test_an_error_of_ours_that_is_a_bug_is_no_agreement():
    def broken(inputs, options):
        raise AttributeError("'NoneType' object has no attribute 'sum'")

    assert whats(run_function(replace(TOY, ours=broken, theirs=broken))) == {"ours broke"}


def test_a_function_that_is_never_compared_fails():
    assert whats(run_function(replace(TOY, ours=refuse, theirs=refuse))) == {"no case was compared"}


def test_an_input_to_differentiate_in_that_is_never_there_fails():
    assert whats(run_function(replace(TOY, differentiate=("x", "y")))) == {
        "no case has the input y to differentiate in"
    }


NAN_ON_EMPTY = Defect("NaN on an empty mask", "loss 0", ("loss",))


def nan_on_empty(inputs, options):
    return mean_square(inputs, options) | {
        "loss": (inputs["x"].square() * inputs["mask"]).sum()
        * options["scale"]
        / inputs["mask"].sum()
    }


def declared(defect):
    return lambda options, inputs: None if inputs["mask"].any() else defect


def test_a_defect_is_listed_with_an_example_and_the_other_outputs_are_compared():
    assert whats(run_function(replace(TOY, theirs=nan_on_empty))) == {"different"}
    whole = replace(NAN_ON_EMPTY, outputs=("loss", "gradient"))
    score = run_function(replace(TOY, theirs=nan_on_empty, defect=declared(whole)))
    assert score.failures == []
    tally = score.defects["NaN on an empty mask"]
    assert (tally.declared, tally.seen, score.compared) == (4, 4, 40)
    shown = tally.example["values"]["loss"]
    assert shown["ours"] == 0
    assert math.isnan(shown["theirs"])


def test_a_defect_of_the_loss_does_not_cover_the_gradient():
    score = run_function(replace(TOY, theirs=nan_on_empty, defect=declared(NAN_ON_EMPTY)))
    assert {failure["output"] for failure in score.failures} == {"gradient of x"}


def test_several_defects_may_concern_one_case():
    two = [NAN_ON_EMPTY, Defect("gradient of NaN", "zero", ("gradient",))]
    score = run_function(replace(TOY, theirs=nan_on_empty, defect=declared(two)))
    assert score.failures == []
    assert {reason: tally.seen for reason, tally in score.defects.items()} == {
        "NaN on an empty mask": 4,
        "gradient of NaN": 4,
    }


def test_a_defect_that_never_shows_is_stale():
    score = run_function(replace(TOY, defect=declared(Defect("wrong on an empty mask", "right"))))
    assert [failure["what"][:12] for failure in score.failures] == ["stale defect"]
    function = replace(TOY, defect=declared(Defect("wrong on an empty mask", "right")))
    # 4 declared cases: by chance, with another seed.
    assert run_function(function, shift=1).failures == []
    assert whats(run_function(replace(function, seeds=3), shift=1)) == whats(score)


def test_ours_must_be_finite_and_run_where_a_defect_is_declared():
    every = Defect("NaN", "a number")
    nan = replace(TOY, ours=nan_on_empty, theirs=nan_on_empty, defect=declared(every))
    assert "ours is not finite although a defect declares our result" in whats(run_function(nan))
    raises = replace(
        TOY,
        ours=lambda i, o: mean_square(i, o) if i["mask"].any() else refuse(i, o),
        defect=declared(every),
    )
    assert "ours raised where a defect says that it runs" in whats(run_function(raises))


def test_a_defect_may_be_that_the_framework_raises():
    theirs = lambda i, o: mean_square(i, o) if i["mask"].any() else refuse(i, o)  # noqa: E731
    score = run_function(
        replace(TOY, theirs=theirs, defect=declared(Defect("raises on an empty mask", "loss 0")))
    )
    assert (score.failures, score.undefined, score.compared) == ([], 4, 36)
    assert (
        score.defects["raises on an empty mask"].example["values"]["error"]["theirs"]
        == "ValueError: no"
    )


def test_a_failure_names_the_command_that_repeats_it():
    failure = run_function(twin(loss=lambda x: x + 1)).failures[0]
    words = json.loads(
        json.dumps({key: failure[key] for key in ("seed", "kind", "dtype", "options")})
    )
    text = one.replay(twin(loss=lambda x: x + 1), words)
    assert f"theirs loss = {failure['theirs']:.4f}"[:20] in text
    again = cases.Case(**words)
    assert torch.equal(again.inputs(TOY)["x"], again.inputs(TOY)["x"])


def test_other_seeds_draw_other_batches_and_both_dtypes_the_same_numbers():
    first, shifted = (list(cases.cases(TOY, shift)) for shift in (0, 1))
    assert {case.seed for case in first}.isdisjoint(case.seed for case in shifted)
    # float64, float32, float64, …
    assert [case.seed for case in first[::2]] == [case.seed for case in first[1::2]]
    assert len({case.seed for case in first}) == len(first) / 2
    assert torch.equal(draw(5, "extreme", F64).logp.float(), draw(5, "extreme", torch.float32).logp)


def test_one_case_in_three_still_shows_every_option_and_kind():
    many = replace(TOY, options=[{"scale": float(i)} for i in range(1, 7)])
    some = list(cases.cases(many, every=3))
    assert len(some) == cases.count(many, 3) == 2 * 6 * len(KINDS) / 3
    assert {case.kind for case in some} == set(KINDS)
    assert {case.options["scale"] for case in some} == {1.0, 2.0, 3.0, 4.0, 5.0, 6.0}
    assert {case.seed for case in some} <= {case.seed for case in cases.cases(many)}
    # A function with few cases is run whole.
    assert list(cases.cases(TOY, every=3)) == list(cases.cases(TOY))
    assert cases.count(TOY, 3) == 40


def test_batches_match_their_kind():
    for seed in range(20):
        assert draw(seed, "full", F64).mask.all()
        assert not draw(seed, "all_masked", F64).mask.any()
        assert (draw(seed, "single_token", F64).mask.sum(1) == 1).all()
        empty = draw(seed, "empty_rows", F64).mask.sum(1) == 0
        assert empty.any()
        assert not empty.all()
        on_policy = draw(seed, "on_policy", F64)
        assert torch.equal(on_policy.logp, on_policy.old_logp)
        for kind in KINDS:
            batch = draw(seed, kind, F64)
            assert (
                max(
                    x.max()
                    for x in (batch.logp, batch.old_logp, batch.rollout_logp, batch.ref_logp)
                )
                <= 0
            )
    extreme = [draw(seed, "extreme", F64) for seed in range(20)]
    reach = [(b.logp - b.old_logp) for b in extreme]
    assert max(x.max() for x in reach) > 25
    assert min(x.min() for x in reach) < -25


def result(function=TOY, pinned=True, minimum=0):
    return {
        "peer": "toy",
        "release": "1.0",
        "pinned": pinned,
        "minimum": minimum,
        "functions": [one.describe(run_function(function))],
    }


def test_the_table_has_a_row_for_each_function_and_the_sum():
    lines = report.table([result()]).splitlines()
    assert lines[0].split() == list(report.HEADER)
    assert lines[2].split() == ["toy", "1.0", "toy", "40", "0", "0", "0", "0"]
    assert lines[3].split() == ["toy", "1.0", "ALL", "40", "0", "0", "0", "0"]


def test_the_table_shows_differences_and_defects():
    whole = replace(NAN_ON_EMPTY, outputs=("loss", "gradient"))
    row = (
        report.table([result(replace(TOY, theirs=nan_on_empty, defect=declared(whole)))])
        .splitlines()[2]
        .split()
    )
    assert row[-1] == "4"
    listed = report.defects([result(replace(TOY, theirs=nan_on_empty, defect=declared(whole)))])
    assert "toy: NaN on an empty mask" in listed
    assert "we: loss 0" in listed
    row = report.table([result(twin(loss=lambda x: x + 1e-11))]).splitlines()[2].split()
    assert row[4:6] == ["1.0e-11", "0"]


def test_the_verdict():
    assert report.problems([result()]) == []
    assert (
        "failures, the first: different" in report.problems([result(twin(loss=lambda x: x + 1))])[0]
    )
    assert report.problems([result(minimum=41)]) == [
        "toy 1.0: 40 cases compared; at least 41 are wanted."
    ]
    assert report.problems([result(minimum=41, pinned=False)]) == []
    assert report.problems([result(minimum=41)], whole=False) == []
    assert report.problems([result() | {"signatures": ["x changed"]}]) == [
        "toy 1.0 signature: x changed"
    ]


def test_results_are_json_even_where_a_number_is_not_finite(tmp_path):
    one.write_json(tmp_path / "a" / "r.json", result(twin(loss=lambda x: x * math.nan)))
    read = json.loads(
        (tmp_path / "a" / "r.json").read_text(), parse_constant=lambda name: pytest.fail(name)
    )
    assert read["functions"][0]["worst"]["float64"]["loss"] == "inf"
    assert "inf" in report.table([read])


@pytest.fixture
def toy_peer(monkeypatch):
    peer = environments.Peer("toy", "1.0", ("toy_losses",), others=("0.9",), minimum=0)
    monkeypatch.setitem(environments.PEERS, "toy", peer)
    monkeypatch.setattr(one, "enter", lambda peer, version: release.set_current(version))
    monkeypatch.setattr(
        one, "functions", lambda peer: [TOY, replace(TOY, name="new", releases=("1.0",))]
    )
    yield peer
    release._current.clear()


def test_the_run_command_prints_the_table_and_its_status_is_the_verdict(
    toy_peer, monkeypatch, capsys
):
    assert command.main(["run", "--peer", "toy"]) == 0
    assert "every compared case is within" in capsys.readouterr().out
    monkeypatch.setattr(one, "functions", lambda peer: [twin(loss=lambda x: x + 1)])
    assert command.main(["run", "--peer", "toy"]) == 1
    assert "FAILED" in capsys.readouterr().out


def test_a_function_is_compared_at_its_releases_and_can_be_chosen(toy_peer):
    assert [f.name for f in one.applicable(toy_peer, "1.0")] == ["toy", "new"]
    assert [f.name for f in one.applicable(toy_peer, "0.9")] == ["toy"]
    assert [f.name for f in one.applicable(toy_peer, "1.0", "ne")] == ["new"]
    with pytest.raises(ValueError, match="there are toy, new"):
        one.applicable(toy_peer, "1.0", "missing")


def test_a_missing_release_is_named():
    release._current.clear()
    with pytest.raises(RuntimeError, match="no release was set"):
        release.current()


def test_the_environment_is_rebuilt_only_if_its_pins_changed(tmp_path, monkeypatch):
    ran = []
    monkeypatch.setattr(environments, "HOME", tmp_path)
    monkeypatch.setattr(environments, "CONSTRAINTS", tmp_path)
    monkeypatch.setattr(
        environments,
        "_run",
        lambda words, name: (tmp_path / name).mkdir(exist_ok=True) or ran.append(words),
    )
    (tmp_path / "toy.txt").write_text("toy==1.0\n")
    peer = environments.Peer("toy", "1.0", (), steps=(("toy",),))
    environments.ensure(peer)
    assert [words[1:3] for words in ran] == [["-m", "venv"], ["-m", "pip"]]
    environments.ensure(peer)
    assert len(ran) == 2
    (tmp_path / "toy.txt").write_text("toy==1.1\n")
    environments.ensure(peer)
    assert len(ran) == 4


def test_a_failed_build_leaves_no_stamp(tmp_path, monkeypatch):
    monkeypatch.setattr(environments, "HOME", tmp_path)
    monkeypatch.setattr(environments, "CONSTRAINTS", tmp_path)
    monkeypatch.setattr(environments, "interpreter", lambda peer: "/bin/false")
    monkeypatch.setattr(environments, "_base_python", lambda: "/bin/true")
    (tmp_path / "toy.txt").write_text("toy==1.0\n")
    (tmp_path / "toy").mkdir()
    (tmp_path / "toy" / ".installed").write_text("the pins of another day")
    with pytest.raises(environments.BuildError, match="pip install"):
        environments.ensure(environments.Peer("toy", "1.0", (), steps=(("toy",),)))
    assert not (tmp_path / "toy" / ".installed").exists()


def test_every_peer_has_pins_for_its_release():
    for peer in environments.PEERS.values():
        if peer.steps:
            pins = (environments.CONSTRAINTS / f"{peer.name}.txt").read_text().splitlines()
            assert f"{peer.name}=={peer.release}" in pins
            assert "torch==2.13.0" in pins
            named = {pin.split("==")[0].lower().replace("_", "-") for pin in pins}
            assert {
                word for step in peer.steps for word in step if not word.startswith("-")
            } <= named


def test_a_dead_child_is_reported_with_its_last_output(monkeypatch, tmp_path, capsys):
    words = tmp_path / "dies"
    words.write_text("#!/bin/sh\necho progress 1 2\necho its last words\nexit 3\n")
    words.chmod(0o755)
    monkeypatch.setattr(driver, "interpreter", lambda peer: words)
    with pytest.raises(SystemExit, match=r"toy .* came to no result"):
        driver.run_child(environments.Peer("toy", "1.0", ()), "1.0", None, ["run"], driver.Board())
    said = capsys.readouterr().out
    assert "status 3" in said
    assert "its last words" in said
    assert "progress" not in said


def test_an_unknown_framework_is_named():
    with pytest.raises(SystemExit, match="no framework called verll; there are verl"):
        driver.chosen(["verll"])


def test_stand_ins_replace_missing_modules_only(monkeypatch):
    import sys

    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.setattr(
        standins,
        "MODULES",
        {("toy", None): ("no_such_package_at_all", "json"), ("toy", "0.9"): ("none_either",)},
    )
    standins.install("toy", "1.0")
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("none_either")
    from no_such_package_at_all.deep import decorate

    assert decorate(len) is len
    assert json.dumps({}) == "{}"
    for name in [name for name in sys.modules if name.startswith("no_such_package_at_all")]:
        monkeypatch.delitem(sys.modules, name)


def pair(x, y=2, *, z=None):
    return x, y


def test_parameters_and_return_values_are_seen():
    assert signatures.parameters(pair) == [
        ["x", "POSITIONAL_OR_KEYWORD", "required"],
        ["y", "POSITIONAL_OR_KEYWORD", "2"],
        ["z", "KEYWORD_ONLY", "None"],
    ]
    with returned.watching({returned.code_of(pair): "pair"}) as seen:
        pair(1)
    assert seen == {"pair": {"2 values"}}


def test_ours_may_only_add_keywords_that_are_named():
    theirs, ours = signatures.parameters(lambda x, y=2: x), signatures.parameters(pair)
    assert signatures.drift("pair", theirs, ours, ("z",)) == []
    assert signatures.drift("pair", theirs, ours) == [
        "pair: theirs (x, y=2); ours (x, y=2, z=None)"
    ]
    assert (
        signatures.drift("pair", theirs, signatures.parameters(lambda x, y=2, z=None: x), ("z",))
        != []
    )
    assert signatures.drift("pair", None, ours) == ["pair: only we have it"]


def test_a_return_value_of_one_side_counts_unless_excluded(monkeypatch):
    monkeypatch.setattr(
        signatures,
        "our_calls",
        lambda peer: {"toy:mean_square": (mean_square, ()), "toy:pair": (pair, ())},
    )
    described = {
        "callables": {
            "toy:mean_square": {"returns": ["dict"]},
            "toy:pair": {"returns": ["2 values"]},
        }
    }
    assert signatures.check_returns("toy", described, [TOY]) == [
        "toy:pair: theirs returns 2 values, ours nothing"
    ]
    assert signatures.check_returns("toy", described, [TOY], seen_only=True) == []
    described["callables"]["toy:mean_square"]["returns"] = ["2 values"]
    assert signatures.check_returns("toy", described, [TOY], seen_only=True) == [
        "toy:mean_square: theirs returns 2 values, ours dict"
    ]


def test_recorded_values_come_back_exactly():
    values = {
        "x": torch.tensor([[0.1, math.pi], [-math.inf, 1e-300]], dtype=F64),
        "mask": torch.tensor([True, False]),
        "ids": torch.tensor([3, 4]),
        "loss": torch.tensor(1 / 3, dtype=F64),
        "label": "a",
        "none": None,
        "flag": True,
        "number": 0.1 + 0.2,
        "infinite": math.inf,
        "nested": {"a": [1, 2.5]},
    }
    back = record.decode(json.loads(json.dumps(record.encode(values), allow_nan=False)))
    for name, value in values.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(back[name], value)
            assert back[name].dtype == value.dtype
        else:
            assert back[name] == value
            assert type(back[name]) is type(value)
    assert math.isnan(record.decode(record.encode({"x": math.nan}))["x"])
    with pytest.raises(TypeError, match="a set cannot be recorded"):
        record.encode({"x": {1}})


def test_chosen_cases_show_every_option_and_kind():
    options = [{"a": a, "b": b} for a in (1, 2, 3) for b in ("x", "y")]
    every = list(cases.cases(replace(TOY, options=options), dtypes=("float64",)))
    kept = record.spread(every, 12)
    assert len(kept) == 12
    assert {case.kind for case in kept} == set(KINDS)
    assert {(case.options["a"], case.options["b"]) for case in kept} == {
        (a, b) for a in (1, 2, 3) for b in ("x", "y")
    }
    assert len(record.spread(every[:1], 12)) == 1


def test_a_record_is_replayed_without_the_cases_of_a_defect():
    release.set_current("1.0")
    whole = replace(NAN_ON_EMPTY, outputs=("loss", "gradient"))
    function = replace(TOY, theirs=nan_on_empty, defect=declared(whole))
    made = json.loads(json.dumps(record.record(function, "1.0"), allow_nan=False))
    assert max(len(one["inputs"]["x"]["numbers"]) for one in made) <= record.TOKENS
    empty = [one for one in made if one["kind"] == "all_masked"]
    assert empty
    assert all(one["left_out"] == ["loss", "gradient of x"] for one in empty)
    for one_case in made:
        assert max(record.replay(function, one_case).values()) == 0
    assert max(record.replay(twin(), made[0] | {"options": {"scale": 7.0}}).values()) > 0.01
    assert record.replay(replace(TOY, ours=refuse), made[0]) == {"raises": math.inf}
    release._current.clear()


def test_a_hook_that_needs_the_framework_is_not_recorded(monkeypatch):
    def ours(inputs, options):
        return mean_square(inputs, options) | {
            "label": importlib.import_module("colorsys").__name__
        }

    hook = replace(TOY, ours=ours, theirs=ours)
    release.set_current("1.0")
    assert record.record(hook, "1.0")
    assert record.record(hook, "1.0", "colorsys") == []
    assert importlib.import_module("colorsys").rgb_to_hsv(0, 0, 0) == (0, 0, 0)  # and it is back
    release._current.clear()


def test_another_release_is_recorded_only_where_its_numbers_differ():
    def by_release(inputs, options):
        factor = 2 if release.current() == "0.9" and options["scale"] == 2.0 else 1
        outputs = mean_square(inputs, options)
        return outputs | {"loss": factor * outputs["loss"]}

    function = replace(TOY, ours=by_release, theirs=by_release)
    release.set_current("0.9")
    made = record.record(function, "1.0")
    assert len(made) == record.MOST_ELSEWHERE
    assert {one["options"]["scale"] for one in made} == {2.0}
    assert record.record(TOY, "1.0") == []
    assert release.current() == "0.9"
    release._current.clear()


def test_the_peers_registry_names_modules_with_functions():
    release.set_current("0")
    for peer in environments.PEERS.values():
        assert all(isinstance(function, Function) for function in peers.functions(peer))
