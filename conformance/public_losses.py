"""Losses of trainers that no environment here installs, evaluated by their own code and recorded.

    python -m conformance.public_losses prime-rl=SRC trinity-rft=SRC openpipe-art=SRC …

SRC: the folder of an unpacked wheel or of a checkout. Only the named functions of a file are
loaded, so that nothing else of the trainer must be installed. The command writes
tests/recorded/public_losses.json: ragged batches in float64, with the loss and the gradient by the
log-probabilities that the trainer computes. `tests/policyloss/compat/test_public_losses.py`
compares them with the specs in `SPECS`.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import math
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

import policyloss as pl

RECORDED = Path(__file__).resolve().parent.parent / "tests" / "recorded" / "public_losses.json"
SEEDS = 2
INPUTS = ("logp", "old_logp", "rollout_logp", "ref_logp", "advantages", "mask", "ages")
Batch = dict[str, Tensor]

_UNCLAMPED = pl.TokenRatio(log_clamp=None)


def _rec(trust: Any) -> pl.LossSpec:
    return pl.LossSpec(_UNCLAMPED, trust)


# The loss of each trainer as a spec; the key names the trainer, its release and its option.
SPECS: dict[str, pl.LossSpec | pl.Mixture] = {
    "prime-rl 2026-08-21 ipo": pl.preset("ipo"),
    "prime-rl 2026-08-21 default": pl.preset("prime_rl"),
    "trinity-rft 0.6.0 ppo": pl.preset("ppo_dual_clip"),
    "trinity-rft 0.6.0 cispo": pl.LossSpec(trust=pl.DetachedClip(0.0, 1.28)),
    "trinity-rft 0.6.0 cispo enable_mask_clip": pl.LossSpec(
        trust=pl.DetachedClip(0.0, 1.28, "zero_by_sign")
    ),
    "trinity-rft 0.6.0 topr": pl.preset("topr"),
    "trinity-rft 0.6.0 importance_sampling": pl.LossSpec(trust=pl.Unbounded("ratio")),
    "trinity-rft 0.6.0 rec one-side": _rec(
        pl.DetachedClip(0.8, 1.2, outside="zero_by_sign", weight="one")
    ),
    "trinity-rft 0.6.0 rec two-side": _rec(pl.DetachedClip(0.8, 1.2, "zero", weight="one")),
    "trinity-rft 0.6.0 rec two-side importance_sampling": _rec(pl.DetachedClip(0.8, 1.2, "zero")),
    "trinity-rft 0.6.0 sppo": _rec(pl.DetachedClip(1 / 1.3, 1.3, "zero", weight="one")),
    "areal 1.0.4 c_clip": pl.LossSpec(_UNCLAMPED, pl.Clip(0.2, 0.2, dual=1.5)),
    "areal 1.0.4 sequence": pl.LossSpec(pl.SequenceRatio(log_clamp=None), pl.Clip(0.1, 0.1)),
    "areal 1.0.4 use_sapo_loss": pl.LossSpec(_UNCLAMPED, pl.preset("sapo").trust),
    "areal 1.0.4 m2po": pl.LossSpec(
        _UNCLAMPED, correction=pl.MomentBudget(0.02), rejected="renormalise"
    ),
    "areal 1.0.4 loglinear": pl.LossSpec(_UNCLAMPED),
    "xtuner 2026-08-21 max_token_staleness": pl.LossSpec(
        _UNCLAMPED, correction=pl.Stale(1), rejected="renormalise"
    ),
    "flux 2026-01-27 staleness_decay": pl.LossSpec(
        _UNCLAMPED, correction=pl.Stale(math.inf, decay=0.5)
    ),
    "areal-main 2026-08-22 binary_kl": pl.LossSpec(
        _UNCLAMPED, correction=pl.DivergenceMask("kl", 0.01, floor=1e-8, direction="both")
    ),
    "roll 2026-08-19 segment": pl.LossSpec(
        _UNCLAMPED, correction=pl.Truncate(1.1, 0.9, level="turn")
    ),
    "ms-swift 4.6.0 fipo": pl.preset("fipo").replace(ratio=_UNCLAMPED),
    "openpipe-art 0.5.23 token": pl.LossSpec(trust=pl.DetachedClip(0.0, 5.0)),
    "openpipe-art 0.5.23 average": pl.LossSpec(
        pl.MixedRatio("arithmetic"), pl.DetachedClip(0.0, 5.0)
    ),
    "openpipe-art 0.5.23 geometric_average": pl.LossSpec(
        pl.MixedRatio("geometric"), pl.Clip(0.2, 0.2)
    ),
    "trl 1.16.0 a2po": pl.preset("a2po"),
    "trl 1.16.0 async_grpo": pl.LossSpec(pl.TokenRatio(anchor="rollout", log_clamp=None)),
    "verl-recipe 2026-08-05 sppo": pl.preset("sppo"),
    "trinity-main 2026-01-28 sft_is": pl.Mixture(
        {"dft": pl.Stream(pl.LossSpec(trust=pl.Unbounded("probability")), advantage=1.0)}
    ),
    "trinity-main 2026-01-28 chord": pl.Mixture(
        {
            "rl": pl.Stream(pl.preset("ppo_dual_clip"), 0.9, "sampled"),
            "ce": pl.Stream(
                pl.LossSpec(trust=pl.Unbounded("uncertainty")), 0.1, "expert", advantage=1.0
            ),
        }
    ),
}
KLS = "roll 2026-08-19 skewed KLs"
# The trainer computes the old log-probabilities from the ages.
LOGLINEAR = ("areal 1.0.4 loglinear",)
# Their value differs by `A·old_logp`, a constant.
GRADIENT_ALONE = ("trinity-rft 0.6.0 sppo",)


def draw(seed: int) -> Batch:
    """A ragged batch `[5, 7]` with masks that have holes, and groups of unequal lengths."""
    g = torch.Generator().manual_seed(seed)

    def noise(scale: float) -> Tensor:
        return scale * torch.randn(5, 7, generator=g, dtype=torch.float64)

    logp = -0.05 - 2 * torch.rand(5, 7, generator=g, dtype=torch.float64)
    old = (logp + noise(0.3)).clamp(max=-0.01)
    lengths = torch.randint(2, 8, (5, 1), generator=g)
    mask = (torch.rand(5, 7, generator=g) < 0.8) & (torch.arange(7) < lengths)
    mask[:, 0] = True
    rollout = (old + noise(0.2)).clamp(max=-0.01)
    advantages = torch.randn(5, 1, generator=g, dtype=torch.float64).expand(5, 7).contiguous()
    ref = (old + noise(0.3)).clamp(max=-0.01)
    # Ages whose weights and interpolations are exact in float32, which AReaL and Flux use for them.
    ages = torch.tensor([0, 1, 2, 4])[torch.randint(0, 4, (5, 7), generator=g)]
    return dict(zip(INPUTS, (logp, old, rollout, ref, advantages, mask, ages), strict=True))


def stream_masks(mask: Tensor) -> dict[str, Tensor]:
    """The masks of the streams of a mixture: an expert wrote the last two rows."""
    expert = (torch.arange(5) >= 3)[:, None].expand_as(mask)
    return {"expert": expert, "sampled": ~expert}


def load(path: Path, *names: str, **known: Any) -> Any:
    """A module with only the functions, methods and classes `names` of the file at `path`.

    known: its other names.
    """
    tree = ast.walk(ast.parse(path.read_text()))
    nodes = [n for n in tree if getattr(n, "name", None) in names]
    kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    missing = set(names) - {n.name for n in nodes if isinstance(n, kinds)}
    if missing:
        raise LookupError(f"{path} has no {sorted(missing)}")
    header = "from __future__ import annotations\nimport torch\nimport torch.nn.functional as F\n"
    header += "from dataclasses import dataclass, field\nfrom typing import *\n"
    with tempfile.NamedTemporaryFile("w", suffix=".py") as file:
        file.write(header + "\n\n".join(map(ast.unparse, nodes)))
        file.flush()
        spec = importlib.util.spec_from_file_location("public_loss", file.name)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        module.__dict__.update(known)
        sys.modules["public_loss"] = module  # dataclasses look their module up
        spec.loader.exec_module(module)
    return module


def _prime_rl(folder: Path, case: str, b: Batch) -> Tensor:
    names = ("LossInputs", "LossOutputs", "_safe_mean", f"{case}_loss_fn")
    file = folder / "src/prime_rl/trainer/rl/loss.py"
    module = load(file, *names, "compute_importance_ratio_and_mismatch_kl")
    total = torch.zeros((), dtype=torch.float64)
    for logp, rollout, advantages, mask in zip(
        b["logp"], b["rollout_logp"], b["advantages"], b["mask"], strict=True
    ):
        inputs = module.LossInputs(logp, rollout, None, advantages, mask)
        config = SimpleNamespace(ipo_threshold=0.1, adv_tau=1.0, kl_tau=1e-3)
        config.dppo_mask_high = config.dppo_mask_low = 0.2
        total = total + getattr(module, f"{case}_loss_fn")(inputs, config).loss
    return total / b["mask"].sum()  # its trainer divides by the tokens of the step


# The files and classes of Trinity-RFT's losses.
_TRINITY = {
    "rec": ("rec_policy_loss", "RECPolicyLossFn"),
    "sppo": ("sppo_loss_fn", "sPPOPolicyLossFn"),
    "ppo": ("ppo_policy_loss", "PPOPolicyLossFn"),
    "cispo": ("cispo_policy_loss", "CISPOPolicyLossFn"),
    "topr": ("topr_policy_loss", "TOPRPolicyLossFn"),
    "importance_sampling": ("importance_sampling_policy_loss", "ImportanceSamplingLossFn"),
}


def _trinity(folder: Path, case: str, b: Batch) -> Tensor:
    root = folder / "trinity/algorithm"
    utils = load(root / "utils.py", "masked_sum", "masked_mean", "aggregate_loss")
    known = {name: getattr(utils, name) for name in ("masked_mean", "aggregate_loss")}
    known["PolicyLossFn"] = type("PolicyLossFn", (), {"__init__": lambda self, backend: None})
    name, *options = case.split()
    file, called = _TRINITY[name]
    made = getattr(load(root / f"policy_loss_fn/{file}.py", called, **known), called)
    changes: dict[str, Any] = dict.fromkeys(options, True)
    if name == "rec":
        mode, *weight = options
        changes = {"clip_mode": mode, "weight": weight[0] if weight else "none"}
    loss = made(**{**made.default_args(), **changes})
    value: Tensor = loss(b["logp"], b["old_logp"], b["mask"], b["advantages"])[0]
    # Its mean divides by the count plus 1e-8.
    count = b["mask"].sum()
    return value * (count + 1e-8) / count


def _trinity_main(folder: Path, case: str, b: Batch) -> Tensor:
    root = folder / "trinity/algorithm"
    utils = load(root / "utils.py", "masked_sum", "masked_mean", "aggregate_loss")
    known = {name: getattr(utils, name) for name in ("masked_mean", "aggregate_loss")}
    known["PolicyLossFn"] = type("PolicyLossFn", (), {"__init__": lambda self, backend: None})
    ppo = load(root / "policy_loss_fn/ppo_policy_loss.py", "PPOPolicyLossFn", **known)
    known |= {"PPOPolicyLossFn": ppo.PPOPolicyLossFn, "math": math}
    names = ("mu_schedule_function", "phi_function", "SFTPhiLossFn", "MIXCHORDPolicyLossFn")
    chord = load(root / "policy_loss_fn/chord_policy_loss.py", "SFTISLossFn", *names, **known)
    if case == "sft_is":
        alone: Tensor = chord.SFTISLossFn()(b["logp"], b["mask"])[0]
        return alone
    sizes = {"train_batch_size_usual": 3, "train_batch_size_expert": 2}
    loss = chord.MIXCHORDPolicyLossFn(**chord.MIXCHORDPolicyLossFn.default_args(), **sizes)
    expert = stream_masks(b["mask"])["expert"][:, 0]
    tensors = (b["logp"], b["old_logp"], b["mask"], b["advantages"], expert, torch.zeros(5))
    value: Tensor = loss(*tensors)[0]
    return value


def _areal(folder: Path, case: str, b: Batch) -> Tensor:
    names = ("ppo_actor_loss_fn", "sapo_loss_fn", "_compute_sequence_level_ratio_and_advantages")
    losses = load(folder / "areal/utils/functional/functional.py", *names)
    logp, old, mask = b["logp"], b["old_logp"], b["mask"]
    if case == "use_sapo_loss":
        sapo: Tensor = losses.sapo_loss_fn(logp, old, b["advantages"], 1.0, 1.05, mask)[0]
        return sapo
    options: dict[str, Any] = {"eps_clip": 0.2}
    actor = folder / "areal/trainer/ppo/actor.py"
    if case == "loglinear":
        names = ("LOGLINEAR", "LINEAR", "ROLLOUT")
        words = {f"PROX_APPROX_METHOD_{name}": name.lower() for name in names}
        name = "compute_prox_logp_approximations"
        function, now = getattr(load(actor, name, **words), name), 9
        given = (b["rollout_logp"], logp.detach(), now - b["ages"], now, "loglinear")
        old = function(*given)["loglinear"]
    elif case == "m2po":
        masks = load(actor, "_apply_m2po_masking", "_get_m2po_loss_mask")
        mask = masks._apply_m2po_masking(b["rollout_logp"], old, mask, 0.02)
    elif case == "c_clip":
        options["c_clip"] = 1.5
    else:
        options = {"eps_clip": 0.1, "importance_sampling_level": case}
    options |= {"advantages": b["advantages"], "loss_mask": mask}
    loss: Tensor = losses.ppo_actor_loss_fn(logp, old, b["rollout_logp"], **options)[0]
    return loss


def _ppo(b: Batch) -> Tensor:
    ratio, a = (b["logp"] - b["old_logp"]).exp(), b["advantages"]
    return -torch.min(ratio * a, ratio.clamp(0.8, 1.2) * a)


def _areal_main(folder: Path, case: str, b: Batch) -> Tensor:
    """PPO, with the tokens masked by its divergence; its denominator counts all tokens."""
    path = folder / "areal/utils/functional/functional.py"
    divergence = load(path, "compute_binary_kl_divergence").compute_binary_kl_divergence
    old, rollout = b["old_logp"], b["rollout_logp"]
    keep: Tensor = torch.maximum(divergence(old, rollout), divergence(rollout, old)) <= 0.01
    return (_ppo(b) * (old - rollout).exp() * (keep & b["mask"])).sum() / b["mask"].sum()


def _xtuner(folder: Path, case: str, b: Batch) -> Tensor:
    """PPO on its mask, which replaces the mask of the step."""
    proto = folder / "xtuner/v1"
    name = "calculate_stale_threshold"
    path = proto / "rl/agent_loop_manager/produce_utils.py"
    limit, now = getattr(load(path, name), name)(1, sync_weights_interval=1), 9
    name = "calculate_seq_staleness"
    known = {name: getattr(load(proto / "data_proto/utils.py", name), name)}
    name, rows = "_calculate_effective_response_mask", []
    function = getattr(load(proto / "data_proto/rl_data.py", name, **known), name)
    for mask, ages in zip(b["mask"].long().tolist(), b["ages"], strict=True):
        steps = (now - 1 - ages).tolist()  # weights of the step before have the age 0
        state = SimpleNamespace(response_ids=steps, response_model_steps=steps, response_mask=mask)
        rows.append(function(state, current_train_step=now, token_stale_threshold=limit))
    kept = torch.tensor(rows)
    return (_ppo(b) * kept).sum() / kept.sum()


def _flux(folder: Path, case: str, b: Batch) -> Tensor:
    """PPO, weighted by its decay; it works in float32, and holds the weight above 0.1 otherwise."""
    decay = load(folder / "flux/controller/importance.py", "compute_staleness_decay")
    weight: Tensor = decay.compute_staleness_decay(b["ages"], decay_rate=0.5, min_weight=0.0)
    return (_ppo(b) * weight.double() * b["mask"]).sum() / b["mask"].sum()


def _roll(folder: Path, case: str, b: Batch) -> Tensor:
    """PPO, weighted by its ratio of each segment, clipped to [0.9, 1.1]."""
    path, name = folder / "roll/pipeline/agentic/utils.py", "compute_segment_masked_mean"
    mask = b["mask"].long()
    log_ratio: Tensor = getattr(load(path, name), name)(b["old_logp"] - b["rollout_logp"], mask)
    return (_ppo(b) * log_ratio.exp().clamp(0.9, 1.1) * mask).sum() / mask.sum()


def _swift(folder: Path, case: str, b: Batch) -> Tensor:
    """Its weight of each token, times PPO's clip as its trainer computes it."""
    path = folder / "swift/rlhf_trainers/grpo_trainer.py"
    method = load(path, "_compute_fipo_influence")._compute_fipo_influence
    options = {"fipo_gamma": 2 ** (-1 / 32), "fipo_clip_range": 0.2, "fipo_clip_high_only": True}
    args = SimpleNamespace(delta=None)
    trainer = SimpleNamespace(**options, fipo_safety_threshold=4.0, args=args)
    # Its distance counts masked tokens too, so the valid ones are moved together.
    order = (~b["mask"]).to(torch.int8).argsort(dim=1, stable=True)
    moved = {name: x.gather(1, order) for name, x in b.items()}
    log_ratio, mask = (moved["logp"] - moved["old_logp"]).detach(), moved["mask"]
    weight: Tensor = method(trainer, log_ratio, log_ratio.exp(), moved["advantages"], mask)[0]
    return (_ppo(moved) * weight * mask).sum() / mask.sum()


