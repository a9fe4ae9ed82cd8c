"""Text in, text out: the object `foresay.load` returns.

Owns what a call asks of a session, in one piece, streamed or asynchronously. Each call of `generate` and `stream` has a
session of its own, so calls do not see each other; all `astream` calls on one Generator share one, and its batch.
"""

from __future__ import annotations

import secrets
import weakref
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any, cast, overload

from foresay import distributed
from foresay.checks import check_flag
from foresay.decoding.acceptance import RULES, Speculative
from foresay.decoding.protocols import Drafter, LengthPolicy, Observer, Rule
from foresay.decoding.randomness import derive
from foresay.decoding.sampling_params import MAX_SEED, SamplingParams
from foresay.engine import Engine
from foresay.engine.chunked_prefill import OFFLINE_WAIT_S, WAIT_S
from foresay.engine.prefixes import PrefixStore
from foresay.errors import ConfigError
from foresay.generation.result import Chunk, Generation
from foresay.generation.session import Session
from foresay.generation.session_thread import SessionThread
from foresay.lengths import LENGTHS, ConstantLength
from foresay.lengths.broadcast import BroadcastLength
from foresay.models.sources.catalog import LoadedModel
from foresay.spec.expressions import written
from foresay.spec.recipe import DrafterBuilder, Resources
from foresay.text.prompts import Prompt, is_batch
from foresay.text.tokenizer import Tokenizer

PREFIX_BYTES = 1 << 28
"""Slots of ended rows that the session of `astream` keeps for others to begin with."""


