"""Placeholder while the battery is written."""


def check_loss(fn):
    raise AssertionError
