"""The compiled kernels with a fault, for negative controls."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from foresay.models.cpu import build


@contextmanager
def broken_kernels(folder: Path, file: str, *changes: tuple[str, str], level: str = "-O1") -> Iterator[None]:
    """Replace the kernels by those whose file has each (right, wrong) change. folder: for sources and library."""
    for source in build.SOURCES:
        text = source.read_text()
        for right, wrong in changes if source.name == file else ():
            assert right in text
            text = text.replace(right, wrong)
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
