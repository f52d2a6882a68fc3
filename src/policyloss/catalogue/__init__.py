"""The named losses: data, by family, with a source for every number.

A preset is a `LossSpec` with a title, a paper, and a source for every number that is not a library
default. There is no function per algorithm; `explain` describes each loss.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, TypeAlias

from policyloss.arguments import description
from policyloss.catalogue.named_loss import Preset as Preset
from policyloss.catalogue.off_policy import OFF_POLICY
from policyloss.catalogue.ratios import BY_RATIO
from policyloss.catalogue.taught import TAUGHT
from policyloss.errors import InputError, PolicyLossError, SpecError, match_name, unknown_name
from policyloss.output import read_regular
from policyloss.spec import LossSpec

LARGEST_FILE = 2**20  # bytes of a loss, or of the options of a framework
# The names, for type checkers and editors.
PresetName: TypeAlias = (
    Literal["ppo", "ppo_dual_clip", "grpo", "dr_grpo", "dapo", "bnpo", "gspo", "gspo_token"]
    | Literal["gspo_turn", "cispo", "cispo_unified", "rollout_is", "rec_one_side", "sppo_token"]
    | Literal["sapo", "fipo", "gmpo", "gpg", "reinforce", "importance_sampling", "tis", "seq_tis"]
    | Literal["icepop", "seq_mask_tis", "opsm", "decoupled_ppo", "m2po", "clip_cov", "kl_cov"]
    | Literal["dppo_tv", "dppo_kl", "prime_rl", "ipo", "dro", "a2po", "sppo", "topr", "up_grpo"]
    | Literal["luspo", "vespo", "rloo_loss", "two_sided", "aipo", "opd", "opd_kl", "iw_opd", "kdrl"]
    | Literal["sdpo", "opd_exact", "gkd", "gkd_forward", "gkd_reverse", "mopd_topk", "opsd", "sdft"]
)

# A loss as an argument: a spec, the name of a preset, or a function of `Tokens`, which fills the
# slot `trust` of the default loss.
AnyLoss: TypeAlias = LossSpec | PresetName | str | Callable[..., Any]
_DEFAULT = LossSpec()  # a compiler cannot make the default parts
PRESETS: dict[str, Preset] = {p.name: p for p in (*BY_RATIO, *OFF_POLICY, *TAUGHT)}


def presets() -> tuple[str, ...]:
    """The names of all presets."""
    return tuple(PRESETS)


def find_preset(name: str) -> Preset:
    """The preset called `name` (in any letter case), or an error that suggests the nearest name."""
    if not isinstance(name, str):
        raise SpecError(f"name must be the name of a preset, a string, got {description(name)}.")
    known = name if name in PRESETS else match_name(name, PRESETS)
    if known is None:
        raise SpecError(unknown_name("preset", name, PRESETS))
    return PRESETS[known]


def preset(name: PresetName | str, **numbers: Any) -> LossSpec:
    """The loss called `name`, as a frozen `LossSpec`; `numbers` override its settings by name.

        pl.preset("dapo", eps_high=0.3, entropy_coef=0.01)

    If several parts of the loss have a setting of that name, this raises: use `spec.replace(…)`.
    """
    return find_preset(name).spec.with_fields(**numbers)


def as_spec(spec: Any, called: str = "spec") -> LossSpec:
    """`spec`, a preset by its name, or a loss by its function of `Tokens`. called: for errors."""
    if isinstance(spec, LossSpec):
        return spec
    if isinstance(spec, str):
        return find_preset(spec).spec
    if "streams" in getattr(type(spec), "__dataclass_fields__", ()):
        raise InputError(
            f"{called} is a Mixture, and this function takes one loss: policy_loss, measure, "
            "accumulate, linear_policy_loss, hf.policy_loss, explain_plan and explain take a "
            "Mixture; pass the loss of one of its streams here, mixture.streams[name].loss."
        )
    if callable(spec) and not isinstance(spec, type):
        return _DEFAULT.replace(trust=spec)
    raise InputError(
        f"{called} must be a LossSpec or the name of a preset, got {description(spec)}; "
        "policyloss.presets() lists the names, and a function f of Tokens means "
        "pl.LossSpec(trust=f)."
    )


def presets_equal_to(spec: LossSpec) -> tuple[Preset, ...]:
    """The presets that equal `spec`. Horizons are not compared: they belong to the run."""
    if spec.is_data and getattr(spec.aggregate, "horizon", None) is not None:
        spec = spec.with_fields(horizon=None)
    return tuple(p for p in PRESETS.values() if p.spec == spec)


def read_json(name: str) -> Any:
    """The contents of a JSON file; an error names the file."""
    try:
        data = read_regular(Path(name), LARGEST_FILE, follow=True)
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise PolicyLossError(f"cannot read {name}: {why}.") from None
    try:
        return json.loads(data)
    except ValueError as error:
        raise PolicyLossError(f"{name} is not JSON: {error}.") from None
    except RecursionError:
        raise PolicyLossError(f"{name} is nested too deeply to be read.") from None
