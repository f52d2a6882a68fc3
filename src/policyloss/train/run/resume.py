"""All that changes in a run, to a checkpoint and back."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from policyloss.errors import InputError, PolicyLossError
from policyloss.train.collect import Completions
from policyloss.train.finite import NotFiniteError, nonfinite_names
from policyloss.train.models import parts
from policyloss.train.run.atomic import StorageError
from policyloss.train.run.checkpoint import checked_index, latest, load_optimizer_state, optimizer_state, save, step_of, subtree
from policyloss.train.run.sharded import latest_on_ranks, load_sharded, save_sharded
from policyloss.train.sampler import Sample

if TYPE_CHECKING:
    from policyloss.train.loop import Training


def store(training: Training) -> None:
    """Write a checkpoint of the run as it is, between two steps."""
    config, learner, ranks = training.config, training.models.learner, training.ranks
    training.watch.at(f"step {training.step}, writing a checkpoint")
    numbers: dict[str, Any] = {
        "updates": learner.updates,
        "skipped_in_a_row": learner.skipped_in_a_row,
        "cursor": training.collector.cursor,
        "draws": training.collector.draws,
    }
    state: dict[str, Any] = {}
    for name, module, optimizer in _trained(training):
        tensors, options = optimizer_state(module, optimizer)
        state |= {name: weights(module), f"{name}_optimizer": tensors}
        numbers[f"{name}_optimizer"] = options
    _refuse_nonfinite({f"{name}/{key}": x for name, _, _ in _trained(training) for key, x in state[name].items()}, training)
    if learner.reference is not None:
        state["reference"] = weights(learner.reference)
    waiting = [_merged(ranks.gather(completions)) for completions in training.queue]
    state["queue"] = [_tensors(completions) for completions in waiting]
    numbers["queue"] = [_rows(completions) for completions in waiting]
    folder = config.out / "checkpoints"
    if training.run_dir is not None:
        training.run_dir.sync()
    if ranks.world == 1:
        save(folder, training.step, state, numbers, keep=config.keep)
    else:
        save_sharded(folder, training.step, state, numbers, keep=config.keep, group=ranks.group)


def restore(training: Training) -> None:
    """Continue from the last intact checkpoint, and drop what was logged after it."""
    config, ranks = training.config, training.ranks
    folder = config.out / "checkpoints"
    path = (
        latest(folder, refuse_nonfinite_weights)
        if ranks.world == 1
        else latest_on_ranks(folder, refuse_nonfinite_weights, group=ranks.group)
    )
    if path is None:
        raise InputError(f"{folder} holds no checkpoint that can be read, so nothing can be resumed; start anew in another --out.")
    # The moments of an optimizer lie on the ranks as their parameters do.
    layout = {
        f"{name}{part}/{key}": x
        for name, module, _ in _trained(training)
        for part in ("", "_optimizer")
        for key, x in weights(module).items()
    }
    tensors, numbers = load_sharded(path, layout, group=ranks.group)
    with explained(path):
        _take(training, tensors, numbers)
        training.step = step_of(path)
    if training.run_dir is not None:
        training.run_dir.truncate(training.step)
    ranks.barrier()
    training.display.say(f"resumed {config.out} after step {training.step}")


def _take(training: Training, tensors: Mapping[str, Tensor], numbers: Mapping[str, Any]) -> None:
    """Let a run be as a checkpoint's tensors and numbers say."""
    learner, collector = training.models.learner, training.collector
    for name, module, optimizer in _trained(training):
        load_weights(module, subtree(tensors, name))
        load_optimizer_state(module, optimizer, subtree(tensors, f"{name}_optimizer"), numbers[f"{name}_optimizer"])
    if learner.reference is not None:
        load_weights(learner.reference, subtree(tensors, "reference"))
    learner.updates, collector.cursor, collector.draws = (_count(numbers, name) for name in ("updates", "cursor", "draws"))
    learner.skipped_in_a_row = _count({"skipped_in_a_row": 0, **numbers}, "skipped_in_a_row")  # older runs did not count them
    queue = [_completions(subtree(tensors, f"queue/{i}"), rows) for i, rows in enumerate(numbers["queue"])]
    for completions in queue:
        _check_samples(completions, len(training.models.task.train), parts(training.models.model)[1].shape[0])
    training.queue.extend(_of_rank(completions, training) for completions in queue)


@contextmanager
def explained(path: Path) -> Iterator[None]:
    """Around the use of what a checkpoint holds: what is missing, or of another kind, is the checkpoint's fault."""
    try:
        yield
    except PolicyLossError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, RuntimeError, StopIteration, OverflowError) as error:
        raise StorageError(
            f"checkpoint {path} does not hold what a run needs: {type(error).__name__}: {error}. "
            "Remove it to go on from an older one."
        ) from error


def _count(numbers: Mapping[str, Any], name: str) -> int:
    value = numbers[name]
    if type(value) is not int or not 0 <= value < 2**63:
        raise TypeError(f"{name} is {str(value)[:40]}, not a count")
    return value


