"""Importing this registers every preset in the installed verl: set `actor_rollout_ref.model.external_lib` to this module."""

from policyloss.compat.verl.registry import register

NAMES = register()
