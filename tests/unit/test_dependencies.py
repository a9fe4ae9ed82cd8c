"""Imports and pins: what is imported is there and declared by its package's extra, and what is needed has a pin."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import re
import sys
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from helpers.sources import imports

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRA = PROJECT["optional-dependencies"]
PINS = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
DISTRIBUTIONS = {"llama_cpp": "llama-cpp-python", "pydantic_core": "pydantic", "starlette": "fastapi"}
"""Distributions by module, where the names differ or one is a fixed part of the other."""
EXTRAS = {
    "foresay/server": "server",
    "foresay/text/grammar_library": "server",
    "foresay/integrations/lm_eval": "eval",
    "foresay/models/gpu": "gpu",
    "foresay/decoding/sampling_kernels": "gpu",
    "foresay/decoding/sampling_rows": "gpu",
    "foresay/models/llama_cpp": "llamacpp",
    "foresay_lab/data": "lab",
    "foresay_lab/report": "lab",
    "foresay_lab/training": "train",
    "foresay_lab/workers/ray": "ray",
}
"""Extras by the path of the modules that may import what they install."""
APART = {"llamacpp", "ray", "gpu"}
"""Extras whose versions the Makefile gives."""


def required(texts: list[str]) -> set[str]:
    """Names of the distributions of requirements."""
    return {canonicalize_name(Requirement(text).name) for text in texts}


def modules(source: str) -> set[str]:
    """First parts of the names that a module imports from anywhere else, `import_module("name")` included."""
    called = set(re.findall(r"""\bimport_module\(["']([\w.]+)["']""", source))
    return {name.partition(".")[0] for name in imports(source) | called} - {""}


def undeclared(path: str, text: str) -> set[str]:
    """Distributions that a module at a path under src imports, and that neither foresay nor its extra requires."""
    found = modules(text) - sys.stdlib_module_names - {"foresay", "foresay_lab"}
    wanted = list(PROJECT["dependencies"])
    for prefix, extra in EXTRAS.items():
        if path.removesuffix(".py") == prefix or path.startswith(f"{prefix}/"):
            wanted += EXTRA[extra]
    return {canonicalize_name(DISTRIBUTIONS.get(name, name)) for name in found} - required(wanted)


def test_every_import_is_declared() -> None:
    files = [(path.relative_to(SOURCE).as_posix(), path) for path in sorted(SOURCE.rglob("*.py"))]
    missing = {name: undeclared(name, path.read_text(encoding="utf-8")) for name, path in files}
    assert len(files) > 100 and not {name: some for name, some in missing.items() if some}
    for path, text, lacking in (
        ("foresay/server/app.py", "import fastapi\nfrom starlette.requests import Request", set()),
        ("foresay/engine/loop.py", "def late():\n    import fastapi", {"fastapi"}),
        ("foresay_lab/data/readers.py", 'importlib.import_module("polars.io")', {"polars"}),
        ("foresay_lab/workers/rays.py", "import os, ray.util", {"ray"}),
    ):
        assert undeclared(path, text) == lacking, "control"


def test_every_extra_is_named_once() -> None:
    """`dev` is made of the other extras and of tools, not of a copy of them."""
    [own] = [Requirement(text) for text in EXTRA["dev"] if text.startswith("foresay[")]
    copied = {name for extra in own.extras for name in required(EXTRA[extra])}
    assert {"server", "train", "lab", "docs"} <= own.extras <= set(EXTRA) and not required(EXTRA["dev"]) & copied


def absent(source: str) -> list[str]:
    """Imports from foresay that are missing."""
    out = []
    for module, _, name in (one.rpartition(".") for one in sorted(imports(source))):
        if module.partition(".")[0] in ("foresay", "foresay_lab"):
            try:
                found = hasattr(importlib.import_module(module), name)
                found = found or importlib.util.find_spec(f"{module}.{name}") is not None
            except ImportError:
                found = False
            out += [] if found else [f"{module}.{name}"]
    return out


def test_benchmarks_and_scripts_import_what_is_there() -> None:
    """They are run by hand, and seldom."""
    lacking = {}
    for path in (*ROOT.glob("benchmarks/*.py"), *(path for path in ROOT.glob("scripts/*") if path.is_file())):
        text = path.read_text(encoding="utf-8")
        assert path.suffix == ".py" or text.startswith("#!"), f"{path.name}: a script names what runs it"
        if path.suffix == ".py" or "python" in text.splitlines()[0]:
            lacking[path.name] = absent(text)
    assert len(lacking) > 10 and not any(lacking.values()), lacking
    source = "from foresay_lab.bench.bench import bench, Gone\nfrom foresay.nowhere import a\nfrom foresay import cli"
    assert absent(source) == ["foresay.nowhere.a", "foresay_lab.bench.bench.Gone"], "control"


def needed() -> set[str]:
    """Distributions that foresay requires with its extras; the requirements of those too, as far as they are installed."""
    extras = set(importlib.metadata.metadata("foresay").get_all("Provides-Extra", [])) - APART
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
    """A pin is a line with a name and a version, in order and there once."""
    assert [line for line in PINS if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*==[0-9][0-9A-Za-z.]*", line)] == []
    pinned = {canonicalize_name(line.partition("==")[0]) for line in PINS}
    assert sorted(PINS, key=str.lower) == PINS and len(pinned) == len(PINS)
    assert needed() - {"foresay", "setuptools", "pip"} <= pinned
    of_each_kind = {"torch", "fastapi", "datasets", "tensorboard", "mkdocs-material", "lm-eval", "griffelib"}
    assert of_each_kind <= needed(), "dependencies, extras, and what these need"


def test_the_makefile_has_the_other_versions_and_begins_with_the_newest_pip() -> None:
    for one in (Requirement(text) for extra in APART for text in EXTRA[extra]):
        [version] = re.findall(rf'"{re.escape(one.name)}==([0-9.]+)[";]', MAKEFILE)
        assert one.specifier.contains(version)
    made = re.findall(r" -m venv .*\n(.*)", MAKEFILE)
    assert len(made) == 4 and all(line.endswith(" --upgrade pip") for line in made)