def _art(folder: Path, case: str, b: Batch) -> Tensor:
    module = load(folder / "art/loss.py", "loss_fn", "compute_probs_corr", "_mask_ignored_tokens")
    aggregate = load(folder / "art/utils/group_aggregate.py", "group_aggregate").group_aggregate
    module.LossOffPolicyDiagnostics = SimpleNamespace(from_tensors=lambda **tensors: None)
    module.Loss = SimpleNamespace
    mask = b["mask"]
    rows = 1 + torch.arange(len(mask)).unsqueeze(1).expand_as(mask)
    aligned = SimpleNamespace(
        old_logprobs=b["old_logp"],
        advantages=b["advantages"],
        assistant_mask=mask,
        weights=torch.ones_like(b["advantages"]),
        group_ids=rows,
        group_mean=lambda values, by: aggregate(values, by=by, eps=0.0),
        denominator=lambda mask, reduction: mask.sum(),
        aligned_entropies=lambda entropies: None,
    )
    options = {"importance_sampling_level": case, "ppo": case == "geometric_average"}
    inputs = SimpleNamespace(align_inputs=lambda: aligned)
    loss: Tensor = module.loss_fn(inputs, b["logp"], None, None, options).policy_loss
    return loss


def _trl(folder: Path, case: str, b: Batch) -> Tensor:
    return (_trl_async if case == "async_grpo" else _trl_a2po)(folder, b)


