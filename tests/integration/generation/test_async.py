"""`astream`: what `stream` yields, without blocking the event loop, however it ends."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Awaitable, Callable, Iterable
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


def _run(main: Callable[[ThreadPoolExecutor], Awaitable[None]]) -> None:
    """Run a coroutine on a loop that has no complaint. It receives the threads to which the loop's work goes."""
    complaints: list[dict[str, Any]] = []

    async def watched() -> None:
        loop, threads = asyncio.get_running_loop(), ThreadPoolExecutor()
        loop.set_exception_handler(lambda _, context: complaints.append(context))
        loop.set_default_executor(threads)
        await main(threads)

    asyncio.run(watched())
    gc.collect()
    assert complaints == []


async def _assert_idle(gate: Gate, threads: ThreadPoolExecutor) -> None:
    """Wait until this is the only task, and the threads have nothing more to do: nothing has been decoded since."""
    passes = gate.passes
    while others := asyncio.all_tasks() - {asyncio.current_task()}:
        await asyncio.wait(others, timeout=PATIENCE_S)
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor())
    threads.shutdown(wait=True)
    assert gate.passes == passes


def _fields(chunks: Iterable[Chunk]) -> list[Any]:
    return [(c.index, c.text, c.pieces, c.step.token_ids, c.finish_reason) for c in chunks]


@pytest.mark.parametrize("params", [{}, {"temperature": 1.0, "seed": 5}, {"stop": "no such thing"}])
def test_astream_yields_what_stream_yields(generator: Generator, params: dict[str, Any]) -> None:
    prompts = [PROMPT, "something else", "h"]
    streamed = asyncio.run(_collect(generator, prompts, max_new_tokens=20, **params))
    assert _fields(streamed) == _fields(generator.stream(prompts, max_new_tokens=20, **params))
    wholes = {c.index: c.generation for c in streamed if c.generation is not None}
    for i, one in enumerate(generator.generate(prompts, max_new_tokens=20, **params)):
        assert wholes[i].token_ids == one.token_ids
        assert "".join(c.text for c in streamed if c.index == i) == wholes[i].text


def test_streams_side_by_side_share_a_batch_and_do_not_mix(generator: Generator) -> None:
    prompts = (PROMPT, "other", "h", "w")

    async def every() -> list[list[Chunk]]:
        return await asyncio.gather(*(_collect(generator, prompt, max_new_tokens=24) for prompt in prompts))

    together = asyncio.run(every())
    assert max(chunk.step.batch_size for chunks in together for chunk in chunks) == len(prompts)
    for prompt, chunks in zip(prompts, together, strict=True):
        assert _fields(chunks) == _fields(generator.stream(prompt, max_new_tokens=24))


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


@pytest.mark.parametrize("times", [1, 2])
def test_cancelling_in_mid_pass_leaves_the_loop_healthy(
    times: int, generator: Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also by a second cancellation while the pass under way ends, as of a server that is shut down."""
    gate = Gate(generator, monkeypatch)

    async def main(threads: ThreadPoolExecutor) -> None:
        task = asyncio.create_task(_collect(generator, PROMPT, max_new_tokens=200))
        await _until(gate.inside)
        for _ in range(times):
            task.cancel()
            await _turns()
        gate.open.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        await _assert_idle(gate, threads)
        chunks = await _collect(generator, PROMPT, max_new_tokens=20)
        assert _fields(chunks) == _fields(generator.stream(PROMPT, max_new_tokens=20))

    _run(main)


def test_an_abandoned_iterator_stops_decoding(generator: Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(generator, monkeypatch, after=10**6)

    async def main(threads: ThreadPoolExecutor) -> None:
        async for chunk in generator.astream(PROMPT, max_new_tokens=2000):
            assert chunk.generation is None
            break
        await _assert_idle(gate, threads)
        iterator = generator.astream(PROMPT, max_new_tokens=2000)
        await anext(iterator)
        await iterator.aclose()  # type: ignore[attr-defined]
        with pytest.raises(StopAsyncIteration):
            await anext(iterator)

    _run(main)
    whole, stream = generator.generate(PROMPT, max_new_tokens=30), generator.stream(PROMPT, max_new_tokens=30)
    assert whole.text.startswith(next(stream).text)
    del stream
    gc.collect()
    assert generator.generate(PROMPT, max_new_tokens=30).token_ids == whole.token_ids


def test_a_failure_in_a_pass_reaches_the_caller(generator: Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    forward: Any = generator.target.model.forward
    passes = iter(range(3))

    def failing(*args: Any, **kwargs: Any) -> Any:
        if next(passes, None) is None:
            raise torch.OutOfMemoryError("no memory left")
        return forward(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(generator.target.model, "forward", failing)
        with pytest.raises(RequestError, match="the target raised OutOfMemoryError: no memory left") as caught:
            asyncio.run(_collect(generator, PROMPT, max_new_tokens=50))
        assert isinstance(caught.value.__cause__, torch.OutOfMemoryError)
    assert len(asyncio.run(_collect(generator, PROMPT, max_new_tokens=5))) > 0


def test_the_end_of_a_with_block_cancels_requests() -> None:
    """A later call begins another session."""
    with foresay.load(tiny.llama(), tokenizer=tiny.tokenizer(), drafter="none") as model:

        async def closed_early() -> list[Chunk]:
            seen = list[Chunk]()
            async for chunk in model.astream(PROMPT, max_new_tokens=3000, ignore_eos=True):
                seen.append(chunk)
                if len(seen) == 3:
                    await asyncio.to_thread(model.close)
            return seen

        seen = asyncio.run(closed_early())
        assert seen[-1].finish_reason == "cancelled" and 3 <= len(seen) < 3000
        assert not model._live.present()
        again = asyncio.run(_collect(model, PROMPT, max_new_tokens=4))
        assert again[-1].finish_reason == "length" and model._live.present()
    assert not model._live.present()
