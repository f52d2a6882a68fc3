"""What keeps a run from learning, said while it runs: once each, with what to do about it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from policyloss.train.config import WITHOUT_GROUPS, TrainConfig

PATIENCE = 3  # steps in a row of which something holds before it is said
LONG_PATIENCE = 10  # the same for what may be a slow start


class Hints:
    """Looks at the numbers of each step. success: the reward of a completion that is right."""

    def __init__(self, config: TrainConfig, success: float, say: Callable[[str], None]) -> None:
        self._config, self._success, self._say = config, success, say
        self._in_a_row: dict[str, int] = {}

    def look(self, metrics: Mapping[str, float]) -> None:
        """Say what has held for several steps now, and was not said before."""
        present = {name: (text, patience) for name, text, patience in self._holding(metrics)}
        for name in [name for name in self._in_a_row if name not in present]:
            if self._in_a_row[name] > 0:
                del self._in_a_row[name]
        for name, (text, patience) in present.items():
            count = self._in_a_row.get(name, 0)
            if count < 0:  # it was said
                continue
            self._in_a_row[name] = count + 1
            if count + 1 == patience:
                self._say(text)
                self._in_a_row[name] = -1

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
