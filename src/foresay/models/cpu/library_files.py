"""Shared libraries that are opened only if they are intact and no other user could have written them.

Owns which users may own a cached library and its folder, and the digest file next to a library. Knows nothing of its contents.
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
"""Permission bits that let the group or other users write."""
_DESCRIPTORS = Path("/proc/self/fd")


class UntrustedLibraryError(Exception):
    """A file or folder that another user could have written."""


class DamagedLibraryError(Exception):
    """A library that differs from the compiled one, by its digest."""


def make_private(folder: Path) -> None:
    """Create a folder for this user only, or check an existing one.

    Raises UntrustedLibraryError if another user could create files in the folder. If this user owns it, the permissions of other
    users are removed instead.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.stat()
    if found.st_uid == os.getuid() and found.st_mode & _OTHERS:
        folder.chmod(0o700)
        return
    check_folder(folder)


def check_folder(folder: Path) -> None:
    """Raise UntrustedLibraryError if another user could replace files in an existing folder."""
    found = folder.stat()
    if found.st_uid not in (os.getuid(), 0):
        raise UntrustedLibraryError(_wrong_owner(folder, found.st_uid))
    if found.st_mode & _OTHERS and not found.st_mode & stat.S_ISVTX:
        raise UntrustedLibraryError(_writable(folder, found.st_mode))


def open_library(path: Path, *, any_owner: bool = False) -> ctypes.CDLL:
    """Open the compiled library at a path.

    any_owner: for a library in the installed package, whose Python files have the same owner and mode. Raises
    FileNotFoundError if there is none, UntrustedLibraryError if another user could have written it, DamagedLibraryError if its
    digest differs, and OSError as the operating system does.
    """
    file = _checked(path, any_owner)
    try:
        with open(file, "rb", closefd=False) as binary:
            found = hashlib.file_digest(binary, "sha256").hexdigest()
        if found != _digest(path, any_owner):
            raise DamagedLibraryError(f"{path} does not match its digest")
        # open the checked file by its descriptor, since another file may have its name by now; the descriptor stays open
        # because the loader identifies libraries by name
        return ctypes.CDLL(f"{_DESCRIPTORS}/{file}" if _DESCRIPTORS.is_dir() else str(path))
    except BaseException:
        os.close(file)
        raise


@contextmanager
def write_library(path: Path) -> Iterator[Path]:
    """Yield a path to write a library to; it becomes `path`, with its digest, if the block succeeds. See `open_library`."""
    with work_folder(path.name, path.parent) as work:
        library, digest = work / path.name, work / _digest_path(path).name
        yield library
        digest.write_text(hashlib.sha256(library.read_bytes()).hexdigest(), encoding="ascii")
        for one in (digest, library):
            one.chmod(0o644)
            with one.open("rb") as file:
                os.fsync(file.fileno())
        os.replace(digest, _digest_path(path))
        os.replace(library, path)


def _digest_path(path: Path) -> Path:
    return path.with_suffix(".sha256")


def _digest(path: Path, any_owner: bool) -> str:
    try:
        file = _checked(_digest_path(path), any_owner)
    except FileNotFoundError:
        raise DamagedLibraryError(f"{path} has no digest") from None
    with open(file, encoding="ascii", errors="replace") as text:
        return text.read(64)


def _checked(path: Path, any_owner: bool) -> int:
    """Open a file for reading and return its descriptor.

    Raises UntrustedLibraryError if it is not a regular file, or, unless `any_owner`, if others could have written it.
    """
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    found = os.fstat(file)
    reason = None
    if not stat.S_ISREG(found.st_mode):
        reason = f"{path} is not a regular file and is not used"
    elif any_owner:
        pass
    elif found.st_uid not in (os.getuid(), 0):
        reason = _wrong_owner(path, found.st_uid)
    elif found.st_mode & _OTHERS:
        reason = _writable(path, found.st_mode)
    if reason is not None:
        os.close(file)
        raise UntrustedLibraryError(reason)
    return file


def _wrong_owner(path: Path, user: int) -> str:
    return f"{path} belongs to user {user}, not to user {os.getuid()} or root, and is not used"


def _writable(path: Path, mode: int) -> str:
    return f"{path} can be written by other users (mode {stat.S_IMODE(mode):o}) and is not used"
