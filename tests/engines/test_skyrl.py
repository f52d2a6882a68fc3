"""Runs on a real Tinker server, SkyRL's with its JAX backend on this CPU: `make engines-skyrl`.

Every loss has the value and the gradient of the local learner, a run learns the built-in task, and
it survives a server that is killed.
"""

from __future__ import annotations

import math
import socket
import tarfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load as load_tensors
from test_vllm import Process, lines, trainer
from torch import Tensor

import policyloss as pl
from policyloss.catalogue import PRESETS
from policyloss_train.batches import Pack
from policyloss_train.config import TrainConfig
from policyloss_train.distributed import Ranks
from policyloss_train.sampler import Sample
from policyloss_train.setup import build
from policyloss_train.tinker.service import Service

pytest.importorskip("skyrl")
pytestmark = pytest.mark.engines
HERE = Ranks(0, 1, torch.device("cpu"))
RANK = 32  # the server scales adapters by 32 over their rank, so here by 1
OPTIONS = {
    "max_new_tokens": 16,
    "lora_rank": RANK,
    "lr": 2e-3,
    "grad_clip": 0,  # the server does not clip
    "eval_prompts": 128,
    "rollout_timeout": 600,  # the server compiles for every new shape
}
MODEL = """if True:
    import sys, torch
    from transformers import Qwen3Config, Qwen3ForCausalLM
    from policyloss_train.models import tiny_tokenizer
    from policyloss_train.setup import WARMUP_STEPS, warm_up
    from policyloss_train.tasks import make_task
    task = make_task("sort", reward=None, seed=0)
    tokenizer = tiny_tokenizer(task)
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=256, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=4, head_dim=16, max_position_embeddings=512,
        tie_word_embeddings=True, pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id, bos_token_id=None, dtype="float32",
    )).eval()
    warm_up(model, tokenizer, task, steps=WARMUP_STEPS, seed=0)
    model.save_pretrained(sys.argv[1])
    tokenizer.save_pretrained(sys.argv[1])
"""


