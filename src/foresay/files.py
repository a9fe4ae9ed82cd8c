"""Atomic writing of files, and the cache folder."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from hashlib import blake2b
from pathlib import Path
from time import time

from foresay.errors import ConfigError

_WORK = ".work"
_SAMPLED, _SAMPLES = 1 << 16, 1024
"""Bytes at the beginning of a file that its fingerprint reads, and samples of 64 bytes."""
_STALE_S = 3 * 86_400.0
"""Age from which a folder is one that a killed process left."""


def cache_dir() -> Path:
    """Return the cache folder: $FORESAY_CACHE, else $XDG_CACHE_HOME/foresay, else ~/.cache/foresay."""
    if own := os.environ.get("FORESAY_CACHE"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "foresay"


def fingerprint(path: str | os.PathLike[str]) -> bytes:
    """Return a digest of a file, or of the safetensors files of a folder: names, sizes and evenly spaced samples.

    Training changes nearly every number, so that the samples differ. Empty if there is no such file.
    """
    path, found = Path(path), blake2b(digest_size=8)
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    files = [one for one in files if one.is_file()]
    for one in files:
        size = one.stat().st_size
        found.update(f"{one.name if path.is_dir() else ''} {size} ".encode())
        with one.open("rb") as file:
            found.update(file.read(_SAMPLED))
            for i in range(_SAMPLES):
                file.seek(size * i // _SAMPLES)
                found.update(file.read(64))
    return found.digest() if files else b""


def unreadable(path: str | os.PathLike[str], error: OSError) -> ConfigError:
    """Return the error of a file that cannot be read."""
    return ConfigError(f"cannot be read: {error.strerror or error}", param="path", value=path)


@contextmanager
def writing(path: str | os.PathLike[str]) -> Iterator[None]:
    """Turn file system errors of writing in this block into ConfigError with the path and the reason."""
    try:
        yield
    except Exception as error:  # Rust libraries, such as safetensors and tokenizers, raise other types than OSError
        found = re.search(r"([^:]*) \(os error \d+\)", str(error))
        if found is None and not isinstance(error, OSError):
            raise
        reason = found[1].strip() if found else getattr(error, "strerror", None) or error
        raise ConfigError(f"cannot be written: {reason}", param="path", value=path) from None


@contextmanager
def work_folder(name: str, parent: Path | None = None) -> Iterator[Path]:
    """Create a folder in `parent` (by default the system's temporary folder) and remove it with its content at the end.

    The folder of a killed process is removed by a call with the same name and parent three days later.
    """
    parent = Path(tempfile.gettempdir()) if parent is None else parent
    with suppress(OSError):
        _remove_stale(parent, f".{name}-")
    with tempfile.TemporaryDirectory(prefix=f".{name}-", suffix=_WORK, dir=parent, ignore_cleanup_errors=True) as made:
        yield Path(made)


@contextmanager
def atomic_write(path: str | os.PathLike[str], *, parents: bool = False) -> Iterator[Path]:
    """Yield a path to write to; it replaces `path` when the block ends without an exception.

    The file's mode is set by the umask, independent of the library that wrote it. parents: create missing folders.
    Raises ConfigError with the path and the reason if the file system refuses.
    """
    path = Path(path)
    with writing(path):
        if parents:
            path.parent.mkdir(parents=True, exist_ok=True)
        with work_folder(path.name, path.parent) as work:
            whole = work / path.name
            whole.touch()
            yield whole
            usual_modes(work)
            os.replace(whole, path)


@contextmanager
def atomic_files(folder: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a folder whose files are moved to the existing `folder` when the block ends without an exception.

    Each file appears complete, with its mode set by the umask. Files of other names are kept.
    Raises ConfigError with the path and the reason if the file system refuses.
    """
    folder = Path(folder)
    with writing(folder), work_folder(folder.name, folder) as work:
        yield work
        usual_modes(work)
        for file in sorted(work.iterdir()):
            os.replace(file, folder / file.name)


def usual_modes(folder: Path) -> None:
    """Set the mode of every file in a folder by the umask; safetensors creates files with mode 0600."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    if not files:
        return
    probe = folder / f"{_WORK}-mode"
    probe.touch()
    mode = probe.stat().st_mode
    probe.unlink()
    for path in files:
        path.chmod(mode)


def _remove_stale(parent: Path, prefix: str) -> None:
    """Remove this user's old work folders in `parent`, with names that begin so."""
    own = os.geteuid() if hasattr(os, "geteuid") else 0  # always 0 on Windows
    for entry in os.scandir(parent):
        if entry.name.startswith(prefix) and entry.name.endswith(_WORK) and entry.is_dir(follow_symlinks=False):
            found = entry.stat(follow_symlinks=False)
            if found.st_uid == own and time() - found.st_mtime > _STALE_S:
                shutil.rmtree(entry.path, ignore_errors=True)
