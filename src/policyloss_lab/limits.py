"""How much of a file is read, and how much of a run a page shows. A file may come from anybody and
hold anything, but every command must finish and every page must open.
"""

from __future__ import annotations

from collections.abc import Sequence

MIB = 2**20
LARGEST_STEP = 2**53  # beyond it, a browser cannot tell two steps apart
LARGEST = 1e150  # beyond it, sums, squares and the scales of a chart would overflow

# Files
LINE_BYTES = 16 * MIB  # one line: about 100,000 tokens with all their numbers
LEAST_LINE = MIB // 4  # a line of a sampled part, however small the parts are
NUMBER_PARTS = 512  # parts of a file of numbers that is too large to be read completely
COMPLETION_PARTS = 32  # the same for a file of completions
OBJECT_BYTES = MIB  # config.json and environment.json
DEPTH = 20  # levels of nested settings
TABLE_BYTES = 64 * MIB  # a table of W&B, and a row group of parquet before compression
TOKEN_FILE_BYTES = 1024 * MIB  # a file of tokens for the doctor or the what-if
LOG_BYTES = 256 * MIB  # a log for the doctor
LOG_STEPS = 200_000  # steps of that log

# Runs of a report
METRIC_BYTES = 32 * MIB  # metrics of all runs together; larger files are sampled
ROLLOUT_BYTES = 64 * MIB  # completions of all runs together
LEAST_BYTES = MIB // 4  # the share of one run, however many there are
RUNS = 100  # runs of one table
PATHS = 20_000  # files of one folder that is searched for logs
INDEXED = 200_000  # rows of rollouts whose offsets are in memory
WATCHED = 10_000  # files that a live page watches

# Numbers and texts of a page
NAMES = 300  # metrics of one file, in addition to the metrics of the charts
NAME_LENGTH = 200
POINTS = 5_000  # points of one metric
POINT_BUDGET = 400_000  # points of all metrics of one file together
ALL_POINTS = 600_000  # points of all runs together
HISTOGRAMS = 1_000  # steps with a histogram
BINS = 500  # bins of one histogram
TOKEN_BUDGET = 60_000  # tokens of one run, and of one row
ALL_TOKENS = 300_000  # tokens of all runs together
ANSWERS_SHARE = 4  # held-out answers get this part of a run's tokens in addition
ROWS = 2_000  # rollouts
CHARACTERS_PER_TOKEN = 256  # of prompt, completion and answer count as one token of the budget
TEXT_LENGTH = 20_000  # characters of a prompt, a completion, an answer
TOKEN_LENGTH = 200
INLINE_BYTES = 10 * MIB  # a page inside a notebook
NOTE_LENGTH = 500
NOTES = 40  # notes about one run
PRINTED_NOTES = 20  # notes on the command line; the page has them all


def share(total: int, most: int, runs: int) -> int:
    """The part of `total` for one of `runs`, at most `most`."""
    return min(most, total // max(1, runs))


def bytes_of(total: int, runs: int) -> int:
    """The number of bytes that are read for one of `runs`."""
    return max(LEAST_BYTES, total // max(1, runs))


def stride(sizes: Sequence[int], budget: int) -> int:
    """The smallest k for which every k-th of `sizes`, counted back from the last, fits `budget`; at
    most their number.
    """
    return next((k for k in range(1, len(sizes)) if sum(sizes[::-k]) <= budget), len(sizes) or 1)


def cut(text: str, length: int) -> str:
    """`text`, or its first `length` characters and an ellipsis."""
    return text if len(text) <= length else f"{text[:length]}…"
