"""Recording: the target's outputs for many prompts, batched, in one file; an interrupted run is resumed.

Owns the choice of prompts to decode on resumption, the seeds of sampled outputs, and the order of a conversation's turns. Drafts
nothing; records.recording owns the file format.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from time import monotonic
from typing import Any

from foresay.decoding.distributions import Distributions
from foresay.decoding.proposal import Proposal, Verification
from foresay.decoding.protocols import ModelOutput, PreparedPrompt
from foresay.decoding.randomness import derive
from foresay.decoding.rows import Rows
from foresay.decoding.sampling_params import SamplingParams
from foresay.engine.chunked_prefill import OFFLINE_WAIT_S
from foresay.errors import ConfigError, ForesayError
from foresay.generation.generator import Generator
from foresay.generation.result import Generation
from foresay.records.lines import Line
from foresay.records.provenance import provenance
from foresay.records.recording import Record, Recording, recording_writer
from foresay.text.stream import Detokenizer
from foresay.text.tokenizer import tokenizer_fingerprint
from foresay_lab.data.datasets import subset
from foresay_lab.data.items import PromptItem
from foresay_lab.data.requests import PromptRequest, RequestBuilder, digest, recorded_params_of


@dataclass(frozen=True, slots=True)
class Progress:
    """The progress of a recording: outputs and tokens so far."""

    done: int
    total: int
    """Number of outputs, those of later turns included."""
    resumed: int
    """Outputs in the file at the start of this run."""
    tokens: int
    """Output tokens of this run."""


OnProgress = Callable[[Progress], None]
Known = Mapping[str, Sequence[int]]
"""Output of each finished turn, by its id."""
Perform = Callable[[Mapping[int, Known]], Iterator[Sequence[Line]]]
"""Function from the unfinished items by index, each with its finished outputs, to the lines of outputs that end."""


@dataclass(slots=True)
class _ActiveRequest:
    """A request that is being decoded."""

    request: PromptRequest
    prepared: PreparedPrompt
    answers: list[str]
    """Answers to the earlier turns."""
    token_probs: list[float] = field(default_factory=list)

    def record(self, done: Generation, index: int) -> Record:
        """Return the finished request as a Record. index: of its item in the data set."""
        params, source, entries = self.prepared.params, self.prepared.source, done.logprobs
        return Record(
            id=self.request.id,
            prompt=tuple(self.prepared.prompt),
            output=tuple(done.token_ids),
            finish_reason=done.finish_reason.value,
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
    count: int | None = None,
    on_progress: OnProgress = lambda progress: None,
) -> Recording:
    """Record the target's outputs for `items` in `path` and return the recording.

    count: record these many of them, which `subset` chooses; a later call may record more of the same items.

    The target uses plain decoding with `generator.max_batch_size` prompts at a time. The seed of a sampled output is derived
    from params.seed (0 if None) and the item's index, so that a resumed run generates the same outputs as an uninterrupted
    one. on_progress: called with the Progress after every step. Raises ConfigError for a file that was started with other
    prompts, parameters or weights, for prompt ids that are not unique, for no items, and for params with processors.
    """
    builder = RequestBuilder(generator, chat=chat)
    requests = builder.first(items)

    def perform(tasks: Mapping[int, Known]) -> Iterator[Sequence[Line]]:
        recorder = Recorder(builder, requests, params)
        for index, known in tasks.items():
            recorder.submit(index, known)
        while recorder.has_work:
            yield [line for _, line, _ in recorder.step()]

    chosen = items if count is None else subset(items, count)
    return write_recording(path, header(generator, requests, params, chat), items, perform, on_progress, chosen)


def record_until(
    generator: Generator,
    items: Sequence[PromptItem],
    path: str | os.PathLike[str],
    params: SamplingParams,
    *,
    chat: bool = True,
    step: int,
    end: float,
    on_progress: OnProgress = lambda progress: None,
) -> Recording:
    """Record as `record` does, `step` items at a time, until another step would end after `end`, a time of `monotonic`."""
    count = 0
    while True:
        began = monotonic()
        count = min(count + step, len(items))
        recording = record(generator, items, path, params, chat=chat, count=count, on_progress=on_progress)
        if count == len(items) or 2 * monotonic() - began > end:
            return recording


def write_recording(
    path: str | os.PathLike[str],
    header: Mapping[str, Any],
    items: Sequence[PromptItem],
    perform: Perform,
    on_progress: OnProgress = lambda progress: None,
    chosen: Sequence[PromptItem] | None = None,
) -> Recording:
    """Perform the chosen items that a recording does not contain yet, append each output, and return the recording.

    chosen: some of the items; None for all. Raises ConfigError as `record` does.
    """
    ids = {item.id for item in (items if chosen is None else chosen)}
    if not items:
        raise ConfigError("are none; give at least one", param="prompts", value=())
    if repeated := [name for name, times in Counter(item.id for item in items).items() if times > 1]:
        raise ConfigError("is not unique; rename one of the prompts", param="id", value=min(repeated))
    with recording_writer(path, header) as writer:
        existing = {str(line["id"]): line["output"] for line in writer.lines}
        turns = [[item.id, *(f"{item.id}/{i + 2}" for i in range(len(item.followups)))] for item in items]
        tasks = {
            index: {name: existing[name] for name in names if name in existing}
            for index, names in enumerate(turns)
            if names[0] in ids and not existing.keys() >= set(names)
        }
        done = sum(name in existing for names in turns for name in names if names[0] in ids)
        progress = Progress(done, sum(len(names) for names in turns if names[0] in ids), done, 0)
        on_progress(progress)
        for lines in perform(tasks) if tasks else ():
            for line in lines:
                writer.append(line)
                tokens = progress.tokens + len(line["output"])
                progress = replace(progress, done=progress.done + 1, tokens=tokens)
            on_progress(progress)
    return Recording.load(path)


def header(
    generator: Generator, requests: Sequence[PromptRequest], params: SamplingParams, chat: bool
) -> Mapping[str, Any]:
    """Return the header of a recording. Raises ConfigError for params that it cannot contain."""
    if params.processors:
        text = "cannot be stored in a recording; record without them"
        raise ConfigError(text, param="processors", value=params.processors)
    if generator.target.tokenizer is None and params.stop:
        text = "needs a tokenizer, and this model was loaded without one; leave it out"
        raise ConfigError(text, param="stop", value=params.stop)
    tokenizer = generator.tokenizer
    changed = {k: v for k, v in recorded_params_of(params).items() if k != "seed"}
    return {
        "model": generator.target.name,
        "vocab_size": generator.target.model.vocab_size,
        "eos": sorted(generator.target.eos_token_ids),
        "tokenizer": None if tokenizer is None else tokenizer_fingerprint(tokenizer),
        "params": {k: sorted(v.items()) if isinstance(v, Mapping) else v for k, v in changed.items()},
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
    """Decodes items turn by turn, and returns the line of each output that ends."""

    def __init__(self, builder: RequestBuilder, requests: Sequence[PromptRequest], params: SamplingParams) -> None:
        """requests: all first turns; seeds are derived from their indices."""
        self._builder, self._requests, self._params = builder, requests, params
        self._indices = {request.id: i for i, request in enumerate(requests)}
        self._active: dict[int, _ActiveRequest] = {}
        self._probabilities: list[float] = []

        def observe(
            rows: Rows,
            proposal: Proposal,
            distributions: Distributions,
            verification: Verification,
            output: ModelOutput,
        ) -> None:
            """Keep each committed token's probability under the target; plain decoding commits one per row."""
            self._probabilities = distributions.prob_of(verification.token_ids[:, None])[:, 0].tolist()

        self._session = builder.generator.plain().session(prefill_wait_s=OFFLINE_WAIT_S, observers=[observe])

    @property
    def has_work(self) -> bool:
        """True if a request is being decoded."""
        return self._session.has_work

    def submit(self, index: int, known: Known) -> None:
        """Start the first turn of an item that is not finished yet."""
        request: PromptRequest | None = self._requests[index]
        answers: list[str] = []
        while request is not None and request.id in known:
            request = self._following(request, answers, known[request.id])
        if request is not None:
            self._start(request, answers)

    def step(self) -> list[tuple[int, Line, bool]]:
        """Run one engine step. Return (index of the item, line, True if it was the last turn) of each output that ends."""
        ended = []
        for chunk, prob in zip(self._session.step(), self._probabilities, strict=False):
            one = self._active[chunk.index]
            if chunk.error is not None:
                raise chunk.error
            one.token_probs.append(prob)
            if chunk.generation is not None:
                del self._active[chunk.index]
                index = self._indices[one.request.item.id]
                finished = one.record(chunk.generation, index)
                after = self._following(one.request, one.answers, finished.output)
                if after is not None:
                    self._start(after, one.answers)
                ended.append((index, finished.as_line(), after is None))
        return ended

    def _start(self, request: PromptRequest, answers: list[str]) -> None:
        params = self._params
        if not params.greedy:
            seed = derive(params.seed or 0, self._indices[request.item.id], request.turn)
            params = replace(params, seed=seed)
        try:
            number = self._session.submit(list(request.token_ids), params, text=False)
        except ForesayError as error:
            raise error.about(f"prompt {request.id!r}") from None
        self._active[number] = _ActiveRequest(request, self._session.prepared(number), answers)

    def _following(self, request: PromptRequest, answers: list[str], output: Sequence[int]) -> PromptRequest | None:
        """Return the turn that follows an output, which is added to the answers; None after the last."""
        if request.turn >= len(request.item.followups):
            return None
        tokenizer = self._builder.generator.tokenizer
        answers.append(Detokenizer(tokenizer, context=request.token_ids).all(output))
        return self._builder.following(request, answers)
