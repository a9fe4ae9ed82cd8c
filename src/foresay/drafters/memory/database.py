"""The database of a memory: the segments of every owner, in one SQLite file that several processes read and write.

Owns the file, its checks and its transactions. The file may come from anywhere: tables, sizes and checksums are checked, and
nothing that its schema names is executed.
"""

from __future__ import annotations

import logging
import os
import sqlite3
import threading
import zlib
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from foresay.drafters.memory.segment import SEPARATOR, Segment
from foresay.drafters.owners import MOST_SALTS, SALTED
from foresay.errors import ConfigError, VocabularyMismatchError

logger = logging.getLogger("foresay")
NAME = "memory.db"
_FORMAT = 2
_HEADER = {"application_id": 0x4653_4D45, "user_version": _FORMAT}
_WAIT_S = 60.0
"""Wait for another process, which may be merging large segments."""
_MOST_BYTES = 1 << 30
_TABLES = (
    "CREATE TABLE vocabulary (fingerprint TEXT NOT NULL)",
    "CREATE TABLE segments (id INTEGER PRIMARY KEY, owner TEXT NOT NULL, tokens BLOB NOT NULL, suffixes BLOB NOT NULL,"
    " checksum INTEGER NOT NULL)",
    "CREATE INDEX owners ON segments (owner)",
)
Stored = tuple[int | None, Segment]
"""A segment and its row, None if it has none. Rows ascend from the oldest segment to the newest."""


