"""All that changes in a run, to a checkpoint and back."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from policyloss.errors import InputError
from policyloss.train.checkpoint import latest, load_optimizer_state, optimizer_state, save, step_of, subtree
from policyloss.train.collect import Completions
from policyloss.train.rollout import Sample
from policyloss.train.sharded import latest_on_ranks, load_sharded, save_sharded

if TYPE_CHECKING:
    from policyloss.train.loop import Training


def store(training: Training) -> None:
    """Write a checkpoint of the run as it is, between two steps."""
    config, learner, ranks = training.config, training.models.learner, training.ranks
    numbers: dict[str, Any] = {
        "updates": learner.updates,
        "cursor": training.collector.cursor,
        "draws": training.collector.draws,
    }
    state: dict[str, Any] = {}
    for name, module, optimizer in _trained(training):
        tensors, options = optimizer_state(module, optimizer)
        state |= {name: weights(module), f"{name}_optimizer": tensors}
        numbers[f"{name}_optimizer"] = options
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
    config, learner, ranks = training.config, training.models.learner, training.ranks
    folder = config.out / "checkpoints"
    path = latest(folder) if ranks.world == 1 else latest_on_ranks(folder, group=ranks.group)
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
    for name, module, optimizer in _trained(training):
        load_weights(module, subtree(tensors, name))
        load_optimizer_state(module, optimizer, subtree(tensors, f"{name}_optimizer"), numbers[f"{name}_optimizer"])
    if learner.reference is not None:
        load_weights(learner.reference, subtree(tensors, "reference"))
    training.step = step_of(path)
    learner.updates = numbers["updates"]
    training.collector.cursor, training.collector.draws = numbers["cursor"], numbers["draws"]
    queue = [_completions(subtree(tensors, f"queue/{i}"), rows) for i, rows in enumerate(numbers["queue"])]
    training.queue.extend(_of_rank(completions, training) for completions in queue)
    if training.run_dir is not None:
        training.run_dir.truncate(training.step)
    ranks.barrier()
    training.display.say(f"resumed {config.out} after step {training.step}")


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
