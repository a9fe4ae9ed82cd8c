"""The tests' own house rules: where they stand, what they may import, and that none of them steps aside."""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path

import foresay
from helpers.sources import imports

SOURCE = Path(foresay.__file__).parents[1]
TESTS = Path(__file__).parents[1]
FILES = sorted(path.relative_to(TESTS).as_posix() for path in TESTS.rglob("*.py"))
ROOMS = sorted(
    path.relative_to(TESTS).as_posix()
    for kind in ("unit", "integration")
    for path in (TESTS / kind).rglob("*")
    if path.is_dir() and any(path.rglob("test_*.py"))
)
DATA = "clients/cases"
"""A folder of tests and of the data that they read; its folders have data only."""
STEPPING_ASIDE = {"skip", "skipif", "importorskip", "exit", "xfail", "SkipTest", "skipTest", "skipUnless"}


def foreign(source: str) -> set[str]:
    """Imports that lead into another test module, or into a conftest."""
    modules = {Path(file).stem for file in FILES if not file.startswith("helpers/")}
    found = set()
    for name in imports(source):
        parts = name.split(".")
        if parts[0] in ("", "tests") or parts[0] in modules or any(part.startswith("test_") for part in parts):
            found.add(name)
    return found


def asides(source: str) -> set[str]:
    """Names of pytest's and unittest's ways not to run a test, wherever they are read off a module."""
    out = set[str]()
    for node in ast.walk(ast.parse(source if any(name in source for name in STEPPING_ASIDE) else "")):
        if isinstance(node, ast.Attribute) and node.attr in STEPPING_ASIDE:
            root: ast.expr = node
            while isinstance(root, ast.Attribute):
                root = root.value
            if isinstance(root, ast.Name) and root.id in ("pytest", "unittest", "self"):
                out.add(node.attr)
        elif isinstance(node, ast.ImportFrom) and node.module in ("pytest", "unittest"):
            out |= {alias.name for alias in node.names} & STEPPING_ASIDE
    return out


def of_files(reader: Callable[[str], set[str]]) -> dict[str, set[str]]:
    """Each file for which a reader of sources returns something, with what it returns."""
    found = {file: reader((TESTS / file).read_text(encoding="utf-8")) for file in FILES}
    return {file: names for file, names in found.items() if names}


def test_no_file_imports_a_test_module() -> None:
    assert of_files(foreign) == {}, "helpers lie in tests/helpers"


def room_of(folder: str) -> str:
    """The package whose tests a folder has: unit/server -> foresay/server, unit/foresay_lab/data -> foresay_lab/data."""
    inside = folder.split("/", 1)[1]
    return inside if inside.split("/")[0] == "foresay_lab" else f"foresay/{inside}"


def test_every_folder_is_a_room_of_the_source() -> None:
    assert [room for room in map(room_of, ROOMS) if not (SOURCE / room).is_dir()] == []


def test_nothing_outside_gpu_steps_aside() -> None:
    """A test that is not run reports nothing; where it cannot run, the machine is wrong."""
    assert [file for file in of_files(asides) if not file.startswith("gpu/")] == []


def misplaced(file: str) -> bool:
    folder, _, name = file.rpartition("/")
    top = folder.split("/", 1)[0]
    kinds = "unit integration distribution gpu engines browser clients simulation"
    if top not in ("", "helpers", *kinds.split()):
        return True
    if top == "simulation":  # its modules are used nowhere else
        return False
    if folder == DATA or folder.startswith(f"{DATA}/"):
        return name.startswith("test_") and folder != DATA
    return name.startswith("test_") != (top not in ("", "helpers")) and name != "conftest.py"


def test_tests_lie_where_they_are_found() -> None:
    assert [file for file in FILES if misplaced(file)] == []


def test_the_readers_see_what_they_look_for() -> None:
    """Negative controls."""
    for source in (
        "from test_loop_law import run",
        "import test_smollm2",
        "def f():\n    from tests.helpers import tiny",
        "from .test_record import begun",
        "from conftest import _seeded",
        "from integration.cli.test_chat import answers",
    ):
        assert foreign(source), source
    assert not foreign("import foresay\nfrom helpers.tiny import save\nfrom helpers import making")
    for source in (
        "import pytest\n@pytest.mark.skipif(True, reason='')\ndef test(): ...",
        "import pytest\nx = pytest.importorskip('x')",
        "from pytest import skip",
        "class T:\n    def test(self):\n        self.skipTest('')",
    ):
        assert asides(source), source
    assert not asides("import sys\nsys.exit(1)\nwork.skip = 3")
    assert all(map(misplaced, ("units/test_a.py", "helpers/test_a.py", "unit/helper.py", "test_a.py")))
    assert all(map(misplaced, ("clients/helper.py", "clients/cases/vllm/test_a.py", "clients/cases_too/a.py")))
    assert not any(map(misplaced, ("clients/test_a.py", "clients/cases/test_a.py", "clients/cases/vllm/a.py")))
    assert {"unit/test_tests.py", "helpers/waiting.py", "gpu/test_gpu.py"} <= set(FILES) and len(ROOMS) > 20
