"""NeMo-RL's clipped policy-gradient loss and ours, with its counts of the step."""

from __future__ import annotations

import enum
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

import policyloss as pl
from conformance.inputs import Batch
from conformance.public_losses import load
from conformance.suite import Function, Inputs, Options, Outputs
from policyloss.compat import nemo_rl

# NeMo-RL's defaults, with our names of the cases and the loss of each as a spec.
DEFAULTS: Options = {
    "disable_ppo_ratio": False,
    "token_level_loss": True,
    "sequence_level_importance_ratios": False,
    "ratio_clip_min": 0.2,
    "ratio_clip_max": 0.28,
    "ratio_clip_c": None,
    "reference_policy_kl_penalty": 0.0,
    "reference_policy_kl_type": "k3",
    "kl_input_clamp_value": 20.0,
    "kl_output_clamp_value": 10.0,
    "use_kl_in_reward": False,
    "use_importance_sampling_correction": False,
    "truncated_importance_sampling_type": None,
    "truncated_importance_sampling_ratio": None,
    "truncated_importance_sampling_ratio_min": None,
    "use_on_policy_kl_approximation": False,
    "force_on_policy_ratio": False,
    "use_cispo": False,
    "positive_example_nll_weight": 0.0,
}
_PPO = pl.LossSpec(pl.TokenRatio(log_clamp=None), pl.Clip(0.2, 0.28))
_IS: Options = {"use_importance_sampling_correction": True}


def _corrected(kind: str, low: float | None, high: float) -> Options:
    return _IS | {
        "truncated_importance_sampling_type": kind,
        "truncated_importance_sampling_ratio": high,
        "truncated_importance_sampling_ratio_min": low,
    }


CASES: dict[str, tuple[Options, pl.LossSpec]] = {
    "token mean": ({}, _PPO),
    "sequence mean": ({"token_level_loss": False}, _PPO.replace(aggregate=pl.SeqMeanTokenMean())),
    "dual clip": ({"ratio_clip_c": 3.0}, _PPO.replace(trust=pl.Clip(0.2, 0.28, dual=3.0))),
    "no ratio": ({"disable_ppo_ratio": True}, _PPO.replace(trust=pl.Unbounded("logp"))),
    "on policy": (
        {"force_on_policy_ratio": True},
        _PPO.replace(ratio=pl.TokenRatio(anchor="current")),
    ),
    "CISPO": ({"use_cispo": True}, _PPO.replace(trust=pl.DetachedClip(0.8, 1.28))),
    "GSPO": (
        {"token_level_loss": False, "sequence_level_importance_ratios": True},
        _PPO.replace(ratio=pl.SequenceRatio(log_clamp=None), aggregate=pl.SeqMeanTokenMean()),
    ),
    "TIS": (
        _corrected("tis", None, 1.2),
        _PPO.replace(correction=pl.Truncate(1.2, log_clamp=None)),
    ),
    "IcePop": (
        _corrected("icepop", 0.8, 1.2),
        _PPO.replace(correction=pl.Band(0.8, 1.2, log_clamp=None)),
    ),
    "seq-mask-TIS": (
        _corrected("seq-mask-tis", 0.9, 1.1),
        _PPO.replace(correction=pl.SequenceMask(0.9, 1.1, log_clamp=None)),
    ),
    **{
        f"KL {kind}": (
            {"reference_policy_kl_penalty": 0.05, "reference_policy_kl_type": kind},
            _PPO.replace(kl=pl.KL(kind, 0.05, grad="score", value_clamp=10.0)),
        )
        for kind in ("k1", "k2", "k3")
    },
}
SPECS = {f"ClippedPGLossFn, {case}": spec for case, (_, spec) in CASES.items()}
PRESETS = (
    *("ppo", "grpo", "dapo", "dr_grpo", "gspo", "gspo_token", "sapo", "cispo", "tis", "icepop"),
    *("dro", "reinforce", "luspo", "sppo", "vespo"),
)
OLD = "old_logp"
_loaded = SimpleNamespace()  # ClippedPGLossFn and process_global_batch


