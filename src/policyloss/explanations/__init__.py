"""`explain` describes a loss in verifiable words; `diff` compares two losses."""

from policyloss.explanations.difference import Difference, diff
from policyloss.explanations.explanation import Explanation, explain, shorten_sources

__all__ = ["Difference", "Explanation", "diff", "explain", "shorten_sources"]
