"""Adapters translate a framework's interface and compute no loss: every loss, ratio, KL and average
comes from the public functions.

A framework's bookkeeping — epsilons, counts, roundings, metrics — is in modules of its own, listed
below. All of them can be imported with torch alone.
"""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from walk import walked

import policyloss as pl
from cases import make_batch
from policyloss.compat import (
    areal,
    colossalai,
    miles,
    nemo_rl,
    openrlhf,
    prime_rl,
    skyrl,
    slime,
    tinker,
    torchtitan,
    trl,
    verl,
)
from policyloss.compat.arguments import drop_in_of
from policyloss.compat.colossalai import models
from policyloss.compat.engines import rlinf_loss, xtuner_loss
from policyloss.compat.trl.trainer import WithOurAsyncLoss
from policyloss.compat.verl.registry import as_verl_loss
from policyloss.errors import InputError

COMPAT = Path(pl.__file__).parent / "compat"
FILES = sorted(COMPAT.rglob("*.py"))
# A framework's own arithmetic, described; every other module of `compat` translates.
BOOKKEEPING = {
    "parts.py": "guarded counts, shares and lengths, a given penalty, denominators, slopes, maxima",
    "openrlhf/corrections.py": "shares that are 0 of nothing, and its capped weight",
    "openrlhf/hook.py": "positions of tokens, and log-probabilities times the mask",
    "tinker/data.py": "offsets of sequences, constants of a graph, thresholds as distances from 1",
    "trl/distillation.py": "its reductions of a divergence, and its scale of logits",
    "trl/parts.py": "its rounding of k3, the ratio that weighs its KL, and the counts of a step",
    "verl/advantage_numbers.py": "advantages with its rounding",
    "verl/distillation.py": "masses and overlaps of top-k entries, for its report",
    "verl/parts.py": "means with its guard, numbers of one micro-batch, guarded lengths",
    "verl/rollout_metrics.py": "statistics of the rollout weights, for its report",
    "verl/rollout_thresholds.py": "reciprocals and logarithms of its bounds",
}
ADAPTERS = [path for path in FILES if path.relative_to(COMPAT).as_posix() not in BOOKKEEPING]
ARITHMETIC = (ast.Add, ast.Sub, ast.Mult, ast.Div, ast.Pow, ast.MatMult, ast.Mod, ast.FloorDiv)
# What torch offers that computes no number: kinds, dtypes,
# constants shaped like another tensor, masks put together.
HARMLESS = {
    *(
        "Tensor",
        "Generator",
        "device",
        "dtype",
        "nn",
        "no_grad",
        "is_grad_enabled",
        "autocast",
        "is_tensor",
        "split",
        "distributed",
        "utils",
    ),
    *("bool", "int32", "int64", "float16", "bfloat16", "float32", "float64", "long"),
    *(
        "logical_and",
        "tensor",
        "as_tensor",
        "zeros_like",
        "ones_like",
        "zeros",
        "ones",
        "full",
        "empty",
        "finfo",
        "promote_types",
    ),
}
COMPUTING = {
    *(
        "exp",
        "log",
        "expm1",
        "log1p",
        "sum",
        "mean",
        "std",
        "var",
        "norm",
        "cumsum",
        "sqrt",
        "rsqrt",
        "square",
        "pow",
        "abs",
        "sign",
    ),
    *(
        "clamp",
        "clip",
        "where",
        "maximum",
        "minimum",
        "amax",
        "amin",
        "max",
        "min",
        "masked_fill",
        "nan_to_num",
        "sigmoid",
        "neg",
    ),
    *(
        "add",
        "sub",
        "mul",
        "div",
        "add_",
        "sub_",
        "mul_",
        "div_",
        "clamp_",
        "softmax",
        "log_softmax",
        "logsumexp",
        "dot",
        "matmul",
    ),
}


# Sums of two inputs in a drop-in: returns from advantages and values, a guarded count.
ADDED = {"advantage + old_values", "counts.tokens + guard(mask)"}


