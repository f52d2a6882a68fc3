"""The engine that `--rollout` names."""

from __future__ import annotations

from collections.abc import Callable

from policyloss.errors import InputError
from policyloss.train.config import TrainConfig
from policyloss.train.models import parts
from policyloss.train.rollout.built_in import BuiltIn
from policyloss.train.rollout.kept import Report
from policyloss.train.rollout.protocol import Engine
from policyloss.train.rollout.servers import Servers
from policyloss.train.rollout.session import Rollout
from policyloss.train.rollout.vllm_engine import VLLM
from policyloss.train.rollout.weights import PolicyWeights
from policyloss.train.sampler import encode
from policyloss.train.setup import Setup
from policyloss.train.user_code import load_code


def make_rollout(config: TrainConfig, setup: Setup, warn: Callable[[str], None]) -> Rollout:
    """The engine, and what it needs in a run."""
    weights = PolicyWeights(setup.model, setup.tokenizer, setup.learner.ranks)
    engine = _engine(config, setup, weights, warn)
    return Rollout(config.rollout, engine, weights, setup.model, setup.tokenizer, config.stop, warn)


def _engine(
    config: TrainConfig, setup: Setup, weights: PolicyWeights, warn: Callable[[str], None]
) -> Engine:
    name, learner, ranks = config.rollout, setup.learner, setup.learner.ranks
    if name == "built-in":
        sharded = ranks.world > 1 and config.parallel == "fsdp"
        return BuiltIn(
            setup.model,
            lambda: learner.policy,
            config.sampling_tokens,
            copied=bool(config.staleness) and not sharded,
        )
    if "://" not in name and name != "vllm":
        factory = load_code(name, "the rollout engine")
        if not callable(factory):
            raise InputError(f"the rollout engine {name!r} is no function of config and weights.")
        engine: Engine = factory(config, weights)
        return engine
    report = Report.of(config, parts(setup.model)[1].shape[0])
    if name == "vllm":
        if ranks.world > 1:
            raise InputError(
                "--rollout vllm is an engine in one process; under torchrun, start servers and "
                "give their addresses: --rollout http://host:port."
            )
        prompts = [e.prompt for e in (*setup.task.train, *setup.task.held_out)]
        longest = max(map(len, encode(setup.tokenizer, prompts)))
        return VLLM(config, weights, longest, report, warn)
    return Servers(config, ranks, report, warn)
