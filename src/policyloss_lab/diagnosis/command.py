"""`policyloss doctor PATH`: a verdict on a file of tokens, or on the logs of a run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import fields, replace
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

from policyloss.commands import read_options
from policyloss.errors import InputError, unknown_name
from policyloss_lab import limits
from policyloss_lab.commands import Doctor
from policyloss_lab.diagnosis import distributions
from policyloss_lab.diagnosis.curves import LogThresholds
from policyloss_lab.diagnosis.diagnose import Thresholds
from policyloss_lab.diagnosis.read import read_tokens
from policyloss_lab.diagnosis.run_doctor import RunDiagnosis, doctor_run
from policyloss_lab.diagnosis.tokens import doctor
from policyloss_lab.diagnosis.verdict import Diagnosis
from policyloss_lab.reading import open_noted

HEALTHY, SICK, NOT_EXPLAINED = 0, 1, 3  # 2: a wrong argument, as for every command
Limits = TypeVar("Limits", Thresholds, LogThresholds, distributions.DistributionThresholds)


def doctor_command(arguments: Sequence[str]) -> int:
    """Print the verdict; returns the exit code: 0 healthy, 1 a cause, 3 not explained."""
    options = read_options("doctor", Doctor, arguments)
    verdict = verdict_on(options.path, options.model, options.threshold)
    print(verdict.to_json() if options.json else str(verdict), flush=True)
    if verdict.healthy:
        return HEALTHY
    unclear = isinstance(verdict, Diagnosis) and verdict.cause == "not_explained"
    return NOT_EXPLAINED if unclear else SICK


def verdict_on(
    path: Path, model: str | None = None, thresholds: Sequence[str] = ()
) -> Diagnosis | RunDiagnosis | distributions.DistributionGap:
    """The verdict on a file of tokens or distributions, or on logs. thresholds: NAME=NUMBER."""
    if path.suffix in (".pt", ".pth", ".pkl", ".bin", ".npz"):
        raise InputError(
            f"{path} may be a pickle, which can run code and is not read; save safetensors or JSON "
            "lines."
        )
    start = _beginning(path)
    if any(f'"{name}"'.encode() in start for name in distributions.COLUMNS):
        if model is not None:
            raise InputError(f"--model needs a file of tokens; {path} holds distributions.")
        bounds = with_numbers(distributions.DistributionThresholds(), thresholds)
        sides = distributions.read_distributions(path)
        return distributions.compare_distributions(**sides, thresholds=bounds)
    lists = b"[" in start and any(x in start for x in (b"_logp", b"log_prob", b"logprob"))
    if path.suffix == ".safetensors" or lists:
        arguments: dict[str, Any] = read_tokens(path)
        arguments["thresholds"] = with_numbers(Thresholds(), thresholds)
        if model is None:
            arguments.pop("prompts", None)
            return doctor(**arguments)
        return doctor(**arguments, model=load_model(model))
    if model is not None:
        raise InputError(f"--model needs a file of tokens; {path} is not one.")
    return doctor_run(path, with_numbers(LogThresholds(), thresholds))


def with_numbers(limits: Limits, pairs: Sequence[str]) -> Limits:
    """`limits` with some numbers replaced. pairs: such as "truncated=0.3"."""
    kinds = {field.name: type(getattr(limits, field.name)) for field in fields(limits)}
    for pair in pairs:
        name, _, text = pair.partition("=")
        if name not in kinds:
            raise InputError(unknown_name("threshold", name, kinds))
        try:
            number = float(text)
        except ValueError:
            number = math.nan
        if not 0 <= number < math.inf:
            raise InputError(f"--threshold takes NAME=NUMBER with a number >= 0, got {pair!r}.")
        if kinds[name] is int and number != int(number):
            raise InputError(f"--threshold {name} takes a whole number, got {text}.")
        limits = replace(limits, **{name: kinds[name](number)})
    return limits


def _beginning(path: Path) -> bytes:
    """The first line of a .jsonl file, or the header of a .safetensors file; empty for others."""
    with open_noted(path, []) as file:
        if path.suffix == ".safetensors":
            return file.read(limits.MIB)
        return file.readline(limits.MIB) if path.suffix == ".jsonl" else b""


def load_model(model: str) -> Any:
    """The causal language model in a folder; nothing is downloaded."""
    try:
        loader = import_module("transformers").AutoModelForCausalLM
    except ModuleNotFoundError:
        raise InputError("--model needs transformers; pip install 'policyloss[train]'.") from None
    if not Path(model).is_dir():
        raise InputError(f"there is no folder {model}; give the folder of a saved model.")
    try:
        return loader.from_pretrained(model, local_files_only=True, use_safetensors=True)
    except Exception as error:  # files of any origin, read by another package
        raise InputError(f"cannot load the model {model}: {error}") from error
