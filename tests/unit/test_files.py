"""Files written whole or not at all, where they are kept, and JSON from outside, which is refused in one line."""

from __future__ import annotations

import math
import os
import stat
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any
from unittest.mock import ANY

import pytest
from pydantic import ConfigDict, Field

from foresay.errors import MAX_SHOWN, ConfigError
from foresay.files import atomic_files, atomic_write, cache_dir, work_folder, writing
from foresay.json_files import Schema, parse_json, parse_object, read_limited
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
    for name in ("a", "b"):
        (tmp_path / name).write_text("old")

    def fail(writing: AbstractContextManager[Path]) -> None:
        with writing as place:
            (place / "b" if place.is_dir() else place).write_text("half")
            raise error("stop")

    for writer in (atomic_write(tmp_path / "a"), atomic_files(tmp_path)):
        with pytest.raises(error, match="stop"):
            fail(writer)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"a": "old", "b": "old"}


@pytest.fixture
def umask() -> Iterator[None]:
    before = os.umask(0o027)
    yield
    os.umask(before)


@pytest.mark.usefixtures("umask")
def test_files_of_a_folder_are_replaced_once_all_are_whole(tmp_path: Path) -> None:
    """The umask decides who may read them, whatever their writer did."""
    for name in ("a", "b", "c"):
        (tmp_path / name).write_text("old")
    with atomic_files(tmp_path) as work:
        for name in ("a", "b"):
            (work / name).write_text("new")
            (work / name).chmod(0o600)
        assert (tmp_path / "a").read_text() == "old"
    with atomic_write(tmp_path / "d") as whole:
        whole.write_text("x")
        whole.chmod(0o600)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {
        "a": "new",
        "b": "new",
        "c": "old",
        "d": "x",
    }
    assert {stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("a", "b", "d")} == {0o640}


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


def test_what_libraries_in_rust_raise_for_the_file_system_is_one_line_too() -> None:
    for text in ("Error while serializing: I/O error: No space left on device", "No space left on device"):
        with refused("path", "a/b"), writing("a/b"):
            raise Exception(f"{text} (os error 28)")
    with pytest.raises(ValueError, match=r"^something else$"), writing("a/b"):
        raise ValueError("something else")


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


@dataclass(frozen=True)
class Point:
    __pydantic_config__ = ConfigDict(allow_inf_nan=False)

    x: int
    y: Annotated[float, Field(ge=0)] = 0.0
    more: tuple[tuple[str, int], ...] = ()


POINT: Schema[Point] = Schema(Point, "a point")


DEEP = ("[" * 100_000, '{"a":' * 100_000 + "1" + "}" * 100_000)


@pytest.mark.parametrize(
    "text",
    ["{", "[1,\n2,,]", "[NaN]", "[-Infinity]", '["\\ud800"]', "9" * 5000, b'["\xff"]', "{} {}", *DEEP],
    ids=lambda text: ascii(text)[:20],
)
def test_what_is_not_json(text: str | bytes) -> None:
    for read in (parse_json, parse_object, *([] if "Infinity" in str(text) or "NaN" in str(text) else [POINT.read])):
        with refused("f", None):
            read(text, "f")


@pytest.mark.parametrize(
    ("text", "param", "value"),
    [
        ('{"x": 1, "y": NaN}', "f: y", ANY),
        ('{"x": 1, "y": 1e999}', "f: y", math.inf),
        ("[]", "f", []),
        ("{}", "f: x", {}),
        ('{"x": "1"}', "f: x", "1"),
        ('{"x": 1.0}', "f: x", 1.0),
        ('{"x": true}', "f: x", True),
        ('{"x": 1, "y": -0.5}', "f: y", -0.5),
        ('{"x": 1, "more": [["a", 1], ["b", "c"]]}', "f: more.1.1", "c"),
        ('{"x": ["' + "a" * 1000 + '"]}', "f: x", ["a" * 1000]),
    ],
)
def test_what_is_of_another_type(text: str, param: str, value: Any) -> None:
    with refused(param, value) as found:
        POINT.read(text, "f")
    assert len(str(found.value)) < MAX_SHOWN + 80


def test_what_is_of_the_type() -> None:
    assert POINT.read('{"x": 1, "y": 2, "more": [["a", 1]]}', "f") == Point(1, 2.0, (("a", 1),))
    assert POINT.of({"x": 1, "more": (("a", 1),)}, "f") == Point(1, 0.0, (("a", 1),))
    assert parse_object('{"x": 1, "x": 2}', "f") == {"x": 2}, "the last of two keys counts"
    with refused("f", [1]):
        parse_object("[1]", "f")


def test_a_file_is_read_up_to_its_bound(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"x" * 100)
    assert read_limited(path, 100) == b"x" * 100
    with refused("path", path):
        read_limited(path, 99)
    with path.open("r+b") as file:
        file.truncate(1 << 40)  # takes no room on the disk, and would take a terabyte of memory
    for one in (path, "/dev/zero"):
        with refused("path", one):
            read_limited(one)
