"""One loaded model as the routes use it: requests go in, chunks come out, and a client's disconnection frees its rows.

Owns the model's sessions and its compiler of schemas. Knows no HTTP and no other model.
"""

from __future__ import annotations

import asyncio
import hashlib
import threading
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch

from foresay.decoding.outcome import FinishReason, TokenLogprob
from foresay.decoding.sampling_params import SamplingParams
from foresay.drafters import Memory
from foresay.drafters.owners import SALTED
from foresay.engine.admission import check_prompt_ids
from foresay.errors import ConfigError, ContextLengthError, ForesayError, RequestError
from foresay.generation.generator import PREFIX_BYTES, Generator
from foresay.generation.load import change
from foresay.generation.result import Chunk
from foresay.generation.scoring import PromptScorer, TextEmbedder
from foresay.generation.session import Session
from foresay.models.cache.memory import check_limit
from foresay.models.huggingface.linears import resident_bytes
from foresay.server.acceptance import Acceptance
from foresay.server.drafting_choice import DraftingChoice, drafting_facts
from foresay.server.errors import FieldError
from foresay.server.metrics import Clock
from foresay.server.output_fields import Constraint
from foresay.server.shared import Shared, shutdown_error
from foresay.spec.expressions import parse
from foresay.spec.recipes import named
from foresay.text.client_grammars import Written
from foresay.text.excess import Limits, first_tokens
from foresay.text.grammar import Grammar, Source
from foresay.text.prompts import ChatOptions, encode
from foresay.text.schema_compiler import SchemaCompiler
from foresay.version import __version__

T = TypeVar("T")
FLUSH_S = 10.0
"""Longest wait for kept texts to be written at the end."""


