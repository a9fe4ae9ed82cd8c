"""Drafting for an engine that decodes by itself, against a simulated one: it moves, preempts and resumes texts as it likes."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from foresay.decoding.proposal import Proposal
from foresay.decoding.protocols import LengthPolicy
from foresay.decoding.rows import Rows
from foresay.drafters import MaxGram, Memory, NgramStoreDrafter, PromptLookup, SuffixDrafter
from foresay.integrations.following import EngineText, Follower
from foresay.lengths import ConstantLength, ThroughputLength

VOCAB = 50


def text_of(seed: int, size: int = 90) -> list[int]:
    """A text that repeats itself, with changes."""
    rng = random.Random(seed)
    phrase = [rng.randrange(VOCAB) for _ in range(12)]
    out: list[int] = []
    while len(out) < size:
        out += phrase if rng.random() < 0.7 else [rng.randrange(VOCAB) for _ in range(3)]
    return out[:size]


@dataclass
class Request:
    tokens: list[int]
    """All that it will ever hold."""
    prompt: int
    size: int = 0
    """Written so far, the prompt included."""
    draft_tokens: list[int] = field(default_factory=list)
    accepted: int = 0

    def score(self) -> int:
        """One pass: what of the guess holds, and a token more; gives how many were written."""
        held = 0
        while held < len(self.draft_tokens) and self.size + held + 1 < len(self.tokens):
            if self.tokens[self.size + held] != self.draft_tokens[held]:
                break
            held += 1
        self.accepted += held
        new = min(held + 1, len(self.tokens) - self.size)
        self.size += new
        return new


@dataclass
class Engine:
    """As vLLM's: requests have places in an array, which others take when they leave; some are preempted for a while."""

    follower: Follower
    rng: random.Random
    preempts: float = 0.0
    shuffles: float = 0.0
    seconds: float = 0.0
    column_s: float = 0.01
    passes: int = 0
    drafted: list[int] = field(default_factory=list)

    def run(self, requests: Sequence[Request], batch: int) -> None:
        waiting, running, reading = list(requests), [], []
        while waiting or running or reading:
            for request in reading:
                request.size = max(request.size, request.prompt)
            running += reading
            reading = []
            while waiting and len(running) + len(reading) < batch:
                reading.append(waiting.pop(0))
            if running and self.rng.random() < self.preempts:
                waiting.insert(0, running.pop(self.rng.randrange(len(running))))
                waiting[0].draft_tokens = []
            if self.rng.random() < self.shuffles:
                self.rng.shuffle(running)
            counts = [request.score() for request in running]
            self.drafted.append(sum(len(request.draft_tokens) for request in running))
            self.seconds += 1.0 + self.column_s * self.drafted[-1] + 0.5 * len(reading)
            self.passes += 1
            shown: list[EngineText | None] = [
                EngineText(np.array(request.tokens[: request.size], dtype=np.int32), new)
                for request, new in zip(running, counts, strict=True)
            ]
            drafts = self.follower.propose([*shown, *[None] * len(reading)])
            assert len(drafts) == len(shown) + len(reading)
            assert not any(drafts[len(shown) :]), "nothing for a prompt that is still being read"
            for request, draft_tokens in zip(running, drafts, strict=False):
                request.draft_tokens = draft_tokens
            running = [request for request in running if request.size < len(request.tokens)]


def follower(drafter: Any, policy: LengthPolicy | None = None, **settings: Any) -> Follower:
    return Follower(drafter, policy or ConstantLength(8), VOCAB, max_draft_tokens=8, max_length=120, **settings)


def alone(make: Any, text: Sequence[int], prompt: int) -> tuple[int, int]:
    """(accepted, passes) of one text in an engine of its own."""
    request = Request(list(text), prompt)
    engine = Engine(follower(make()), random.Random(0))
    engine.run([request], 1)
    return request.accepted, engine.passes


MAKERS = {
    "suffix": SuffixDrafter,
    "max_gram": MaxGram,
    "prompt_lookup": PromptLookup,
    "ngram_store": NgramStoreDrafter,
}


@pytest.mark.parametrize("name", MAKERS)
def test_a_text_is_drafted_in_a_crowd_as_it_is_alone(name: str) -> None:
    """Requests join, leave, change places and are never mistaken for one another: each accepts what it accepts alone."""
    make = MAKERS[name]
    requests = [Request(text_of(seed), 10 + seed % 7) for seed in range(40)]
    engine = Engine(follower(make()), random.Random(1), shuffles=0.3)
    engine.run(requests, 7)
    for seed, request in enumerate(requests):
        assert request.size == len(request.tokens)
        assert request.accepted == alone(make, text_of(seed), 10 + seed % 7)[0], seed
    assert sum(request.accepted for request in requests) > 40 * 20, "the case drafts"


def test_preempted_texts_come_back() -> None:
    requests = [Request(text_of(seed), 12) for seed in range(24)]
    engine = Engine(follower(SuffixDrafter()), random.Random(2), preempts=0.2, shuffles=0.2)
    engine.run(requests, 5)
    assert all(request.size == len(request.tokens) for request in requests)
    undisturbed = sum(alone(SuffixDrafter, text_of(seed), 12)[0] for seed in range(24))
    assert sum(request.accepted for request in requests) > 0.8 * undisturbed


