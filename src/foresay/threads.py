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
"""Number of elements from which on an operation gains more by all cores than its spinning threads cost the next pass."""


class _Saved(threading.local):
    num_threads: int | None = None
    """The user's setting, while this thread is under `single_threaded`."""


_saved = _Saved()


def num_threads() -> int:
    """Return the number of threads that the user has set, for this thread's kernels."""
    return torch.get_num_threads() if _saved.num_threads is None else _saved.num_threads


@contextmanager
def single_threaded() -> Iterator[None]:
    """Run this thread's PyTorch operations on one thread, except those under `all_threads`."""
    before, set_threads = torch.get_num_threads(), _setter()
    if _saved.num_threads is not None or before <= 1 or set_threads is None:
        yield
        return
    _saved.num_threads = before
    set_threads(1)
    try:
        yield
    finally:
        _saved.num_threads = None
        if torch.get_num_threads() == 1:  # otherwise it was set inside the block
            set_threads(before)


@contextmanager
def all_threads(elements: int = MIN_ELEMENTS) -> Iterator[None]:
    """Inside `single_threaded`, use the user's number of threads for a large operation.

    Args:
        elements: Number of elements of the operation; one thread below MIN_ELEMENTS.
    """
    before, set_threads = _saved.num_threads, _setter()
    if before is None or elements < MIN_ELEMENTS or set_threads is None:
        yield
        return
    _saved.num_threads = None
    set_threads(before)
    try:
        yield
    finally:
        _saved.num_threads = torch.get_num_threads()
        set_threads(1)


@cache
def _setter() -> Callable[[int], Any] | None:
    """Return omp_set_num_threads of the OpenMP library that PyTorch uses; None if it is not available."""
    for name in ("libtorch_cpu.so", "libtorch_cpu.dylib"):
        try:
            # through PyTorch's library: another OpenMP in the process would not affect PyTorch
            found = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / name)).omp_set_num_threads
        except (OSError, AttributeError):
            continue
        found.argtypes, found.restype = [ctypes.c_int], None
        before = torch.get_num_threads()
        found(before + 1)
        effective = torch.get_num_threads() == before + 1
        found(before)
        return found if effective else None
    return None