class Server:
    def __init__(self, folder: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.folder, self.model = folder, folder / "model"
        self.engine = f"tinker:http://127.0.0.1:{self.port}"

    def start(self) -> None:
        script = Path(__file__).with_name("skyrl_server.py")
        words = [str(script), str(self.folder), str(self.model), str(self.port)]
        self.process = Process(words, self.folder / "server.log")

        def answers() -> bool:
            with socket.socket() as asked:
                return asked.connect_ex(("127.0.0.1", self.port)) == 0

        self.process.until(answers)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    served = Server(tmp_path_factory.mktemp("skyrl"))
    making = Process(["-c", MODEL, str(served.model)], served.folder / "model.log")
    assert making.ended() == 0
    served.start()
    yield served
    served.process.kill()


def some_samples() -> list[Sample]:
    """Sequences of different lengths, whose sampler is near the policy."""
    generator = torch.Generator().manual_seed(0)

    def draw(count: int) -> Tensor:
        return torch.randint(3, 60, (count,), generator=generator)

    return [
        Sample(0, i // 4, draw(3 + i % 3), draw(2 + i), -4 - torch.rand(2 + i), True, "", i % 3 / 2)
        for i in range(8)
    ]


def learner_of(server: Server, engine: str, spec: pl.LossSpec) -> Any:
    options = TrainConfig(
        engine=engine,
        model=str(server.model),
        advantage="grpo",
        minibatches=1,
        **{**OPTIONS, "lora_rank": RANK if engine == server.engine else 0},  # type: ignore[arg-type]
    )
    setup = build(options, spec, HERE, say=print, warn=print)
    setup.learner.start_copies()
    return setup.learner


def adapters(server: Server, policy: Any) -> dict[str, Tensor]:
    """The adapters of a policy, from the files of the server."""
    before = set(server.folder.rglob("*.tar.gz"))
    policy.save_weights_and_get_sampling_client()
    (file,) = set(server.folder.rglob("*.tar.gz")) - before
    with tarfile.open(file) as archive:
        content: Any = archive.extractfile(
            next(name for name in archive.getnames() if name.endswith(".safetensors"))
        )
        return load_tensors(content.read())


def by_hand(moved: dict[str, Tensor], first: dict[str, Tensor]) -> dict[str, Tensor]:
    """The gradient of each adapter B where B is 0: the gradient of its weight W, times Aᵀ."""
    gradients = {}
    for name, a in first.items():
        if "lora_A" in name:
            weight = name.removeprefix("base_model.model.").replace(".lora_A", "")
            gradients[name.replace("lora_A", "lora_B")] = moved[weight] @ a.T
    return gradients


def test_every_loss_has_the_value_and_the_gradient_of_the_local_learner(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    pack = Pack.of(some_samples())
    remote = learner_of(server, server.engine, pl.preset("grpo"))
    first = adapters(server, remote.policy)
    assert any("lora_A" in name for name in first)
    norms = {}

    def rate_of_0(service: Service, policy: Any, lr: float, clip: float) -> float:
        return step(service, policy, 0.0, clip)

    step = Service.step
    monkeypatch.setattr(Service, "step", rate_of_0)
    for name, preset in PRESETS.items():
        spec = preset.spec.for_run(16)
        if {"entropy", "divergence", "teacher_logp"} & set(spec.reads):
            continue
        local = learner_of(server, "built-in", spec)
        weights = dict(local.policy.model.named_parameters())
        before = {key: x.detach().clone() for key, x in weights.items()}
        local.optimizer = torch.optim.SGD(local.policy.parameters(), lr=1.0)
        here = local.learn(pack, range(8), 8, 0)
        gradients = {key: before[key] - x.detach() for key, x in weights.items()}
        expected = math.hypot(*(float(x.norm()) for x in by_hand(gradients, first).values()))
        remote.spec = spec
        there = remote.learn(pack, range(8), 8, 0)
        mask = here.pack.tokens["mask"]
        assert (there.logp - here.logp)[mask].abs().max() <= 1e-5, name
        assert there.metrics["loss"] == pytest.approx(here.metrics["loss"], abs=1e-5), name
        assert there.grad_norm == pytest.approx(expected, rel=1e-4, abs=1e-5), name
        norms[name] = expected
    assert len(norms) >= 36
    print("presets:", " ".join(norms))


def test_the_gradient_is_that_of_the_local_learner_entry_by_entry(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """AdamW without memory and with an ε far above the gradient moves a weight by −gradient."""

    def descend(service: Service, policy: Any, lr: float, clip: float) -> float:
        large = 1e6
        options = {"beta1": 0.0, "beta2": 0.0, "eps": large, "weight_decay": 0.0}
        policy.optim_step(service.tinker.AdamParams(learning_rate=large, **options)).result()
        return 0.0

    spec, pack = pl.preset("dapo"), Pack.of(some_samples())
    remote, local = (learner_of(server, name, spec) for name in (server.engine, "built-in"))
    first = adapters(server, remote.policy)
    weights = dict(local.policy.model.named_parameters())
    before = {key: x.detach().clone() for key, x in weights.items()}
    local.optimizer, local.config = (
        torch.optim.SGD(local.policy.parameters(), lr=1.0),
        replace(local.config, grad_clip=0.0),
    )
    local.learn(pack, range(8), 8, 0)
    expected = by_hand({key: before[key] - x.detach() for key, x in weights.items()}, first)
    monkeypatch.setattr(Service, "step", descend)
    remote.learn(pack, range(8), 8, 0)
    after = adapters(server, remote.policy)
    largest = max(float(x.abs().max()) for x in expected.values())
    assert largest > 1e-3
    for name, gradient in expected.items():
        gap = float((-after[name] - gradient).abs().max())
        assert gap <= 1e-5 * max(largest, 1.0), name


def run(server: Server, out: Path, **options: Any) -> Process:
    return trainer(out, engine=server.engine, model=server.model, **{**OPTIONS, **options})


def test_a_run_learns_to_sort(server: Server, tmp_path: Path) -> None:
    out = tmp_path / "run"
    assert run(server, out, steps=40, eval_every=10).ended() == 0
    rows = [row for row in lines(out) if "eval/accuracy" in row]
    assert rows[0]["eval/accuracy"] < 0.5
    assert rows[-1]["eval/accuracy"] >= 0.9
    gaps = [
        abs(x - y)
        for row in lines(out, "rollouts")
        for x, y in zip(row["rollout_logp"], row["old_logp"], strict=True)
    ]
    assert max(gaps) <= 1e-4  # the sampler and the learner have the same weights


def test_a_server_that_is_killed_and_a_run_that_is_resumed(server: Server, tmp_path: Path) -> None:
    out = tmp_path / "run"
    training = run(server, out, steps=6, checkpoint_every=2, rollout_timeout=300)
    training.until(lambda: len(lines(out)) >= 4)
    server.process.kill()
    server.start()
    assert training.ended() == 0, training.log.read_text()[-3000:]
    said = training.log.read_text()
    assert "Going on from the last checkpoint." in said, said[-3000:]
    assert [row["step"] for row in lines(out)] == list(range(7))
    again = trainer(out, resume=True, engine=server.engine, extend=8)
    assert again.ended() == 0, again.log.read_text()[-3000:]
    assert [row["step"] for row in lines(out)] == list(range(9))
