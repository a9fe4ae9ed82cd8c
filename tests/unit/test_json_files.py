"""JSON from outside: what is refused, in one line that names the position, and what bounds reading it has."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import pytest
from pydantic import ConfigDict, Field

from foresay.errors import ConfigError
from foresay.json_files import Schema, parse_json, parse_object, read_limited, short


@dataclass(frozen=True)
class Point:
    __pydantic_config__ = ConfigDict(allow_inf_nan=False)

    x: int
    y: Annotated[float, Field(ge=0)] = 0.0
    more: tuple[tuple[str, int], ...] = ()


POINT: Schema[Point] = Schema(Point, "a point")


def refusal(call: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        call()
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "f: not JSON: EOF while parsing an object at line 1 column 1"),
        ("[1,\n2,,]", "f: not JSON: expected value at line 2 column 3"),
        ("[NaN]", "f: not JSON: expected value at line 1 column 2"),
        ("[-Infinity]", "f: not JSON: invalid number"),
        ('["\\ud800"]', "f: not JSON: "),
        ("[" * 100_000, "f: not JSON: recursion limit exceeded at line 1 column 202"),
        ('{"a":' * 100_000 + "1" + "}" * 100_000, "f: not JSON: recursion limit exceeded"),
        ("9" * 5000, "f: not JSON: number out of range"),
        (b'["\xff"]', "f: not JSON: "),
        ("{} {}", "f: not JSON: trailing characters at line 1 column 4"),
    ],
)
def test_what_is_not_json(text: str | bytes, message: str) -> None:
    for read in (parse_json, parse_object, *([] if "Infinity" in str(text) or "NaN" in str(text) else [POINT.read])):
        assert refusal(lambda read=read: read(text, "f")).startswith(message)


def test_the_last_of_two_keys_counts() -> None:
    assert parse_json('{"a": 1, "a": 2}') == {"a": 2}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"x": NaN}', "f: not a point: x should be a valid integer, not NaN"),
        ('{"x": 1, "y": NaN}', "f: not a point: y should be"),
        ('{"x": 1, "y": 1e999}', "f: not a point: y should be a finite number, not Infinity"),
        ("[]", "f: not a point: it should be an object, not []"),
        ("{}", "f: not a point: x: field required"),
        ('{"x": "1"}', 'f: not a point: x should be a valid integer, not "1"'),
        ('{"x": 1.0}', "f: not a point: x should be a valid integer, not 1.0"),
        ('{"x": true}', "f: not a point: x should be a valid integer, not true"),
        ('{"x": 1, "y": -0.5}', "f: not a point: y should be greater than or equal to 0, not -0.5"),
        ('{"x": 1, "more": [["a", 1], ["b", "c"]]}', "f: not a point: more.1.1 should be a valid integer"),
        ('{"x": ["' + "a" * 1000 + '"]}', 'f: not a point: x should be a valid integer, not ["aaa'),
    ],
)
def test_what_is_of_another_type(text: str, message: str) -> None:
    found = refusal(lambda: POINT.read(text, "f"))
    assert found.startswith(message) and len(found) < 150


def test_what_is_of_the_type() -> None:
    assert POINT.read('{"x": 1, "y": 2, "more": [["a", 1]]}', "f") == Point(1, 2.0, (("a", 1),))
    assert POINT.of({"x": 1, "more": (("a", 1),)}, "f") == Point(1, 0.0, (("a", 1),))
    assert parse_object('{"x": 1}', "f") == {"x": 1}
    assert refusal(lambda: parse_object("[1]", "f")) == "f: a JSON object is needed, not [1]"


def test_a_file_is_read_up_to_its_bound(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"x" * 100)
    assert read_limited(path, 100) == b"x" * 100
    assert refusal(lambda: read_limited(path, 99)).endswith("is larger than 99 bytes, the maximum for such a file")
    with path.open("r+b") as file:
        file.truncate(1 << 40)  # takes no room on the disk, and would take a terabyte of memory
    assert "is larger than" in refusal(lambda: read_limited(path))
    assert refusal(lambda: read_limited("/dev/zero")) == "'/dev/zero' is no regular file"


def test_values_are_shown_in_a_line() -> None:
    assert short({"a": [1, None]}) == '{"a": [1, null]}' and len(short("x" * 1000)) == 80
