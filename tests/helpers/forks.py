"""Programs in processes that begin with everything imported: forks of a process that imports it once and has no threads."""

from __future__ import annotations

import multiprocessing
import os
import runpy
import socket
import sys
from collections.abc import Mapping
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch

from helpers import tiny

_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(["foresay_lab.commands.distill", "foresay_lab.replay.record", "foresay.cli.generate"])


def fork(command: list[str], out: Path, **changes: str) -> BaseProcess:
    """Start a module, or a script that is a path, with arguments. out: file or named pipe of what it prints; errors, `.err`."""
    process = _FORKS.Process(target=_run, args=(command, str(out), tiny.environment(**changes)), daemon=True)
    process.start()
    return process


def _run(command: list[str], out: str, environment: Mapping[str, str]) -> None:
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined] - it may have children
    os.environ.clear()
    os.environ.update(environment)
    for name, path, standard in (("stdout", out, 1), ("stderr", f"{out}.err", 2)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), standard)
        buffering = 1 if name == "stderr" else -1
        setattr(sys, name, open(standard, "w", buffering, closefd=False))  # noqa: SIM115 - the one before may be a file
    torch.set_num_threads(1)
    sys.argv = command[:]
    if command[0].endswith(".py"):
        runpy.run_path(command[0], run_name="__main__")
    else:
        runpy.run_module(command[0], run_name="__main__", alter_sys=True)


def run_two(command: list[str], folder: Path, timeout_s: float = 240) -> list[str]:
    """Output of two processes that find each other as torchrun's do; both succeed."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        common = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
        common["MASTER_PORT"] = str(free.getsockname()[1])
    outs = [folder / f"{rank}.out" for rank in (0, 1)]
    both = [fork(command, out, RANK=out.stem, LOCAL_RANK=out.stem, **common) for out in outs]
    for process, out in zip(both, outs, strict=True):
        process.join(timeout_s)
        assert process.exitcode == 0, Path(f"{out}.err").read_text()[-3000:]
    return [out.read_text() for out in outs]
