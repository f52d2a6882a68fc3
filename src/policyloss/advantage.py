def gae(*a):
    raise AssertionError


def group_advantages(*a):
    raise AssertionError


def whiten(*a):
    raise AssertionError
