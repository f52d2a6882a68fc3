"""Where a run is: a thread that says so when nothing moves, and which rank the others wait for."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from policyloss_train.distributed import Ranks

# How the messages begin or what they hold when a collective ends because another rank did not come,
# or has gone.
_LOST = (
    *("timed out", "timeout", "broken pipe", "socket closed"),
    *("connection closed by peer", "connection reset"),
)


class Watch:
    """A context manager. `at(where)` says what begins now, in the same order on all ranks.

    After `every` seconds in one place (0: never) the first rank says where it is and which ranks
    are behind. Each rank puts its own place into the store that the group of processes met by,
    which needs no collective.
    """

    def __init__(self, ranks: Ranks, say: Callable[[str], None], every: float) -> None:
        self._ranks, self._say, self._every = ranks, say, every
        self.where, self._since, self._count = "start", time.time(), 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="policyloss-watch", daemon=True)
        self._store: Any = dist.distributed_c10d._get_default_store() if ranks.world > 1 else None

    def at(self, where: str) -> None:
        """From here on the run is at `where`."""
        self.where, self._since, self._count = where, time.time(), self._count + 1

    def __enter__(self) -> Watch:
        self._publish()
        self._ranks.barrier()  # then every rank's place is in the store
        if self._every:
            self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(timeout=5)

    def lost_a_rank(self, error: BaseException) -> bool:
        """Whether `error` is that of a collective which another rank did not come to."""
        text = str(error).lower()
        return (
            self._ranks.world > 1
            and isinstance(error, RuntimeError)
            and any(words in text for words in _LOST)
        )

    def places(self) -> str:
        """Where every rank is, and for how long; those that are behind are named first."""
        now, rows = time.time(), self._rows()
        counts = [row["count"] for row in rows]
        behind = [str(i) for i, n in enumerate(counts) if n == min(counts) < max(counts)]
        each = "; ".join(
            f"rank {i}: {row['where']}, for {max(now - row['since'], 0):.0f} s"
            for i, row in enumerate(rows)
        )
        return (f"waiting for rank {', '.join(behind)}. " if behind else "") + each

    def _rows(self) -> list[dict[str, Any]]:
        return [
            self._row() if i == self._ranks.rank else json.loads(self._store.get(_key(i)))
            for i in range(self._ranks.world)
        ]

    def _row(self) -> dict[str, Any]:
        return {"where": self.where, "since": self._since, "count": self._count}

    def _publish(self) -> None:
        if self._store is not None:
            self._store.set(_key(self._ranks.rank), json.dumps(self._row()))

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
            # The store is gone: another rank has ended, and the collective says so.
            except (RuntimeError, OSError):
                return


def _key(rank: int) -> str:
    return f"policyloss/place/{rank}"
