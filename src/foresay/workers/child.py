"""A worker process: reads tasks as lines of JSON from its standard input and writes what comes of them.

    python -m foresay.workers.child

First comes the setup, which is answered with {"ready": ..., "room": n} or {"error": ...}; then tasks {"take": number,
"task": ...}, each answered with {"done": number, "result": ...} or {"failed": number, "error": ...}, in any order. It ends when
its input does.
"""

from __future__ import annotations

import json
import os
import selectors
import sys
from typing import Any, BinaryIO

from foresay.errors import ForesayError
from foresay.workers.jobs import Job, open_job
from foresay.workers.messages import refusal, told


class Lines:
    """Lines of a pipe, without waiting where there is something else to do."""

    def __init__(self, fd: int) -> None:
        self._fd, self._buffer, self.ended = fd, b"", False
        self._ready = selectors.DefaultSelector()
        self._ready.register(fd, selectors.EVENT_READ)

    def read(self, *, wait: bool) -> list[Any]:
        """What has come. wait: until something has, or the other end is closed."""
        out: list[Any] = []
        while not self.ended and self._ready.select(None if wait and not out else 0):
            data = os.read(self._fd, 1 << 16)
            self.ended = not data
            *whole, self._buffer = (self._buffer + data).split(b"\n")
            out += [json.loads(line) for line in whole]
        return out


def serve(lines: Lines, out: BinaryIO) -> None:
    """Work until nobody asks any more."""

    def say(message: dict[str, Any]) -> None:
        out.write(json.dumps(message).encode() + b"\n")
        out.flush()

    first = lines.read(wait=True)
    if not first:
        return
    setup, *early = first
    try:
        job = open_job(setup)
        say({"ready": job.describe(), "room": job.room})
    except ForesayError as error:
        say(refusal(error))
        return
    while not lines.ended:
        for message in early or lines.read(wait=not job.has_work):
            _take(job, message, say)
        early = []
        if job.has_work and not lines.ended:
            for number, result in job.step():
                say(told(number, result))


def _take(job: Job, message: dict[str, Any], say: Any) -> None:
    try:
        job.take(message["take"], message["task"])
    except ForesayError as error:
        say(told(message["take"], error))


def main() -> None:
    """Serve on the standard streams; whatever else is printed goes to standard error."""
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    serve(Lines(0), out)


if __name__ == "__main__":
    main()
