"""Times of the parts of a step: of the work on the device, not of the launches, and without what happens once.

A device computes while the host goes on, so that on a GPU the parts are measured by events in its stream. Compiling and capturing
a pass takes as long as many passes and happens once: `one_time` excludes it, so that no policy takes it for the cost of a token.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from time import perf_counter
from typing import Any

import torch


class _Excluded(threading.local):
    seconds = 0.0


_excluded = _Excluded()


@contextmanager
def one_time() -> Iterator[None]:
    """Exclude the time of this block from the step of this thread that it is a part of."""
    began = perf_counter()
    try:
        yield
    finally:
        _excluded.seconds += perf_counter() - began


class Clock:
    """Marks in a step, the first one at its beginning."""

    def __init__(self, device: torch.device) -> None:
        self._device = device if device.type == "cuda" else None
        self._marks: list[tuple[Any, float, float]] = []
        self.mark()

    def mark(self) -> None:
        """Mark the end of a part."""
        event = None
        if self._device is not None:
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record(torch.cuda.current_stream(self._device))
        self._marks.append((event, perf_counter(), _excluded.seconds))

    def parts(self) -> list[float]:
        """Seconds of each part up to the last mark, which the device must have reached."""
        out = []
        for (one, began, before), (other, ended, after) in pairwise(self._marks):
            if other is not None:  # on another GPU than the one that was read, it may be about to be reached
                other.synchronize()
            took = ended - began if one is None else one.elapsed_time(other) / 1000
            out.append(max(0.0, took - (after - before)))
        return out

    def total(self) -> float:
        """Seconds since the first mark, by the host."""
        _, began, before = self._marks[0]
        return perf_counter() - began - (_excluded.seconds - before)
