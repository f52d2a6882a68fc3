"""Timing: providers interleaved, medians with p20/p80, results as JSON with the environment."""

from __future__ import annotations

import gc
import json
import os
import platform
import random
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from policyloss.output import write_output

Provider = Callable[[], object]
# A provider this fast may be called several times per round.
FAST_MS = 5.0


def environment() -> dict[str, Any]:
    """The versions and the machine that the figures depend on."""
    found: dict[str, Any] = {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": None,
    }
    if not torch.cuda.is_available():
        return found
    versions = {"cuda": torch.version.cuda, "triton": _version("triton"), "driver": _driver()}
    return {**found, "gpu": torch.cuda.get_device_name(), **versions}


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _driver() -> str | None:
    """The GPU driver's version, if its tool is installed."""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        told = subprocess.run(query, capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    return told.split("\n")[0].strip() or None


def write_json(path: str | Path, data: Any) -> None:
    """Write all or nothing, and only to a regular file."""
    write_output(path, (json.dumps(data, indent=2) + "\n").encode())


def time_interleaved(
    providers: Mapping[str, Provider],
    rounds: int,
    device: str = "cpu",
    warmup: int = 3,
    *,
    prepare: Mapping[str, Provider] | None = None,
    few: Mapping[str, int] | None = None,
    repeats: int = 1,
) -> dict[str, dict[str, float]]:
    """Milliseconds per call of each provider: every round runs all of them once,
    in an order of its own.

    A GPU is faster after a second of little work than after a second of matmuls, so no provider may
    always follow the same neighbour.

    `prepare`: functions that run before a provider each time, outside its time. `few`: the number
    of rounds of providers that get fewer. `repeats`: how often a round runs a provider whose last
    warm-up took less than FAST_MS. Each call is timed on its own and counts as a sample, so that
    the median is not taken over first calls after a provider that ran for a second and emptied the
    caches.
    """
    prepare, few = prepare or {}, few or {}
    names = list(providers)

    def once(name: str) -> float:
        prepare.get(name, _nothing)()
        return _milliseconds(providers[name], device)

    trial: dict[str, float] = {}
    for i in range(warmup):
        for name in names:
            if i < few.get(name, warmup):
                trial[name] = once(name)
    times = {name: repeats if trial.get(name, FAST_MS) < FAST_MS else 1 for name in names}
    samples: dict[str, list[float]] = {name: [] for name in names}
    order = random.Random(0)
    for i in range(rounds):
        for name in order.sample(names, len(names)):
            if i < few.get(name, rounds):
                samples[name] += [once(name) for _ in range(times[name])]
    return {name: _summary(x) for name, x in samples.items()}


def kernel_ms(provider: Provider, device: str, prepare: Provider | None = None) -> float | None:
    """Milliseconds of GPU work in one call: the sum of its kernels, without the gaps between them.

    The median of three calls; None on a CPU.
    """
    if device != "cuda":
        return None
    sums: list[float] = []
    for _ in range(3):
        (prepare or _nothing)()
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            provider()
            torch.cuda.synchronize()
        sums.append(sum(event.self_device_time_total for event in profile.key_averages()) / 1e3)
    return statistics.median(sums)


def _nothing() -> None:
    """No preparation."""


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
        "samples": len(ordered),
    }


def output_bytes(provider: Callable[[], Iterable[object]]) -> int:
    """The memory of the tensors that one call returns."""
    return sum(x.numel() * x.element_size() for x in provider() if isinstance(x, torch.Tensor))


def peak_extra_bytes(provider: Provider, device: str = "cpu") -> int:
    """The peak memory of tensors during one call beyond their memory before it (on a CPU: from the
    allocator's events).
    """
    provider()
    gc.collect()
    if device == "cuda":
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        provider()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
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
    return "\n".join(
        "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )
