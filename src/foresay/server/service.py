"""The engine as the routes use it: requests go in, chunks come out, and whoever leaves takes their rows along.

Owns the thread that decodes, which ways of drafting are ready, and the bound of the queue. Knows no HTTP.
"""

from __future__ import annotations

import asyncio
import hashlib
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, contextmanager, suppress
from pathlib import Path
from time import perf_counter
from typing import Any, TypeVar

from foresay import __version__
from foresay.decoding.outcome import FinishReason, TokenLogprob
from foresay.decoding.sampling_params import SamplingParams
from foresay.errors import ConfigError, ContextLengthError, ForesayError
from foresay.generation.generator import PREFIX_BYTES, Generator
from foresay.generation.load import change
from foresay.generation.result import Chunk
from foresay.generation.scoring import PromptScorer
from foresay.generation.session import Session
from foresay.generation.session_thread import SessionThread
from foresay.server.drafting_choice import DraftingChoice
from foresay.server.errors import ApiError
from foresay.server.metrics import Clock, Metrics
from foresay.server.settings import ServerSettings
from foresay.text.grammar import JsonSchema
from foresay.text.prompts import encode
from foresay.text.schema_compiler import PROCESSES, SchemaCompiler

T = TypeVar("T")


def served_name(name: str) -> str:
    """The name that clients see of a model: of a local folder or file its last part, without ".gguf"; any other as it is."""
    path = Path(name).expanduser()
    if not path.exists():
        return name
    return path.resolve().name.removesuffix(".gguf") or "model"


