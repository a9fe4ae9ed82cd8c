"""Schemas that take too much are refused, by processes that can be ended; those that do not cost a few milliseconds more."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

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


@pytest.fixture
def make() -> Iterator[Make]:
    made: list[SchemaCompiler] = []

    def start(**limits: Any) -> SchemaCompiler:
        tokenizer = tiny.tokenizer()
        made.append(SchemaCompiler(tokenizer, len(tokenizer), [0], TrialLimits(**limits)))
        return made[-1]

    yield start
    for one in made:
        one.close()


@pytest.fixture(scope="module")
def shared() -> Iterator[SchemaCompiler]:
    tokenizer = tiny.tokenizer()
    compiler = SchemaCompiler(tokenizer, len(tokenizer), [0])
    yield compiler
    compiler.close()


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
    ("limits", "message"),
    [
        ({"cpu_s": MANY, "wall_s": MANY, "memory_bytes": 32 << 20}, "more than 32 MiB of memory"),
        ({"cpu_s": 1, "wall_s": MANY, "memory_bytes": 8 << 30}, "more than 1 s of processor time"),
        ({"cpu_s": MANY, "wall_s": 0.2, "memory_bytes": 8 << 30}, "more than 0.2 s to compile"),
    ],
)
def test_each_limit_is_met(limits: dict[str, Any], message: str, make: Make) -> None:
    before, compiler = processes(), make(**limits)
    with refused("schema"):
        compiler.compile(PRODUCT)
    assert not compiler._known_good, "what was refused is tried again"
    (process,) = processes() - before
    with refused("schema"):
        compiler.compile(PRODUCT)
    assert processes() - before == {process}, "the process outlives what it tries"


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


def test_a_schema_that_passed_is_not_tried_again(make: Make) -> None:
    before, compiler = processes(), make()
    compiler.compile(GOOD)
    (process,) = processes() - before
    process.kill()
    wait_until(lambda: has_ended(process.pid), "it was killed")
    compiler.compile(GOOD)
    with pytest.raises(ForesayError, match="killed by signal 9"):
        compiler.compile({"enum": [1]})
    compiler.compile({"enum": [1]})


def test_passed_schemas_are_forgotten_in_the_order_of_their_use(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schema_compiler, "_CACHE_SIZE", 2)
    compiler, tried = make(), list[str]()
    monkeypatch.setattr(compiler, "_try", lambda job, cancelled: tried.append(job["schema"]))
    for number in (1, 2, 1, 3, 1, 2):
        compiler.compile({"enum": [number]})
    assert [text[-3] for text in tried] == list("1232")


@pytest.mark.parametrize("how", ["cancelled", "closed"])
def test_a_trial_ends_when_nobody_waits_for_it(how: str, make: Make) -> None:
    before, cancelled = processes(), threading.Event()
    compiler = make(cpu_s=MANY, wall_s=MANY, memory_bytes=8 << 30)
    raised: list[Exception] = []

    def run() -> None:
        try:
            compiler.compile(PRODUCT, cancelled)
        except ForesayError as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    wait_until(lambda: len(processes() - before) == 2, "a process and its fork")
    found = processes() - before
    cancelled.set() if how == "cancelled" else compiler.close()
    thread.join(60)
    assert not thread.is_alive() and len(raised) == 1
    for one in found:
        wait_until(lambda one=one: has_ended(one.pid), "it is ended")  # type: ignore[misc]
    if how == "cancelled":
        compiler.compile(GOOD)
    else:
        with pytest.raises(ForesayError, match="closed"):
            compiler.compile({"enum": [2]})


def test_a_tokenizer_that_the_library_does_not_take(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    before = processes()
    monkeypatch.setattr(schema_compiler, "tokenizer_json", lambda tokenizer: "{}")
    with refused("tokenizer"):
        make().compile(GOOD)
    assert processes() == before


@pytest.mark.parametrize("how", ["cancelled", "late"])
def test_a_process_that_reads_nothing_blocks_no_request(how: str, make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its input is larger than a pipe holds."""
    monkeypatch.setattr(schema_compiler, "_COMMAND", [sys.executable, "-c", "import time; time.sleep(600)"])
    monkeypatch.setattr(schema_compiler, "tokenizer_json", lambda tokenizer: " " * (1 << 22))
    monkeypatch.setattr(schema_compiler, "_START_S", 600.0 if how == "cancelled" else 0.5)
    cancelled, compiler = threading.Event(), make()
    threading.Timer(0.5, cancelled.set if how == "cancelled" else lambda: None).start()
    with pytest.raises(
        ForesayError, match="its request was cancelled" if how == "cancelled" else r"no reply within 0\.5 s"
    ):
        compiler.compile(GOOD, cancelled)


def test_a_process_ends_with_its_input(make: Make) -> None:
    """So that none outlives this program, however it ends."""
    compiler = make()
    compiler.compile(GOOD)
    (child,) = compiler._idle
    assert child.stdin is not None
    child.stdin.close()
    assert child.wait(60) == 0
