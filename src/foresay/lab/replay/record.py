"""Recording: the target's outputs for many prompts, batched, in one file; an interrupted run is resumed.

Owns the choice of prompts to decode on resumption, the seeds of sampled outputs, and the order of a conversation's turns. Drafts
nothing; records.recording owns the file format.
"""

from __future__ import annotations

import dataclasses
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from foresay.decoding.distributions import Distributions
from foresay.decoding.outcome import FinishReason, Step
from foresay.decoding.proposal import Proposal, Verification
from foresay.decoding.protocols import ModelOutput, PreparedPrompt
from foresay.decoding.randomness import derive
from foresay.decoding.rows import Rows
from foresay.decoding.sampling_params import SamplingParams
from foresay.engine.chunked_prefill import OFFLINE_WAIT_S
from foresay.errors import ConfigError, ForesayError
from foresay.generation.generator import Generator
from foresay.lab.data.items import PromptItem
from foresay.lab.data.requests import PromptRequest, RequestBuilder, changed_params, digest
from foresay.records.provenance import provenance
from foresay.records.recording import Record, Recording, recording_writer
from foresay.text.stream import Detokenizer
from foresay.text.tokenizer import tokenizer_fingerprint


@dataclass(frozen=True, slots=True)
class Progress:
    """The progress of a recording: outputs and tokens so far."""

    done: int
    total: int
    """Known number of outputs: a later turn counts once it is submitted."""
    resumed: int
    """Outputs in the file at the start of this run."""
    tokens: int
    """Output tokens of this run."""


class _Probabilities:
    """A step observer of each committed token's probability under the target; plain decoding commits one per row."""

    def __init__(self) -> None:
        self.latest: list[float] = []

    def __call__(
        self,
        rows: Rows,
        proposal: Proposal,
        distributions: Distributions,
        verification: Verification,
        output: ModelOutput,
    ) -> None:
        self.latest = distributions.prob_of(verification.token_ids[:, None])[:, 0].tolist()


@dataclass(slots=True)
class _ActiveRequest:
    """A request that is being decoded."""

    request: PromptRequest
    prepared: PreparedPrompt
    steps: list[Step] = field(default_factory=list)
    token_probs: list[float] = field(default_factory=list)

    def record(self, reason: FinishReason, index: int) -> Record:
        """Return the finished request as a Record. index: of its item in the data set."""
        params, source = self.prepared.params, self.prepared.source
        output = tuple(token for step in self.steps for token in step.token_ids)
        entries = [entry for step in self.steps for entry in step.logprobs or ()]
        return Record(
            id=self.request.id,
            prompt=tuple(self.prepared.prompt),
            output=output,
            finish_reason=reason.value,
            category=self.request.category,
            index=index,
            source=None if source is None else tuple(source),
            seed=None if params.greedy else params.seed,
            token_probs=None if params.greedy else tuple(self.token_probs),
            logprobs=tuple(e.logprob for e in entries) if entries else None,
            top=tuple(e.top for e in entries) if entries and params.logprobs else None,
        )


def record(
    generator: Generator,
    items: Sequence[PromptItem],
    path: str | os.PathLike[str],
    params: SamplingParams,
    *,
    chat: bool = True,
    on_progress: Callable[[Progress], None] = lambda progress: None,
) -> Recording:
    """Record the target's outputs for `items` in `path` and return the recording.

    The target uses plain decoding with `generator.max_batch_size` prompts at a time. The seed of a sampled output is derived
    from params.seed (0 if None) and the item's index, so that a resumed run generates the same outputs as an uninterrupted
    one. on_progress: called with the Progress after every step. Raises ConfigError for a file that was started with other
    prompts, parameters or weights, for prompt ids that are not unique, for no items, and for params with processors.
    """
    builder = RequestBuilder(generator, chat=chat)
    requests = builder.first(items)
    check_unique([request.id for request in requests])
    with recording_writer(path, header(generator, requests, params, chat)) as writer:
        done = {str(line.get("id")): line for line in writer.lines}
        resumed = len(done)

        def report() -> None:
            on_progress(Progress(len(recorder.done), recorder.total, resumed, recorder.tokens))

        recorder = Recorder(builder, requests, params, done, lambda request, line: writer.append(line))
        for request in requests:
            recorder.submit(request)
        report()
        while recorder.has_work:
            if recorder.step():
                report()
    return Recording.load(path)


