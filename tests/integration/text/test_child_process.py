"""Child processes that exchange lines of JSON: every way in which one can end."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from foresay.errors import ConfigError, ForesayError
from foresay.text import child_process
from foresay.text.child_process import ChildProcess
from helpers.waiting import has_ended, wait_until

Start = Callable[[str], ChildProcess]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    started: list[ChildProcess] = []

    def begin(source: str) -> ChildProcess:
        script = tmp_path / "script.py"
        script.write_text(textwrap.dedent(source))
        started.append(ChildProcess("child", [sys.executable, str(script)], os.environ))
        return started[-1]

    yield begin
    for one in started:
        one.end("the test ended")


def replies(child: ChildProcess, message: Any = None) -> list[Any]:
    """Send a message, and read until the child ends or has replied."""
    child.send({} if message is None else message)
    while not (found := child.read()):
        child.wait_ready(0.1)
    return found


def assert_gone(child: ChildProcess) -> None:
    """No process, nor a zombie, with its id."""
    with pytest.raises(ProcessLookupError):
        os.kill(child.pid, 0)


@pytest.mark.parametrize(
    ("source", "error"),
    [
        ("import sys\ninput()\nsys.exit('first\\nout of luck\\n')", "exit code 1; its last error line: out of luck"),
        ("import os\ninput()\nos.kill(os.getpid(), 9)", "was killed by signal 9"),
        ("input()\nprint('Hello there')", "answered 'Hello there'; is .* a Python"),
    ],
)
def test_an_end_names_its_reason(start: Start, source: str, error: str) -> None:
    child = start(source)
    with pytest.raises(ForesayError, match=error):
        replies(child)
    assert_gone(child)
    with pytest.raises(ForesayError, match="has ended"):
        child.read()


def test_a_message_larger_than_a_pipe(start: Start) -> None:
    child = start("import json\nfor _ in range(2): print(json.dumps(json.loads(input())['data']), flush=True)")
    assert replies(child, {"data": "x" * 3_000_000}) == ["x" * 3_000_000]


def test_a_child_that_ignores_signals_is_killed(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child_process, "GRACE_S", 0.5)
    child = start("""
        import signal, time
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        print("{}", flush=True)
        time.sleep(600)
    """)
    replies(child)
    child.end("it was closed")
    assert_gone(child)


def test_its_children_end_with_it_and_its_last_messages_are_read(start: Start) -> None:
    """Although a grandchild keeps the pipes open."""
    child = start("""
        import json, os, subprocess, sys
        kept = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], pass_fds=[1])
        for _ in range(3):
            input()
            print(kept.pid, flush=True)
        sys.stdout.write("half a li")
        sys.stdout.flush()
        os._exit(4)
    """)
    received: list[Any] = []

    def receive() -> bool:
        child.wait_ready(0.1)
        received.extend(child.read())
        return False

    for _ in range(3):
        child.send({})
    with pytest.raises(ForesayError, match="ended with exit code 4"):
        wait_until(receive, "the child's end")
    assert len(received) == 3
    assert_gone(child)
    wait_until(lambda: has_ended(received[0]), "the grandchild ends with it")


def test_it_ends_with_the_program() -> None:
    code = textwrap.dedent("""
        import os, sys
        from foresay.text.child_process import ChildProcess
        print(ChildProcess("child", [sys.executable, "-c", "import time; time.sleep(600)"], os.environ).pid)
    """)
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    wait_until(lambda: has_ended(int(out.stdout)), "the child ends with its parent")
    assert out.stderr == ""


def test_a_file_that_is_no_program(tmp_path: Path) -> None:
    path = tmp_path / "program"
    path.write_bytes(b"\0\0")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    with pytest.raises(ConfigError, match="cannot be run"):
        ChildProcess("child", [str(path)], os.environ)
