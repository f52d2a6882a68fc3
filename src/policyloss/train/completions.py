"""The scored completions of a step, and how a checkpoint holds those that wait for theirs."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from policyloss.train.sampler import Sample
from policyloss.train.supports import problem_of

_RAGGED = ("prompt_ids", "completion_ids", "rollout_logp")
_SUPPORT = ("support_ids", "support_offsets")  # stored if there are


@dataclass(frozen=True)
class Completions:
    """The scored completions of one step on this rank.

    greedy: the reward of the greedy answer to the prompt of each, for "remax". statistics: of all
    ranks, by name.
    """

    samples: list[Sample]
    greedy: Tensor | None = None
    statistics: dict[str, float] = field(default_factory=dict)

    @property
    def keys(self) -> list[tuple[int, int]]:
        """The group of each completion, and which of the group it is."""
        sizes: dict[int, int] = {}
        keys = []
        for s in self.samples:
            keys.append((s.group, sizes.get(s.group, 0)))
            sizes[s.group] = keys[-1][1] + 1
        return keys

    @classmethod
    def merged(cls, shares: Sequence[Completions]) -> Completions:
        """The completions of all ranks, by group: what one process would have."""
        rows = [
            (s.group, i, s, share.greedy) for share in shares for i, s in enumerate(share.samples)
        ]
        rows.sort(key=lambda row: row[:2])
        greedy = [row[3][row[1]] for row in rows if row[3] is not None]
        return cls(
            [row[2] for row in rows], torch.stack(greedy) if greedy else None, shares[0].statistics
        )

    def share(self, rank: int, world: int, prompts: int) -> Completions:
        """The groups that one of `world` ranks would have sampled, in steps of `prompts` groups."""
        places = [i for i, s in enumerate(self.samples) if s.group % prompts % world == rank]
        greedy = None if self.greedy is None else self.greedy[places]
        return Completions([self.samples[i] for i in places], greedy, self.statistics)

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Tensors and numbers for a checkpoint: ragged lists end to end, their lengths among the
        numbers.
        """
        samples = self.samples
        ragged = [_ragged(s) for s in samples]
        tensors = {
            name: torch.cat([tensors[name] for tensors in ragged])
            for name in (ragged[0] if ragged else ())
        }
        plain = [f.name for f in dataclasses.fields(Sample) if f.name not in (*_RAGGED, "support")]
        numbers = {
            "samples": [{name: getattr(s, name) for name in plain} for s in samples],
            "lengths": [[x.shape[0] for x in tensors.values()] for tensors in ragged],
            "statistics": self.statistics,
        }
        return tensors if self.greedy is None else {**tensors, "greedy": self.greedy}, numbers

    @classmethod
    def from_state(cls, tensors: Mapping[str, Tensor], numbers: Mapping[str, Any]) -> Completions:
        """Back from what `state` returned."""
        lengths = numbers["lengths"]
        names = _RAGGED + (_SUPPORT if _SUPPORT[0] in tensors else ())
        ragged = {
            name: iter(torch.split(tensors[name], [row[i] for row in lengths]) if lengths else ())
            for i, name in enumerate(names)
        }
        samples = []
        for row in numbers["samples"]:
            tokens: dict[str, Any] = {name: next(ragged[name]).clone() for name in names}
            pair = (tokens.pop(_SUPPORT[0]), tokens.pop(_SUPPORT[1])) if names != _RAGGED else None
            samples.append(Sample(**row, **tokens, support=pair))
        return cls(samples, tensors.get("greedy"), dict(numbers["statistics"]))

    def check(self, examples: int, vocabulary: int) -> None:
        """Raise a `TypeError` for an example or a token that there is not, and for what is no
        number.
        """
        for name, x in {"tokens": None, **self.statistics}.items():
            if not isinstance(x, (int, float)) or abs(x) > 1e300:
                raise TypeError(f"the statistics of completions say {name} = {str(x)[:40]}")
        for s in self.samples:
            if (
                type(s.example) is not int
                or not 0 <= s.example < examples
                or type(s.group) is not int
                or s.group < 0
                or type(s.version) is not int
            ):
                raise TypeError(f"a completion of example {s.example!r}, group {s.group!r}")
            if (
                not isinstance(s.reward, float)
                or not isinstance(s.text, str)
                or not isinstance(s.finished, bool)
            ):
                raise TypeError(
                    f"a completion with the reward {s.reward!r}, the text {s.text!r:.40}, finished "
                    f"{s.finished!r}"
                )
            ids = torch.cat([s.prompt_ids, s.completion_ids])
            if (
                ids.dtype != torch.int64
                or not ((ids >= 0) & (ids < vocabulary)).all()
                or not s.rollout_logp.is_floating_point()
            ):
                raise TypeError(f"tokens that the model does not have, {ids.dtype}")
            if (
                not len(s.prompt_ids)
                or not len(s.completion_ids)
                or s.completion_ids.shape != s.rollout_logp.shape
            ):
                raise TypeError("a completion without tokens, or without their log-probabilities")
            wrong = problem_of(s.support, s.completion_ids, vocabulary)
            if wrong is not None:
                raise TypeError(f"a completion whose support cannot be: {wrong}")


def _ragged(s: Sample) -> dict[str, Tensor]:
    """The tensors of a completion, by the names that a checkpoint has for them."""
    support = dict(zip(_SUPPORT, s.support, strict=True)) if s.support is not None else {}
    return {name: getattr(s, name) for name in _RAGGED} | support
