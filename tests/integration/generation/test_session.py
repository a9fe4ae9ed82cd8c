"""Text requests over a living engine: errors of their own, a bounded queue, a shared batch, shared beginnings of prompts."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

import pytest
import torch

import foresay
from foresay import QueueFullError, RequestError, SamplingParams, Session, SessionThread
from foresay.decoding.outcome import FinishReason
from foresay.decoding.prefill import pending, prefill_chunk
from foresay.decoding.rows import Row, Rows
from foresay.engine import Engine
from foresay.engine.prefixes import MIN_TOKENS, PrefixStore
from foresay.errors import ConfigError, PromptError
from foresay.lengths import ConstantLength
from foresay.models.huggingface.causal import CausalModel
from foresay.models.table import TableModel
from helpers import tiny
from helpers.families import VOCAB, make
from helpers.refusals import refuses


@pytest.fixture(scope="module")
def model() -> foresay.Generator:
    return foresay.load(tiny.llama(), tokenizer=tiny.tokenizer(chat=True), drafter="suffix", max_batch_size=4)


def broken(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    if ids.shape[1] > 12:
        raise ValueError("broken")
    return scores


def finished(session: Session) -> dict[int, foresay.Generation]:
    done = {}
    while session.has_work:
        done |= {chunk.index: chunk.generation for chunk in session.step() if chunk.generation is not None}
    return done


def test_requests_join_and_each_writes_what_it_writes_alone(model: foresay.Generator) -> None:
    session, sampled = model.session(), {"temperature": 0.9, "seed": 3, "max_new_tokens": 9}
    requests = {session.submit(text, max_new_tokens=20): (text, {"max_new_tokens": 20}) for text in ("hello", "and so")}
    session.step()
    for text in ("a", "hello hello hell"):
        number = session.submit(text, SamplingParams(max_new_tokens=9), temperature=0.9, seed=3)
        requests[number] = (text, sampled)
    done = finished(session)
    assert set(done) == set(requests)
    for number, (text, params) in requests.items():
        alone = model.generate(text, **params)
        assert (done[number].token_ids, done[number].text) == (alone.token_ids, alone.text)


def test_an_error_is_of_its_own_request(model: foresay.Generator) -> None:
    """A chunk of a session, an item of a list; of one prompt alone, it is raised."""
    session, params = model.session(), SamplingParams(max_new_tokens=12, processors=(broken,))
    good, bad = session.submit("hello there", max_new_tokens=12), session.submit("and what", params)
    done = finished(session)
    listed = model.generate(["hello there", "and what"], [SamplingParams(max_new_tokens=12), params])
    whole = [model.generate(text, max_new_tokens=12).token_ids for text in ("hello there", "and what")]
    for right, wrong in ((done[good], done[bad]), listed):
        assert right.error is None and right.finish_reason is FinishReason.LENGTH and right.token_ids == whole[0]
        assert wrong.finish_reason is FinishReason.ERROR and isinstance(wrong.error, RequestError)
        assert isinstance(wrong.error.__cause__, ValueError) and "broken" in str(wrong.error)
        assert 0 < len(wrong.token_ids) < 12 and wrong.token_ids == whole[1][: len(wrong.token_ids)]
    for call in (model.generate, lambda *one: list(model.stream(*one))):
        with pytest.raises(RequestError, match="broken"):
            call("and what", params)


def test_cancelling_frees_a_row_and_a_full_queue_refuses(model: foresay.Generator) -> None:
    session = model.with_settings(max_batch_size=1).session(max_waiting=1)
    first = session.submit("hello", max_new_tokens=200)
    session.step()
    second = session.submit("hello", max_new_tokens=2)
    with pytest.raises(QueueFullError, match="1 requests are queued"):
        session.submit("hello", max_new_tokens=2)
    session.cancel(first)
    done = finished(session)
    assert done[first].finish_reason is FinishReason.CANCELLED and done[second].finish_reason is FinishReason.LENGTH
    session.cancel(first)  # ended long ago
    assert not session.has_work
    session = model.with_settings(max_batch_size=3).session(max_waiting=1)
    numbers = [session.submit("hello", max_new_tokens=2) for _ in range(4)]  # those that a free row takes do not wait
    with pytest.raises(QueueFullError):
        session.submit("hello", max_new_tokens=2)
    assert set(finished(session)) == set(numbers)


def test_a_target_that_fails_ends_what_was_under_way_and_the_session_goes_on(
    model: foresay.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = model.session()
    numbers = [session.submit(text, max_new_tokens=9) for text in ("hello", "there")]
    session.step()
    with monkeypatch.context() as patch:
        patch.setattr(model.target.model, "forward", lambda *_: (_ for _ in ()).throw(MemoryError("full")))
        with pytest.raises(MemoryError) as caught:
            session.step()
    chunks = session.fail(RuntimeError(str(caught.value)))
    assert {chunk.index for chunk in chunks} == set(numbers) and not session.has_work
    assert all("the target raised RuntimeError: full" in str(chunk.error) for chunk in chunks)
    number = session.submit("hello", max_new_tokens=9)
    assert finished(session)[number].token_ids == model.generate("hello", max_new_tokens=9).token_ids


class Asked:
    """A session's thread, and the last chunk of each request."""

    def __init__(self, session: Callable[[Any], Session], idle_s: float = 0.05) -> None:
        self.thread, self.ended = SessionThread(session, idle_s=idle_s), SimpleQueue[foresay.Chunk]()

    def __call__(self, count: int = 5, listen: Any = None, kind: str = "a") -> Any:
        request = ([1, 2], SamplingParams(max_new_tokens=count))
        return self.thread.submit([request], listen or self.listen, kind=kind).result(20)

    def listen(self, place: int, chunk: foresay.Chunk) -> None:
        if chunk.finish_reason is not None:
            self.ended.put(chunk)

    def answer(self, *args: Any) -> foresay.Chunk:
        self(*args)
        return self.ended.get(timeout=20)


