"""Text generation: the object that `foresay.load` returns.

Each call of `generate` and `stream` has its own session, so that calls are independent; all `astream` calls of one Generator
share a session and its batch.
"""

from __future__ import annotations

import secrets
import weakref
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any, Self, TypeAlias, Unpack, cast, overload

import numpy as np
import torch

from foresay import distributed
from foresay.checks import check_flag, check_has
from foresay.decoding.acceptance import RULES, Speculative
from foresay.decoding.protocols import Drafter, LengthPolicy, Observer, Rule
from foresay.decoding.sampling_params import MAX_SEED, SamplingChanges, SamplingParams
from foresay.engine import Engine
from foresay.engine.chunked_prefill import OFFLINE_WAIT_S, WAIT_S
from foresay.engine.prefixes import PrefixStore
from foresay.errors import ConfigError
from foresay.generation.kept_prompts import KeptPrompts
from foresay.generation.result import Chunk, Generation
from foresay.generation.session import Session, requests_of
from foresay.generation.session_thread import SessionThread
from foresay.lengths import LENGTHS, ConstantLength
from foresay.lengths.broadcast import BroadcastLength
from foresay.models.huggingface.updates import update
from foresay.models.sources.wrapping import LoadedModel
from foresay.spec.expressions import to_expression
from foresay.spec.recipe import DrafterBuilder, Resources
from foresay.text.prompts import Message, Prompt, is_batch
from foresay.text.tokenizer import Tokenizer

Array: TypeAlias = torch.Tensor | np.ndarray[Any, Any]
"""Token ids of a prompt, or of several in rows."""
Batch: TypeAlias = (
    list[str] | tuple[str, ...] | list[Prompt] | Sequence[Sequence[int]] | Sequence[Sequence[Message]] | Sequence[Array]
)
"""Several prompts."""
PREFIX_BYTES = 1 << 28
"""Size limit of the prefix cache of `astream`'s session, in bytes."""


