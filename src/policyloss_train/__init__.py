"""The reference trainer: sample, score, learn.

The order of a run is in `loop`, an update in `learner`. `tasks` holds prompts and rewards, `run`
the files of a run directory, `view` what a person sees of it.
"""
