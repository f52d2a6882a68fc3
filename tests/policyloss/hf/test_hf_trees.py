"""`pl.hf` on trees of samples that share prefixes: the numbers of the samples in separate rows.

The tree is TRL's `TreeRow`, recorded by `conformance/trl_tree_run.py` with TRL 1.16.0, or a trie in
which a state that several samples continue differently predicts several tokens.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from hf_models import built, gradients, small_config
from torch import Tensor
from walk import walked

import policyloss as pl
from cases import assert_same

RECORD = json.loads((Path(__file__).parents[2] / "recorded/trl_tree_row.json").read_text())
SAMPLES = RECORD["samples"]
ROW = {name: torch.tensor(x) for name, x in RECORD["row"].items()}
CLIP = pl.LossSpec(trust=pl.Clip(0.2, 0.2), aggregate=pl.TokenMean())
SPECS = {"clip": CLIP, "gspo": "gspo", "entropy": CLIP.replace(entropy_coef=0.1)}


def gpt2() -> Any:
    """A model without a step in float32."""
    from transformers import GPT2Config, GPT2LMHeadModel

    return built(GPT2LMHeadModel, small_config(GPT2Config, attn_implementation="sdpa"))


class Tree(NamedTuple):
    """The arguments of a model for one row of tokens, and of its loss terms."""

    inputs: dict[str, Any]
    terms: dict[str, Tensor]

    @classmethod
    def of(cls, tokens: Tensor, paths: list[list[int]], index: Tensor, ids: Tensor) -> Tree:
        """paths: the row's tokens that each token sees, itself last."""
        seen = torch.full((1, 1, len(tokens), len(tokens)), -torch.inf, dtype=torch.float64)
        for i, path in enumerate(paths):
            seen[0, 0, i, path] = 0
        depth = torch.tensor([[len(path) - 1 for path in paths]])
        inputs = {"position_ids": depth, "model_inputs": {"attention_mask": seen}}
        return cls({"input_ids": tokens[None], **inputs}, {"index": index, "ids": ids})


def of_trl() -> Tree:
    """TRL's row: a state that samples continue differently is there once for each next token."""
    bounds = [ROW[f"tree_cu_seqlens_{x}"].tolist() for x in "qk"]
    paths = []
    for q, end, k, stop in zip(bounds[0], bounds[0][1:], bounds[1], bounds[1][1:], strict=False):
        path = ROW["tree_kv_index"][k:stop].tolist()
        paths += [path[: len(path) - (end - q) + i + 1] for i in range(end - q)]
    index = ROW["token_index"]
    return Tree.of(ROW["input_ids"], paths, index, ROW["shift_labels"][index])


def of_trie() -> Tree:
    """A node for each distinct prefix."""
    nodes: dict[tuple[int, ...], int] = {}
    paths, index, ids = [], [], []
    for sample in SAMPLES:
        tokens, path = sample["input_ids"], []
        for i, trained in enumerate(sample["completion_mask"]):
            if trained:
                index.append(path[-1])
                ids.append(tokens[i])
            node = nodes.setdefault(tuple(tokens[: i + 1]), len(nodes))
            path = [*path, node]
            if node == len(paths):
                paths.append(path)
    tokens = torch.tensor([prefix[-1] for prefix in nodes])
    return Tree.of(tokens, paths, torch.tensor(index), torch.tensor(ids))


def terms_of_loss() -> dict[str, Tensor]:
    """The tensors of the loss terms, as TRL's row has them, and the bounds of the samples."""
    counts = torch.nn.functional.pad(ROW["segment_id"].bincount(), (1, 0))
    numbers = {"old_logp": ROW["old_log_probs"].double(), "advantages": ROW["advantages"].double()}
    mask = torch.ones(len(ROW["token_index"]), dtype=torch.bool)
    return {**numbers, "mask": mask, "cu_seqlens": counts.cumsum(0)}


def unrolled() -> dict[str, Tensor]:
    """The samples in padded rows; what belongs to predicted tokens begins with the second."""

    def padded(name: str) -> Tensor:
        rows = [torch.tensor(sample[name]) for sample in SAMPLES]
        return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)

    ids = padded("input_ids")
    return {
        "input_ids": ids,
        "attention_mask": (ids > 0).long(),
        "old_logp": padded("old_log_probs")[:, 1:].double(),
        "advantages": torch.tensor([s["advantage"] for s in SAMPLES], dtype=torch.float64),
        "mask": padded("completion_mask")[:, 1:].bool(),
    }


