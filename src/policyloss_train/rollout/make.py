"""The engine that `--rollout` names."""

from __future__ import annotations

from collections.abc import Callable

from policyloss.errors import InputError
from policyloss_train.config import TrainConfig
from policyloss_train.models import parts
from policyloss_train.rollout.built_in import BuiltIn
from policyloss_train.rollout.kept import Report
from policyloss_train.rollout.protocol import Engine
from policyloss_train.rollout.servers import Servers
from policyloss_train.rollout.session import Rollout
from policyloss_train.rollout.vllm_engine import VLLM
from policyloss_train.rollout.weights import PolicyWeights
from policyloss_train.sampler import encode
from policyloss_train.setup import Setup
from policyloss_train.user_code import load_code


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
