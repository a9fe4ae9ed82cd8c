"""Files written whole or not at all, and where they are kept."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from foresay.errors import ConfigError
from foresay.files import atomic_write, cache_dir


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
    with pytest.raises(ConfigError, match=r"^cannot write '.*/b/c/a': No such file or directory$"), atomic_write(path):
        pass
    with atomic_write(path, parents=True) as whole:
        whole.write_text("x")
    assert path.read_text() == "x"


def test_what_the_file_system_refuses_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "folder" / "full").mkdir(parents=True)
    for path in (tmp_path / "file" / "a", tmp_path / "folder"):
        with pytest.raises(ConfigError, match=r"^cannot write ") as caught, atomic_write(path, parents=True):
            pass
        assert "\n" not in str(caught.value)
    with pytest.raises(ConfigError, match="No space left"), atomic_write(tmp_path / "a"):
        raise OSError(28, "No space left on device")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder"]


def test_where_what_was_made_once_is_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setenv("FORESAY_CACHE", str(tmp_path / "own"))
    assert cache_dir() == tmp_path / "own"
    monkeypatch.delenv("FORESAY_CACHE")
    assert cache_dir() == tmp_path / "xdg" / "foresay"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_dir() == tmp_path / ".cache" / "foresay"
