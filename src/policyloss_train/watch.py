"""Checks while a run trains: its phase and the rank that others wait for (`Watch`), advice if the
run does not learn (`Hints`), and numbers that are not finite.
"""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from policyloss.errors import InputError, PolicyLossError
from policyloss_lab.diagnosis.tokens import doctor
from policyloss_train.batches import Pack
from policyloss_train.config import TrainConfig
from policyloss_train.distributed import Ranks, Say
from policyloss_train.models import list_names
from policyloss_train.preflight import WITHOUT_GROUPS

# Parts of error messages of a collective that fails because of another rank.
_LOST = (
    *("timed out", "timeout", "broken pipe", "socket closed"),
    *("connection closed by peer", "connection reset"),
)


class Watch:
    """A context manager. `at(where)` records the current phase, in the same order on all ranks.

    After `every` seconds in one phase (0: never) the first rank prints its phase and the ranks that
    are behind. Each rank writes its phase to the store of the process group.
    """

    def __init__(self, ranks: Ranks, say: Say, every: float) -> None:
        self._ranks, self._say, self._every = ranks, say, every
        self.where, self._since, self._count = "start", time.time(), 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="policyloss-watch", daemon=True)
        self._store: Any = dist.distributed_c10d._get_default_store() if ranks.world > 1 else None

    def at(self, where: str) -> None:
        """Record that the phase `where` begins."""
        self.where, self._since, self._count = where, time.time(), self._count + 1

    def __enter__(self) -> Watch:
        self._publish()
        self._ranks.barrier()  # then the phase of every rank is in the store
        if self._every:
            self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(timeout=5)

    def lost_a_rank(self, error: RuntimeError) -> bool:
        """Whether `error` is of a collective that another rank did not join."""
        text = str(error).lower()
        return self._ranks.world > 1 and any(words in text for words in _LOST)

    def places(self) -> str:
        """The ranks that are behind, then the phase of every rank and its duration."""
        self._publish()
        now, world = time.time(), self._ranks.world
        rows = [json.loads(self._store.get(_key(rank))) for rank in range(world)]
        counts = [row["count"] for row in rows]
        behind = [str(i) for i, n in enumerate(counts) if n == min(counts) < max(counts)]
        each = "; ".join(
            f"rank {i}: {row['where']}, for {max(now - row['since'], 0):.0f} s"
            for i, row in enumerate(rows)
        )
        return (f"waiting for rank {', '.join(behind)}. " if behind else "") + each

    def _publish(self) -> None:
        if self._store is not None:
            row = {"where": self.where, "since": self._since, "count": self._count}
            self._store.set(_key(self._ranks.rank), json.dumps(row))

    def _beat(self) -> None:
        last_said = time.time()
        while not self._stop.wait(self._every / 4):
            try:
                self._publish()
                now = time.time()
                if self._ranks.is_first and now - max(self._since, last_said) >= self._every:
                    last_said = now
                    alone = f"{self.where}, for {now - self._since:.0f} s"
                    self._say(f"still running; {alone if self._store is None else self.places()}")
            # The store is gone because another rank has ended; the collective raises that error.
            except (RuntimeError, OSError):
                return


def _key(rank: int) -> str:
    return f"policyloss/place/{rank}"


PATIENCE = 3  # steps in a row for which a condition holds before its hint is printed
LONG_PATIENCE = 10  # the same for conditions that may be a slow start