def _trl_async(folder: Path, b: Batch) -> Tensor:
    """All valid tokens in one row, as its collator packs them."""
    path = folder / "trl/experimental/async_grpo/async_grpo_trainer.py"
    known = {"time": time, "nanmin": torch.min, "nanmax": torch.max}
    method, n = load(path, "compute_loss", **known).compute_loss, int(b["mask"].sum())
    alone = SimpleNamespace(num_processes=1, reduce=lambda x, **_: x, gather=lambda x: x)
    options = {"epsilon_low": 0.2, "epsilon_high": 0.2, "current_gradient_accumulation_steps": 1}
    trainer = SimpleNamespace(accelerator=alone, aux_loss_enabled=False, **options)
    trainer._metrics = {"train": defaultdict(list)}
    for name in ("forward_tokens", "trained_tokens", "seq_len_weighted", "samples", "forward_s"):
        setattr(trainer, f"_step_{name}", 0.0)
    names = ("input_ids", "position_ids", "shift_labels", "attention_mask", "segment_id")
    inputs = dict.fromkeys(names, torch.ones(1, n, dtype=torch.int64))
    inputs |= {"token_index": torch.arange(n)[None], "segment_id": torch.zeros(1, n).long()}
    inputs |= {"old_log_probs": b["rollout_logp"], "advantages": b["advantages"]}
    for name in ("old_log_probs", "advantages"):
        inputs[name] = inputs[name][b["mask"]][None]
    for name in ("tree_kv_index", "tree_cu_seqlens_q", "tree_cu_seqlens_k"):
        inputs[name] = torch.zeros(1)
    inputs["tree_max_seqlens"] = torch.zeros(1, 2)
    for name in ("global_n_tokens", "global_n_forward_tokens", "mean_seq_len"):
        inputs[name] = torch.tensor([n])
    logp = b["logp"][b["mask"]][None]
    outputs = SimpleNamespace(log_probs=logp, entropy=torch.zeros_like(logp))
    loss: Tensor = method(trainer, lambda **_: outputs, inputs)
    return loss


