"""How much of a run a page shows. A run directory may hold anything, but the command must finish
and the page must open.
"""

from __future__ import annotations

from policyloss_lab.logs.lines import LINE_BYTES as LINE_BYTES
from policyloss_lab.logs.lines import MIB as MIB
from policyloss_lab.runs.records import LARGEST_STEP as LARGEST_STEP

OBJECT_BYTES = MIB  # of config.json and environment.json
METRIC_BYTES = 32 * MIB  # of the metrics of all runs that are read; of larger files, parts are
ROLLOUT_BYTES = 64 * MIB  # the same of their completions
LEAST_BYTES = MIB // 4  # the share of one run, however many there are
RUNS = 100  # of one table
PATHS = 20_000  # in one folder that is searched for logs
DEPTH = 20  # of settings inside settings
SETTINGS = 2_000  # in one file
INDEXED = 200_000  # steps of metrics, and rows of rollouts, whose offset is kept in memory
NAMES = 300  # of metrics in one file, beside those that the charts of the page name
NAME_LENGTH = 200
POINTS = 5_000  # of one metric
POINT_BUDGET = 400_000  # of all metrics of one file together
ALL_POINTS = 600_000  # of all runs together
HISTOGRAMS = 1_000  # steps with a histogram
BINS = 500  # of one histogram
TOKEN_BUDGET = 60_000  # tokens of one run, and of one row
ALL_TOKENS = 300_000  # tokens of all runs together
ANSWERS_SHARE = 4  # held-out answers may have this part of the tokens of a run, on top of them
ROWS = 2_000  # of rollouts
CHARACTERS_PER_TOKEN = 256  # of prompt, completion and answer count as one token of the budget
TEXT_LENGTH = 20_000  # of a prompt, a completion, an answer
TOKEN_LENGTH = 200
INLINE_BYTES = 10 * MIB  # of a page inside a notebook
NOTE_LENGTH = 500
NOTES = 40  # about one run
LARGEST = 1e150  # beyond it, sums, squares and the scales of a chart would overflow


def share(total: int, most: int, runs: int) -> int:
    """What one of `runs` may take of `total`, at most `most`."""
    return min(most, total // max(1, runs))


def bytes_of(total: int, runs: int) -> int:
    """How many bytes of the files of one of `runs` are read."""
    return max(LEAST_BYTES, total // max(1, runs))


def cut(text: str, length: int) -> str:
    """`text`, or its first `length` characters and an ellipsis."""
    return text if len(text) <= length else f"{text[:length]}…"