class Hints:
    """Prints hints about the numbers of a run. success: the reward of a correct completion."""

    def __init__(self, config: TrainConfig, success: float, say: Say) -> None:
        self._config, self._success, self._say = config, success, say
        self._in_a_row: Counter[str] = Counter()
        self._hinted: set[str] = set()

    def look(self, metrics: Mapping[str, float]) -> None:
        """Print each hint once, after its condition has held for several steps."""
        present = {name: (text, patience) for name, text, patience in self._holding(metrics)}
        self._in_a_row = Counter({name: self._in_a_row[name] + 1 for name in present})
        for name, (text, patience) in present.items():
            if self._in_a_row[name] >= patience and name not in self._hinted:
                self._hinted.add(name)
                self._say(text)

    def _holding(self, metrics: Mapping[str, float]) -> Iterator[tuple[str, str, int]]:
        """The conditions of this step: name, text of the hint, and steps to wait."""
        config = self._config
        if metrics["truncated"] == 1:
            yield (
                "truncated",
                f"every completion of the last {PATIENCE} steps was cut at --max-new-tokens "
                f"{config.max_new_tokens}, before it ended. Raise it, or name a text that ends "
                "answers by --stop.",
                PATIENCE,
            )
        if metrics["reward/std"] == 0:
            yield (
                "constant",
                f"every completion of the last {PATIENCE} steps has the reward "
                f"{metrics['reward/mean']:g}, so nothing is learned. Look at some completions in "
                "rollouts.jsonl: the reward may not see the answer, or the task may be too easy or "
                "too hard.",
                PATIENCE,
            )
        elif (
            metrics["groups/zero_variance"] * config.group_size >= metrics["sequences"]
            and config.estimator not in WITHOUT_GROUPS
        ):
            yield (
                "equal",
                f"in the last {PATIENCE} steps all completions of a prompt had equal rewards, so "
                f"that the advantages of {config.estimator!r} are 0 and there is no gradient. "
                "Raise --group-size or --temperature, use prompts of middling difficulty, or a "
                "reward with more levels.",
                PATIENCE,
            )
        if metrics["accuracy"] == 0 and metrics["reward/std"] > 0:
            yield (
                "accuracy",
                f"accuracy has been 0 for {LONG_PATIENCE} steps although rewards differ: none "
                f"reached {self._success:g}. If that is not the reward of a right answer, set "
                "--success.",
                LONG_PATIENCE,
            )


def mismatch_of(pack: Pack) -> str | None:
    """The problem with the ratio of a policy before its first update; None if there is none."""
    names = ("rollout_logp", "old_logp", "mask")
    tokens: dict[str, Any] = {name: pack.tokens[name] for name in names}
    try:
        verdict = doctor(**tokens, cu_seqlens=pack.cu_seqlens)
    except InputError:
        return None
    if verdict.cause in ("healthy", "copy"):  # equal bits are normal if one program computes both
        return None
    return (
        "the ratio of the unchanged policy is not 1: the sampler's log-probabilities are not the "
        f"trainer's. {verdict.title} (confidence {verdict.confidence:.0%}): "
        f"{verdict.evidence[-1]}. {verdict.remedy} See `policyloss doctor` on rollouts.jsonl."
    )


# The inputs of a loss for each token, in the order of their computation.
READ = ("rollout_logp", "old_logp", "ref_logp", "old_values", "advantages", "returns")


class NotFiniteError(PolicyLossError):
    """Training cannot go on because numbers are not finite."""


def nonfinite_names(tensors: Mapping[str, Tensor]) -> list[str]:
    """The names of the tensors that hold a NaN or an infinity in this rank's part."""
    local = {name: x.to_local() if hasattr(x, "to_local") else x for name, x in tensors.items()}
    floats = {name: x for name, x in local.items() if x.is_floating_point()}
    return [name for name, x in floats.items() if not bool(torch.isfinite(x).all())]


def nonfinite_tokens(pack: Pack, chosen: Sequence[int], logp: Mapping[int, Tensor]) -> str:
    """The first quantity that is not finite at a token of the `chosen` sequences, and the token;
    "" if all are finite. logp: the log-probabilities of the policy, by sequence, if known.
    """
    parts = {
        name: torch.split(pack.tokens[name], pack.lengths)
        for name in (*READ, "mask", "completion")
        if name in pack.tokens
    }
    for name in (*READ, "logp"):
        places = []
        for i in chosen:
            x = logp.get(i) if name == "logp" else parts[name][i] if name in parts else None
            if x is None:
                continue
            bad = ~torch.isfinite(x) & parts["mask"][i]
            first = int(parts["completion"][i].long().argmax()) if bad.any() else 0
            places += [(i, place - first) for place in bad.nonzero().flatten().tolist()]
        if places:
            return f"{name} is not finite at " + list_names(
                [f"token {token} of completion {i}" for i, token in places]
            )
    return ""


def nonfinite_gradient(module: nn.Module) -> str:
    """The weights with a gradient that is not finite, in words; "" if all are finite."""
    gradients = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
    bad = nonfinite_names(gradients)
    return f"the gradient of {list_names(bad)} is not finite" if bad else ""
