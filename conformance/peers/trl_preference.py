"""TRL's preference losses: the loss methods of DPOTrainer, KTOTrainer, ORPOTrainer and CPOTrainer,
each called on a stand-in for the trainer, against `preference_loss`.

TRL's batches are all chosen answers, then all rejected ones; `_in_pairs` puts them in our order. A
prompt is one token, so that ORPO's likelihood of the prompt, too, is that of the answer.
"""

from __future__ import annotations

import os
from collections import defaultdict
from importlib import import_module
from itertools import product
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from conformance.inputs import Batch
from conformance.suite import Defect, Function, Inputs, Options, Outputs
from policyloss.preference import (
    Hinge,
    Logistic,
    LogisticOrExponential,
    PreferenceSpec,
    ReverseKL,
    Score,
    Sigmoid,
    Square,
    Term,
)
from policyloss.preference.loss import preference_loss

KINDS = ("ragged", "full", "holes", "single_token")
RELEASES = ("1.16.0",)
VOCABULARY = 7
SHAPES: dict[str, Options] = {
    "reverse_kl": {},
    "forward_kl": {"alpha": 0.0},
    "js_divergence": {"shape": "jensen_shannon"},
    "alpha_divergence": {"alpha": 0.3},
}
OF_DIFFERENCES = ("sigmoid", "hinge", "robust", "discopop")
LOSS_TYPES = (
    *OF_DIFFERENCES,
    *("sigmoid_norm", "ipo", "nca_pair", "bco_pair", "sppo_hard", "aot", "aot_unpaired"),
    *("apo_zero", "apo_down", "sft"),
)
METRICS = {
    "rewards/chosen": "chosen_reward",
    "rewards/rejected": "rejected_reward",
    "rewards/margins": "margin",
    "rewards/accuracies": "accuracy",
}


def _terms(loss_type: str, options: Options, weight: float) -> tuple[Term, ...]:
    """The terms of one of TRL's loss types."""
    beta, smoothing = options["beta"], options["label_smoothing"]
    tail = 1.0 if options["ld_alpha"] is None else options["ld_alpha"]
    length: Any = "mean" if loss_type in ("sigmoid_norm", "ipo") else "sum"
    score = Score("ref", length, tail, **SHAPES[options["f_divergence_type"]])
    links: dict[str, Any] = {
        "exo_pair": ReverseKL,
        "robust": lambda beta, noise: Logistic(beta, -noise / (1 - 2 * noise)),
        "discopop": lambda beta, noise: LogisticOrExponential(beta, 0.05),
        "aot": Logistic,
        "aot_unpaired": Logistic,
    }
    plain: dict[str, Any] = {"hinge": Hinge, "ipo": Square, "sppo_hard": Square}
    plain |= {"apo_zero": Sigmoid, "apo_down": Sigmoid}
    link = (
        links[loss_type](beta, smoothing)
        if loss_type in links
        else plain.get(loss_type, Logistic)(beta)
    )
    both: list[tuple[Any, float]] = [("chosen", 1.0), ("rejected", 1.0)]
    margins = {
        "nca_pair": [("chosen", 1.0), ("against_chosen", 0.5), ("rejected", 0.5)],
        **dict.fromkeys(("bco_pair", "sppo_hard", "apo_zero"), both),
        "apo_down": [("pair", 1.0), ("against_chosen", 1.0)],
        "aot": [("ranked_pair", 1.0)],
        "aot_unpaired": [("ranked_sides", 1.0)],
    }.get(loss_type, [("pair", 1.0)])
    return tuple(Term(link, margin, score, weight * share) for margin, share in margins)


def _dpo_spec(options: Options) -> PreferenceSpec:
    weights = dict(zip(options["loss_type"], options["loss_weights"], strict=True))
    nll = weights.pop("sft", 0.0)
    terms = tuple(t for name, weight in weights.items() for t in _terms(name, options, weight))
    return PreferenceSpec(terms, nll, weighting="wpo" if options["use_weighting"] else None)


