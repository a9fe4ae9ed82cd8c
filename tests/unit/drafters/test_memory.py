"""Texts that a folder keeps: after a restart or a kill at any write, with a full disk, damaged, shared, merged and bounded."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foresay.drafters import Memory
from foresay.drafters.memory import files, memory, store
from foresay.drafters.memory.segment import SEPARATOR, Segment, pattern
from foresay.drafters.memory.store import Store, ended
from foresay.errors import ConfigError, VocabularyMismatchError
from helpers.waiting import wait_until

TEXTS = [[1, 2, 3], [7, 8], [1, 2, 4, 5, 6], list(range(30)), [9], [4, 5, 4, 5, 4, 5, 8]]


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "SPILL", 16)


def ids(tokens: list[int]) -> Any:
    return np.array(tokens, dtype=np.int64)


def kept(one: Memory, owner: str = "") -> list[list[int]]:
    return [text.tolist() for text in one._store(owner).texts()]


def filled(folder: Path, texts: list[list[int]] = TEXTS, **options: Any) -> Memory:
    one = Memory(folder, **options)
    for text in texts:
        one.add("", ids(text))
    one.flush()
    return one


def first(one: Memory, context: list[int], count: int = 3, owner: str = "") -> tuple[int, list[int]]:
    one.prepare(owner)
    one.flush()
    return next(one.continuations(owner, ids(context), count), (0, []))


def test_texts_outlive_the_process(tmp_path: Path) -> None:
    filled(tmp_path / "m").close()
    again = Memory(tmp_path / "m")
    assert kept(again) == TEXTS and again.writes
    assert first(again, [0, 1, 2]) == (3, [3, 4, 5])
    assert first(again, [5, 1, 2, 4]) == (3, [5, 6]), "up to the end of the text"
    assert first(again, [77]) == (0, [])
    names = {path.suffix for path in (tmp_path / "m" / "owners").rglob("*") if path.is_file()}
    assert names == {".segment", ".log", ".json"}


@given(
    st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=30), max_size=12), st.lists(st.integers(0, 3), max_size=9)
)
@settings(max_examples=60, deadline=None)
def test_the_longest_match_is_found_in_any_files(
    tmp_path_factory: pytest.TempPathFactory, texts: list[list[int]], context: list[int]
) -> None:
    one = filled(tmp_path_factory.mktemp("m"), texts)
    assert kept(one) == texts
    found = [
        (n, text[end : end + 2])
        for text in texts
        for n in range(1, len(context) + 1)
        for end in range(n, len(text))
        if text[end - n : end] == context[-n:]
    ]
    longest = max((n for n, _ in found), default=0)
    length, tokens = first(one, context, 2)
    assert length == longest and (tokens in [after for n, after in found if n == longest] or not found)
    one.close()


def test_without_separators_texts_would_run_together() -> None:
    """Control."""
    whole = Segment.build(np.concatenate([ended(ids(text)) for text in TEXTS]))
    joined = Segment.build(np.array([token for text in TEXTS for token in text], dtype=np.uint32))
    context = pattern(ids([3, 7]))
    assert next(whole.continuations(context, 2))[0] == 1
    assert next(joined.continuations(context, 2)) == (2, [8, 1])
    assert SEPARATOR not in next(whole.continuations(pattern(ids([1, 2])), 9))[1]


def test_a_log_cut_anywhere_keeps_its_whole_texts(tmp_path: Path) -> None:
    filled(tmp_path / "m", [[1, 2], [3], [4, 5, 6]]).close()
    (log,) = (tmp_path / "m").rglob("*.log")
    data, ends = log.read_bytes(), []
    for text in ([1, 2], [3], [4, 5, 6]):
        ends.append((ends[-1] if ends else 0) + 8 + 4 * (len(text) + 1))
    assert ends[-1] == len(data)
    for size in range(len(data)):
        log.write_bytes(data[:size])
        again = filled(tmp_path / "m", [[9, 9]])
        assert kept(again) == [*[[1, 2], [3], [4, 5, 6]][: sum(end <= size for end in ends)], [9, 9]]
        again.close()
        log.write_bytes(data)


class Killed(BaseException):
    """The process ends here."""


class Budget:
    """Calls that change files, of which the last one does not happen."""

    def __init__(self, patched: pytest.MonkeyPatch, last: int) -> None:
        self._left = last
        for owner, name in ((os, "replace"), (os, "truncate"), (Path, "unlink"), (files.Files, "append")):
            patched.setattr(owner, name, self._limited(getattr(owner, name)))

    def _limited(self, real: Any) -> Any:
        def call(*given: Any, **named: Any) -> Any:
            self._left -= 1
            if self._left == 0:
                raise Killed
            return real(*given, **named)

        return call


def test_a_kill_between_any_two_writes_loses_no_earlier_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call that changes a file is the last one in turn; then a new process opens the folder."""
    tried = 0
    for last in range(1, 200):
        folder = tmp_path / str(last)
        folder.mkdir()
        one, done = Store(folder, 1000), list[list[int]]()
        with monkeypatch.context() as patched, contextlib.suppress(Killed):
            Budget(patched, last)
            for text in TEXTS * 2:
                one.add(ids(text))
                done.append(text)
        again = [text.tolist() for text in Store(folder, 1000).texts()]
        assert again[: len(done)] == done and len(again) <= len(done) + 1, last
        if len(done) == len(TEXTS) * 2:
            break
        tried += 1
    assert tried > 20