class Served:
    """A target model and its sessions, shared by all requests for it."""

    def __init__(
        self, generator: Generator, names: list[str], shared: Shared, acceptance: dict[str, Acceptance]
    ) -> None:
        """names: the model's names in the API; responses use the first. acceptance: by drafting method."""
        self.generator, self.names, self.shared, self.acceptance = generator, names, shared, acceptance
        self.settings, self.metrics, self.prepare = shared.settings, shared.metrics, shared.prepare
        self.weight_bytes = _weight_bytes(generator.target.model)
        digest = hashlib.sha256(f"{__version__} {generator.description}".encode()).hexdigest()
        self.fingerprint = f"fp_{digest[:12]}"
        """The API's `system_fingerprint`: equal for equal versions, models and drafting methods."""
        self.key = names[0]
        """Name of the sessions' kinds."""
        self._compiler: SchemaCompiler | None = None
        self._compiles = True
        shared.sessions[self.key] = self.new_session

    def new_session(self, drafting: DraftingChoice) -> Session:
        """Return a new session with a drafting method."""
        generator, prefix_bytes = self.generator, None if self.settings.share_prefixes == "none" else PREFIX_BYTES
        if drafting != DraftingChoice():
            generator = change(generator, drafter=drafting.drafter, length=drafting.length, rule=drafting.rule)
        return generator.session(prefix_bytes=prefix_bytes, prefill_wait_s=self.settings.prefill_wait_s)

    def end_sessions(self) -> None:
        """Drop the sessions. Called on their thread when no request uses the model."""
        self.shared.thread.drop(lambda kind: isinstance(kind, tuple) and kind[0] == self.key)
        self.shared.sessions.pop(self.key, None)

    def stop_compiling(self) -> None:
        """Refuse further schemas; those of open requests, too."""
        self._compiles = False
        if self._compiler is not None:
            self._compiler.close()

    def flush(self) -> None:
        """Wait until kept texts are written, at most FLUSH_S seconds."""
        for memory in self.memories:
            memory.flush(FLUSH_S)

    def closing(self) -> Callable[[], None]:
        """Return a function that closes the folder of kept texts once they are written. It does not keep the model alive."""
        self.stop_compiling()
        return partial(_close, self.memories)

    @property
    def tokenizer(self) -> Any:
        """The target's tokenizer. Raises ApiError without one."""
        if self.generator.tokenizer is None:
            raise FieldError("prompt", ": this model was loaded without a tokenizer; send token ids")
        return self.generator.tokenizer

    def facts(self) -> dict[str, Any]:
        """Return what the list of models reports of a loaded one. Clients never see paths."""
        target = self.generator.target
        return {
            "precision": target.precision,
            "weight_bytes": self.weight_bytes,
            "device": str(target.model.device),
            "chat_template": bool(getattr(target.tokenizer, "chat_template", None)),
            **drafting_facts(self.generator),
        }

    def owned(self, params: SamplingParams, state: Any, salt: str | None = None) -> SamplingParams:
        """Return parameters with the owner of what a request shares: its API key, which `state` has, and the client's salt."""
        key, own = str(getattr(state, "owner", "")), ""
        if salt:
            own = SALTED + hashlib.sha256(salt.encode()).hexdigest()
        prefixes = key if self.settings.share_prefixes == "key" else ""
        return replace(params, owner=("" if self.settings.memory_shared else key) + own, cache_salt=prefixes + own)

    @property
    def memories(self) -> list[Memory]:
        """Texts that the server keeps for this model."""
        resources = self.generator.resources
        return [] if resources is None else list(resources.memories.values())

    async def encoded(self, prompts: Sequence[Any], options: ChatOptions | None = None) -> list[list[int]]:
        """Return the token ids of each prompt. options: see `encode`.

        Raises PromptError, and ContextLengthError for a prompt that fills the context.
        """
        return await self.prepare(lambda: [self._encoded(one, options) for one in prompts])

    def _encoded(self, prompt: Any, options: ChatOptions | None) -> list[int]:
        context_length = self.generator.target.model.max_length
        ids = encode(prompt, self.generator.tokenizer, options, Limits(context_length - 1, check_limit))
        if ids:
            check_prompt_ids(ids, self.generator.target.model.vocab_size)
        if len(ids) >= context_length:
            raise ContextLengthError(f"the prompt has {len(ids)} tokens, and the model's context is {context_length}")
        return ids

    async def encoded_prediction(self, text: str, most: int) -> tuple[int, ...]:
        """Return the token ids of a predicted text for an output of at most `most` tokens, with room for what it leaves out."""
        tokenizer, limits = self.tokenizer, Limits(reserve=check_limit)
        return await self.prepare(lambda: tuple(first_tokens(tokenizer, text, max(64, 4 * most), limits)))

    def with_lookup(self, drafting: DraftingChoice) -> DraftingChoice:
        """Return a drafting method that drafts known tokens: this one, or "suffix" if it has no n-gram drafter."""
        name = parse(drafting.drafter or self.generator.drafter_name).name
        return drafting if name == "hybrid" or name in named("lookup") else replace(drafting, drafter="suffix")

    async def grammar(
        self, source: Source, *, param: str, owner: str, parts: Mapping[str, Any] | None = None
    ) -> Grammar:
        """Compile a schema or grammar within limits. Cancelling the coroutine cancels the compilation.

        param: the field that requests it. owner: of the request. parts: see `SchemaCompiler.compile`. Raises ApiError for a
        rejected schema, and for a model that does not support structured output.
        """
        return await self._tried(param, lambda compiler, cancelled: compiler.compile(source, cancelled, owner, parts))

    async def read(self, constraint: Constraint | None) -> tuple[str, Source] | None:
        """Return the field and source of a request's constraint, which is read within limits. Raises as `grammar`."""
        if constraint is None:
            return None
        field, source = constraint
        if not isinstance(source, Written):
            return field, source
        return field, await self._tried(field, lambda compiler, cancelled: compiler.read(source, cancelled))

    async def _tried(self, param: str, work: Callable[[SchemaCompiler, threading.Event], T]) -> T:
        """Run work on a thread of those that wait for trials. Cancelling the coroutine cancels the trial."""
        target = self.generator.target
        if target.model.capabilities.reads_source:
            raise FieldError(param, "needs a decoder-only model")
        if not self._compiles:
            raise shutdown_error()
        if self._compiler is None:
            self._compiler = SchemaCompiler(self.tokenizer, target.model.vocab_size, sorted(target.eos_token_ids))
        compiler, cancelled = self._compiler, threading.Event()
        try:
            return await self.shared.in_time(self.shared.queues.trials.run(lambda: work(compiler, cancelled)))
        except ConfigError as error:
            raise FieldError(param, error) from None
        except ForesayError:
            if self.shared.draining:
                raise shutdown_error() from None
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
        """Run the passes over a text. Clients take turns, so that running requests wait for one pass between two steps."""
        passes = self.shared.queues.passes

        async def one_pass() -> bool:
            async with passes.turn():
                return bool(await asyncio.wrap_future(self.shared.thread.call(step)))

        with passes.slot(), self.shared.time_limit() as limit:
            while await limit.wait(one_pass()):
                pass

    async def chunks(
        self, prompts: Sequence[tuple[list[int], SamplingParams]], drafting: DraftingChoice
    ) -> AsyncGenerator[tuple[int, Chunk], None]:
        """Yield (output index, chunk) as chunks arrive. Closing the generator frees the rows before the next step.

        Raises the first error of any output, and ApiError after the request's time limit and when the server shuts down first.
        """
        # a client's settings are left out, so that there are few names
        method = parse(drafting.drafter).name if drafting.drafter else self.generator.drafter_name
        with self.shared.queues.rows.slot(len(prompts)), self.shared.time_limit() as limit:
            clocks, waiting = [Clock(self.metrics) for _ in prompts], set(range(len(prompts)))
            try:
                async with aclosing(self.shared.thread.chunks(prompts, kind=(self.key, drafting))) as chunks:
                    while waiting:
                        index, chunk = await limit.wait(anext(chunks))
                        clocks[index].take(chunk.step, len(prompts[index][0]))
                        if chunk.step.num_tested:
                            self.acceptance.setdefault(method, Acceptance()).take(
                                chunk.step, f"{method} for {self.key}"
                            )
                        if chunk.finish_reason is not None:
                            waiting.discard(index)
                            clocks[index].ended(chunk.finish_reason)
                        if chunk.error is not None:
                            raise chunk.error
                        yield index, chunk
            finally:
                for index in waiting:
                    clocks[index].ended(FinishReason.CANCELLED)

    async def warm(self) -> None:
        """Decode a few tokens, so that buffers and caches are allocated before the first request."""
        first = [self.generator.target.model.vocab_size // 2] * 8
        with suppress(RequestError):  # as of a request: the server starts
            async for _ in self.chunks([(first, SamplingParams(max_new_tokens=8, ignore_eos=True))], DraftingChoice()):
                pass


def _close(memories: list[Memory]) -> None:
    for memory in memories:
        memory.close()


def _weight_bytes(model: Any) -> int:
    """Return the bytes of a model's weights; 0 if it does not report them."""
    module = getattr(model, "model", None)
    if isinstance(module, torch.nn.Module):
        return resident_bytes(module)
    return int(getattr(getattr(model, "weights", None), "nbytes", 0))
