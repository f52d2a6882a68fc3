"""`lab.attach`: small fakes of the trainers; the real TRL and verl are in `make conformance`."""

from __future__ import annotations

import asyncio
import json
import logging
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import policyloss_lab as lab
from policyloss.errors import InputError
from policyloss_lab import attachment as attachment_module
from policyloss_lab.runs.recorder import Recorder

ROWS, WIDTH, WORDS = 8, 40, 32


def pairs(temperature: float = 1.0) -> dict[str, Tensor]:
    """A batch whose sampler had this temperature; the last five tokens of row 0 are masked."""
    draw = torch.Generator().manual_seed(1)
    logits = 2 * torch.randn(ROWS, WIDTH, WORDS, generator=draw)
    ids = torch.multinomial(logits.flatten(0, 1).softmax(-1), 1, generator=draw)
    ids = ids.reshape(ROWS, WIDTH)
    mask = torch.ones(ROWS, WIDTH, dtype=torch.long)
    mask[0, -5:] = 0
    old, rollout = (
        (logits / t).log_softmax(-1).gather(-1, ids[..., None])[..., 0] for t in (1.0, temperature)
    )
    noise = 1e-4 * torch.randn(ROWS, WIDTH, generator=draw)
    return {"ids": ids, "mask": mask, "old_logp": old, "rollout_logp": rollout + noise}


def lines(run: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / f"{name}.jsonl").read_text().splitlines()]


# A loop of one's own ------------------------------------------------------------------------------


def test_a_loop_is_recorded_examined_and_halted_at_the_named_verdict(tmp_path: Path) -> None:
    attached = lab.attach(out=tmp_path / "run", every=3, halt_on="temperature", decode=str)

    def step(number: int, temperature: float) -> None:
        attached.step(
            {"reward": torch.tensor(0.1 * number), "note": "a text", "list": [1.0, 2.0]},
            prompts=["1 + 1 ="] * ROWS,
            rewards=torch.arange(8.0),
            advantages=torch.ones(ROWS),
            **pairs(temperature),
        )

    for number in (1, 2, 3):
        step(number, 1.0 if number < 3 else 0.6)  # step 3 is not examined, step 4 is
    with pytest.raises(lab.RunHaltedError, match="temperature, from step 4: ") as halted:
        step(4, 0.6)
    assert halted.value.cause == "temperature"
    assert [*attached.findings] == ["temperature"]
    metrics = lines(tmp_path / "run", "metrics")
    assert [row["step"] for row in metrics] == [1, 2, 3, 4]
    assert metrics[1]["reward"] == pytest.approx(0.2)
    assert metrics[0]["list"] == 1.5
    assert "note" not in metrics[0]
    rollouts = lines(tmp_path / "run", "rollouts")
    assert [row["step"] for row in rollouts] == [1] * 8 + [4] * 8
    assert [len(row["ids"]) for row in rollouts[:2]] == [WIDTH - 5, WIDTH]
    assert rollouts[9]["rollout_logp"] == pairs(0.6)["rollout_logp"][1].tolist()
    assert rollouts[9]["reward"] == 1.0
    (finding,) = lines(tmp_path / "run", "findings")
    assert (finding["cause"], finding["step"]) == ("temperature", 4)
    page = (tmp_path / "run" / "report.html").read_text()
    assert "<b>temperature</b> from step 4" in page
    attached.step({"reward": 1.0})  # it has left the loop
    assert len(lines(tmp_path / "run", "metrics")) == 4


def test_a_healthy_loop_has_no_finding_and_a_page(tmp_path: Path) -> None:
    with lab.attach(out=tmp_path / "run", every=1, halt_on=("temperature", "shift")) as attached:
        for step in range(12):
            attached.step({"reward": 0.1 * step}, **pairs())
    assert not attached.findings
    assert "no symptom in 12 steps" in (tmp_path / "run" / "report.html").read_text()


