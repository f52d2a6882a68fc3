"""Rollout engines, which complete prompts with the weights they receive.

`protocol` defines an engine, and `session.make_rollout` makes the engine that `--rollout` names.
"""
