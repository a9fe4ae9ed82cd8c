"""Readers that do what none may, at the second of their files: negative controls of `helpers.fuzzing`."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from foresay.errors import ConfigError
from helpers.fuzzing import Format


def _cases(seed: int, count: int, folder: Path) -> Iterator[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(count):
        (folder / str(number)).write_bytes(bytes([number]))
        yield folder / str(number)


def _format(check: Callable[[], object]) -> Format:
    """The first and last file are read, the third is refused."""

    def read(path: Path) -> None:
        if path.name == "1":
            check()
        if path.name == "2":
            _refuse("refused")

    return Format(_cases, read)


def _refuse(text: str) -> None:
    raise ConfigError(text)


FORMATS = {
    "another-error": _format(lambda: {}["x"]),
    "several-lines": _format(lambda: _refuse("one\ntwo")),
    "memory": _format(lambda: bytearray(2 << 30)),
    "crash": _format(os.abort),
    "hang": _format(lambda: time.sleep(1e6)),
}
