"""Waiting for what another thread or process does, with a bound that only a failure reaches."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

PATIENCE_S = 120.0
"""Long enough for a machine that does many other things."""
_PAUSE_S = 0.005


def wait_until(happened: Callable[[], object], what: str, limit_s: float = PATIENCE_S) -> None:
    """Return when `happened()` is true; fail, stating what was waited for, when it is not within the limit."""
    until = time.monotonic() + limit_s
    while not happened():
        if time.monotonic() > until:
            pytest.fail(f"waited {limit_s:g} s without effect: {what}")
        time.sleep(_PAUSE_S)


def has_ended(pid: int) -> bool:
    """Whether no process has that id, or one that has ended and waits to be reaped."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    state = Path(f"/proc/{pid}/stat")
    try:
        return state.read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except OSError:  # gone meanwhile, or a system without /proc, where the first question is all
        return state.parent.parent.exists() and not state.exists()
