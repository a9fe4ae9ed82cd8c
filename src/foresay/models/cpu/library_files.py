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
from io import BufferedReader
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
    """Create a folder for this user only, or check an existing one, which is made private if this user owns it.

    Raises UntrustedLibraryError if another user could create files in the folder.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.stat()
    if found.st_uid == os.getuid() and found.st_mode & _OTHERS:
        folder.chmod(0o700)
    else:
        check_owner(folder, found)


def check_owner(path: Path, found: os.stat_result) -> None:
    """Raise UntrustedLibraryError if another user could write a file, or replace files in a folder."""
    if found.st_uid not in (os.getuid(), 0):
        text = f"{path} belongs to user {found.st_uid}, not to user {os.getuid()} or root, and is not used"
        raise UntrustedLibraryError(text)
    is_sticky = stat.S_ISDIR(found.st_mode) and found.st_mode & stat.S_ISVTX
    if found.st_mode & _OTHERS and not is_sticky:
        mode = f"{stat.S_IMODE(found.st_mode):o}"
        raise UntrustedLibraryError(f"{path} can be written by other users (mode {mode}) and is not used")


def open_library(path: Path, *, any_owner: bool = False) -> ctypes.CDLL:
    """Open the compiled library at a path.

    any_owner: for a library in the installed package, whose Python files have the same owner and mode. Raises
    FileNotFoundError if there is none, UntrustedLibraryError if another user could have written it, DamagedLibraryError if its
    digest differs, and OSError as the operating system does.
    """
    with _opened(path, any_owner) as file:
        try:
            with _opened(path.with_suffix(".sha256"), any_owner) as digest:
                is_whole = hashlib.file_digest(file, "sha256").hexdigest().encode() == digest.read(64)
        except FileNotFoundError:
            raise DamagedLibraryError(f"{path} has no digest") from None
        if not is_whole:
            raise DamagedLibraryError(f"{path} does not match its digest")
        # open the checked file by a descriptor, since another file may have its name by now; the descriptor stays open
        # because the loader identifies libraries by name
        return ctypes.CDLL(f"{_DESCRIPTORS}/{os.dup(file.fileno())}" if _DESCRIPTORS.is_dir() else str(path))


@contextmanager
def write_library(path: Path) -> Iterator[Path]:
    """Yield a path to write a library to; it becomes `path`, with its digest, if the block succeeds. See `open_library`."""
    with work_folder(path.name, path.parent) as work:
        library = work / path.name
        yield library
        digest = library.with_suffix(".sha256")
        digest.write_text(hashlib.sha256(library.read_bytes()).hexdigest(), encoding="ascii")
        for one in (digest, library):
            one.chmod(0o644)
            with one.open("rb") as file:
                os.fsync(file.fileno())
        for one in (digest, library):
            os.replace(one, path.with_suffix(one.suffix))


@contextmanager
def _opened(path: Path, any_owner: bool) -> Iterator[BufferedReader]:
    """Open a regular file. Raises UntrustedLibraryError for another one and, unless `any_owner`, as `check_owner` does."""
    more = os.O_NOFOLLOW | os.O_NONBLOCK
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | more)) as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode):
            raise UntrustedLibraryError(f"{path} is not a regular file and is not used")
        if not any_owner:
            check_owner(path, found)
        yield file
