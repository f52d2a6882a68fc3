"""Run directories made up for the tests of the report,
in the form `policyloss train` writes them.
"""

from __future__ import annotations

import json
import math
import os
import random
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import policyloss as pl

EDGES = [10 ** (-1 + i / 20) for i in range(41)]  # ratios from 0.1 to 10, log-spaced


def folder_in_memory() -> tempfile.TemporaryDirectory[str]:
    """A folder for many small runs, one after the other: a disk takes longer to remove their files
    than a report takes to read them.
    """
    return tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None)


def write_lines(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_run(
    path: Path,
    metrics: Sequence[Mapping[str, Any]],
    *,
    loss: str = "dapo",
    config: Mapping[str, Any] | None = None,
    timing: Sequence[Mapping[str, Any]] = (),
    rollouts: Sequence[Mapping[str, Any]] = (),
) -> Path:
    """A run directory with exactly these lines. Without timing or rollouts, it has no such file."""
    path.mkdir(parents=True)
    settings = {
        "loss": loss,
        "task": "sort",
        "model": "tiny",
        "steps": len(metrics),
        "seed": 0,
        "betas": [0.9, 0.99],
        **(config or {}),
    }
    (path / "config.json").write_text(
        json.dumps({"policyloss": "0.1.0", "config": settings, "loss": pl.preset(loss).to_dict()})
    )
    (path / "environment.json").write_text(
        json.dumps({"python": "3.11.7", "torch": "2.13.0", "device": "cpu"})
    )
    write_lines(path / "metrics.jsonl", metrics)
    if timing:
        write_lines(path / "timing.jsonl", timing)
    if rollouts:
        write_lines(path / "rollouts.jsonl", rollouts)
    return path


def rollout(
    step: int,
    tokens: Sequence[str],
    *,
    group: int = 0,
    reward: float = 1.0,
    seed: int = 0,
    **texts: str,
) -> dict[str, Any]:
    """One row of rollouts.jsonl with numbers that fit together: ratio = exp(logp − old_logp),
    clipped by DAPO's bounds.
    """
    rng = random.Random(1000 * step + 10 * group + seed)
    n = len(tokens)
    advantage = rng.choice([-1.3, -0.6, 0.7, 1.4]) if reward < 1 else rng.uniform(0.3, 1.2)
    rollout_logp = [-rng.expovariate(1.5) for _ in range(n)]
    old = [x + rng.gauss(0, 0.01) for x in rollout_logp]
    logp = [min(0.0, x + rng.gauss(0, 0.16)) for x in old]
    ratio = [math.exp(a - b) for a, b in zip(logp, old, strict=True)]
    held = [(advantage > 0 and r > 1.28) or (advantage < 0 and r < 0.8) for r in ratio]
    return {
        "step": step,
        "example": group,
        "group": group,
        "weights": step - 1,
        "prompt": "sort: 3 1 2 =",
        "completion": "".join(tokens),
        "answer": "1 2 3",
        "reward": reward,
        "advantage": advantage,
        "finished": True,
        "ids": list(range(n)),
        "tokens": list(tokens),
        "logp": logp,
        "old_logp": old,
        "rollout_logp": rollout_logp,
        "ratio": ratio,
        "token_advantage": [advantage] * n,
        "clipped": held,
        **texts,
    }


def realistic_run(
    path: Path,
    *,
    loss: str = "dapo",
    steps: int = 120,
    seed: int = 0,
    speed: float = 1.0,
    critic: bool = False,
) -> Path:
    """A run that learns: accuracy from about 0.3 to above 0.9, with noise,
    evaluations every ten steps, and rollouts.
    """
    rng = random.Random(seed)
    metrics, timing, rows = [], [], []
    for step in range(steps):
        learned = 1 / (1 + math.exp(-speed * (step / steps * 9 - 3.2)))
        width = 0.05 + 0.12 * learned * rng.uniform(0.7, 1.3)
        sample = [math.exp(rng.gauss(0, width)) for _ in range(400)]
        counts = [0] * 40
        for r in sample:
            counts[max(0, min(39, int((math.log10(r) + 1) * 20)))] += 1
        upper, lower = sum(r > 1.28 for r in sample) / 800, sum(r < 0.8 for r in sample) / 800
        right = min(1.0, max(0.0, 0.28 + 0.68 * learned + rng.gauss(0, 0.035)))
        row: dict[str, Any] = {
            "step": step,
            "reward/mean": right,
            "reward/std": math.sqrt(right * (1 - right)),
            "accuracy": right,
            "length/mean": 9 + 2 * learned + rng.gauss(0, 0.3),
            "length/max": 16,
            "truncated": max(0.0, 0.2 - 0.22 * learned),
            "groups/zero_variance": learned * 0.6,
            "groups/kept": 16,
            "advantage/mean": rng.gauss(0, 1e-3),
            "advantage/std": 0.98,
            "policy/loss": rng.gauss(-0.01, 0.02),
            "policy/clip_fraction": upper + lower,
            "policy/clip_fraction_upper": upper,
            "policy/clip_fraction_lower": lower,
            "policy/clip_fraction_dual": 0.0,
            "policy/ratio_mean": sum(sample) / 400,
            "policy/ratio_max": max(sample),
            "policy/ratio_min": min(sample),
            "policy/kl_old_k1": rng.gauss(0.002, 0.004),
            "policy/kl_old_k3": width**2 / 2,
            "policy/kl_rollout_k3": 1e-5 * rng.uniform(0.5, 2),
            "policy/entropy": 1.4 - 1.1 * learned,
            "grad_norm": 0.6 * math.exp(rng.gauss(0, 0.3)),
            "lr": 1e-3,
            "tokens": 1280,
            "sequences": 128,
            "updates": 2,
            "ratio_histogram": {"edges": EDGES, "counts": counts},
        }
        if critic:
            row |= {
                "value/loss": 0.2 * math.exp(-3 * learned),
                "value/explained_variance": learned,
                "value/value_mean": right - 0.1 * (1 - learned),
            }
            row |= {
                "value/return_mean": right,
                "critic_grad_norm": 0.3 * math.exp(rng.gauss(0, 0.2)),
            }
        if step % 10 == 0:
            row["eval/accuracy"] = min(1.0, 0.31 + 0.66 * learned)
        metrics.append(row)
        timing.append(
            {
                "step": step,
                "sample_s": 0.6,
                "step_s": 1.1 + rng.uniform(0, 0.2),
                "tokens_per_s": 1280 / 1.2,
            }
        )
        if step % 20 == 0:
            words = [
                ["1", " ", "2", " ", "3", "</s>"],
                ["3", " ", "1", " ", "2", "</s>"],
                [*"12 33 1 20 5 7 ", "9", "\n", "1"],
            ]
            rows += [
                rollout(step, words[k % 3], group=k // 2, reward=float(k % 3 == 0), seed=seed)
                for k in range(8)
            ]
    metrics.append({"step": steps, "eval/accuracy": 0.97 - 0.02 * seed})
    return write_run(
        path,
        metrics,
        loss=loss,
        timing=timing,
        rollouts=rows,
        config={"steps": steps, "seed": seed, "lr": 1e-3 * (1 + seed), "rollout": "vllm"},
    )
