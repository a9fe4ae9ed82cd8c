"""Pins: every line is one, and everything that foresay and its tests need has one."""

from __future__ import annotations

import importlib.metadata
import re
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
PINS = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()


def test_every_line_is_a_name_and_a_version() -> None:
    assert [line for line in PINS if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*==[0-9][0-9A-Za-z.]*", line)] == []


def test_names_are_in_order_and_there_once() -> None:
    names = [canonicalize_name(line.partition("==")[0]) for line in PINS]
    assert sorted(PINS, key=str.lower) == PINS and len(set(names)) == len(names)


def test_all_that_is_needed_is_pinned() -> None:
    """What `pip install foresay[dev]` brought here, and what that needs."""
    pinned = {canonicalize_name(line.partition("==")[0]) for line in PINS}
    open_, seen = [("foresay", ("dev",))], set[str]()
    while open_:
        name, extras = open_.pop()
        for text in importlib.metadata.requires(name) or ():
            one = Requirement(text)
            wanted = one.marker is None or any(one.marker.evaluate({"extra": extra}) for extra in (*extras, ""))
            key = f"{canonicalize_name(one.name)}{sorted(one.extras)}"
            if wanted and key not in seen:
                seen.add(key)
                open_.append((one.name, tuple(one.extras)))
    needed = {key.partition("[")[0] for key in seen}
    assert needed - {"foresay", "setuptools", "pip"} <= pinned and "torch" in needed


def test_each_environment_begins_with_the_newest_pip() -> None:
    lines = (ROOT / "Makefile").read_text(encoding="utf-8").splitlines()
    made = [i for i, line in enumerate(lines) if " -m venv " in line]
    assert len(made) == 2 and all(lines[i + 1].endswith(" --upgrade pip") for i in made)
