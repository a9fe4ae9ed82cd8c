"""JSON from outside: what is refused, in one line that names the position, and what bounds reading it has."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any
from unittest.mock import ANY

import pytest
from pydantic import ConfigDict, Field

from foresay.errors import MAX_SHOWN
from foresay.json_files import Schema, parse_json, parse_object, read_limited
from helpers.refusals import refused


@dataclass(frozen=True)
class Point:
    __pydantic_config__ = ConfigDict(allow_inf_nan=False)

    x: int
    y: Annotated[float, Field(ge=0)] = 0.0
    more: tuple[tuple[str, int], ...] = ()


POINT: Schema[Point] = Schema(Point, "a point")


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[1,\n2,,]",
        "[NaN]",
        "[-Infinity]",
        '["\\ud800"]',
        "[" * 100_000,
        '{"a":' * 100_000 + "1" + "}" * 100_000,
        "9" * 5000,
        b'["\xff"]',
        "{} {}",
    ],
)
def test_what_is_not_json(text: str | bytes) -> None:
    for read in (parse_json, parse_object, *([] if "Infinity" in str(text) or "NaN" in str(text) else [POINT.read])):
        with refused("f", None):
            read(text, "f")


def test_the_last_of_two_keys_counts() -> None:
    assert parse_json('{"a": 1, "a": 2}') == {"a": 2}


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
    assert parse_object('{"x": 1}', "f") == {"x": 1}
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