class Service:
    """One target, and everyone who wants texts of it."""

    def __init__(self, generator: Generator, settings: ServerSettings, names: Sequence[str]) -> None:
        """names: what the target is called here, the first of which answers are signed with."""
        self.generator, self.settings, self.names = generator, settings, list(names)
        self.metrics = Metrics()
        digest = hashlib.sha256(f"{__version__} {generator.description}".encode()).hexdigest()
        self.fingerprint = f"fp_{digest[:12]}"
        """The API's `system_fingerprint`: equal where version, model and methods are equal."""
        self.ready = self.draining = False
        self._thread = SessionThread(self._make, idle_s=5.0, max_sessions=settings.max_methods, main=DraftingChoice())
        self._texts = ThreadPoolExecutor(1, "foresay-texts")
        self._schemas = ThreadPoolExecutor(PROCESSES, "foresay-schemas")
        self._compiler: SchemaCompiler | None = None
        self._preparing = 0
        """Requests whose bodies, texts or schemas are being parsed, tokenized, scored or compiled."""
        self._open: set[_Limit] = set()

    def _make(self, way: DraftingChoice) -> Session:
        return self._generator(way).session(
            max_waiting=self.settings.max_waiting,
            prefix_bytes=PREFIX_BYTES,
            prefill_wait_s=self.settings.prefill_wait_s,
        )

    def _generator(self, way: DraftingChoice) -> Generator:
        if way == DraftingChoice():
            return self.generator
        return change(self.generator, drafter=way.drafter, length=way.length, rule=way.rule)

    @property
    def tokenizer(self) -> Any:
        """The target's. Raises ApiError without one."""
        if self.generator.tokenizer is None:
            raise ApiError(400, "this model was loaded without a tokenizer; send token ids", param="prompt")
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

    async def encoded(self, prompts: Sequence[Any]) -> list[list[int]]:
        """Token ids of each prompt. Raises PromptError, and ContextLengthError for one that leaves no room for a token."""
        return await self.prepare(lambda: [self._encoded(one) for one in prompts])

    def _encoded(self, prompt: Any) -> list[int]:
        ids, most = encode(prompt, self.generator.tokenizer), self.generator.target.model.max_length
        if len(ids) >= most:
            raise ContextLengthError(f"the prompt has {len(ids)} tokens, and the model's context is {most}")
        return ids

    async def json_schema(self, schema: Mapping[str, Any]) -> JsonSchema:
        """A schema, compiled under limits; cancelling this cancels that.

        Raises ApiError for a schema that is refused, and for a model whose outputs it cannot follow.
        """
        target = self.generator.target
        if target.model.capabilities.reads_source:
            raise ApiError(400, "structured output needs a decoder-only model", param="response_format")
        if self._compiler is None:
            self._compiler = SchemaCompiler(self.tokenizer, target.model.vocab_size, sorted(target.eos_token_ids))
        compiler, cancelled = self._compiler, threading.Event()
        try:
            return await self._beside(self._schemas, lambda: compiler.compile(schema, cancelled))
        except ConfigError as error:
            raise ApiError(400, str(error), param="response_format") from None
        except ForesayError:
            if self.draining:
                raise _ending() from None
            raise
        finally:
            cancelled.set()

    async def scored(self, ids: list[int], top: int) -> list[TokenLogprob | None]:
        """Log-probabilities of a prompt's tokens, computed between the steps of the requests that generate.

        Raises as PromptScorer, and ApiError as `chunks`.
        """
        scorer = PromptScorer(self.generator.target.model, ids, top)
        with self._prepared(), self._limited() as limit:
            while await limit.wait(asyncio.wrap_future(self._thread.call(scorer.step))):
                pass
        return scorer.logprobs

    async def prepare(self, work: Callable[[], T]) -> T:
        """Run work that takes long for a long text (parsing, tokenization) on a thread, while the event loop goes on.

        Raises ApiError where many wait, and after the request's time limit.
        """
        return await self._beside(self._texts, work)

    async def _beside(self, worker: ThreadPoolExecutor, work: Callable[[], T]) -> T:
        """Have a thread of a worker do what may take long for a long text; streams go on. Raises ApiError where many wait."""
        with self._prepared():
            try:
                async with asyncio.timeout(self.settings.timeout_s):
                    return await asyncio.get_running_loop().run_in_executor(worker, work)
            except TimeoutError:
                raise self._too_long() from None

    @contextmanager
    def _prepared(self) -> Iterator[None]:
        """Count a request that is not yet in the engine's queue. Raises ApiError where many are."""
        if self._preparing >= self.settings.max_waiting:
            text = f"{self._preparing} requests are queued for preparation; try again later"
            raise ApiError(429, text, code="queue_full", retry_after=1)
        self._preparing += 1
        try:
            yield
        finally:
            self._preparing -= 1

    @contextmanager
    def _limited(self) -> Iterator[_Limit]:
        """The time limit of a request that the engine works on, which ends before it where the server does."""
        if self.draining:
            raise _ending()
        limit = _Limit(self.settings.timeout_s)
        self._open.add(limit)
        try:
            yield limit
        except TimeoutError:
            if limit.ended:
                raise ApiError(503, "the server has ended", code="shutting_down", retry_after=5) from None
            raise self._too_long() from None
        finally:
            self._open.discard(limit)

    def _too_long(self) -> ApiError:
        return ApiError(504, f"the request took more than {self.settings.timeout_s:g} seconds", code="timeout")

    async def chunks(
        self, prompts: Sequence[tuple[list[int], SamplingParams]], way: DraftingChoice
    ) -> AsyncGenerator[tuple[int, Chunk], None]:
        """(place, chunk) of all prompts as they come; closing this frees their rows before the next step.

        Raises ApiError when the request has taken too long, and when the server ends before it.
        """
        with self._limited() as limit:
            clocks, waiting = [Clock(self.metrics) for _ in prompts], set(range(len(prompts)))
            try:
                async with aclosing(self._thread.chunks(prompts, kind=way)) as chunks:
                    while waiting:
                        place, chunk = await limit.wait(anext(chunks))
                        clocks[place].take(chunk.step, len(prompts[place][0]))
                        if chunk.finish_reason is not None:
                            waiting.discard(place)
                            clocks[place].ended(chunk.finish_reason)
                        yield place, chunk
            finally:
                for place in waiting:
                    clocks[place].ended(FinishReason.CANCELLED)

    async def sessions(self) -> list[Session]:
        """Those there are."""
        return await asyncio.wrap_future(self._thread.sessions())

    async def warm(self) -> None:
        """Decode a few tokens, so that the first request finds everything allocated."""
        first = [self.generator.target.model.vocab_size // 2] * 8
        async for _ in self.chunks([(first, SamplingParams(max_new_tokens=8, ignore_eos=True))], DraftingChoice()):
            pass

    async def drain(self) -> None:
        """Take no more requests; let those there are end, and end those that take too long."""
        self.draining = True
        if self._compiler is not None:
            self._compiler.close()
        until = perf_counter() + self.settings.drain_s
        while self._open and perf_counter() < until:
            await asyncio.sleep(0.02)
        for limit in self._open:
            limit.end()


def _ending() -> ApiError:
    return ApiError(503, "the server is about to end", code="shutting_down", retry_after=5)


class _Limit:
    """How long one request may take, all waiting for its chunks together."""

    def __init__(self, seconds: float) -> None:
        self._until = asyncio.get_running_loop().time() + seconds
        self._timeout: asyncio.Timeout | None = None
        self.ended = False
        """Whether it was ended before its time."""

    async def wait(self, chunk: Awaitable[T]) -> T:
        """Raises TimeoutError when it is over."""
        async with asyncio.timeout_at(self._until) as self._timeout:
            return await chunk

    def end(self) -> None:
        """Now."""
        self.ended, self._until = True, 0.0
        if self._timeout is not None and not self._timeout.expired():
            with suppress(RuntimeError):  # nobody waits
                self._timeout.reschedule(0.0)
