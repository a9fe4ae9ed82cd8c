"""Text requests over a running engine: submit, step, cancel.

Owns the conversion of prompts to tokens and of tokens to text, and turns errors into the last chunk of their request. Not
thread-safe.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from foresay.checks import check_has, check_int
from foresay.decoding.outcome import FinishReason, Step
from foresay.decoding.protocols import PreparedPrompt
from foresay.decoding.randomness import derive
from foresay.decoding.rows import StopCondition
from foresay.decoding.sampling_params import SamplingParams
from foresay.engine import Engine, Stats
from foresay.errors import ConfigError, PromptError, QueueFullError, RequestError
from foresay.generation.result import Chunk, Generation
from foresay.models.sources.wrapping import LoadedModel
from foresay.text.prompts import Prompt, encode, is_batch
from foresay.text.stream import Detokenizer, StopStrings, TextStream

_serials = itertools.count()


class _Request:
    """One unfinished request."""

    def __init__(self, ids: Sequence[int], prepared: PreparedPrompt, tokenizer: Any, *, text: bool) -> None:
        if prepared.params.stop and tokenizer is None:
            raise ConfigError(
                "stop strings need a tokenizer, and this model was loaded without one; use stop_token_ids", param="stop"
            )
        params = prepared.params
        self.ids, self.prepared, self._tokenizer = list(ids), prepared, tokenizer
        visible = params.visible_token_ids
        stops, before = params.stop, prepared.prompt
        least = params.min_new_tokens if params.given("min_new_tokens") else 0
        self.stop = StopStrings(tokenizer, stops, least, visible, before) if stops else None
        self._stream = TextStream(tokenizer, stops, visible, context=before) if text and tokenizer is not None else None
        self.steps: list[Step] = []
        self.seed: int | None = None

    def take(self, number: int, step: Step, exact: bool) -> Chunk:
        """Add a Step and return its chunk."""
        self.steps.append(step)
        pieces = self._stream.push(step.token_ids, step.origins) if self._stream is not None else []
        generation = None
        if step.finish_reason is not None:
            stopped = self.stop is not None and self.stop.cut_at is not None
            pieces += self._stream.finish(stopped=stopped) if self._stream is not None else []
            generation = self._generation(step, step.finish_reason, exact)
        text = "".join(piece.text for piece in pieces)
        return Chunk(number, text, tuple(pieces), step, step.finish_reason, generation)

    def _generation(self, last: Step, reason: FinishReason, exact: bool) -> Generation:
        ids = [token for step in self.steps for token in step.token_ids]
        return Generation(
            text=self._text(ids),
            token_ids=ids,
            prompt_token_ids=self.ids,
            finish_reason=reason,
            steps=self.steps,
            stats=Stats.of(self.steps),
            seed=self.seed,
            exact=exact,
            stop_string=None if self.stop is None else self.stop.matched,
            draft_error=next((step.draft_error for step in self.steps if step.draft_error is not None), None),
            error=last.error,
            tokenizer=self._tokenizer,
            context_token_ids=self.prepared.prompt,
        )

    def _text(self, ids: list[int]) -> str:
        if self._tokenizer is None:
            return ""
        if self.stop is not None and self.stop.cut_at is not None:
            return self.stop.text[: self.stop.cut_at]
        # as the stream decodes it: `decode` of all ids may turn complete characters before an incomplete one into U+FFFD
        visible = self.prepared.params.visible_token_ids
        return Detokenizer(self._tokenizer, visible, context=self.prepared.prompt).all(ids)


class Session:
    """Requests of texts, messages or token ids over one engine. Not thread-safe."""

    def __init__(self, target: LoadedModel, engine: Engine, *, max_waiting: int | None = None) -> None:
        """Open a session over an engine.

        Args:
            target: The loaded model.
            engine: An engine over the target's model, used by this session only.
            max_waiting: Limit of requests waiting for a row; None for no limit.
        """
        self.target, self.engine = target, engine
        self.max_waiting = None if max_waiting is None else check_int("max_waiting", max_waiting, 0)
        self._open: dict[int, _Request] = {}
        self.serial = next(_serials)
        """Unique number of this session."""

    @property
    def has_work(self) -> bool:
        """True if any request is unfinished."""
        return self.engine.has_work

    def submit(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        text: bool = True,
        stop: StopCondition | None = None,
        **changes: Any,
    ) -> int:
        """Queue a prompt.

        Args:
            prompt: A text, chat messages or token ids.
            params: Sampling parameters; None for the defaults.
            text: False leaves the text of chunks empty; the Generation always has it.
            stop: A condition that replaces the stop strings.
            **changes: Fields of SamplingParams that replace those of `params`.

        Returns:
            The request's id.

        Raises:
            ConfigError: Parameters that cannot be honoured.
            PromptError: A prompt that cannot be decoded as given.
            ContextLengthError: A prompt that is too long.
            QueueFullError: The session's queue is full.
        """
        check_has("stop", stop, "__call__", "a StopCondition (strings are a field of params)")
        free = max(0, self.engine.max_batch_size - self.engine.num_active)  # admitted by the next step
        if self.max_waiting is not None and self.engine.num_waiting >= self.max_waiting + free:
            raise QueueFullError(
                f"{self.engine.num_waiting} requests are queued, and max_waiting={self.max_waiting}; try again later"
            )
        ids = encode(prompt, self.target.tokenizer)
        given = self.target.generation.sampled(SamplingParams.of(params, **changes))
        prepared = self.target.model.prepare_prompt(ids, given)
        prepared = self.target.generation.constrained(prepared, self.target.model, self.target.eos_token_ids)
        request = _Request(ids, prepared, self.target.tokenizer, text=text)
        number = self.engine.submit(
            prepared.prompt,
            prepared.params,
            eos=self.target.eos_token_ids,
            stop=stop if stop is not None else request.stop,
            source=prepared.source,
        )
        request.seed = None if prepared.params.greedy else self.engine.seed_of(number)
        self._open[number] = request
        return number

    def prepared(self, number: int) -> PreparedPrompt:
        """Return an unfinished request in its model's terms: prompt, parameters, source.

        Args:
            number: The request's id.
        """
        return self._open[number].prepared

    def step(self) -> list[Chunk]:
        """Run one step of the engine; return a chunk for each row that decoded or ended, none if only prompts were prefilled.

        Exceptions of the target are raised; `fail` then ends the unfinished requests.
        """
        return [self._chunk(step) for step in self.engine.step()]

    def _chunk(self, step: Step) -> Chunk:
        request = self._open[step.request_id]
        if step.finish_reason is not None:
            del self._open[step.request_id]
        return request.take(step.request_id, step, self.engine.rule.exact)

    @property
    def draft_error(self) -> str | None:
        """The drafter's last error; None if it never failed."""
        error = self.engine.drafter.last_error if self.engine.drafter is not None else None
        return None if error is None else f"{type(error).__name__}: {error}"

    def cancel(self, number: int) -> None:
        """End a request before its next step.

        Args:
            number: The request's id; unknown and finished ones are ignored.
        """
        self.engine.cancel(number)

    def fail(self, error: Exception) -> list[Chunk]:
        """End every unfinished request because of an error of the target; the session continues with empty caches.

        Args:
            error: The target's exception.

        Returns:
            The last chunk of each request.
        """
        return [self._chunk(failed_step(number, error)) for number in self.engine.abandon()]


