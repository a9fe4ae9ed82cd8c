"""Texts that a folder keeps: after a restart or a kill, with a full disk, damaged, hostile, shared, merged and bounded."""

from __future__ import annotations

import errno
import os
import sqlite3
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from foresay.drafters import Memory
from foresay.drafters.memory import memory
from foresay.drafters.memory.database import NAME, Database
from foresay.drafters.memory.segment import SEPARATOR, Segment, pattern
from foresay.drafters.owners import MOST_SALTS
from foresay.errors import VocabularyMismatchError
from helpers.forks import fork
from helpers.refusals import refused
from helpers.waiting import wait_until

TEXTS = [[1, 2, 3], [7, 8], [1, 2, 4, 5, 6], list(range(30)), [9], [4, 5, 4, 5, 4, 5, 8]]
Open = Callable[..., Memory]


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Open]:
    """Call with texts and options: the memory of the folder "m", or of `name`; it is closed after the test."""
    known: list[Memory] = []

    def open_(texts: list[list[int]] | None = None, *, name: str = "m", **options: Any) -> Memory:
        known.append(filled(tmp_path / name, texts or [], **options))
        return known[-1]

    yield open_
    for one in known:
        one.close()


def ids(tokens: list[int]) -> Any:
    return np.array(tokens, dtype=np.int64)


def kept(one: Memory, owner: str = "") -> list[list[int]]:
    return [text.tolist() for text in one.texts(owner)]


def filled(folder: Path, texts: list[list[int]], **options: Any) -> Memory:
    one = Memory(folder, **options)
    for text in texts:
        one.add("", ids(text))
    one.flush()
    return one


def first(one: Memory, context: list[int], count: int = 3, owner: str = "") -> tuple[int, list[int]]:
    one.prepare(owner)
    one.flush()
    return next(one.continuations(owner, ids(context), count), (0, []))


def database(one: Memory) -> sqlite3.Connection:
    assert one._database is not None
    return one._database._db


def full(*_: Any) -> Any:
    raise sqlite3.OperationalError("database or disk is full")


def test_texts_outlive_the_process(opened: Open, tmp_path: Path) -> None:
    opened(TEXTS).close()
    again = opened()
    assert kept(again) == TEXTS and again.writes
    assert first(again, [0, 1, 2]) == (3, [3, 4, 5]) and first(again, [77]) == (0, [])
    assert first(again, [5, 1, 2, 4]) == (3, [5, 6]), "up to the end of the text"
    again.close()
    assert [path.name for path in (tmp_path / "m").iterdir()] == [NAME]
    private = (tmp_path / "m", tmp_path / "m" / NAME)
    assert all(path.stat().st_mode & 0o077 == 0 for path in private), "texts are private"


def test_without_separators_texts_would_run_together() -> None:
    """Control."""
    whole, *others = [Segment.of(ids(text)) for text in TEXTS]
    for other in others:
        whole = whole.merged(other)
    joined = Segment.build([token for text in TEXTS for token in text][::-1])
    context = pattern(ids([3, 7]))
    assert next(whole.continuations(context, 2))[0] == 1
    assert next(joined.continuations(context, 2)) == (2, [8, 1])
    assert SEPARATOR not in next(whole.continuations(pattern(ids([1, 2])), 9))[1]


BEGIN = "import sys, numpy as np, pathlib, foresay.drafters as d\nm = d.Memory(pathlib.Path(sys.argv[1]))\n"


