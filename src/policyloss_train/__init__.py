"""The reference trainer: sample, score, learn.

`loop` holds the order of a run, `learner` an update, `tasks` prompts and rewards, `rollout` the
sampling engines, `run` the files of a run directory, `view` the display and the logs.
"""
