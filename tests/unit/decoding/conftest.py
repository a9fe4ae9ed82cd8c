"""Tests of Triton kernels are left out where there is no Triton."""

from __future__ import annotations

from helpers.triton_path import HAS_TRITON

collect_ignore = [] if HAS_TRITON else ["test_sampling_kernels.py", "test_waits.py"]
