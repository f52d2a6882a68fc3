"""A process around a real vLLM on a CPU in float32, whose log-probabilities are compared with ours
bit by bit: through the model of transformers, and from vLLM's own hidden states.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from greedy_vllm import small_engine
from torch import Tensor

import policyloss as pl
from policyloss.head.linear import head_and_sources
from policyloss.head.softmax_rows import Scaling, row_partials
from policyloss.head.tiles import Tiles, _tree_of
from policyloss.head.vocab_parallel import Vocabulary

VOCAB = 1024
LENGTHS = (5, 60, 2, 33, 17, 100, 8, 44)


def model_of(folder: Path, size: int) -> Any:
    """A random model of two layers, written to `folder`."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=VOCAB,
            hidden_size=size,
            intermediate_size=2 * size,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=32,
            max_position_embeddings=256,
            tie_word_embeddings=False,
        )
    ).eval()
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() == 2:
                p.mul_(4)  # so that distributions are not flat
    model.save_pretrained(folder)
    return model


def our_logits(hidden: Tensor, weight: Tensor) -> Tensor:
    """The logits of the exact head."""
    ids = hidden.new_zeros(len(hidden), dtype=torch.long)
    head = head_and_sources(hidden, weight, ids, None)[0]
    return head.logits(head.rows(slice(None)), head.room(len(hidden))).clone()


def our_log_softmax(logits: Tensor) -> Tensor:
    """Every log-probability, in the order of sums that the exact head has."""
    z = logits.float().contiguous()
    parts = Tiles.of_vocabulary(Vocabulary(z.shape[1], z.shape[1]), z.t()).parts
    nowhere = z.new_full((len(z),), -1, dtype=torch.long)
    partials = [row_partials(z[:, c], nowhere, Scaling(), False) for c in parts]
    maxima = torch.stack([p.max for p in partials])
    distance = maxima - maxima.amax(0)
    log_sum = _tree_of(torch.stack([p.sum for p in partials]) * distance.exp()).log()
    shifted = [
        (z[:, c] - top[:, None]) + d[:, None]
        for c, top, d in zip(parts, maxima, distance, strict=True)
    ]
    return torch.cat(shifted, -1) - log_sum[:, None]


def result_of(report: pl.BitsReport) -> dict[str, Any]:
    against = report.against
    return {
        "invariant": report.is_invariant,
        "other bits": {r.name: r.different for r in report.arrangements},
        "against": None if against is None else [against.different, against.ulps],
        "report": str(report),
    }


def main(folder: str, size: str, out: str) -> None:
    """Write the results as JSON."""
    model = model_of(Path(folder), int(size))
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the model must be within reach
    from vllm import SamplingParams

    llm = small_engine(folder, skip_tokenizer_init=True, enable_prefix_caching=False)
    generator = torch.Generator().manual_seed(1)
    sequences = [torch.randint(VOCAB, (n,), generator=generator).tolist() for n in LENGTHS]
    options = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)

    def of_vllm(batch: list[list[int]]) -> list[list[float]]:
        prompts: Any = [{"prompt_token_ids": ids} for ids in batch]
        answers = llm.generate(prompts, options, use_tqdm=False)
        return [
            [answer.prompt_logprobs[i][t].logprob for i, t in enumerate(ids) if i]
            for answer, ids in zip(answers, batch, strict=True)
        ]

    @torch.no_grad()
    def ours(batch: list[list[int]]) -> list[Tensor]:
        """One sequence to a forward of the body, and all of them to one call of the head."""
        hidden = [model.model(torch.tensor([ids])).last_hidden_state[0, :-1] for ids in batch]
        ids = torch.cat([torch.tensor(ids[1:]) for ids in batch])
        logp = pl.linear_logprobs(torch.cat(hidden), model.lm_head.weight, ids).logp
        return list(logp.split([len(ids) - 1 for ids in batch]))

    worker = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
    engine = worker.model_runner.get_model()
    compute_logits, captured = engine.compute_logits, []

    def recorded(hidden: Tensor, *rest: Any) -> Tensor:
        captured.append(hidden.detach().clone())
        return compute_logits(hidden, *rest)

    engine.compute_logits = recorded
    from_hidden, reported, equal_logits = [], [], 0
    weight = engine.lm_head.weight.detach()[:VOCAB]
    with pl.exact(), torch.no_grad():
        for ids in sequences:
            captured.clear()
            reported.append(of_vllm([ids])[0])
            hidden = next(h for h in reversed(captured) if h.shape[0] == len(ids) - 1)
            targets = torch.tensor(ids[1:])
            from_hidden.append(pl.linear_logprobs(hidden, weight, targets).logp)
            theirs = pl.logprobs(
                compute_logits(hidden)[:, :VOCAB].float().contiguous(), targets
            ).logp
            equal_logits += int((theirs == from_hidden[-1]).sum())
        engine.compute_logits = compute_logits
        plain = pl.bits_check(of_vllm, sequences)
        sampler = worker.model_runner.sampler
        sampler.compute_logprobs = our_log_softmax
        engine.compute_logits = lambda hidden, *_: our_logits(hidden, weight)
        replaced = [of_vllm([ids])[0] for ids in sequences]
        del sampler.compute_logprobs, engine.compute_logits
        indices = list(range(len(sequences)))
        results = {
            "tokens": sum(LENGTHS) - len(LENGTHS),
            "equal from their logits": equal_logits,
            "vllm": result_of(plain),
            "ours": result_of(pl.bits_check(ours, sequences, against=of_vllm)),
            "head": result_of(
                pl.bits_check(lambda xs: [from_hidden[i] for i in xs], indices, against=reported)
            ),
            "replaced": result_of(
                pl.bits_check(lambda xs: [from_hidden[i] for i in xs], indices, against=replaced)
            ),
        }
    Path(out).write_text(json.dumps(results))


if __name__ == "__main__":
    main(*sys.argv[1:])