def _in_pairs(x: Tensor) -> Tensor:
    """Rows of chosen answers, then of rejected ones → chosen and rejected in turn."""
    return torch.stack(x.chunk(2), 1).flatten(0, 1)


def _nearness(batch: Batch) -> float:
    """A fifth of all sizes in float32, where sums over an answer lose the digits to compare in.

    At full size some cases differ by more than 1e-6. Against the same inputs in float64, over 600
    cases each: SPPO, TRL off by 3.2e-6 and ours by 4.9e-7 (it subtracts the reference before it
    sums); DiscoPOP, 2.6e-6 and 4.3e-7; CPO's hinge with beta 2, 7.7e-6 and 6.1e-6.
    """
    return 1 / 5 if batch.dtype == torch.float32 else 1.0


def _inputs(batch: Batch, options: Options) -> Inputs:
    even, near = len(batch.mask) // 2 * 2, _nearness(batch)
    square = -batch.entropy  # log Σp² ≤ 0
    inputs = {"logp": near * batch.logp, "ref_logp": near * batch.ref_logp}
    inputs["log_sum_sq_probs"] = near * square
    inputs |= {"entropy": batch.entropy, "mask": batch.mask}
    return {name: x[:even].clone() for name, x in inputs.items()}


def _metrics(options: Options) -> list[str]:
    """TRL's rewards are those of unshaped sums over tokens."""
    first = options["loss_type"][0]
    plain = options["f_divergence_type"] == "reverse_kl"
    return list(METRICS) if plain and first not in ("sft", "sigmoid_norm", "ipo") else []


def _our_dpo(inputs: Inputs, options: Options) -> Outputs:
    spec = _dpo_spec(options)
    tensors = [_in_pairs(inputs[name]) for name in ("logp", "ref_logp", "mask")]
    squares = _in_pairs(inputs["log_sum_sq_probs"]) if options["use_weighting"] else None
    out = preference_loss(spec, *tensors, log_sum_sq_probs=squares)
    logged = {name: out.metrics[METRICS[name]].value for name in _metrics(options)}
    if "rewards/accuracies" in logged:  # TRL's mean is float32
        logged["rewards/accuracies"] = logged["rewards/accuracies"].float()
    return {"loss": out.loss, **{name: x.item() for name, x in logged.items()}}


def _accelerator() -> SimpleNamespace:
    return SimpleNamespace(
        device=torch.device("cpu"), gather=lambda x: x, gather_for_metrics=lambda x: x
    )


def _answers(inputs: Inputs, logp: str) -> Any:
    """A model whose fused head returns these log-probabilities, 0 at the masked tokens."""
    zero = torch.zeros_like(inputs["logp"])
    outputs = SimpleNamespace(
        log_probs=inputs[logp] * inputs["mask"],
        entropy=inputs.get("entropy", zero),
        log_sum_sq_probs=inputs.get("log_sum_sq_probs"),
        mean_logits=zero,
        is_top1=zero.bool(),
    )
    return lambda **arguments: outputs


def _trainer(**fields: Any) -> SimpleNamespace:
    model = torch.nn.Module().eval()
    model.is_gradient_checkpointing = False  # type: ignore[assignment]
    return SimpleNamespace(
        model=model,
        args=SimpleNamespace(gradient_checkpointing_kwargs=None, discopop_tau=0.05),
        accelerator=_accelerator(),
        aux_loss_enabled=False,
        precompute_ref_logps=False,
        _metrics={"eval": defaultdict(list)},
        _total_train_tokens=0,
        **fields,
    )


def _with_prompt(mask: Tensor, value: int) -> Tensor:
    return torch.nn.functional.pad(mask.long(), (1, 0), value=value)


