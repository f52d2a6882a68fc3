"""The parts that a loss consists of: small frozen dataclasses, each callable on `Tokens`.

Each slot has one module; the trust regions have two. An average needs only the `Layout` of the
tokens. In addition to `__call__`, parts have these methods, which `explain` reads:
sentence: a description of the part in words.
slopes: of a trust region, where its gradient is zero (see `wording.Slopes`).
averaged: of an average, the average of `x` as a formula.
formula: the lines of a formula that symbols cannot derive from the code.
traits: short words that describe the part; `explain` chooses names and traps by them.
"""
