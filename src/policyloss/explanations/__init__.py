"""`explain` describes a loss in verifiable words; `diff` compares two losses."""

from policyloss.explanations.difference import Difference, diff
from policyloss.explanations.explanation import Explanation, explain, shortened

__all__ = ["Difference", "Explanation", "diff", "explain", "shortened"]
