"""One owner's texts: small segments of recent texts, merged into larger ones as they grow (a log-structured merge tree).

With a folder, recent texts are also in a log, and segments from SPILL tokens on are files that processes share by memory mapping.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from time import monotonic

import numpy as np

from foresay.decoding.rows import IntArray
from foresay.drafters.memory.files import Files
from foresay.drafters.memory.segment import SEPARATOR, Segment, Tokens, merged
from foresay.errors import ConfigError

SPILL = 1 << 15
"""Tokens of recent texts that become a file."""
RETRY_S = 10.0
"""Pause after a failed write."""
_GROWTH = 2
"""Segments are merged while the older one is at most this many times the newer."""


class Store:
    """Texts of one owner. One thread changes it; others read `segments`."""

    def __init__(self, folder: Path | None, max_tokens: int, *, writes: bool = True) -> None:
        """folder: where texts are kept; None keeps them in memory. max_tokens: bound; the oldest texts are dropped.

        writes: False to read what another process writes. A folder that cannot be used is a `problem`: texts are then kept in
        memory.
        """
        self._max_tokens = max_tokens
        self._writes, self._spill_tokens = writes, min(SPILL, max(1, max_tokens // 4))
        self.problem: str | None = None
        """Why texts are not written to the folder now."""
        self._folder = folder
        self._unwritten: list[Tokens] = []
        """Texts that the folder lacks, the oldest first; written once that succeeds."""
        self._retry_at = 0.0
        self._files: Files | None = None
        self._seen = 0
        """Size of the log when it was read, in bytes."""
        self._stored: list[Segment] = []
        self._recent: list[Segment] = []
        self.segments: tuple[Segment, ...] = ()
        """All segments, oldest first."""
        try:
            self._files = None if folder is None else Files(folder, writes=writes)
            self._read()
        except (OSError, ConfigError) as error:
            self._stop_writing(error)
            self._publish()

    @property
    def size(self) -> int:
        """Tokens, separators included."""
        return sum(one.size for one in self.segments)

    def add(self, tokens: IntArray) -> None:
        """Add a text. While it cannot be written, see `problem`, this text and later ones are kept in memory."""
        assert self._writes
        text = ended(tokens)
        self.retry()
        if self._files is not None:
            try:
                self._files.append(text)
            except OSError as error:
                self._stop_writing(error)
        if self._files is None and self._folder is not None:
            self._unwritten.append(text)
            while sum(map(len, self._unwritten)) > self._max_tokens:
                del self._unwritten[0]
        self._keep_recent(text)
        self._publish()
        if sum(one.size for one in self._recent) >= self._spill_tokens:
            self._spill()

    def retry(self, *, now: bool = False) -> None:
        """Write what the folder lacks if that failed some time ago, or now."""
        if self._writes and self._files is None and self._folder is not None and (now or monotonic() >= self._retry_at):
            self._write_again(self._folder)

    def texts(self) -> Iterator[Tokens]:
        """Yield the texts, oldest first, each without its separator."""
        for segment in self.segments:
            text = segment.text()
            ends = np.flatnonzero(text == SEPARATOR)
            for start, end in zip([0, *(ends[:-1] + 1)], ends, strict=True):
                yield text[start:end]

    def refresh(self) -> None:
        """Read what another process has written since. Nothing changes if it cannot be read now."""
        if self._files is not None:
            with suppress(OSError, ConfigError):
                if self._files.read_list() or self._files.log_size() != self._seen:
                    self._read()

    def close(self) -> None:
        """Drop the texts, and write no more."""
        self._files, self._folder, self._stored, self._recent = None, None, [], []
        self._publish()

    def _read(self) -> None:
        if self._files is not None:
            self._stored, self._recent = self._files.segments(), []
            self._seen = self._files.log_size()
            for text in self._files.log():
                self._keep_recent(text)
        self._publish()

    def _keep_recent(self, text: Tokens) -> None:
        self._recent.append(Segment.build(text))
        while len(self._recent) > 1 and self._recent[-2].size <= _GROWTH * self._recent[-1].size:
            self._recent[-2:] = [merged(self._recent[-2:])]

    def _spill(self) -> None:
        """Turn the recent texts into a stored segment, merge stored segments of similar sizes, and drop the oldest ones."""
        segments = [*self._stored, merged(self._recent)]
        names: list[str | None] = [
            *(self._files.names if self._files is not None else [None] * len(self._stored)),
            None,
        ]
        most = max(self._spill_tokens, self._max_tokens // 8)
        while len(segments) > 1 and segments[-2].size <= _GROWTH * segments[-1].size:
            if segments[-2].size + segments[-1].size > most:
                break
            segments[-2:], names[-2:] = [merged(segments[-2:])], [None]
        while len(segments) > 1 and sum(one.size for one in segments) > self._max_tokens - self._spill_tokens:
            del segments[0], names[0]
        if self._files is not None:
            try:
                self._files.replace_list(
                    [name or self._files.write(one) for name, one in zip(names, segments, strict=True)]
                )
                with suppress(OSError):  # those in memory are the same
                    segments = self._files.segments()
            except (OSError, ConfigError) as error:
                self._stop_writing(error)
        self._stored, self._recent = segments, []
        self._publish()

    def _stop_writing(self, error: Exception) -> None:
        self.problem, self._files, self._retry_at = str(error), None, monotonic() + RETRY_S

    def _write_again(self, folder: Path) -> None:
        """Write what the folder lacks; it has every text that was added before the first failure."""
        try:
            files = Files(folder, writes=True)
            while self._unwritten:
                files.append(self._unwritten[0])
                del self._unwritten[0]
            self._files = files
            self._read()
            self.problem = None
        except (OSError, ConfigError) as error:
            self._stop_writing(error)
            self._publish()

    def _publish(self) -> None:
        self.segments = (*self._stored, *self._recent)


def ended(tokens: IntArray) -> Tokens:
    """Return a text with its separator."""
    return np.concatenate([tokens.astype(np.uint32), [np.uint32(SEPARATOR)]]).astype(np.uint32)
