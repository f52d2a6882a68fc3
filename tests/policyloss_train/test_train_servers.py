"""Servers that sample, as vLLM's do, with every fault that a network and a server have."""

from __future__ import annotations

import copy
import dataclasses
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import fake_vllm
import pytest
import torch
from fake_server import FakeServer
from train_loop_ranks import lines, resume, train

from policyloss.errors import InputError
from policyloss_train.config import TrainConfig
from policyloss_train.distributed import Ranks
from policyloss_train.rollout import servers as servers_module
from policyloss_train.rollout.protocol import Prompt, RolloutError, Sampling, Weights
from policyloss_train.rollout.servers import Servers
from policyloss_train.rollout.transfer import Transfer
from policyloss_train.rollout.vllm_engine import TopLogprobs

GENERATE = "/inference/v1/generate"
SAMPLING = Sampling(6, 1.0, 1.0, 0, (1,), seed=3, draw=5)
PROMPTS = [Prompt([20 + i, 30, 31], number=2, place=2 * i) for i in range(6)]
ONE = Ranks(0, 1, torch.device("cpu"))
NO_REPORT = TopLogprobs(0, 100)


@pytest.fixture(scope="module")
def weights(model: str) -> Weights:
    """Weights that differ from the servers' initial ones."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    policy = AutoModelForCausalLM.from_pretrained(model)
    with torch.no_grad():
        policy.model.embed_tokens.weight.mul_(0.7)
    return Weights(policy, AutoTokenizer.from_pretrained(model), ONE)


@pytest.fixture
def pair(model: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[FakeServer]]:
    monkeypatch.setattr(servers_module, "FIRST_WAIT_S", 0.02)
    monkeypatch.setattr(servers_module, "LONGEST_WAIT_S", 0.1)
    with FakeServer(model) as first, FakeServer(model) as second:
        yield [first, second]


class Engine:
    """An engine of these servers that has weights, and its messages."""

    def __init__(
        self,
        servers: list[FakeServer],
        weights: Weights,
        folder: Path,
        timeout: float = 0.6,
        report: TopLogprobs = NO_REPORT,
        ranks: Ranks = ONE,
    ) -> None:
        self.said: list[str] = []
        addresses = ",".join(server.address for server in servers)
        config = TrainConfig(rollout=addresses, rollout_timeout=timeout, out=folder / "run")
        self.servers = Servers(config, ranks, report, self.said.append)
        self.servers.update_weights(weights, 4)

    def sampled(self, version: int = 4) -> list[Any]:
        groups = self.servers.generate(PROMPTS, SAMPLING)
        assert {c.version for group in groups for c in group} == {version}
        return [(c.ids, list(c.logp), c.finished) for group in groups for c in group]


def gap(weights: Weights, sampled: list[Any]) -> float:
    """The largest |log-prob of the server − log-prob of the policy|."""
    gaps = [0.0]
    for i, (ids, logp, _) in enumerate(sampled):
        tokens = torch.tensor([PROMPTS[i // 2].ids + ids])
        with torch.no_grad():
            mine = weights.model(tokens).logits.log_softmax(-1)[0, 2:-1]
        mine = mine.gather(-1, tokens[0, 3:, None]).squeeze(-1)
        gaps.append((mine - torch.tensor(logp)).abs().max().item())
    return max(gaps)


def test_prompts_are_dealt_among_servers_that_have_the_weights(
    pair: list[FakeServer], weights: Weights, tmp_path: Path
) -> None:
    engine = Engine(pair, weights, tmp_path)
    sampled = engine.sampled()
    assert gap(weights, sampled) < 1e-5
    assert [server.calls.count(GENERATE) for server in pair] == [3, 3]
    assert engine.sampled() == sampled  # seeds are those of the places
    assert engine.said == []
    names = {server.version for server in pair}
    assert len(names) == 1
    assert names.pop().endswith("-4")
    engine.servers.update_weights(weights, 5)
    assert sorted(path.name for path in (tmp_path / "run" / "rollout_weights").iterdir()) == ["5"]
    engine.servers.close()
    assert not (tmp_path / "run" / "rollout_weights").exists()


@pytest.mark.parametrize("fault", ["500", "half", "close", "old weights", "abort", "time out"])
def test_a_request_that_fails_goes_to_the_other_server(
    fault: str, pair: list[FakeServer], weights: Weights, tmp_path: Path
) -> None:
    # A busy machine may need a second for a correct answer.
    engine = Engine(pair, weights, tmp_path, timeout=0.6 if fault == "time out" else 30.0)
    expected = engine.sampled()
    before = [server.calls.count(GENERATE) for server in pair]
    pair[0].faults[GENERATE] = [fault]
    assert engine.sampled() == expected
    asked = [server.calls.count(GENERATE) - n for server, n in zip(pair, before, strict=True)]
    assert asked == [3, 4]
    says = {
        "500": f'answered {GENERATE} with 500: {{"error": "told to fail: 500"}}',
        "half": f"did not answer {GENERATE}: ",
        "close": f"did not answer {GENERATE}: ",
        "old weights": "sampled with the weights ['default'], not ",
        "abort": "ended a completion by 'abort'",
        "time out": f"did not answer {GENERATE} in 0.6 s",
    }
    assert engine.said[0].startswith(f"the server {pair[0].address} {says[fault]}")


def test_a_dead_server_is_named_and_the_others_do_its_work(
    pair: list[FakeServer], weights: Weights, tmp_path: Path
) -> None:
    engine = Engine(pair, weights, tmp_path)
    expected = engine.sampled()
    pair[1].stop()
    assert engine.sampled() == expected
    assert engine.sampled() == expected
    assert len(engine.said) == 1  # once, and not at every prompt
    assert engine.said[0].startswith(f"the server {pair[1].address} did not answer /weight_info")
    assert "Connection refused" in engine.said[0]
    pair[1].start()


def test_a_server_that_was_restarted_gets_the_weights_again(
    pair: list[FakeServer], weights: Weights, tmp_path: Path
) -> None:
    """It has its initial weights, and reports their version. Once between two steps, and once in
    the middle of one.
    """
    engine = Engine(pair, weights, tmp_path)
    expected = engine.sampled()
    pair[0].stop()
    pair[0].start()
    assert pair[0].version == "default"
    assert engine.sampled() == expected
    assert pair[0].version == pair[1].version != "default"

    def restart(path: str) -> None:
        if path == GENERATE:
            pair[0].before = lambda path: None
            pair[0].forget()

    pair[0].before = restart
    assert engine.sampled() == expected
    assert engine.sampled() == expected
    failed, again = engine.said
    assert "sampled with the weights ['default']" in failed
    assert again == f"the server {pair[0].address} answers again"


def test_when_nobody_answers_the_error_names_all(
    pair: list[FakeServer], weights: Weights, tmp_path: Path
) -> None:
    engine = Engine(pair, weights, tmp_path)
    pair[0].stop()
    pair[1].faults[GENERATE] = ["500"] * 999
    began = time.monotonic()
    with pytest.raises(RolloutError) as caught:
        engine.sampled()
    assert 0.6 <= time.monotonic() - began < 5
    text = str(caught.value)
    assert text.startswith("no completions have come for 0.6 s (--rollout-timeout): ")
    assert f"the server {pair[0].address} did not answer /weight_info" in text
    assert f"the server {pair[1].address} answered {GENERATE} with 500" in text
    pair[0].start()


def test_it_waits_for_a_server_that_comes_back(
    pair: list[FakeServer], weights: Weights, tmp_path: Path
) -> None:
    engine = Engine(pair[:1], weights, tmp_path, timeout=20)
    expected = engine.sampled()
    pair[0].stop()
    back = threading.Timer(0.5, pair[0].start)
    back.start()
    assert engine.sampled() == expected
    back.join()


def test_progress_is_not_lost_when_every_answer_comes_late(
    pair: list[FakeServer], weights: Weights, tmp_path: Path
) -> None:
    """Each round answers something, so that many failures are not one long silence."""
    engine = Engine(pair, weights, tmp_path)
    expected = engine.sampled()
    for server in pair:
        server.faults[GENERATE] = ["500", "500", "", "half", "close", ""]
    assert engine.sampled() == expected


@pytest.mark.parametrize(
    ("fault", "path", "says"),
    [
        ("400", GENERATE, f"answered {GENERATE} with 400: "),
        ("403", GENERATE, f"answered {GENERATE} with 403: "),
        ("404", "/weight_info", "and start it with VLLM_SERVER_DEV_MODE=1"),
    ],
)
def test_a_refused_request_is_not_repeated(
    fault: str,
    path: str,
    says: str,
    pair: list[FakeServer],
    weights: Weights,
    tmp_path: Path,
) -> None:
    engine = Engine(pair, weights, tmp_path)
    pair[0].faults[path] = [fault] * 9
    with pytest.raises(InputError) as caught:
        engine.sampled()
    assert says in str(caught.value)
    assert pair[0].address in str(caught.value)


def test_a_server_must_report_its_sampling_settings(model: str, tmp_path: Path) -> None:
    with FakeServer(model, logprobs_mode="raw_logprobs") as server:
        config = TrainConfig(rollout=server.address, out=tmp_path / "run")
        with pytest.raises(InputError, match="start it with --logprobs-mode processed_logprobs"):
            Servers(config, ONE, NO_REPORT, print)


def test_a_server_must_report_all_that_it_kept(model: str, tmp_path: Path) -> None:
    with FakeServer(model) as server:
        config = TrainConfig(rollout=server.address, out=tmp_path / "run", top_k=5)
        with pytest.raises(InputError, match=r"reports 20 log-.* start it with --max-logprobs 69"):
            Servers(config, ONE, TopLogprobs.of(config, 100), print)
        server.most = -1  # as many as one likes
        Servers(config, ONE, TopLogprobs.of(config, 100), print).close()


def test_a_token_without_enough_log_probabilities_is_requested_again(
    pair: list[FakeServer], weights: Weights, tmp_path: Path
) -> None:
    engine = Engine(pair, weights, tmp_path, report=TopLogprobs(15, 100))
    cut = dataclasses.replace(SAMPLING, top_k=5, support=True)
    expected = engine.servers.generate(PROMPTS, cut)
    kept = [one.support[1].diff() for group in expected for one in group if one.support]
    assert torch.cat(kept).tolist() == [5] * sum(len(one.ids) for g in expected for one in g)
    content = pair[0].content

    def short(*arguments: Any) -> Any:
        pair[0].content = content  # type: ignore[method-assign]
        rows = content(*arguments)
        rows[0]["top_logprobs"].pop()
        return rows

    pair[0].content = short  # type: ignore[method-assign]
    again = engine.servers.generate(PROMPTS, cut)
    assert [one.ids for g in again for one in g] == [one.ids for g in expected for one in g]
    assert "gave half an answer" in engine.said[0]


# ---------------------------------------------------------------- weights over NCCL

ON_GPU = Ranks(0, 1, torch.device("cuda"))
JOIN = "/init_weight_transfer_engine"


@pytest.fixture
def nccl(pair: list[FakeServer], monkeypatch: pytest.MonkeyPatch) -> list[FakeServer]:
    """Two servers that take weights over NCCL, with two workers and one."""
    fake_vllm.with_transfer(monkeypatch)
    pair[0].workers, pair[1].workers = 2, 1
    return pair


def changed(weights: Weights) -> Weights:
    policy = copy.deepcopy(weights.model)
    with torch.no_grad():
        policy.model.embed_tokens.weight.mul_(0.9)
    return Weights(policy, weights._tokenizer, ONE)


def test_weights_reach_the_servers_without_a_disk(
    nccl: list[FakeServer], weights: Weights, tmp_path: Path
) -> None:
    engine = Engine(nccl, weights, tmp_path, 30.0, ranks=ON_GPU)
    assert gap(weights, engine.sampled()) < 1e-5
    infos = [server.joined or {} for server in nccl]
    assert [info["rank_offset"] for info in infos] == [1, 3]  # the trainer is rank 0
    assert {info["world_size"] for info in infos} == {4}
    assert {info["master_address"] for info in infos} == {"127.0.0.1"}
    engine.servers.update_weights(changed(weights), 5)
    assert gap(changed(weights), engine.sampled(5)) < 1e-5
    for server in nccl:
        assert server.calls.count(JOIN) == 1
        assert server.calls.count("/update_weights") == 2
        assert "/collective_rpc" not in server.calls
    assert not (tmp_path / "run/rollout_weights").exists()
    assert engine.said == []


@pytest.mark.parametrize(
    ("path", "why"),
    [(JOIN, "with 500"), ("/start_weight_update", "with 500"), ("cpu", "policy on a GPU")],
)
def test_without_nccl_the_servers_read_a_folder(
    path: str, why: str, nccl: list[FakeServer], weights: Weights, tmp_path: Path
) -> None:
    nccl[1].faults[path] = ["500"]
    engine = Engine(nccl, weights, tmp_path, 30.0, ranks=ONE if path == "cpu" else ON_GPU)
    assert gap(weights, engine.sampled()) < 1e-5
    engine.servers.update_weights(changed(weights), 5)
    assert gap(changed(weights), engine.sampled(5)) < 1e-5
    (line,) = engine.said  # once
    assert line.startswith(f"the servers read weights from {tmp_path / 'run/rollout_weights'}")
    assert why in line


def test_without_vllm_here_the_servers_read_a_folder(
    nccl: list[FakeServer], weights: Weights, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "vllm.distributed.weight_transfer", None)
    engine = Engine(nccl, weights, tmp_path, 30.0, ranks=ON_GPU)
    assert gap(weights, engine.sampled()) < 1e-5
    assert "vllm" in engine.said[0]


def test_servers_that_do_not_join_are_not_waited_for(
    nccl: list[FakeServer], weights: Weights, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    never = threading.Event()
    monkeypatch.setattr(
        fake_vllm.NCCLTrainerWeightTransferEngine,
        "trainer_init",
        lambda *_, **__: never.wait(30),
    )
    engine = Engine(nccl, weights, tmp_path, 1.0, ranks=ON_GPU)
    never.set()
    assert any("no NCCL group after 1 s" in line for line in engine.said)
    assert gap(weights, engine.sampled()) < 1e-5


@pytest.mark.parametrize(("fault", "why"), [("500", "ServerError: .*with 500"), ("", "TimeIsUp")])
def test_servers_that_fail_while_they_receive_stop_the_run(
    fault: str,
    why: str,
    nccl: list[FakeServer],
    weights: Weights,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """NCCL waits for a server that is lost, and so does everything on the GPU."""
    if fault:
        nccl[1].faults["/update_weights"] = [fault]
    else:
        monkeypatch.setattr(Transfer, "update_weights", lambda self, info: time.sleep(30))
    with pytest.raises(RolloutError, match=f"did not take the weights over NCCL: {why}"):
        Engine(nccl, weights, tmp_path, 30.0 if fault else 2.0, ranks=ON_GPU)


def test_a_restarted_server_ends_the_transfer_before_anything_is_sent(
    nccl: list[FakeServer], weights: Weights, tmp_path: Path
) -> None:
    engine = Engine(nccl, weights, tmp_path, 30.0, ranks=ON_GPU)
    expected = engine.sampled()
    nccl[1].forget()
    assert engine.sampled() == expected  # by the other server
    (lost,) = engine.said
    assert f"{nccl[1].address} was restarted, and has no weights before the next step" in lost
    engine.servers.update_weights(changed(weights), 5)
    assert f"failed: RolloutError: the server {nccl[1].address} was restarted" in engine.said[1]
    assert [server.calls.count("/update_weights") for server in nccl] == [1, 1]
    assert gap(changed(weights), engine.sampled(5)) < 1e-5


def test_other_ranks_gather_every_tensor_and_call_nobody(
    weights: Weights, monkeypatch: pytest.MonkeyPatch
) -> None:
    gathered = []
    tensors = list(weights.tensors())

    def gather(self: Weights) -> Iterator[Any]:
        for name, x in tensors:
            gathered.append(name)
            yield name, x

    monkeypatch.setattr(Weights, "tensors", gather)
    monkeypatch.setattr(Ranks, "gather", lambda self, x: ["of the first rank", x])
    second = Transfer([], Ranks(1, 2, torch.device("cuda")), ThreadPoolExecutor(), 1.0)
    assert second.send(weights, "name") == "of the first rank"
    assert gathered == [one.name for one in weights.metadata()]


# ---------------------------------------------------------------- whole runs


def test_a_run_with_servers(model: str, tmp_path: Path) -> None:
    """Two servers, one of which dies and comes back without the weights: the run continues with the
    same completions. They include the tokens they were drawn from, so that the ratio of an
    unchanged policy is 1.
    """
    options = {"model": model, "steps": 3, "rollout_timeout": 20, "staleness": 1, "top_p": 0.9}
    with FakeServer(model) as first, FakeServer(model) as second:
        first.most = second.most = 200
        addresses = f"{first.address},{second.address}"
        assert train(tmp_path / "calm", **options, rollout=addresses) == 0
        updates = [0]

        def dying(path: str) -> None:
            updates[0] += path == "/update_weight_version"
            if updates[0] == 2 and path == GENERATE:
                first.before = lambda path: None
                first.forget()

        first.before = dying
        assert train(tmp_path / "hit", **options, rollout=addresses) == 0
    calm, hit = ((tmp_path / name / "metrics.jsonl").read_bytes() for name in ("calm", "hit"))
    assert calm == hit
    rows = lines(tmp_path / "hit", "rollouts")
    assert {(row["step"], row["weights"]) for row in rows} == {(1, 0), (2, 0), (3, 1)}
    fresh = [row for row in rows if row["step"] == 1]
    gaps = [
        abs(x - y)
        for row in fresh
        for x, y in zip(row["rollout_logp"], row["old_logp"], strict=True)
    ]
    assert max(gaps) < 1e-5


def test_a_run_without_servers_stops_with_an_error_and_resumes(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    options = {"model": model, "steps": 3, "rollout_timeout": 0.5, "checkpoint_every": 1}
    with FakeServer(model) as server:
        updates = [0]

        def dying(path: str) -> None:
            updates[0] += path == "/update_weight_version"
            if updates[0] == 2 and path == GENERATE:
                server.faults[GENERATE] = ["close"] * 999

        server.before = dying
        assert train(out, **options, rollout=server.address) == 2
        printed = capsys.readouterr().err
        assert "stopped in step 2: no completions have come for 0.5 s" in printed
        assert f"the server {server.address} did not answer {GENERATE}" in printed
        command = (
            f"policyloss train --resume --out {out} --reward train_loop_ranks:graded --rollout"
        )
        assert f"{command} {server.address}" in printed
        assert resume(out) == 2
        assert f"names the rollout '{server.address}', which is an address" in (
            capsys.readouterr().err
        )
        server.faults.clear()
        server.before = lambda path: None
        assert resume(out, rollout=server.address) == 0
    assert [row["step"] for row in lines(out)] == [0, 1, 2, 3]
