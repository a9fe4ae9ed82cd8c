"""A wheel with compiled kernels: for one kind of machine and any version of Python, and used without a compiler."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from foresay.models.cpu import build, levels
from helpers import small_kernels

ROOT = Path(__file__).parents[4]
USABLE = [level for level in levels.levels() if levels.supported(level, build.processor_flags())]


def wheel(folder: Path, prebuild: str) -> Path:
    """Built from a copy, because building leaves files in the source tree; the kernels are compiled quickly."""
    source = folder / "source"
    source.mkdir()
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        (source / name).write_bytes((ROOT / name).read_bytes())
    (source / "src").mkdir()
    subprocess.run(["cp", "-r", str(ROOT / "src" / "foresay"), str(source / "src")], check=True)
    kernels = source / "src" / "foresay" / "models" / "cpu"
    (kernels / "kernels.cpp").write_text(small_kernels.source(*small_kernels.FUNCTIONS))
    (kernels / "multiply.cpp").write_text("")
    build = f"from setuptools import build_meta; build_meta.build_wheel({str(folder)!r})"  # as pip calls it
    environment = {**os.environ, "FORESAY_PREBUILD": prebuild}
    subprocess.run([sys.executable, "-c", build], cwd=source, check=True, env=environment, capture_output=True)
    [made] = folder.glob("*.whl")
    return made


@pytest.mark.slow
def test_a_wheel_with_kernels_needs_no_compiler(tmp_path: Path) -> None:
    level = USABLE[-1] if USABLE else levels.levels()[-1]
    made = wheel(tmp_path, level)
    assert made.name.split("-")[2:4] == ["py3", "none"] and not made.stem.endswith("-any")
    with zipfile.ZipFile(made) as archive:
        names = [name for name in archive.namelist() if "/prebuilt/" in name]
        archive.extractall(tmp_path / "installed")
    assert sorted(Path(name).suffix for name in names) == [".sha256", ".so"]
    assert all(name.startswith("foresay/models/cpu/prebuilt/kernels-" + level) for name in names)
    code = "from foresay.models.cpu import build; print(build.library_path()); assert build.library() is not None"
    environment = {
        **os.environ,
        "PYTHONPATH": str(tmp_path / "installed"),
        "CXX": "no-such-compiler",
        "FORESAY_CACHE": str(tmp_path / "cache"),
    }
    done = subprocess.run([sys.executable, "-c", code], check=True, env=environment, capture_output=True, text=True)
    assert done.stdout.strip() == str(tmp_path / "installed" / next(name for name in names if name.endswith(".so")))
    assert not (tmp_path / "cache").exists()


def test_a_wheel_without_kernels_is_for_any_machine(tmp_path: Path) -> None:
    made = wheel(tmp_path, "")
    assert made.name.endswith("-py3-none-any.whl")
    with zipfile.ZipFile(made) as archive:
        assert not [name for name in archive.namelist() if "prebuilt" in name]


def test_compiling_needs_no_pytorch(tmp_path: Path) -> None:
    """As in the environment in which a wheel is built. The compiler writes empty files."""
    (tmp_path / "torch.py").write_text("raise ImportError('not here')")
    compiler = tmp_path / "compiler"
    compiler.write_text(
        '#!/bin/sh\n[ "$1" = --version ] && exec echo 1\nwhile [ "$1" != -o ]; do shift; done\n: > "$2"\n'
    )
    compiler.chmod(0o755)
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT / 'src'}", "CXX": str(compiler)}
    command = [sys.executable, "-m", "foresay.models.cpu", str(tmp_path / "out"), levels.levels()[-1]]
    subprocess.run(command, check=True, env=environment, capture_output=True)
    assert len(list((tmp_path / "out").glob("*.so"))) == 1