@walked("spec", SPECS)
@walked("tree", (of_trl, of_trie), ids=("TRL's", "trie"))
def test_a_tree_is_its_samples(tree: Any, spec: str) -> None:
    model, (inputs, terms) = gpt2(), tree()
    rows, loss_terms = unrolled(), terms_of_loss()
    expected = pl.hf.policy_loss(model, SPECS[spec], **rows)
    expected.loss.backward()
    theirs = gradients(model)
    out = pl.hf.policy_loss(model, SPECS[spec], **inputs, **terms, **loss_terms)
    out.loss.backward()
    ours = gradients(model)
    torch.testing.assert_close(out.loss, expected.loss, rtol=1e-12, atol=1e-12)
    assert ours.keys() == theirs.keys()
    for name, x in ours.items():
        torch.testing.assert_close(x, theirs[name], rtol=1e-10, atol=1e-12)
    assert_same(out.metrics.compute(), expected.metrics.compute(), 1e-11)
    torch.testing.assert_close(out.logp, expected.logp[rows["mask"]], rtol=1e-12, atol=1e-12)
    again = pl.hf.logprobs(model, **inputs, **terms)
    torch.testing.assert_close(again.logp.detach(), out.logp, rtol=1e-12, atol=1e-12)


def test_the_trie_has_fewer_tokens_and_several_ids_at_a_state() -> None:
    (_, terms), tokens = of_trie(), of_trie().inputs["input_ids"].numel()
    assert tokens < len(ROW["input_ids"]) < sum(len(s["input_ids"]) for s in SAMPLES)
    pairs = torch.stack([terms["index"], terms["ids"]]).unique(dim=1)
    assert pairs.shape[1] > terms["index"].unique().numel()
    call = {**of_trie().inputs, **terms, **terms_of_loss()}
    plan = pl.hf.explain_plan(gpt2(), CLIP, **call)
    assert (plan.name, plan.computed) == ("one_pass", pairs.shape[1])


def test_the_loss_that_trl_computes() -> None:
    """The lines of `AsyncGRPOTrainer.compute_loss`, on the logits of the same row."""
    model, (inputs, terms) = gpt2(), of_trl()
    positions, mask = inputs["position_ids"], inputs["model_inputs"]
    logits = model(inputs["input_ids"], position_ids=positions, use_cache=False, **mask).logits[0]
    labels = ROW["shift_labels"].clamp(min=0)
    log_probs = logits.log_softmax(-1).gather(-1, labels[:, None])[:, 0][ROW["token_index"]]
    ratio = (log_probs - ROW["old_log_probs"]).exp()
    advantages = ROW["advantages"]
    losses = -torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    (losses.sum() / len(losses)).backward()
    theirs = gradients(model)
    out = pl.hf.policy_loss(model, CLIP, **inputs, **terms, **terms_of_loss())
    out.loss.backward()
    torch.testing.assert_close(out.loss.detach(), losses.mean().detach(), rtol=1e-12, atol=1e-12)
    for name, x in gradients(model).items():
        torch.testing.assert_close(x, theirs[name], rtol=1e-10, atol=1e-12)


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "no ids": ({"ids": None}, "index needs ids, .* got ids=None"),
    "no index": ({"index": None}, "ids needs index"),
    "fewer logits": ({"logits_to_keep": 2}, "no logits_to_keep; got .* logits_to_keep=2"),
    "its own logits": ({"head": "auto"}, "index needs head='fused', got head='auto'"),
    "another shape": ({"index": torch.zeros(3, dtype=torch.int64)}, "index has shape"),
    "too high": ({"index": ROW["token_index"] + 2}, "index holds 19 at position"),
}


@walked(("change", "message"), WRONG.values(), ids=list(WRONG))
def test_wrong_arguments(change: dict[str, Any], message: str) -> None:
    inputs, terms = of_trl()
    with pytest.raises(pl.InputError, match=message):
        pl.hf.policy_loss(gpt2(), CLIP, **{**inputs, **terms, **terms_of_loss(), **change})
