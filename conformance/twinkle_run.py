"""Real training steps of twinkle on a CPU, with our loss plugged in by `set_loss`.

    python -m conformance.twinkle_run       # where twinkle-kit is installed

twinkle loads a tiny model, computes log-probabilities, calls the loss with two micro-batches,
divides the gradient by its counts and steps the optimizer. The weights are compared with those
after the same step by hand: the loss of the whole batch, differentiated once. twinkle has no
platform for a CPU, so that of a GPU is pointed at the CPU. The result is written to
conformance/results/engine_steps.json.
"""

from __future__ import annotations

import json
import sys
import tempfile
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import policyloss as pl
from conformance import one
from policyloss.compat.engines import twinkle_loss

RESULTS = Path(__file__).resolve().parent / "results" / "engine_steps.json"
PRESETS = ("ppo", "grpo", "dapo", "gspo", "sapo", "cispo")
LENGTHS, PROMPT, RATE, TOLERANCE = (7, 5, 9, 6), 2, 0.5, 1e-6


def tiny_model(folder: str) -> Any:
    """A random model of two layers, saved in `folder`."""
    transformers = import_module("transformers")
    torch.manual_seed(0)
    config = transformers.Qwen2Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    model = transformers.Qwen2ForCausalLM(config)
    model.save_pretrained(folder)
    return model


def batch() -> dict[str, list[Any]]:
    """Samples of unequal lengths; the labels name the next token, and −100 in the prompt."""
    g = torch.Generator().manual_seed(1)
    ids = [torch.randint(1, 64, (n,), generator=g) for n in LENGTHS]
    labels = [torch.cat([row[1:], row.new_tensor([-100])]) for row in ids]
    labels = [torch.cat([torch.full((PROMPT,), -100), row[PROMPT:]]) for row in labels]
    old = [-4.2 + 0.3 * torch.randn(len(row), generator=g) for row in ids]
    ref = [-4.2 + 0.3 * torch.randn(len(row), generator=g) for row in ids]
    return {"ids": ids, "labels": labels, "old": old, "ref": ref, "advantages": [1, -0.5, 0.25, -2]}


def step_by_hand(model: Any, spec: pl.LossSpec, data: dict[str, list[Any]]) -> dict[str, Tensor]:
    """The weights after one step of plain SGD on the whole batch."""
    pad = torch.nn.utils.rnn.pad_sequence
    ids, labels = pad(data["ids"], True), pad(data["labels"], True, -100)
    scores = model(input_ids=ids, attention_mask=pad([row * 0 + 1 for row in data["ids"]], True))
    chosen = labels.clamp(min=0).unsqueeze(-1)
    logp = scores.logits.log_softmax(-1).gather(-1, chosen).squeeze(-1)
    tensors: dict[str, Any] = {
        "old_logp": pad(data["old"], True),
        "ref_logp": pad(data["ref"], True),
    }
    advantages = torch.tensor(data["advantages"])
    out = pl.policy_loss(spec, logp, advantages=advantages, mask=labels != -100, **tensors)
    names, weights = zip(*model.named_parameters(), strict=True)
    slopes = torch.autograd.grad(out.loss, weights)
    pairs = zip(names, weights, slopes, strict=True)
    return {name: weight.detach() - RATE * slope for name, weight, slope in pairs}


def step_of_twinkle(folder: str, spec: pl.LossSpec, data: dict[str, list[Any]]) -> dict[str, Any]:
    """The weights after one step of twinkle over two micro-batches."""
    model = import_module("twinkle.model").TransformersModel(
        model_id=folder, torch_dtype=torch.float32, mixed_precision="no"
    )
    model.set_loss(twinkle_loss(spec))
    model.set_optimizer(torch.optim.SGD, lr=RATE, weight_decay=0.0)
    model.set_processor("InputProcessor")
    for rows in (slice(0, 1), slice(1, 4)):
        pairs = zip(data["ids"][rows], data["labels"][rows], strict=True)
        model.forward_backward(
            inputs=[{"input_ids": i.tolist(), "labels": x.tolist()} for i, x in pairs],
            advantages=data["advantages"][rows],
            old_logps=[x[PROMPT:-1] for x in data["old"][rows]],  # of the trained tokens
            ref_logps=[x[PROMPT:-1] for x in data["ref"][rows]],
        )
    model.clip_grad_and_step(max_grad_norm=1e9)
    return {name: weight.detach() for name, weight in model.model.named_parameters()}


def main() -> int:
    """Compare the weights for every preset; the exit status is 1 if one differs."""
    platform = import_module("twinkle.utils.platforms.gpu").GPU
    platform.get_local_device = staticmethod(lambda *_, **__: "cpu")
    found, data = {}, batch()
    for name in PRESETS:
        spec = pl.preset(name)
        with tempfile.TemporaryDirectory() as folder:
            model = tiny_model(folder)
            ours, before = step_by_hand(model, spec, data), model.state_dict()
            theirs = step_of_twinkle(folder, spec, data)
        moved = max(float((ours[n] - before[n]).abs().max()) for n in ours)
        assert moved > 1e-3, f"{name}: the step moved no weight by more than {moved}."
        found[name] = max(float((ours[n] - theirs[n]).abs().max()) for n in ours)
        print(f"{name}: weights moved by {moved:.1e}, and differ by {found[name]:.1e}")
    worst = max(found.values())
    write_result("twinkle", metadata.version("twinkle-kit"), list(found), worst)
    return 0 if worst <= TOLERANCE else 1


def write_result(engine: str, release: str, presets: list[str], worst: float) -> None:
    """Record the worst difference of a weight; the results of the other engines stay."""
    result = {"release": release, "presets": presets, "tolerance": TOLERANCE, "worst": worst}
    recorded = json.loads(RESULTS.read_text()) if RESULTS.is_file() else {}
    one.write_json(RESULTS, recorded | {engine: result})


if __name__ == "__main__":
    sys.exit(main())
