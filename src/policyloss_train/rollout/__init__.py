"""Rollout engines, which complete prompts with the weights that they receive.

`protocol` defines an engine, and `session.make_rollout` makes the engine that `--rollout` names.
"""
