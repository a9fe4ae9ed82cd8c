"""`astream`: what `stream` yields, without blocking the event loop, however it ends."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

import foresay
from foresay import Chunk, Generator, RequestError
from foresay.errors import UnknownNameError
from helpers import tiny
from helpers.refusals import refused
from helpers.waiting import PATIENCE_S

PROMPT = "hello world, hello"


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    yield from tiny.one_thread()


@pytest.fixture(scope="module")
def generator() -> Generator:
    return foresay.load(tiny.llama(), tokenizer=tiny.tokenizer(), num_draft_tokens=4)


class Gate:
    """Holds every target pass from the `after`-th on until it is opened; reports when one is under way."""

    def __init__(self, generator: Generator, monkeypatch: pytest.MonkeyPatch, after: int = 2) -> None:
        self.inside, self.open, self.passes, self.threads = threading.Event(), threading.Event(), 0, set[int]()
        forward: Any = generator.target.model.forward

        def held(*args: Any, **kwargs: Any) -> Any:
            self.passes += 1
            self.threads.add(threading.get_ident())
            if self.passes > after:
                self.inside.set()
                assert self.open.wait(PATIENCE_S)
            return forward(*args, **kwargs)

        monkeypatch.setattr(generator.target.model, "forward", held)


async def _collect(generator: Generator, *args: Any, **kwargs: Any) -> list[Chunk]:
    return [chunk async for chunk in generator.astream(*args, **kwargs)]


async def _until(event: threading.Event) -> None:
    assert await asyncio.to_thread(event.wait, PATIENCE_S)


async def _turns() -> None:
    """Let everything happen that waits for nothing but the event loop."""
    for _ in range(100):
        await asyncio.sleep(0)


async def _all_ended(threads: ThreadPoolExecutor) -> None:
    """Wait until this is the only task, and `threads`, where the loop's work has gone, have nothing more to do."""
    while others := asyncio.all_tasks() - {asyncio.current_task()}:
        await asyncio.wait(others, timeout=PATIENCE_S)
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor())
    threads.shutdown(wait=True)


def _told(chunks: list[Chunk]) -> list[Any]:
    return [(c.index, c.text, c.pieces, c.step.token_ids, c.finish_reason) for c in chunks]


@pytest.mark.parametrize("params", [{}, {"temperature": 1.0, "seed": 5}, {"stop": "no such thing"}])
def test_astream_yields_what_stream_yields(generator: Generator, params: dict[str, Any]) -> None:
    prompts = [PROMPT, "something else", "h"]
    blocking = list(generator.stream(prompts, max_new_tokens=20, **params))
    streamed = asyncio.run(_collect(generator, prompts, max_new_tokens=20, **params))
    assert _told(streamed) == _told(blocking)
    wholes = {c.index: c.generation for c in streamed if c.generation is not None}
    assert sorted(wholes) == [0, 1, 2]
    for i, one in enumerate(generator.generate(prompts, max_new_tokens=20, **params)):
        whole = wholes[i]
        assert whole is not None and whole.token_ids == one.token_ids
        assert "".join(c.text for c in streamed if c.index == i) == whole.text


def test_streams_side_by_side_do_not_mix(generator: Generator) -> None:
    async def both() -> list[list[Chunk]]:
        return await asyncio.gather(*(_collect(generator, p, max_new_tokens=24) for p in (PROMPT, "other", "h", "w")))

    together = asyncio.run(both())
    for prompt, chunks in zip((PROMPT, "other", "h", "w"), together, strict=True):
        assert _told(chunks) == _told(list(generator.stream(prompt, max_new_tokens=24)))


def test_bad_arguments_raise(generator: Generator) -> None:
    with refused("max_new_tokens", 0):
        asyncio.run(_collect(generator, PROMPT, max_new_tokens=0))
    with refused("parameter", "temprature", UnknownNameError):
        asyncio.run(_collect(generator, PROMPT, temprature=0))