def test_the_thread_survives_a_listener_and_a_target_that_raise() -> None:
    failing = threading.Event()

    class Fragile(TableModel):
        def forward(self, model_input: Any, cache: Any) -> Any:
            if failing.is_set():
                failing.clear()
                raise MemoryError("full")
            return super().forward(model_input, cache)

    def raises(place: int, chunk: foresay.Chunk) -> None:
        raise RuntimeError("no one listens")

    table = foresay.load(Fragile.random(6, seed=1), drafter="none")
    thread = Asked(lambda kind: table.session())
    thread(50, raises)
    assert thread.answer().error is None
    failing.set()
    assert "MemoryError: full" in str(thread.answer().error)
    assert thread.answer().error is None
    with pytest.raises(ConfigError):
        thread.thread.submit([([1], SamplingParams()), ([], SamplingParams())], thread.listen).result(20)


def test_the_thread_goes_on_with_another_session_when_one_is_past_mending() -> None:
    broken = [True]

    class Broken(Session):
        def step(self) -> list[foresay.Chunk]:
            if broken[0]:
                raise BaseException("not even an Exception")
            return super().step()

        def fail(self, error: Exception) -> list[foresay.Chunk]:
            raise RuntimeError("and nothing left to mend")

    table = foresay.load(TableModel.random(6, seed=1), drafter="none")
    thread = Asked(lambda kind: Broken(table.target, table.engine()))
    assert "not even an Exception" in str(thread.answer().error)
    broken[0] = False
    assert thread.answer().error is None


def test_a_ticket_of_a_session_that_is_gone_cancels_nothing() -> None:
    table = foresay.load(TableModel.random(6, seed=1), drafter="none")
    thread = Asked(lambda kind: table.session(), idle_s=5)
    old = thread(2)
    thread.ended.get(timeout=20)
    thread.answer(2, None, "b")  # there is room for one: the first goes
    new = thread(3000)
    assert new[0].number == old[0].number and new != old
    thread.thread.cancel(old).result(20)
    assert thread.ended.get(timeout=60).finish_reason == "length"


def test_rows_of_one_call_draw_numbers_of_their_own(model: foresay.Generator) -> None:
    params: dict[str, Any] = {"max_new_tokens": 12, "temperature": 1.5, "seed": 5}
    several = model.generate(["hello there"] * 4, **params)
    assert len({tuple(one.token_ids) for one in several}) == 4 and several[0].seed == 5
    for one in several:
        again = model.generate("hello there", **{**params, "seed": one.seed})
        assert again.token_ids == one.token_ids, "the seed that is reported reproduces the row alone"


def test_a_model_of_ones_own_stops_at_its_end_tokens() -> None:
    table = TableModel(torch.eye(5).roll(1, 1).expand(5, 5, 5))  # counts upwards
    assert foresay.load(table, eos_token_ids=4).generate([1], max_new_tokens=9).token_ids == [2, 3, 4]
    assert foresay.load(table).generate([1], max_new_tokens=9).token_ids == [2, 3, 4, 0, 1, 2, 3, 4, 0]
    refuses(lambda: foresay.load(table, eos_token_ids=[9]), "eos_token_ids", 9)


SHARED = [int(t) for t in torch.randint(2, VOCAB, (300,), generator=torch.Generator().manual_seed(2))]


