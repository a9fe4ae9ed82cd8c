"""Text requests over a living engine: errors of their own, a bounded queue, a shared batch, shared beginnings of prompts."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import foresay
from foresay import ConfigError, QueueFullError, RequestError, SamplingParams, Session, SessionThread
from foresay.decoding.outcome import FinishReason
from foresay.engine import Engine
from foresay.engine.prefixes import MIN_TOKENS, PrefixStore
from foresay.errors import PromptError
from foresay.lengths import ConstantLength
from foresay.models.table import TableModel
from helpers import tiny
from helpers.families import VOCAB, make
from helpers.refusals import refused


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    yield from tiny.one_thread()


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
        for chunk in session.step():
            if chunk.generation is not None:
                done[chunk.index] = chunk.generation
    return done


def test_requests_join_and_each_writes_what_it_writes_alone(model: foresay.Generator) -> None:
    session, texts, numbers = model.session(), ["hello there", "and what", "a", "hello hello hell"], {}
    for text in texts[:2]:
        numbers[session.submit(text, max_new_tokens=20)] = text
    session.step()
    for text in texts[2:]:
        numbers[session.submit(text, SamplingParams(max_new_tokens=9), temperature=0.9, seed=3)] = text
    done = finished(session)
    assert set(done) == set(numbers)
    for number, text in numbers.items():
        greedy = text in texts[:2]
        alone = (
            model.generate(text, max_new_tokens=20)
            if greedy
            else model.generate(text, max_new_tokens=9, temperature=0.9, seed=3)
        )
        assert done[number].token_ids == alone.token_ids and done[number].text == alone.text


def test_an_error_is_a_chunk_of_its_own_request(model: foresay.Generator) -> None:
    session = model.session()
    good = session.submit("hello there", max_new_tokens=12)
    bad = session.submit("and what", max_new_tokens=12, processors=(broken,))
    done = finished(session)
    assert done[bad].finish_reason is FinishReason.ERROR and isinstance(done[bad].error, RequestError)
    assert isinstance(done[bad].error.__cause__, ValueError) and 0 < len(done[bad].token_ids) < 12
    assert done[good].token_ids == model.generate("hello there", max_new_tokens=12).token_ids
    assert done[bad].token_ids == model.generate("and what", max_new_tokens=12).token_ids[: len(done[bad].token_ids)]


def test_a_list_keeps_what_did_not_fail_and_one_prompt_raises(model: foresay.Generator) -> None:
    params = [SamplingParams(max_new_tokens=8), SamplingParams(max_new_tokens=8, processors=(broken,))]
    good, bad = model.generate(["hello there", "and what"], params)
    assert good.error is None and good.finish_reason is FinishReason.LENGTH
    assert bad.finish_reason is FinishReason.ERROR and "broken" in str(bad.error)
    with pytest.raises(RequestError, match="broken"):
        model.generate("and what", params[1])
    with pytest.raises(RequestError, match="broken"):
        list(model.stream("and what", params[1]))


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


def test_requests_that_a_free_row_takes_do_not_wait(model: foresay.Generator) -> None:
    session = model.with_settings(max_batch_size=3).session(max_waiting=1)
    numbers = [session.submit("hello", max_new_tokens=2) for _ in range(4)]
    with pytest.raises(QueueFullError):
        session.submit("hello", max_new_tokens=2)
    assert set(finished(session)) == set(numbers)


def test_a_target_that_fails_ends_what_was_under_way_and_the_session_goes_on(
    model: foresay.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = model.session()
    numbers = [session.submit(text, max_new_tokens=9) for text in ("hello", "there")]
    session.step()
    intact = model.target.model.forward
    monkeypatch.setattr(model.target.model, "forward", lambda *_: (_ for _ in ()).throw(MemoryError("full")))
    with pytest.raises(MemoryError) as caught:
        session.step()
    chunks = session.fail(RuntimeError(str(caught.value)))
    assert {chunk.index for chunk in chunks} == set(numbers) and not session.has_work
    assert all(
        chunk.error is not None and "the target raised RuntimeError: full" in str(chunk.error) for chunk in chunks
    )
    monkeypatch.setattr(model.target.model, "forward", intact)
    number = session.submit("hello", max_new_tokens=9)
    assert finished(session)[number].token_ids == model.generate("hello", max_new_tokens=9).token_ids


def test_the_thread_survives_a_listener_and_a_target_that_raise(model: foresay.Generator) -> None:
    failing = threading.Event()

    class Fragile(TableModel):
        def forward(self, model_input: Any, cache: Any) -> Any:
            if failing.is_set():
                failing.clear()
                raise MemoryError("full")
            return super().forward(model_input, cache)

    table = foresay.load(Fragile.random(6, seed=1), drafter="none")
    thread = SessionThread(lambda kind: table.session(), idle_s=0.05)
    ended: dict[str, list[Any]] = {"a": [], "b": [], "c": []}
    done = {name: threading.Event() for name in ended}

    def listen(name: str) -> Any:
        def one(place: int, chunk: foresay.Chunk) -> None:
            if name == "b":
                raise RuntimeError("nobody listens")
            if chunk.finish_reason is not None:
                ended[name].append(chunk)
                done[name].set()

        return one

    ids = [1, 2]
    thread.submit([(ids, SamplingParams(max_new_tokens=50))], listen("b")).result(20)
    thread.submit([(ids, SamplingParams(max_new_tokens=5))], listen("a")).result(20)
    assert done["a"].wait(20) and ended["a"][0].error is None
    failing.set()
    thread.submit([(ids, SamplingParams(max_new_tokens=5))], listen("c")).result(20)
    assert done["c"].wait(20) and "MemoryError: full" in str(ended["c"][0].error)
    done["a"].clear()
    thread.submit([(ids, SamplingParams(max_new_tokens=5))], listen("a")).result(20)
    assert done["a"].wait(20) and ended["a"][1].error is None
    with pytest.raises(ConfigError):
        thread.submit([(ids, SamplingParams()), ([], SamplingParams())], listen("a")).result(20)


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
    thread = SessionThread(lambda kind: Broken(table.target, table.engine()), idle_s=0.05)
    chunks: list[foresay.Chunk] = []
    came = threading.Event()

    def listen(place: int, chunk: foresay.Chunk) -> None:
        chunks.append(chunk)
        if chunk.finish_reason is not None:
            came.set()

    thread.submit([([1, 2], SamplingParams(max_new_tokens=5))], listen).result(20)
    assert came.wait(20) and "not even an Exception" in str(chunks[-1].error)
    broken[0] = False
    came.clear()
    thread.submit([([1, 2], SamplingParams(max_new_tokens=5))], listen).result(20)
    assert came.wait(20) and chunks[-1].error is None


def test_a_ticket_of_a_session_that_is_gone_cancels_nothing() -> None:
    table = foresay.load(TableModel.random(6, seed=1), drafter="none")
    thread = SessionThread(lambda kind: table.session(), idle_s=5)
    ended: list[foresay.Chunk] = []
    came = threading.Event()

    def listen(place: int, chunk: foresay.Chunk) -> None:
        if chunk.finish_reason is not None:
            ended.append(chunk)
            came.set()

    def ask(kind: str, new: int) -> Any:
        came.clear()
        return thread.submit([([1, 2], SamplingParams(max_new_tokens=new))], listen, kind=kind).result(20)

    old = ask("a", 2)
    assert came.wait(20)
    ask("b", 2)  # there is room for one: the first goes
    assert came.wait(20)
    new = ask("a", 3000)
    assert new[0].number == old[0].number and new != old
    thread.cancel(old).result(20)
    assert came.wait(60) and ended[-1].finish_reason == "length"


def test_astream_calls_share_one_batch(model: foresay.Generator) -> None:
    async def one(text: str) -> list[foresay.Chunk]:
        return [chunk async for chunk in model.astream(text, max_new_tokens=16)]

    async def both() -> list[list[foresay.Chunk]]:
        return list(await asyncio.gather(one("hello there"), one("and what")))

    chunks = asyncio.run(both())
    assert max(chunk.step.batch_size for some in chunks for chunk in some) == 2
    for some, text in zip(chunks, ("hello there", "and what"), strict=True):
        last = some[-1].generation
        assert last is not None and last.token_ids == model.generate(text, max_new_tokens=16).token_ids
        assert "".join(chunk.text for chunk in some) == last.text and {chunk.index for chunk in some} == {0}


# -- a seed for each row, and end tokens of one's own -------------------------------------------------------------------


def test_rows_of_one_call_draw_numbers_of_their_own(model: foresay.Generator) -> None:
    params = {"max_new_tokens": 12, "temperature": 1.5, "seed": 5}
    several = model.generate(["hello there"] * 4, **params)
    assert len({tuple(one.token_ids) for one in several}) == 4
    assert several[0].seed == 5 and several[0].token_ids == model.generate("hello there", **params).token_ids
    for one in several:
        again = model.generate("hello there", max_new_tokens=12, temperature=1.5, seed=one.seed)
        assert again.token_ids == one.token_ids, "the seed that is reported reproduces the row alone"


def test_a_model_of_ones_own_stops_at_its_end_tokens() -> None:
    table = TableModel(torch.eye(5).roll(1, 1).expand(5, 5, 5))  # counts upwards
    assert foresay.load(table, eos_token_ids=4).generate([1], max_new_tokens=9).token_ids == [2, 3, 4]
    assert foresay.load(table).generate([1], max_new_tokens=9).token_ids == [2, 3, 4, 0, 1, 2, 3, 4, 0]
    with refused("eos_token_ids", 9):
        foresay.load(table, eos_token_ids=[9])


# -- prompts that begin alike --------------------------------------------------------------------------------------------

SHARED = [int(t) for t in torch.randint(2, VOCAB, (300,), generator=torch.Generator().manual_seed(2))]


def decoded(
    prompts: list[list[int]], dtype: torch.dtype, prefixes: PrefixStore | None, rows: int = 2
) -> tuple[list[list[int]], list[int], Engine]:
    target = foresay.load(make("llama", max_position_embeddings=1024).to(dtype), drafter="none").target.model
    engine = Engine(target, None, foresay.Speculative(), ConstantLength(0), max_batch_size=rows, prefixes=prefixes)
    out: dict[int, list[int]] = {}
    cached: dict[int, int] = {}
    for prompt in prompts:
        out[engine.submit(prompt, SamplingParams(max_new_tokens=12))] = []
    while engine.has_work:
        for step in engine.step():
            out[step.request_id] += step.token_ids
            cached[step.request_id] = max(cached.get(step.request_id, 0), step.num_cached)
    return list(out.values()), [cached[i] for i in sorted(cached)], engine


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
    assert shared == plain
    assert not any(none)
    assert sorted(some)[:2] == [0, 0] and min(sorted(some)[2:]) >= 40


def test_slots_of_a_shared_beginning_are_bit_identical() -> None:
    from foresay.decoding.prefill import pending, prefill_chunk
    from foresay.decoding.rows import Row, Rows
    from foresay.models.huggingface.causal import CausalModel

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
    prompts = [[i + 2] * 20 + SHARED[:30] for i in range(6)]
    decoded(prompts, torch.float32, store)
    assert 0 < store.nbytes <= 60_000 and 1 < len(store) < 6
    store.clear()
    assert store.nbytes == 0 and len(store) == 0


def test_sharing_can_be_turned_off() -> None:
    one = foresay.load(make("llama"), drafter="none", share_prefixes=False)
    outputs = one.generate([[*SHARED[:60], 3], [*SHARED[:60], 4]], max_new_tokens=4)
    assert [output.num_cached for output in outputs] == [0, 0]
    shared = foresay.load(make("llama"), drafter="none", max_batch_size=2)
    again = shared.generate([[*SHARED[:60], 3], [*SHARED[:60], 4]], max_new_tokens=4)
    assert [output.num_cached for output in again] == [0, 60]
    assert [output.token_ids for output in again] == [output.token_ids for output in outputs]
    with refused("share_prefixes", "no"):
        foresay.load(make("llama"), share_prefixes="no")  # type: ignore[arg-type]


@pytest.mark.parametrize("given", [{"temperature": 1}, 5, "hot", True, [{"temperature": 1}]], ids=repr)
@pytest.mark.parametrize("call", ["generate", "stream", "submit", "of", "engine"])
def test_parameters_of_another_type_are_named(model: foresay.Generator, call: str, given: Any) -> None:
    calls: dict[str, Callable[[], Any]] = {
        "generate": lambda: model.generate("a", given),
        "stream": lambda: model.stream("a", given),
        "submit": lambda: model.session().submit([1], given),
        "of": lambda: SamplingParams.of(given),
        "engine": lambda: model.engine().submit([1], given),
    }
    with refused("params") as caught:
        calls[call]()
    value = given[0] if isinstance(given, list) and call in ("generate", "stream") else given
    assert (caught.value.param, caught.value.value) == ("params", value)


@pytest.mark.parametrize(
    ("param", "call"),
    [
        ("on_chunk", lambda model, value: model.generate("a", on_chunk=value)),
        ("stop", lambda model, value: model.session().submit([1], stop=value)),
        ("rule", lambda model, value: model.with_settings(rule=value)),
        ("policy", lambda model, value: model.with_settings(policy=value)),
        ("rule", lambda model, value: foresay.change(model, rule=value)),
        ("length", lambda model, value: foresay.change(model, length=value)),
        ("generator", lambda model, value: foresay.change(value)),
    ],
)
def test_arguments_of_another_type_are_named(model: foresay.Generator, param: str, call: Callable[..., Any]) -> None:
    with pytest.raises(ConfigError, match="must be") as caught:
        call(model, 3.5)
    assert (caught.value.param, caught.value.value) == (param, 3.5)


@pytest.mark.parametrize("prompt", [3.5, None, b"a", {"role": "user", "content": "a"}, ["a", 3], [[["a"]]], [["a"]]])
def test_prompts_of_another_type_are_refused(model: foresay.Generator, prompt: Any) -> None:
    for call in (model.generate, model.stream):
        with refused("prompt", kind=PromptError):
            call(prompt)
