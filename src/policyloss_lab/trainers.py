"""`attach`: finds the place in a trainer where each step can be read, without importing it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial, wraps
from pathlib import Path
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from policyloss.compat.tinker.data import KEYS
from policyloss.errors import InputError
from policyloss_lab.attachment import Attachment, Row, split_rows
from policyloss_lab.diagnosis.read import COLUMNS, first_names
from policyloss_lab.runs.recorder import Decode

# Our name of a column, and its names in verl, TRL and OpenRLHF.
_NAMES: dict[str, tuple[str, ...]] = {
    **COLUMNS,
    "ref_logp": ("ref_logp", "ref_log_prob", "ref_per_token_logps", "base_action_log_probs"),
    "advantages": ("advantages",),
    "rewards": ("rewards", "token_level_scores"),
}


def attach(
    trainer: Any = None,
    out: str | Path | None = None,
    *,
    every: int = 10,
    halt_on: str | Sequence[str] = (),
    decode: Decode | None = None,
) -> Attachment:
    """Record a run, diagnose it while it trains, and halt it if a finding is in `halt_on`.

    trainer: TRL's `GRPOTrainer`; verl's actor worker, or its `RayPPOTrainer`; OpenRLHF's
    `ActorPPOTrainer` or the actor that holds it; Tinker's `TrainingClient`; None for your own loop,
    which calls the attachment's `step`. out: a folder that holds no run yet; by default, a new one
    in `runs/`. every: the steps 1, 1 + every, 1 + 2·every, … are examined: the doctor reads their
    tokens and all metrics so far, and a few completions are stored. halt_on: names of causes or
    symptoms (docs/doctor.md) that halt the run: TRL stops after the step; the others raise
    `RunHaltedError`. decode: turns a list of ids into text; by default, the trainer's tokenizer.

    The attachment changes no training result. An error in the attachment is logged once, and the
    run continues without it. Only the first rank records.
    """
    hook = _hook_of(trainer)
    config = {} if trainer is None else {"trainer": type(trainer).__name__}
    tokenizer = getattr(trainer, "processing_class", None) or getattr(trainer, "tokenizer", None)
    decode = decode or getattr(tokenizer, "decode", None)
    attachment = Attachment(out, every, halt_on, decode, config)
    hook(attachment, trainer)
    return attachment


def _hook_of(trainer: Any) -> Callable[[Attachment, Any], None]:
    """The function that hooks an attachment into a trainer of this kind."""
    kinds: dict[Callable[[Attachment, Any], None], tuple[str, ...]] = {
        _hook_trl: ("add_callback", "_get_per_token_logps_and_entropies"),
        _hook_verl_driver: ("_update_actor",),
        _hook_verl_worker: ("train_mini_batch",),
        _hook_openrlhf: ("ppo_train", "replay_buffer"),
        _hook_tinker: ("forward_backward", "optim_step"),
    }
    if trainer is None:
        return lambda attachment, _: None
    for hook, names in kinds.items():
        if all(hasattr(trainer, name) for name in names):
            return hook
    # verl's worker of several roles holds its `actor`, OpenRLHF's actor its `trainer`.
    for name in ("actor", "trainer"):
        if (part := getattr(trainer, name, None)) is not None:
            inside = _hook_of(part)
            return lambda attachment, _: inside(attachment, part)
    raise InputError(
        f"trainer is an unknown {type(trainer).__name__}; pass TRL's GRPOTrainer, verl's worker or "
        "RayPPOTrainer, OpenRLHF's ActorPPOTrainer or Tinker's TrainingClient; or leave it out "
        "and call step() of the result in your loop."
    )


def _replace(attachment: Attachment, owner: Any, name: str, call: Callable[..., Any]) -> None:
    """Let `call(method, …)` run in place of a method of one object, until the attachment leaves."""
    method, local = getattr(owner, name), name in vars(owner)
    setattr(owner, name, wraps(method)(partial(call, method)))
    attachment.undo.append(lambda: setattr(owner, name, method) if local else delattr(owner, name))


def _rename_columns(batch: Any) -> dict[str, Any]:
    """The columns of a trainer's batch under our names, padded; those it lacks are left out."""
    names = first_names(_NAMES, batch.keys())  # a TensorDict has no plain `in`
    columns = {our: batch[name] for our, name in names.items()}
    return {
        name: pad_sequence(x.unbind(), batch_first=True) if getattr(x, "is_nested", False) else x
        for name, x in columns.items()
    }


