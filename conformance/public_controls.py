"""Advantages, reward shaping, masks and controllers of public trainers, by their own code.

    python -m conformance.public_controls prime-rl=SRC rllm=SRC trl=SRC verl=SRC openrlhf=SRC …

SRC: as in `conformance.public_losses`. The command writes tests/recorded/public_controls.json: the
inputs and results of each function. `tests/policyloss/compat/test_public_controls.py` compares them
with the functions of this library.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

import policyloss as pl
from conformance.public_losses import draw, load

RECORDED = Path(__file__).resolve().parent.parent / "tests" / "recorded" / "public_controls.json"
SEEDS = 2
Case = dict[str, Any]


def _rewards(seed: int, count: int = 12) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(count, generator=g, dtype=torch.float64)


def _hierarchical_grpo(folder: Path, seed: int) -> Case:
    """Two prompts of two episodes: a proposer (role 0) and two solvers (role 1) in each."""
    path = folder / "src/prime_rl/orchestrator/algo/hierarchical_grpo.py"
    scores: dict[int, float] = {}
    module = load(
        path,
        "score_group",
        defaultdict=defaultdict,
        iter_trainable_traces=lambda episodes: [(e, t) for e in episodes for t in e.traces],
        assign_advantages=lambda trace, advantage: scores.update({trace.row: advantage}),
    )
    rewards, episodes = _rewards(seed), []
    for episode in range(4):
        rows = [(3 * episode + i, name) for i, name in enumerate(("proposer", "solver", "solver"))]
        traces = [
            SimpleNamespace(row=i, reward=rewards[i].item(), agent=SimpleNamespace(name=name))
            for i, name in rows
        ]
        episodes.append(SimpleNamespace(id=f"e{episode}", traces=traces))
    algorithm = SimpleNamespace(episode_agents={"solver"})
    for prompt in (episodes[:2], episodes[2:]):
        asyncio.run(module.score_group(algorithm, prompt))
    return {
        "rewards": rewards,
        "group_ids": torch.arange(12) // 6,
        "episode_ids": torch.arange(12) // 3,
        "role_ids": (torch.arange(12) % 3 > 0).long(),
        "episode_roles": [1],
        "result": [scores[i] for i in range(12)],
    }


def _prpo(folder: Path, seed: int) -> Case:
    path = folder / "rllm/trainer/algorithms/advantage.py"
    plain = load(path, "calculate_prpo_advantages", np=np, **_REGISTRY).calculate_prpo_advantages
    rewards = _rewards(seed)
    groups = [rewards[:5].numpy(), rewards[5:].numpy()]
    return {"rewards": rewards, "result": np.concatenate(plain(groups, None)[0]).tolist()}


_REGISTRY = {
    "register_rllm_adv_estimator": lambda name: lambda function: function,
    "rLLMAdvantageEstimator": SimpleNamespace(PRPO="prpo"),
}


def _asymre(folder: Path, seed: int) -> Case:
    """In float32, as it computes; the last group has one member."""
    known = {"GroupAdvantage": type("GroupAdvantage", (), {"__init__": lambda self: None})}
    path = folder / "trinity/algorithm/advantage_fn/asymre_advantage.py"
    function = load(path, "ASYMREGroupAdvantage", **known).ASYMREGroupAdvantage()
    rewards, ids = _rewards(seed, 7).float(), torch.tensor([0, 0, 0, 1, 1, 1, 2])
    result = []
    for group in range(3):
        one = torch.ones(1)
        members = [SimpleNamespace(reward=r.item(), action_mask=one) for r in rewards[ids == group]]
        scored = function.calculate_group_advantage("", members)[0]
        result += [each.advantages.item() for each in scored]
    return {"rewards": rewards, "group_ids": ids, "shift": -0.1, "single": "raw", "result": result}


def _rlsd(folder: Path, seed: int) -> Case:
    path, b = folder / "swift/rl_core/advantage.py", draw(seed)
    function = load(path, "apply_rlsd_reweight").apply_rlsd_reweight
    base, teacher, old, mask = b["advantages"][:, 0], b["ref_logp"], b["old_logp"], b["mask"]
    result = function(base, mask, teacher, old, lam=0.5, clip_range=0.2)
    inputs = {"teacher_logp": teacher, "old_logp": old, "base": base, "mask": mask}
    return {**inputs, "coef": 0.5, "eps": 0.2, "result": result}


LENGTHS = [0, 79, 80, 81, 95, 100]


def _overlong_openrlhf(folder: Path, seed: int) -> Case:
    module = load(folder / "openrlhf/trainer/ppo_utils/length_penalty.py", "apply_overlong_penalty")
    lengths = torch.tensor([*LENGTHS, 120])  # its penalty is bounded, too
    experience = SimpleNamespace(response_length=lengths, rewards=torch.zeros(7))
    module.apply_overlong_penalty([experience], 100, 20, 0.5 + seed)
    return _overlong(lengths, 0.5 + seed, experience.rewards)


def _overlong_areal(folder: Path, seed: int) -> Case:
    path = folder / "areal/utils/functional/functional.py"
    function = load(path, "reward_overlong_penalty").reward_overlong_penalty
    lengths = torch.tensor(LENGTHS)
    data = {"rewards": torch.zeros(6), "input_ids": torch.zeros(6, 100)}
    data["loss_mask"] = torch.arange(100) < lengths[:, None]
    return _overlong(lengths, 0.5 + seed, function(data, 20, 0.5 + seed, 100)["rewards"])


def _overlong(lengths: Tensor, coef: float, result: Tensor) -> Case:
    return {"lengths": lengths, "limit": 100, "buffer": 20, "coef": coef, "result": result}


def _top_entropy(folder: Path, seed: int) -> Case:
    path, b = folder / "trl/trainer/grpo_trainer.py", draw(seed)
    method = load(path, "get_high_entropy_mask").get_high_entropy_mask
    alone = SimpleNamespace(pad_across_processes=lambda x, **_: x, gather=lambda x: x)
    entropy = -b["logp"].float()
    kept = method(SimpleNamespace(accelerator=alone), entropy, b["mask"], 1 - 0.3)
    return {"entropy": entropy, "mask": b["mask"], "share": 0.3, "result": kept}


def _adaptive_kl(folder: Path, seed: int) -> Case:
    """Of verl and OpenRLHF: the coefficient after each of some steps."""
    path = folder / "verl/trainer/ppo/core_algos.py"
    if not path.is_file():
        path = folder / "openrlhf/trainer/ppo_utils/kl_controller.py"
    controller = load(path, "AdaptiveKLController", np=np).AdaptiveKLController(0.2, 6.0, 1000)
    kls, result = (_rewards(seed).abs() * 6).tolist(), []
    for kl in kls:
        controller.update(kl, 64)
        result.append(float(controller.value))
    return {"kls": kls, "coef": 0.2, "target": 6.0, "horizon": 1000.0, "n": 64, "result": result}


# By the trainer, its release and its name; the library's function is named last.
FUNCTIONS: Mapping[str, tuple[Callable[[Path, int], Case], str]] = {
    "prime-rl 2026-08-21 hierarchical_grpo": (_hierarchical_grpo, "hierarchical_grpo"),
    "rllm 2026-08-15 prpo": (_prpo, "prpo"),
    "trinity-rft 0.6.0 asymre": (_asymre, "asymre"),
    "ms-swift 4.6.0 rlsd": (_rlsd, "rlsd"),
    "openrlhf 0.11.2 overlong penalty": (_overlong_openrlhf, "soft_overlong"),
    "areal-main 2026-08-22 overlong penalty": (_overlong_areal, "soft_overlong"),
    "trl 1.16.0 top_entropy_quantile": (_top_entropy, "top_entropy_mask"),
    "verl 0.9.1 AdaptiveKLController": (_adaptive_kl, "AdaptiveKL"),
    "openrlhf 0.11.2 AdaptiveKLController": (_adaptive_kl, "AdaptiveKL"),
}


# Trinity-RFT, OpenRLHF and AReaL compute these in float32.
IN_FLOAT32 = ("asymre", "soft_overlong")


def evaluate(key: str, case: Case) -> tuple[Tensor, Tensor]:
    """The result of this library for a recorded case, and that of the trainer."""
    name = FUNCTIONS[key][1]
    dtype = torch.float32 if name in IN_FLOAT32 else torch.float64
    call: Case = {n: _tensor(x, dtype) if isinstance(x, list) else x for n, x in case.items()}
    expected = call.pop("result")
    if name != "AdaptiveKL":
        return getattr(pl.advantage, name)(**call), expected
    controller, coefs = pl.AdaptiveKL(call["coef"], call["target"], call["horizon"]), []
    for kl in call["kls"].tolist():
        controller = controller.after(kl, call["n"])
        coefs.append(controller.coef)
    return _tensor(coefs, dtype), expected


def _tensor(x: list[Any], dtype: torch.dtype) -> Tensor:
    plain = torch.tensor(x)
    return torch.tensor(x, dtype=dtype) if plain.is_floating_point() else plain


def main(arguments: list[str]) -> None:
    """Record the named trainers; the cases of the others stay."""
    folders = {name: Path(path) for name, path in (a.split("=", 1) for a in arguments)}
    cases = json.loads(RECORDED.read_text()) if RECORDED.is_file() else {}
    for key, (function, _) in FUNCTIONS.items():
        if (trainer := key.split()[0]) in folders:
            drawn = [function(folders[trainer], seed) for seed in range(SEEDS)]
            cases[key] = [
                {n: x.tolist() if isinstance(x, Tensor) else x for n, x in case.items()}
                for case in drawn
            ]
    lines = [f"{json.dumps(k)}: {json.dumps(v, separators=(',', ':'))}" for k, v in cases.items()]
    RECORDED.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
