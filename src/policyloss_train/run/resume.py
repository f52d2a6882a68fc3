"""Resume a run: its state in checkpoints, and the options that it was started with.

A run directory is data, perhaps from somebody else. Code, models on the hub, addresses and services
in its config.json are used only if the command line names them too.
"""

from __future__ import annotations

import filecmp
import shlex
import warnings
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from policyloss.catalogue import PRESETS
from policyloss.commands import flag
from policyloss.errors import InputError, PolicyLossError, match_name
from policyloss.spec import SLOTS, LossSpec
from policyloss_lab.runs.files import TEMPLATE, StorageError, damage_named
from policyloss_train.config import TrainConfig
from policyloss_train.distributed import Ranks
from policyloss_train.models import list_names
from policyloss_train.run.checkpoint import State, check_index, flatten, latest, load, save, step_of
from policyloss_train.run.directory import RunDir
from policyloss_train.watch import NotFiniteError, nonfinite_names

# The trained weights: a checkpoint where they are not finite is useless.
_TRAINED = ("policy/", "critic/")


def store(folder: Path, step: int, changing: Mapping[str, Any], ranks: Ranks, *, keep: int) -> None:
    """Write a checkpoint of all changing state, between two steps.

    changing: objects by name. `state()` of each returns its tensors, in mappings and sequences, and
    JSON values; `load_state(tensors, values)` restores them. Tensor names are unique in the run.
    """
    tensors: dict[str, Any] = {}
    numbers: dict[str, Any] = {}
    for name, one in changing.items():
        its_tensors, numbers[name] = one.state()
        tensors |= its_tensors
    weights = {name: x for name, x in flatten(tensors).items() if name.startswith(_TRAINED)}
    names = sorted({name for share in ranks.gather(nonfinite_names(weights)) for name in share})
    if names:  # on every rank, so that the last good checkpoint is kept
        what = f"the weights are not finite after step {step} ({list_names(names)})"
        raise NotFiniteError(f"{what}, so it gets no checkpoint.")
    save(folder, step, tensors, numbers, keep=keep, group=ranks.group)


def restore(folder: Path, changing: Mapping[str, Any], ranks: Ranks, layout: State) -> int:
    """Load the last good checkpoint; returns its step. layout: as in `checkpoint.load`."""
    path = latest(folder, refuse_nonfinite_weights, group=ranks.group)
    if path is None:
        raise InputError(f"{folder} holds no checkpoint that can be read; start in another --out.")
    tensors, numbers = load(path, layout, group=ranks.group)
    with name_damage(path):
        for name, one in changing.items():
            one.load_state(tensors, numbers[name])
    return step_of(path)


def stored_weights(run: Path, path: Path | None = None) -> tuple[Path, int, dict[str, Tensor]]:
    """The path, step and tensors of a checkpoint (default: the last good one), fully checked."""
    path = path or latest(run / "checkpoints", refuse_nonfinite_weights)
    if path is None:
        raise InputError(f"{run / 'checkpoints'} holds no checkpoint that can be read.")
    step = int(check_index(path, sums=True)["step"])
    return path, step, load(path)[0]


def name_damage(path: Path) -> AbstractContextManager[None]:
    """Inside, an error about the contents of a checkpoint names the checkpoint."""
    advice = " Remove it to go on from an older one."
    return damage_named(f"checkpoint {path} lacks entries that a run needs", advice)


def refuse_nonfinite_weights(path: Path) -> None:
    """Raise a `StorageError` if a checkpoint holds weights that are not finite."""
    for name in check_index(path, sums=False)["files"]:
        damage = damage_named(f"checkpoint {path} is damaged: {name}", "", SafetensorError, OSError)
        with damage, safe_open(path / name, framework="pt") as file:
            names = file.keys()  # the file is not a dictionary
            keys = [key for key in names if key.startswith(_TRAINED)]
            bad = [key for key in keys if nonfinite_names({key: file.get_tensor(key)})]
        if bad:
            what = f"{len(bad)} of its weights are not finite, {bad[0]} among them"
            raise StorageError(f"checkpoint {path} is no good: {what}.")


