"""Text in, text out: the object `foresay.load` returns.

Owns the way from a prompt through the engine to text, in one piece, streamed or asynchronously. Each call has an engine
and caches of its own, so calls do not see each other.
"""

from __future__ import annotations

import asyncio
import contextlib
import weakref
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from typing import Any, overload

from foresay.decoding.acceptance import RULES, Speculative
from foresay.decoding.outcome import FinishReason, Step
from foresay.decoding.protocols import LengthPolicy, Rule
from foresay.decoding.sampling_params import SamplingParams
from foresay.engine import Engine, Stats
from foresay.errors import ConfigError
from foresay.generation.result import Chunk, Generation
from foresay.lengths import LENGTHS, ConstantLength
from foresay.methods.expressions import written
from foresay.methods.recipes import DrafterBuilder, Resources
from foresay.models.sources.catalog import LoadedModel
from foresay.text.prompts import Prompt, encode, is_batch
from foresay.text.stream import Detokenizer, StopStrings, TextStream


class _Request:
    """One request on its way through an engine."""

    def __init__(self, index: int, prompt: list[int], params: SamplingParams, tokenizer: Any) -> None:
        if params.stop and tokenizer is None:
            raise ConfigError(
                "stop strings need a tokenizer, and this model was loaded without one; use stop_token_ids"
            )
        self.index, self.prompt, self.params, self._tokenizer = index, prompt, params, tokenizer
        self.stop = StopStrings(tokenizer, params.stop, params.min_new_tokens) if params.stop else None
        self.steps: list[Step] = []
        self.seed: int | None = None

    def finish(self, reason: FinishReason, exact: bool, draft_error: str | None) -> Generation:
        ids = [token for step in self.steps for token in step.token_ids]
        return Generation(
            text=self._text(ids),
            token_ids=ids,
            prompt_token_ids=self.prompt,
            finish_reason=reason,
            steps=self.steps,
            stats=Stats.of(self.steps),
            seed=self.seed,
            exact=exact,
            draft_error=draft_error,
        )

    def _text(self, ids: list[int]) -> str:
        if self._tokenizer is None:
            return ""
        if self.stop is not None and self.stop.cut_at is not None:
            return self.stop.text[: self.stop.cut_at]
        # as the stream decodes it: `decode` of the whole may turn complete characters before a cut one into U+FFFD
        return Detokenizer(self._tokenizer).all(ids)