def check_unique(ids: Sequence[str]) -> None:
    """Raise ConfigError if there are no prompts or their ids are not unique."""
    if not ids:
        raise ConfigError("there are no prompts to record; give at least one")
    repeated = [name for name, times in Counter(ids).items() if times > 1]
    if repeated:
        raise ConfigError(f"prompt id {min(repeated)!r} is not unique; rename one of the prompts")


def header(
    generator: Generator, requests: Sequence[PromptRequest], params: SamplingParams, chat: bool
) -> Mapping[str, Any]:
    """Return the header of a recording. Raises ConfigError for params that it cannot contain."""
    if params.processors:
        raise ConfigError("processors cannot be stored in a recording; record without them")
    if generator.target.tokenizer is None and params.stop:
        raise ConfigError("stop strings need a tokenizer, and this model was loaded without one; leave them out")
    tokenizer = generator.tokenizer
    changed = {k: v for k, v in changed_params(params).items() if k != "seed"}
    return {
        "model": generator.target.name,
        "vocab_size": generator.target.model.vocab_size,
        "eos": sorted(generator.target.eos_token_ids),
        "tokenizer": None if tokenizer is None else tokenizer_fingerprint(tokenizer),
        "params": {k: sorted(v.items()) if isinstance(v, Mapping) else v for k, v in changed.items()}
        | {"max_new_tokens": params.max_new_tokens},
        "settings": {
            "prompts": digest(requests),
            "chat": chat,
            "seed": None if params.greedy else params.seed or 0,
            "dtype": generator.target.precision or None,
            "max_length": generator.target.model.max_length,
        },
        "provenance": provenance(),
    }


class Recorder:
    """One recording run: decodes the unfinished requests and writes each output when it ends."""

    def __init__(
        self,
        builder: RequestBuilder,
        requests: Sequence[PromptRequest],
        params: SamplingParams,
        done: dict[str, Any],
        write: Callable[[PromptRequest, Mapping[str, Any]], None],
    ) -> None:
        """requests: all first turns; seeds are derived from their indices. done: id -> line of each finished request."""
        self.builder, self.params, self.done, self._write = builder, params, done, write
        self.tokens = 0
        """Output tokens of this run."""
        self.probabilities = _Probabilities()
        self.session = builder.generator.plain().session(prefill_wait_s=OFFLINE_WAIT_S, observers=[self.probabilities])
        self.indices = {request.id: i for i, request in enumerate(requests)}
        self.active: dict[int, _ActiveRequest] = {}
        self.answers: dict[str, list[str]] = {}

    @property
    def has_work(self) -> bool:
        """True if a request is being decoded."""
        return self.session.has_work

    @property
    def total(self) -> int:
        """Number of outputs that are finished or being decoded."""
        return len(self.done) + len(self.active)

    def step(self) -> bool:
        """Run one engine step. Return True if it generated tokens."""
        chunks = self.session.step()
        for chunk, prob in zip(chunks, self.probabilities.latest, strict=False):
            one = self.active[chunk.index]
            if chunk.error is not None:
                raise chunk.error
            one.steps.append(chunk.step)
            one.token_probs.append(prob)
            self.tokens += len(chunk.step.token_ids)
            if chunk.finish_reason is not None:
                self._finish(self.active.pop(chunk.index), chunk.finish_reason)
        return bool(chunks)

    def submit(self, request: PromptRequest) -> None:
        """Start a turn, or reuse its output if it is finished."""
        known = self.done.get(request.id)
        if known is not None:
            self._submit_next_turn(request, known["output"])
            return
        params = self.params
        if not params.greedy:
            params = dataclasses.replace(
                params, seed=derive(params.seed or 0, self.indices[request.item.id], request.turn)
            )
        try:
            number = self.session.submit(list(request.token_ids), params, text=False)
        except ForesayError as error:
            raise error.about(f"prompt {request.id!r}") from None
        self.active[number] = _ActiveRequest(request, self.session.prepared(number))

    def _finish(self, one: _ActiveRequest, reason: FinishReason) -> None:
        finished = one.record(reason, self.indices[one.request.item.id])
        self.done[one.request.id] = {}
        self._write(one.request, finished.as_line())
        self._submit_next_turn(one.request, finished.output)

    def _submit_next_turn(self, request: PromptRequest, output: Sequence[int]) -> None:
        """Submit the turn that follows an output, if there is one."""
        if request.turn >= len(request.item.followups):
            return
        answers = self.answers.setdefault(request.item.id, [])
        answers.append(Detokenizer(self.builder.generator.tokenizer, context=request.token_ids).all(output))
        after = self.builder.following(request, answers)
        if after is not None:
            self.submit(after)
