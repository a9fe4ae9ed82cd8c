"""A process that tries schemas: reads them as lines of JSON, compiles each in a process of its own, under limits, and reports.

    python -m foresay.text.grammar_process

The first line is {"tokenizer": text, "vocab_size": n, "eos": [...]}, then come {"schema": text, "cpu_s": s, "wall_s": s,
"memory_bytes": n}. Each is answered {"ok": true}, with "refused": reason for a schema that cannot be used. It ends with its
input.
"""

from __future__ import annotations

import json
import math
import os
import resource
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from foresay.errors import ConfigError
from foresay.text.grammar_library import compiled, vocabulary

STACK_BYTES = 1 << 20
"""Less than any thread of the process that compiles the schema for use has."""


def tried(known: Any, job: Mapping[str, Any]) -> dict[str, Any]:
    """Compile a schema in a fork of this process, which has one thread and the tokenizer ready."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            _limit(job)
            os.write(write, json.dumps(_outcome(known, job["schema"])).encode())
        finally:
            os._exit(1)  # at once, and whatever was raised: nothing of the parent's is to be run here
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        answer = pipe.read()
    _, status = os.waitpid(pid, 0)
    if answer:
        return dict(json.loads(answer))
    return {"ok": True, "refused": _limit_met(os.WTERMSIG(status) if os.WIFSIGNALED(status) else None, job)}


def _outcome(known: Any, schema: str) -> dict[str, Any]:
    try:
        compiled(known, schema)
    except ConfigError as error:
        return {"ok": True, "refused": str(error)}
    return {"ok": True}


def _limit(job: Mapping[str, Any]) -> None:
    """Limits of this process; what meets one is ended by a signal."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)  # the library says there that it ran out of memory
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _lower(resource.RLIMIT_STACK, STACK_BYTES)
    _lower(resource.RLIMIT_CPU, math.ceil(job["cpu_s"]))
    pages = Path("/proc/self/statm")
    if pages.exists():  # macOS does not enforce a limit of memory; there that of time bounds it
        used = int(pages.read_text().split()[0]) * resource.getpagesize()
        _lower(resource.RLIMIT_AS, used + job["memory_bytes"])
    signal.setitimer(signal.ITIMER_REAL, job["wall_s"])


def _lower(which: int, limit: int) -> None:
    _, hard = resource.getrlimit(which)
    resource.setrlimit(which, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))


def _limit_met(by: int | None, job: Mapping[str, Any]) -> str:
    """The limit that ended a process. by: the signal; None where Python itself ran out of memory."""
    if by == signal.SIGXCPU:
        return f"the schema needs more than {job['cpu_s']:g} s of processor time to compile; give a simpler one"
    if by == signal.SIGALRM:
        return f"the schema needs more than {job['wall_s']:g} s to compile; give a simpler one"
    most = job["memory_bytes"] >> 20
    return f"the schema needs more than {most} MiB of memory, or too deep a stack, to compile; give a simpler one"


def main() -> None:
    """Try what the standard input names until it ends; whatever is printed goes to standard error."""
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)

    def answer(message: Mapping[str, Any]) -> None:
        out.write(json.dumps(message).encode() + b"\n")
        out.flush()

    known: Any = None
    for line in sys.stdin.buffer:
        job = json.loads(line)
        if job.get("op") == "close":
            return
        if known is not None:
            answer(tried(known, job))
            continue
        try:
            known = vocabulary(job["tokenizer"], job["vocab_size"], job["eos"])
            answer({"ok": True})
        except ConfigError as error:
            answer({"ok": False, "error": str(error)})


if __name__ == "__main__":
    main()