def test_a_killed_process(opened: Open, tmp_path: Path) -> None:
    """SIGKILL at a random time; what is there afterwards is a beginning of the texts."""
    code = (
        "for i in range(10**9):\n    m.add('', np.array([i % 1000, i // 1000, 5, 6]))\n"
        "    if i % 50 == 49:\n        m.flush()\n        print(i, flush=True)\n"
    )
    (script := tmp_path / "script.py").write_text(BEGIN + code)
    os.mkfifo(pipe := tmp_path / "pipe")
    process = fork([str(script), str(tmp_path / "m")], pipe)
    with open(pipe) as out:
        for _ in range(3):
            last = int(out.readline())
        process.kill()
    process.join()
    texts = kept(opened())
    assert texts == [[i % 1000, i // 1000, 5, 6] for i in range(len(texts))] and len(texts) > last


def test_several_processes_write(opened: Open, tmp_path: Path) -> None:
    """They create the folder at the same time, and each finds the texts of all."""
    code = (
        "for i in range(60):\n    m.add('', np.array([int(sys.argv[2]), i, 5]))\nm.close()\nassert m.problem is None\n"
    )
    (script := tmp_path / "script.py").write_text(BEGIN + code)
    processes = [fork([str(script), str(tmp_path / "m"), str(i)], tmp_path / f"{i}.out") for i in range(2)]
    for process in processes:
        process.join(120)
        assert process.exitcode == 0
    one = opened()
    texts = kept(one)
    assert len(texts) == 120
    assert all([text for text in texts if text[0] == i] == [[i, j, 5] for j in range(60)] for i in range(2))
    opened([[80, 81, 82]])
    one.add("", ids([90]))
    one.flush()
    assert first(one, [80, 81]) == (2, [82]), "with the next text of its own"


@pytest.mark.parametrize("commits", [False, True])
def test_a_change_is_whole_or_not_there(opened: Open, commits: bool) -> None:
    """A process ends after it has written a merged segment, before older ones go; or commits too early (control)."""
    one = opened([[1, 2], [3, 4]])

    def ended(stored: list[Any], new: list[Segment]) -> Iterator[tuple[None, Segment]]:
        yield None, stored[0][1].merged(*new)
        if commits:
            database(one).commit()
        raise KeyboardInterrupt  # no error that is reported and survived

    assert one._database is not None
    with pytest.raises(KeyboardInterrupt):
        one._database.update(*one._database.owners(), {}, [Segment.of(ids([5, 6]))], ended)
    assert (kept(opened()) == [[1, 2], [3, 4]]) != commits


def test_with_a_full_disk_texts_are_kept_in_the_process(opened: Open, caplog: pytest.LogCaptureFixture) -> None:
    one = opened(TEXTS)
    limit = database(one).execute("PRAGMA page_count").fetchone()[0]
    database(one).execute(f"PRAGMA max_page_count = {limit}")
    more = [[100 + i] * 500 for i in range(20)]
    for text in more:
        one.add("", ids(text))
    one.flush()
    assert one.problem is not None and "full" in one.problem and caplog.text.count("no longer keeps texts") == 1
    assert kept(one) == [*TEXTS, *more] and first(one, [0, 1, 2]) == (3, [3, 4, 5])
    other = opened(reads_only=True)
    assert len(kept(other)) < len(TEXTS + more)
    database(one).execute(f"PRAGMA max_page_count = {limit + 1000}")
    one.add("", ids([50, 51]))
    one.flush()
    assert one.problem is None and "keeps texts on the disk again" in caplog.text
    assert kept(one) == kept(other) == [*TEXTS, *more, [50, 51]], "the other process finds them"


@pytest.mark.parametrize("waits", [False, True])
def test_writing_is_resumed_for_owners_that_write_no_more(
    opened: Open, waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a while, or when the memory is closed."""
    monkeypatch.setattr(memory, "RETRY_S", 0.05 if waits else 10.0)
    one = opened()
    with monkeypatch.context() as patched:
        patched.setattr(Database, "update", full)
        for owner in ("a", "b"):
            one.add(owner, ids(TEXTS[0]))
        one.flush()
        assert one.problem is not None
    if waits:
        wait_until(lambda: one.problem is None, "texts to be written")
    one.close()
    again = opened()
    assert [kept(again, owner) for owner in ("a", "b")] == [[TEXTS[0]]] * 2 and len(again.owners()) == 2


def test_memories_are_merged_by_owner_or_not_at_all(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, token in (("a", 5), ("b", 6)):
        one = opened(name=name)
        for owner in ("", "key"):
            one.add(owner, ids([1, 2, token + 10 * bool(owner)]))
        one.close()
    target = opened(name="all")
    assert [target.merge(opened(name=name, reads_only=True)) for name in ("a", "b", "a")] == [2, 2, 0]
    assert kept(target) == [[1, 2, 5], [1, 2, 6]] and kept(target, "key") == [[1, 2, 15], [1, 2, 16]]
    target.close()
    assert first(opened(name="all"), [1, 2], owner="key") == (2, [16])
    source, target = opened(TEXTS[:1], name="source"), opened(name="none")
    monkeypatch.setattr(Database, "update", full)
    with refused("memory"):
        target.merge(source)


def test_no_error_ends_the_thread_that_writes(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    one, real = opened(), Segment.of

    def of(text: Any) -> Segment:
        if 5 in text:
            raise RuntimeError("some error")
        return real(text)

    monkeypatch.setattr(Segment, "of", of)
    for text in ([1, 2], [3, 4], [5]):
        one.add("", ids(text))
    one.flush(20)
    assert kept(one) == [[1, 2], [3, 4]] and one.problem == "RuntimeError: some error"


def test_decoding_does_not_wait_for_the_disk(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first request of a key finds nothing until its texts are read, and does not wait; nor does one that ends."""
    opened(TEXTS).close()
    one, gate, threads = opened(), threading.Event(), set[str]()
    real = Database.update

    def slow(self: Database, *given: Any) -> Any:
        threads.add(threading.current_thread().name)
        assert gate.wait(20)
        return real(self, *given)

    monkeypatch.setattr(Database, "update", slow)
    one.prepare("")
    wait_until(lambda: bool(threads), "the thread to read")
    one.add("", ids([70, 71, 72]))
    for _ in range(1030):  # a queue that is too long drops texts
        one.add("", ids([60, 61]))
    assert not gate.is_set() and one.dropped == 7
    assert [list(one.continuations("", ids(text), 3)) for text in ([0, 1, 2], [70, 71])] == [[], []]
    gate.set()
    assert first(one, [0, 1, 2]) == (3, [3, 4, 5]) and first(one, [70, 71]) == (2, [72])
    assert threads == {"foresay-memory"}


def test_a_folder_that_can_only_be_read(
    opened: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    opened(TEXTS).close()

    def denied(*_: Any) -> int:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(os, "open", denied)
    one = opened([[1]])
    assert not one.writes and one.problem is None and kept(one) == TEXTS and "is only read" in caplog.text
    with refused("memory"):
        Memory(tmp_path / "new")


@pytest.mark.parametrize(("column", "where"), [("tokens", 0), ("tokens", 9), ("suffixes", -1)])
def test_a_damaged_segment_is_dropped(
    opened: Open, column: str, where: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    one = opened([[1] * 40, [2] * 3])
    (row, data), *_ = database(one).execute(f"SELECT id, {column} FROM segments ORDER BY id").fetchall()
    changed = bytearray(data)
    changed[where] ^= 0x55
    database(one).execute(f"UPDATE segments SET {column} = ? WHERE id = ?", (bytes(changed), row))
    one.close()
    again = opened([[5, 5]])
    assert kept(again) == [[2, 2, 2], [5, 5]]
    assert caplog.text.count(f"segment {row} of {tmp_path / 'm' / NAME} is not used") == 1
    assert database(again).execute("SELECT id FROM segments WHERE id = ?", (row,)).fetchall() == []


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE segments SET tokens = x'00', suffixes = x''",
        "UPDATE segments SET tokens = x'', suffixes = x'', checksum = 0",
        "UPDATE segments SET tokens = 'abcd', suffixes = 5",
        "UPDATE segments SET suffixes = x'ffffffff'",
        "UPDATE segments SET checksum = 'a'",
        "UPDATE segments SET id = 9223372036854775807",
        "UPDATE segments SET owner = x'ff'",
        "UPDATE vocabulary SET fingerprint = x'ff'",
        "DELETE FROM vocabulary",
        "DROP INDEX owners",
        "DROP TABLE segments",
        "CREATE TRIGGER t AFTER INSERT ON segments BEGIN SELECT load_extension('x'); END",
        "DROP TABLE vocabulary; CREATE VIEW vocabulary AS SELECT writefile('x', 'y') AS fingerprint",
        "PRAGMA user_version = 9",
        "PRAGMA application_id = 9",
        "PRAGMA journal_mode = DELETE",
    ],
)
def test_hostile_rows_and_tables(opened: Open, statement: str, tmp_path: Path) -> None:
    """They are refused or not used, and nothing that they name is executed."""
    opened([[1, 2, 3]]).close()
    db = sqlite3.connect(tmp_path / "m" / NAME)
    with db:
        db.executescript(statement)
    db.close()
    if statement.startswith(("DROP", "CREATE", "PRAGMA user", "PRAGMA app")):
        with refused("memory") as caught:
            Memory(tmp_path / "m")
        assert str(tmp_path / "m" / NAME) in str(caught.value)
        return
    again = opened([[7, 8]])
    assert again.problem is None and kept(again)[-1] == [7, 8]


@pytest.mark.parametrize("kind", ["text", "another database", "folder"])
def test_files_that_are_no_memory_are_refused(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "m" / NAME
    path.parent.mkdir()
    if kind == "folder":
        path.mkdir()
    elif kind == "text":
        path.write_bytes(b"not a database" * 100)
    else:
        db = sqlite3.connect(path)
        db.execute("CREATE TABLE another (a)")
        db.close()
    before = None if path.is_dir() else path.read_bytes()
    with refused("memory") as caught:
        Memory(tmp_path / "m")
    assert str(path) in str(caught.value) and (path.is_dir() or path.read_bytes() == before)


def test_a_folder_of_another_vocabulary_or_version_or_a_file(opened: Open, tmp_path: Path) -> None:
    opened(fingerprint="a").close()
    with pytest.raises(VocabularyMismatchError, match="texts of another vocabulary"):
        Memory(tmp_path / "m", fingerprint="b")
    (tmp_path / "m" / "memory.json").write_text('{"format": 1, "fingerprint": "a"}')
    (tmp_path / "file").touch()
    for name in ("m", "file"):
        with refused("memory"):
            Memory(tmp_path / name, fingerprint="a")
    with refused("max_tokens", -1):
        Memory(max_tokens=-1)


def test_files_are_bounded(opened: Open, tmp_path: Path) -> None:
    texts = [[i, i + 1, i + 2, i + 3] for i in range(400)]
    one = opened(texts, max_tokens=256)
    found = kept(one)
    assert one.size <= 256 and found == texts[-len(found) :] and len(found) > 20
    one.close()
    assert (tmp_path / "m" / NAME).stat().st_size < 100_000


@pytest.mark.parametrize("has_folder", [False, True])
def test_the_salts_of_one_key_are_few(has_folder: bool, tmp_path: Path) -> None:
    """A client may make as many as it likes: they displace each other, and nothing of another key, or of none."""
    one = Memory(tmp_path / "m" if has_folder else None)
    owners = ["other", "other\nsalt", "key", *(f"key\n{i}" for i in range(MOST_SALTS + 6))]
    for i, owner in enumerate(owners):
        one.add(owner, np.arange(100 * i, 100 * i + 9))
    one.flush()
    found = {int(text[0]) // 100 for texts in one.owners().values() for text in texts}
    assert found == {0, 1, 2, *range(9, len(owners))}
    one.close()
