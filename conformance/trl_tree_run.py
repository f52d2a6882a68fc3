"""The layout in which TRL packs samples that share prefixes, beside the recorded one.

`python -m conformance.trl_tree_run` in TRL's environment packs the recorded samples with TRL's
`TreeRow` and compares every tensor of the row. `tests/policyloss/hf/test_hf_trees.py` trains a
model on that row with `index=`. `--record` writes the record.
"""

from __future__ import annotations

import json
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

RECORD = Path(__file__).parents[1] / "tests/recorded/trl_tree_row.json"
# Three answers to one prompt, of which two begin alike, an equal answer, and another prompt.
SAMPLES = (
    ([5, 6, 7, 20, 21, 22, 23], 3, 1.0),
    ([5, 6, 7, 20, 21, 30, 31, 32], 3, -0.5),
    ([5, 6, 7, 40, 41], 3, -1.0),
    ([5, 6, 7, 40, 41], 3, 0.5),
    ([5, 8, 50, 51, 52], 2, 0.25),
)


def samples() -> list[dict[str, Any]]:
    """The samples as plain data: ids, mask of the completion, log-probabilities, advantage."""
    return [
        {
            "input_ids": ids,
            "completion_mask": [int(i >= prompt) for i in range(len(ids))],
            "old_log_probs": [0.0 if i < prompt else -3.5 - 0.125 * i for i in range(len(ids))],
            "advantage": advantage,
        }
        for ids, prompt, advantage in SAMPLES
    ]


def packed(plain: list[dict[str, Any]]) -> dict[str, list[Any]]:
    """The row that TRL packs of them."""
    row = import_module("trl.experimental.async_grpo.packing").TreeRow()
    for group, sample in enumerate(plain):
        tensors = {n: torch.tensor(x) for n, x in sample.items() if isinstance(x, list)}
        row.add({**tensors, "advantage": sample["advantage"], "group_id": group})
    return {name: x.tolist() for name, x in row.pack().items()}


def main() -> int:
    """Print how many tensors were compared; the exit status is 1 if one differs."""
    if "--record" in sys.argv:
        plain = samples()
        RECORD.write_text(json.dumps({"samples": plain, "row": packed(plain)}, indent=1) + "\n")
    recorded = json.loads(RECORD.read_text())
    theirs = packed(recorded["samples"])
    wrong = [n for n in {**theirs, **recorded["row"]} if theirs.get(n) != recorded["row"].get(n)]
    print(f"FAILED: {', '.join(wrong)}" if wrong else f"all {len(theirs)} tensors are the recorded")
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
