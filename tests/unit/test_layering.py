"""Who may import whom: DESIGN.md's order, read off the sources."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import foresay

SOURCE = Path(foresay.__file__).parent
LAYERS = [
    {"errors"},
    {"params", "checks", "files"},
    {"core"},
    {"randomness", "sampling", "acceptance", "theory", "processing"},
    {"models"},
    {"lengths"},
    {"step"},
    {"drafters"},
    {"engine"},
    {"generator", "text", "prompts", "loading", "translation", "expressions", "building", "resolving", "settings"},
    {"records"},
    {"integrations", "server", "training", "lab"},
    {"cli", "__main__"},
]
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}
STRANGERS = {"server", "training", "lab"}
MAY_IMPORT_TRANSFORMERS = {
    f"models/{name}.py" for name in ("causal", "seq2seq", "attention", "catalog", "packaged", "reading")
}
FILES = sorted(path.relative_to(SOURCE).as_posix() for path in SOURCE.rglob("*.py"))
FILE = pytest.mark.parametrize("file", FILES)

PUBLIC = [
    "Cascade",
    "Chunk",
    "ConfidenceLength",
    "ConfigError",
    "ConstantLength",
    "ContextLengthError",
    "Engine",
    "EntropyLength",
    "FinishReason",
    "ForesayError",
    "Generation",
    "Generator",
    "Guess",
    "HeuristicLength",
    "MaxGram",
    "ModelDrafter",
    "ModelLoadError",
    "ModelNotFoundError",
    "NgramStore",
    "NgramStoreDrafter",
    "NgramTable",
    "Origin",
    "PastRequests",
    "PromptError",
    "PromptLookup",
    "Proposal",
    "Row",
    "Rows",
    "SamplingParams",
    "SelfDrafter",
    "Stats",
    "Step",
    "SuffixDrafter",
    "TableModel",
    "ThroughputLength",
    "UnknownNameError",
    "UnsupportedModelError",
    "Verdict",
    "VocabularyMismatchError",
    "__version__",
    "change",
    "generate",
    "load",
]


def home(file: str) -> str:
    """The part of the house a file belongs to: `models/slots.py` -> models, `text.py` -> text."""
    return file.split("/", 1)[0].removesuffix(".py")


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def imports(node: ast.AST, package: str, *, local: bool) -> Iterator[str]:
    """Full names of what a module imports; with `local`, also inside functions and under TYPE_CHECKING."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from (alias.name for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            parent = package.rsplit(".", child.level - 1)[0] if child.level else ""
            base = ".".join(part for part in (parent, child.module) if part)
            yield from (f"{base}.{alias.name}" for alias in child.names)
        elif local or not (isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef) or is_type_checking(child)):
            yield from imports(child, package, local=local)
        elif is_type_checking(child):
            yield from imports(ast.Module(child.orelse, []), package, local=local)


def imported(file: str, *, local: bool = False) -> list[str]:
    package = ".".join(["foresay", *file.split("/")[:-1]])
    return list(imports(ast.parse((SOURCE / file).read_text()), package, local=local))


def parts(names: list[str]) -> set[str]:
    """Which parts of foresay are imported; `from foresay import __version__` is none."""
    inner = {name.split(".")[1] for name in names if name.startswith("foresay.")}
    return {name for name in inner if (SOURCE / name).is_dir() or (SOURCE / f"{name}.py").is_file()}


@FILE
def test_every_file_has_a_place(file: str) -> None:
    assert file == "__init__.py" or home(file) in RANK, f"{file} is in no layer; DESIGN.md says where parts belong"


@FILE
def test_imports_go_down(file: str) -> None:
    if file == "__init__.py":
        assert parts(imported(file)) == set()
        return
    own = home(file)
    used = parts(imported(file)) - {own}
    higher = {part for part in used if RANK[part] > RANK[own]}
    assert not higher, f"{file} imports {sorted(higher)}, which DESIGN.md puts above {own}"
    assert own not in STRANGERS or not used & STRANGERS, "server, training and lab do not import each other"


@FILE
def test_up_to_the_engine_nothing_imports_transformers(file: str) -> None:
    if file != "__init__.py" and RANK[home(file)] > RANK["engine"]:
        return
    used = {name.split(".")[0] for name in imported(file, local=True)}
    assert "transformers" not in used or file in MAY_IMPORT_TRANSFORMERS


@FILE
def test_up_to_the_engine_nothing_prints(file: str) -> None:
    if file != "__init__.py" and RANK[home(file)] > RANK["engine"]:
        return
    calls = [node for node in ast.walk(ast.parse((SOURCE / file).read_text())) if isinstance(node, ast.Call)]
    assert not [call for call in calls if isinstance(call.func, ast.Name) and call.func.id == "print"]


def test_the_reader_sees_what_it_must_and_exempts_what_it_may() -> None:
    source = (
        "import a\nfrom b.c import d\nfrom . import e\nfrom ..f import g\nif TYPE_CHECKING:\n    import h\n"
        "else:\n    import i\ntry:\n    import j\nexcept ImportError:\n    pass\ndef k():\n    import l\n"
        "class M:\n    import n\n"
    )
    tree = ast.parse(source)
    top = {"a", "b.c.d", "foresay.models.e", "foresay.f.g", "i", "j", "n"}
    assert set(imports(tree, "foresay.models", local=False)) == top
    assert set(imports(tree, "foresay.models", local=True)) == top | {"h", "l"}


def test_the_search_finds_the_sources() -> None:
    assert {"core.py", "models/causal.py", "engine/loop.py", "cli/app.py"} <= set(FILES)
    assert "transformers" in {name.split(".")[0] for name in imported("models/causal.py")}
    assert parts(imported("step.py")) >= {"core", "models", "sampling"}


def loaded_by(statement: str) -> set[str]:
    """Top-level modules that a fresh interpreter has loaded after a statement."""
    code = f"import sys, json\n{statement}\nprint(json.dumps(sorted({{name.split('.')[0] for name in sys.modules}})))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(json.loads(out.stdout))


def test_importing_foresay_loads_nothing_heavy() -> None:
    loaded = loaded_by("import foresay; foresay.__all__; dir(foresay); foresay.__version__")
    assert "foresay" in loaded
    assert not loaded & {"torch", "transformers", "fastapi", "numpy", "typer", "rich"}


def test_the_engine_loads_no_transformers() -> None:
    loaded = loaded_by("from foresay import Engine, ModelDrafter, PromptLookup, TableModel, SamplingParams")
    assert "torch" in loaded
    assert not loaded & {"transformers", "tokenizers", "fastapi", "typer"}


def test_public_names_are_pinned() -> None:
    assert foresay.__all__ == PUBLIC
    assert dir(foresay) == PUBLIC


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_resolves(name: str) -> None:
    value = getattr(foresay, name)
    assert value is not None
    if name != "__version__":
        assert value.__name__ == name
        assert value.__module__.startswith("foresay.")


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'foresay' has no attribute 'nonsense'"):
        foresay.nonsense  # noqa: B018