def _trl_a2po(folder: Path, b: Batch) -> Tensor:
    method = load(folder / "trl/experimental/a2po/a2po_trainer.py", "compute_loss").compute_loss
    mask = b["mask"]
    trainer = SimpleNamespace(
        model=SimpleNamespace(training=True),
        args=SimpleNamespace(beta2=1e-3),
        _metrics={"train": defaultdict(list)},
        _get_sequence_logps=lambda *inputs: (b["logp"] * mask).sum(1),
    )
    inputs: dict[str, Any] = dict.fromkeys(("input_ids", "attention_mask", "logits_to_keep"))
    inputs["ref_logps"] = (b["ref_logp"] * mask).sum(1)
    inputs |= {"rewards": b["advantages"][:, 0], "v_star": torch.zeros(len(mask))}
    loss: Tensor = method(trainer, None, inputs)
    return loss


def _verl_recipe(folder: Path, case: str, b: Batch) -> Tensor:
    mean = SimpleNamespace(masked_mean=lambda x, mask: (x * mask).sum() / mask.sum())
    module = load(folder / "sppo/dp_actor.py", "compute_sppo_loss", verl_F=mean)
    rewards = b["advantages"][:, 0]
    loss: Tensor = module.compute_sppo_loss(b["old_logp"], b["logp"], rewards, b["mask"])[0]
    return loss


