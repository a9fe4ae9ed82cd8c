"""Triton, which `make` installs outside of the environment's packages; there are builds for Linux on x86-64 alone."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

if find_spec("triton") is None:
    sys.path.append(str(Path(sys.prefix) / "triton"))
HAS_TRITON = find_spec("triton") is not None
