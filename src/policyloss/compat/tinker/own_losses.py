"""Tinker's built-in losses as specs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from policyloss.errors import InputError, unknown_name
from policyloss.parts.aggregate import TokenSum
from policyloss.parts.ratio import TokenRatio
from policyloss.parts.trust import Quadratic, Unbounded
from policyloss.parts.trust_clips import Clip, DetachedClip
from policyloss.spec import LossSpec


def built_in(name: str, **config: float) -> LossSpec:
    """A built-in loss of Tinker as a spec, with the keys of its `loss_fn_config`.

        tinker.built_in("ppo", clip_low_threshold=0.8, clip_high_threshold=1.28)

    All are sums over tokens, anchored at the sampler. The advantages are the weights of
    `cross_entropy`.
    """
    if name not in _TRUST:
        raise InputError(unknown_name("built-in loss", name, _TRUST))
    try:
        trust = _TRUST[name](**config)
    except TypeError as error:
        raise InputError(f"loss_fn_config of {name}: {error}.") from None
    return LossSpec(ratio=TokenRatio(anchor="rollout"), trust=trust, aggregate=TokenSum())


_TRUST: dict[str, Callable[..., Any]] = {
    "cross_entropy": lambda: Unbounded("logp"),
    "importance_sampling": lambda: Unbounded("ratio"),
    "ppo": lambda clip_low_threshold=0.8, clip_high_threshold=1.2: Clip(
        1 - clip_low_threshold, clip_high_threshold - 1
    ),
    "cispo": lambda clip_low_threshold=0.8, clip_high_threshold=1.2: DetachedClip(
        clip_low_threshold, clip_high_threshold
    ),
    "dro": lambda beta: Quadratic(beta),
}
