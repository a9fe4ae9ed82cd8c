"""Files written whole or not at all, and where they are kept."""

from __future__ import annotations

import os
import stat
import time
from pathlib import Path

import pytest

from foresay.errors import ConfigError
from foresay.files import atomic_files, atomic_write, cache_dir, work_folder, writing
from helpers.refusals import refused


def test_the_file_is_there_only_when_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text("old")
    with atomic_write(path) as whole:
        whole.write_text("ne")
        assert path.read_text() == "old" and whole.parent.parent == tmp_path  # one file system, so that it can be moved
        whole.write_text("new")
    assert path.read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, ConfigError])
def test_what_fails_leaves_all_as_it_was(tmp_path: Path, error: type[BaseException]) -> None:
    path = tmp_path / "a.json"
    path.write_text("old")

    def fail() -> None:
        with atomic_write(path) as whole:
            whole.write_text("half")
            raise error("stop")

    with pytest.raises(error, match="stop"):
        fail()
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


def test_the_umask_says_who_may_read_it_whatever_its_writer_did(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        with atomic_write(tmp_path / "a") as whole:
            whole.write_text("x")
            whole.chmod(0o600)
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o640


def test_folders_are_made_only_when_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "b" / "c" / "a"
    with refused("path"), atomic_write(path):
        pass
    with atomic_write(path, parents=True) as whole:
        whole.write_text("x")
    assert path.read_text() == "x"


def test_what_the_file_system_refuses_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "folder" / "full").mkdir(parents=True)
    for path in (tmp_path / "file" / "a", tmp_path / "folder"):
        with refused("path") as caught, atomic_write(path, parents=True):
            pass
        assert "\n" not in str(caught.value)
    with refused("path"), atomic_write(tmp_path / "a"):
        raise OSError(28, "No space left on device")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder"]


@pytest.mark.parametrize(
    "said", ["Error while serializing: I/O error: No space left on device", "No space left on device"]
)
def test_what_libraries_in_rust_raise_for_the_file_system_is_one_line_too(said: str) -> None:
    with refused("path", "a/b"), writing("a/b"):
        raise Exception(f"{said} (os error 28)")
    with pytest.raises(ValueError, match=r"^something else$"), writing("a/b"):
        raise ValueError("something else")


def test_files_of_a_folder_are_replaced_once_all_are_whole(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        (tmp_path / name).write_text("old")

    def fail() -> None:
        with atomic_files(tmp_path) as work:
            (work / "a").write_text("new")
            raise ValueError("stop")

    with pytest.raises(ValueError, match="stop"):
        fail()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "c"]
    assert (tmp_path / "a").read_text() == "old"
    before = os.umask(0o027)
    try:
        with atomic_files(tmp_path) as work:
            for name in ("a", "b"):
                (work / name).write_text("new")
                (work / name).chmod(0o600)
            assert (tmp_path / "a").read_text() == "old"
    finally:
        os.umask(before)
    assert [(tmp_path / name).read_text() for name in ("a", "b", "c")] == ["new", "new", "old"]
    assert {stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("a", "b")} == {0o640}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "c"]


def test_what_a_killed_process_left_is_removed_by_the_next(tmp_path: Path) -> None:
    def left(name: str, age_s: float) -> Path:
        """A folder as a process leaves it that is killed within `work_folder`."""
        with work_folder(name, tmp_path) as work:
            found = work.with_name(work.name.replace("-", "-x", 1))
        found.mkdir()
        (found / "half").write_text("x")
        os.utime(found, (time.time() - age_s,) * 2)
        return found

    days = 4 * 86_400.0
    killed, young, others = left("a", days), left("a", 86_400.0), left("b", days)
    (tmp_path / ".a-link.work").symlink_to(others)
    (tmp_path / ".a-of-the-user").mkdir()
    with atomic_write(tmp_path / "a") as whole:
        whole.write_text("x")
        with work_folder("a", tmp_path):
            assert whole.exists(), "another process is at work on it"
    there = {path.name for path in tmp_path.iterdir()}
    assert there == {"a", young.name, others.name, ".a-link.work", ".a-of-the-user"}
    assert (others / "half").exists() and killed.name not in there


def test_where_what_was_made_once_is_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setenv("FORESAY_CACHE", str(tmp_path / "own"))
    assert cache_dir() == tmp_path / "own"
    monkeypatch.delenv("FORESAY_CACHE")
    assert cache_dir() == tmp_path / "xdg" / "foresay"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_dir() == tmp_path / ".cache" / "foresay"
