"""The reference trainer: sample, score, learn.

The order of a run is in `loop`, an update in `learner`. `tasks` holds prompts and rewards,
`rollout` the sampling engines, `run` the files of a run directory, `view` the display and the logs.
"""
