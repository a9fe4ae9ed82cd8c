"""Recording: the target's outputs to many prompts, batched, into one file; a run that was killed resumes where it ended.

Owns what is decoded again after a stop, the seeds of sampled outputs, and the order of a conversation's turns. Drafts nothing;
the file's format is records.recording's.
"""

from __future__ import annotations

import dataclasses
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from foresay.decoding.laws import Laws
from foresay.decoding.outcome import FinishReason, Step
from foresay.decoding.proposal import Proposal, Verdict
from foresay.decoding.protocols import Begun, ModelOutput
from foresay.decoding.randomness import derive
from foresay.decoding.rows import Rows
from foresay.decoding.sampling_params import SamplingParams
from foresay.errors import ConfigError, ForesayError
from foresay.generation.generator import Generator
from foresay.lab.data.items import PromptItem
from foresay.lab.data.requests import PromptRequest, RequestBuilder, changed_params, digest
from foresay.records.lines import LineWriter
from foresay.records.provenance import provenance
from foresay.records.recording import Record, Recording, recording_writer
from foresay.text.stream import Detokenizer
from foresay.text.tokenizer import tokenizer_fingerprint


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a recording is: outputs and tokens so far."""

    done: int
    total: int
    """Outputs in all, as far as known: a later turn counts once it has been submitted."""
    resumed: int
    """Outputs that the file held when this run began."""
    tokens: int
    """Output tokens of this run."""


class _Probabilities:
    """A step observer: the probability of each committed token under the target's law. Plain decoding commits one per row."""

    def __init__(self) -> None:
        self.latest: list[float] = []

    def __call__(self, rows: Rows, proposal: Proposal, laws: Laws, verdict: Verdict, output: ModelOutput) -> None:
        self.latest = laws.prob_of(verdict.token_ids[:, None])[:, 0].tolist()


@dataclass(slots=True)
class _Open:
    """A request that is being decoded."""

    request: PromptRequest
    begun: Begun
    steps: list[Step] = field(default_factory=list)
    token_probs: list[float] = field(default_factory=list)

    def record(self, reason: FinishReason) -> Record:
        """The finished request as a Record for the file."""
        params, source = self.begun.params, self.begun.source
        output = tuple(token for step in self.steps for token in step.token_ids)
        entries = [entry for step in self.steps for entry in step.logprobs or ()]
        return Record(
            id=self.request.id,
            prompt=tuple(self.begun.prompt),
            output=output,
            finish_reason=reason.value,
            category=self.request.category,
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
    """Write the target's outputs to `items` into `path`, and return them.

    The target decodes plainly, `generator.max_batch_size` prompts at a time. A sampled output's seed is derived from
    params.seed (0 where there is none) and the item's index, so that a resumed run writes what an uninterrupted one would
    have. on_progress: called with the Progress after every step. Raises ConfigError for a file that was begun with other
    prompts, parameters or weights, for prompt ids that are not unique, for no items, and for params with processors.
    """
    builder = RequestBuilder(generator, chat=chat)
    requests = builder.first(items)
    if not requests:
        raise ConfigError("no prompts to record")
    repeated = [name for name, times in Counter(request.id for request in requests).items() if times > 1]
    if repeated:
        raise ConfigError(f"prompt id {min(repeated)!r} is there twice")
    with recording_writer(path, _header(generator, requests, params, chat)) as writer:
        _Recorder(generator, builder, requests, writer, params, on_progress).run()
    return Recording.load(path)


def _header(
    generator: Generator, requests: Sequence[PromptRequest], params: SamplingParams, chat: bool
) -> Mapping[str, Any]:
    if params.processors:
        raise ConfigError("processors cannot be written into a recording; record without them")
    if generator.target.tokenizer is None and params.stop:
        raise ConfigError("stop strings need a tokenizer, and this model was loaded without one")
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


class _Recorder:
    """One run: requests that the file lacks are decoded, and each output is appended when it ends."""

    def __init__(
        self,
        generator: Generator,
        builder: RequestBuilder,
        requests: Sequence[PromptRequest],
        writer: LineWriter,
        params: SamplingParams,
        on_progress: Callable[[Progress], None],
    ) -> None:
        self.generator, self.builder, self.requests, self.writer = generator, builder, requests, writer
        self.params, self.on_progress = params, on_progress
        self.done = {str(line.get("id")): line for line in writer.lines}
        self.resumed, self.tokens = len(self.done), 0
        self.probabilities = _Probabilities()
        self.session = generator.plain().session(observers=[self.probabilities])
        self.indices = {request.id: i for i, request in enumerate(requests)}
        self.open: dict[int, _Open] = {}
        self.answers: dict[str, list[str]] = {}

    def run(self) -> None:
        """Decode what is missing."""
        for request in self.requests:
            self._submit(request)
        self._report()
        while self.session.has_work:
            chunks = self.session.step()
            for chunk, prob in zip(chunks, self.probabilities.latest, strict=False):
                one = self.open[chunk.index]
                if chunk.error is not None:
                    raise chunk.error
                one.steps.append(chunk.step)
                one.token_probs.append(prob)
                self.tokens += len(chunk.step.token_ids)
                if chunk.finish_reason is not None:
                    self._finish(self.open.pop(chunk.index), chunk.finish_reason)
            if chunks:
                self._report()

    def _submit(self, request: PromptRequest) -> None:
        """Submit a turn, or take its answer from the file where an earlier run has written it."""
        known = self.done.get(request.id)
        if known is not None:
            self._answered(request, known["output"])
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
        self.open[number] = _Open(request, self.session.begun(number))

    def _finish(self, one: _Open, reason: FinishReason) -> None:
        made = one.record(reason)
        self.writer.append(made.as_line())
        self.done[one.request.id] = {}
        self._answered(one.request, made.output)

    def _answered(self, request: PromptRequest, output: Sequence[int]) -> None:
        """Submit the turn that follows an answer, if there is one."""
        if request.turn >= len(request.item.followups):
            return
        answers = self.answers.setdefault(request.item.id, [])
        answers.append(Detokenizer(self.generator.tokenizer).all(output))
        after = self.builder.following(request, answers)
        if after is not None:
            self._submit(after)

    def _report(self) -> None:
        total = len(self.done) + len(self.open)
        self.on_progress(Progress(len(self.done), total, self.resumed, self.tokens))
