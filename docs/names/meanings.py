"""The types of the table of homonyms, and the batch behind its numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from policyloss.spec import LossSpec


@dataclass(frozen=True)
class Meaning:
    """The meaning of a name for someone. spec: its loss. expression: for a meaning that is not a
    loss, Python that computes its numbers.

    An expression may use `pl`, `batch` (`BATCH` as tensors), the names of `REWARDS`, and
    `metric(trust, name)` of a loss on it.

    counted: how the spec counts — "step", the tokens of the whole step and its sequences
    that have a token; "rows", every row is a sequence, also an empty one; "micro", each half of the
    batch is averaged by itself, and the halves by their number.
    """

    who: str
    says: str
    spec: LossSpec | None = None
    counted: Literal["step", "rows", "micro"] = "step"
    expression: str = ""


@dataclass(frozen=True)
class Homonym:
    """One name with several meanings."""

    name: str
    about: str
    meanings: tuple[Meaning, ...]


@dataclass(frozen=True)
class Same:
    """Two forms that look different and are the same loss. by_sequence: if the advantage is
    constant within a sequence.
    """

    says: str
    a: LossSpec
    b: LossSpec
    by_sequence: bool = False


# Four rows of at most four tokens, the last one empty;
# the two halves of two rows are two prompts, and two micro-batches.
BATCH: dict[str, Any] = {
    "mask": [[True] * 4, [True, True, True, False], [True, True, False, False], [False] * 4],
    "logp": [[-0.4, -1.1, -0.7, -2.0], [-0.9, -0.5, -1.6, 0.0], [-0.6, -1.3, 0.0, 0.0], [0.0] * 4],
    "old_logp": [
        [-1.0, -1.4, -0.6, -2.2],
        [-2.4, -0.2, -1.8, 0.0],
        [-0.3, -0.95, 0.0, 0.0],
        [0.0] * 4,
    ],
    "rollout_logp": [
        [-1.5, -1.8, -0.8, -2.5],
        [-1.5, -0.3, -1.6, 0.0],
        [-1.5, -0.55, 0.0, 0.0],
        [0.0] * 4,
    ],
    "ref_logp": [
        [-0.2, -1.4, -0.6, -0.1],
        [-1.1, -0.1, -1.5, 0.0],
        [-0.3, -14.3, 0.0, 0.0],
        [0.0] * 4,
    ],
    "advantages": [[1.0, 0.5, -1.0, 2.0], [-1.0, -0.5, 1.0, 0.0], [1.0, -2.0, 0.0, 0.0], [0.0] * 4],
    "group_ids": [0, 0, 1, 1],
}
REWARDS: dict[str, list[float]] = {"rewards": [1.0, 0.6, 0.0, 0.2, 0.5], "prompt": [0, 0, 0, 0, 1]}