def record_divergences(folder: Path) -> list[dict[str, Any]]:
    """ROLL's skewed KLs with its λ of 0.1, which it computes in float32."""
    g = torch.Generator().manual_seed(0)
    logits, teacher = (2 * torch.randn(4, 9, generator=g) for _ in range(2))
    lt, cases = teacher.log_softmax(-1), []
    roll = SimpleNamespace(kd_temperature=1.0, args=SimpleNamespace(skew_lambda=0.1))
    for kind, beta in (("forward", 0.1), ("reverse", 0.9)):
        name = f"compute_skewed_{kind}_kl_divergence"
        method = getattr(load(folder / "roll/pipeline/distill/various_divergence.py", name), name)
        leaf = logits.clone().requires_grad_()
        value = method(roll, leaf, lt.exp(), lt, torch.zeros_like(lt, dtype=torch.bool))
        (gradient,) = torch.autograd.grad(value.sum(), leaf)
        tensors = {"logits": logits, "teacher": teacher, "value": value, "gradient": gradient}
        options = {"kind": f"skew_{kind}", "beta": beta}
        cases.append({"options": options, **{name: x.tolist() for name, x in tensors.items()}})
    return cases


TRAINERS: Mapping[str, Callable[[Path, str, Batch], Tensor]] = {
    "prime-rl": _prime_rl,
    "trinity-rft": _trinity,
    "areal": _areal,
    "areal-main": _areal_main,
    "xtuner": _xtuner,
    "flux": _flux,
    "roll": _roll,
    "ms-swift": _swift,
    "openpipe-art": _art,
    "trl": _trl,
    "verl-recipe": _verl_recipe,
    "trinity-main": _trinity_main,
}