class Generator:
    """A target with a drafter, a rule and a length policy, ready to write."""

    def __init__(
        self,
        target: LoadedModel,
        build_drafter: DrafterBuilder,
        rule: Rule,
        length: LengthPolicy | Callable[[Rule], LengthPolicy],
        *,
        max_batch_size: int = 32,
        drafter: str = "none",
        resources: Resources | None = None,
        forget: Callable[[], None] | None = None,
        share_prefixes: bool = True,
    ) -> None:
        """length: a policy, or what gives the drafter's own under a rule. drafter: what its maker calls it.

        resources: what `foresay.change` needs. forget: clears what outlives requests. share_prefixes: whether a prompt
        may start from the slots of a row that begins alike.
        """
        self.share_prefixes = check_flag("share_prefixes", share_prefixes)
        self._own_length = None if hasattr(length, "budget") else length
        self.target, self.rule = target, rule
        self.policy = cast(LengthPolicy, length) if self._own_length is None else self._own_length(rule)
        self.max_batch_size = max_batch_size
        self.drafter_name, self.resources = drafter, resources
        self._build_drafter, self._forget = build_drafter, forget
        self._latest: weakref.ref[Engine] | None = None
        self._live = SessionThread(lambda kind: self.session(prefix_bytes=PREFIX_BYTES))

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
        same = rule is None and policy is None
        out = Generator(
            self.target,
            self._build_drafter,
            rule or self.rule,
            policy or self._own_length or self.policy,
            max_batch_size=max_batch_size or self.max_batch_size,
            drafter=self.drafter_name,
            resources=self.resources,
            forget=self._forget,
            share_prefixes=self.share_prefixes,
        )
        if same:
            out.policy = self.policy  # with what it has measured
        return out

    @property
    def _is_shared(self) -> bool:
        """Whether several processes compute the target together."""
        return bool(getattr(self.target.model, "is_shared", False))

    @property
    def tokenizer(self) -> Tokenizer | None:
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
            share_prefixes=self.share_prefixes,
        )

    def make_drafter(self) -> Drafter | None:
        """A drafter as each engine gets one; None where nothing drafts."""
        return self._build_drafter()

    def engine(
        self, *, prefix_bytes: int = 0, prefill_wait_s: float = WAIT_S, observers: Sequence[Observer] = ()
    ) -> Engine:
        """A fresh engine over the shared weights. prefix_bytes: slots of ended rows that it may keep for others to begin with.

        prefill_wait_s: about how long running requests wait for the prompts of others between two tokens.
        """
        drafter = self._build_drafter()
        busy = self._latest() if self._latest is not None else None
        if busy is not None and busy.has_work and busy.drafter is not None and busy.drafter.inner is drafter:
            raise ConfigError(
                f"this {type(drafter).__name__} drafts for another call that has not ended; pass a function that makes one"
            )
        shared: dict[str, Any] = {}
        if self._is_shared:
            shared["prefill_clock"] = None
            shared["draw_seed"] = lambda: distributed.broadcast_first([secrets.randbelow(MAX_SEED)])[0]
        engine = Engine(
            self.target.model,
            drafter,
            self.rule,
            BroadcastLength(self.policy) if shared else self.policy,
            max_batch_size=self.max_batch_size,
            prefixes=PrefixStore(prefix_bytes) if self.share_prefixes else None,
            prefill_wait_s=prefill_wait_s,
            observers=observers,
            **shared,
        )
        self._latest = weakref.ref(engine)
        return engine

    def session(
        self,
        *,
        max_waiting: int | None = None,
        prefix_bytes: int = 0,
        prefill_wait_s: float = WAIT_S,
        observers: Sequence[Observer] = (),
    ) -> Session:
        """A fresh session over the shared weights: submit, step, cancel. max_waiting: requests that may wait for a row.

        The rest as for `engine`.
        """
        engine = self.engine(prefix_bytes=prefix_bytes, prefill_wait_s=prefill_wait_s, observers=observers)
        return Session(self.target, engine, max_waiting=max_waiting)

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
        is decoded. A request that fails on its way raises RequestError; in a list it ends alone, with
        finish_reason "error" and its `error`.
        """
        batch = is_batch(prompt)
        done: dict[int, Generation] = {}
        session, places = self._submitted(prompt, params, changes, text=on_chunk is not None)
        for chunk in _run(session, places, alone=not batch):
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
        return _run(*self._submitted(prompt, params, changes, text=True), alone=not is_batch(prompt))

    async def astream(
        self, prompt: Any, params: SamplingParams | Sequence[SamplingParams] | None = None, **changes: Any
    ) -> AsyncIterator[Chunk]:
        """`stream` for asyncio, over a session that all calls share: its rows decode together, on a thread of its own.

        A call that is cancelled, or whose iterator is closed, frees its rows before the next step.
        """
        if self._is_shared:
            raise ConfigError(
                "astream takes requests when they come, which several processes never see alike; use generate"
            )
        requests = _requests(prompt, params, changes)
        async with aclosing(self._live.chunks(requests)) as chunks:
            async for place, chunk in chunks:
                if chunk.error is not None and not is_batch(prompt):
                    raise chunk.error
                yield replace(chunk, index=place)

    def _submitted(
        self, prompt: Any, params: Any, changes: dict[str, Any], *, text: bool
    ) -> tuple[Session, dict[int, int]]:
        """A session with all prompts, and each request's place; nothing is decoded when one prompt is bad."""
        requests = _requests(prompt, params, changes)
        session = self.session(prefill_wait_s=OFFLINE_WAIT_S)
        numbers = [session.submit(one, final, text=text) for one, final in requests]
        return session, {number: place for place, number in enumerate(numbers)}


def _requests(prompt: Any, params: Any, changes: dict[str, Any]) -> list[tuple[Prompt, SamplingParams]]:
    """Each prompt with its parameters. A seed given for several is the first one's; the others' are derived from it."""
    prompts = list(prompt) if is_batch(prompt) else [prompt]
    if params is None or isinstance(params, SamplingParams):
        shared = SamplingParams.of(params, **changes)
        return [(one, seeded(shared, i)) for i, one in enumerate(prompts)]
    each = list(params)
    if len(each) != len(prompts):
        raise ConfigError(f"{len(each)} params were given for {len(prompts)} prompts; give one, or one for each")
    final = [SamplingParams.of(one, **changes) for one in each]
    if changes.get("seed") is not None:
        final = [seeded(one, i) for i, one in enumerate(final)]
    return list(zip(prompts, final, strict=True))


def seeded(params: SamplingParams, place: int) -> SamplingParams:
    """The parameters of a call's row: rows that drew the same numbers would not be independent samples."""
    if params.seed is None or place == 0:
        return params
    return replace(params, seed=derive(params.seed, place))


def _run(session: Session, places: Mapping[int, int], *, alone: bool) -> Iterator[Chunk]:
    """The chunks of all requests as they come. alone: there is one, whose error is raised."""
    while session.has_work:
        for chunk in session.step():
            if alone and chunk.error is not None:
                raise chunk.error
            yield replace(chunk, index=places[chunk.index])


__all__ = ["Chunk", "Generation", "Generator"]
