"""Records the numbers of AReaL's turn-level GAE and Trinity-RFT's GiGPO, computed by their files.

`python -m conformance.turns areal/trainer/ppo/gae.py
trinity/algorithm/advantage_fn/gigpo_advantage.py` writes `tests/recorded/turns.json`, which
`tests/policyloss/advantage/test_turns.py` compares with. Neither package can be installed on a CPU
alone, and both files need only torch and a few names of their packages, which are stood in for.
Recorded from AReaL's commit cbff54d6 (2026-08-22) and Trinity-RFT's commit baf1f233 (2026-07-21).
"""

from __future__ import annotations

import importlib.util
import json
import sys
import types
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from policyloss.advantage import gigpo, turn_gae

RECORDED = Path(__file__).resolve().parents[1] / "tests" / "recorded" / "turns.json"
_F64: Any = {"dtype": torch.float64}


def _load(path: str, **modules: dict[str, Any]) -> Any:
    """The module at `path`; modules: names that it imports, by module."""
    for name, members in modules.items():
        parts = name.replace("__", ".").split(".")
        for i in range(1, len(parts) + 1):
            sys.modules.setdefault(".".join(parts[:i]), types.ModuleType(".".join(parts[:i])))
        vars(sys.modules[".".join(parts)]).update(members)
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def areal(path: str) -> list[dict[str, Any]]:
    """Turn-level GAE of random rows with tools between turns, some of them truncated."""
    module = _load(path, areal__trainer__ppo__lambda_fn={"GAELambdaContext": dict})
    cases = []
    for seed in range(4):
        g = torch.Generator().manual_seed(seed)
        ids = torch.randint(0, 2, (3, 8), generator=g).cumsum(1)
        ids[torch.rand(3, 8, generator=g) < 0.3] = -1
        ids[:, -1] = -1  # there the value is that after the last token
        rewards, values = torch.randn(2, 3, 8, generator=g)
        truncated = torch.tensor([0.0, 1.0, 1.0])
        lam = torch.tensor([0.95, 0.5, 0.0]) if seed % 2 else 0.9
        mask = (ids >= 0).float()
        results = module._compute_turn_level_gae(rewards, values, mask, ids, truncated, 0.97, lam)
        inputs = {"rewards": rewards, "values": values, "turn_ids": ids}
        inputs |= {"last_values": truncated * values[:, -1], "lam": torch.as_tensor(lam)}
        inputs |= {"advantages": results[0], "returns": results[1] * mask}
        cases.append({name: x.tolist() for name, x in inputs.items()})
    return cases


def trinity(path: str) -> list[dict[str, Any]]:
    """GiGPO of two tasks with three runs of one to four steps; a state belongs to one task."""

    def group_by(experiences: list[Any], key: str) -> dict[Any, list[Any]]:
        groups: dict[Any, list[Any]] = defaultdict(list)
        for experience in experiences:
            groups[experience.eid.task if key == "task" else experience.eid.rid].append(experience)
        return groups

    module = _load(
        path,
        trinity__algorithm__advantage_fn__advantage_fn={"AdvantageFn": type("A", (), {})},
        trinity__buffer__operators={"ExperienceOperator": type("B", (), {})},
        trinity__common__experience={"Experience": object, "group_by": group_by},
        trinity__utils__metrics={"aggregate_metrics": lambda metrics, prefix: {}},
    )
    cases = []
    for seed, norm in enumerate(("none", "std", "none", "std")):
        g = torch.Generator().manual_seed(seed)
        experiences, table = [], []
        for run in range(6):
            for step in range(int(torch.randint(1, 5, (), generator=g))):
                reward = float(torch.randn((), generator=g))
                state = 10 * (run // 3) + int(torch.randint(0, 3, (), generator=g))
                where = types.SimpleNamespace(task=run // 3, rid=run, step=step)
                info = {"step_reward": reward, "env_state_hash": state}
                experience = types.SimpleNamespace(eid=where, info=info, action_mask=None)
                experience.reward = None
                experiences.append(experience)
                table.append([run, step, reward, state])
        function = module.GiGPOAdvantageFn(omega=0.7, gamma=0.9, fnorm=norm)
        done, _ = function.process(experiences)
        numbers = [float(experience.advantages) for experience in done]
        cases.append({"scale": norm, "steps": table, "advantages": numbers})
    return cases


def evaluate(trainer: str, case: dict[str, Any]) -> list[tuple[Tensor, Tensor]]:
    """The results of this library for a recorded case, each with that of the trainer."""
    if trainer == "areal":
        given = {k: torch.tensor(x, **_F64) for k, x in case.items() if k != "turn_ids"}
        ids, lam = torch.tensor(case["turn_ids"]), given["lam"]
        result = turn_gae(
            *(given["rewards"], given["values"], ids, 0.97, lam if lam.dim() else float(lam)),
            last_values=given["last_values"],
        )
        return [(getattr(result, name), given[name]) for name in ("advantages", "returns")]
    rewards, ids, states = torch.zeros(6, 4, **_F64), torch.full((6, 4), -1), torch.zeros(6, 4)
    for run, step, reward, state in case["steps"]:
        rewards[run, step], ids[run, step], states[run, step] = reward, step, state
    scale: Any = None if case["scale"] == "none" else "std"
    found = gigpo(rewards, ids, states.long(), torch.arange(6) // 3, 0.9, 0.7, scale=scale)
    steps = torch.stack([found[run, step] for run, step, *_ in case["steps"]])
    return [(steps, torch.tensor(case["advantages"], **_F64))]


def main() -> None:
    """Record both files, whose paths are the two arguments of the command."""
    gae_file, gigpo_file = sys.argv[1:]
    recorded = {"areal": areal(gae_file), "trinity": trinity(gigpo_file)}
    RECORDED.write_text(json.dumps(recorded) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
