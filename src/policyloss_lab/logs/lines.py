"""Lines of files of any size, in bounded memory and time."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import BinaryIO

MIB = 2**20
LINE_BYTES = 16 * MIB  # of one line: about 100,000 tokens with all their numbers
LEAST_LINE = MIB // 4  # what is read for a line of a part, however small the parts are


class Lines:
    """The lines of `file` with their offsets.

    A file of more than `budget` bytes is read in `parts` that are evenly spaced, the first and the
    last line among them; each part consists of lines that follow each other. size: of the file.
    sampled: whether parts are read. longest: the bytes of a line that is still read. long: how many
    lines were longer, and left out. number: how many lines were read so far.
    """

    def __init__(self, file: BinaryIO, budget: int, parts: int) -> None:
        self._file, self._parts = file, parts
        self.size = os.fstat(file.fileno()).st_size
        self.sampled = self.size > budget
        self._room = budget // parts
        self.longest = LINE_BYTES
        if self.sampled:
            self.longest = min(LINE_BYTES, max(self._room, LEAST_LINE))
            if hasattr(os, "posix_fadvise"):  # else the system reads far ahead of every part
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        self.long = self.number = 0

    def __iter__(self) -> Iterator[tuple[int, bytes]]:
        if not self.sampled:
            yield from self._lines(0, self.size)
            return
        for part in range(self._parts):
            start = part * (self.size - self._room) // (self._parts - 1)
            if start == 0 or self._skip_rest(start):
                yield from self._lines(self._file.tell() if start else 0, start + self._room)

    def _lines(self, offset: int, end: int) -> Iterator[tuple[int, bytes]]:
        """The lines that begin at `offset` or later, and before `end`."""
        self._file.seek(offset)
        while offset < end and (line := self._file.readline(self.longest + 1)):
            self.number += 1
            length = len(line)
            if length > self.longest and not line.endswith(b"\n"):
                self.long += 1
                length += self._skipped(end - offset - length)
            else:
                yield offset, line
            offset += length

    def _skip_rest(self, start: int) -> bool:
        """Go to the first line that begins at `start` or later; whether it is near enough."""
        self._file.seek(start - 1)
        return self._file.readline(self.longest).endswith(b"\n")

    def _skipped(self, limit: int) -> int:
        """Read to the end of a line, or about `limit` bytes; returns how many bytes were read."""
        skipped = 0
        while skipped < limit and (piece := self._file.readline(MIB)):
            skipped += len(piece)
            if piece.endswith(b"\n"):
                break
        return skipped