def decoded(
    prompts: list[list[int]], dtype: torch.dtype, prefixes: PrefixStore | None, rows: int = 2
) -> tuple[list[list[int]], list[int], Engine]:
    """Outputs, and how many tokens of each prompt were cached."""
    target = foresay.load(make("llama", max_position_embeddings=1024).to(dtype), drafter="none").target.model
    engine = Engine(target, None, foresay.Speculative(), ConstantLength(0), max_batch_size=rows, prefixes=prefixes)
    numbers = [engine.submit(prompt, SamplingParams(max_new_tokens=12)) for prompt in prompts]
    out: dict[int, list[int]] = {number: [] for number in numbers}
    cached = dict.fromkeys(numbers, 0)
    while engine.has_work:
        for step in engine.step():
            out[step.request_id] += step.token_ids
            cached[step.request_id] = max(cached[step.request_id], step.num_cached)
    return list(out.values()), list(cached.values()), engine


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_shared_beginnings_change_no_bit(dtype: torch.dtype) -> None:
    prompts = [[*SHARED[:n], 5, 6, n % 50 + 2] for n in (280, 290, 40, 300, 15, 257)]
    plain, none, _ = decoded(prompts, dtype, None)
    live, some, _ = decoded(prompts, dtype, PrefixStore())
    kept, more, engine = decoded(prompts, dtype, PrefixStore(1 << 24))
    assert plain == live == kept
    assert none == [0] * 6 and some[1] == 280 and more[3] >= 290 and more[4] < MIN_TOKENS
    assert engine.cache.lengths == []


def test_more_prompts_than_are_looked_at_before_a_chunk_share_too() -> None:
    """All but the first of each of two groups, though compiled passes would fill dozens of them together."""
    prompts = [[*SHARED[i % 2 : 40 + i % 2], 5, i + 2] for i in range(80)]
    plain, none, _ = decoded(prompts, torch.float32, None, rows=80)
    shared, some, _ = decoded(prompts, torch.float32, PrefixStore(), rows=80)
    assert shared == plain and not any(none)
    assert sorted(some)[:2] == [0, 0] and min(sorted(some)[2:]) >= 40


def test_slots_of_a_shared_beginning_are_bit_identical() -> None:
    model = CausalModel(make("llama", max_position_embeddings=1024).to(torch.bfloat16))
    rows = Rows([Row(i, [*SHARED[:n], 7], SamplingParams(), limit=900) for i, n in enumerate((290, 299))])
    shared, own = model.new_cache(), model.new_cache()
    for cache in (shared, own):
        model.admit(rows, 0, cache)
    for cache, store in ((shared, PrefixStore()), (own, None)):
        for place in (0, 1):
            if store is not None:
                store.copy_into(cache, rows, place)
            while pending(rows, cache, place):
                prefill_chunk(model, cache, Rows(rows.rows[: place + 1]), place)
    assert rows[1].num_cached == 290 and shared.lengths == own.lengths == [290, 299]
    for ours, theirs in zip(shared.save_prefix(1, 299).parts, own.save_prefix(1, 299).parts, strict=True):
        assert ours is not None and theirs is not None
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_kept_beginnings_are_bounded_and_the_least_used_go() -> None:
    store = PrefixStore(60_000)
    decoded([[i + 2] * 20 + SHARED[:30] for i in range(6)], torch.float32, store)
    assert 0 < store.nbytes <= 60_000 and 1 < len(store) < 6
    store.clear()
    assert (store.nbytes, len(store)) == (0, 0)


def test_sharing_can_be_turned_off() -> None:
    prompts = [[*SHARED[:60], 3], [*SHARED[:60], 4]]
    alone, shared = (
        foresay.load(make("llama"), drafter="none", max_batch_size=2, share_prefixes=share).generate(
            prompts, max_new_tokens=4
        )
        for share in (False, True)
    )
    assert [[one.num_cached for one in some] for some in (alone, shared)] == [[0, 0], [0, 60]]
    assert [one.token_ids for one in alone] == [one.token_ids for one in shared]
    refuses(lambda: foresay.load(make("llama"), share_prefixes="no"), "share_prefixes", "no")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("param", "call"),
    [
        ("params", lambda model, value: model.generate("a", value)),
        ("params", lambda model, value: model.generate("a", [value])),
        ("params", lambda model, value: model.stream("a", value)),
        ("params", lambda model, value: model.session().submit([1], value)),
        ("params", lambda model, value: SamplingParams.of(value)),
        ("params", lambda model, value: model.engine().submit([1], value)),
        ("on_chunk", lambda model, value: model.generate("a", on_chunk=value)),
        ("stop", lambda model, value: model.session().submit([1], stop=value)),
        ("rule", lambda model, value: model.with_settings(rule=value)),
        ("policy", lambda model, value: model.with_settings(policy=value)),
        ("rule", lambda model, value: foresay.change(model, rule=value)),
        ("length", lambda model, value: foresay.change(model, length=value)),
        ("generator", lambda model, value: foresay.change(value)),
    ],
    ids=range(13),
)
def test_arguments_of_another_type_are_named(model: foresay.Generator, param: str, call: Callable[..., Any]) -> None:
    for value in (3.5, {"temperature": 1}, True)[: 3 if param == "params" else 1]:
        refuses(lambda: call(model, value), param, value)  # noqa: B023


@pytest.mark.parametrize("prompt", [3.5, None, b"a", {"role": "user", "content": "a"}, ["a", 3], [[["a"]]], [["a"]]])
def test_prompts_of_another_type_are_refused(model: foresay.Generator, prompt: Any) -> None:
    for call in (model.generate, model.stream):
        refuses(lambda: call(prompt), "prompt", kind=PromptError)  # noqa: B023