def test_the_event_loop_stays_free(generator: Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(generator, monkeypatch)

    async def main() -> int:
        task = asyncio.create_task(_collect(generator, PROMPT, max_new_tokens=8))
        await _until(gate.inside)
        await _turns()  # a pass is under way, and yet
        assert not task.done()
        gate.open.set()
        return len((await task)[-1].generation.token_ids)  # type: ignore[union-attr]

    assert asyncio.run(main()) == 8
    assert threading.get_ident() not in gate.threads


def test_cancelling_in_mid_pass_leaves_the_loop_healthy(generator: Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(generator, monkeypatch)
    complaints: list[dict[str, Any]] = []

    async def main() -> None:
        loop, threads = asyncio.get_running_loop(), ThreadPoolExecutor()
        loop.set_exception_handler(lambda _, context: complaints.append(context))
        loop.set_default_executor(threads)
        task = asyncio.create_task(_collect(generator, PROMPT, max_new_tokens=200))
        await _until(gate.inside)
        task.cancel()
        await asyncio.sleep(0)
        gate.open.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        passes = gate.passes
        await _all_ended(threads)
        assert gate.passes == passes  # nothing decodes on afterwards
        chunks = await _collect(generator, PROMPT, max_new_tokens=20)
        assert _told(chunks) == _told(list(generator.stream(PROMPT, max_new_tokens=20)))

    asyncio.run(main())
    gc.collect()
    assert complaints == []


def test_cancelling_twice_is_cancelling(generator: Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second cancellation while the pass under way ends (a server shutting down) is no other error."""
    gate = Gate(generator, monkeypatch)

    async def main() -> None:
        task = asyncio.create_task(_collect(generator, PROMPT, max_new_tokens=200))
        await _until(gate.inside)
        task.cancel()
        await _turns()
        task.cancel()
        await _turns()
        gate.open.set()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())


def test_a_timeout_is_a_timeout(generator: Generator) -> None:
    async def main() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(_collect(generator, PROMPT, max_new_tokens=4000), 0.05)

    asyncio.run(main())


def test_an_abandoned_async_iterator_stops_decoding(generator: Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(generator, monkeypatch, after=10**6)
    complaints: list[dict[str, Any]] = []

    async def main() -> None:
        loop, threads = asyncio.get_running_loop(), ThreadPoolExecutor()
        loop.set_exception_handler(lambda _, context: complaints.append(context))
        loop.set_default_executor(threads)
        async for chunk in generator.astream(PROMPT, max_new_tokens=2000):
            assert chunk.generation is None
            break
        passes = gate.passes
        await _all_ended(threads)
        assert gate.passes == passes
        iterator = generator.astream(PROMPT, max_new_tokens=2000)
        await anext(iterator)
        await iterator.aclose()  # type: ignore[attr-defined]
        with pytest.raises(StopAsyncIteration):
            await anext(iterator)

    asyncio.run(main())
    gc.collect()
    assert complaints == []


def test_an_abandoned_iterator_leaves_the_generator_usable(generator: Generator) -> None:
    whole = generator.generate(PROMPT, max_new_tokens=30)
    iterator = generator.stream(PROMPT, max_new_tokens=30)
    first = next(iterator)
    assert whole.text.startswith(first.text)
    del iterator
    gc.collect()
    assert generator.generate(PROMPT, max_new_tokens=30).token_ids == whole.token_ids


def test_a_failure_in_a_pass_reaches_the_caller(generator: Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    forward: Any = generator.target.model.forward
    calls = 0

    def failing(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls > 3:
            raise torch.OutOfMemoryError("no memory left")
        return forward(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(generator.target.model, "forward", failing)
        with pytest.raises(RequestError, match="the target raised OutOfMemoryError: no memory left") as caught:
            asyncio.run(_collect(generator, PROMPT, max_new_tokens=50))
        assert isinstance(caught.value.__cause__, torch.OutOfMemoryError)
    assert len(asyncio.run(_collect(generator, PROMPT, max_new_tokens=5))) > 0