def test_a_symptom_of_the_log_halts(tmp_path: Path) -> None:
    attached = lab.attach(out=tmp_path / "run", every=4, halt_on="nonfinite")
    for _ in range(40):
        attached.step({"reward": 1.0, "grad_norm": 1.0})
    with pytest.raises(lab.RunHaltedError, match="grad_norm is not finite at step 41"):
        attached.step({"reward": 1.0, "grad_norm": float("nan")})


def test_few_tokens_of_a_step_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    rows_of = attachment_module.examine_rows

    def examine(rows: Any, step: int) -> Any:
        seen.append(len(rows))
        return rows_of(rows, step)

    monkeypatch.setattr(attachment_module, "examine_rows", examine)
    monkeypatch.setattr(attachment_module, "TOKENS", 2 * WIDTH - 1)
    attached = lab.attach(out=tmp_path / "run", every=1)
    attached.step({}, **pairs())
    monkeypatch.setattr(attachment_module, "TOKENS", 3)  # less than one completion
    attached.step({}, **pairs())
    assert seen == [2, 1]  # 35 + 40 tokens; at least one completion
    assert attached.active


def test_tokens_that_no_engine_scored_are_left_out(tmp_path: Path) -> None:
    batch = pairs()
    batch["rollout_logp"][:, 3] = torch.nan
    attached = lab.attach(out=tmp_path / "run", halt_on="not_explained")
    attached.step({}, **batch)
    assert attached.active
    assert not attached.findings


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"halt_on": "temprature"}, "halt_on: .*temperature"),
        ({"every": 0}, "every is 0"),
        ({"trainer": object()}, "trainer is an unknown object"),
    ],
)
def test_a_wrong_argument_raises_before_the_run(
    tmp_path: Path, options: dict[str, Any], text: str
) -> None:
    with pytest.raises(InputError, match=text):
        lab.attach(out=tmp_path / "run", **options)
    assert not (tmp_path / "run").exists()


def test_an_error_inside_is_logged_once_and_the_loop_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Recorder, "completions", lambda *_, **__: 1 / 0)
    attached = lab.attach(out=tmp_path / "run", every=1, halt_on="temperature")
    with caplog.at_level(logging.WARNING, "policyloss_lab"):
        for _ in range(3):
            attached.step({"reward": 1.0}, **pairs())
    assert not attached.active
    assert ["attach failed" in record.message for record in caplog.records] == [True]
    assert "ZeroDivisionError" in caplog.text
    assert len(lines(tmp_path / "run", "metrics")) == 1


# Ranks --------------------------------------------------------------------------------------------


class TwoRanks:
    """`torch.distributed` as rank 0 or 1 of two sees it; rank 0 shares `sent`."""

    def __init__(self, rank: int, sent: Any = None) -> None:
        self.rank, self.sent, self.calls = rank, sent, 0

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return True

    def get_world_size(self) -> int:
        return 2

    def get_rank(self) -> int:
        return self.rank

    def broadcast_object_list(self, objects: list[Any], src: int) -> None:
        assert src == 0
        self.calls += 1
        if self.rank:
            objects[:] = [self.sent]


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_halt_together_and_the_first_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    ranks = TwoRanks(rank, ("temperature", "a reason"))
    monkeypatch.setattr(attachment_module, "dist", ranks)
    attached = lab.attach(out=tmp_path / "run", every=2, halt_on="temperature")
    with pytest.raises(lab.RunHaltedError) as halted:
        attached.step({"reward": 1.0}, **pairs(0.6))
    assert halted.value.cause == "temperature"
    assert (tmp_path / "run").exists() == (rank == 0)


def test_a_rank_that_failed_goes_on_to_share_that_it_has_no_verdict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = TwoRanks(0)
    monkeypatch.setattr(attachment_module, "dist", ranks)
    monkeypatch.setattr(Recorder, "step", lambda *_, **__: 1 / 0)
    worker = Worker()
    attached = lab.attach(worker, tmp_path / "run", every=2, halt_on="temperature")
    for _ in range(5):
        worker.train_mini_batch(data=verl_batch(0.6))
    assert not attached.active
    assert ranks.calls == 3  # at the steps 1, 3 and 5, like the other rank


