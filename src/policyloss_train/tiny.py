"""The models "tiny" and "tiny32": a real Llama of two layers with a real tokenizer of single
characters. Nothing is downloaded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch

from policyloss_train.tasks.base import Task

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

PAD, END, UNKNOWN = "<pad>", "<end>", "<unknown>"
# Attention heads, of 16 and of 32 numbers; vLLM has no attention for 16 on a CPU.
TINY = {"tiny": 4, "tiny32": 2}
PRINTABLE = "\n\t" + "".join(map(chr, range(0x20, 0x7F)))


def tiny_tokenizer(task: Task) -> PreTrainedTokenizerBase:
    """One token per character: printable ASCII, and what else the training examples hold."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = set(PRINTABLE).union(*(example.prompt + example.answer for example in task.train))
    vocabulary = {token: i for i, token in enumerate([PAD, END, UNKNOWN, *sorted(letters)])}
    characters = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    characters.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    characters.decoder = decoders.Fuse()
    special = {"pad_token": PAD, "eos_token": END, "unk_token": UNKNOWN}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=characters, **special)
    return cast("PreTrainedTokenizerBase", tokenizer)


def tiny_model(
    tokenizer: PreTrainedTokenizerBase, seed: int, heads: int = TINY["tiny"]
) -> PreTrainedModel:
    """A Llama with 138 thousand random weights of `seed`; no other generator is touched."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=heads,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return cast("PreTrainedModel", LlamaForCausalLM(config))