def _their_dpo(inputs: Inputs, options: Options) -> Outputs:
    names = ("beta", "label_smoothing", "ld_alpha", "f_divergence_type", "use_weighting")
    trainer = _trainer(
        **{name: options[name] for name in names},
        loss_types=options["loss_type"],
        loss_weights=options["loss_weights"],
        f_alpha_divergence_coef=SHAPES["alpha_divergence"]["alpha"],
        ref_model=_answers(inputs, "ref_logp"),
    )
    batch = {"completion_mask": _with_prompt(inputs["mask"], 0)}
    batch["input_ids"] = batch["attention_mask"] = torch.ones_like(batch["completion_mask"])
    compute = import_module("trl.trainer.dpo_trainer").DPOTrainer._compute_loss
    loss = compute(trainer, _answers(inputs, "logp"), batch, False)
    return {
        "loss": loss,
        **{name: trainer._metrics["eval"][name][-1] for name in _metrics(options)},
    }


IN_PLACE = Defect(
    "with hinge, the weights of WPO multiply the output of relu in place, and the backward raises",
    "the weighted loss and its gradient",
)


def _weights_in_place(options: Options, inputs: Inputs) -> Defect | None:
    return IN_PLACE if options["use_weighting"] and "hinge" in options["loss_type"] else None


def _dpo_option(*loss_types: str, weights: tuple[float, ...] = (1.0,), **others: Any) -> Options:
    plain: Options = {"beta": 0.1, "label_smoothing": 0.1, "ld_alpha": None}
    plain["use_weighting"] = False
    plain |= {"f_divergence_type": "reverse_kl", "loss_weights": list(weights)}
    return {"loss_type": list(loss_types), **plain, **others}


def _dpo_options() -> list[Options]:
    def scale(name: str, beta: float) -> float:
        """DiscoPOP's gate multiplies errors of rounding by beta/τ, so it is drawn flatter."""
        return beta / 5 if name == "discopop" else beta

    every = [
        _dpo_option(name, beta=scale(name, beta), ld_alpha=tail, use_weighting=weighted)
        for name, beta, tail, weighted in product(
            LOSS_TYPES, (0.1, 0.5), (None, 0.4, 0.0), (False, True)
        )
        # TRL refuses weights with AOT; it weights a mean over all tokens, where ours has no pair.
        if not (weighted and (name.startswith("aot") or name == "sft"))
    ]
    shaped = [
        _dpo_option(name, beta=beta, ld_alpha=tail, f_divergence_type=kind)
        for name, beta, tail, kind in product(
            OF_DIFFERENCES, (0.1, 0.5), (None, 0.4), ("forward_kl", "js_divergence")
        )
    ]
    lists = [
        _dpo_option("sigmoid", "bco_pair", "sft", weights=(0.8, 0.2, 1.0)),
        _dpo_option("apo_zero", "sft", weights=(1.0, 0.3)),
        _dpo_option("ipo", "hinge", "discopop", weights=(0.5, 1.0, 2.0), ld_alpha=0.2),
    ]
    return every + shaped + lists


def _kto_inputs(batch: Batch, options: Options) -> Inputs:
    g = batch.generator(3)
    noise = torch.randn(2, len(batch.mask), generator=g, dtype=torch.float64).to(batch.dtype)
    labels = torch.rand(len(batch.mask), generator=g) < 0.5
    shared = {"logp": batch.logp, "ref_logp": batch.ref_logp, "mask": batch.mask}
    return {**shared, "label": labels, "kl": noise[0], "ref_kl": noise[1] - 0.3}


def _our_kto(inputs: Inputs, options: Options) -> Outputs:
    terms = (
        Term(Sigmoid(options["beta"]), "chosen", weight=options["desirable_weight"]),
        Term(Sigmoid(options["beta"]), "rejected", weight=options["undesirable_weight"]),
    )
    measured = options["loss_type"] == "kto"
    baseline = (inputs["kl"] - inputs["ref_kl"]).mean().clamp(min=0) if measured else None
    out = preference_loss(
        PreferenceSpec(terms, over="sequences", baseline=measured),
        inputs["logp"],
        inputs["ref_logp"],
        inputs["mask"],
        chosen=inputs["label"],
        baseline=baseline,
    )
    return {"loss": out.loss}


