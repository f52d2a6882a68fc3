"""Runs the numerical tests as on other processors: with fewer instructions, and with two threads.

    python -m release.processors          (or `make test-processors`)

Prints a table, and exits with 1 if a test failed. MKL reads MKL_ENABLE_INSTRUCTIONS on Intel's
processors only; on others, MKL_CBWR=COMPATIBLE is the one limit that it has.
"""

from __future__ import annotations

import sys
import tempfile

import torch

from release.runs import run_tests

TESTS = [f"tests/policyloss/{part}" for part in ("core", "head", "hf", "advantage")]
# An instruction that the processor lacks would end the process.
ATEN = ("default", "avx2", "avx512")
SETTINGS = (
    *(
        f"ATEN_CPU_CAPABILITY={level}"
        for level in ATEN[
            : {"AVX2": 2, "AVX512": 3}.get(torch.backends.cpu.get_cpu_capability(), 1)
        ]
    ),
    "MKL_ENABLE_INSTRUCTIONS=SSE4_2 ONEDNN_MAX_CPU_ISA=SSE41",
    "MKL_ENABLE_INSTRUCTIONS=AVX2 ONEDNN_MAX_CPU_ISA=AVX2",
    "MKL_CBWR=COMPATIBLE",
)


def main() -> None:
    """The command."""
    rows: list[tuple[str, int, dict[str, int]]] = []
    for setting in SETTINGS:
        for threads in (1, 2):
            with tempfile.TemporaryDirectory() as folder:
                variables = {
                    **dict(pair.split("=") for pair in setting.split()),
                    "OMP_NUM_THREADS": str(threads),
                    "TORCHINDUCTOR_CACHE_DIR": folder,  # its keys do not name the instructions
                }
                counts = run_tests(sys.executable, ["-n2", *TESTS], variables)
            rows.append((setting, threads, counts))
    print("| setting | threads | passed | failed | skipped | seconds |\n|---|---|---|---|---|---|")
    for setting, threads, counts in rows:
        print(f"| {setting} | {threads} | {' | '.join(map(str, counts.values()))} |")
    sys.exit(any(counts["failed"] for *_, counts in rows))


if __name__ == "__main__":
    main()
