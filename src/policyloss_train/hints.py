"""What keeps a run from learning, said while it runs: once each, with what to do about it; and
whether the engine's log-probabilities are those of the trainer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from policyloss.errors import InputError
from policyloss_lab.diagnosis import doctor
from policyloss_train.batches import Pack
from policyloss_train.config import TrainConfig
from policyloss_train.contradictions import WITHOUT_GROUPS

PATIENCE = 3  # steps in a row of which something holds before it is said
LONG_PATIENCE = 10  # the same for what may be a slow start


class Hints:
    """Looks at the numbers of each step. success: the reward of a completion that is right."""

    def __init__(self, config: TrainConfig, success: float, say: Callable[[str], None]) -> None:
        self._config, self._success, self._say = config, success, say
        self._in_a_row: Counter[str] = Counter()
        self._hinted: set[str] = set()

    def look(self, metrics: Mapping[str, float]) -> None:
        """Say what has held for several steps now, and was not said before."""
        present = {name: (text, patience) for name, text, patience in self._holding(metrics)}
        self._in_a_row = Counter({name: self._in_a_row[name] + 1 for name in present})
        for name, (text, patience) in present.items():
            if self._in_a_row[name] >= patience and name not in self._hinted:
                self._hinted.add(name)
                self._say(text)

    def _holding(self, metrics: Mapping[str, float]) -> Iterator[tuple[str, str, int]]:
        """What holds in this step: its name, what to say, and after how many steps."""
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
    """What is wrong with the ratio of a policy that was not updated yet; None if nothing shows."""
    tokens: dict[str, Any] = {
        name: pack.tokens[name] for name in ("rollout_logp", "old_logp", "mask")
    }
    try:
        verdict = doctor(**tokens, cu_seqlens=pack.cu_seqlens)
    except InputError:
        return None
    if verdict.cause in ("healthy", "copy"):  # one program may compute both alike to the bit
        return None
    return (
        "the ratio of the unchanged policy is not 1: the sampler's log-probabilities are not the "
        f"trainer's. {verdict.title} (confidence {verdict.confidence:.0%}): "
        f"{verdict.evidence[-1]}. {verdict.remedy} `policyloss doctor` on rollouts.jsonl says more."
    )