def _their_kto(inputs: Inputs, options: Options) -> Outputs:
    kl = {"policy": inputs["kl"], "reference": inputs["ref_kl"]}
    policy, reference = (_answers(inputs, name) for name in ("logp", "ref_logp"))
    trainer = _trainer(
        **options,
        calculate_KL=options["loss_type"] == "kto",
        ref_model=reference,
        _compute_kl_logps=lambda model, batch: kl["policy" if model is policy else "reference"],
    )
    batch = {"completion_mask": _with_prompt(inputs["mask"], 0), "label": inputs["label"]}
    batch["input_ids"] = batch["attention_mask"] = torch.ones_like(batch["completion_mask"])
    compute = import_module("trl.trainer.kto_trainer").KTOTrainer._compute_loss
    return {"loss": compute(trainer, policy, batch, False)}


def _logits(batch: Batch, options: Options) -> Inputs:
    g, even = batch.generator(4), len(batch.mask) // 2 * 2
    mask = batch.mask[:even]
    shape = (even, mask.shape[1] + 1)
    noise = torch.randn(*shape, VOCABULARY, generator=g, dtype=torch.float64)
    logits = (_nearness(batch) * noise).to(batch.dtype)
    ids = torch.randint(0, VOCABULARY, shape, generator=g)
    return {"logits": logits, "ids": ids, "mask": mask.clone()}


def _our_logits(spec: PreferenceSpec, inputs: Inputs) -> Outputs:
    logp = inputs["logits"][:, :-1].log_softmax(-1)
    logp = logp.gather(-1, inputs["ids"][:, 1:, None]).squeeze(-1)
    out = preference_loss(spec, _in_pairs(logp), None, _in_pairs(inputs["mask"]))
    return {"loss": out.loss}


def _their_logits(name: str, inputs: Inputs, options: Options) -> Outputs:
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    module = import_module(f"trl.experimental.{name}.{name}_trainer")
    trainer_class = getattr(module, f"{name.upper()}Trainer")
    attention = _with_prompt(inputs["mask"], 1)
    labels = torch.where(_with_prompt(inputs["mask"], 0) == 1, inputs["ids"], -100)
    batch = {}
    for i, side in enumerate(("chosen", "rejected")):
        batch[f"{side}_input_ids"] = inputs["ids"].chunk(2)[i]
        batch[f"{side}_attention_mask"] = attention.chunk(2)[i]
        batch[f"{side}_labels"] = labels.chunk(2)[i]
    trainer = _trainer(is_encoder_decoder=False, padding_value=0, pad_token_id=0, **options)
    for method in ("concatenated_inputs", "get_batch_logps"):
        setattr(trainer, method, getattr(trainer_class, method))
    for method in ("concatenated_forward", "cpo_loss", "odds_ratio_loss"):
        if hasattr(trainer_class, method):
            setattr(trainer, method, getattr(trainer_class, method).__get__(trainer))
    answer = SimpleNamespace(logits=inputs["logits"])
    loss, _ = trainer_class.get_batch_loss_metrics(trainer, lambda *a, **k: answer, batch)
    return {"loss": loss}


def _orpo_spec(options: Options) -> PreferenceSpec:
    score = Score(None, "mean", shape="log_odds")
    return PreferenceSpec(Term(Logistic(1.0), score=score, weight=options["beta"]), nll=1.0)


def _cpo_spec(options: Options) -> PreferenceSpec:
    loss_type, beta, smoothing = (options[n] for n in ("loss_type", "beta", "label_smoothing"))
    link = {
        "sigmoid": Logistic(beta, smoothing),
        "hinge": Hinge(beta),
        "ipo": Square(beta),
        "simpo": Logistic(beta, smoothing, options["simpo_gamma"]),
    }[loss_type]
    length: Any = "mean" if loss_type in ("ipo", "simpo") else "sum"
    score = Score(None, length, alpha=1 - options["alpha"])
    return PreferenceSpec(Term(link, score=score), nll=options["cpo_alpha"])


