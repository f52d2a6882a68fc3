"""The parts a loss is made of: tiny frozen dataclasses, one module per slot, each callable on `Tokens`."""