def test_a_list_that_is_replaced_too_early_would_lose_texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: the log is dropped before the list names the segment that has its texts."""

    def early(self: files.Files, names: list[str]) -> None:
        (self.folder / self._log_name).unlink()
        raise Killed

    monkeypatch.setattr(files.Files, "replace_list", early)
    one = Store(tmp_path, 1000)
    with contextlib.suppress(Killed):
        for text in TEXTS:
            one.add(ids(text))
    assert len(list(Store(tmp_path, 1000).texts())) == 0


def test_a_killed_process(tmp_path: Path) -> None:
    """SIGKILL at a random time; what is there afterwards is a beginning of the texts."""
    code = (
        "import sys, numpy as np\nfrom pathlib import Path\nfrom foresay.drafters import Memory\n"
        "from foresay.drafters.memory import store\nstore.SPILL = 64\nm = Memory(Path(sys.argv[1]))\n"
        "for i in range(10**9):\n    m.add('', np.array([i % 1000, i // 1000, 5, 6]))\n"
        "    if i % 50 == 49:\n        m.flush()\n        print(i, flush=True)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "m")], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        for _ in range(3):
            last = int(process.stdout.readline())
        process.send_signal(signal.SIGKILL)
        process.wait()
    again = Memory(tmp_path / "m")
    texts = kept(again)
    assert texts == [[i % 1000, i // 1000, 5, 6] for i in range(len(texts))] and len(texts) > last
    again.close()


@pytest.mark.parametrize("failing", ["append", "write", "replace_list"])
def test_a_full_disk_ends_the_writing_and_nothing_else(
    failing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*given: Any, **named: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(files.Files, failing, full)
    with caplog.at_level(logging.WARNING, "foresay"):
        one = filled(tmp_path / "m", TEXTS * 3)
    assert one.problem is not None and "No space left" in one.problem
    assert len([1 for record in caplog.records if "no longer keeps texts" in record.message]) == 1
    assert kept(one) == TEXTS * 3, "they are in memory"
    assert first(one, [0, 1, 2]) == (3, [3, 4, 5])
    one.close()


@pytest.mark.parametrize("failing", ["append", "write", "replace_list"])
def test_writing_is_resumed_when_the_disk_has_room_again(
    failing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*given: Any, **named: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(store, "RETRY_S", 0.0)
    with monkeypatch.context() as patched:
        patched.setattr(files.Files, failing, full)
        one = filled(tmp_path / "m", TEXTS * 2)
        assert one.problem is not None and kept(one) == TEXTS * 2
    one.add("", ids([50, 51]))
    one.flush()
    assert one.problem is None and kept(one) == [*TEXTS * 2, [50, 51]]
    assert caplog.text.count("no longer keeps texts") == 1 and "keeps texts on the disk again" in caplog.text
    one.close()
    again = Memory(tmp_path / "m")
    assert kept(again) == [*TEXTS * 2, [50, 51]]
    again.close()


@pytest.mark.parametrize("waits", [False, True])
def test_writing_is_resumed_for_owners_that_write_no_more(
    waits: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a while, or when the memory is closed."""

    def full(*given: Any, **named: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    for module in (store, memory):
        monkeypatch.setattr(module, "RETRY_S", 0.05 if waits else 10.0)
    one = Memory(tmp_path / "m")
    with monkeypatch.context() as patched:
        patched.setattr(files.Files, "append", full)
        for owner in ("a", "b"):
            one.add(owner, ids(TEXTS[0]))
        one.flush()
        assert one.problem is not None
    if waits:
        wait_until(lambda: one.problem is None, "texts to be written")
    one.close()
    again = Memory(tmp_path / "m")
    for owner in ("a", "b"):
        again.prepare(owner)
    again.flush()
    texts = [text.tolist() for _, kept_texts in again.owners() for text in kept_texts.texts()]
    assert texts == [TEXTS[0]] * 2
    again.close()


def test_leftovers_of_a_killed_process_are_swept(tmp_path: Path) -> None:
    filled(tmp_path / "m").close()
    (owner,) = (tmp_path / "m" / "owners").iterdir()
    left = [owner / ".7.segment-a.work", owner / ".segments.json-b.work", tmp_path / "m" / ".memory.json-c.work"]
    for folder in left:
        folder.mkdir()
        (folder / "part").write_bytes(b"x")
    in_use = os.open(left[1], os.O_RDONLY)
    fcntl.flock(in_use, fcntl.LOCK_EX)
    reader = Memory(tmp_path / "m", reads_only=True)
    assert all(folder.exists() for folder in left), "a reader changes nothing"
    reader.close()
    again = Memory(tmp_path / "m")
    assert [folder.exists() for folder in left] == [False, True, False] and kept(again) == TEXTS
    os.close(in_use)
    again.close()


@pytest.mark.parametrize(
    ("name", "is_folder"), [(".", False), ("owners", False), ("memory.json", True), ("lock", True)]
)
def test_files_for_folders_and_folders_for_files_are_named(name: str, is_folder: bool, tmp_path: Path) -> None:
    path = tmp_path / "m" / name
    if name != ".":
        (tmp_path / "m").mkdir()
    path.mkdir() if is_folder else path.touch()
    with pytest.raises(ConfigError, match="cannot use the memory") as refused:
        Memory(tmp_path / "m")
    kinds = "is a folder and must be a file" if is_folder else "is a file and must be a folder"
    assert f"{str(path)!r} {kinds}" in str(refused.value)


def test_a_partly_written_record_is_taken_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = Store(tmp_path, 1000)
    one.add(ids([1, 2]))
    real = open

    class Short:
        """A log of a disk that fills up in the middle of a record."""

        def __init__(self, file: Any) -> None:
            self._file = file

        def __enter__(self) -> Short:
            return self

        def __exit__(self, *_: object) -> None:
            self._file.close()

        def __getattr__(self, name: str) -> Any:
            return getattr(self._file, name)

        def write(self, data: bytes) -> int:
            return int(self._file.write(data[:5]))

    with monkeypatch.context() as patched:
        patched.setattr(files, "open", lambda *given, **named: Short(real(*given, **named)), raising=False)
        one.add(ids([3, 4]))
    assert one.problem is not None and [text.tolist() for text in one.texts()] == [[1, 2], [3, 4]]
    assert [text.tolist() for text in Store(tmp_path, 1000).texts()] == [[1, 2]]


def test_zeros_at_the_end_of_a_log_are_no_texts(tmp_path: Path) -> None:
    """A power loss leaves them."""
    filled(tmp_path / "m", [[1, 2]]).close()
    (log,) = (tmp_path / "m").rglob("*.log")
    for more in (bytes(8), bytes(40), b"\4\0\0\0" + (0x1C291CA3).to_bytes(4, "little") + bytes(4)):
        log.write_bytes(log.read_bytes() + more)
        again = filled(tmp_path / "m", [[3]])
        assert kept(again)[0] == [1, 2] and all(kept(again))
        again.close()


def test_a_file_that_cannot_be_opened_now_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Too many open files, say: the texts are then kept in memory until they can be written, and nothing is removed."""
    filled(tmp_path / "m").close()
    before = {path.name: path.read_bytes() for path in (tmp_path / "m").rglob("*.segment")}

    def failing(path: Path) -> Segment:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patched:
        patched.setattr(files, "_mapped", failing)
        one = filled(tmp_path / "m", [[50, 51]] * 20)
        assert one.problem is not None and "Too many open files" in one.problem
        assert kept(one) == [[50, 51]] * 20
        one.close()
    assert {path.name: path.read_bytes() for path in (tmp_path / "m").rglob("*.segment")} == before
    again = Memory(tmp_path / "m")
    assert kept(again) == [*TEXTS, *[[50, 51]] * 20], "they were written when the memory was closed"
    again.close()


def test_no_error_ends_the_thread_that_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = Memory(tmp_path / "m")
    real = Store.add

    def add(self: Store, tokens: Any) -> None:
        if tokens[0] == 5:
            raise RuntimeError("some error")
        real(self, tokens)

    monkeypatch.setattr(Store, "add", add)
    for text in ([1, 2], [5], [3, 4]):
        one.add("", ids(text))
    one.flush(20)
    assert kept(one) == [[1, 2], [3, 4]] and one.problem == "RuntimeError: some error"
    one.close()


def test_a_queue_that_is_too_long_drops_texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = threading.Event()
    monkeypatch.setattr(memory, "_MAX_QUEUED", 3)
    monkeypatch.setattr(Store, "add", lambda self, tokens: gate.wait(20))
    one = Memory(tmp_path / "m")
    for _ in range(10):
        one.add("", ids([1, 2]))
    assert 5 <= one.dropped <= 7
    gate.set()
    one.close()


def test_a_folder_that_can_only_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    filled(tmp_path / "m").close()

    def refused(folder: Path) -> int:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(memory, "_locked", refused)
    one = Memory(tmp_path / "m")
    assert not one.writes and kept(one) == TEXTS
    one.close()
    with pytest.raises(ConfigError, match=r"cannot use the memory .*: Permission denied"):
        Memory(tmp_path / "new")


def test_texts_are_read_by_the_thread_that_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first request of a key finds nothing until they are read, and does not wait."""
    filled(tmp_path / "m").close()
    again, gate, readers = Memory(tmp_path / "m"), threading.Event(), list[str]()
    real = files._mapped

    def slow(path: Path) -> Segment:
        readers.append(threading.current_thread().name)
        assert gate.wait(20)
        return real(path)

    monkeypatch.setattr(files, "_mapped", slow)
    again.prepare("")
    assert list(again.continuations("", ids([0, 1, 2]), 3)) == []
    gate.set()
    again.flush()
    assert first(again, [0, 1, 2]) == (3, [3, 4, 5]) and set(readers) == {"foresay-memory"}
    again.close()


def test_merging_into_a_full_disk_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    filled(tmp_path / "a").close()

    def full(self: files.Files, text: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    source, target = Memory(tmp_path / "a", reads_only=True), Memory(tmp_path / "b")
    writer = Memory(tmp_path / "a")
    assert writer.writes, "reading takes no lock"
    monkeypatch.setattr(files.Files, "append", full)
    with pytest.raises(ConfigError, match="No space left"):
        target.merge(source)
    for one in (source, target, writer):
        one.close()


@pytest.mark.parametrize("where", [0, 9, 40, -1])
def test_a_damaged_segment_is_dropped(where: int, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    filled(tmp_path / "m").close()
    path = sorted((tmp_path / "m").rglob("*.segment"))[0]
    data = bytearray(path.read_bytes())
    data[where] ^= 0x55
    path.write_bytes(data)
    with caplog.at_level(logging.WARNING, "foresay"):
        again = Memory(tmp_path / "m")
        texts = kept(again)
    assert texts != TEXTS and all(text in TEXTS for text in texts)
    assert f"{path} is not used" in caplog.text
    again.add("", ids([5, 5]))
    again.flush()
    assert kept(again)[-1] == [5, 5]
    again.close()


@pytest.mark.parametrize(
    "content", [b"", b"{", b'{"segments": ["../../x"]}', b'{"segments": ["9.segment"], "log": "1.log"}', b"[1]"]
)
def test_a_damaged_list_starts_empty(content: bytes, tmp_path: Path) -> None:
    filled(tmp_path / "m").close()
    (found,) = (tmp_path / "m").rglob("segments.json")
    found.write_bytes(content)
    again = filled(tmp_path / "m", [[1, 2]])
    assert kept(again)[-1] == [1, 2]
    again.close()


def test_a_folder_of_another_vocabulary_or_version(tmp_path: Path) -> None:
    Memory(tmp_path / "m", fingerprint="a").close()
    with pytest.raises(VocabularyMismatchError, match="texts of another vocabulary"):
        Memory(tmp_path / "m", fingerprint="b")
    (tmp_path / "m" / "memory.json").write_text('{"format": 2, "fingerprint": "a"}')
    with pytest.raises(ConfigError, match="has the format 2; this version reads 1"):
        Memory(tmp_path / "m", fingerprint="a")
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot use the memory"):
        Memory(tmp_path / "file")


def test_a_process_opens_a_folder_once(tmp_path: Path) -> None:
    first_one = Memory.shared(tmp_path / "m", 1000, "a")
    assert Memory.shared(tmp_path / "x" / ".." / "m", 1000, "a") is first_one and first_one.writes
    with pytest.raises(VocabularyMismatchError):
        Memory.shared(tmp_path / "m", 1000, "b")
    with pytest.raises(ConfigError, match="max_tokens=1000, not 2000"):
        Memory.shared(tmp_path / "m", 2000, "a")
    first_one.close()
    again = Memory.shared(tmp_path / "m", 1000, "a")
    assert again is not first_one and again.writes
    again.close()


def test_one_process_writes_and_others_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_REFRESH_S", 0.0)
    writer = filled(tmp_path / "m", [[1, 2, 3]])
    reader = Memory(tmp_path / "m")
    assert (writer.writes, reader.writes) == (True, False)
    assert first(reader, [1, 2]) == (2, [3])
    for text in TEXTS * 2:
        writer.add("", ids(text))
    writer.flush()
    assert first(reader, [8, 9, 10]) == (0, [])
    reader.add("", ids([50, 51]))
    reader.flush()
    assert kept(reader) == [[1, 2, 3], *TEXTS * 2], "the writer's texts, not its own"
    writer.close()
    reader.close()


def test_a_reader_becomes_the_writer_when_the_writer_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that is replaced by another one without a gap."""
    monkeypatch.setattr(memory, "_REFRESH_S", 0.0)
    old, new = filled(tmp_path / "m", [[1, 2]]), Memory(tmp_path / "m")
    new.add("", ids([3, 4]))
    new.flush()
    assert kept(new) == [[1, 2]] and not new.writes
    old.close()
    new.add("", ids([5, 6]))
    new.flush()
    assert new.writes and kept(new) == [[1, 2], [5, 6]]
    new.close()
    again = Memory(tmp_path / "m")
    assert kept(again) == [[1, 2], [5, 6]]
    again.close()


def test_texts_are_private(tmp_path: Path) -> None:
    filled(tmp_path / "m").close()
    assert (tmp_path / "m").stat().st_mode & 0o077 == 0


def test_memories_are_merged_by_owner(tmp_path: Path) -> None:
    for name, token in (("a", 5), ("b", 6)):
        one = Memory(tmp_path / name)
        for owner in ("", "key"):
            one.add(owner, ids([1, 2, token + 10 * bool(owner)]))
        one.close()
    target = Memory(tmp_path / "all")
    assert [target.merge(Memory(tmp_path / name, reads_only=True)) for name in ("a", "b", "a")] == [2, 2, 0]
    assert kept(target) == [[1, 2, 5], [1, 2, 6]] and kept(target, "key") == [[1, 2, 15], [1, 2, 16]]
    target.close()
    again = Memory(tmp_path / "all")
    assert first(again, [1, 2], owner="key") == (2, [16])
    again.close()


def test_files_are_bounded(tmp_path: Path) -> None:
    texts = [[i, i + 1, i + 2, i + 3] for i in range(400)]
    one = filled(tmp_path / "m", texts, max_tokens=256)
    found = kept(one)
    assert one.size <= 256 and found == texts[-len(found) :] and len(found) > 20
    size = sum(path.stat().st_size for path in (tmp_path / "m").rglob("*") if path.is_file())
    assert size < 256 * 12 + 2000
    one.close()


def test_decoding_does_not_wait_for_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = threading.Event()
    real = files.Files.append

    def slow(self: files.Files, text: Any) -> None:
        assert gate.wait(20)
        real(self, text)

    monkeypatch.setattr(files.Files, "append", slow)
    one = Memory(tmp_path / "m")
    one.add("", ids([1, 2, 3]))
    assert list(one.continuations("", ids([1, 2]), 3)) == []
    gate.set()
    one.flush()
    assert first(one, [1, 2]) == (2, [3])
    one.close()
