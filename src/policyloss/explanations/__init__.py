"""`explain`: what a loss is, in words a person can check. `diff`: how two losses differ."""

from policyloss.explanations.difference import Difference, diff
from policyloss.explanations.explanation import Explanation, explain, shortened

__all__ = ["Difference", "Explanation", "diff", "explain", "shortened"]