CPO_OPTIONS = [
    {
        "loss_type": loss_type,
        "beta": beta,
        "alpha": alpha,
        "label_smoothing": smoothing,
        "cpo_alpha": nll,
        "simpo_gamma": 0.5,
    }
    for loss_type, beta, alpha, smoothing, nll in product(
        ("sigmoid", "hinge", "ipo", "simpo"), (0.1, 0.5), (0.0, 0.25), (0.0, 0.1), (0.0, 1.0)
    )
]


def _is_mild(options: Options) -> bool:
    """Whether float32 has the digits: a power of a probability, `(1 − p^(−α)) / α`, loses them on
    both sides (on sums, TRL is off by 7.1e-5 from float64 and ours by 5.7e-5; on means by 2.2e-6
    and 1.9e-6); SimPO's logistic loss flattens that.
    """
    return bool(options["alpha"] == 0 or options["loss_type"] == "simpo")


def _cpo_function(name: str, options: list[Options], **others: Any) -> Function:
    return Function(
        name=name,
        options=options,
        inputs=_logits,
        ours=lambda i, o: _our_logits(_cpo_spec(o), i),
        theirs=lambda i, o: _their_logits("cpo", i, o),
        differentiate=("logits",),
        kinds=KINDS,
        releases=RELEASES,
        **others,
    )


FUNCTIONS = [
    Function(
        name="DPOTrainer._compute_loss",
        options=_dpo_options(),
        defect=_weights_in_place,
        inputs=_inputs,
        ours=_our_dpo,
        theirs=_their_dpo,
        differentiate=("logp",),
        kinds=KINDS,
        releases=RELEASES,
    ),
    Function(
        # TRL computes the labels of EXO in float32, and the α-divergence has no entry for float64.
        name="DPOTrainer._compute_loss, in float32",
        options=[
            _dpo_option(name, beta=beta, ld_alpha=tail, f_divergence_type=kind)
            for name, beta, tail, kind in product(
                (*OF_DIFFERENCES, "exo_pair"), (0.1, 0.5), (None, 0.4), SHAPES
            )
            if name == "exo_pair" or kind == "alpha_divergence"
        ],
        inputs=_inputs,
        ours=_our_dpo,
        theirs=_their_dpo,
        differentiate=("logp",),
        kinds=KINDS,
        dtypes=("float32",),
        releases=RELEASES,
    ),
    Function(
        name="KTOTrainer._compute_loss",
        options=[
            {"loss_type": kind, "beta": beta, "desirable_weight": d, "undesirable_weight": u}
            for kind, beta, (d, u) in product(
                ("kto", "apo_zero_unpaired"), (0.1, 0.5), ((1.0, 1.0), (1.33, 0.5))
            )
        ],
        inputs=_kto_inputs,
        ours=_our_kto,
        theirs=_their_kto,
        differentiate=("logp",),
        kinds=KINDS,
        seeds=4,
        releases=RELEASES,
    ),
    Function(
        # TRL computes the odds in float32 whatever it gets.
        name="ORPOTrainer.get_batch_loss_metrics",
        options=[{"beta": beta} for beta in (0.1, 1.0)],
        inputs=_logits,
        ours=lambda i, o: _our_logits(_orpo_spec(o), i),
        theirs=lambda i, o: _their_logits("orpo", i, o),
        differentiate=("logits",),
        kinds=KINDS,
        seeds=12,
        dtypes=("float32",),
        releases=RELEASES,
    ),
    _cpo_function("CPOTrainer.get_batch_loss_metrics", [o for o in CPO_OPTIONS if _is_mild(o)]),
    _cpo_function(
        "CPOTrainer.get_batch_loss_metrics, alpha",
        [o for o in CPO_OPTIONS if not _is_mild(o)],
        dtypes=("float64",),
    ),
]