class Generator:
    """A target model with a drafter, an acceptance rule and a length policy."""

    def __init__(
        self,
        target: LoadedModel,
        build_drafter: DrafterBuilder,
        rule: Rule,
        length: LengthPolicy | Callable[[Rule], LengthPolicy],
        *,
        max_batch_size: int = 32,
        drafter: str = "none",
        is_default: bool = False,
        resources: Resources | None = None,
        forget: Callable[[], None] | None = None,
        share_prefixes: bool = True,
        kept_prompts: KeptPrompts | None = None,
    ) -> None:
        """Combine the parts that `foresay.load` makes.

        Args:
            target: The loaded model.
            build_drafter: Returns a drafter for each engine; None for plain decoding.
            rule: The acceptance rule.
            length: A policy, or a function from a rule to the drafter's default policy.
            max_batch_size: Maximum number of rows decoded at once.
            drafter: The drafter's name in the description.
            is_default: True if the caller left the drafter open.
            resources: Needed by `foresay.change`.
            forget: Clears the drafter's state that outlives requests.
            share_prefixes: Copy keys and values of common prefixes instead of prefilling them.
            kept_prompts: Beginnings of prompts in a folder.
        """
        self.kept_prompts = kept_prompts
        self.share_prefixes = check_flag("share_prefixes", share_prefixes)
        self._own_length = None if hasattr(length, "budget") else length
        self.target, self.rule = target, rule
        self.policy = cast(LengthPolicy, length) if self._own_length is None else self._own_length(rule)
        self.max_batch_size = max_batch_size
        self.drafter_name, self.has_default_drafter, self.resources = drafter, is_default, resources
        self._build_drafter, self._forget = build_drafter, forget
        self._latest: weakref.ref[Engine] | None = None
        self._live = SessionThread(lambda kind: self.session(prefix_bytes=PREFIX_BYTES))

    def __repr__(self) -> str:
        return f"<foresay.Generator {self.description}>"

    @property
    def description(self) -> str:
        """Target, drafter, length and rule in one line."""
        gamma = getattr(self.policy, "num_draft_tokens", None)
        length = f"gamma={gamma}" if gamma is not None else f"length={to_expression(self.policy, LENGTHS)}"
        lossy = "" if self.rule.exact else " (lossy)"
        return f"target={self.target.name} drafter={self.drafter_name} {length} rule={to_expression(self.rule, RULES)}{lossy}"

    def forget(self) -> None:
        """Clear the drafter's state of earlier requests: n-gram stores, past texts."""
        if self._forget is not None:
            self._forget()

    def close(self) -> None:
        """Cancel the requests of `astream`, and wait until kept texts are written. Also the end of a `with` block.

        The weights are freed with the last reference to them.
        """
        if self._live.present():
            self._live.close()
        if self.kept_prompts is not None:
            self.kept_prompts.close()
        for memory in () if self.resources is None else self.resources.memories.values():
            memory.close()

    def update_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> int:
        """Copy new values into the target's weights, in place, and drop what was computed with the old ones.

        For a target that was given as a model object, between rounds of rollouts. Drafts stay as they are.

        Args:
            weights: transformers' names of weights and their values, such as another model's `named_parameters()`.

        Returns:
            The number of weights.

        Raises:
            ConfigError: Packed weights, open requests, kept prompts; names, shapes and numbers that do not fit.
        """
        engine = None if self._latest is None else self._latest()
        if (engine is not None and engine.has_work) or any(one.has_work for one in self._live.present()):
            raise ConfigError("cannot be changed while requests are open", param="weights")
        if self.kept_prompts is not None:
            raise ConfigError(
                "and {keep_prompts} contradict: kept prompts are of the old ones", param="weights", keep_prompts=...
            )
        count = update(self.target.model, weights)
        self._live.close()
        return count

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def with_settings(
        self, *, rule: Rule | None = None, policy: LengthPolicy | None = None, max_batch_size: int | None = None
    ) -> Generator:
        """Return a Generator of the same target and drafter with some settings changed; None keeps a setting.

        Args:
            rule: The acceptance rule.
            policy: The length policy; None keeps the caller's, or makes the drafter's default one for the rule.
            max_batch_size: Maximum number of rows decoded at once.
        """
        same = rule is None and policy is None
        out = Generator(
            self.target,
            self._build_drafter,
            check_has("rule", rule, "verify", "a Rule") or self.rule,
            check_has("policy", policy, "budget", "a LengthPolicy") or self._own_length or self.policy,
            max_batch_size=max_batch_size or self.max_batch_size,
            drafter=self.drafter_name,
            is_default=self.has_default_drafter,
            resources=self.resources,
            forget=self._forget,
            share_prefixes=self.share_prefixes,
            kept_prompts=self.kept_prompts,
        )
        if same:
            out.policy = self.policy  # keeps its measurements
        return out

    @property
    def _is_shared(self) -> bool:
        """True if several processes compute the target together (tensor parallelism)."""
        return bool(getattr(self.target.model, "is_shared", False))

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The target's tokenizer, or None."""
        return self.target.tokenizer

    def plain(self) -> Generator:
        """Return a Generator of the same target without drafter: plain decoding by the same loop, never with a lossy rule."""
        return Generator(
            self.target,
            lambda: None,
            self.rule if self.rule.exact else Speculative(),
            ConstantLength(0),
            max_batch_size=self.max_batch_size,
            resources=self.resources,
            share_prefixes=self.share_prefixes,
            kept_prompts=self.kept_prompts,
        )

    def make_drafter(self) -> Drafter | None:
        """Return a new drafter, as each engine gets one; None for plain decoding."""
        return self._build_drafter()

    def engine(
        self, *, prefix_bytes: int | None = 0, prefill_wait_s: float = WAIT_S, observers: Sequence[Observer] = ()
    ) -> Engine:
        """Return a new engine over the shared weights.

        Args:
            prefix_bytes: Size limit of its prefix cache for ended rows, in bytes; None shares no prefixes.
            prefill_wait_s: Approximate time that running requests wait for prefill between two tokens, in seconds.
            observers: Called in each step after verification.

        Raises:
            ConfigError: The drafter is an object that another call uses.
        """
        drafter = self._build_drafter()
        busy = self._latest() if self._latest is not None else None
        if busy is not None and busy.has_work and busy.drafter is not None and busy.drafter.inner is drafter:
            text = "is in use by another call; pass a function that makes drafters"
            raise ConfigError(text, param="drafter", value=type(drafter).__name__)
        shared, shares = dict[str, Any](), self.share_prefixes
        if self._is_shared:
            shared["prefill_clock"] = None
            shared["draw_seed"] = lambda: distributed.broadcast_first([secrets.randbelow(MAX_SEED)])[0]
        engine = Engine(
            self.target.model,
            drafter,
            self.rule,
            BroadcastLength(self.policy) if shared else self.policy,
            max_batch_size=self.max_batch_size,
            prefixes=PrefixStore(prefix_bytes, self.kept_prompts) if shares and prefix_bytes is not None else None,
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
        prefix_bytes: int | None = 0,
        prefill_wait_s: float = WAIT_S,
        observers: Sequence[Observer] = (),
    ) -> Session:
        """Return a new session over the shared weights: submit, step, cancel.

        Args:
            max_waiting: Limit of requests waiting for a row; None for no limit.
            prefix_bytes: As in `engine`.
            prefill_wait_s: As in `engine`.
            observers: As in `engine`.
        """
        engine = self.engine(prefix_bytes=prefix_bytes, prefill_wait_s=prefill_wait_s, observers=observers)
        return Session(self.target, engine, max_waiting=max_waiting)

    @overload
    def generate(
        self,
        prompt: str | Sequence[int] | Sequence[Message],
        params: SamplingParams | None = None,
        *,
        on_chunk: Callable[[Chunk], None] | None = None,
        **changes: Unpack[SamplingChanges],
    ) -> Generation: ...

    @overload
    def generate(
        self,
        prompt: Batch,
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        on_chunk: Callable[[Chunk], None] | None = None,
        **changes: Unpack[SamplingChanges],
    ) -> list[Generation]: ...

    @overload
    def generate(
        self,
        prompt: Array,
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        on_chunk: Callable[[Chunk], None] | None = None,
        **changes: Unpack[SamplingChanges],
    ) -> Any: ...

    def generate(
        self,
        prompt: Prompt | Batch | Array,
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        on_chunk: Callable[[Chunk], None] | None = None,
        **changes: Unpack[SamplingChanges],
    ) -> Any:
        """Generate one output per prompt.

        Args:
            prompt: A text, chat messages, token ids, or a list of those, which is decoded as one batch.
            params: Sampling parameters for all prompts, or one per prompt.
            on_chunk: Called after every target pass of every prompt.
            **changes: Fields of SamplingParams that replace those of `params`.

        Returns:
            A Generation, or a list of one per prompt for a list of prompts.

        Raises:
            ConfigError: Parameters that cannot be honoured; nothing is decoded.
            PromptError: A prompt that cannot be decoded as given; nothing is decoded.
            ContextLengthError: A prompt that is too long; nothing is decoded.
            RequestError: A request that fails while running. In a list, only its own Generation has finish_reason "error" and
                an `error`.
        """
        check_has("on_chunk", on_chunk, "__call__", "a function of a Chunk")
        batch = is_batch(prompt)
        done: dict[int, Generation] = {}
        session, index_of = self._submitted(prompt, params, changes, text=on_chunk is not None)
        for chunk in _run(session, index_of, single=not batch):
            if on_chunk is not None:
                on_chunk(chunk)
            if chunk.generation is not None:
                done[chunk.index] = chunk.generation
        return [done[i] for i in sorted(done)] if batch else done[0]

    def stream(
        self,
        prompt: Prompt | Batch | Array,
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        **changes: Unpack[SamplingChanges],
    ) -> Iterator[Chunk]:
        """Return an iterator over a Chunk per target pass, which may be abandoned at any time.

        Args:
            prompt: As in `generate`.
            params: As in `generate`.
            **changes: As in `generate`.

        Raises:
            ForesayError: As in `generate`; wrong arguments raise here, not during iteration.
        """
        return _run(*self._submitted(prompt, params, changes, text=True), single=not is_batch(prompt))

    async def astream(
        self,
        prompt: Prompt | Batch | Array,
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        **changes: Unpack[SamplingChanges],
    ) -> AsyncIterator[Chunk]:
        """`stream` for asyncio, over a session that all calls share: its rows decode as one batch, on a separate thread.

        A call that is cancelled, or whose iterator is closed, frees its rows before the next step.

        Args:
            prompt: As in `generate`.
            params: As in `generate`.
            **changes: As in `generate`.

        Raises:
            ForesayError: As in `generate`, at the first iteration.
        """
        if self._is_shared:
            text = "accepts requests at any time, which several processes cannot do in the same order; use generate"
            raise ConfigError(text, param="astream")
        requests = requests_of(prompt, params, changes)
        async with aclosing(self._live.chunks(requests)) as chunks:
            async for index, chunk in chunks:
                if chunk.error is not None and not is_batch(prompt):
                    raise chunk.error
                yield replace(chunk, index=index)

    def _submitted(
        self, prompt: Any, params: Any, changes: Mapping[str, Any], *, text: bool
    ) -> tuple[Session, dict[int, int]]:
        """Return a session with all prompts and the index of each request; raises before decoding if one prompt is invalid."""
        requests = requests_of(prompt, params, changes)
        session = self.session(prefill_wait_s=OFFLINE_WAIT_S)
        numbers = [session.submit(one, final, text=text) for one, final in requests]
        return session, {number: index for index, number in enumerate(numbers)}


def _run(session: Session, index_of: Mapping[int, int], *, single: bool) -> Iterator[Chunk]:
    """Yield the chunks of all requests. single: there is one request, whose error is raised."""
    while session.has_work:
        for chunk in session.step():
            if single and chunk.error is not None:
                raise chunk.error
            yield replace(chunk, index=index_of[chunk.index])


__all__ = ["Chunk", "Generation", "Generator"]
