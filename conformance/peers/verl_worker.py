"""verl's actor step as its workers run it — `ppo_loss` with a real `ActorConfig` and TensorDict —
with our losses hooked in.

Two hooks: `install()`, after which verl's registry returns our function under verl's own name, and
`register()`, after which `loss_mode="policyloss/<name>"` is our spec of the same loss.
verl adds entropy and KL in both.
"""

from __future__ import annotations

from importlib import import_module
from itertools import product
from typing import Any

import torch

import policyloss as pl
from conformance.inputs import Batch
from conformance.suite import Function, Inputs, Options, Outputs
from policyloss.compat import verl

WHOLE_STEP = {"dp_size": 4, "batch_num_tokens": 217, "global_batch_size": 24}
ONE_CALL: dict[str, Any] = {"dp_size": 1, "batch_num_tokens": None, "global_batch_size": None}
_TOKEN, _SEQUENCE = "token-mean", "seq-mean-token-mean"
# verl's loss, its required average, and the spec of the same loss.
SPECS = {
    "vanilla": (_TOKEN, pl.LossSpec(trust=pl.Clip(0.2, 0.28, dual=3.0))),
    "dppo_tv": (_TOKEN, pl.LossSpec(trust=pl.ProbabilityBand("tv", 0.2, 0.28, cap=3.0))),
    "dppo_kl": (_TOKEN, pl.LossSpec(trust=pl.ProbabilityBand("kl", 0.2, 0.28, cap=3.0))),
    "gspo": (
        _SEQUENCE,
        pl.LossSpec(
            ratio=pl.SequenceRatio(grad="token", log_clamp=(None, 10.0)),
            trust=pl.Clip(0.2, 0.28),
            aggregate=pl.SeqMeanTokenMean(),
        ),
    ),
    "sapo": (_SEQUENCE, pl.LossSpec(trust=pl.SoftGate(1.0, 1.05), aggregate=pl.SeqMeanTokenMean())),
    "gpg": (_TOKEN, pl.LossSpec(trust=pl.Unbounded("logp"))),
    "dro": (_TOKEN, pl.LossSpec(ratio=pl.TokenRatio(log_clamp=None), trust=pl.Quadratic(0.3))),
    "cispo": (_TOKEN, pl.LossSpec(trust=pl.DetachedClip(0.8, 1.28))),
}
# Micro-batch statistics, or an average of its own: through install() only.
OTHERS = (
    "clip_cov",
    "kl_cov",
    "geo_mean",
)


def _inputs(batch: Batch, options: Options) -> Inputs:
    named = {
        "log_prob": batch.logp,
        "old_log_probs": batch.old_logp,
        "advantages": batch.advantages,
    }
    return {
        **named,
        "ref_log_prob": batch.ref_logp,
        "entropy": batch.entropy,
        "response_mask": batch.mask.bool(),
    }


def step(inputs: Inputs, options: Options, loss_mode: str) -> Outputs:
    """One call of verl's `ppo_loss` on these tensors: the loss, and its logged metrics."""
    torch.manual_seed(7)
    workers = import_module("verl.workers.utils.losses")
    tensors = {name: x for name, x in inputs.items() if name not in ("log_prob", "entropy")}
    output = {
        name: unpadded(inputs[given])
        for name, given in (("log_probs", "log_prob"), ("entropy", "entropy"))
    }
    data = worker_data(tensors, options["info"])
    loss, metrics = workers.ppo_loss(actor_config(options, loss_mode), output, data)
    return {"loss": loss, **logged(metrics, ("actor/pg_loss", "actor/entropy_loss", "kl_loss"))}


def worker_data(tensors: Inputs, info: Options) -> Any:
    """The TensorDict of a micro-batch: one prompt token before each response of `tensors`."""
    rows, width = tensors["old_log_probs"].shape
    ids = {
        "prompts": torch.zeros(rows, 1),
        "responses": torch.zeros(rows, width),
        "attention_mask": torch.ones(rows, width + 1),
    }
    return import_module("verl.utils.tensordict_utils").get_tensordict(
        {**tensors, **{name: x.long() for name, x in ids.items()}}, info
    )


def unpadded(x: torch.Tensor) -> torch.Tensor:
    """A model's output on such a micro-batch, `[B, T]` → `[B·(T+1)]`: the output of the prompt
    token is the response's first, and the last output is of no token.
    """
    return torch.cat([x, torch.zeros_like(x[:, :1])], dim=1).reshape(-1)


def logged(metrics: Any, names: tuple[str, ...]) -> Outputs:
    """verl's logged values under these names, if any: a number, or a metric of one value."""
    values = {name: metrics[name] for name in names if name in metrics}
    return {name: x if isinstance(x, float) else x.values[0] for name, x in values.items()}


def actor_config(options: Options, loss_mode: str) -> Any:
    """verl's own config of an actor."""
    actor = import_module("verl.workers.config.actor")
    return actor.ActorConfig(
        strategy="fsdp",
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=1,
        clip_ratio=0.2,
        clip_ratio_low=0.2,
        clip_ratio_high=0.28,
        loss_agg_mode=options["loss_agg_mode"],
        entropy_coeff=0.01,
        use_kl_loss=True,
        kl_loss_type="low_var_kl",
        kl_loss_coef=0.04,
        policy_loss=actor.PolicyLossConfig(
            loss_mode=loss_mode,
            dro_beta=0.3,
            clip_cov_ratio=0.2,
            clip_cov_lb=-1.0,
            kl_cov_ratio=0.2,
        ),
    )


def installed(inputs: Inputs, options: Options) -> Outputs:
    """verl's step with our functions in place of verl's."""
    verl.install()
    try:
        return step(inputs, options, options["name"])
    finally:
        verl.uninstall()


def registered(inputs: Inputs, options: Options) -> Outputs:
    """verl's step with `loss_mode="policyloss/…"`."""
    verl.register({f"verl_{name}": spec for name, (_, spec) in SPECS.items()})
    return step(inputs, options, f"policyloss/verl_{options['name']}")


def _function(name: str, ours: Any, options: list[Options]) -> Function:
    return Function(
        name=name,
        options=options,
        inputs=_inputs,
        ours=ours,
        theirs=lambda i, o: step(i, o, o["name"]),
        differentiate=("log_prob", "entropy"),
        releases=("0.9.1",),
        kinds=("ragged", "holes", "empty_rows", "extreme", "on_policy"),
    )


FUNCTIONS = [
    _function(
        "ppo_loss after install()",
        installed,
        [
            {"name": name, "loss_agg_mode": mode, "info": info}
            for name, mode, info in product(
                [*SPECS, *OTHERS], (_TOKEN, _SEQUENCE), (ONE_CALL, WHOLE_STEP)
            )
        ],
    ),
    _function(
        "ppo_loss after register()",
        registered,
        [
            {"name": name, "loss_agg_mode": mode, "info": info}
            for (name, (mode, _)), info in product(SPECS.items(), (ONE_CALL, WHOLE_STEP))
        ],
    ),
]
