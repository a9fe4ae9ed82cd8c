"""Files that are written whole or not at all, and the folder of what is kept between runs."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from foresay.errors import ConfigError


def cache_dir() -> Path:
    """Where what was made once is kept: $FORESAY_CACHE, else $XDG_CACHE_HOME/foresay, else ~/.cache/foresay."""
    if own := os.environ.get("FORESAY_CACHE"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "foresay"


@contextmanager
def atomic_write(path: str | os.PathLike[str], *, parents: bool = False) -> Iterator[Path]:
    """Where to write what becomes `path` when the block ends well; until then, and otherwise, `path` is as it was.

    The file gets the rights that the umask leaves, whatever its writer gave it. parents: make folders that are missing.
    Raises ConfigError, with the path and the reason, where the file system refuses.
    """
    path = Path(path)
    try:
        if parents:
            path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{path.name}-", dir=path.parent) as work:
            whole = Path(work) / path.name
            whole.touch()
            mode = whole.stat().st_mode
            yield whole
            whole.chmod(mode)
            os.replace(whole, path)
    except OSError as error:
        raise ConfigError(f"cannot write {str(path)!r}: {error.strerror or error}") from None