class Database:
    """The file in one folder."""

    def __init__(self, folder: Path, fingerprint: str, *, reads_only: bool) -> None:
        """fingerprint: of the vocabulary. reads_only: True to change nothing. Raises ConfigError, VocabularyMismatchError."""
        self._path, self._lock, self._damaged = folder / NAME, threading.Lock(), set[int]()
        self.writes = not reads_only
        """False if texts cannot be added."""
        self.fingerprint = fingerprint
        """Fingerprint of the tokenizer, or the size of a vocabulary without one."""
        if (folder / "memory.json").exists():
            problem = f"has the format 1, and this version reads {_FORMAT}; move it away"
            raise ConfigError(problem, param="memory", value=folder)
        try:
            self._db = self._opened()
        except (OSError, sqlite3.Error, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            problem = f"cannot be used: {str(self._path)!r}: {reason}; move it away or choose another folder"
            raise ConfigError(problem, param="memory", value=folder) from None
        if fingerprint and self.fingerprint and self.fingerprint != fingerprint:
            self.close()
            text = f"the memory {str(folder)!r} has texts of another vocabulary; choose another folder for this model"
            raise VocabularyMismatchError(text)

    def owners(self) -> list[str]:
        """Return the owners' names. Raises ConfigError if the file cannot be read now."""
        try:
            with self._lock:
                return [name for (name,) in self._db.execute("SELECT DISTINCT owner FROM segments ORDER BY owner")]
        except sqlite3.Error as error:
            raise ConfigError(f"cannot be read: {error}", param="path", value=self._path) from None

    def update(self, owner: str, known: dict[int | None, Segment], new: Sequence[Segment], grown: Any) -> list[Stored]:
        """Return an owner's segments after `grown(segments, new)`, which is written in one transaction.

        known: segments of an earlier call by row, which are not read again. Raises sqlite3.Error, and nothing has changed then.
        """
        with self._lock, self._db:
            self._db.execute("BEGIN IMMEDIATE" if new else "BEGIN")
            rows = [row for (row,) in self._db.execute("SELECT id FROM segments WHERE owner = ? ORDER BY id", (owner,))]
            found = [(row, known.get(row) or self._read(row)) for row in rows]
            stored = [(row, segment) for row, segment in found if segment is not None]
            if new:
                # New rows come before old ones go, so that no number is used twice: other processes know segments by it.
                stored = [(row or self._insert(owner, one), one) for row, one in grown(stored, new)]
                gone = set(rows).difference(row for row, _ in stored) | self._of_old_salts(owner)
                self._db.executemany("DELETE FROM segments WHERE id = ?", [(row,) for row in gone])
            return stored

    def _of_old_salts(self, owner: str) -> set[int]:
        """Return the rows of a key's owners with a salt that are more than MOST_SALTS; those written last stay."""
        of_key = (owner.partition(SALTED)[0] + SALTED + "*",)
        query = "SELECT owner FROM segments WHERE owner GLOB ? GROUP BY owner ORDER BY max(id)"
        names = [name for (name,) in self._db.execute(query, of_key)][:-MOST_SALTS]
        return {
            row for name in names for (row,) in self._db.execute("SELECT id FROM segments WHERE owner = ?", (name,))
        }

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._db.close()

    def _opened(self) -> sqlite3.Connection:
        """Return a connection that reads and writes, else one that reads; the last mode is for a file that is never written."""
        refused: Exception | None = None
        for mode in ("mode=rw", "mode=ro", "mode=ro&immutable=1"):
            try:
                if self.writes:
                    self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)  # texts are private
                    os.close(os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600))
                return self._connected(mode)
            except (OSError, sqlite3.OperationalError) as error:
                refused = refused or error
                if self.writes and self._path.is_file():
                    logger.warning("the memory %s is only read: %s", self._path.parent, error)
                self.writes = False
        assert refused is not None
        raise refused

    def _connected(self, mode: str) -> sqlite3.Connection:
        """Return a connection to a file that was checked, with tables if it is new. Raises sqlite3.Error and ValueError."""
        uri = f"{self._path.absolute().as_uri()}?{mode}"
        db = sqlite3.connect(uri, _WAIT_S, isolation_level=None, check_same_thread=False, uri=True)
        try:
            db.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _MOST_BYTES)
            db.executescript("PRAGMA trusted_schema = OFF; PRAGMA cell_size_check = ON; PRAGMA synchronous = NORMAL")
            with db:
                db.execute("BEGIN IMMEDIATE" if self.writes else "BEGIN")
                tables = "SELECT sql FROM sqlite_schema ORDER BY rowid"
                if self.writes and db.execute(tables).fetchone() is None:
                    for statement in (*_TABLES, *(f"PRAGMA {name} = {value}" for name, value in _HEADER.items())):
                        db.execute(statement)
                    db.execute("INSERT INTO vocabulary VALUES (?)", (self.fingerprint,))
                for name, expected in {**_HEADER, "quick_check(1)": "ok"}.items():
                    if (found := db.execute(f"PRAGMA {name}").fetchone()[0]) != expected:
                        raise ValueError(f"its {name} is {found!r}, and this version reads {expected!r}")
                if tuple(sql for (sql,) in db.execute(tables)) != _TABLES:
                    raise ValueError("its tables are not those of a memory")
                self.fingerprint = str(db.execute("SELECT max(fingerprint) FROM vocabulary").fetchone()[0])
            if self.writes:
                with suppress(sqlite3.OperationalError):  # another process has it open
                    db.execute("PRAGMA journal_mode = WAL")
            db.execute(f"PRAGMA query_only = {not self.writes}")
        except BaseException:
            db.close()
            raise
        return db

    def _insert(self, owner: str, segment: Segment) -> int | None:
        tokens, suffixes = segment.tokens, bytes(segment.order)
        row = (owner, tokens, suffixes, zlib.crc32(suffixes, zlib.crc32(tokens)))
        return self._db.execute("INSERT INTO segments VALUES (NULL, ?, ?, ?, ?)", row).lastrowid

    def _read(self, row: int) -> Segment | None:
        """Return a row's segment, None if it is damaged; such a row goes at the next change."""
        query = "SELECT tokens, suffixes, checksum FROM segments WHERE id = ?"
        tokens, suffixes, checksum = self._db.execute(query, (row,)).fetchone()
        if (
            isinstance(tokens, bytes)
            and isinstance(suffixes, bytes)
            and len(tokens) == len(suffixes) > 0 == len(tokens) % 4
        ):
            is_whole = zlib.crc32(suffixes, zlib.crc32(tokens)) == checksum and tokens[:4] == SEPARATOR.to_bytes(
                4, "big"
            )
            if is_whole and np.frombuffer(suffixes, np.uint32).max() < len(tokens) // 4:
                return Segment(tokens, suffixes)
        if row not in self._damaged:
            logger.warning("segment %d of %s is not used: it is damaged", row, self._path)
            self._damaged.add(row)
        return None