def _check_samples(completions: Completions, examples: int, vocabulary: int) -> None:
    """Raise if completions name an example or a token that there is not, or have statistics that are no numbers."""
    for name, x in {"tokens": None, **completions.statistics}.items():
        if not isinstance(x, (int, float)) or abs(x) > 1e300:
            raise TypeError(f"the statistics of completions say {name} = {str(x)[:40]}")
    for s in completions.samples:
        if type(s.example) is not int or not 0 <= s.example < examples or type(s.group) is not int or s.group < 0:
            raise TypeError(f"a completion of example {s.example!r}, group {s.group!r}")
        if not isinstance(s.reward, float) or not isinstance(s.text, str) or not isinstance(s.finished, bool):
            raise TypeError(f"a completion with the reward {s.reward!r}, the text {s.text!r:.40}, finished {s.finished!r}")
        ids = torch.cat([s.prompt_ids, s.completion_ids])
        if ids.dtype != torch.int64 or not ((ids >= 0) & (ids < vocabulary)).all() or not s.rollout_logp.is_floating_point():
            raise TypeError(f"tokens that the model does not have, {ids.dtype}")
        if not len(s.prompt_ids) or not len(s.completion_ids) or s.completion_ids.shape != s.rollout_logp.shape:
            raise TypeError("a completion without tokens, or without their log-probabilities")


def _refuse_nonfinite(tensors: Mapping[str, Tensor], training: Training) -> None:
    """Raise, on every rank, if weights are not finite: such a checkpoint must not take the place of a good one."""
    names = sorted({name for share in training.ranks.gather(nonfinite_names(tensors)) for name in share})
    if names:
        shown = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
        raise NotFiniteError(f"the weights are not finite after step {training.step} ({shown}), so no checkpoint of it is written.")


def refuse_nonfinite_weights(path: Path) -> None:
    """Raise a `StorageError` if a checkpoint holds weights that are not finite."""
    for name in checked_index(path, sums=False)["files"]:
        try:
            with safe_open(path / name, framework="pt") as file:
                keys = [key for key in file.keys() if key.startswith(("policy/", "critic/"))]  # noqa: SIM118  # no dictionary
                bad = [key for key in keys if nonfinite_names({key: file.get_tensor(key)})]
        except SafetensorError as error:
            raise StorageError(f"checkpoint {path} is damaged: {name}: {error}.") from error
        if bad:
            raise StorageError(f"checkpoint {path} is no good: {len(bad)} of its weights are not finite, {bad[0]} among them.")


def last_good(folder: Path) -> Path | None:
    """The newest checkpoint that is intact and whose weights are finite."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return latest(folder, refuse_nonfinite_weights)


def weights(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers of a module as a checkpoint holds them: one that has two names (tied weights) once."""
    kept = module.state_dict().keys()
    return {name: x for name, x in (*module.named_parameters(), *module.named_buffers()) if name in kept}


@torch.no_grad()
def load_weights(module: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Give a module what `weights` returned."""
    for name, x in weights(module).items():
        if name not in tensors or tensors[name].shape != x.shape:
            seen = f"shape {tuple(tensors[name].shape)}" if name in tensors else "nothing of that name"
            raise InputError(f"the checkpoint has {seen} for {name}, which is {tuple(x.shape)} here; the model must be the same.")
        x.copy_(tensors[name])


def _trained(training: Training) -> list[tuple[str, Any, Any]]:
    """What learns, by the name it has in a checkpoint; without the wrapper of DDP, so that other numbers of ranks find it."""
    learner = training.models.learner
    found: list[tuple[str, Any, Any]] = [("policy", _bare(learner.policy), learner.optimizer)]
    if learner.critic is not None:
        found.append(("critic", _bare(learner.critic), learner.critic_optimizer))
    return found


def _bare(module: Any) -> Any:
    return module.module if isinstance(module, torch.nn.parallel.DistributedDataParallel) else module


_LISTS = ("prompt_ids", "completion_ids", "rollout_logp")


def _tensors(completions: Completions) -> dict[str, Tensor]:
    """Ragged lists end to end; their lengths are among the rows."""
    samples = completions.samples
    found = {name: torch.cat([getattr(s, name) for s in samples]) for name in _LISTS} if samples else {}
    return found if completions.greedy is None else {**found, "greedy": completions.greedy}


def _rows(completions: Completions) -> dict[str, Any]:
    fields = [f.name for f in dataclasses.fields(Sample) if f.name not in _LISTS]
    return {
        "samples": [{name: getattr(s, name) for name in fields} for s in completions.samples],
        "lengths": [[getattr(s, name).shape[0] for name in _LISTS] for s in completions.samples],
        "statistics": completions.statistics,
    }


def _completions(tensors: Mapping[str, Tensor], rows: Mapping[str, Any]) -> Completions:
    parts = {
        name: iter(torch.split(tensors[name], [lengths[i] for lengths in rows["lengths"]])) if rows["lengths"] else iter(())
        for i, name in enumerate(_LISTS)
    }
    samples = []
    for row in rows["samples"]:
        own: dict[str, Any] = {name: next(parts[name]).clone() for name in _LISTS}
        samples.append(Sample(**row, **own))
    return Completions(samples, tensors.get("greedy"), dict(rows["statistics"]))


def _merged(shares: Sequence[Completions]) -> Completions:
    """The completions of all ranks, by group: what one process would have."""
    rows = [(s.group, i, s, share.greedy) for share in shares for i, s in enumerate(share.samples)]
    rows.sort(key=lambda row: row[:2])
    greedy = [row[3][row[1]] for row in rows if row[3] is not None]
    return Completions([row[2] for row in rows], torch.stack(greedy) if greedy else None, shares[0].statistics)


def _of_rank(completions: Completions, training: Training) -> Completions:
    """The groups that this rank would have sampled."""
    ranks, prompts = training.ranks, training.config.prompts
    own = [i for i, s in enumerate(completions.samples) if s.group % prompts % ranks.world == ranks.rank]
    greedy = None if completions.greedy is None else completions.greedy[own]
    return Completions([completions.samples[i] for i in own], greedy, completions.statistics)