def is_constant(node: ast.expr) -> bool:
    """Whether `node` is a number, or a name in capitals: a constant of the module."""
    return isinstance(node, ast.Constant) or (isinstance(node, ast.Name) and node.id.isupper())


def arithmetic_in(source: str) -> list[str]:
    """Every place where `source` computes with values:
    operators on anything but types, and torch's own functions.

    To add an epsilon (`count + EPSILON`) or two of a framework's own inputs is bookkeeping.
    """
    places = []
    for node in ast.walk(ast.parse(source)):
        operator = isinstance(node, (ast.BinOp, ast.AugAssign)) and isinstance(node.op, ARITHMETIC)
        sides = (node.left, node.right) if operator and isinstance(node, ast.BinOp) else ()
        if (
            sides
            and isinstance(node.op, ast.Add)
            and (is_constant(sides[1]) or ast.unparse(node) in ADDED)
        ):
            continue
        minus = (
            isinstance(node, ast.UnaryOp)
            and isinstance(node.op, ast.USub)
            and not isinstance(node.operand, ast.Constant)
        )
        method = (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and ast.unparse(node.func.value) != "super()"
        )
        function = method and node.func.attr in COMPUTING  # a trainer's own log(…) does not count
        of_torch = (
            isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and node.value.id == "torch"
        )
        if operator or minus or function or (of_torch and node.attr not in HARMLESS):
            places.append(f"line {node.lineno}: {ast.unparse(node)}")
    return places


@walked("path", ADAPTERS, ids=[str(p.relative_to(COMPAT)) for p in ADAPTERS])
def test_an_adapter_does_no_arithmetic_but_on_counts(path: Path) -> None:
    assert arithmetic_in(path.read_text()) == []


def test_the_modules_of_bookkeeping_exist_and_each_computes() -> None:
    for name in BOOKKEEPING:
        assert arithmetic_in((COMPAT / name).read_text()), (
            f"{name} computes nothing; take it off the list"
        )


@walked("name", BOOKKEEPING)
def test_bookkeeping_calls_no_loss(name: str) -> None:
    """It cannot wrap a loss in its own arithmetic: only adapters call losses, and they compute
    nothing.
    """
    names = {
        node.id
        for node in ast.walk(ast.parse((COMPAT / name).read_text()))
        if isinstance(node, ast.Name)
    }
    assert not names & {"policy_loss", "value_loss", "aggregate_tokens"}


@walked(
    "line",
    [
        "loss = a * b",
        "loss -= kl",
        "x = -loss",
        "x = torch.exp(d)",
        "x = d.exp()",
        "x = (a - b).sum()",
        "y = 1 + eps",
        "loss = loss + kl",
        "z = EPSILON * loss",
        "z = x.mean(-1)",
    ],
)
def test_the_scan_finds_arithmetic(line: str) -> None:
    assert arithmetic_in(line)


def test_the_scan_covers_every_adapter() -> None:
    names = {p.relative_to(COMPAT).parts[0].removesuffix(".py") for p in FILES}
    assert {"verl", "openrlhf", "colossalai", "trl"} <= names


