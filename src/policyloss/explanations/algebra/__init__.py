"""The symbolic algebra behind the printed formulas; README.md in this folder describes it."""
