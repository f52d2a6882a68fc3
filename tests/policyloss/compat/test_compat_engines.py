"""The adapters of engines that are not installed here. `conformance.engines` compares them with the
engines' own functions; here, a step that is cut as the engine cuts it gives the loss of the whole.
"""

from __future__ import annotations

import enum
import json
import math
import pickle
import sys
import tempfile
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from walk import walked

import policyloss as pl
from cases import make_batch
from policyloss.compat import areal, miles, nemo_rl, prime_rl, skyrl, slime, torchtitan
from policyloss.compat.engines import (
    COUNTED,
    fitting_spec,
    rlinf_loss,
    swift_trainer,
    trinity_loss,
    twinkle_loss,
    xtuner_loss,
)
from policyloss.errors import InputError, SpecError

BATCH = make_batch(seed=3)
LOGGED: dict[str, float] = {}  # by AReaL
HORIZON = 16
OF_SAMPLER = pl.LossSpec(correction=pl.Truncate(2.0))


@dataclass
class LossOutputs:
    loss: torch.Tensor
    metrics: dict[str, torch.Tensor]


class BaseLoss:
    @dataclass(kw_only=True)
    class Config:
        pass


def compute_logprobs(logits, labels):
    return logits.log_softmax(-1).gather(-1, labels.unsqueeze(-1)).squeeze(-1)


class Registry(dict):
    def register(self, name, loss):
        self[name] = loss


@pytest.fixture(autouse=True)
def engines(monkeypatch):
    """The names that the adapters import from the engines."""
    kinds = {
        "LossType": "TOKEN_LEVEL SEQUENCE_LEVEL",
        "LossInputType": "LOGPROB",
        "MetricNormalizer": "TOKENS SEQUENCES NONE",
    }
    interfaces = SimpleNamespace(**{name: enum.Enum(name, text) for name, text in kinds.items()})
    monkeypatch.setitem(sys.modules, nemo_rl.INTERFACES, interfaces)
    monkeypatch.setitem(sys.modules, prime_rl.LOSS, SimpleNamespace(LossOutputs=LossOutputs))
    titan = SimpleNamespace(BaseLoss=BaseLoss, compute_logprobs=compute_logprobs)
    monkeypatch.setitem(sys.modules, torchtitan.LOSS, titan)
    slime_loss = SimpleNamespace(
        get_log_probs_and_entropy=lambda logits, **_: (None, logits),
        get_rollout_top_p_logprob_kwargs=lambda args, batch: {},
    )
    monkeypatch.setitem(sys.modules, slime.LOSS, slime_loss)
    parallel = SimpleNamespace(get_context_parallel_world_size=lambda: 1)
    monkeypatch.setitem(sys.modules, slime.PARALLEL, parallel)
    group = SimpleNamespace(cp=SimpleNamespace(size=1, group=None))
    miles_loss = SimpleNamespace(get_log_probs_and_entropy=lambda logits, **_: logits)
    monkeypatch.setitem(sys.modules, miles.LOSS, miles_loss)
    miles_state = SimpleNamespace(get_parallel_state=lambda: group)
    monkeypatch.setitem(sys.modules, miles.PARALLEL, miles_state)
    tracker = SimpleNamespace(scalar=lambda **numbers: LOGGED.update(numbers))
    monkeypatch.setitem(sys.modules, areal.TRACKER, tracker)
    registry = SimpleNamespace(PolicyLossRegistry=Registry())
    monkeypatch.setitem(sys.modules, skyrl.PPO_UTILS, registry)


@dataclass
class SkyRLConfig:
    loss_reduction: str = "token_mean"
    max_seq_len: int | None = HORIZON
    eps_clip_low: float = 0.2
    eps_clip_high: float = 0.2
    clip_ratio_c: float = 3.0
    off_policy_correction: SimpleNamespace = field(
        default_factory=lambda: SimpleNamespace(**dict.fromkeys(skyrl.CORRECTIONS))
    )


# --- SkyRL ---


def skyrl_step(spec, b, logp):
    ones = torch.ones_like(b.logp).requires_grad_()
    averaged = pl.aggregate_tokens(ones, b.mask, spec.aggregate, group_ids=b.group_ids)
    weights = torch.autograd.grad(averaged, ones)[0]  # the weight of each token in the average
    config = SkyRLConfig(skyrl.REDUCTIONS[type(spec.aggregate)])
    loss = skyrl.SkyRLLoss("it", spec)
    return sum(
        loss(
            *(x[rows] for x in (logp, b.old_logp, weights * b.advantages)),
            config=config,
            loss_mask=b.mask[rows],
            rollout_logprobs=b.rollout_logp[rows],
        )[0]
        for rows in (slice(0, 2), slice(2, 7))
    )


