"""A process for trials of clients' constraints and of chat templates: each in a fork with limits on time and memory.

    python -m foresay.text.grammar_process

The first input line is {"tokenizer": text, "vocab_size": n, "eos": [...]}; each later line has "cpu_s", "wall_s" and
"memory_bytes", and either {"schema": text, "is_lark": flag} or {"written": [kind, value]}. {"template": text, "special": names}
needs no tokenizer. The reply is {}, or {"source": schema or grammar} to what was written; or {"refused": reason}, and
{"error": reason} for a tokenizer. The process ends with its input.
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
from foresay.text.client_grammars import Written
from foresay.text.grammar_library import compiled, vocabulary
from foresay.text.template_trial import render

STACK_BYTES = 1 << 20
"""Stack limit of a trial: less than any thread of the process that then compiles the schema for use."""


def try_job(tokenizer: Any, job: Mapping[str, Any]) -> dict[str, Any]:
    """Read or compile a constraint in a fork of this process, which has a single thread and the tokenizer loaded."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            _limit(job)
            os.write(write, json.dumps(_outcome(tokenizer, job)).encode() + b"\n")
        finally:
            os._exit(1)  # immediately, even after an error: no cleanup code of the parent may run here
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        reply = pipe.read()
    _, status = os.waitpid(pid, 0)
    if reply.endswith(b"\n"):
        return dict(json.loads(reply))
    return {"refused": _limit_reached(os.WTERMSIG(status) if os.WIFSIGNALED(status) else None, job)}


def _outcome(tokenizer: Any, job: Mapping[str, Any]) -> dict[str, Any]:
    try:
        if "template" in job:
            render(job["template"], job["special"])
            return {}
        if "written" in job:
            return {"source": Written(*job["written"]).read()}
        compiled(tokenizer, job["schema"], is_lark=job["is_lark"])
    except ConfigError as error:
        return {"refused": _refused_part(tokenizer, job.get("parts", {})) or str(error)}
    return {}


def _refused_part(tokenizer: Any, parts: Mapping[str, Any]) -> str:
    """Return the refusal of the first schema that is refused alone, with its name; "" without one."""
    for name, schema in parts.items():
        try:
            compiled(tokenizer, json.dumps(schema))
        except ConfigError as error:
            return f"schema of {name!r}{str(error).removeprefix('schema')}"
    return ""


def _limit(job: Mapping[str, Any]) -> None:
    """Set the limits of this process; a signal ends it at the first limit it reaches."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)  # the library prints out-of-memory messages there
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _lower(resource.RLIMIT_STACK, STACK_BYTES)
    _lower(resource.RLIMIT_CPU, math.ceil(job["cpu_s"]))
    pages = Path("/proc/self/statm")
    if pages.exists():  # macOS enforces no memory limit; the time limit bounds memory there
        used = int(pages.read_text().split()[0]) * resource.getpagesize()
        _lower(resource.RLIMIT_AS, used + job["memory_bytes"])
    signal.setitimer(signal.ITIMER_REAL, job["wall_s"])


def _lower(which: int, limit: int) -> None:
    _, hard = resource.getrlimit(which)
    resource.setrlimit(which, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))


def _limit_reached(by: int | None, job: Mapping[str, Any]) -> str:
    """Describe the limit that ended a process. by: the signal; None if Python itself ran out of memory."""
    noun = "the chat template" if "template" in job else "schema or grammar"
    if by == signal.SIGXCPU:
        return f"{noun} needs more than {job['cpu_s']:g} s of processor time to compile; give a simpler one"
    if by == signal.SIGALRM:
        return f"{noun} needs more than {job['wall_s']:g} s to compile; give a simpler one"
    limit_mib = job["memory_bytes"] >> 20
    return f"{noun} needs more than {limit_mib} MiB of memory, or too deep a stack, to compile; give a simpler one"


def main() -> None:
    """Try the schemas on standard input until it ends; anything printed goes to standard error."""
    out = os.dup(1)
    os.dup2(2, 1)
    tokenizer: Any = None
    for line in sys.stdin.buffer:
        job, reply = json.loads(line), dict[str, Any]()
        if tokenizer is not None or "template" in job:
            reply = try_job(tokenizer, job)
        else:
            try:
                tokenizer = vocabulary(job["tokenizer"], job["vocab_size"], job["eos"])
            except ConfigError as error:
                reply["error"] = str(error)
        os.write(out, json.dumps(reply).encode() + b"\n")


if __name__ == "__main__":
    main()
