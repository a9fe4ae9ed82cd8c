"""The API reference's tables are complete: every parameter of a public function, every field of a public class."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "api.md"


def public_objects() -> dict[str, Any]:
    """Everything that the page shows, by path."""
    out = {}
    for path in re.findall(r"^::: ([\w.]+)$", PAGE.read_text(encoding="utf-8"), re.MULTILINE):
        module, _, name = path.rpartition(".")
        out[path] = getattr(importlib.import_module(module), name)
    return out


def functions_of(one: Any) -> Iterator[tuple[str, Any]]:
    """The functions of a public object; methods that another public class documents are left out."""
    if not inspect.isclass(one):
        yield one.__name__, one
        return
    bases = [base for base in one.__mro__[1:] if base in public_objects().values()]
    for name, member in vars(one).items():
        function = inspect.unwrap(getattr(member, "__func__", member))
        shown = name == "__init__" or not name.startswith("_")
        written = inspect.isfunction(function) and function.__code__.co_filename == inspect.getsourcefile(one)
        if shown and written and not any(name in vars(base) for base in bases):
            yield f"{one.__name__}.{name}", function


def parameters(function: Any) -> list[str]:
    """Parameters with the stars that a table needs."""
    stars = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    found = inspect.signature(function).parameters.values()
    return [stars.get(one.kind, "") + one.name for one in found if one.name not in ("self", "cls")]


def documented(docstring: str | None) -> list[str]:
    """Names in the table of arguments of a docstring."""
    block = re.search(r"^Args:\n((?:    .*\n|\n)*)", inspect.cleandoc(docstring or "") + "\n", re.MULTILINE)
    return re.findall(r"^    (\*{0,2}\w+): \S", block[1], re.MULTILINE) if block else []


def undocumented_fields(one: type) -> list[str]:
    """Names without underscore that the body of a class sets or annotates without a string after them."""
    [body] = [node.body for node in ast.parse(textwrap.dedent(inspect.getsource(one))).body if hasattr(node, "body")]
    out = []
    for node, after in zip(body, [*body[1:], None], strict=True):
        target = node.target if isinstance(node, ast.AnnAssign) else None
        if isinstance(node, ast.Assign):
            target = node.targets[0]
        is_text = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
        if isinstance(target, ast.Name) and not target.id.startswith("_") and not is_text:
            out.append(target.id)
    return out


def test_every_parameter_of_a_public_function_is_in_its_table() -> None:
    found = [each for one in public_objects().values() for each in functions_of(one)]
    assert len(found) > 100
    wrong = {name: (has, needs) for name, f in found if (has := documented(f.__doc__)) != (needs := parameters(f))}
    assert wrong == {}


def test_every_field_of_a_public_class_is_documented() -> None:
    classes = [one for one in public_objects().values() if inspect.isclass(one)]
    assert len(classes) > 40
    assert {one.__name__: names for one in classes if (names := undocumented_fields(one))} == {}


def test_defects_are_found() -> None:
    @dataclasses.dataclass
    class Broken:
        one: int
        """One."""
        two: int = 2
        three = 3

        def run(self, a: int, *more: int, **rest: int) -> None:
            """Run.

            Args:
                a: The first: a
                    number.
                rest: The others.

            Raises:
                b: Never.
            """

    [(name, run)] = functions_of(Broken)
    assert name == "Broken.run"
    assert parameters(run) == ["a", "*more", "**rest"] and documented(run.__doc__) == ["a", "rest"]
    assert undocumented_fields(Broken) == ["two", "three"]
    assert documented("Run. a: The first.") == [] == documented(None)
