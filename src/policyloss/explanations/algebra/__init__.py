"""The symbolic algebra behind the printed formulas; README.md beside this file describes it."""
