"""verl's advantage estimators: every function of its registry, at valid and masked tokens alike."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from itertools import product
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from conformance.inputs import Batch
from conformance.release import current
from conformance.suite import Defect, Function, Inputs, Options, Outputs
from policyloss.compat.verl.advantages import ADVANTAGE_ESTIMATORS

# How rows are grouped. "mixed" has groups of one;
# "large" draws four times the rows, and puts most of them into one group.
GROUPS = ("pairs", "mixed", "one", "large")
# The kinds of rewards: on every token (masked ones too, which verl sums up as well), one per row on
# its last valid token, 0 or 1 (equal rewards, constant groups, rows that count for nothing in GPG),
# or close together, where rounding is amplified.
REWARDS = ("tokens", "outcome", "binary", "close")
# verl's masks are integers: then its counts and Bessel's correction are float32, whatever the
# rewards are.
INTEGER = "int64"


class Bag(SimpleNamespace):
    """A config: attributes, and `get`."""

    def get(self, name: str, default: Any = None) -> Any:
        """The attribute, or the default."""
        return getattr(self, name, default)


def grid(**choices: tuple[Any, ...]) -> list[Options]:
    """Every combination of these choices."""
    return [dict(zip(choices, values, strict=True)) for values in product(*choices.values())]


def more_rows(batch: Batch, groups: str) -> Batch:
    """The batch, or for "large" groups four times its rows: new rewards, the masks again."""
    if groups != "large":
        return batch
    rewards = torch.randn(
        4 * len(batch.mask), batch.mask.shape[1], generator=batch.generator(1), dtype=torch.float64
    )
    again = {name: getattr(batch, name).repeat(4, 1) for name in ("mask", "old_logp", "values")}
    return replace(batch, rewards=rewards.to(batch.dtype), **again)


def labels(batch: Batch, groups: str) -> list[str]:
    """One label per row, in no order; equal labels are a group."""
    rows = len(batch.rewards)
    sizes = {
        "pairs": [2] * (rows // 2 - 1) + [2 + rows % 2],
        "one": [rows],
        "large": [rows - 2, 2],
        "mixed": [1, rows - 1],
    }[groups]
    names = [f"uid-{7 * i % 5}-{i}" for i, size in enumerate(sizes) for _ in range(size)]
    return [names[i] for i in torch.randperm(rows, generator=batch.generator(2)).tolist()]


def token_rewards(batch: Batch, kind: str) -> Tensor:
    """Token rewards `[B, T]` of this kind."""
    if kind == "tokens":
        return batch.rewards
    score = batch.rewards[:, 0].double()
    score = {"outcome": score, "binary": (score > 0.3).double(), "close": 3 + 0.01 * score}[kind]
    last = (batch.mask * torch.arange(1, batch.mask.shape[1] + 1)).argmax(-1, keepdim=True)
    return torch.zeros_like(batch.rewards).scatter(1, last, score.to(batch.dtype).unsqueeze(-1))


def grouped(batch: Batch, options: Options) -> Inputs:
    """Rewards, mask and groups."""
    batch = more_rows(batch, options["groups"])
    return {
        "token_level_rewards": token_rewards(batch, options["rewards"]),
        "response_mask": mask_of(batch, options),
        "index": labels(batch, options["groups"]),
    }


def mask_of(batch: Batch, options: Options) -> Tensor:
    """The mask in the dtype the options name; the batch's by default."""
    return batch.mask.to(getattr(torch, options["mask"])) if options.get("mask") else batch.mask


def ungrouped(batch: Batch, options: Options) -> Inputs:
    """Rewards and mask."""
    return {
        "token_level_rewards": token_rewards(batch, options["rewards"]),
        "response_mask": mask_of(batch, options),
    }


def gae_inputs(batch: Batch, options: Options) -> Inputs:
    """Rewards, values and mask."""
    return {**ungrouped(batch, options), "values": batch.values}


def remax_inputs(batch: Batch, options: Options) -> Inputs:
    """Rewards, mask and the greedy answers' rewards."""
    return {**ungrouped(batch, options), "reward_baselines": batch.values[:, 0]}


def otb_inputs(batch: Batch, options: Options) -> Inputs:
    """The inputs of the optimal token baseline. Σπ² lies between π² (all else spread thin)
    and π² + (1 − π)² (one other token).
    """
    inputs = grouped(batch, options)
    batch = more_rows(batch, options["groups"])
    g, pi = batch.generator(3), batch.old_logp.double().exp()
    inputs["old_log_probs"] = batch.old_logp
    inputs["sum_pi_squared"] = (
        pi**2 + (1 - pi) ** 2 * torch.rand(pi.shape, generator=g, dtype=torch.float64)
    ).to(batch.dtype)
    if options["weights"]:
        inputs["rollout_is_weights"] = (
            2 * torch.rand(pi.shape, generator=g, dtype=torch.float64)
        ).to(batch.dtype)
    return inputs


def gdpo_inputs(batch: Batch, options: Options) -> Inputs:
    """Several rewards by name in place of one, if the options name them; Python floats, as reward
    functions return them.
    """
    inputs = grouped(batch, options)
    rows = len(inputs["index"])
    for i in range(options["components"]):
        inputs[f"reward_{i}"] = torch.randn(
            rows, generator=batch.generator(10 + i), dtype=torch.float64
        ).tolist()
    return inputs


