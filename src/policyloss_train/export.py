"""`policyloss export RUN DIR`: the policy of a run as a folder that transformers loads."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from policyloss.commands import read_options
from policyloss.errors import InputError
from policyloss.output import temporary_prefix
from policyloss_lab.runs.files import make_folder, refuse_name, sync, write_error
from policyloss_train.adapter import has_adapter, merged_weights, written_whole
from policyloss_train.command import load_run, unscored_options
from policyloss_train.commands import Export
from policyloss_train.models import without_bars


def export_command(arguments: Sequence[str]) -> int:
    """`policyloss export RUN DIR`."""
    options = read_options("export", Export, arguments)
    refuse_name(options.folder)
    if options.folder.exists():
        raise InputError(f"{options.folder} is there already; name a folder that is not.")
    config, spec = unscored_options(options)
    if options.adapter and not config.lora_rank:
        raise InputError(f"{options.run} has no adapter: it trained all weights. Omit --adapter.")
    setup, step = load_run(options, config, spec)
    save(setup.model, setup.tokenizer, options.folder, adapter=options.adapter)
    print(f"{options.folder}: the policy of {options.run} after step {step}")
    return 0


def save(model: Any, tokenizer: Any, folder: Path, *, adapter: bool = False) -> None:
    """Write model and tokenizer under a temporary name beside `folder`, then give them their name.

    adapter: write the adapters alone; otherwise they are merged into the weights.
    """
    temporary = folder.with_name(f"{temporary_prefix(folder)}tmp")
    try:
        make_folder(temporary)
        with without_bars():
            if adapter or not has_adapter(model):
                model.save_pretrained(temporary)
            else:
                with written_whole(model):
                    model.save_pretrained(temporary, state_dict=merged_weights(model))
        tokenizer.save_pretrained(temporary)
        for file in (*(file for file in temporary.rglob("*") if file.is_file()), temporary):
            sync(file)
        os.rename(temporary, folder)
        sync(folder.parent)
    except Exception as error:  # of other packages, which raise anything for a full disk
        raise write_error(folder, error, "Nothing is there under that name.") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
