def explain(spec):
    raise AssertionError


def diff(a, b):
    raise AssertionError
