"""Child processes that exchange lines of JSON, from start to end, with their whole process group.

Owns the pipes, the error messages of dead processes, and their termination when the parent exits. Knows no messages.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import selectors
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from time import monotonic, sleep
from typing import Any

from foresay.errors import ConfigError, ForesayError

GRACE_S = 5.0
"""Time that a child process gets to end by itself."""
_CHUNK = 65536


class ChildProcess:
    """A child process that replies to a line of JSON with a line of JSON."""

    def __init__(self, label: str, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self._label, self._command = label, command[0]
        self._ended: str | None = None
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the child
        try:
            self._child = subprocess.Popen(
                list(command),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._stderr,
                env=dict(environment),
                start_new_session=True,  # its own group: it is ended with its children, and Ctrl-C reaches only the parent
                bufsize=0,
            )
        except OSError as error:
            self._stderr.close()
            raise ConfigError(
                f"{label}: {command[0]!r} cannot be run ({error.strerror or error}); name a Python"
            ) from error
        self._buffer = self._unsent = b""
        os.set_blocking(self._pipe(self._child.stdin), False)
        atexit.register(self.end, "the program ended")

    @property
    def pid(self) -> int:
        """The child's process id, which is also its process group's id."""
        return self._child.pid

    def send(self, message: Mapping[str, Any]) -> None:
        """Send a message without waiting for a reply; data that does not fit into the pipe is sent by the next `read`."""
        self._unsent += json.dumps(message).encode() + b"\n"
        self._flush()

    def _flush(self) -> None:
        """Write without blocking; `read` reports a closed pipe."""
        stdin = self._pipe(self._child.stdin)
        try:
            while self._unsent:
                self._unsent = self._unsent[os.write(stdin, self._unsent[:_CHUNK]) :]
        except BlockingIOError:
            return
        except OSError:
            self._unsent = b""

    def read(self) -> list[Any]:
        """Return the messages received so far, without waiting.

        Raises ForesayError if the child has ended and all its messages were read, or if it violates the protocol; it is then
        ended.
        """
        if self._ended is not None:
            raise ForesayError(f"{self._label}: the worker has ended ({self._ended})")
        with self._end_on_error():
            messages = []
            for line in self._lines():
                try:
                    messages.append(json.loads(line))
                except ValueError:
                    raise self._invalid(line) from None
            return messages

    def _lines(self) -> list[bytes]:
        """Return the complete lines received. The exit is checked as well: a grandchild may keep the pipe open."""
        self._flush()
        exited, stdout = self._exited(), self._pipe(self._child.stdout)
        with selectors.DefaultSelector() as ready:
            ready.register(stdout, selectors.EVENT_READ)
            while ready.select(0):
                chunk = os.read(stdout, _CHUNK)
                self._buffer += chunk
                if not chunk:
                    exited = True
                    break
        *lines, self._buffer = self._buffer.split(b"\n")
        if exited and not lines:
            raise self._death()
        return lines

    def wait_ready(self, limit_s: float = 1.0) -> None:
        """Wait until the child has sent data, at most `limit_s` seconds."""
        with selectors.DefaultSelector() as ready:
            ready.register(self._pipe(self._child.stdout), selectors.EVENT_READ)
            if self._unsent:
                ready.register(self._pipe(self._child.stdin), selectors.EVENT_WRITE)
            ready.select(limit_s)

    def end(self, reason: str) -> None:
        """End the child with its group; further calls have no effect."""
        if self._ended is None:
            self._end(reason)

    @contextlib.contextmanager
    def _end_on_error(self) -> Iterator[None]:
        """End the child on any exception in this block: later replies could not be matched to requests."""
        try:
            yield
        except BaseException as error:
            self.end(str(error) if isinstance(error, ForesayError) else type(error).__name__)
            raise

    def _invalid(self, line: bytes) -> ForesayError:
        shown = line[:80].decode(errors="replace").strip()
        return ForesayError(f"{self._label}: the worker answered {shown!r}; is {self._command!r} a Python?")

    def _death(self) -> ForesayError:
        self._wait(GRACE_S)
        self._signal(signal.SIGKILL)
        code = self._child.wait()
        how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        return ForesayError(f"{self._label}: the worker {how}{self._last_error()}")

    def _last_error(self) -> str:
        """Return the last line of the child's standard error, for a message."""
        fd = self._stderr.fileno()
        tail = os.pread(fd, 4096, max(0, os.fstat(fd).st_size - 4096)).decode(errors="replace")
        lines = [line.strip() for line in tail.splitlines() if line.strip()]
        return f"; its last error line: {lines[-1][-300:]}" if lines else ""

    def _end(self, reason: str) -> None:
        """End the child with its group and close all files. The child is reaped last, so that its id is not reused."""
        atexit.unregister(self.end)
        self._ended = reason
        if self._child.returncode is None:
            self._signal(signal.SIGTERM)
            self._wait(GRACE_S)
            self._signal(signal.SIGKILL)
            self._child.wait()
        for stream in (self._child.stdin, self._child.stdout, self._stderr):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS refuses for a group of zombies
            os.killpg(self._child.pid, number)

    def _exited(self) -> bool:
        """True if the child has ended. Does not reap it: until then its id and its group's id are not reused."""
        if self._child.returncode is not None:
            return True
        if not hasattr(os, "waitid"):
            return False
        return os.waitid(os.P_PID, self._child.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def _wait(self, limit_s: float) -> None:
        until = monotonic() + limit_s
        while monotonic() < until and not self._exited():
            sleep(0.01)

    @staticmethod
    def _pipe(stream: Any) -> int:
        assert stream is not None
        fd: int = stream.fileno()
        return fd
