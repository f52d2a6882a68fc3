"""The parts that a loss consists of: small frozen dataclasses, each callable on `Tokens`.

There is a module for each slot; the trust regions fill three.
"""