# --- NeMo-RL ---


def nemo_data(b, rows=slice(None), **changes):
    names = {
        "prev_logprobs": b.old_logp,
        "generation_logprobs": b.rollout_logp,
        "reference_policy_logprobs": b.ref_logp,
        "advantages": b.advantages,
        "token_mask": b.mask,
    }
    data = {name: torch.nn.functional.pad(x, (1, 0))[rows] for name, x in names.items()}
    data["sample_mask"] = b.mask.any(1).float()[rows]
    return {name: x for name, x in (data | changes).items() if x is not None}


def nemo_step(spec, b, logp):
    loss = nemo_rl.NemoLoss(spec)
    counts = {
        "global_valid_seqs": b.mask.any(1).sum().float(),
        "global_valid_toks": b.mask.sum().float(),
    }
    return sum(
        loss(nemo_data(b, rows), **counts, next_token_logprobs=logp[rows])[0]
        for rows in (slice(0, 2), slice(2, 7))
    )


# --- prime-rl ---


def prime_inputs(b, i, logp, weights=None):
    return SimpleNamespace(
        trainer_logprobs=logp[i],
        inference_logprobs=b.rollout_logp[i],
        ref_logprobs=b.ref_logp[i],
        advantages=b.advantages[i],
        loss_mask=b.mask[i],
        loss_weights=weights,
    )


def prime_step(spec, b, logp):
    loss = prime_rl.loss_of(spec)
    total = sum(loss(prime_inputs(b, i, logp)).loss for i in range(len(logp)))
    return total / b.mask.sum()


# --- torchtitan ---


def titan_step(spec, b, logp):
    """Rows cut in two, each in two chunks, from logits of two tokens."""
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        file.write(json.dumps(spec.to_dict()))
        file.flush()
        kind = torchtitan.PolicyLoss
        loss = kind(kind.Config(loss=file.name))
    logits = torch.stack([logp, torch.log1p(-logp.exp())], -1)
    tensors = {
        "logits": logits,
        "labels": torch.zeros_like(logp, dtype=torch.long),
        "generator_logprobs": b.rollout_logp,
        "advantages": b.advantages,
        "loss_mask": b.mask,
    }
    return sum(
        loss(**{name: x[rows, chunk] for name, x in tensors.items()}, global_valid_tokens=count)[0]
        for count in [int(b.mask.sum())]
        for rows in (slice(0, 2), slice(2, 7))
        for chunk in (slice(0, 4), slice(4, 8))
    )


# --- slime ---


def slime_args(spec, **changes):
    """The settings that a spec demands."""
    return SimpleNamespace(
        calculate_per_token_loss=isinstance(spec.aggregate, pl.TokenMean),
        entropy_coef=spec.entropy_coef,
        use_kl_loss=spec.kl is not None,
        **changes,
    )


def slime_step(spec, b, logp, engine=slime):
    """Samples without their padding; slime averages them, and divides by their number at the end,
    or by that of their tokens.
    """
    lengths = [int(mask.nonzero().max()) + 1 if mask.any() else 1 for mask in b.mask]
    per_token = isinstance(spec.aggregate, pl.TokenMean)

    def samples(x, rows):
        return [row[:n] for row, n in zip(x[rows], lengths[rows], strict=True)]

    def share(rows):
        masks = samples(b.mask, rows)

        def average(x):
            parts = zip(x.split(lengths[rows]), masks, strict=True)
            return sum(
                (part * mask).sum() / (1 if per_token else mask.sum().clamp(min=1))
                for part, mask in parts
            )

        tensors = {"log_probs": b.old_logp, "rollout_log_probs": b.rollout_logp}
        tensors |= {"ref_log_probs": b.ref_logp, "advantages": b.advantages}
        batch = {name: samples(x, rows) for name, x in tensors.items()}
        names = ("unconcat_tokens", "total_lengths", "response_lengths")
        batch |= dict.fromkeys(names)
        computed = {"log_probs": samples(logp, rows), "entropy": samples(b.entropy, rows)}
        return engine.loss_of(spec)(slime_args(spec), batch, computed, average)[0]

    count = b.mask.sum() if per_token else b.mask.any(1).sum()
    return (share(slice(0, 2)) + share(slice(2, 7))) / count


