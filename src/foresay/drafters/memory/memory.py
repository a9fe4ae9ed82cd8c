"""Earlier texts of every owner, which drafters copy from.

Texts of one owner are never drafts of another. With a folder, one process writes and others read; a thread does the writing, so
that decoding does not wait for the disk.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from queue import Empty, SimpleQueue
from time import monotonic
from typing import Any

from foresay.checks import check_int
from foresay.decoding.rows import IntArray
from foresay.drafters.memory.segment import pattern
from foresay.drafters.memory.store import RETRY_S, Store
from foresay.errors import ConfigError, VocabularyMismatchError
from foresay.files import atomic_write, remove_stale
from foresay.json_files import Schema, read_limited

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

logger = logging.getLogger("foresay")
MAX_TOKENS = 1 << 25
"""Default bound on a folder's tokens of each owner: 256 MiB of files."""
_REFRESH_S = 1.0
_MAX_QUEUED = 1024
"""Texts that may wait to be written."""
_FORMAT = 1
_FACTS, _OWNERS, _LOCK = "memory.json", "owners", "lock"


@dataclass(frozen=True, slots=True)
class _Facts:
    format: int
    fingerprint: str
    """Fingerprint of the tokenizer, or the size of a vocabulary without one."""


_SCHEMA: Schema[_Facts] = Schema(_Facts, "the description of a memory")


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
        self._stores: dict[str, Store] = {}
        self._lock = threading.Lock()
        self._queue: SimpleQueue[Any] = SimpleQueue()
        self._worker: threading.Thread | None = None
        self._lock_file: int | None = None
        self.closed = False
        self._reads_only = reads_only
        self.writes = not reads_only
        """False if another process writes to the folder."""
        if self.folder is not None:
            try:
                self._open(self.folder, fingerprint)
            except BaseException:
                self.close()
                raise
        self._refreshed = monotonic()

    @staticmethod
    def shared(folder: Path, max_tokens: int, fingerprint: str) -> Memory:
        """Return the memory of a folder that this process has open, or open it. Raises as the constructor does."""
        path = folder.expanduser().resolve()
        with _opening:
            found = _opened.get(path)
            if found is None or found.closed:
                found = _opened[path] = Memory(path, max_tokens, fingerprint=fingerprint)
            found._check(path, fingerprint)
            if found.max_tokens != max_tokens:
                text = f"this process has opened the memory {str(path)!r} with max_tokens={found.max_tokens}, not {max_tokens}"
                raise ConfigError(text)
        return found

    def _open(self, folder: Path, fingerprint: str) -> None:
        for path, is_folder in (
            (folder, True),
            (folder / _OWNERS, True),
            (folder / _FACTS, False),
            (folder / _LOCK, False),
        ):
            if path.exists() and path.is_dir() != is_folder:
                kinds = ("a file", "a folder") if is_folder else ("a folder", "a file")
                text = f"cannot use the memory {str(folder)!r}: {str(path)!r} is {kinds[0]} and must be {kinds[1]}"
                raise ConfigError(f"{text}; move it away")
        if self.writes:
            self._lock_folder(folder)
        try:
            facts = _SCHEMA.read(read_limited(folder / _FACTS), str(folder / _FACTS))
        except FileNotFoundError:
            if not self.writes:
                raise ConfigError(
                    f"the memory {str(folder)!r} is being created by another process; try again"
                ) from None
            facts = _Facts(_FORMAT, fingerprint)
            with atomic_write(folder / _FACTS) as path:
                path.write_text(f'{{"format": {_FORMAT}, "fingerprint": "{fingerprint}"}}\n', encoding="utf-8")
        if facts.format != _FORMAT:
            raise ConfigError(f"the memory {str(folder)!r} has the format {facts.format}; this version reads {_FORMAT}")
        self.fingerprint = facts.fingerprint
        self._check(folder, fingerprint)

    def _lock_folder(self, folder: Path) -> None:
        """Become the process that writes to the folder, unless another one does or the folder can only be read."""
        why = "another process writes to it"
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # texts are private
            self._lock_file = _locked(folder)
        except OSError as error:
            why = error.strerror or str(error)
            if not (folder / _FACTS).is_file():
                raise ConfigError(f"cannot use the memory {str(folder)!r}: {why}") from None
        self.writes = self._lock_file is not None
        if self.writes:
            self._sweep(folder)
        else:
            logger.warning("the memory %s is only read: %s", folder, why)

    def _sweep(self, folder: Path) -> None:
        """Remove what killed processes have left: this process alone writes to the folder."""
        with suppress(OSError):
            for one in (folder, *(folder / _OWNERS).glob("*/")):
                remove_stale(one, age_s=0.0)

    def _check(self, folder: Path, fingerprint: str) -> None:
        if fingerprint and self.fingerprint and self.fingerprint != fingerprint:
            text = f"the memory {str(folder)!r} has texts of another vocabulary; choose another folder for this model"
            raise VocabularyMismatchError(text)

    def continuations(self, owner: str, context: IntArray, count: int) -> Iterator[tuple[int, list[int]]]:
        """Yield (length of a match, up to `count` tokens after it) for suffixes of a context in an owner's texts.

        Longest first within each segment, and the longest of all first.
        """
        store = self._stores.get(_folder_name(owner))
        given = pattern(context)
        streams = [one.continuations(given, count) for one in reversed(store.segments if store is not None else ())]
        firsts = [(first, stream) for stream in streams if (first := next(stream, None)) is not None]
        for first, stream in sorted(firsts, key=lambda one: -one[0][0]):
            yield first
            yield from stream

    def prepare(self, owner: str) -> None:
        """Read an owner's texts soon, so that decoding does not wait for the disk; `flush` waits for it."""
        if self.folder is not None and _folder_name(owner) not in self._stores:
            self._start()
            self._queue.put((owner, None))

    def add(self, owner: str, tokens: IntArray) -> None:
        """Add a text. With a folder a thread adds it soon; `flush` waits for it."""
        if len(tokens) == 0 or self.max_tokens < 2:
            return
        tokens = tokens[-(self.max_tokens // 2) :]
        if self.folder is None:
            store = self._store(owner)
            with self._lock:
                store.add(tokens)
            return
        if self._queue.qsize() >= _MAX_QUEUED:
            self.dropped += 1
            return
        self._start()
        self._queue.put((owner, tokens.copy()))

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
                self._stores = {}

    def close(self) -> None:
        """Wait until added texts are kept, and let other processes write."""
        self.flush()
        self.closed = True
        for store in self._stores.values():
            store.retry(now=True)
            store.close()
        if self._lock_file is not None:
            os.close(self._lock_file)
            self._lock_file = None

    @property
    def size(self) -> int:
        """Tokens of all owners that were used so far, separators included."""
        return sum(store.size for store in list(self._stores.values()))

    @property
    def num_bytes(self) -> int:
        """Bytes of these tokens and their index."""
        return 8 * self.size

    def owners(self) -> Iterator[tuple[str, Store]]:
        """Yield the folder's owners, by the names of their folders, with their texts."""
        assert self.folder is not None
        for path in sorted((self.folder / "owners").glob("*")):
            if path.is_dir():
                yield path.name, Store(path, self.max_tokens, writes=False)

    def merge(self, other: Memory) -> int:
        """Add the texts of another memory that this one lacks, by owner; return their number. Raises ConfigError."""
        count = 0
        for name, theirs in other.owners():
            store = self._named(name)
            known = {text.tobytes() for text in store.texts()}
            for text in theirs.texts():
                if text.tobytes() not in known:
                    known.add(text.tobytes())
                    store.add(text.astype("int64"))
                    count += 1
            if store.problem is not None:
                raise ConfigError(f"cannot write the memory {str(self.folder)!r}: {store.problem}")
        return count

    def _store(self, owner: str) -> Store:
        """Return an owner's texts."""
        return self._named(_folder_name(owner))

    def _named(self, name: str) -> Store:
        store = self._stores.get(name)
        if store is None:
            folder = None if self.folder is None else self.folder / _OWNERS / name
            with self._lock:
                store = self._stores.get(name) or Store(folder, self.max_tokens, writes=self.writes)
                self._stores[name] = store
        return store

    def _start(self) -> None:
        with self._lock:
            if self._worker is None:
                self._worker = threading.Thread(target=self._work, name="foresay-memory", daemon=True)
                self._worker.start()

    def _work(self) -> None:
        while True:
            try:
                item = self._queue.get(timeout=RETRY_S if self.problem is not None else None)
                if isinstance(item, threading.Event):
                    item.set()
                else:
                    self._add(*item)
            except Empty:
                for store in list(self._stores.values()):
                    self._changed(store, store.retry)
            except Exception as error:  # a thread that ends would keep every later text in the queue
                self._has_problem(f"{type(error).__name__}: {error}")

    def _changed(self, store: Store, change: Callable[[], None]) -> None:
        """Change an owner's store, and note whether its texts are written."""
        before = store.problem
        change()
        if store.problem is not None:
            self._has_problem(store.problem)
        elif before is not None and all(one.problem is None for one in self._stores.values()):
            logger.warning("the memory keeps texts on the disk again")
            self.problem = None

    def _take_over(self) -> None:
        """Become the process that writes if the one that did has ended."""
        assert self.folder is not None
        with suppress(OSError):
            self._lock_file = _locked(self.folder)
        if self._lock_file is not None:
            logger.warning("this process writes to the memory %s now", self.folder)
            self._sweep(self.folder)
            with self._lock:
                self.writes, self._stores = True, {}

    def _has_problem(self, problem: str) -> None:
        if self.problem is None:
            logger.warning("the memory no longer keeps texts on the disk: %s", problem)
        self.problem = problem

    def _add(self, owner: str, tokens: IntArray | None) -> None:
        if tokens is None:
            self._store(owner)
            return
        if not self.writes and not self._reads_only and monotonic() > self._refreshed + _REFRESH_S:
            self._take_over()
        if self.writes:
            store = self._store(owner)
            self._changed(store, lambda: store.add(tokens))
        elif monotonic() > self._refreshed + _REFRESH_S:
            self._refreshed = monotonic()
            for store in list(self._stores.values()):
                store.refresh()


@lru_cache(maxsize=1024)
def _folder_name(owner: str) -> str:
    return sha256(f"foresay memory {owner}".encode()).hexdigest()[:32]


_opened: dict[Path, Memory] = {}
_opening = threading.Lock()


def _locked(folder: Path) -> int | None:
    """Return a descriptor with the folder's lock, None if another process has it. Raises OSError."""
    descriptor = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    if fcntl is not None:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return None
        except OSError:  # a file system without locks
            with suppress(OSError):
                os.close(descriptor)
            raise
    return descriptor
