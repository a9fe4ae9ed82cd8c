"""The engine as the routes use it: requests go in, chunks come out, and a client's disconnection frees its rows.

Owns the decoding thread, the open sessions and the queue's limit. Knows no HTTP.
"""

from __future__ import annotations

import asyncio
import hashlib
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, aclosing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from foresay import __version__
from foresay.decoding.outcome import FinishReason, TokenLogprob
from foresay.decoding.sampling_params import SamplingParams
from foresay.drafters import Memory
from foresay.engine.admission import check_prompt_ids
from foresay.errors import ConfigError, ContextLengthError, ForesayError, RequestError
from foresay.generation.generator import PREFIX_BYTES, Generator
from foresay.generation.load import change
from foresay.generation.result import Chunk
from foresay.generation.scoring import PromptScorer, TextEmbedder
from foresay.generation.session import Session
from foresay.generation.session_thread import SessionThread
from foresay.models.cache.memory import Trimmer, check_limit
from foresay.models.huggingface.linears import resident_bytes
from foresay.server.acceptance import AcceptanceMonitor
from foresay.server.drafting_choice import DraftingChoice
from foresay.server.errors import ApiError, FieldError
from foresay.server.lanes import LONG, SENDER, Lanes
from foresay.server.metrics import Clock, Metrics
from foresay.server.settings import ServerSettings
from foresay.spec.expressions import parse
from foresay.spec.recipes import named
from foresay.text.excess import beginning
from foresay.text.grammar import Grammar, Source
from foresay.text.prompts import ChatOptions, encode
from foresay.text.schema_compiler import PROCESSES, SchemaCompiler

T = TypeVar("T")
FLUSH_S = 10.0
"""Longest wait for kept texts to be written at the end."""
TRIM_S = 1.0
"""Time between two measurements of the allocator's slack."""
TEXT_BYTES = 32
"""Memory that reading a long body takes, for each of its bytes."""


def served_name(name: str) -> str:
    """Return the public name of a model: the last part of a local path, without ".gguf"; any other name unchanged."""
    path = Path(name).expanduser()
    if not path.exists():
        return name
    return path.resolve().name.removesuffix(".gguf") or "model"