@pytest.mark.slow
@pytest.mark.parametrize(("state", "end"), [("well", "halted at 3 by shift"), ("broken", "ended")])
def test_two_processes_halt_together_or_go_on(tmp_path: Path, state: str, end: str) -> None:
    worker = Path(__file__).parents[1] / "workers/attach_ranks.py"
    ranks = [
        subprocess.Popen([sys.executable, str(worker), str(tmp_path), str(rank), state])
        for rank in range(2)
    ]
    assert [rank.wait(120) for rank in ranks] == [0, 0]
    assert [(tmp_path / f"rank{rank}").read_text() for rank in range(2)] == [end, end]


# TRL ----------------------------------------------------------------------------------------------


class Trainer:
    """The parts of TRL's GRPOTrainer that `attach` meets. Each step has two micro-batches."""

    def __init__(self, temperature: float = 1.0) -> None:
        self.state = SimpleNamespace(global_step=0)
        self.control = SimpleNamespace(should_training_stop=False)
        self.model = SimpleNamespace(training=True)
        self.processing_class = SimpleNamespace(decode=lambda ids: f"<{len(ids)}>")
        self.callbacks: list[Any] = []
        self.temperature = temperature

    def add_callback(self, callback: Any) -> None:
        self.callbacks.append(callback)

    def send(self, event: str, **extra: Any) -> None:
        for callback in self.callbacks:
            getattr(callback, event)(None, self.state, self.control, **extra)

    def _get_per_token_logps_and_entropies(self, batch: dict[str, Tensor]) -> Any:
        return batch["old_logp"].clone().requires_grad_(), None, None

    def compute_loss(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        logp, _, _ = self._get_per_token_logps_and_entropies(self.batch)
        return logp.sum()

    def train(self, steps: int) -> None:
        self.send("on_train_begin")
        for _ in range(steps):
            for part in (slice(0, 4), slice(4, 8)):
                self.batch = {name: x[part] for name, x in pairs(self.temperature).items()}
                inputs = {
                    "prompt_ids": torch.tensor([[0, 5, 6]] * 4),
                    "prompt_mask": torch.tensor([[0, 1, 1]] * 4),
                    "completion_ids": self.batch["ids"],
                    "completion_mask": self.batch["mask"],
                    "sampling_per_token_logps": self.batch["rollout_logp"],
                    "advantages": torch.ones(4),
                }
                self.compute_loss(self.model, inputs, num_items_in_batch=4)
            self.state.global_step += 1
            self.send("on_step_end")
            self.send("on_log", logs={"loss": 0.5, "reward": 0.5})
            self.send("on_log", logs={"eval_reward": 0.75})
            if self.control.should_training_stop:
                break
        self.send("on_train_end")


def test_trl_is_recorded_and_left_as_it_was(tmp_path: Path) -> None:
    trainer = Trainer()
    attached = lab.attach(trainer, tmp_path / "run", every=2, halt_on="temperature")
    trainer.train(4)
    assert not attached.findings
    assert "compute_loss" not in vars(trainer)
    metrics = lines(tmp_path / "run", "metrics")
    assert [row["eval_reward"] for row in metrics] == [0.75] * 4
    rollouts = lines(tmp_path / "run", "rollouts")
    assert [row["step"] for row in rollouts] == [1] * 8 + [3] * 8
    assert rollouts[5]["old_logp"] == pairs()["old_logp"][5].tolist()
    assert (rollouts[0]["prompt"], rollouts[0]["completion"]) == ("<2>", "<35>")


def test_trl_stops_after_the_sick_step(tmp_path: Path) -> None:
    trainer = Trainer(0.6)
    attached = lab.attach(trainer, tmp_path / "run", halt_on="temperature")
    trainer.train(4)
    assert trainer.state.global_step == 1
    assert attached.halt is not None
    assert "<b>temperature</b>" in (tmp_path / "run" / "report.html").read_text()


# verl ---------------------------------------------------------------------------------------------


class Batch:
    """A TensorDict: `in` does not look for a key."""

    def __init__(self, **tensors: Tensor) -> None:
        self._tensors = tensors

    def keys(self) -> Iterator[str]:
        return iter(self._tensors)

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name]

    def __contains__(self, name: str) -> bool:
        raise NotImplementedError


