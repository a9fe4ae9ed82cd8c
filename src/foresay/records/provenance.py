"""The provenance of a file: versions, machine, commit, arguments, time.

Owns the collection of these values. Knows no file and no results.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

PACKAGES = ("foresay", "torch", "transformers", "numpy")


def machine() -> dict[str, Any]:
    """Describe the machine that times depend on: system, processor, available cores, threads and GPUs."""
    out: dict[str, Any] = {
        "system": f"{platform.system()} {platform.machine()}",
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": torch.get_num_threads(),
    }
    if torch.cuda.is_available():
        out["gpus"] = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return out


def provenance(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Collect versions, machine, commit, arguments and time. arguments: of the command line; by default this process's."""
    versions = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "versions": versions,
        "machine": machine(),
        "commit": _commit(),
        "arguments": list(sys.argv[1:] if arguments is None else arguments),
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _commit() -> str | None:
    """Return the commit of the source tree, with "+" for uncommitted changes, or None outside a checkout."""
    folder = Path(__file__).parents[3]
    if not (folder / ".git").exists():
        return None

    def git(*arguments: str) -> str:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=10, check=True
        )
        return done.stdout.strip()

    try:
        return git("rev-parse", "--short=12", "HEAD") + ("+" if git("status", "--porcelain", "-uno") else "")
    except (OSError, subprocess.SubprocessError):
        return None
