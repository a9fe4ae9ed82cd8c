"""Schemas that take too much are refused, by processes that can be ended; those that do not cost a few milliseconds more."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from typing import Any
from unittest.mock import Mock

import psutil
import pytest

from foresay.errors import ConfigError, ForesayError
from foresay.text import client_grammars, schema_compiler
from foresay.text.client_grammars import Written
from foresay.text.schema_compiler import SchemaCompiler, TrialLimits
from helpers import tiny
from helpers.refusals import refused
from helpers.schema_bombs import BOMBS, PRODUCT
from helpers.waiting import has_ended, wait_until

MANY = 1e6
GOOD = {"type": "object", "properties": {"a": {"type": "integer", "multipleOf": 5}}}
Make = Callable[..., SchemaCompiler]


@pytest.fixture(scope="module")
def compiler() -> Iterator[Make]:
    """A function that makes compilers, which are closed at the end."""
    tokenizer, made = tiny.tokenizer(), list[SchemaCompiler]()

    def make(**limits: Any) -> SchemaCompiler:
        made.append(SchemaCompiler(tokenizer, len(tokenizer), [0], TrialLimits(**limits)))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture(scope="module")
def shared(compiler: Make) -> SchemaCompiler:
    return compiler()


def processes() -> set[psutil.Process]:
    """Processes that try schemas, and their forks."""
    found = set()
    for one in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if "foresay.text.grammar_process" in one.cmdline():
                found.add(one)
    return found


@pytest.mark.parametrize("name", BOMBS)
def test_whatever_it_is_it_ends(name: str, shared: SchemaCompiler) -> None:
    before = psutil.Process().memory_info().rss
    said = ""
    try:
        shared.compile(BOMBS[name])
    except ConfigError as error:
        said = str(error)
    assert len(said) < 500 and "\n" not in said
    assert psutil.Process().memory_info().rss - before < 500 << 20
    shared.compile(GOOD)


@pytest.mark.parametrize(
    "limits",
    [
        {"cpu_s": MANY, "wall_s": MANY, "memory_bytes": 32 << 20},
        {"cpu_s": 1, "wall_s": MANY, "memory_bytes": 8 << 30},
        {"cpu_s": MANY, "wall_s": 0.2, "memory_bytes": 8 << 30},
    ],
    ids=["memory", "processor time", "time"],
)
def test_each_limit_is_met(limits: dict[str, Any], compiler: Make) -> None:
    """A refused schema is tried again, by a process that outlives what it tries."""
    before, one = processes(), compiler(**limits)
    for _ in range(1 if limits["cpu_s"] == 1 else 2):
        with refused("schema"):
            one.compile(PRODUCT)
        assert not one._known_good and len(processes() - before) == 1


WRITTEN = [
    (Written("json", '{"enum": [1]}'), {"enum": [1]}),
    (Written("grammar", 'root ::= "a"'), None),
    (Written("choice", ["x" * 100_000]), None),
    (Written("grammar", 'root ::= "a'), "has no end"),
    (Written("json", "[" * 200_000), "is not JSON"),
    (Written("json", "[" + "{}," * 3_000_000 + "0]"), "of memory"),
    (Written("grammar", "".join(f"r{i} ::= [a] r{i + 1} " for i in range(2000))), "2000 rules"),
]


@pytest.mark.parametrize(("written", "outcome"), WRITTEN)
def test_what_a_client_wrote_is_read_in_the_other_process(
    written: Written, outcome: Any, shared: SchemaCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With its limits, and without the readers of this one."""
    expected = written.read() if not isinstance(outcome, str) else None
    monkeypatch.setattr(client_grammars, "KINDS", {})
    if isinstance(outcome, str):
        with pytest.raises(ConfigError, match=outcome):
            shared.read(written)
    else:
        assert shared.read(written) == expected and outcome in (None, expected)


def test_a_schema_that_passed_is_not_tried_again(compiler: Make) -> None:
    before, one = processes(), compiler()
    one.compile(GOOD)
    (process,) = processes() - before
    process.kill()
    wait_until(lambda: has_ended(process.pid), "it was killed")
    one.compile(GOOD)
    with pytest.raises(ForesayError, match="killed by signal 9"):
        one.compile({"enum": [1]})
    one.compile({"enum": [1]})
    (child,) = one._idle
    assert child.stdin is not None
    child.stdin.close()
    assert child.wait(60) == 0, "no process outlives this program, however it ends"
    one.close()
    with pytest.raises(ForesayError, match="closed"):
        one.compile({"enum": [2]})


def test_passed_schemas_are_forgotten_in_the_order_of_their_use(
    compiler: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(schema_compiler, "CACHE_SIZE", 2)
    one, trials = compiler(), Mock(side_effect=asdict)
    monkeypatch.setattr(schema_compiler, "asdict", trials)  # of the limits of each trial
    tried = list[int]()
    for number in (1, 2, 1, 3, 1, 2):
        before = trials.call_count
        one.compile({"enum": [number]})
        tried += [number] * (trials.call_count - before)
    assert tried == [1, 2, 3, 2]


def test_a_tokenizer_that_the_library_does_not_take(compiler: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    before = processes()
    monkeypatch.setattr(schema_compiler, "tokenizer_json", lambda tokenizer: "{}")
    with refused("tokenizer"):
        compiler().compile(GOOD)
    assert processes() == before


@pytest.mark.parametrize(("start_s", "reason"), [(600.0, "request was cancelled"), (0.5, r"no reply within 0\.5 s")])
def test_a_process_that_reads_nothing_blocks_no_request(
    start_s: float, reason: str, compiler: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its input is larger than a pipe holds."""
    sleeping = partial(subprocess.Popen, [sys.executable, "-c", "import time; time.sleep(600)"])
    monkeypatch.setattr(subprocess, "Popen", lambda command, **how: sleeping(**how))
    monkeypatch.setattr(schema_compiler, "tokenizer_json", lambda tokenizer: " " * (1 << 22))
    monkeypatch.setattr(schema_compiler, "START_S", start_s)
    cancelled = threading.Event()
    threading.Timer(0.5, cancelled.set if start_s > 1 else lambda: None).start()
    with pytest.raises(ForesayError, match=reason):
        compiler().compile(GOOD, cancelled)