def test_equal_texts_are_kept_apart() -> None:
    requests = [Request(text_of(3), 12) for _ in range(6)]
    engine = Engine(follower(SuffixDrafter()), random.Random(3), shuffles=0.5)
    engine.run(requests, 6)
    assert {request.accepted for request in requests} == {alone(SuffixDrafter, text_of(3), 12)[0]}


def test_what_it_remembers_of_earlier_texts_helps_later_ones() -> None:
    past = Memory()
    drafter = SuffixDrafter(past)
    first, second = Request(text_of(4), 12), Request(text_of(4), 12)
    engine = Engine(follower(drafter), random.Random(0))
    engine.run([first], 1)
    engine.run([second], 1)
    engine.run([Request(text_of(5), 12)], 1)
    assert second.accepted > first.accepted


def test_a_broken_match_of_texts_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: a follower that goes by places alone drafts for the wrong texts once they change places."""
    import foresay.integrations.following as module

    def by_place(text: EngineText, row: Any) -> bool:
        return True

    requests = [Request(text_of(seed), 10 + seed % 7) for seed in range(40)]
    engine = Engine(follower(SuffixDrafter()), random.Random(1), shuffles=0.3)
    monkeypatch.setattr(module, "_continues", by_place)
    engine.run(requests, 7)
    wanted = [alone(SuffixDrafter, text_of(seed), 10 + seed % 7)[0] for seed in range(40)]
    assert [request.accepted for request in requests] != wanted


class Raises(SuffixDrafter):
    """Fails from time to time."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self.rng = rng

    def propose(self, rows: Rows, budget: Sequence[int], policy: LengthPolicy) -> Proposal:
        if self.rng.random() < 0.1:
            raise RuntimeError("on purpose")
        return super().propose(rows, budget, policy)


def test_a_drafter_that_raises_never_shows() -> None:
    requests = [Request(text_of(seed), 12) for seed in range(30)]
    follows = follower(Raises(random.Random(5)))
    Engine(follows, random.Random(6), shuffles=0.2).run(requests, 4)
    assert all(request.size == len(request.tokens) for request in requests)
    assert follows.failures > 0


def test_no_guess_runs_past_the_longest_text_or_what_the_engine_takes() -> None:
    tokens = text_of(7, 119)
    follows = Follower(SuffixDrafter(), ConstantLength(16), VOCAB, max_draft_tokens=5, max_length=119)
    longest = 0
    for size in range(20, 119):
        [draft_tokens] = follows.propose([EngineText(np.array(tokens[:size]), 1)])
        longest = max(longest, len(draft_tokens))
        assert len(draft_tokens) <= min(5, 119 - size - 1)
    assert longest == 5


class Clock:
    """The engine's."""

    def __init__(self) -> None:
        self.engine: Engine | None = None

    def __call__(self) -> float:
        return 0.0 if self.engine is None else self.engine.seconds


def seconds(policy: LengthPolicy, column_s: float) -> tuple[float, Engine]:
    """What 60 texts take, four at a time, on the engine's own clock."""
    clock = Clock()
    engine = Engine(follower(SuffixDrafter(), policy, clock=clock), random.Random(8), column_s=column_s)
    clock.engine = engine
    engine.run([Request(text_of(seed, 110), 12) for seed in range(60)], 4)
    return engine.seconds, engine


@pytest.mark.parametrize(("column_s", "least"), [(0.02, 2.5), (0.1, 1.4), (0.5, 0.92)])
def test_lengths_adapt_to_what_the_engines_passes_take(column_s: float, least: float) -> None:
    """By the time between calls alone: they gain where columns are cheap, and end where these cost more than they bring."""
    plain, _ = seconds(ConstantLength(0), column_s)
    adapting, engine = seconds(ThroughputLength(), column_s)
    constant, _ = seconds(ConstantLength(8), column_s)
    assert plain / adapting > least, plain / adapting
    if least < 1:
        assert plain / constant < 0.6, "control: a constant loses much here"
        late = engine.drafted[len(engine.drafted) // 2 :]
        assert sum(n > 0 for n in late) < 0.1 * len(late)


def test_passes_that_read_prompts_measure_nothing() -> None:
    class Watching(ConstantLength):
        seen = 0

        def observe(self, rows: Rows, steps: Sequence[Any]) -> None:
            self.seen += 1
            assert len(rows) == len(steps) == 1 and steps[0].num_accepted <= steps[0].num_drafted

    policy, tokens = Watching(4), np.array(text_of(9))
    follows = follower(SuffixDrafter(), policy)
    follows.propose([EngineText(tokens[:20], 1)])
    assert policy.seen == 0, "a pass that read its prompt"
    follows.propose([EngineText(tokens[:21], 1)])
    assert policy.seen == 1
    follows.propose([EngineText(tokens[:22], 1), None])
    assert policy.seen == 1, "beside a prompt"
    follows.propose([EngineText(tokens[:23], 1), EngineText(np.array(text_of(10)[:9]), 1)])
    assert policy.seen == 1, "the end of that prompt"
