"""Imports of a Python source, wherever they stand."""

from __future__ import annotations

import ast
from collections.abc import Iterator


def _statements(node: ast.AST) -> Iterator[ast.AST]:
    for field in ("body", "orelse", "finalbody", "handlers", "cases"):
        for one in getattr(node, field, ()):
            yield one
            yield from _statements(one)


def imports(source: str, package: str = "") -> set[str]:
    """Full names of all imports, inside functions and under TYPE_CHECKING too.

    package: of the module; without one, names of relative imports begin with a dot.
    """
    out: set[str] = set()
    for node in _statements(ast.parse(source)):
        if isinstance(node, ast.Import):
            out |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            parent = [package.rsplit(".", node.level - 1)[0]] if node.level else []
            base = ".".join([*parent, *([node.module] if node.module else [])])
            out |= {f"{base}.{alias.name}" for alias in node.names}
    return out
