"""Pins (scripts/pins): every line is one, and everything that foresay's extras and its tests need has one."""

from __future__ import annotations

import importlib.metadata
import re
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
PINS = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
APART = {"llamacpp", "ray", "gpu"}
"""Extras whose versions the Makefile gives."""


def test_every_line_is_a_name_and_a_version() -> None:
    assert [line for line in PINS if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*==[0-9][0-9A-Za-z.]*", line)] == []


def test_names_are_in_order_and_there_once() -> None:
    names = [canonicalize_name(line.partition("==")[0]) for line in PINS]
    assert sorted(PINS, key=str.lower) == PINS and len(set(names)) == len(names)


def _needed() -> set[str]:
    """Distributions that foresay requires with its extras; the requirements of those too, as far as they are installed."""
    extras = [
        extra for extra in importlib.metadata.metadata("foresay").get_all("Provides-Extra", []) if extra not in APART
    ]
    open_, seen = [("foresay", tuple(extras))], set[str]()
    while open_:
        name, chosen = open_.pop()
        try:
            wanted = importlib.metadata.requires(name) or ()
        except importlib.metadata.PackageNotFoundError:
            continue
        for one in map(Requirement, wanted):
            applies = one.marker is None or any(one.marker.evaluate({"extra": extra}) for extra in (*chosen, ""))
            key = f"{canonicalize_name(one.name)}{sorted(one.extras)}"
            if applies and key not in seen:
                seen.add(key)
                open_.append((one.name, tuple(one.extras)))
    return {key.partition("[")[0] for key in seen}


def test_all_that_is_needed_is_pinned() -> None:
    pinned, needed = {canonicalize_name(line.partition("==")[0]) for line in PINS}, _needed()
    assert needed - {"foresay", "setuptools", "pip"} <= pinned
    assert {"torch", "fastapi", "datasets", "tensorboard", "mkdocs-material", "lm-eval", "griffelib"} <= needed, (
        "dependencies, extras, and what these need"
    )


def test_what_is_not_pinned_has_its_version_in_the_makefile() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    for one in (Requirement(text) for extra in APART for text in extras[extra]):
        [version] = re.findall(rf'"{re.escape(one.name)}==([0-9.]+)[";]', makefile)
        assert one.specifier.contains(version)


def test_each_environment_begins_with_the_newest_pip() -> None:
    lines = (ROOT / "Makefile").read_text(encoding="utf-8").splitlines()
    made = [i for i, line in enumerate(lines) if " -m venv " in line]
    assert len(made) == 4 and all(lines[i + 1].endswith(" --upgrade pip") for i in made)
