"""Expectations of replies. `reply` is the index of one; by default it is the last. Paths are those of replies.py."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any

from clients.cases.case import Check, status
from clients.cases.replies import MISSING, Reply, value_at, values_at


def _check(text: str, test: Callable[[Sequence[Reply]], Any]) -> Check:
    """Return a check that fails where a part is missing or of another type."""

    def safe(replies: Sequence[Reply]) -> bool:
        try:
            return bool(test(replies))
        except (KeyError, IndexError, TypeError, ValueError, AttributeError):
            return False

    return Check(text, safe)


def _about(path: str, text: str, test: Callable[[Any], Any], reply: int) -> Check:
    return _check(f"[{reply}] {path} {text}", lambda replies: test(value_at(replies[reply].body, path)))


def ok(*checks: Check, reply: int = -1) -> list[Check]:
    """Expect status 200 and the checks."""
    return [status(200, reply), *checks]


def error(code: int, *words: str, reply: int = -1) -> list[Check]:
    """Expect an error of this status whose body contains the words."""

    def test(found: Any) -> bool:
        return isinstance(found, dict) and all(one in json.dumps(found, ensure_ascii=False) for one in words)

    return [status(code, reply), _about("error", f"is an error with {words}", test, reply)]


def fails(reply: int = -1) -> list[Check]:
    """Expect a client error with a body that describes it."""
    is_client_error = Check(f"[{reply}] status 400 to 499", lambda replies: 400 <= replies[reply].status < 500, 400)
    return [is_client_error, has("error", reply)]


def equals(path: str, value: Any, reply: int = -1) -> Check:
    return _about(path, f"== {value!r}", lambda found: found == value and type(found) is type(value), reply)


def has(path: str, reply: int = -1) -> Check:
    return _about(path, "exists", lambda found: found is not MISSING, reply)


def lacks(path: str, reply: int = -1) -> Check:
    return _about(path, "is absent or null", lambda found: found is MISSING or found is None, reply)


def empty(path: str, reply: int = -1) -> Check:
    return _about(path, "is absent or empty", lambda found: not found, reply)


def text(path: str, pattern: str = r".+", reply: int = -1) -> Check:
    return _about(path, f"matches {pattern!r}", lambda found: re.search(pattern, found, re.DOTALL), reply)


def integer(path: str, least: int = 0, reply: int = -1) -> Check:
    return _about(path, f">= {least}", lambda found: type(found) is int and found >= least, reply)


def count(path: str, number: int, reply: int = -1) -> Check:
    return _about(path, f"has {number} items", lambda found: len(found) == number, reply)


def at_least(path: str, number: int, reply: int = -1) -> Check:
    return _about(path, f"has at least {number} items", lambda found: len(found) >= number, reply)


def within(path: str, *values: Any, reply: int = -1) -> Check:
    return _about(path, f"in {values}", lambda found: found in values, reply)


def contains(path: str, item: Any, reply: int = -1) -> Check:
    return _about(path, f"contains {item!r}", lambda found: isinstance(found, list) and item in found, reply)


def json_text(path: str, test: Callable[[Any], bool] = lambda found: True, reply: int = -1) -> Check:
    """Expect a text that is JSON."""
    return _about(path, "is JSON as expected", lambda found: test(json.loads(found)), reply)


def each(path: str, description: str, test: Callable[[Any], bool], reply: int = -1) -> Check:
    """Expect values at a path with *, all of which pass the test."""

    def every(replies: Sequence[Reply]) -> bool:
        found = values_at(replies[reply].body, path)
        return bool(found) and all(test(one) for one in found)

    return _check(f"[{reply}] each {path} {description}", every)


def no_more(path: str, reply: int = -1) -> Check:
    """Expect no value at a path with *, null included."""
    return _check(f"[{reply}] no {path}", lambda replies: not values_at(replies[reply].body, path))


def same(path: str, other: str | None = None, first: int = 0, second: int = 1) -> Check:
    """Expect equal values in two replies."""
    return _pair(path, path if other is None else other, first, second, is_equal=True)


def differs(path: str, first: int = 0, second: int = 1) -> Check:
    return _pair(path, path, first, second, is_equal=False)


def _pair(a: str, b: str, first: int, second: int, *, is_equal: bool) -> Check:
    def compare(replies: Sequence[Reply]) -> bool:
        left, right = value_at(replies[first].body, a), value_at(replies[second].body, b)
        return left is not MISSING and right is not MISSING and (left == right) == is_equal

    return _check(f"[{first}] {a} {'==' if is_equal else '!='} [{second}] {b}", compare)


def header(name: str, pattern: str, reply: int = -1) -> Check:
    said = f"[{reply}] header {name} matches {pattern!r}"
    return _check(said, lambda replies: re.fullmatch(pattern, replies[reply].headers.get(name, "")))


def no_header(name: str, reply: int = -1) -> Check:
    return _check(f"[{reply}] no header {name}", lambda replies: name not in replies[reply].headers)


def written(pattern: str, reply: int = -1) -> Check:
    """Expect a pattern in the text of a response."""
    return _check(f"[{reply}] text matches {pattern!r}", lambda replies: re.search(pattern, replies[reply].text))


def that(description: str, test: Callable[[Sequence[Any]], bool]) -> Check:
    """Expect a relation between the bodies."""
    return _check(description, lambda replies: test([one.body for one in replies]))