def miles_step(spec, b, logp):
    return slime_step(spec, b, logp, miles)


# --- AReaL ---


def areal_data(b, rows=slice(None)):
    """A pack of these rows."""
    rows = torch.arange(len(b.mask))[rows]
    width = b.mask.shape[1]
    return {
        "prox_logp": b.old_logp[rows].flatten(),
        "logprobs": b.rollout_logp[rows].flatten(),
        "advantages": b.advantages[rows].flatten(),
        "loss_mask": b.mask[rows].flatten().float(),
        "cu_seqlens": torch.arange(0, width * len(rows) + 1, width, dtype=torch.int32),
    }


def areal_step(spec, b, logp):
    """Micro-batches of two and five rows, averaged by their weights."""
    loss, entropy = areal.ArealLoss(spec), b.entropy
    packs = [(areal_data(b, rows), rows) for rows in (slice(0, 2), slice(2, 7))]
    weights = [loss.loss_weight_fn(data).double() for data, _ in packs]
    losses = [loss.loss_fn(logp[r].flatten(), entropy[r].flatten(), data) for data, r in packs]
    return sum(x * w for x, w in zip(losses, weights, strict=True)) / sum(weights)


STEPS = {
    "areal": (areal_step, "old_logp"),
    "miles": (miles_step, "old_logp"),
    "slime": (slime_step, "old_logp"),
    "skyrl": (skyrl_step, "old_logp"),
    "nemo_rl": (nemo_step, "old_logp"),
    "prime_rl": (prime_step, "rollout_logp"),
    "torchtitan": (titan_step, "rollout_logp"),
}


def accepted(engine):
    """The presets that the engine can run."""
    make = {
        "skyrl": lambda spec: skyrl.SkyRLLoss("it", spec),
        "nemo_rl": lambda spec: fitting_spec("it", spec, nemo_rl.KEYS, COUNTED),
        "prime_rl": prime_rl.loss_of,
        "torchtitan": lambda spec: torchtitan.checked_spec(spec.origin),
        "slime": slime.loss_of,
        "miles": miles.loss_of,
        "areal": lambda spec: areal.ArealLoss(spec.for_run(HORIZON)),
    }[engine]
    names = []
    for name in pl.presets():
        try:
            make(pl.preset(name))
        except SpecError:
            continue
        names.append(name)
    return names


@walked(("engine", "name"), [(engine, name) for engine in STEPS for name in accepted(engine)])
def test_a_step_in_an_engine_is_the_loss_of_the_whole(engine, name):
    step, old = STEPS[engine]
    spec = pl.preset(name).for_run(HORIZON)
    logp, whole = (BATCH.logp.clone().requires_grad_() for _ in range(2))
    loss = step(spec, BATCH, logp)
    expected = pl.policy_loss(
        spec,
        whole,
        getattr(BATCH, old),
        BATCH.advantages,
        BATCH.mask,
        rollout_logp=BATCH.rollout_logp,
        ref_logp=BATCH.ref_logp,
        group_ids=BATCH.group_ids,
    ).loss
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-12)
    ours, theirs = torch.autograd.grad(loss, logp)[0], torch.autograd.grad(expected, whole)[0]
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_an_engine_runs_the_presets_that_it_can_feed_and_divide():
    runs = {engine: set(accepted(engine)) for engine in STEPS}
    assert {"dapo", "gspo", "tis", "dr_grpo"} <= runs["skyrl"]
    assert {"grpo", "dro", "reinforce", "luspo"} <= runs["nemo_rl"]
    assert {"dapo", "ipo", "prime_rl", "dro"} <= runs["prime_rl"]
    assert not {"gspo", "tis", "opd_kl", "m2po"} & runs["prime_rl"]
    assert {"dapo", "gspo", "grpo", "tis", "vespo"} <= runs["slime"] == runs["miles"]
    assert {"dapo", "gspo", "dr_grpo", "tis", "luspo"} <= runs["areal"]
    assert not {"grpo", "m2po", "importance_sampling"} & runs["areal"]
    assert not {"dr_grpo", "reinforce", "m2po", "opd_kl"} & runs["slime"]
    assert {"dapo", "ipo", "cispo", "gpg"} <= runs["torchtitan"]
    assert not {"gspo", "vespo", "grpo", "tis"} & runs["torchtitan"]
    assert not {"grpo", "dro", "reinforce"} & runs["skyrl"]
    assert not {"clip_cov", "opd_kl", "gkd", "importance_sampling"} & runs["nemo_rl"]