def failed_step(number: int, error: Exception) -> Step:
    """Return the last Step of a request whose target raised an error."""
    reason = RequestError(number, f"the target raised {type(error).__name__}: {error}")
    reason.__cause__ = error
    return Step(number, (), (), 0, 0, finish_reason=FinishReason.ERROR, error=reason)


def requests_of(prompt: Any, params: Any, changes: Mapping[str, Any]) -> list[tuple[Prompt, SamplingParams]]:
    """Return each prompt with its parameters. One seed for several prompts is used for the first; the others are derived."""
    prompts = list(prompt) if is_batch(prompt) else [prompt]
    if any(map(is_batch, prompts)):
        raise PromptError("a list of prompts contains a list of prompts; give one list")
    is_one_each = isinstance(params, Iterable) and not isinstance(params, str | Mapping)
    if not is_one_each:
        shared = SamplingParams.of(params, **changes)
        return [(one, seeded(shared, i)) for i, one in enumerate(prompts)]
    each = list(params)
    if len(each) != len(prompts):
        raise ConfigError(f"are {len(each)} for {len(prompts)} prompts; give one, or one for each", param="params")
    final = [SamplingParams.of(one, **changes) for one in each]
    if changes.get("seed") is not None:
        final = [seeded(one, i) for i, one in enumerate(final)]
    return list(zip(prompts, final, strict=True))


def seeded(params: SamplingParams, index: int) -> SamplingParams:
    """Return the parameters of the index-th prompt of a call: with equal seeds the outputs would not be independent."""
    if params.seed is None or index == 0:
        return params
    return replace(params, seed=derive(params.seed, index))
