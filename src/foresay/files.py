"""Files that are written whole or not at all, and the folder of what is kept between runs."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from time import time

from foresay.errors import ConfigError

try:
    import fcntl
except ImportError:  # Windows: what a killed process leaves there stays
    fcntl = None  # type: ignore[assignment]

_WORK = ".work"
_STALE_S = 60.0
"""Age from which an unlocked folder is stale: between making one and locking it lies a moment."""


def cache_dir() -> Path:
    """Where what was made once is kept: $FORESAY_CACHE, else $XDG_CACHE_HOME/foresay, else ~/.cache/foresay."""
    if own := os.environ.get("FORESAY_CACHE"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "foresay"


@contextmanager
def writing(path: str | os.PathLike[str]) -> Iterator[None]:
    """Raise ConfigError, with the path and the reason, where the file system refuses what is written in this block."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"cannot write {os.fspath(path)!r}: {error.strerror or error}") from None
    except Exception as error:  # libraries in Rust, such as safetensors and tokenizers, have errors of their own for it
        if (found := re.search(r"([^:]*) \(os error \d+\)", str(error))) is None:
            raise
        raise ConfigError(f"cannot write {os.fspath(path)!r}: {found[1].strip()}") from None


@contextmanager
def work_folder(name: str, parent: Path | None = None) -> Iterator[Path]:
    """A new folder in `parent`, by default the system's for temporary files, that is removed with what is in it.

    Processes that are killed leave theirs: it is removed by the next one with the same name and parent.
    """
    parent = Path(tempfile.gettempdir()) if parent is None else parent
    _remove_stale(name, parent)
    with tempfile.TemporaryDirectory(prefix=f".{name}-", suffix=_WORK, dir=parent, ignore_cleanup_errors=True) as made:
        lock = os.open(made, os.O_RDONLY) if fcntl is not None else None
        try:
            if lock is not None:
                with suppress(OSError):  # a file system without locks
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield Path(made)
        finally:
            if lock is not None:
                os.close(lock)


@contextmanager
def atomic_write(path: str | os.PathLike[str], *, parents: bool = False) -> Iterator[Path]:
    """Where to write what becomes `path` when the block ends well; until then, and otherwise, `path` is as it was.

    The file gets the rights that the umask leaves, whatever its writer gave it. parents: make folders that are missing.
    Raises ConfigError, with the path and the reason, where the file system refuses.
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
    """A folder to write files in that are moved to `folder`, which exists, once the block has ended well.

    Each file appears whole, with the rights that the umask leaves. Files of other names stay as they are.
    Raises ConfigError, with the path and the reason, where the file system refuses.
    """
    folder = Path(folder)
    with writing(folder), work_folder(folder.name, folder) as work:
        yield work
        usual_modes(work)
        for file in sorted(work.iterdir()):
            os.replace(file, folder / file.name)


def usual_modes(folder: Path) -> None:
    """Give every file of a folder the rights that the umask leaves; safetensors gives its own to their owner alone."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    if not files:
        return
    probe = folder / f"{_WORK}-mode"
    probe.touch()
    mode = probe.stat().st_mode
    probe.unlink()
    for path in files:
        path.chmod(mode)


def _remove_stale(name: str, parent: Path) -> None:
    """Remove work folders of that name that are ours, and that no process has locked."""
    if fcntl is None:
        return
    for entry in os.scandir(parent):
        if entry.name.startswith(f".{name}-") and entry.name.endswith(_WORK) and entry.is_dir(follow_symlinks=False):
            with suppress(OSError):  # somebody else's, locked or already gone
                _remove_unlocked(entry)


def _remove_unlocked(entry: os.DirEntry[str]) -> None:
    found = entry.stat(follow_symlinks=False)
    if found.st_uid != os.geteuid() or time() - found.st_mtime < _STALE_S:
        return
    lock = os.open(entry.path, os.O_RDONLY | os.O_NOFOLLOW)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(entry.path, ignore_errors=True)
    finally:
        os.close(lock)