def verl_batch(temperature: float = 1.0) -> Batch:
    batch = pairs(temperature)
    return Batch(
        prompts=torch.tensor([[0, 7]] * ROWS),
        attention_mask=torch.tensor([[0] + [1] * (WIDTH + 1)] * ROWS),
        responses=batch["ids"],
        response_mask=batch["mask"],
        old_log_probs=batch["old_logp"],
        rollout_log_probs=batch["rollout_logp"],
        token_level_scores=torch.full((ROWS, WIDTH), 0.5),
        advantages=torch.ones(ROWS, WIDTH),
    )


class Worker:
    """verl's worker; its ranks without outputs return None."""

    def train_mini_batch(self, data: Batch) -> Any:
        return {"metrics": {"actor/pg_loss": [1.0, 3.0], "grad_norm": [0.5]}}


class Driver:
    def _update_actor(self, batch: Any) -> Any:
        return SimpleNamespace(meta_info={"metrics": {"actor/pg_loss": [1.0, 3.0]}})


@pytest.mark.parametrize("kind", ["worker", "holder", "driver"])
def test_verl_is_recorded_and_halted(tmp_path: Path, kind: str) -> None:
    worker: Any = Driver() if kind == "driver" else Worker()
    trainer = SimpleNamespace(actor=worker) if kind == "holder" else worker
    attached = lab.attach(trainer, tmp_path / "run", every=1, halt_on="temperature")

    def step(temperature: float) -> None:
        if kind == "driver":
            worker._update_actor(SimpleNamespace(batch=verl_batch(temperature)))
        else:
            worker.train_mini_batch(data=verl_batch(temperature))

    step(1.0)
    with pytest.raises(lab.RunHaltedError):
        step(0.6)
    assert not vars(worker)
    row = lines(tmp_path / "run", "metrics")[0]
    assert (row["actor/pg_loss"], row["reward/mean"]) == (2.0, 0.5 * WIDTH)
    rollout = lines(tmp_path / "run", "rollouts")[0]
    assert (rollout["prompt"], rollout["reward"]) == ("7", 0.5 * WIDTH)
    assert [*attached.findings] == ["temperature"]


def test_jagged_columns_are_padded(tmp_path: Path) -> None:
    jagged = torch.nested.nested_tensor([-torch.rand(n) for n in (30, 20)], layout=torch.jagged)
    ids = torch.nested.nested_tensor_from_jagged(torch.ones(50).long(), jagged.offsets())
    batch = Batch(
        responses=ids,
        response_mask=torch.nested.nested_tensor_from_jagged(torch.ones(50), jagged.offsets()),
        old_log_probs=jagged,
        rollout_log_probs=jagged,
        prompts=torch.ones(2, 3).long(),
    )
    worker = Worker()
    attached = lab.attach(worker, tmp_path / "run")
    worker.train_mini_batch(batch)
    assert attached.active
    assert [len(row["ids"]) for row in lines(tmp_path / "run", "rollouts")] == [30, 20]


# OpenRLHF -----------------------------------------------------------------------------------------


class ActorTrainer:
    def __init__(self) -> None:
        batch = pairs(0.6)
        self.replay_buffer = SimpleNamespace(
            items=[
                SimpleNamespace(
                    sequences=torch.cat([torch.tensor([9, 9]), batch["ids"][i]]),
                    action_mask=batch["mask"][i].bool(),
                    action_log_probs=batch["old_logp"][i],
                    rollout_log_probs=batch["rollout_logp"][i],
                    base_action_log_probs=None,
                    advantages=torch.ones(WIDTH),
                    rewards=torch.tensor(float(i)),
                    prompts=["a question"],
                )
                for i in range(ROWS)
            ]
        )

    def ppo_train(self, kl_ctl: float) -> dict[str, float]:
        return {"policy_loss": 0.25, "reward": 0.5}


