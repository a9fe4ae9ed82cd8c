"""Readers that do what none may, at the second of their files: negative controls of `helpers.fuzzing`."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from random import Random

from foresay.errors import ConfigError
from helpers.fuzzing import Format


def _write(place: Path, rng: Random) -> Path:
    (place / place.name).write_bytes(bytes([int(place.name)]))
    return place / place.name


def _format(check: Callable[[], object]) -> Format:
    """The first and last file are read, the third is refused."""
    return Format(_write, lambda path: {"1": check, "2": lambda: _refuse("refused")}.get(path.name, list)())


def _refuse(text: str) -> None:
    raise ConfigError(text)


FORMATS = {
    "another-error": _format(lambda: {}["x"]),
    "several-lines": _format(lambda: _refuse("one\ntwo")),
    "memory": _format(lambda: bytearray(2 << 30)),
    "crash": _format(os.abort),
    "hang": _format(lambda: time.sleep(1e6)),
}
