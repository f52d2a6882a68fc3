"""What `explain` and `diff` are made of: printed formulas, words, sources, zero-gradient conditions, names elsewhere, traps."""