def test_adapters_import_with_torch_alone() -> None:
    """No framework is imported, and no numpy by us: only what `import torch` brings."""
    code = (
        "import sys, torch; before = set(sys.modules)\n"
        "import policyloss as pl; [getattr(pl.compat, name) for name in pl.compat.__all__]\n"
        "new = {m.split('.')[0] for m in set(sys.modules) - before}\n"
        "assert not new & {'verl', 'openrlhf', 'trl', 'coati', 'transformers', 'numpy', 'ray'}, new"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_an_unknown_framework_is_named() -> None:
    with pytest.raises(AttributeError, match=r"'nemo'.*colossalai, miles, nemo_rl, openrlhf"):
        pl.compat.nemo  # noqa: B018


# --- by its calls ---

PUBLIC = ("policy_loss", "value_loss", "aggregate_tokens")
BATCH = make_batch(seed=11, rows=4, width=6)
CONFIG = SimpleNamespace(
    clip_ratio=0.2,
    clip_ratio_low=0.2,
    clip_ratio_high=0.28,
    clip_ratio_c=3.0,
    tau_pos=1.0,
    tau_neg=1.05,
    global_batch_info={},
    policy_loss={"dro_beta": 0.1, "rollout_correction": {"rollout_is": "token"}},
)
Call = Callable[[Tensor], Tensor]


def of_verl(loss: Any) -> Call:
    return lambda x: loss(BATCH.old_logp, x, BATCH.advantages, BATCH.mask, "token-mean", CONFIG)[0]


def of_trl(x: Tensor) -> Tensor:
    inputs = {
        "completion_mask": BATCH.mask,
        "advantages": BATCH.advantages,
        "old_per_token_logps": BATCH.old_logp,
    }
    return trl.batch_loss(pl.preset("dapo"), x, inputs, totals="local").loss


def of_tinker(x: Tensor) -> Tensor:
    data = [
        SimpleNamespace(
            loss_fn_inputs={
                key: SimpleNamespace(to_torch=lambda values=values: values)
                for key, values in {
                    "target_tokens": torch.arange(len(mask)),
                    "mask": mask.double(),
                    "advantages": advantages,
                    "logprobs": old,
                }.items()
            }
        )
        for mask, advantages, old in zip(BATCH.mask, BATCH.advantages, BATCH.old_logp, strict=True)
    ]
    return tinker.loss("dapo", data)(data, list(x.unbind()))[0]


def of_skyrl(x: Tensor) -> Tensor:
    config = SimpleNamespace(
        loss_reduction="token_mean",
        off_policy_correction=SimpleNamespace(**dict.fromkeys(skyrl.CORRECTIONS)),
        **dict.fromkeys(skyrl.OWN_SETTINGS),
    )
    loss = skyrl.SkyRLLoss("dapo", pl.preset("dapo"))
    return loss(x, BATCH.old_logp, BATCH.advantages, config, BATCH.mask)[0]


def of_nemo_rl(x: Tensor) -> Tensor:
    interfaces = SimpleNamespace(
        LossType=SimpleNamespace(TOKEN_LEVEL=0),
        LossInputType=SimpleNamespace(LOGPROB=0),
        MetricNormalizer=SimpleNamespace(TOKENS=0, NONE=0),
    )
    with pytest.MonkeyPatch.context() as patched:
        patched.setitem(sys.modules, nemo_rl.INTERFACES, interfaces)
        loss = nemo_rl.NemoLoss("dapo")
    tensors = (BATCH.old_logp, BATCH.advantages, BATCH.mask)
    names = ("prev_logprobs", "advantages", "token_mask")
    pad = torch.nn.functional.pad
    data = {name: pad(t, (1, 0)) for name, t in zip(names, tensors, strict=True)}
    data["sample_mask"] = torch.ones(len(x))
    return loss(data, torch.tensor(7.0), torch.tensor(9.0), next_token_logprobs=x)[0]


def of_prime_rl(x: Tensor) -> Tensor:
    with pytest.MonkeyPatch.context() as patched:
        patched.setitem(sys.modules, prime_rl.LOSS, SimpleNamespace(LossOutputs=SimpleNamespace))
        inputs = SimpleNamespace(
            trainer_logprobs=x[0],
            inference_logprobs=BATCH.old_logp[0],
            ref_logprobs=None,
            advantages=BATCH.advantages[0],
            loss_mask=BATCH.mask[0],
            loss_weights=None,
        )
        loss: Tensor = prime_rl.loss(inputs, "dapo").loss
        return loss


def of_torchtitan(x: Tensor) -> Tensor:
    class BaseLoss:
        class Config:
            pass

    titan = SimpleNamespace(BaseLoss=BaseLoss, compute_logprobs=lambda logits, labels: logits)
    with pytest.MonkeyPatch.context() as patched:
        patched.setitem(sys.modules, torchtitan.LOSS, titan)
        kind = torchtitan.loss_class.__wrapped__()
    loss: Tensor = kind(kind.Config(loss="dapo"))(
        x,
        None,
        9,
        generator_logprobs=BATCH.old_logp,
        advantages=BATCH.advantages,
        loss_mask=BATCH.mask,
    )[0]
    return loss


def of_slime(x: Tensor) -> Tensor:
    engine = SimpleNamespace(
        get_log_probs_and_entropy=lambda logits, **_: (None, {"log_probs": list(logits)}),
        get_rollout_top_p_logprob_kwargs=lambda args, batch: {},
    )
    parallel = SimpleNamespace(get_context_parallel_world_size=lambda: 1)
    args = SimpleNamespace(calculate_per_token_loss=True, entropy_coef=0.0, use_kl_loss=False)
    names = ("unconcat_tokens", "total_lengths", "response_lengths")
    batch = {"log_probs": list(BATCH.old_logp), "advantages": list(BATCH.advantages)}
    with pytest.MonkeyPatch.context() as patched:
        patched.setitem(sys.modules, slime.LOSS, engine)
        patched.setitem(sys.modules, slime.PARALLEL, parallel)
        return slime.loss_of("dapo")(
            args, batch | dict.fromkeys(names), x, lambda t: (t * BATCH.mask.flatten()).sum()
        )[0]


def of_miles(x: Tensor) -> Tensor:
    engine = SimpleNamespace(get_log_probs_and_entropy=lambda logits, **_: {"log_probs": [*logits]})
    state = SimpleNamespace(cp=SimpleNamespace(size=1))
    args = SimpleNamespace(calculate_per_token_loss=True, entropy_coef=0.0, use_kl_loss=False)
    names = ("unconcat_tokens", "total_lengths", "response_lengths")
    batch = {"log_probs": list(BATCH.old_logp), "advantages": list(BATCH.advantages)}
    with pytest.MonkeyPatch.context() as patched:
        patched.setitem(sys.modules, miles.LOSS, engine)
        patched.setitem(
            sys.modules, miles.PARALLEL, SimpleNamespace(get_parallel_state=lambda: state)
        )
        return miles.loss_of("dapo")(
            args, batch | dict.fromkeys(names), x, lambda t: (t * BATCH.mask.flatten()).sum()
        )[0]


def of_areal(x: Tensor) -> Tensor:
    data = {
        "prox_logp": BATCH.old_logp.flatten(),
        "advantages": BATCH.advantages.flatten(),
        "loss_mask": BATCH.mask.flatten(),
        "cu_seqlens": torch.arange(0, x.numel() + 1, x.shape[1]),
    }
    with pytest.MonkeyPatch.context() as patched:
        patched.setitem(sys.modules, areal.TRACKER, SimpleNamespace(scalar=lambda **_: None))
        return areal.ArealLoss("dapo").loss_fn(x.flatten(), x, data)


def masked_mean() -> None:
    """RLinf's name of the mean over tokens."""


def of_rlinf(x: Tensor) -> Tensor:
    spec = pl.preset("dapo").replace(aggregate=pl.LocalTokenMean())
    tensors = (BATCH.old_logp, BATCH.advantages, BATCH.mask)
    return rlinf_loss(spec)(x, *tensors, loss_agg_func=masked_mean)[0]


def async_trainer() -> Any:
    """Our asynchronous trainer on a parent that computes no loss of its own."""

    class Parent:
        accelerator = SimpleNamespace(num_processes=1)

        def __init__(self, loss: str) -> None:
            self.policy_loss, self._metrics = pl.preset(loss), {"train": defaultdict(list)}

        def compute_loss(self, model: Any, inputs: Any) -> Tensor:
            model()
            return torch.zeros(())

    return type("Trainer", (WithOurAsyncLoss, Parent), {"__init__": Parent.__init__})


def of_async_trl(x: Tensor) -> Tensor:
    count = torch.tensor([7.0])
    inputs = {
        "token_index": torch.arange(x.numel()).unsqueeze(0),
        "segment_id": torch.arange(x.numel()).unsqueeze(0) // x.shape[1],
        "old_log_probs": BATCH.old_logp.reshape(1, -1),
        "advantages": BATCH.advantages.reshape(1, -1),
        "global_n_tokens": count,
    }
    return async_trainer()("dapo").compute_loss(
        lambda **_: SimpleNamespace(log_probs=x.reshape(1, -1)), inputs
    )


LOSSES: dict[str, Call] = {
    **{f"verl {name}": of_verl(loss) for name, loss in verl.POLICY_LOSSES.items()},
    "verl reinforce": of_verl(verl.compute_policy_loss_reinforce),
    "verl registered": of_verl(as_verl_loss("ppo", pl.preset("ppo"))),
    "verl compute_policy_loss": lambda x: verl.compute_policy_loss(
        BATCH.old_logp, x, BATCH.advantages, BATCH.mask, 0.2
    )[0],
    "verl compute_value_loss": lambda x: verl.compute_value_loss(
        x, BATCH.advantages, BATCH.old_logp, BATCH.mask, 0.2
    )[0],
    "verl agg_loss": lambda x: verl.agg_loss(x, BATCH.mask, "seq-mean-token-mean"),
    "openrlhf PolicyLoss": lambda x: openrlhf.PolicyLoss()(
        x, BATCH.old_logp, BATCH.advantages, BATCH.mask
    )[0],
    "openrlhf ValueLoss": lambda x: openrlhf.ValueLoss(0.2)(
        x, BATCH.old_logp, BATCH.advantages, BATCH.mask
    ),
    "openrlhf aggregate_loss": lambda x: openrlhf.aggregate_loss(x, BATCH.mask),
    "colossalai PolicyLoss": lambda x: colossalai.PolicyLoss()(
        x, BATCH.old_logp, BATCH.advantages, torch.zeros_like(x), BATCH.mask
    )[0],
    "colossalai models.PolicyLoss": lambda x: models.PolicyLoss()(
        x, BATCH.old_logp, BATCH.advantages, BATCH.mask
    )[0],
    "colossalai models.ValueLoss": lambda x: models.ValueLoss()(
        x, BATCH.old_logp, BATCH.advantages, BATCH.mask
    ),
    "trl batch_loss": of_trl,
    "tinker loss": of_tinker,
    "skyrl SkyRLLoss": of_skyrl,
    "nemo_rl NemoLoss": of_nemo_rl,
    "prime_rl loss": of_prime_rl,
    "torchtitan PolicyLoss": of_torchtitan,
    "slime loss_of": of_slime,
    "miles loss_of": of_miles,
    "areal ArealLoss": of_areal,
    "engines.py rlinf_loss": of_rlinf,
    "engines.py xtuner_loss": lambda x: xtuner_loss("dapo")(
        x, BATCH.old_logp, BATCH.advantages, BATCH.mask.double(), {}
    ),
    "trl AsyncGRPOTrainer": of_async_trl,
}


def value_and_gradient(call: Call) -> tuple[Tensor, Tensor]:
    x = BATCH.logp.clone().requires_grad_()
    torch.manual_seed(0)  # verl's Clip-Cov draws with torch's generator
    loss = call(x)
    return loss.detach(), torch.autograd.grad(loss, x)[0]


@pytest.fixture
def every_loss_eightfold(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever an adapter has bound a public function,
    its loss comes out eight times as large (which rounds nothing).
    """

    def eightfold(function: Any) -> Any:
        def changed(*args: Any, **kwargs: Any) -> Any:
            out = function(*args, **kwargs)
            return 8 * out if isinstance(out, Tensor) else replace(out, loss=8 * out.loss)

        return changed

    for module in [m for name, m in sys.modules.items() if name.startswith("policyloss.compat")]:
        for name in set(PUBLIC) & vars(module).keys():
            monkeypatch.setattr(module, name, eightfold(vars(module)[name]))


# The config sets what ppo does not read.
@pytest.mark.filterwarnings("ignore:policyloss/ppo has its own")
@pytest.mark.parametrize("name", LOSSES)
def test_a_drop_in_is_the_public_function_and_nothing_more(
    name: str, request: pytest.FixtureRequest
) -> None:
    """Value and gradient scale with the results of the public functions: neither has a term from
    the adapter.
    """
    loss, gradient = value_and_gradient(LOSSES[name])
    assert torch.count_nonzero(gradient)
    request.getfixturevalue("every_loss_eightfold")
    changed, slope = value_and_gradient(LOSSES[name])
    assert torch.equal(changed, 8 * loss)
    assert torch.equal(slope, 8 * gradient)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_a_kl_is_the_estimate_of_the_core(estimator: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x, ref = BATCH.logp.float(), BATCH.ref_logp.float()
    calls = {
        "openrlhf": lambda: openrlhf.compute_approx_kl(x, ref, kl_estimator=estimator),
        "verl": lambda: verl.kl_penalty(x, ref, estimator),
    }
    before = {name: call() for name, call in calls.items()}
    halved = pl.functional.kl.estimate
    for module in (pl.functional.kl, sys.modules["policyloss.compat.openrlhf.losses"]):
        monkeypatch.setattr(
            module, "estimate", lambda *args, **kwargs: 0.5 * halved(*args, **kwargs)
        )
    for name, call in calls.items():
        assert torch.equal(call(), 0.5 * before[name]), name


def test_every_drop_in_that_gives_a_loss_is_called_here() -> None:
    """A module that binds a public function belongs to a framework whose losses
    are compared above.
    """
    binding = {
        p.relative_to(COMPAT).parts[0]
        for p in ADAPTERS
        if any(f"import {n}" in p.read_text() for n in PUBLIC)
    }
    assert binding <= {name.split()[0] for name in LOSSES}
    assert {f"verl {name}" for name in verl.POLICY_LOSSES} <= LOSSES.keys()


# --- by their arguments ---


@dataclass(frozen=True)
class Scaled:
    response_mask: Tensor
    factor: float = 2.0
    release: str | None = field(default=None, kw_only=True)


def test_a_drop_in_takes_the_fields_of_its_call_and_checks_them_by_name() -> None:
    @drop_in_of(Scaled)
    def scaled(call: Scaled) -> tuple[Tensor, str | None]:
        """The mask times a factor."""
        return call.response_mask * call.factor, call.release

    assert (scaled.__name__, scaled.__doc__) == ("scaled", "The mask times a factor.")
    assert list(inspect.signature(scaled).parameters) == ["response_mask", "factor", "release"]
    doubled, release = scaled(torch.ones(1, 2), release="0.9.0")
    assert (doubled.tolist(), release) == ([[2.0, 2.0]], "0.9.0")
    assert scaled(torch.ones(1, 2), 3.0)[0].tolist() == [[3.0, 3.0]]
    with pytest.raises(InputError, match="factor must be a number"):
        scaled(torch.ones(1, 2), "3")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="response_mask"):
        scaled(torch.full((1, 2), 0.5))
    with pytest.raises(TypeError, match="unknown"):
        scaled(torch.ones(1, 2), unknown=1)  # type: ignore[call-arg]


def test_a_drop_in_may_ignore_keywords_that_its_call_does_not_have() -> None:
    @drop_in_of(Scaled, ignores_others=True)
    def scaled(call: Scaled) -> Tensor:
        return call.response_mask * call.factor

    assert str(inspect.signature(scaled)).endswith("**kwargs) -> 'Tensor'")
    result = scaled(torch.ones(1, 1), factor=5.0, unknown=1)  # type: ignore[call-arg]
    assert result.tolist() == [[5.0]]
