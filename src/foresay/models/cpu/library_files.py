"""A shared library that is opened only where it is whole and nobody else could have written it.

Owns which users may own a kept library and its folder, and the digest next to a library. Knows nothing of what is in it.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from foresay.files import work_folder

_OTHERS = stat.S_IWGRP | stat.S_IWOTH
"""Rights by which a group or anybody may write."""
_DESCRIPTORS = Path("/proc/self/fd")


class UntrustedLibraryError(Exception):
    """A file or folder that another user could have written."""


class DamagedLibraryError(Exception):
    """A library that is not the one that was compiled."""


def make_private(folder: Path) -> None:
    """Make a folder for this user alone, or check the one that is there.

    Raises UntrustedLibraryError for a folder in which another user could put files; one of our own is taken back instead.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.stat()
    if found.st_uid == os.getuid() and found.st_mode & _OTHERS:
        folder.chmod(0o700)
        return
    if found.st_uid not in (os.getuid(), 0):
        raise UntrustedLibraryError(_belongs(folder, found.st_uid))
    if found.st_mode & _OTHERS and not found.st_mode & stat.S_ISVTX:
        raise UntrustedLibraryError(_writable(folder, found.st_mode))


def opened(path: Path) -> ctypes.CDLL:
    """Open the compiled library at a path.

    Raises FileNotFoundError if there is none, UntrustedLibraryError if another user could have written it, DamagedLibraryError if
    its digest differs, and OSError as the operating system does.
    """
    file = _checked(path)
    try:
        with open(file, "rb", closefd=False) as whole:
            found = hashlib.file_digest(whole, "sha256").hexdigest()
        if found != _digest(path):
            raise DamagedLibraryError(f"{path} does not have its digest")
        # the file that was checked, whatever has its name by now; its number stays taken, since the loader knows files by name
        return ctypes.CDLL(f"{_DESCRIPTORS}/{file}" if _DESCRIPTORS.is_dir() else str(path))
    except BaseException:
        os.close(file)
        raise


@contextmanager
def written(path: Path) -> Iterator[Path]:
    """Where to write the library that becomes `path`, with its digest, when the block ends well; see `opened`."""
    with work_folder(path.name, path.parent) as work:
        library, digest = work / path.name, work / _beside(path).name
        yield library
        digest.write_text(hashlib.sha256(library.read_bytes()).hexdigest(), encoding="ascii")
        for one in (digest, library):
            one.chmod(0o644)
            with one.open("rb") as file:
                os.fsync(file.fileno())
        os.replace(digest, _beside(path))
        os.replace(library, path)


def _beside(path: Path) -> Path:
    return path.with_suffix(".sha256")


def _digest(path: Path) -> str:
    try:
        file = _checked(_beside(path))
    except FileNotFoundError:
        raise DamagedLibraryError(f"{path} has no digest") from None
    with open(file, encoding="ascii", errors="replace") as text:
        return text.read(64)


def _checked(path: Path) -> int:
    """A file opened for reading that only we or root could have written."""
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    found = os.fstat(file)
    why = None
    if not stat.S_ISREG(found.st_mode):
        why = f"{path} is no file"
    elif found.st_uid not in (os.getuid(), 0):
        why = _belongs(path, found.st_uid)
    elif found.st_mode & _OTHERS:
        why = _writable(path, found.st_mode)
    if why is not None:
        os.close(file)
        raise UntrustedLibraryError(why)
    return file


def _belongs(path: Path, user: int) -> str:
    return f"{path} belongs to user {user}, not to user {os.getuid()} or root, and is not used"


def _writable(path: Path, mode: int) -> str:
    return f"{path} can be written by other users (mode {stat.S_IMODE(mode):o}) and is not used"
