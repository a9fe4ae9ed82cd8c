"""Tests of Triton kernels are left out where there is no Triton."""

from __future__ import annotations

from helpers.triton_path import HAS_TRITON

collect_ignore_glob = [] if HAS_TRITON else ["test_*.py"]
