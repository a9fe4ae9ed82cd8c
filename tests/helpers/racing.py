"""Several threads at once, switched as often as Python can."""

from __future__ import annotations

import sys
from collections.abc import Callable
from threading import Thread


def race(work: Callable[[int], None], count: int = 3) -> list[Exception]:
    """Run work(1) .. work(count) side by side; returns what they raised."""
    errors: list[Exception] = []

    def caught(seed: int) -> None:
        try:
            work(seed)
        except Exception as error:
            errors.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [Thread(target=caught, args=(seed,)) for seed in range(1, count + 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    return errors
