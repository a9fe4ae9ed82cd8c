"""The engine as the routes use it: requests go in, chunks come out, and whoever leaves takes their rows along.

Owns the thread that decodes, which ways of drafting are ready, and the bound of the queue. Knows no HTTP.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing, suppress
from typing import Any

from foresay.decoding.outcome import FinishReason
from foresay.decoding.sampling_params import SamplingParams
from foresay.errors import ConfigError, ContextLengthError
from foresay.generation.generator import PREFIX_BYTES, Generator
from foresay.generation.load import change
from foresay.generation.result import Chunk
from foresay.generation.session import Session
from foresay.generation.session_thread import SessionThread
from foresay.server.errors import ApiError
from foresay.server.metrics import Clock, Metrics
from foresay.server.settings import ServerSettings
from foresay.server.ways import Way
from foresay.text.grammar import JsonSchema
from foresay.text.prompts import encode


class Service:
    """One target, and everyone who wants texts of it."""

    def __init__(self, generator: Generator, settings: ServerSettings, names: Sequence[str]) -> None:
        """names: what the target is called here, the first of which answers are signed with."""
        self.generator, self.settings, self.names = generator, settings, list(names)
        self.metrics = Metrics()
        self.draining = False
        self._thread = SessionThread(self._make, idle_s=5.0, max_sessions=settings.max_methods, main=Way())
        self._open: set[asyncio.Task[Any]] = set()

    def _make(self, way: Way) -> Session:
        return self._generator(way).session(max_waiting=self.settings.max_waiting, prefix_bytes=PREFIX_BYTES)

    def _generator(self, way: Way) -> Generator:
        if way == Way():
            return self.generator
        return change(self.generator, drafter=way.drafter, length=way.length, rule=way.rule)

    @property
    def tokenizer(self) -> Any:
        """The target's. Raises ApiError without one."""
        if self.generator.tokenizer is None:
            raise ApiError(400, "this model was loaded without a tokenizer; send token ids")
        return self.generator.tokenizer

    def check_model(self, name: str | None) -> None:
        """Raises ApiError for a model that is not served here."""
        if name is not None and name not in self.names:
            raise ApiError(
                404,
                f"the model {name!r} is not served here; this is {self.names[0]!r}",
                param="model",
                code="model_not_found",
            )

    def encoded(self, prompt: Any) -> list[int]:
        """A prompt's token ids, or ApiError for one that leaves no room for a token."""
        ids, most = encode(prompt, self.generator.tokenizer), self.generator.target.model.max_length
        if len(ids) >= most:
            raise ContextLengthError(f"the prompt has {len(ids)} tokens, and the model's context is {most}")
        return ids

    def json_schema(self, schema: Mapping[str, Any], prompt_length: int) -> JsonSchema:
        """What keeps an output behind a prompt of so many tokens to a schema. Raises ApiError for one that is not understood."""
        target = self.generator.target
        try:
            return JsonSchema(
                schema, self.tokenizer, target.model.vocab_size, sorted(target.eos_token_ids), prompt_length
            )
        except ConfigError as error:
            raise ApiError(400, str(error), param="response_format") from None

    async def chunks(
        self, prompts: Sequence[tuple[list[int], SamplingParams]], way: Way
    ) -> AsyncGenerator[tuple[int, Chunk], None]:
        """(place, chunk) of all prompts as they come; closing this frees their rows before the next step."""
        if self.draining:
            raise ApiError(503, "the server is about to end", code="shutting_down", retry_after=5)
        clocks, waiting = [Clock(self.metrics) for _ in prompts], set(range(len(prompts)))
        try:
            async with aclosing(self._thread.chunks(prompts, kind=way)) as chunks:
                async for place, chunk in chunks:
                    self._count(chunk, clocks[place], prompts[place][0])
                    if chunk.finish_reason is not None:
                        waiting.discard(place)
                    yield place, chunk
        finally:
            for place in waiting:
                clocks[place].ended(FinishReason.CANCELLED)

    def _count(self, chunk: Chunk, clock: Clock, prompt: Sequence[int]) -> None:
        clock.take(chunk.step, len(prompt))
        if chunk.finish_reason is not None:
            clock.ended(chunk.finish_reason)

    async def sessions(self) -> list[Session]:
        """Those there are."""
        return await asyncio.wrap_future(self._thread.sessions())

    async def warm(self) -> None:
        """Decode a few tokens, so that the first request finds everything allocated."""
        first = [self.generator.target.model.vocab_size // 2] * 8
        async for _ in self.chunks([(first, SamplingParams(max_new_tokens=8, ignore_eos=True))], Way()):
            pass

    def watch(self, task: asyncio.Task[Any]) -> None:
        """Count a request among those that an end waits for."""
        self._open.add(task)
        task.add_done_callback(self._open.discard)

    async def drain(self) -> None:
        """Take no more requests; wait for those there are, and end those that take too long."""
        self.draining = True
        if self._open:
            _, late = await asyncio.wait(set(self._open), timeout=self.settings.drain_s)
            for task in late:
                task.cancel()
            with suppress(asyncio.CancelledError):
                await asyncio.gather(*late, return_exceptions=True)