def test_skyrl_by_hand():
    # -(1.2·A + 1·A'): ratio 2 is clipped at 1.2, ratio 1 is not; A holds the denominator.
    logp = torch.tensor([[-1.0, -1.0, -1.0]])
    old, advantages = torch.tensor([[-1.0 - math.log(2), -1.0, -9.0]]), torch.tensor([[0.5, 2, 7]])
    loss, metrics = skyrl.SkyRLLoss("ppo", pl.preset("ppo"))(
        logp, old, advantages, SkyRLConfig(), torch.tensor([[1, 1, 0]])
    )
    assert loss.item() == pytest.approx(-(0.6 + 2))
    assert metrics["policyloss/clip_fraction"] == pytest.approx(0.5)
    assert "policyloss/tokens" not in metrics
    empty = skyrl.SkyRLLoss("ppo", pl.preset("ppo"))(
        logp, old, advantages, SkyRLConfig(), torch.zeros(1, 3)
    )
    assert empty[0].item() == empty[1]["policyloss/clip_fraction"] == 0


def test_skyrl_registers_presets_and_own_losses_which_can_be_pickled():
    mine = pl.preset("dapo").replace(trust=pl.SoftGate())
    names = skyrl.register({"mine": mine})
    registry = sys.modules[skyrl.PPO_UTILS].PolicyLossRegistry
    assert set(names) == set(registry)
    assert {"policyloss/mine", "policyloss/gspo"} <= set(names)
    assert "policyloss/grpo" not in names
    assert pickle.loads(pickle.dumps(registry["policyloss/mine"])).spec == mine
    with pytest.raises(SpecError, match="reads ref_logp, which SkyRL does not pass"):
        skyrl.register({"mine": "grpo"})


@walked(
    ("changes", "words"),
    [
        ({"loss_reduction": "sequence_mean"}, "set trainer.algorithm.loss_reduction=token_mean"),
        ({"off_policy_correction": "token"}, "off_policy_correction.tis_ratio_type='token' has no"),
    ],
)
def test_skyrl_settings_that_contradict_a_spec_raise(changes, words):
    if "off_policy_correction" in changes:
        used = dict.fromkeys(skyrl.CORRECTIONS) | {"tis_ratio_type": "token"}
        changes = {"off_policy_correction": SimpleNamespace(**used)}
    with pytest.raises(SpecError, match=words):
        skyrl.SkyRLLoss("ppo", pl.preset("ppo"))(
            BATCH.logp, BATCH.old_logp, BATCH.advantages, SkyRLConfig(**changes), BATCH.mask
        )


def test_skyrl_horizon_must_be_its_own():
    spec = pl.preset("dr_grpo").with_horizon(10)
    config = SkyRLConfig("seq_mean_token_sum_norm")
    with pytest.raises(SpecError, match=r"set trainer\.algorithm\.max_seq_len=10"):
        skyrl.SkyRLLoss("it", spec)(
            BATCH.logp, BATCH.old_logp, BATCH.advantages, config, BATCH.mask
        )


def test_skyrl_bounds_that_are_not_read_are_named_once():
    with pytest.warns(UserWarning, match="own bounds; eps_clip_low=0.3 is not read"):
        skyrl.SkyRLLoss("ppo", pl.preset("ppo"))(
            BATCH.logp, BATCH.old_logp, BATCH.advantages, SkyRLConfig(eps_clip_low=0.3), BATCH.mask
        )


@walked(
    ("spec", "words"),
    [
        (pl.preset("dro"), "not a multiple of the advantage"),
        (pl.preset("ipo"), "not a multiple of the advantage"),
        (pl.preset("clip_cov"), "needs numbers of the whole step"),
        (pl.LossSpec(aggregate=pl.TokenSum()), "does not count the denominator of TokenSum"),
    ],
)
def test_skyrl_refuses_a_loss_that_its_advantages_cannot_divide(spec, words):
    with pytest.raises(SpecError, match=words):
        skyrl.SkyRLLoss("it", spec)