def test_openrlhf_is_recorded_and_halted(tmp_path: Path) -> None:
    actor = SimpleNamespace(trainer=ActorTrainer())
    lab.attach(actor, tmp_path / "run", halt_on="temperature")
    with pytest.raises(lab.RunHaltedError):
        actor.trainer.ppo_train(0.0)
    assert lines(tmp_path / "run", "metrics") == [{"step": 1, "policy_loss": 0.25, "reward": 0.5}]
    row = lines(tmp_path / "run", "rollouts")[3]
    assert (row["prompt"], row["reward"]) == ("a question", 3.0)
    assert row["ids"] == pairs()["ids"][3].tolist()


# Tinker -------------------------------------------------------------------------------------------


class Values(torch.Tensor):
    def to_torch(self) -> Tensor:
        return self.as_subclass(torch.Tensor)


def datum(batch: dict[str, Tensor], row: int) -> Any:
    """A prompt of three tokens, whose two targets have no log-probability, and a completion."""
    ids = batch["ids"][row]
    inputs = {
        "target_tokens": torch.cat([torch.tensor([5, 6]), ids]),
        "logprobs": torch.cat([torch.zeros(2), batch["rollout_logp"][row]]),
        "advantages": torch.ones(WIDTH + 2),
    }
    tokens = [4, 5, 6, *ids.tolist()]
    return SimpleNamespace(
        model_input=SimpleNamespace(to_ints=lambda: tokens[:-1]),
        loss_fn_inputs={name: x.as_subclass(Values) for name, x in inputs.items()},
    )


class Client:
    """Tinker's client: the learner's log-probabilities are the old ones of the batch."""

    def __init__(self, batch: dict[str, Tensor]) -> None:
        self.logp = [torch.cat([torch.zeros(2), x]) for x in batch["old_logp"]]

    async def forward_backward_custom_async(self, data: Any, loss_fn: Any) -> Any:
        _, metrics = loss_fn(data, self.logp)
        self.forward_backward([SimpleNamespace(loss_fn_inputs={})], "cross_entropy", 99.0)
        return metrics

    def forward_backward(self, data: Any, loss_fn: str, loss: float = 2.0) -> Any:
        outputs = [{"logprobs": x.as_subclass(Values)} for x in self.logp]
        future: Future[Any] = Future()
        future.set_result(SimpleNamespace(metrics={"loss:sum": loss}, loss_fn_outputs=outputs))
        return SimpleNamespace(future=lambda: future, result=future.result)

    def optim_step(self, params: Any) -> None:
        """Nothing to train."""


@pytest.mark.parametrize("custom", [True, False])
def test_tinker_is_recorded_and_halted(tmp_path: Path, custom: bool) -> None:
    batch = pairs(0.6)
    client = Client(batch)
    data = [datum(batch, i) for i in range(ROWS)]
    lab.attach(client, tmp_path / "run", halt_on="temperature")
    if custom:
        loss = (torch.zeros(()), {"loss:sum": 2.0})
        asyncio.run(client.forward_backward_custom_async(data, lambda *_: loss))
    else:
        client.forward_backward(data, "importance_sampling")
    with pytest.raises(lab.RunHaltedError):
        client.optim_step(None)
    assert lines(tmp_path / "run", "metrics") == [{"step": 1, "loss:sum": 2.0}]
    row = lines(tmp_path / "run", "rollouts")[2]
    assert row["prompt"] == "4 5 6"
    assert row["ids"] == batch["ids"][2].tolist()
    assert row["logp"] == batch["old_logp"][2].tolist()