def last_good(folder: Path) -> Path | None:
    """The newest checkpoint that is intact and has finite weights, without other ranks."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return latest(folder, refuse_nonfinite_weights)


# Options of logging, storage and hardware, which change no number of a run;
# a resumed run may change them.
CHANGEABLE = (
    *("track", "keep", "checkpoint_every", "heartbeat", "rank_timeout", "reward_timeout"),
    *("nonfinite_limit", "device", "parallel", "unusable", "attention"),
    *("rollout", "rollout_timeout", "rollout_memory", "engine"),
)
OF_A_START = ("config", "like", "resume", "extend")  # options of a start, which are not stored
UNSTARTED = {name: getattr(TrainConfig, name) for name in OF_A_START}  # their stored values
_MAY_DIFFER = (*CHANGEABLE, *OF_A_START, "out")
# Options that may name code, an address or a service; evaluation uses only the reward.
MAY_BE_CODE = ("reward", "loss", "advantage", "rollout", "engine", "track")


def stored_options(run: Path) -> tuple[TrainConfig, LossSpec | None]:
    """The options and the loss that a run was started with; None for a loss that is code."""
    contents, file = RunDir.read_config(run), run / "config.json"
    try:
        with damage_named(f"{file} is damaged"):
            if not isinstance(contents["config"], dict) or not isinstance(contents["loss"], dict):
                raise InputError("'config' and 'loss' must be objects.")
            config = TrainConfig.from_dict({**contents["config"], **UNSTARTED, "out": str(run)})
            if config.chat_template is not None:  # not the file that it names, which may be any
                config = replace(config, chat_template=run / TEMPLATE)
            if contents["loss"] == {"code": config.loss}:
                return config, None
            spec = LossSpec.from_dict(contents["loss"])
            named = match_name(config.loss, PRESETS)
            return config, spec if named is None else keep_preset(PRESETS[named].spec, spec)
    except StorageError:
        raise
    except PolicyLossError as error:
        raise StorageError(f"{file}: {error}") from None


def keep_preset(spec: LossSpec, changed: LossSpec) -> LossSpec:
    """`changed` as a change of `spec`, so that it still refers to its preset."""
    return spec.replace(**{slot: getattr(changed, slot) for slot in SLOTS})


def continue_options(config: TrainConfig, spec: LossSpec) -> TrainConfig:
    """`config` with the final number of steps; raises if options or numbers of the loss differ
    from the run's, and lists them.
    """
    (stored, stored_spec), now = stored_options(config.out), config
    old, new = stored.chat_template, now.chat_template
    if old is not None and new is not None and filecmp.cmp(old, new, shallow=False):
        now = replace(now, chat_template=old)
    before, after = (
        {flag(name): x for name, x in vars(config).items() if name not in _MAY_DIFFER}
        | _flat(loss_data(loss, config.loss), "--loss.")
        for config, loss in ((stored, stored_spec), (now, spec))
    )
    names = {**before, **after}
    pairs = {name: tuple(x.get(name, "nothing") for x in (before, after)) for name in names}
    listed = "; ".join(
        f"{name} is {_shown(new)}, and the run has {_shown(old)}"
        for name, (old, new) in pairs.items()
        if old != new
    )
    if listed:
        longer = " To train longer, use --extend." if now.steps != stored.steps else ""
        raise InputError(
            f"--resume goes on with the options that {now.out} was started with, but these differ: "
            f"{listed}.{longer} Leave them out, or start another run with another --out."
        )
    return replace(config, steps=max(stored.steps, config.extend or 0))


def loss_data(spec: LossSpec | None, name: str) -> dict[str, Any]:
    """The loss as config.json holds it: its numbers, or `{"code": name}` if it is code."""
    return {"code": name} if spec is None or not spec.is_data else spec.to_dict()


def refuse_unnamed_code(
    config: TrainConfig, named: frozenset[str], options: Sequence[str] = ("reward",)
) -> None:
    """Raise if one of the `options` names code, an address or a service that the user did not."""
    for name in options:
        value = getattr(config, name)
        if needs_name(name, value) and name not in named:
            kind = "a service" if name == "track" else "an address" if "://" in value else "code"
            raise InputError(
                f"{config.out / 'config.json'} names the {name} {value!r}, which is {kind}. A run "
                f"directory is only data: if you trust that {kind.split()[-1]}, name it yourself: "
                f"{flag(name)} {value}"
            )
    if config.trust_remote_code and "trust_remote_code" not in named:
        raise InputError(
            f"{config.out / 'config.json'} allows code that comes with the model "
            f"{config.model!r} to run. A run directory is only data: if you trust that code, allow "
            "it yourself: --trust-remote-code"
        )


def needs_name(option: str, value: str | None) -> bool:
    """Whether an option names code (module:function), an address or a service."""
    return value is not None and (option == "track" or ":" in value)


def resume_command(config: TrainConfig) -> str:
    """The command that resumes a run."""
    words = ["policyloss", "train", "--resume", "--out", str(config.out)]
    for name in MAY_BE_CODE:
        value = getattr(config, name)
        words += [flag(name), value] if needs_name(name, value) else []
    words += ["--trust-remote-code"] if config.trust_remote_code else []
    return shlex.join(words)


def _shown(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _flat(data: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """`{"trust": {"eps_low": 0.2}}` → `{"trust.eps_low": 0.2}`."""
    flat: dict[str, Any] = {}
    for name, value in data.items():
        inner = isinstance(value, Mapping)
        flat |= _flat(value, f"{above}{name}.") if inner else {f"{above}{name}": value}
    return flat
