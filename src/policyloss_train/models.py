"""Models: a new tiny model, or any causal language model of Hugging Face; their weights and heads,
the compilation and checkpointing of their blocks, and low-rank adapters (LoRA) by peft: only the
adapters are trained, and the model without them is the reference.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache, wraps
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from policyloss.errors import InputError
from policyloss.hf.forward import run_model
from policyloss.hf.output_head import Transformation, UnknownHeadError
from policyloss_train.distributed import Say
from policyloss_train.tasks.base import Task

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from policyloss_train.config import TrainConfig

# transformers imports torchao if it is installed. torchao warns of kernels that it cannot load and
# that are not needed here, and torch warns of torchao's code.
for _name in ("torchao", "torch.utils._pytree"):
    logging.getLogger(_name).setLevel(logging.ERROR)


def load_model(
    model: str,
    task: Task,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    seed: int,
    offline: bool = False,
    empty: bool = False,
    trust_remote_code: bool = False,
    warn: Say = warnings.warn,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A model in eval mode, and its tokenizer with an end token and a padding token.

    model: "tiny" (weights that follow from `seed`, characters of the task as tokens), a local
    folder, or a name on the hub. Weights are read from safetensors files only, and code that comes
    with them is run only with `trust_remote_code`.
    offline: download nothing; a name on the hub must be in the cache. warn: called for stored
    weights that the model does not use. empty: a stored model without its weights, on the meta
    device.
    """
    if model in TINY:
        tokenizer = tiny_tokenizer(task)
        loaded = tiny_model(tokenizer, seed, TINY[model]).to(dtype)
    else:
        loaded, tokenizer = _load_stored(model, dtype, offline, trust_remote_code, warn, empty)
    if tokenizer.eos_token is None:
        raise InputError(f"the tokenizer of {model!r} has no end token (eos_token); set one.")
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token  # any token will do, as padding is masked
    if not empty:
        loaded.to(device)
    loaded.eval()
    return loaded, tokenizer


def vocabulary_size(model: PreTrainedModel) -> int:
    """The number of entries of the output head, which may exceed the tokenizer's vocabulary."""
    size: int = model.get_output_embeddings().weight.shape[0]
    return size


@torch.no_grad()
def observe_head(model: PreTrainedModel) -> Transformation:
    """The scale and cap that the model applies to the logits of its head, from a forward of four
    tokens.

    Raises if the model changes its logits in another way, or if its head reads anything but the
    last hidden states of its body, because the trained model would differ from the sampled one.
    """
    wrong = InputError(
        f"the logits of {type(model).__name__} are not its last hidden states times its head. A "
        "model may scale or cap its logits as in its config.json, and do nothing else to them."
    )
    inputs = {"input_ids": torch.tensor([[0, 1, 0, 1]], device=model.device), "use_cache": False}
    try:
        hidden, matrices, transformation = run_model(model, inputs, lambda *parts: parts).result
    except UnknownHeadError as error:
        raise wrong from error
    gap = (hidden - model.base_model(**inputs).last_hidden_state).abs().max()
    if not gap <= 8 * torch.finfo(matrices.weight.dtype).eps * hidden.abs().max():
        raise wrong
    return cast("Transformation", transformation)


def weights(module: nn.Module) -> dict[str, Tensor]:
    """The parameters and buffers of a module for a checkpoint; tied weights occur once."""
    kept = module.state_dict().keys()
    every = (*module.named_parameters(), *module.named_buffers())
    return {name: x for name, x in every if name in kept}


