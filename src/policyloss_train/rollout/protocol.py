"""What a rollout engine is: something that completes prompts of token ids, and says with which
weights.

An engine of your own implements `Engine`; `--rollout module:factory` calls
`factory(config, weights)` for one (see docs/rollout.md).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from numbers import Integral
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from policyloss.errors import PolicyLossError, safe_repr
from policyloss_lab.runs.files import damage_named
from policyloss_train.drawing import Pair, problem_of

LEFT_OUT = -9999.0  # how a server writes −inf: no token with it was ever drawn
NOISE = 1e-4  # by which rounding may lift a log-probability above 0


class RolloutError(PolicyLossError):
    """An engine that gave no completions, or not those that it was asked for."""


@dataclass(frozen=True)
class Sampling:
    """How completions are drawn.

    temperature: 0 takes the likeliest token. top_p, top_k: 1 and 0 are off. end_ids: the tokens
    that end a completion. seed, draw: that of the run, and how often it has drawn before. logp:
    over what the log-probabilities are, where top_p or top_k cut: the tokens that they keep
    ("processed"), or all ("raw"). support: whether the kept tokens are wanted, too.
    """

    max_new_tokens: int
    temperature: float
    top_p: float
    top_k: int
    end_ids: tuple[int, ...]
    seed: int
    draw: int
    logp: Literal["processed", "raw"] = "processed"
    support: bool = False

    @property
    def cuts(self) -> bool:
        """Whether some tokens cannot be drawn."""
        return self.temperature > 0 and (self.top_p < 1 or self.top_k > 0)


@dataclass(frozen=True)
class Prompt:
    """A prompt, and how many completions of it are wanted.

    place: that of the first of them among all completions of the draw, on all ranks.
    """

    ids: list[int]
    number: int
    place: int

    def seed(self, sampling: Sampling) -> int:
        """A number below 2⁴⁸ that follows from the run's seed, the draw and the place alone."""
        key = f"{sampling.seed} {sampling.draw} {self.place}".encode()
        return int.from_bytes(hashlib.sha256(key).digest()[:6], "big")


@dataclass(frozen=True)
class Completion:
    """One completion.

    ids: with the end token, if there was one. logp: of each token, with the temperature that it was
    drawn with. finished: it ended by an end token, and was not cut. version: that of the weights.
    support: where top-p or top-k cut, the tokens that each was drawn from: integers (ids `[K]`,
    offsets `[L+1]`), those of token t at `ids[offsets[t]:offsets[t+1]]`. An engine that cannot say
    leaves it None, in all completions of a call.
    """

    ids: list[int]
    logp: Sequence[float] | Tensor
    finished: bool
    version: int
    support: Pair | None = None


class Weights(Protocol):
    """The weights of the policy, as they are now. Every rank must ask for them, or none."""

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Complete tensors by their names in the model, one after the other."""

    def save(self, folder: Path) -> None:
        """Write the model as a Hugging Face folder, under a temporary name first."""


class Engine(Protocol):
    """Completes prompts. A subclass that has nothing to free may leave out the last three methods.

    concurrent: whether `generate` may run in a thread while the policy learns in another.
    """

    concurrent: bool

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling) -> list[list[Completion]]:
        """The completions of each prompt, in the order of the prompts."""

    def update_weights(self, weights: Weights, version: int) -> None:
        """From here on, complete with these weights, which are called `version`."""

    def sleep(self) -> None:
        """Free memory for the learner: `wake` and `update_weights` precede the next `generate`."""
        return

    def wake(self) -> None:
        """Get ready again; called before every update."""
        return

    def close(self) -> None:
        """End."""
        return


def check_completions(
    engine: str,
    prompts: Sequence[Prompt],
    sampling: Sampling,
    completions: Sequence[Sequence[Completion]],
    vocabulary: int,
    version: int,
) -> list[tuple[Completion, Tensor]]:
    """All completions in order, each with its log-probabilities, float32 `[L]`; an error where they
    are not those that were asked for.
    """
    with damage_named(f"{engine} returned no lists of completions", raises=RolloutError):
        numbers = [len(group) for group in completions]
        if numbers != [prompt.number for prompt in prompts]:
            asked = [prompt.number for prompt in prompts]
            raise RolloutError(
                f"{engine} was asked for {asked} completions and returned {numbers}."
            )
        pairs = []
        for one in (one for group in completions for one in group):
            wrong = problem(one, sampling, vocabulary, version)
            if wrong:
                raise RolloutError(f"{engine} returned a completion {wrong}.")
            pairs.append((one, torch.as_tensor(one.logp, dtype=torch.float32, device="cpu")))
    if len({one.support is None for one, _ in pairs}) > 1:
        raise RolloutError(f"{engine} returned a support for some completions and not for others.")
    return pairs


def problem(one: Completion, sampling: Sampling, vocabulary: int, version: int) -> str | None:
    """The fault of a completion, in words; None if it is good."""
    if one.version != version:
        return f"of the weights {one.version!r} where those of version {version} are wanted"
    if not 1 <= len(one.ids) <= sampling.max_new_tokens:
        return f"of {len(one.ids)} tokens where 1 to {sampling.max_new_tokens} are wanted"
    ids: Any = one.ids  # from an engine, and perhaps not what the type says
    if not all(isinstance(token, Integral) and int(token) in range(vocabulary) for token in ids):
        return f"with a token that is not below {vocabulary}: {safe_repr(one.ids)}"
    logp = torch.as_tensor(one.logp, dtype=torch.float32, device="cpu")
    if logp.shape != (len(one.ids),):
        return f"of {len(one.ids)} tokens with log-probabilities {list(logp.shape)}"
    numbers = one.logp.tolist() if isinstance(one.logp, Tensor) else one.logp
    if any(isinstance(x, bool) for x in (*one.ids, *numbers)):
        return "with true or false where a number belongs"
    if not ((logp > LEFT_OUT) & (logp <= NOISE)).all():
        return f"with log-probabilities that are not finite and at most 0: {logp.tolist()!r:.80}"
    if one.finished != (one.ids[-1] in sampling.end_ids):
        ends = list(sampling.end_ids)
        return f"with finished={one.finished} and the last token {one.ids[-1]}; {ends} are the ends"
    wrong = problem_of(one.support, torch.tensor(one.ids), vocabulary)
    return None if wrong is None else f"whose support cannot be: {wrong}"
