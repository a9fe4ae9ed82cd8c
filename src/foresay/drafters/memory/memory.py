"""Earlier texts of every owner, which drafters copy from.

Texts of one owner are never drafts of another. With a folder, a thread reads and writes its database, so that decoding does not
wait for the disk; lookups use the segments in this process.
"""

from __future__ import annotations

import logging
import sqlite3
import threading
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from hashlib import sha256
from itertools import takewhile
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np

from foresay.checks import check_int
from foresay.decoding.rows import IntArray
from foresay.drafters.memory.database import Database, Stored
from foresay.drafters.memory.segment import Segment, Tokens, pattern
from foresay.drafters.owners import SALTED, keep
from foresay.errors import ConfigError

logger = logging.getLogger("foresay")
MAX_TOKENS = 1 << 25
"""Default bound on a folder's tokens of each owner: 256 MiB."""
RETRY_S = 10.0
"""Pause after a failed write."""
_MAX_QUEUED = 1024
"""Texts that may wait to be written."""
_SPILL = 1 << 15
"""Tokens of recent texts that become one segment."""
_GROWTH = 2
"""Segments are merged while the older one is at most this many times the newer."""


class Memory:
    """Earlier texts by owner."""

    def __init__(
        self,
        folder: Path | None = None,
        max_tokens: int = MAX_TOKENS,
        *,
        fingerprint: str = "",
        reads_only: bool = False,
    ) -> None:
        """folder: where texts are kept, created if missing; None keeps them in this process.

        max_tokens: bound on the texts of an owner; 0 keeps nothing. fingerprint: of the vocabulary of the texts' ids. reads_only:
        True to change nothing. Raises ConfigError for a folder that cannot be used, and VocabularyMismatchError for one of
        another vocabulary.
        """
        self.max_tokens = check_int("max_tokens", max_tokens, 0, 1 << 30)
        self.folder = None if folder is None else folder.expanduser()
        self.drafts = self.accepted = 0
        """Drafts from earlier texts, and their tokens that were accepted."""
        self.dropped = 0
        """Texts that were not kept because the disk was too slow."""
        self.problem: str | None = None
        """Why texts are no longer written, if they are not."""
        self._segments: dict[str, list[Stored]] = {}
        self._lock = threading.Lock()
        self._queue: SimpleQueue[Any] = SimpleQueue()
        self._worker: threading.Thread | None = None
        self._database = None if self.folder is None else Database(self.folder, fingerprint, reads_only=reads_only)
        self.fingerprint = fingerprint if self._database is None else self._database.fingerprint
        self.writes = self._database is None or self._database.writes
        """False if the folder can only be read."""

    def continuations(self, owner: str, context: IntArray, count: int) -> Iterator[tuple[int, list[int]]]:
        """Yield (length of a match, up to `count` tokens after it) for suffixes of a context in an owner's texts.

        Longest first within each segment, and the longest of all first.
        """
        given = pattern(context)
        streams = [one.continuations(given, count) for _, one in reversed(self._segments.get(_name(owner), ()))]
        firsts = [(first, stream) for stream in streams if (first := next(stream, None)) is not None]
        for first, stream in sorted(firsts, key=lambda one: -one[0][0]):
            yield first
            yield from stream

    def prepare(self, owner: str) -> None:
        """Read an owner's texts soon, so that decoding does not wait for the disk; `flush` waits for it."""
        if self.folder is not None and _name(owner) not in self._segments:
            self._start()
            self._queue.put((_name(owner), None))

    def add(self, owner: str, tokens: IntArray) -> None:
        """Add a text. With a folder a thread adds it soon; `flush` waits for it."""
        if len(tokens) == 0 or self.max_tokens < 2:
            return
        text = tokens[-(self.max_tokens // 2) :].copy()
        if self.folder is None:
            self._update(_name(owner), text)
        elif self._queue.qsize() >= _MAX_QUEUED:
            self.dropped += 1
        else:
            self._start()
            self._queue.put((_name(owner), text))

    def flush(self, limit_s: float | None = None) -> None:
        """Wait until added texts are kept, at most limit_s seconds."""
        if self._worker is not None:
            done = threading.Event()
            self._queue.put(done)
            done.wait(limit_s)

    def clear(self) -> None:
        """Forget texts that are kept in this process; those in a folder stay."""
        if self.folder is None:
            with self._lock:
                self._segments = {}

    def close(self) -> None:
        """Wait until added texts are kept, and close the folder."""
        self.flush()
        if self._worker is not None:
            self._queue.put(None)
            self._worker.join()
            self._worker = None
        self._retry()
        self._segments = {}
        if self._database is not None:
            self._database.close()

    @property
    def size(self) -> int:
        """Tokens of all owners that were used so far, separators included."""
        return sum(one.size for segments in list(self._segments.values()) for _, one in segments)

    @property
    def num_bytes(self) -> int:
        """Bytes of these tokens and their index."""
        return 8 * self.size

    def texts(self, owner: str) -> list[Tokens]:
        """Return an owner's texts, oldest first."""
        return self.owners([_name(owner)])[_name(owner)]

    def owners(self, names: Iterable[str] | None = None) -> dict[str, list[Tokens]]:
        """Return the texts of each owner, oldest first, by the names under which owners are stored."""
        if names is None:
            names = list(self._segments) if self._database is None else self._database.owners()
        return {name: [text for _, one in self._update(name) for text in one.texts()] for name in names}

    def merge(self, other: Memory) -> int:
        """Add the texts of another memory that this one lacks, by owner; return their number. Raises ConfigError."""
        count = 0
        for name, texts in other.owners().items():
            known = {text.tobytes() for text in self.owners([name])[name]}
            for text in texts:
                if text.tobytes() not in known:
                    known.add(text.tobytes())
                    self._update(name, text.astype(np.int64))
                    count += 1
                if self.problem is not None:
                    raise ConfigError(f"cannot be written: {self.problem}", param="memory", value=self.folder)
        return count

    def _start(self) -> None:
        if self._worker is None:  # else the lock may be taken by the thread for as long as the disk takes
            with self._lock:
                if self._worker is None:
                    self._worker = threading.Thread(target=self._work, name="foresay-memory", daemon=True)
                    self._worker.start()

    def _work(self) -> None:
        while True:
            try:
                item = self._queue.get(timeout=None if self.problem is None else RETRY_S)
                if item is None:
                    return
                if isinstance(item, threading.Event):
                    item.set()
                else:
                    self._update(*item)
            except Empty:
                self._retry()
            except Exception as error:  # a thread that ends would keep every later text in the queue
                self._has_problem(f"{type(error).__name__}: {error}")

    def _retry(self) -> None:
        """Write the texts that the folder lacks."""
        for name, segments in list(self._segments.items()):
            if self._database is not None and any(row is None for row, _ in segments):
                self._update(name)

    def _update(self, name: str, text: IntArray | None = None) -> list[Stored]:
        """Read an owner's segments, add a text, and return them. Texts that cannot be written now are segments without rows."""
        with self._lock:
            known = self._segments.get(name, [])
            new = [one for row, one in known if row is None]
            if text is not None and self.writes:
                new.append(Segment.of(text))
            if self._database is not None:
                try:
                    stored = self._database.update(name, dict(known), new, self._grown)
                except sqlite3.Error as error:
                    self._has_problem(str(error))
                    stored = [one for one in known if one[0] is not None] + self._grown([], new)
            else:
                stored = self._grown([], new)
            keep(self._segments, name, stored)
            if new and self.problem and all(row for segments in self._segments.values() for row, _ in segments):
                logger.warning("the memory keeps texts on the disk again")
                self.problem = None
            return stored

    def _grown(self, stored: list[Stored], new: Sequence[Segment]) -> list[Stored]:
        """Return an owner's segments with new ones. Recent ones are small; together they become one of at least `spill` tokens.

        Segments of similar sizes are merged, and the oldest ones go.
        """
        out, spill = list(stored), min(_SPILL, max(1, self.max_tokens // 4))
        most = max(spill, self.max_tokens // 8)
        for newer in new:
            while out and out[-1][1].size < min(spill, _GROWTH * newer.size + 1):
                newer = out.pop()[1].merged(newer)
            recent = sum(one.size for _, one in takewhile(lambda pair: pair[1].size < spill, reversed(out)))
            is_spilled = recent + newer.size >= spill
            while is_spilled and out:
                older = out[-1][1].size
                if older >= spill and (older > _GROWTH * newer.size or older + newer.size > most):
                    break
                newer = out.pop()[1].merged(newer)
            out.append((None, newer))
            while is_spilled and len(out) > 1 and sum(one.size for _, one in out) > self.max_tokens - spill:
                del out[0]
        return out

    def _has_problem(self, problem: str) -> None:
        if self.problem is None:
            logger.warning("the memory no longer keeps texts on the disk: %s", problem)
        self.problem = problem


@lru_cache(maxsize=1024)
def _name(owner: str) -> str:
    """Return the name under which an owner, who may be an API key with a salt, is stored."""
    return SALTED.join(sha256(f"foresay memory {one}".encode()).hexdigest()[:32] for one in owner.split(SALTED))