class Service:
    """One target model and its sessions, shared by all requests."""

    def __init__(self, generator: Generator, settings: ServerSettings, names: Sequence[str]) -> None:
        """names: the model's names in the API; responses use the first."""
        self.generator, self.settings, self.names = generator, settings, list(names)
        self.metrics = Metrics()
        self.acceptance = AcceptanceMonitor(self.names[0])
        self.weight_bytes = _weight_bytes(generator.target.model)
        self.metrics.weight_bytes.set(self.weight_bytes)
        digest = hashlib.sha256(f"{__version__} {generator.description}".encode()).hexdigest()
        self.fingerprint = f"fp_{digest[:12]}"
        """The API's `system_fingerprint`: equal for equal versions, models and drafting methods."""
        self.ready = self.draining = False
        self._thread = SessionThread(
            self._new_session, idle_s=5.0, max_sessions=settings.max_methods, main=DraftingChoice()
        )
        self.lanes = Lanes(settings.max_waiting + generator.max_batch_size)
        self._passes = asyncio.Lock()
        """Held during a pass over a text that generates nothing."""
        self._schema_workers = ThreadPoolExecutor(PROCESSES, "foresay-schemas")
        self._compiler: SchemaCompiler | None = None
        self._open_limits: set[_TimeLimit] = set()

    def _new_session(self, drafting: DraftingChoice) -> Session:
        return self._generator(drafting).session(
            max_waiting=self.settings.max_waiting,
            prefix_bytes=None if self.settings.share_prefixes == "none" else PREFIX_BYTES,
            prefill_wait_s=self.settings.prefill_wait_s,
        )

    def _generator(self, drafting: DraftingChoice) -> Generator:
        if drafting == DraftingChoice():
            return self.generator
        return change(self.generator, drafter=drafting.drafter, length=drafting.length, rule=drafting.rule)

    @property
    def tokenizer(self) -> Any:
        """The target's tokenizer. Raises ApiError without one."""
        if self.generator.tokenizer is None:
            raise FieldError("prompt", "this model was loaded without a tokenizer; send token ids")
        return self.generator.tokenizer

    def owned(self, params: SamplingParams, state: Any, salt: str | None = None) -> SamplingParams:
        """Return parameters with the owner of a request's texts and the salt of its prefixes.

        state: of the request, with its API key. salt: sent by the client.
        """
        key = str(getattr(state, "owner", ""))
        own = key if self.settings.share_prefixes == "key" else ""
        salted = hashlib.sha256(f"{len(own)} {own}{salt or ''}".encode()).hexdigest() if own or salt else ""
        return replace(params, owner="" if self.settings.memory_shared else key, cache_salt=salted)

    @property
    def memory(self) -> Memory | None:
        """Texts that the server keeps."""
        resources = self.generator.resources
        return None if resources is None else next(iter(resources.memories.values()), None)

    def check_model(self, name: str | None) -> None:
        """Raise ApiError for a model that is not served here."""
        if name is not None and name not in self.names:
            raise ApiError(
                404,
                f"the model {name!r} is not served here; this server serves {self.names[0]!r}",
                param="model",
                code="model_not_found",
            )

    async def encoded(self, prompts: Sequence[Any], options: ChatOptions | None = None) -> list[list[int]]:
        """Return the token ids of each prompt. options: see `encode`.

        Raises PromptError, and ContextLengthError for a prompt that fills the context.
        """
        return await self.prepare(lambda: [self._encoded(one, options) for one in prompts])

    def _encoded(self, prompt: Any, options: ChatOptions | None) -> list[int]:
        context_length = self.generator.target.model.max_length
        ids = encode(prompt, self.generator.tokenizer, options, most=context_length - 1)
        if ids:
            check_prompt_ids(ids, self.generator.target.model.vocab_size)
        if len(ids) >= context_length:
            raise ContextLengthError(f"the prompt has {len(ids)} tokens, and the model's context is {context_length}")
        return ids

    async def encoded_prediction(self, text: str) -> tuple[int, ...]:
        """Return the token ids of a predicted text, at most as many as the context holds."""
        tokenizer, most = self.tokenizer, self.generator.target.model.max_length

        def encoded() -> tuple[int, ...]:
            ids = beginning(tokenizer, text, most) or tokenizer(text, add_special_tokens=False).input_ids
            return tuple(ids[:most])

        return await self.prepare(encoded)

    def with_lookup(self, drafting: DraftingChoice) -> DraftingChoice:
        """Return a drafting method that drafts known tokens: this one, or "suffix" if it has no n-gram drafter."""
        name = parse(drafting.drafter or self.generator.drafter_name).name
        return drafting if name == "hybrid" or name in named("lookup") else replace(drafting, drafter="suffix")

    async def grammar(self, source: Source, *, param: str) -> Grammar:
        """Compile a schema or grammar within limits. Cancelling the coroutine cancels the compilation.

        param: the field that requests it. Raises ApiError for a rejected schema, and for a model that does not support structured
        output.
        """
        target = self.generator.target
        if target.model.capabilities.reads_source:
            raise FieldError(param, "structured output needs a decoder-only model")
        if self._compiler is None:
            self._compiler = SchemaCompiler(self.tokenizer, target.model.vocab_size, sorted(target.eos_token_ids))
        compiler, cancelled = self._compiler, threading.Event()
        try:
            loop = asyncio.get_running_loop()
            with self._preparation():
                return await self._in_time(
                    loop.run_in_executor(self._schema_workers, lambda: compiler.compile(source, cancelled))
                )
        except ConfigError as error:
            raise FieldError(param, str(error)) from None
        except ForesayError:
            if self.draining:
                raise _shutdown_error() from None
            raise
        finally:
            cancelled.set()

    async def scored(self, ids: list[int], top: int) -> list[TokenLogprob | None]:
        """Return the log-probabilities of a prompt's tokens, computed between the steps of running requests.

        Raises the errors of PromptScorer, and ApiError as `chunks` does.
        """
        scorer = PromptScorer(self.generator.target.model, ids, top)
        await self._run_passes(scorer.step)
        return scorer.logprobs

    async def embedded(self, ids: list[int], pooling: str) -> torch.Tensor:
        """Return the embedding of a text, [H] float32, computed between the steps of running requests.

        Raises the errors of TextEmbedder, and ApiError as `chunks` does.
        """
        embedder = TextEmbedder(self.generator.target.model, ids, pooling, self.settings.prefill_wait_s)
        await self._run_passes(embedder.step)
        return embedder.embedding()

    async def _run_passes(self, step: Callable[[], bool]) -> None:
        """Run the passes over a text. Texts take turns, so that running requests wait for one pass between two steps."""
        with self._preparation(), self._time_limit() as limit:
            more = True
            while more:
                await limit.wait(self._passes.acquire())
                try:
                    more = await limit.wait(asyncio.wrap_future(self._thread.call(step)))
                finally:
                    self._passes.release()

    async def prepare(self, work: Callable[[], T]) -> T:
        """Run work that is slow for a long text (parsing, tokenization) on a thread, so that the event loop continues.

        Raises ApiError if too many requests wait, and after the request's time limit; OutOfMemoryError for a long text that would
        pass the memory limit.
        """
        sender = SENDER.get()
        if sender.size >= LONG:
            check_limit(TEXT_BYTES * sender.size)
        with self._preparation():
            return await self._in_time(self.lanes.of(sender).run(sender.client, work))

    async def _in_time(self, result: Awaitable[T]) -> T:
        try:
            async with asyncio.timeout(self.settings.timeout_s):
                return await result
        except TimeoutError:
            raise self._timeout_error() from None

    def _preparation(self) -> AbstractContextManager[None]:
        """Count a request that is not yet in the engine's queue. Raises ApiError if there are too many."""
        sender = SENDER.get()
        return self.lanes.of(sender).admitted(sender.client)

    @contextmanager
    def _time_limit(self) -> Iterator[_TimeLimit]:
        """Apply the time limit of a request in the engine. Server shutdown ends the request earlier."""
        if self.draining:
            raise _shutdown_error()
        limit = _TimeLimit(self.settings.timeout_s)
        self._open_limits.add(limit)
        try:
            yield limit
        except TimeoutError:
            if limit.ended:
                raise ApiError(503, "the server has shut down", code="shutting_down", retry_after=5) from None
            raise self._timeout_error() from None
        finally:
            self._open_limits.discard(limit)

    def _timeout_error(self) -> ApiError:
        return ApiError(504, f"the request took more than {self.settings.timeout_s:g} seconds", code="timeout")

    async def chunks(
        self, prompts: Sequence[tuple[list[int], SamplingParams]], drafting: DraftingChoice
    ) -> AsyncGenerator[tuple[int, Chunk], None]:
        """Yield (output index, chunk) as chunks arrive. Closing the generator frees the rows before the next step.

        Raises the first error of any output, and ApiError after the request's time limit and when the server shuts down first.
        """
        # a client's settings are left out, so that there are few names
        method = parse(drafting.drafter).name if drafting.drafter else self.generator.drafter_name
        with self._time_limit() as limit:
            clocks, waiting = [Clock(self.metrics) for _ in prompts], set(range(len(prompts)))
            try:
                async with aclosing(self._thread.chunks(prompts, kind=drafting)) as chunks:
                    while waiting:
                        index, chunk = await limit.wait(anext(chunks))
                        clocks[index].take(chunk.step, len(prompts[index][0]))
                        self.acceptance.take(method, chunk.step)
                        if chunk.finish_reason is not None:
                            waiting.discard(index)
                            clocks[index].ended(chunk.finish_reason)
                        if chunk.error is not None:
                            raise chunk.error
                        yield index, chunk
            finally:
                for index in waiting:
                    clocks[index].ended(FinishReason.CANCELLED)

    async def sessions(self) -> list[Session]:
        """Return the open sessions."""
        return await asyncio.wrap_future(self._thread.sessions())

    async def warm(self) -> None:
        """Decode a few tokens, so that buffers and caches are allocated before the first request."""
        first = [self.generator.target.model.vocab_size // 2] * 8
        with suppress(RequestError):  # as of a request: the server starts
            async for _ in self.chunks([(first, SamplingParams(max_new_tokens=8, ignore_eos=True))], DraftingChoice()):
                pass

    async def trim_memory(self) -> None:
        """Return freed memory to the system for as long as the server runs."""
        trimmer = Trimmer()
        while True:
            await asyncio.sleep(TRIM_S)
            idle = not self._open_limits and not self.lanes.open
            await asyncio.to_thread(trimmer.check, idle=idle)

    async def drain(self) -> None:
        """Accept no more requests; wait for the open ones up to the drain limit, then end them."""
        self.draining = True
        if self._compiler is not None:
            self._compiler.close()
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self.settings.drain_s
        while self._open_limits and loop.time() < deadline:
            await asyncio.sleep(0.02)
        for limit in self._open_limits:
            limit.end()
        if self.memory is not None:
            await asyncio.to_thread(self.memory.flush, FLUSH_S)


def _weight_bytes(model: Any) -> int:
    """Return the bytes of a model's weights; 0 if it does not report them."""
    module = getattr(model, "model", None)
    if isinstance(module, torch.nn.Module):
        return resident_bytes(module)
    return int(getattr(getattr(model, "weights", None), "nbytes", 0))


def _shutdown_error() -> ApiError:
    return ApiError(503, "the server is shutting down", code="shutting_down", retry_after=5)


class _TimeLimit:
    """Time limit of one request, over all its waits."""

    def __init__(self, seconds: float) -> None:
        self._deadline = asyncio.get_running_loop().time() + seconds
        self._timeout: asyncio.Timeout | None = None
        self.ended = False
        """True if the request was ended before its limit."""

    async def wait(self, chunk: Awaitable[T]) -> T:
        """Wait for a chunk. Raises TimeoutError after the limit."""
        async with asyncio.timeout_at(self._deadline) as self._timeout:
            return await chunk

    def end(self) -> None:
        """End the request now."""
        self.ended, self._deadline = True, 0.0
        if self._timeout is not None and not self._timeout.expired():
            with suppress(RuntimeError):  # no task waits
                self._timeout.reschedule(0.0)
