"""The reference trainer: sample, score, learn."""
