"""The options on docs/names.md, compared with the installed framework:
each name exists there and has that default.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
from collections.abc import Callable, Iterator
from importlib import import_module, util
from pathlib import Path
from typing import Any

from docs.names.called import FRAMEWORKS, REQUIRED, Argument, Option
from docs.names.options import OPTIONS

_MISSING = object()
_CALLED = {"verl": "verl", "openrlhf": "OpenRLHF", "trl": "TRL"}
# Where a framework keeps the functions that the page names.
_MODULES = {
    "verl": ("verl.trainer.ppo.core_algos", "verl.trainer.ppo.rollout_corr_helper"),
    "openrlhf": ("openrlhf.models.loss", "openrlhf.models.utils"),
    "trl": (),
}


def wrong_options(peer: str) -> list[str]:
    """Options on the page that differ from the installed package, in one line each."""
    defaults = _DEFAULTS[peer]()
    wrong = []
    for said in _said(peer):
        if isinstance(said, Option):
            there = defaults(said.name)
            name, stated = said.name, said.default
        else:
            name, stated, there = (
                f"{said.function}({said.parameter})",
                said.default,
                _argument(peer, said),
            )
        if there is _MISSING:
            wrong.append(f"{name} is not there")
        elif there != stated or (isinstance(there, bool) is not isinstance(stated, bool)):
            wrong.append(f"{name} is {there!r} there, {stated!r} on the page")
    return wrong


def _said(peer: str) -> Iterator[Option | Argument]:
    assert _CALLED[peer] in FRAMEWORKS
    for rows in OPTIONS.values():
        for row in rows:
            yield from (said for said in row.cell(_CALLED[peer]) if not isinstance(said, str))


def _argument(peer: str, said: Argument) -> Any:
    """The default of a parameter in the framework itself."""
    first, *rest = said.function.split(".")
    found = next(
        (getattr(m, first) for m in map(import_module, _MODULES[peer]) if hasattr(m, first)), None
    )
    for name in rest:
        found = getattr(found, name)
    if found is None:
        return _MISSING
    parameter = inspect.signature(found).parameters.get(said.parameter)
    if parameter is None:
        return _MISSING
    return REQUIRED if parameter.default is parameter.empty else parameter.default


def _verl_defaults() -> Callable[[str], Any]:
    """verl's own configuration, as its command line starts from it."""
    config = import_module("omegaconf").OmegaConf
    folder = Path(import_module("verl").__file__ or "").parent / "trainer" / "config"
    settings = config.load(folder / "_generated_ppo_trainer.yaml")

    def default(name: str) -> Any:
        node = settings.actor_rollout_ref if name.startswith("actor.") else settings
        *parents, last = name.split(".")
        for parent in parents:
            node = node.get(parent, {})
        return node.get(last, _MISSING)

    return default


def _openrlhf_defaults() -> Callable[[str], Any]:
    """The arguments of OpenRLHF's command, read from its source:
    the parser is made where it runs.
    """
    spec = util.find_spec("openrlhf")
    assert spec is not None
    assert spec.submodule_search_locations
    source = Path(spec.submodule_search_locations[0]) / "cli" / "train_ppo_ray.py"
    found = {}
    for call in ast.walk(ast.parse(source.read_text())):
        if (
            isinstance(call, ast.Call)
            and isinstance(call.func, ast.Attribute)
            and call.func.attr == "add_argument"
        ):
            keywords = {k.arg: k.value for k in call.keywords}
            for name in call.args:
                if isinstance(name, ast.Constant) and isinstance(
                    keywords.get("default"), (ast.Constant, ast.List, ast.Tuple)
                ):
                    found[name.value] = ast.literal_eval(keywords["default"])
    return lambda name: found.get(name, _MISSING)


def _trl_defaults() -> Callable[[str], Any]:
    """The fields of TRL's GRPOConfig."""
    fields = {f.name: f.default for f in dataclasses.fields(import_module("trl").GRPOConfig)}
    return lambda name: fields.get(name, _MISSING)


_DEFAULTS = {"verl": _verl_defaults, "openrlhf": _openrlhf_defaults, "trl": _trl_defaults}
COMPARED = tuple(_DEFAULTS)  # the frameworks whose options the page names
