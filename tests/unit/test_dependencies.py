"""Dependencies: each distribution that the package imports is declared, in the extra of the package that imports it."""

from __future__ import annotations

import ast
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
DISTRIBUTIONS = {"llama_cpp": "llama-cpp-python", "pydantic_core": "pydantic", "starlette": "fastapi"}
"""Distributions by module, where the names differ or one is a fixed part of the other."""
EXTRAS = {
    "foresay/server": "server",
    "foresay/text/grammar_library": "server",
    "foresay/integrations/lm_eval": "eval",
    "foresay/models/gpu": "gpu",
    "foresay/decoding/sampling_kernels": "gpu",
    "foresay/models/llama_cpp": "llamacpp",
    "foresay_lab/data": "lab",
    "foresay_lab/report": "lab",
    "foresay_lab/training": "train",
    "foresay_lab/workers/ray": "ray",
}
"""Extras by the path of the modules that may import what they install."""


def modules(tree: ast.AST) -> Iterator[str]:
    """First parts of the names that a module imports from anywhere else, `import_module("name")` included."""
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names = [str(node.module)]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            names = [str(one.value) for one in node.args[:1] if isinstance(one, ast.Constant)]
        yield from (name.partition(".")[0] for name in names)


def undeclared(path: str, text: str) -> set[str]:
    """Distributions that a module at a path under src imports, and that neither foresay nor its extra requires."""
    found = {
        name for name in modules(ast.parse(text)) if name not in sys.stdlib_module_names | {"foresay", "foresay_lab"}
    }
    wanted = list(PROJECT["dependencies"])
    for prefix, extra in EXTRAS.items():
        if path.removesuffix(".py") == prefix or path.startswith(f"{prefix}/"):
            wanted += PROJECT["optional-dependencies"][extra]
    declared = {canonicalize_name(Requirement(text).name) for text in wanted}
    return {canonicalize_name(DISTRIBUTIONS.get(name, name)) for name in found} - declared


def test_every_import_is_declared() -> None:
    files = [(path.relative_to(SOURCE).as_posix(), path) for path in sorted(SOURCE.rglob("*.py"))]
    missing = {name: undeclared(name, path.read_text(encoding="utf-8")) for name, path in files}
    assert len(files) > 100 and not {name: some for name, some in missing.items() if some}


@pytest.mark.parametrize(
    ("path", "text", "missing"),
    [
        ("foresay/server/app.py", "import fastapi\nfrom starlette.requests import Request", set()),
        ("foresay/engine/loop.py", "def late():\n    import fastapi", {"fastapi"}),
        ("foresay_lab/data/readers.py", 'importlib.import_module("polars.io")', {"polars"}),
        ("foresay_lab/workers/rays.py", "import os, ray.util", {"ray"}),
    ],
)
def test_an_undeclared_import_is_found(path: str, text: str, missing: set[str]) -> None:
    assert undeclared(path, text) == missing


def test_every_extra_is_named_once() -> None:
    """`dev` is made of the other extras and of tools, not of a copy of them."""
    extras = PROJECT["optional-dependencies"]
    tools = {canonicalize_name(Requirement(text).name) for text in extras["dev"]}
    [own] = [Requirement(text) for text in extras["dev"] if text.startswith("foresay[")]
    copied = {canonicalize_name(Requirement(text).name) for extra in own.extras for text in extras[extra]}
    assert {"server", "train", "lab", "docs"} <= own.extras <= set(extras) and not tools & copied