def call(
    name: str,
    function: Callable[..., Any],
    inputs: Inputs,
    options: Options,
    as_index: Callable[[Any], Any],
) -> Outputs:
    """The same call on either side: `as_index` converts the labels for that side."""
    given: dict[str, Any] = {
        key: x
        for key, x in inputs.items()
        if not key.startswith("reward_") or key == "reward_baselines"
    }
    if "index" in given:
        given["index"] = as_index(given["index"])
    given |= options.get("arguments", {})
    if "config" in options:
        given["config"] = Bag(**options["config"])
    if components := [
        key for key in inputs if key.startswith("reward_") and key != "reward_baselines"
    ]:
        given["config"] = Bag(
            gdpo_reward_keys=components, gdpo_reward_weights=options["reward_weights"]
        )
        given["non_tensor_batch"] = {key: as_index(inputs[key]) for key in components}
        # A prompt of three tokens before the response;
        # verl puts a reward on the last token of the response.
        attention = torch.nn.functional.pad(given["response_mask"].long(), (3, 0), value=1)
        given["batch"] = {"prompts": attention[:, :3], "attention_mask": attention}
    if name == "reinforce_plus_plus" and function is ADVANTAGE_ESTIMATORS[name]:
        given["release"] = current()
    advantages, returns = function(**given)
    return {"advantages": advantages, "returns": returns}


def as_array(values: list[Any]) -> Any:
    """A numpy array of objects, as verl's data holds them."""
    numpy = import_module("numpy")
    return numpy.array(values, dtype=object)


def no_length(options: Options, inputs: Inputs) -> Defect | None:
    """OPO divides by the group's number of tokens, which may be 0."""
    lengths = inputs["response_mask"].sum(-1).tolist()
    index: list[str] = inputs["index"]
    tokens = {
        label: sum(n for n, other in zip(lengths, index, strict=True) if other == label)
        for label in index
    }
    if not any(tokens[label] == 0 and index.count(label) > 1 for label in index):
        return None
    return Defect(
        reason=(
            "a group of several rows without a single valid token: 0/0, and NaN times the mask "
            "is NaN"
        ),
        instead="the group's baseline is 0, and its rows get 0, as they have no token",
    )


def entry(
    name: str, options: list[Options], inputs: Callable[[Batch, Options], Inputs], **others: Any
) -> Function:
    """One function of the registry. There are no gradients: advantages are constants of a step."""

    def theirs(given: Inputs, chosen: Options) -> Outputs:
        core = import_module("verl.trainer.ppo.core_algos")
        return call(name, core.get_adv_estimator_fn(name), given, chosen, as_array)

    def ours(given: Inputs, chosen: Options) -> Outputs:
        return call(name, ADVANTAGE_ESTIMATORS[name], given, chosen, list)

    return Function(
        name=f"advantage {name}", options=options, inputs=inputs, ours=ours, theirs=theirs, **others
    )


EPSILONS: tuple[Options, ...] = ({}, {"epsilon": 1e-3})
NORMS: tuple[Options, ...] = (*EPSILONS, {"norm_adv_by_std_in_grpo": False})
TAILS: tuple[Options, ...] = ({}, {"handle_zero_tail": False, "epsilon": 1e-4})
DISCOUNTS: tuple[Options, ...] = tuple(
    {"gamma": gamma, "lam": lam}
    for gamma, lam in ((1.0, 1.0), (0.99, 0.95), (1.0, 0.95), (0.9, 0.0), (0.0, 0.5))
)
MASKED = grid(groups=GROUPS, rewards=("outcome",), mask=(INTEGER, "bool"))
PLAIN = grid(groups=GROUPS, rewards=REWARDS) + MASKED
NORMED = grid(groups=GROUPS, rewards=("tokens", "binary"), arguments=NORMS) + PLAIN
COMPONENTS = grid(
    groups=GROUPS,
    rewards=("outcome",),
    components=(3,),
    reward_weights=(None, [0.7, 0.1, 2.3]),
    mask=(None, INTEGER, "bool"),
)
BASELINES = grid(
    groups=GROUPS, rewards=("tokens", "outcome"), weights=(False, True), arguments=TAILS
) + grid(groups=GROUPS, rewards=("tokens",), weights=(True,), mask=(INTEGER,))

FUNCTIONS: list[Function] = [
    entry(
        "gae",
        grid(rewards=("tokens", "close"), mask=(None, INTEGER), arguments=DISCOUNTS),
        gae_inputs,
    ),
    entry("grpo", NORMED, grouped),
    entry("grpo_vectorized", NORMED, grouped),
    entry(
        "gdpo",
        grid(groups=GROUPS, rewards=("tokens", "binary"), components=(0,), arguments=NORMS)
        + COMPONENTS,
        gdpo_inputs,
    ),
    # Both refuse groups of one. Equal best rewards have margin 0, so the choice of torch.topk does
    # not matter.
    entry(
        "grpo_passk",
        grid(groups=GROUPS, rewards=REWARDS, config=({}, {"norm_adv_by_std_in_grpo": False}))
        + grid(groups=GROUPS, rewards=("tokens",), config=({},), arguments=EPSILONS[1:]),
        grouped,
    ),
    entry("reinforce_plus_plus_baseline", PLAIN, grouped),
    entry("rloo", PLAIN, grouped),
    entry("opo", PLAIN, grouped, defect=no_length),
    entry(
        "reinforce_plus_plus",
        grid(
            rewards=REWARDS,
            mask=(None, INTEGER),
            config=tuple({"gamma": gamma} for gamma in (1.0, 0.99, 0.5, 0.0)),
        ),
        ungrouped,
    ),
    entry("remax", grid(rewards=REWARDS, mask=(None, INTEGER, "bool")), remax_inputs, seeds=2),
    entry(
        "gpg",
        grid(groups=GROUPS, rewards=REWARDS, arguments=({}, {"f_norm": 0.3, "alpha": 5.0})),
        grouped,
    ),
    entry("rloo_vectorized", PLAIN, grouped),
    entry("optimal_token_baseline", BASELINES, otb_inputs),
    entry("tir_optimal_token_baseline", BASELINES, otb_inputs),
]
