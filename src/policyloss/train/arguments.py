"""From a command line to the options and the loss of a run.

A run directory is data: code that it names is refused, unless the user names it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from policyloss.commands import arguments_of, read_words
from policyloss.spec import LossSpec
from policyloss.train.config import TrainConfig
from policyloss.train.loss_options import change_spec, read_spec, split_loss_options
from policyloss.train.run.resumed_options import (
    MAY_BE_CODE,
    refuse_changes,
    refuse_unnamed_code,
    stored_options,
)

Changes = list[tuple[str, str]]  # of the loss, each a path and a text


class Start(NamedTuple):
    """How a run starts. named: the options that the user named."""

    config: TrainConfig
    spec: LossSpec
    named: frozenset[str]


def read_arguments(arguments: Sequence[str]) -> Start:
    """The command line after `policyloss train`."""
    named, changes = named_options(arguments)
    if named.get("resume"):
        return _resumed(named, changes)
    config = TrainConfig(**named)
    spec = _spec(config, named, changes, None)
    return Start(config.with_loss(spec), spec, frozenset(named))


def named_options(arguments: Sequence[str]) -> tuple[dict[str, Any], Changes]:
    """The options on a command line by their fields, and the changes of the loss: each
    `--loss.SLOT.OPTION VALUE` as its path and its text.
    """
    words, changes = split_loss_options(arguments)
    return read_words("train", arguments_of(TrainConfig), words), changes


def _resumed(named: dict[str, Any], changes: Changes) -> Start:
    """The options of a run that goes on, which those named must agree with."""
    stored, stored_spec = stored_options(named.get("out", TrainConfig.out))
    config = replace(stored, **named)
    refuse_unnamed_code(config, frozenset(named), MAY_BE_CODE)
    spec = _spec(config, named, changes, stored_spec)
    refuse_changes(stored, config, stored_spec, spec)
    return Start(config, spec, frozenset(named))


def _spec(
    config: TrainConfig, named: dict[str, Any], changes: Changes, stored: LossSpec | None
) -> LossSpec:
    """The loss that the user named, or the stored one, with the changes."""
    if stored is None or "loss" in named:
        spec = read_spec(config.loss, changes)
    else:
        spec = change_spec(stored, changes)
    return spec.for_run(config.max_new_tokens)