@torch.no_grad()
def load_weights(targets: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> None:
    """Copy stored tensors into `targets`, the tensors that `weights` returns for a module."""
    for name, x in targets.items():
        if name not in tensors or tensors[name].shape != x.shape:
            stored = tuple(tensors[name].shape) if name in tensors else "nothing"
            shapes = f"{stored} for {name}, which is {tuple(x.shape)} here"
            raise InputError(f"the checkpoint has {shapes}; the model must be the same.")
        x.copy_(tensors[name])


@contextmanager
def without_bars() -> Iterator[None]:
    """Inside, transformers shows no progress bars for files that it reads or writes."""
    from transformers.utils import logging as bars

    shown = bars.is_progress_bar_enabled()
    bars.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            bars.enable_progress_bar()


def refuse_missing_folder(model: str) -> None:
    """Raise if the name looks like a folder that does not exist; other names may be on the hub."""
    looks_local = model.startswith((".", "/", "~")) or model.count("/") > 1
    # `Path.is_dir` would raise for a name that is too long.
    if not model or (looks_local and not os.path.isdir(os.path.expanduser(model))):
        raise InputError(
            f"there is no folder {model or repr(model)}; name the folder of a model, a model on "
            "the hub, or 'tiny'."
        )


def _load_stored(
    model: str, dtype: torch.dtype, offline: bool, trust_remote_code: bool, warn: Say, empty: bool
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model in a folder or on the hub."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    refuse_missing_folder(model)
    path = os.path.expanduser(model)
    where = path if os.path.isdir(path) else model
    source = {"local_files_only": offline, "trust_remote_code": trust_remote_code}
    try:
        tokenizer = AutoTokenizer.from_pretrained(where, **source)
        if empty:
            return _empty(where, source), cast("PreTrainedTokenizerBase", tokenizer)
        with without_bars():
            loaded, loading = AutoModelForCausalLM.from_pretrained(
                where, dtype=dtype, use_safetensors=True, output_loading_info=True, **source
            )
    # Another package reads files of any origin: any error means that they cannot be used.
    except Exception as error:
        named = "" if isinstance(error, (OSError, ValueError)) else f"{type(error).__name__}: "
        hint = " Only a run directory names it: to download it, use --model." if offline else ""
        raise InputError(
            f"cannot load the model {model!r}: {named}{error} It must be a folder or hub name with "
            f"config.json, tokenizer files and weights as safetensors.{hint}"
        ) from error
    _check_weights(model, loading, warn)
    return cast("PreTrainedModel", loaded), cast("PreTrainedTokenizerBase", tokenizer)


def _empty(where: str, source: dict[str, Any]) -> PreTrainedModel:
    """The model without its weights, with the tokens that end its completions."""
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    config = AutoConfig.from_pretrained(where, **source)
    with torch.device("meta"):
        trusted = source["trust_remote_code"]
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=trusted)
    with suppress(OSError):  # a model may have no generation_config.json
        local = source["local_files_only"]
        model.generation_config = GenerationConfig.from_pretrained(where, local_files_only=local)
    return cast("PreTrainedModel", model)


def _check_weights(model: str, loading: Mapping[str, Any], warn: Say) -> None:
    """Refuse a model with missing weights, because random weights would replace them."""
    other = sorted(str(row[0]) for row in loading["mismatched_keys"])
    for names, problem in (
        (sorted(loading["missing_keys"]), "are missing"),
        (other, "have another shape than in its config.json"),
    ):
        if names:
            which = f"{len(names)} weights of the model {model!r} {problem}"
            raise InputError(f"{which}: {list_names(names)}. Use files that are complete.")
    if extra := sorted(loading["unexpected_keys"]):
        warn(
            f"the files of the model {model!r} hold {len(extra)} weights that it has no place for: "
            f"{list_names(extra)}."
        )


def list_names(names: Sequence[str]) -> str:
    """The first four names, and the number of others."""
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def checkpoint_gradients(model: PreTrainedModel) -> None:
    """Make the model store only the inputs of its layers, and recompute the other activations.

    Transformers recomputes only in layers in training mode. So the layers are in training mode, but
    their submodules are not, and the layers' own dropout is 0; the numbers do not change.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for layer in model.modules():
        if isinstance(layer, GradientCheckpointingLayer):
            layer.training = True
            for name in [name for name in vars(layer) if "dropout" in name]:
                setattr(layer, name, 0.0)


PAD, END, UNKNOWN = "<pad>", "<end>", "<unknown>"
# Attention heads, of width 16 and 32; vLLM has no attention of width 16 on a CPU.
TINY = {"tiny": 4, "tiny32": 2}
PRINTABLE = "\n\t" + "".join(map(chr, range(0x20, 0x7F)))


def tiny_tokenizer(task: Task) -> PreTrainedTokenizerBase:
    """One token per character: printable ASCII, and other characters of the training examples."""
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
    """A Llama with 138 thousand random weights from `seed`; the global generator is unchanged."""
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


# Arguments of a block in sampling. Shapes then change with every token, so it runs uncompiled.
_CACHES = ("past_key_values", "past_key_value", "layer_past", "cache_params")


def compile_blocks(body: nn.Module) -> None:
    """Compile the forward of the repeated blocks of a body, except in sampling.

    Only the class of a block changes, so its weights and their names stay, and copies work. If the
    function were stored in the block, copies would share it and use the original's weights.
    """
    for module in body.children():
        if isinstance(module, nn.ModuleList):
            for block in module:
                kind: Any = type(block)
                block.__class__ = _compile_forward(kind)
        else:
            compile_blocks(module)


@cache
def _compile_forward(block: Any) -> Any:
    """The class of a block with a compiled forward."""
    plain, compiled = block.forward, torch.compile(block.forward, dynamic=True)

    @wraps(plain)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        samples = any(kwargs.get(name) is not None for name in _CACHES)
        return (plain if samples else compiled)(self, *args, **kwargs)

    return type(block.__name__, (block,), {"forward": forward, "__module__": block.__module__})


def add_adapter(model: Any, config: TrainConfig) -> None:
    """Freeze the model and add adapters of rank `lora_rank` to its linear layers. An untrained
    adapter does not change the output. Its initial weights follow from the seed.
    """
    try:
        from peft import LoraConfig
    except ImportError as error:
        raise InputError("--lora-rank needs the package peft: pip install peft.") from error
    options = LoraConfig(
        r=config.lora_rank,
        lora_alpha=config.lora_alpha or 2 * config.lora_rank,
        target_modules=list(config.lora_target) or "all-linear",
        lora_dropout=0.0,
        task_type="CAUSAL_LM",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        try:
            model.add_adapter(options)
        except ValueError as error:
            raise InputError(f"--lora-target {' '.join(config.lora_target)}: {error}") from error
    model.eval()


@contextmanager
def without_adapter(model: Any) -> Iterator[None]:
    """Disable the adapters of the model, if it has any."""
    if not has_adapter(model):
        yield
        return
    model.disable_adapters()
    try:
        yield
    finally:
        model.enable_adapters()


@contextmanager
def save_all_weights(model: Any) -> Iterator[None]:
    """Inside, transformers saves the complete model, not only its adapters."""
    adapted = has_adapter(model)
    model._hf_peft_config_loaded = False
    try:
        yield
    finally:
        model._hf_peft_config_loaded = adapted


def has_adapter(model: Any) -> bool:
    """Whether `add_adapter` was called."""
    return bool(getattr(model, "_hf_peft_config_loaded", False))


@contextmanager
def train_base(model: Any) -> Iterator[None]:
    """Inside, the base model is trained and its adapters are disabled."""
    trained = {name: p.requires_grad for name, p in model.named_parameters()}
    with without_adapter(model):
        if has_adapter(model):
            for name, p in model.named_parameters():
                p.requires_grad_(not _is_of_adapter(name))
        try:
            yield
        finally:
            for name, p in model.named_parameters():
                p.requires_grad_(trained[name])


@torch.no_grad()
def merged_weights(model: Any) -> dict[str, Tensor]:
    """State dict with the adapters merged, under the names of the base model."""
    merged: dict[str, Tensor] = {}
    for name, x in model.state_dict().items():
        if _is_of_adapter(name):
            continue
        layer, inside, rest = name.partition(".base_layer.")
        if inside and rest == "weight":
            x = x + model.get_submodule(layer).get_delta_weight("default").to(x.dtype)
        merged[f"{layer}.{rest}" if inside else name] = x
    return merged


def _is_of_adapter(name: str) -> bool:
    return ".lora_" in name