def enter(folder: Path) -> None:
    """Load NeMo-RL's loss, its interfaces and its count of the step."""
    root = folder / "nemo_rl"
    kinds = ("LossType", "MetricNormalizer", "LossInputType", "LossFunction")
    interfaces = load(root / "algorithms/loss/interfaces.py", *kinds, enum=enum)
    sys.modules[nemo_rl.INTERFACES] = interfaces
    known = {name: getattr(interfaces, name) for name in kinds}
    utils = load(root / "algorithms/utils.py", "calculate_kl", "masked_mean")
    known |= {"calculate_kl": utils.calculate_kl, "masked_mean": utils.masked_mean}
    path = root / "algorithms/loss/loss_functions.py"
    _loaded.loss = load(path, "ClippedPGLossFn", **known).ClippedPGLossFn
    path, name = root / "models/automodel/data.py", "process_global_batch"
    _loaded.count = getattr(load(path, name, **known), name)
    # It counts on a GPU.
    setattr(torch.Tensor, "cuda", lambda self: self)  # noqa: B010


class Data(dict[str, Any]):
    """A batch as `process_global_batch` takes it."""

    def get_batch(self, batch_idx: int, batch_size: int) -> Data:
        """All of it."""
        return self


def _data(batch: Any) -> Data:
    """NeMo-RL's tensors, with a first position that nothing predicts; its masks are float32."""
    names = {
        "prev_logprobs": batch.old_logp,
        "generation_logprobs": batch.rollout_logp,
        "reference_policy_logprobs": batch.ref_logp,
        "advantages": batch.advantages,
        "token_mask": batch.mask.float(),
    }
    shifted = {name: torch.nn.functional.pad(x, (1, 0)) for name, x in names.items()}
    return Data(**shifted, sample_mask=batch.mask.any(1).float())


def _inputs(batch: Batch, options: Options) -> Inputs:
    data = _data(batch)
    # A sample that is left out keeps its tokens, and counts in neither of the two numbers.
    data["sample_mask"][torch.rand(len(batch.mask), generator=batch.generator()) < 0.2] = 0
    return {"logp": batch.logp, **data}


def _call(loss: Any, inputs: Inputs) -> Outputs:
    data = Data({name: x for name, x in inputs.items() if name != "logp"})
    tokens = data["token_mask"][:, 1:] * data["sample_mask"].unsqueeze(-1)
    value, metrics = loss(
        data=data,
        global_valid_seqs=data["sample_mask"].sum(),
        global_valid_toks=tokens.sum(),
        next_token_logprobs=inputs["logp"],
    )
    return {"loss": value, "num_valid_samples": metrics["num_valid_samples"]}


def _theirs(inputs: Inputs, options: Options) -> Outputs:
    return _call(_loaded.loss(SimpleNamespace(**DEFAULTS | CASES[options["case"]][0])), inputs)


def _ours(inputs: Inputs, options: Options) -> Outputs:
    return _call(nemo_rl.NemoLoss(CASES[options["case"]][1]), inputs)


def losses(spec: pl.LossSpec, batch: Batch, logp: Tensor, cut: list[Tensor]) -> Iterator[Tensor]:
    """The losses that a worker differentiates, with NeMo-RL's own counts over all ranks."""
    loss = nemo_rl.NemoLoss(spec)
    data = _data(batch)
    rows = torch.cat(cut)
    mine = Data({name: x[rows] for name, x in data.items()})
    counts = _loaded.count(mine, loss, None, batch_idx=0, batch_size=len(rows))
    for part in cut:
        value, _ = loss(
            Data({name: x[part] for name, x in data.items()}),
            counts["global_valid_seqs"],
            counts["global_valid_toks"],
            next_token_logprobs=logp[part],
        )
        yield value * torch.distributed.get_world_size()


KINDS = (
    *("ragged", "full", "holes", "empty_rows", "single_token", "on_policy", "sequence_advantages"),
    *("no_advantage", "all_masked"),
)
FUNCTIONS = [
    Function(
        f"ClippedPGLossFn, {case}",
        [{"case": case}],
        _inputs,
        _ours,
        _theirs,
        differentiate=("logp",),
        seeds=12,
        kinds=KINDS,
    )
    for case in CASES
]
