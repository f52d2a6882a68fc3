"""The parts that a loss consists of: small frozen dataclasses, each callable on `Tokens`.

There is a module for each slot; the trust regions fill three. Averages need the `Layout` of the
tokens only. Beside `__call__`, parts have these methods, which `explain` reads:
sentence: a description of the part in words.
slopes: of a trust region, where its gradient is zero (see `wording.Slopes`).
averaged: of an average, the average of `x` as a formula.
formula: the lines of a formula that symbols cannot derive from the code.
traits: short words for what the part is, by which names and traps are chosen.
"""
