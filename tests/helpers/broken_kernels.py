"""The compiled kernels with other sources: with a fault, for negative controls, or over emulated instructions."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from foresay.models.cpu import build


@contextmanager
def broken_kernels(folder: Path, file: str, *changes: tuple[str, str], level: str = "-O1") -> Iterator[None]:
    """Replace the kernels by those whose file has each (right, wrong) change. folder: for sources and library."""
    with changed_kernels(folder, {file: changes}, level=level):
        yield


@contextmanager
def changed_kernels(
    folder: Path,
    changes: dict[str, tuple[tuple[str, str], ...]],
    replaced: dict[str, Path] | None = None,
    level: str = "-O1",
) -> Iterator[None]:
    """Replace the kernels by those with (old, new) changes by file, and with other files by name."""
    for source in build.SOURCES:
        text = (replaced or {}).get(source.name, source).read_text()
        for old, new in changes.get(source.name, ()):
            assert old in text
            text = text.replace(old, new)
        (folder / source.name).write_text(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FORESAY_CACHE", str(folder / "cache"))
        patch.setattr(build, "SOURCES", tuple(folder / source.name for source in build.SOURCES))
        patch.setattr(build, "_FLAGS", tuple(flag.replace("-O3", level) for flag in build._FLAGS))
        build.library.cache_clear()
        try:
            yield
        finally:
            build.library.cache_clear()
