"""Number of threads for PyTorch's operations in a process whose kernels have threads of their own.

After every parallel operation OpenMP's threads spin for milliseconds on the cores that the kernels' threads need next: on two
cores a pass after the distributions of eight rows took half as long again. So a decoding loop whose passes use their own threads
runs everything between them under `single_threaded`, and operations that are large enough for all cores use `all_threads`. Both
apply to the calling thread only, unlike torch.set_num_threads. Knows no model.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch

MIN_ELEMENTS = 1 << 22
"""Numbers from which on an operation gains more by every core than its threads' spinning costs the pass behind it."""


class _Held(threading.local):
    wanted: int | None = None
    """The user's number, while this thread is alone."""


_held = _Held()


def num_threads() -> int:
    """The threads that the user lets this process take, for this thread's kernels."""
    return torch.get_num_threads() if _held.wanted is None else _held.wanted


@contextmanager
def single_threaded() -> Iterator[None]:
    """This thread's operations of PyTorch take one thread, but for those under `all_threads`."""
    before, set_threads = torch.get_num_threads(), _setter()
    if _held.wanted is not None or before <= 1 or set_threads is None:
        yield
        return
    _held.wanted = before
    set_threads(1)
    try:
        yield
    finally:
        _held.wanted = None
        if torch.get_num_threads() == 1:  # else somebody set it in between
            set_threads(before)


@contextmanager
def all_threads(numbers: int = MIN_ELEMENTS) -> Iterator[None]:
    """Inside `single_threaded`, as many threads as the user lets, for operations over so many numbers; few stay alone."""
    before, set_threads = _held.wanted, _setter()
    if before is None or numbers < MIN_ELEMENTS or set_threads is None:
        yield
        return
    _held.wanted = None
    set_threads(before)
    try:
        yield
    finally:
        _held.wanted = torch.get_num_threads()
        set_threads(1)


@cache
def _setter() -> Callable[[int], Any] | None:
    """OpenMP's own call for a thread's number, of the library that PyTorch runs on; None where it cannot be had."""
    for name in ("libtorch_cpu.so", "libtorch_cpu.dylib"):
        try:
            # by PyTorch's handle: another OpenMP may be on the machine, whose numbers PyTorch does not read
            found = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / name)).omp_set_num_threads
        except (OSError, AttributeError):
            continue
        found.argtypes, found.restype = [ctypes.c_int], None
        before = torch.get_num_threads()
        found(before + 1)
        heard = torch.get_num_threads() == before + 1
        found(before)
        return found if heard else None
    return None