def record(folders: Mapping[str, Path]) -> dict[str, list[dict[str, Any]]]:
    """The cases of the trainers in `folders`, by the keys of `SPECS`."""
    cases: dict[str, list[dict[str, Any]]] = {}
    for key in SPECS:
        trainer, _, case = key.split(" ", 2)
        for seed in range(SEEDS if trainer in folders else 0):
            b = draw(seed)
            leaf = b["logp"].clone().requires_grad_()
            loss = TRAINERS[trainer](folders[trainer], case, {**b, "logp": leaf})
            (gradient,) = torch.autograd.grad(loss, leaf)
            inputs = {name: x.tolist() for name, x in b.items()}
            outputs = {"loss": loss.item(), "gradient": gradient.tolist()}
            cases.setdefault(key, []).append({"inputs": inputs, **outputs})
    return cases


def read_cases() -> dict[str, list[dict[str, Any]]]:
    """The recorded cases, each with its inputs, which the file holds once for each seed."""
    cases: dict[str, Any] = json.loads(RECORDED.read_text(encoding="utf-8"))
    inputs = cases.pop("inputs")
    for case in (case for key in cases if key != KLS for case in cases[key]):
        case["inputs"] = inputs[case["inputs"]]
    return cases


def write_cases(cases: Mapping[str, list[dict[str, Any]]]) -> None:
    """Write the cases as `read_cases` reads them, one line for each key."""
    inputs = [{name: x.tolist() for name, x in draw(seed).items()} for seed in range(SEEDS)]
    rows: dict[str, Any] = {"inputs": inputs, KLS: cases[KLS]}
    for key in sorted(SPECS):
        rows[key] = [{**case, "inputs": inputs.index(case["inputs"])} for case in cases[key]]
    lines = [f"{json.dumps(k)}: {json.dumps(v, separators=(',', ':'))}" for k, v in rows.items()]
    RECORDED.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def evaluate(key: str, case: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """The loss of the spec for a recorded case, and its gradient by the log-probabilities."""
    mask = torch.tensor(case["inputs"]["mask"])
    given = case["inputs"].items()
    inputs: dict[str, Any] = {n: torch.tensor(x, dtype=torch.float64) for n, x in given}
    logp, inputs["mask"] = inputs.pop("logp").requires_grad_(), mask
    inputs["ages"] = torch.tensor(case["inputs"]["ages"])
    if key in LOGLINEAR:
        inputs["old_logp"] = "loglinear"
    if isinstance(SPECS[key], pl.Mixture):
        inputs["extras"] = stream_masks(mask)
    loss = pl.policy_loss(SPECS[key], logp, **inputs).loss
    return loss.detach(), torch.autograd.grad(loss, logp)[0]


def main(arguments: list[str]) -> None:
    """Record the named trainers; the cases of the others stay."""
    folders = {name: Path(path) for name, path in (a.split("=", 1) for a in arguments)}
    cases = read_cases() | record(folders)
    if "roll" in folders:
        cases[KLS] = record_divergences(folders["roll"])
    write_cases(cases)


if __name__ == "__main__":
    main(sys.argv[1:])
