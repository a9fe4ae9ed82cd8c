"""Benchmarks and scripts are run by hand, and seldom: what they import must be there all the same."""

from __future__ import annotations

import ast
import importlib
import importlib.util
from collections.abc import Iterator
from pathlib import Path

import foresay

ROOT = Path(foresay.__file__).parents[2]
FILES = sorted([*ROOT.glob("benchmarks/*.py"), *(path for path in ROOT.glob("scripts/*") if path.is_file())])


def imported(source: str) -> Iterator[tuple[str, str]]:
    """(module of ours, a name out of it)."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in ("foresay", "foresay_lab"):
            yield from ((str(node.module), alias.name) for alias in node.names)


def absent(source: str) -> list[str]:
    """Imports that are missing."""
    out = []
    for module, name in imported(source):
        try:
            found = hasattr(importlib.import_module(module), name)
            found = found or importlib.util.find_spec(f"{module}.{name}") is not None
        except ImportError:
            found = False
        out += [] if found else [f"{module}.{name}"]
    return out


def test_what_is_imported_is_there() -> None:
    lacking = {}
    for path in FILES:
        text = path.read_text(encoding="utf-8")
        assert path.suffix == ".py" or text.startswith("#!"), f"{path.name}: a script names what runs it"
        if path.suffix == ".py" or "python" in text.splitlines()[0]:
            lacking[path.name] = absent(text)
    assert not any(lacking.values()), lacking


def test_what_is_not_there_is_found() -> None:
    """The control of the one above."""
    said = "from foresay_lab.bench.bench import bench, Gone\nfrom foresay.nowhere import a\nfrom foresay import cli"
    assert absent(said) == ["foresay_lab.bench.bench.Gone", "foresay.nowhere.a"]
