"""Where completions come from: engines that complete prompts with the weights they are told.

`protocol` says what an engine is, and `make.make_engine` makes the one that `--rollout` names.
"""