def test_nemo_by_hand():
    # The counts are the engine's: 4 tokens, of which this call has 2. -(1.2·1 + 1·2) / 4
    data = {
        "prev_logprobs": torch.tensor([[0, -1.0 - math.log(2), -1.0, -3.0]]),
        "generation_logprobs": torch.zeros(1, 4),
        "advantages": torch.tensor([[9.0, 1, 2, 5]]),
        "token_mask": torch.tensor([[0, 1, 1, 0]]),
        "sample_mask": torch.ones(1),
    }
    loss, metrics = nemo_rl.NemoLoss("ppo")(
        data, torch.tensor(2.0), torch.tensor(4.0), next_token_logprobs=torch.full((1, 3), -1.0)
    )
    assert loss.item() == pytest.approx(-3.2 / 4)
    # NeMo-RL adds up the shares of its micro-batches.
    assert metrics["policyloss/clip_fraction"] == pytest.approx(1 / 4)
    assert (metrics["loss"], metrics["num_valid_samples"]) == (pytest.approx(-0.8), 1)


def test_nemo_leaves_out_a_sample_that_is_masked():
    logp = BATCH.logp.clone().requires_grad_()
    sample_mask = torch.tensor([1.0, 0, 1, 1, 1, 1, 1])
    counts = (torch.tensor(6.0), torch.tensor(9.0))
    loss, _ = nemo_rl.NemoLoss("dapo")(
        nemo_data(BATCH, sample_mask=sample_mask), *counts, next_token_logprobs=logp
    )
    (gradient,) = torch.autograd.grad(loss, logp)
    assert gradient[1].count_nonzero() == 0
    assert gradient[0].count_nonzero() > 0


def test_nemo_names_the_denominator_of_the_gradient():
    kinds = sys.modules[nemo_rl.INTERFACES].LossType
    assert nemo_rl.NemoLoss("dapo").loss_type is kinds.TOKEN_LEVEL
    assert nemo_rl.NemoLoss("gspo").loss_type is kinds.SEQUENCE_LEVEL


def test_nemo_names_missing_and_filtered_log_probabilities():
    counts = (torch.tensor(6.0), torch.tensor(9.0))
    loss = nemo_rl.NemoLoss("grpo")
    with pytest.raises(InputError, match="reads reference_policy_logprobs, which NeMo-RL did not"):
        loss(
            nemo_data(BATCH, reference_policy_logprobs=None),
            *counts,
            next_token_logprobs=BATCH.logp,
        )
    with pytest.raises(InputError, match="a KL term cannot be computed"):
        loss(
            nemo_data(BATCH, curr_logprobs_unfiltered=BATCH.logp),
            *counts,
            next_token_logprobs=BATCH.logp,
        )
    with pytest.raises(SpecError, match="NeMo-RL does not count the denominator of TokenSum"):
        nemo_rl.NemoLoss(pl.LossSpec(aggregate=pl.TokenSum()))
    with pytest.raises(InputError, match="horizon"):
        nemo_rl.NemoLoss("dr_grpo")


def test_prime_by_hand():
    # -(w·1.2·1 + w'·1·2), a sum; the masked token counts nowhere.
    inputs = SimpleNamespace(
        trainer_logprobs=torch.tensor([-1.0, -1.0, -1.0]),
        inference_logprobs=torch.tensor([-1.0 - math.log(2), -1.0, -1.0]),
        ref_logprobs=None,
        advantages=torch.tensor([1.0, 2.0, 3.0]),
        loss_mask=torch.tensor([True, True, False]),
        loss_weights=torch.tensor([0.5, 3.0, 1.0]),
    )
    out = prime_rl.loss(inputs, preset="ppo")
    assert out.loss.item() == pytest.approx(-(0.5 * 1.2 + 3 * 2))
    assert out.metrics["policyloss/clip_fraction"].item() == pytest.approx(0.5)
    wider = prime_rl.loss(inputs, preset="ppo", eps_high=0.5)
    assert wider.loss.item() == pytest.approx(-(0.5 * 1.5 + 3 * 2))