def _prompt_ids(ids: torch.Tensor, mask: torch.Tensor | None) -> list[list[int]]:
    """Prompts `[B, P]` as lists of ids."""
    mask = torch.ones_like(ids) if mask is None else mask[:, : ids.shape[1]]
    return [row[keep].tolist() for row, keep in zip(ids.cpu(), mask.bool().cpu(), strict=True)]


class _Events:
    """A callback of transformers' trainers; its other events do nothing. It is never taken out of
    the trainer, because a list of callbacks must not change while its events are sent.
    """

    def __init__(self, attachment: Attachment) -> None:
        self._attachment = attachment

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("on_"):
            raise AttributeError(name)
        return lambda *args, **kwargs: None

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        self._attachment.log(state.global_step, lambda: logs or {})

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._attachment.examine(state.global_step):
            control.should_training_stop = True

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._attachment.detach()


def _hook_trl(attachment: Attachment, trainer: Any) -> None:
    scores: list[Any] = []  # the log-probabilities and entropies of the loss in progress

    def score(method: Any, *args: Any, **kwargs: Any) -> Any:
        result = method(*args, **kwargs)
        if torch.is_grad_enabled():
            scores[:] = [result]
        return result

    def compute_loss(method: Any, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        loss = method(model, inputs, *args, **kwargs)
        if trainer.model.training:
            step = trainer.state.global_step + 1
            attachment.observe(step, lambda: _trl_rows(inputs, scores))
        scores.clear()
        return loss

    _replace(attachment, trainer, "_get_per_token_logps_and_entropies", score)
    _replace(attachment, trainer, "compute_loss", compute_loss)
    trainer.add_callback(_Events(attachment))


def _trl_rows(inputs: Mapping[str, Any], scores: Sequence[Any]) -> list[Row]:
    batch = _rename_columns(inputs)
    if scores:
        batch["logp"] = scores[0][0]
        batch.setdefault("old_logp", batch["logp"])  # as in TRL's loss
    if "tool_mask" in inputs:
        batch["mask"] = batch["mask"] * inputs["tool_mask"]
    batch["prompts"] = _prompt_ids(inputs["prompt_ids"], inputs["prompt_mask"])
    return split_rows(batch)


def _hook_verl_worker(attachment: Attachment, worker: Any) -> None:
    _around(attachment, worker, "train_mini_batch", _verl_rows, _verl_metrics)
    tokenizer = getattr(getattr(worker, "model_config", None), "tokenizer", None)
    attachment.decode = attachment.decode or getattr(tokenizer, "decode", None)


def _hook_verl_driver(attachment: Attachment, trainer: Any) -> None:
    def metrics(data: Any, result: Any) -> Any:
        return _verl_metrics(data.batch, result.meta_info)

    _around(attachment, trainer, "_update_actor", lambda data: _verl_rows(data.batch), metrics)


def _verl_metrics(data: Any, result: Mapping[str, Any]) -> dict[str, Any]:
    """The metrics of an update with the mean reward, which verl logs elsewhere."""
    metrics, rewards = result["metrics"], _rename_columns(data).get("rewards")
    return dict(metrics) if rewards is None else {**metrics, "reward/mean": rewards.sum(-1).mean()}


def _verl_rows(data: Any) -> list[Row]:
    batch = _rename_columns(data)
    mask = data["attention_mask"] if "attention_mask" in set(data.keys()) else None
    return split_rows({**batch, "prompts": _prompt_ids(batch["prompts"], mask)})


def _around(
    attachment: Attachment,
    owner: Any,
    name: str,
    rows: Callable[[Any], list[Row]],
    metrics: Callable[[Any, Any], Mapping[str, Any]],
) -> None:
    """Observe the argument of a method that makes one step, and log the metrics of its result."""

    def call(method: Any, *args: Any, **kwargs: Any) -> Any:
        step, data = attachment.next_step, next(iter((*args, *kwargs.values())), None)
        attachment.observe(step, lambda: rows(data))
        result = method(*args, **kwargs)
        # Of several ranks that share a model, one returns the metrics.
        attachment.finish_step(step, lambda: {} if result is None else metrics(data, result))
        return result

    _replace(attachment, owner, name, call)


def _hook_openrlhf(attachment: Attachment, trainer: Any) -> None:
    def rows(_: Any) -> list[Row]:
        return [row for item in trainer.replay_buffer.items for row in one(vars(item))]

    def one(item: Mapping[str, Any]) -> list[Row]:
        """The completion of an `Experience`: `[T]` tensors, of which `sequences` begins earlier."""
        batch = _rename_columns({name: x for name, x in item.items() if x is not None})
        batch = {name: x if name == "prompts" else x[None] for name, x in batch.items()}
        batch["ids"] = item["sequences"][None, -batch["mask"].shape[1] :]
        return split_rows({**batch, "prompts": batch["prompts"] or [""]})

    _around(attachment, trainer, "ppo_train", rows, lambda _, result: result)


def _hook_tinker(attachment: Attachment, client: Any) -> None:
    results: list[Any] = []  # (loss, metrics) of each loss of the user
    waiting: list[tuple[Any, Any]] = []  # the data and the future of each call of forward_backward

    def custom(method: Any, data: Any, loss_fn: Any, **options: Any) -> Any:
        def loss(data: Any, logprobs: Any) -> Any:
            result = loss_fn(data, logprobs)
            complete = getattr(loss_fn, "complete", list)  # our losses keep inputs to themselves
            attachment.observe(attachment.next_step, lambda: _tinker_rows(complete(data), logprobs))
            results.append(result)
            return result

        # A loss that the server computes is no function.
        return method(data, loss if callable(loss_fn) else loss_fn, **options)

    def built_in(method: Any, data: Any, *args: Any, **kwargs: Any) -> Any:
        future = method(data, *args, **kwargs)
        waiting.append((data, future))
        return future

    def step(method: Any, *args: Any, **kwargs: Any) -> Any:
        result = method(*args, **kwargs)
        attachment.finish_step(attachment.next_step, read)
        return result

    def read() -> dict[str, Any]:
        """The metrics of the step. A result is read when it has arrived, mostly a step later."""
        # A custom loss also calls forward_backward, with data of its own.
        sampled = [pair for pair in waiting if "logprobs" in pair[0][0].loss_fn_inputs]
        arrived = [pair for pair in sampled if pair[1].future().done()]
        waiting[:] = [pair for pair in sampled if pair not in arrived]
        numbers = {name: x for _, metrics in results for name, x in metrics.items()}
        results.clear()
        for data, result in ((data, future.result()) for data, future in arrived):
            numbers.update(result.metrics)
            logp = [output["logprobs"].to_torch() for output in result.loss_fn_outputs]
            attachment.observe(attachment.next_step - 1, partial(_tinker_rows, data, logp))
        return numbers

    _replace(attachment, client, "forward_backward_custom_async", custom)
    _replace(attachment, client, "forward_backward", built_in)
    _replace(attachment, client, "optim_step", step)


def _tinker_rows(data: Sequence[Any], logprobs: Sequence[torch.Tensor]) -> list[Row]:
    """The data with the sampler's log-probabilities, which without a mask are 0 in the prompt."""
    rows: list[Row] = []
    for datum, logp in zip(data, logprobs, strict=True):
        inputs = {name: x.to_torch() for name, x in datum.loss_fn_inputs.items()}
        mask = inputs.get("mask", inputs.get("weights", inputs["logprobs"])) != 0
        batch = {name: inputs[key] for name, key in KEYS.items() if key in inputs}
        batch |= {"ids": inputs["target_tokens"], "logp": logp}
        batch |= {"advantages": inputs["advantages"]} if "advantages" in inputs else {}
        prompt = datum.model_input.to_ints()[: int(mask.int().argmax()) + 1]
        rows += split_rows(
            {name: x.reshape(1, -1) for name, x in {**batch, "mask": mask}.items()}
            | {"prompts": [prompt]}
        )
    return rows