class Generator:
    """A target with a drafter, a rule and a length policy, ready to write."""

    def __init__(
        self,
        target: LoadedModel,
        build_drafter: DrafterBuilder,
        rule: Rule,
        policy: LengthPolicy,
        *,
        max_batch_size: int = 32,
        drafter: str = "none",
        resources: Resources | None = None,
        forget: Callable[[], None] | None = None,
    ) -> None:
        """drafter: what its maker calls it. resources: what `foresay.change` needs. forget: clears what outlives requests."""
        self.target, self.rule, self.policy = target, rule, policy
        self.max_batch_size = max_batch_size
        self.drafter_name, self.resources = drafter, resources
        self._build_drafter, self._forget = build_drafter, forget
        self._latest: weakref.ref[Engine] | None = None

    def __repr__(self) -> str:
        return f"<foresay.Generator {self.description}>"

    @property
    def description(self) -> str:
        """Target, drafter, length and rule in a line."""
        gamma = getattr(self.policy, "num_draft_tokens", None)
        length = f"gamma={gamma}" if gamma is not None else f"length={written(self.policy, LENGTHS)}"
        lossy = "" if self.rule.exact else " (lossy)"
        return f"target={self.target.name} drafter={self.drafter_name} {length} rule={written(self.rule, RULES)}{lossy}"

    def forget(self) -> None:
        """Clear what the drafter has learned from earlier requests: n-gram stores, past texts."""
        if self._forget is not None:
            self._forget()

    def with_settings(
        self, *, rule: Rule | None = None, policy: LengthPolicy | None = None, max_batch_size: int | None = None
    ) -> Generator:
        """The same target and drafter under another rule, length policy or batch size."""
        return Generator(
            self.target,
            self._build_drafter,
            rule or self.rule,
            policy or self.policy,
            max_batch_size=max_batch_size or self.max_batch_size,
            drafter=self.drafter_name,
            resources=self.resources,
            forget=self._forget,
        )

    @property
    def tokenizer(self) -> Any:
        """The target's tokenizer, or None."""
        return self.target.tokenizer

    def plain(self) -> Generator:
        """The same target without a drafter: plain decoding through the same loop, which no lossy rule changes."""
        return Generator(
            self.target,
            lambda: None,
            self.rule if self.rule.exact else Speculative(),
            ConstantLength(0),
            max_batch_size=self.max_batch_size,
            resources=self.resources,
        )

    def engine(self) -> Engine:
        """A fresh engine over the shared weights."""
        drafter = self._build_drafter()
        busy = self._latest() if self._latest is not None else None
        if busy is not None and busy.has_work and busy.drafter is not None and busy.drafter.inner is drafter:
            raise ConfigError(
                f"this {type(drafter).__name__} drafts for another call that has not ended; pass a function that makes one"
            )
        engine = Engine(self.target.model, drafter, self.rule, self.policy, max_batch_size=self.max_batch_size)
        self._latest = weakref.ref(engine)
        return engine

    @overload
    def generate(self, prompt: Sequence[Mapping[str, str]], params: None = None, **changes: Any) -> Generation: ...

    @overload
    def generate(self, prompt: str, params: SamplingParams | None = None, **changes: Any) -> Generation: ...

    @overload
    def generate(self, prompt: Any, params: Any = None, **changes: Any) -> Any: ...

    def generate(
        self,
        prompt: Any,
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        on_chunk: Callable[[Chunk], None] | None = None,
        **changes: Any,
    ) -> Generation | list[Generation]:
        """Write one output per prompt.

        prompt: a text, chat messages, token ids, or a list of those, which is decoded as a batch and gives a list.
        params: for all prompts, or one per prompt. changes: fields of SamplingParams, over `params`. on_chunk: called
        after every target pass of every prompt. Raises ConfigError, PromptError or ContextLengthError before anything
        is decoded.
        """
        batch = is_batch(prompt)
        done: dict[int, Generation] = {}
        requests = self._requests(list(prompt) if batch else [prompt], params, changes)
        for chunk in self._run(*requests, text=on_chunk is not None):
            if on_chunk is not None:
                on_chunk(chunk)
            if chunk.generation is not None:
                done[chunk.index] = chunk.generation
        return [done[i] for i in sorted(done)] if batch else done[0]

    def stream(
        self, prompt: Any, params: SamplingParams | Sequence[SamplingParams] | None = None, **changes: Any
    ) -> Iterator[Chunk]:
        """Yield what each target pass adds, as it comes. Arguments as `generate`; a bad one raises here, not later.

        The iterator may be abandoned at any time.
        """
        prompts = list(prompt) if is_batch(prompt) else [prompt]
        return self._run(*self._requests(prompts, params, changes), text=True)

    async def astream(
        self, prompt: Any, params: SamplingParams | Sequence[SamplingParams] | None = None, **changes: Any
    ) -> AsyncIterator[Chunk]:
        """`stream` for asyncio: passes run in a worker thread, the event loop stays free."""
        iterator = self.stream(prompt, params, **changes)
        try:
            while True:
                pending = asyncio.ensure_future(asyncio.to_thread(next, iterator, None))
                try:
                    chunk = await asyncio.shield(pending)
                except asyncio.CancelledError:
                    await _settled(pending)
                    raise
                if chunk is None:
                    return
                yield chunk
        finally:
            iterator.close()  # type: ignore[attr-defined]

    def _requests(
        self, prompts: Sequence[Prompt], params: Any, changes: dict[str, Any]
    ) -> tuple[Engine, dict[int, _Request]]:
        """Encode, validate and submit everything; nothing is decoded when one prompt is bad."""
        if params is not None and not isinstance(params, SamplingParams):
            each = list(params)
            if len(each) != len(prompts):
                raise ConfigError(
                    f"{len(each)} params were given for {len(prompts)} prompts; give one, or one for each"
                )
        else:
            each = [params] * len(prompts)
        engine = self.engine()
        requests: dict[int, _Request] = {}
        for i, (prompt, one) in enumerate(zip(prompts, each, strict=True)):
            final = SamplingParams.of(one, **changes)
            ids = encode(prompt, self.tokenizer)
            begun, final, source = self._begin(ids, final)
            request = _Request(i, ids, final, self.tokenizer)
            number = engine.submit(begun, final, eos=self.target.eos_token_ids, stop=request.stop, source=source)
            request.seed = None if final.greedy else engine.seed_of(number)
            requests[number] = request
        return engine, requests

    def _begin(self, ids: list[int], params: SamplingParams) -> tuple[list[int], SamplingParams, list[int] | None]:
        """What the output continues, the parameters, and the source: an encoder-decoder reads the prompt there."""
        model: Any = self.target.model
        if not getattr(model, "reads_source", False):
            return ids, params, None
        return *model.start(params), ids

    def _run(self, engine: Engine, requests: dict[int, _Request], *, text: bool) -> Iterator[Chunk]:
        streams = {
            number: TextStream(self.tokenizer, request.params.stop) if text and self.tokenizer is not None else None
            for number, request in requests.items()
        }
        while engine.has_work:
            for step in engine.step():
                if step.finish_reason is FinishReason.ERROR:
                    raise engine.errors[step.request_id]
                request, stream = requests[step.request_id], streams[step.request_id]
                request.steps.append(step)
                pieces = stream.push(step.token_ids, step.origins) if stream is not None else []
                whole = None
                if step.finish_reason is not None:
                    stopped = request.stop is not None and request.stop.cut_at is not None
                    pieces += stream.finish(stopped=stopped) if stream is not None else []
                    whole = request.finish(step.finish_reason, self.rule.exact, _draft_error(engine))
                joined = "".join(piece.text for piece in pieces)
                yield Chunk(request.index, joined, tuple(pieces), step, step.finish_reason, whole)


async def _settled(pending: asyncio.Future[Any]) -> None:
    """Wait for the pass under way, which cannot be interrupted, however often the waiting is cancelled."""
    while not pending.done():
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait([pending])
    pending.exception()


def _draft_error(engine: Engine) -> str | None:
    error = engine.drafter.last_error if engine.drafter is not None else None
    return None if error is None else f"{type(error).__name__}: {error}"


__all__ = ["Chunk", "Detokenizer", "Generation", "Generator"]