@walked(
    ("spec", "words"),
    [
        (OF_SAMPLER, "passes the sampler's log-probabilities alone"),
        (pl.preset("gspo"), "does not count the denominator of SeqMeanTokenMean"),
        (pl.LossSpec(entropy_coef=0.1), "reads entropy, which prime-rl does not pass"),
        (pl.preset("opd_kl"), "reads teacher_logp, which prime-rl does not pass"),
    ],
)
def test_prime_refuses_a_loss_that_it_cannot_divide_or_feed(spec, words):
    with pytest.raises(SpecError, match=words):
        prime_rl.loss_of(spec)


def test_torchtitan_by_hand():
    # Probability 1/2 each. -(1.2·1 + 1·2) / 5; the sampler has lost the last token.
    half, kind = math.log(0.5), torchtitan.PolicyLoss
    loss, metrics = kind(kind.Config(loss="ppo"))(
        torch.zeros(1, 4, 2),
        torch.zeros(1, 4, dtype=torch.long),
        5,
        generator_logprobs=torch.tensor([[math.log(0.25), half, half, -math.inf]]),
        advantages=torch.tensor([[1.0, 2, 9, 7]]),
        loss_mask=torch.tensor([[True, True, False, True]]),
    )
    assert loss.item() == metrics["loss/mean"].item() == pytest.approx(-3.2 / 5)
    assert metrics["policyloss/clip_fraction"].item() == pytest.approx(1 / 5)


def test_torchtitan_refuses_a_loss_of_sequences_and_names_a_wrong_one():
    with pytest.raises(SpecError, match="reads other tokens of a sequence"):
        torchtitan.checked_spec("fipo")
    with pytest.raises(SpecError, match="does not count the denominator of SeqMeanTokenMean"):
        torchtitan.checked_spec("gspo")
    with pytest.raises(AttributeError, match="there are PolicyLoss, checked_spec"):
        torchtitan.Loss  # noqa: B018


def slime_call(loss, args, average=torch.sum, **batch):
    """One sample of two tokens with ratios 2 and 1, and advantages 1 and 2."""
    computed = {"log_probs": [torch.tensor([-1.0, -1.0])]}
    old = {"log_probs": [torch.tensor([-1.0 - math.log(2), -1.0])]}
    names = ("unconcat_tokens", "total_lengths", "response_lengths")
    data = {**dict.fromkeys(names), **old, "advantages": [torch.tensor([1.0, 2.0])], **batch}
    return slime.loss_of(loss)(args, data, computed, average)


def test_slime_by_hand():
    # Its function weighs the tokens by 0.5 and 3. -(0.5·1.2·1 + 3·1·2)
    def average(x):
        return 0.5 * x[0] + 3 * x[1]

    loss, log = slime_call("ppo", slime_args(pl.preset("ppo")), average)
    assert loss.item() == log["loss"].item() == pytest.approx(-6.6)
    with torch.no_grad():
        assert slime_call("ppo", slime_args(pl.preset("ppo")), average)[0] == loss
    # Without old log-probabilities the policy has not been updated: the ratio is 1.
    loss, _ = slime_call("ppo", slime_args(pl.preset("ppo")), average, log_probs=[])
    assert loss.item() == pytest.approx(-6.5)


@walked(
    ("loss", "changes", "words"),
    [
        ("ppo", {"calculate_per_token_loss": False}, "pass --calculate-per-token-loss"),
        ("gspo", {"calculate_per_token_loss": True}, "leave out --calculate-per-token-loss"),
        ("ppo", {"use_tis": True}, "use_tis=True belongs to slime's own loss"),
        ("ppo", {"entropy_coef": 0.01}, "pass --entropy-coef 0.0"),
        ("ppo", {"use_kl_loss": True}, "use_kl_loss=True, but the spec has kl=None"),
    ],
)
def test_slime_settings_that_contradict_a_spec_raise(loss, changes, words):
    args = slime_args(pl.preset(loss))
    vars(args).update(changes)
    with pytest.raises(SpecError, match=words):
        slime_call(loss, args)


def test_slime_names_missing_log_probabilities():
    with pytest.raises(InputError, match="reads rollout_log_probs, which slime's batch does not"):
        slime_call("tis", slime_args(pl.preset("tis")))


