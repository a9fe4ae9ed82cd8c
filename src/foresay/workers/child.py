"""A worker process: reads tasks as lines of JSON from standard input and writes their results.

    python -m foresay.workers.child

The first line is the setup; the reply is {"ready": ..., "room": n} or {"error": ...}. Then come tasks {"take": number,
"task": ...}, with the replies {"done": number, "result": ...} or {"failed": number, "error": ...}, in any order. The process
ends when its input ends.
"""

from __future__ import annotations

import json
import os
import selectors
import sys
from typing import Any, BinaryIO

from foresay.errors import ForesayError
from foresay.workers.jobs import Job, open_job
from foresay.workers.messages import error_fields, reply


class Lines:
    """Reader of JSON lines from a pipe that can read without blocking."""

    def __init__(self, fd: int) -> None:
        self._fd, self._buffer, self.ended = fd, b"", False
        self._ready = selectors.DefaultSelector()
        self._ready.register(fd, selectors.EVENT_READ)

    def read(self, *, wait: bool) -> list[Any]:
        """Return the received messages. wait: block until there is one or the other end closes the pipe."""
        out: list[Any] = []
        while not self.ended and self._ready.select(None if wait and not out else 0):
            data = os.read(self._fd, 1 << 16)
            self.ended = not data
            *whole, self._buffer = (self._buffer + data).split(b"\n")
            out += [json.loads(line) for line in whole]
        return out


def serve(lines: Lines, out: BinaryIO) -> None:
    """Process tasks until the input ends."""

    def send(message: dict[str, Any]) -> None:
        out.write(json.dumps(message).encode() + b"\n")
        out.flush()

    first = lines.read(wait=True)
    if not first:
        return
    setup, *early = first
    try:
        job = open_job(setup)
        send({"ready": job.describe(), "room": job.capacity})
    except ForesayError as error:
        send(error_fields(error))
        return
    while not lines.ended:
        for message in early or lines.read(wait=not job.has_work):
            _take(job, message, send)
        early = []
        if job.has_work and not lines.ended:
            for number, result in job.step():
                send(reply(number, result))


def _take(job: Job, message: dict[str, Any], send: Any) -> None:
    try:
        job.take(message["take"], message["task"])
    except ForesayError as error:
        send(reply(message["take"], error))


def main() -> None:
    """Serve on the standard streams; other output goes to standard error."""
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    serve(Lines(0), out)


if __name__ == "__main__":
    main()
