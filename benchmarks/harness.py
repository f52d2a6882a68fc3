"""How things are timed: providers interleaved in rotating order, medians with p20/p80, results as JSON with the environment."""

from __future__ import annotations

import gc
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

Provider = Callable[[], object]


def environment() -> dict[str, Any]:
    """What the figures depend on."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": gpu,
    }


def write_json(path: str | Path, data: Any) -> None:
    """Write all or nothing: to a temporary file beside `path`, then rename."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(f"{path.suffix}.part")
    part.write_text(json.dumps(data, indent=2) + "\n")
    part.replace(path)


def time_interleaved(
    providers: Mapping[str, Provider], rounds: int, device: str = "cpu", warmup: int = 3
) -> dict[str, dict[str, float]]:
    """Milliseconds per call of each provider: every round runs all of them once, each round starting with the next one."""
    names = list(providers)
    for _ in range(warmup):
        for name in names:
            providers[name]()
    samples: dict[str, list[float]] = {name: [] for name in names}
    for i in range(rounds):
        shift = i % len(names)
        for name in names[shift:] + names[:shift]:
            samples[name].append(_milliseconds(providers[name], device))
    return {name: _summary(x) for name, x in samples.items()}


def _milliseconds(provider: Provider, device: str) -> float:
    if device == "cuda":
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
        start.record()
        provider()
        end.record()
        torch.cuda.synchronize()
        return float(start.elapsed_time(end))
    begin = time.perf_counter()
    provider()
    return (time.perf_counter() - begin) * 1e3


def _summary(samples: list[float]) -> dict[str, float]:
    ordered = sorted(samples)
    last = len(ordered) - 1
    return {
        "median_ms": statistics.median(ordered),
        "p20_ms": ordered[round(0.2 * last)],
        "p80_ms": ordered[round(0.8 * last)],
    }


def peak_extra_bytes(provider: Provider, device: str = "cpu") -> int:
    """The most memory tensors held during one call beyond what they held before it (on a CPU: as the allocator reports it)."""
    provider()
    gc.collect()
    if device == "cuda":
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        provider()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        provider()
    held = peak = 0
    for event in _memory_events(profile):
        held += event
        peak = max(peak, held)
    return peak


def _memory_events(profile: torch.profiler.profile) -> list[int]:
    """Sizes of all allocations (+) and frees (−) in the order they happened."""
    results: Any = profile.profiler.kineto_results if profile.profiler else None
    sizes = [(e.start_ns(), e.nbytes()) for e in results.events() if e.name() == "[memory]"]
    return [size for _, size in sorted(sizes, key=lambda x: x[0])]


def table(rows: list[list[str]]) -> str:
    """Columns aligned with spaces; the first row is the heading."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows)