def test_areal_by_hand():
    # Two tokens of the first sequence, ratios 2 (clipped at 1.2) and 1, and one of the second.
    log_2 = math.log(2)
    data = {
        "prox_logp": torch.tensor([-1.0 - log_2, -1.0, 0.0, -1.0]),
        "logprobs": torch.full((4,), -9.0),
        "advantages": torch.tensor([1.0, 2.0, 50.0, 4.0]),
        "loss_mask": torch.tensor([1.0, 1.0, 0.0, 1.0]),
        "cu_seqlens": torch.tensor([0, 3, 4], dtype=torch.int32),
    }
    logp = torch.full((4,), -1.0)
    by_tokens, by_sequences = areal.ArealLoss("ppo"), areal.ArealLoss("gspo_token")
    loss = by_tokens.loss_fn(logp, logp, data, vocab_min_logits=logp, vocab_max_logits=logp)
    assert loss.item() == pytest.approx(-(1.2 + 2 + 4) / 3)
    assert by_tokens.loss_weight_fn(data).item() == 3
    assert by_sequences.loss_weight_fn(data).item() == 2
    assert LOGGED["policyloss/clip_fraction"] == pytest.approx(1 / 3)


def test_areal_names_missing_and_unread_log_probabilities():
    data = areal_data(BATCH)
    logp = BATCH.logp.flatten()
    with pytest.raises(InputError, match=r"reads prox_logp, .* actor\.prox_logp_method"):
        areal.ArealLoss("ppo").loss_fn(logp, logp, data | {"prox_logp": None})
    with pytest.raises(InputError, match="reads entropy, which AReaL did not compute"):
        areal.ArealLoss(pl.preset("ppo").replace(entropy_coef=0.1)).loss_fn(logp, None, data)
    with pytest.raises(SpecError, match="teacher has no effect"):
        areal.ArealLoss("ppo").loss_fn(logp, logp, data | {"teacher_logp": logp})
    with pytest.raises(SpecError, match="reads ref_logp, which AReaL does not pass"):
        areal.ArealLoss("grpo")


def test_an_actor_of_areal_trains_with_our_loss():
    class Engine:
        def train_batch(self, input_, loss_fn, loss_weight_fn):
            return loss_fn(BATCH.logp.flatten(), None, input_) * loss_weight_fn(input_)

    actor = type("Actor", (areal.WithOurLoss, Engine), {"policy_loss": "dapo"})()
    data = areal_data(BATCH)
    ours = areal.ArealLoss("dapo").loss_fn(BATCH.logp.flatten(), None, data)
    own = partial(len, eps_clip=0.2, c_clip=None, importance_sampling_level="token")
    assert actor.train_batch(data, own, len) == ours * BATCH.mask.sum()
    with pytest.raises(SpecError, match=r"c_clip=3\.0 belongs to AReaL's own loss"):
        actor.train_batch(data, partial(len, c_clip=3.0), len)


# --- xtuner, RLinf, Trinity, twinkle ---

TENSORS = (BATCH.logp, BATCH.old_logp, BATCH.advantages)
EXPECTED = pl.policy_loss("dapo", *TENSORS, BATCH.mask).loss


def test_xtuner_weighs_tokens_by_its_shares():
    shares = BATCH.mask.double() / BATCH.mask.sum()
    loss = xtuner_loss("dapo")(*TENSORS, shares, {})
    torch.testing.assert_close(loss, EXPECTED, rtol=1e-12, atol=0)
    chunks = [slice(0, 3), slice(3, 8)]
    cut = [xtuner_loss("dapo")(*(x[:, c] for x in (*TENSORS, shares)), {}) for c in chunks]
    torch.testing.assert_close(sum(cut), EXPECTED, rtol=1e-12, atol=0)
    with pytest.raises(SpecError, match="reads other tokens of a sequence, but xtuner"):
        xtuner_loss(pl.preset("gspo").replace(aggregate=pl.TokenMean()))


LOCAL_DAPO = pl.preset("dapo").replace(aggregate=pl.LocalTokenMean())


def test_rlinf_averages_by_its_own_setting():
    def masked_mean():
        """RLinf's name of the mean over tokens."""

    names = ("logprobs", "old_logprobs", "advantages", "loss_mask")
    tensors = dict(zip(names, (*TENSORS, BATCH.mask), strict=True))
    loss = rlinf_loss(LOCAL_DAPO)
    value, metrics = loss(**tensors, loss_agg_func=masked_mean, clip_ratio_c=3.0)
    torch.testing.assert_close(value, EXPECTED, rtol=1e-12, atol=0)
    assert metrics["policyloss/clip_fraction"].dim() == 0
    with pytest.raises(SpecError, match=r"RLinf passes loss_agg_func=None; set algorithm\.loss"):
        loss(**tensors, max_episode_steps=3)
    with pytest.raises(SpecError, match=r"does not count the denominator of TokenMean\(\)"):
        rlinf_loss("dapo")


def test_trinity_gets_a_class(monkeypatch):
    base = type("PolicyLossFn", (), {})
    path = "trinity.algorithm.policy_loss_fn.policy_loss_fn"
    monkeypatch.setitem(sys.modules, path, SimpleNamespace(PolicyLossFn=base))
    kind = trinity_loss(LOCAL_DAPO)
    assert issubclass(kind, base)
    logp, old, advantages = TENSORS
    loss, metrics = kind(**kind.default_args())(
        logprob=logp, old_logprob=old, action_mask=BATCH.mask, advantages=advantages
    )
    torch.testing.assert_close(loss, EXPECTED, rtol=1e-12, atol=0)
    assert isinstance(metrics["policyloss/clip_fraction"], float)
    with pytest.raises(SpecError, match="Trinity does not count the denominator"):
        trinity_loss("dapo")


def test_twinkle_gets_a_sum_and_a_count(monkeypatch):
    class GRPOLoss:
        def __init__(self, entropy_coef):
            self.ignore_index = -100

        def __call__(self, inputs, outputs, **given):
            return "a forward alone"

        def _pad_and_align_to_batch(self, data, mask, device, dtype):
            return data

    module = SimpleNamespace(GRPOLoss=GRPOLoss, LossOutput=dict)
    monkeypatch.setitem(sys.modules, "twinkle.loss.grpo", module)
    inputs, outputs = {"labels": torch.where(BATCH.mask, 1, -100)}, {"logps": BATCH.logp}
    given = {"old_logps": BATCH.old_logp, "advantages": BATCH.advantages}
    for name, count in (("dapo", BATCH.mask.sum()), ("gspo", BATCH.mask.any(1).sum())):
        out = twinkle_loss(name)(inputs, outputs, **given)
        expected = pl.policy_loss(name, *TENSORS, BATCH.mask).loss
        assert out["num_tokens"] == count
        torch.testing.assert_close(out["loss"] / count, expected, rtol=1e-12, atol=0)
    assert twinkle_loss("dapo")(inputs, outputs) == "a forward alone"


def test_swift_keeps_its_metrics_and_trains_with_our_loss(monkeypatch):
    class GRPOTrainer:
        loss_type, importance_sampling_level = "dapo", "token"
        beta, kl_in_reward = 0.0, False
        accelerator = SimpleNamespace(num_processes=2)

        def _get_per_token_logps_and_entropies(self, model):
            return model, None

        def _compute_loss_and_metrics(self, model, model_inputs, batch):
            logp, _ = self._get_per_token_logps_and_entropies(model)
            assert not logp.requires_grad
            return logp.sum(), {"completion_mask": BATCH.mask}

        def _undo_gradient_accumulation_scaling(self, loss):
            return 3 * loss

    module = SimpleNamespace(GRPOTrainer=GRPOTrainer)
    monkeypatch.setitem(sys.modules, "swift.rlhf_trainers.grpo_trainer", module)
    batch = SimpleNamespace(
        old_per_token_logps=BATCH.old_logp,
        rollout_per_token_logps=None,
        ref_per_token_logps=None,
        advantages=BATCH.advantages,
        num_items_in_batch=BATCH.mask.sum(),
    )
    trainer, logp = swift_trainer("dapo")(), BATCH.logp.clone().requires_grad_()
    loss, metrics = trainer._compute_loss_and_metrics(logp, None, batch)
    assert set(metrics) == {"completion_mask"}
    torch.testing.assert_close(loss, 3 * 2 * EXPECTED, rtol=1e-12, atol=0)
    assert torch.autograd.grad(loss, logp)[0].count_nonzero()
    trainer.beta = 0.1
    with pytest.raises(SpecError, match=r"beta=0\.1 .*, but the spec has kl=None"):
        trainer._compute_loss_and_metrics(logp, None, batch)
    trainer.kl_in_reward = True
    assert trainer._compute_loss_and_metrics(logp, None, batch)[0] == loss
    trainer.loss_type = "grpo"
    with pytest.raises(SpecError, match="loss_type='grpo' belongs to ms-swift's own loss"):
        trainer._compute_loss_and_metrics(logp, None, batch)
