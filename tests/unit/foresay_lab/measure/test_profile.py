"""Profiles: what is read off them between what was measured, the file, and that measuring measures."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import foresay
from foresay.decoding.outcome import Origin, Step
from foresay.engine import Engine
from foresay.generation.generator import Generator
from foresay.models.cache.memory import kv_bytes
from foresay.models.huggingface.linears import freeze_linears, weight_bytes
from foresay.records.profile import Floor, Profile, Timing, line, profile_path
from foresay.records.recording import Record, Recording
from foresay_lab.measure import profile as lab
from foresay_lab.measure import roofline as floors
from foresay_lab.measure.profile import measure, measure_drafting, medians, profile, quartiles
from foresay_lab.replay.replay import PassCost, Replay, expect
from helpers.families import VOCAB, make
from helpers.refusals import refused


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(floors, "BLOCK_BYTES", 1 << 16)


def timing(batch: int, columns: int, context: int, seconds: float) -> Timing:
    return Timing(batch, columns, context, seconds, 0.9 * seconds, 1.1 * seconds)


TIMINGS = (
    *(timing(1, columns, 100, seconds) for columns, seconds in ((1, 10.0), (2, 11.0), (4, 15.0))),
    *(timing(4, columns, 100, seconds) for columns, seconds in ((1, 16.0), (2, 20.0), (4, 30.0))),
    *(timing(1, columns, 300, seconds) for columns, seconds in ((1, 12.0), (4, 17.0))),
    *(timing(4, columns, 300, seconds) for columns, seconds in ((1, 24.0), (4, 38.0))),
)


def made(**changes: Any) -> Profile:
    values: dict[str, Any] = {
        "model": "tiny",
        "dtype": "float32",
        "machine": {"cores": 2},
        "timings": TIMINGS,
        "fills": ((8, 1.0), (128, 7.0), (256, 10.0)),
    }
    return Profile(**{**values, **changes})


def test_the_clock_by_hand() -> None:
    clock = made().clock()
    for batch, columns, context, seconds in (
        *((t.batch, t.columns, t.context, t.seconds) for t in TIMINGS[:6]),
        (1, 3, 100, 13.0),  # half-way between 11 and 15
        (2, 1, 100, 12.0),  # a third of the way from 10 to 16
        (2, 3, 100, 13 + (25 - 13) / 3),  # between columns first, then batches
        (1, 6, 100, 19.0),  # beyond the widest: 2 a column, as between the last two
        (8, 1, 100, 24.0),  # beyond the largest batch: 2 a row
        (1, 1, 300, 12.0),
        (1, 1, 200, 11.0),
        (1, 1, 500, 14.0),  # beyond the longest context
        (4, 1, 200, 20.0),
        (2, 1, 300, 12 + 200 * (0.01 + (0.04 - 0.01) / 3)),
        (1, 2, 0, 10.0),  # nearer than the first: a token of context costs 0.01
    ):
        assert clock(batch, columns, context) == pytest.approx(seconds), (batch, columns, context)
    one = made(timings=(timing(2, 3, 50, 7.0),)).clock()
    assert {one(1, 1, 10), one(2, 3, 50), one(64, 9, 1000)} == {7.0}, "one timing is the answer to everything"
    with refused("profile"):
        made(timings=()).clock()


def test_a_clock_never_runs_backwards() -> None:
    """Noise may make a wide pass quicker than a narrow one, or a long context; nothing becomes free, or less."""
    clock = made(timings=(timing(1, 1, 100, 10.0), timing(1, 4, 100, 8.0), timing(1, 1, 300, 4.0))).clock()
    assert clock(1, 60, 100) == 8.0 and clock(1, 4, 10**6) == 8.0 and clock(1, 1, 0) == 10.0
    short = made(timings=(timing(1, 1, 100, 1.0), timing(1, 1, 200, 100.0), timing(1, 2, 100, 1.0)))
    assert short.clock()(1, 1, 0) == pytest.approx(0.1), "a tenth at the least"


def test_straight_lines_and_what_is_read_off_them() -> None:
    for x, y in ((1, 10), (2, 15), (3, 20), (5, 24), (9, 32), (0, 5), (-9, 5)):
        assert line([(1, 10.0), (3, 20.0), (5, 24.0)], x) == pytest.approx(y)
    falling = [(1, 10.0), (3, 8.0)]
    assert (line(falling, 9), line(falling, 2), line(falling, 0)) == (8, 9, 11)
    assert line([(4, 3.0)], 100) == 3 and line([], 5) == 0
    for tokens, seconds in ((0, 0), (-1, 0), (68, 4), (256, 10), (512 + 128, 27)):
        assert made().fill_seconds(tokens) == pytest.approx(seconds)
    assert made(fills=()).fill_seconds(1000) == 0, "nothing is known"
    assert Floor(1000, 10, 100.0).seconds(4, 25.0) == 20
    one = made().with_drafts("d", [(1, 1, 1.0), (1, 5, 5.0), (8, 1, 8.0), (8, 5, 12.0)], 0.25)
    for batch, length, seconds in ((1, 0, 0), (1, 3, 3), (8, 3, 10), (1, 9, 9), (4, 3, 3 + 7 * 3 / 7)):
        assert one.draft_seconds("d", batch, length) == pytest.approx(seconds)
    assert one.draft_fills == {"d": 0.25} and made().drafts == {}
    two = one.with_drafts("e", [(1, 1, 2.0)], 0.0)
    assert set(two.drafts) == {"d", "e"} and set(two.draft_fills) == {"d", "e"}


def test_save_and_load(tmp_path: Path) -> None:
    whole = made(floor=Floor(10, 2, 3.5)).with_drafts("model(x)", [(1, 2, 0.5)], 0.125)
    path = tmp_path / "deep" / "p.json"
    for one in (whole, made()):
        one.save(path)
        assert Profile.load(path) == one
    assert list(path.parent.iterdir()) == [path], "nothing is left next to it"
    values = json.loads(path.read_text())
    malformed: list[dict[str, Any]] = [
        *({"format": "foresay-recording"}, {"version": 2}, {"timings": [{"batch": 1}]}, {"timings": 3}),
        *({"fills": [[1]]}, {"floor": {"weight": 1}}, {"drafts": {"x": [[1, 2]]}}, {"colour": 1}, {"model": ...}),
    ]
    texts = [json.dumps({k: v for k, v in (values | change).items() if v is not ...}).encode() for change in malformed]
    for data in (*texts, b"", b"{", b"[]", b"3", b"\xff\xfe", b"{}"):
        path.write_bytes(data)
        with refused("path"):
            Profile.load(path)
    with refused("path"):
        Profile.load(tmp_path / "none.json")


def test_where_profiles_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORESAY_CACHE", str(tmp_path))
    machine = {"processor": "x", "cores": 2, "threads": 1}
    path = profile_path("org/my model", "float32", machine)
    assert path.parent == tmp_path / "profiles" and path.name.startswith("my-model-")
    assert path == profile_path("org/my model", "float32", dict(reversed(machine.items())))
    others = [
        profile_path("org/my model", "bfloat16", machine),
        profile_path("other/my model", "float32", machine),
        *(profile_path("org/my model", "float32", {**machine, name: 4}) for name in machine),
    ]
    assert len({path, *others}) == 1 + len(others)


def test_key_and_value_bytes() -> None:
    grouped = SimpleNamespace(num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, hidden_size=32)
    whole, wide = (SimpleNamespace(**vars(grouped) | one) for one in ({"num_key_value_heads": None}, {"head_dim": 16}))
    assert kv_bytes(grouped, torch.float32) == 2 * 3 * 2 * 8 * 4
    assert kv_bytes(whole, torch.bfloat16) == 2 * 3 * 4 * 8 * 2
    assert kv_bytes(wide, torch.float16) == 2 * 3 * 2 * 16 * 2
    assert kv_bytes(grouped, torch.int8) == 2 * 3 * 2 * (8 + 4), "with a scale"


def test_expectations_by_hand() -> None:
    """Two prompts of 9 and 5 tokens; passes of 2 x 1, 2 x 3 and 1 x 4 columns, as the clock above has them."""
    passes = (
        PassCost(batch=2, width=1, context=100, tokens=2, drafted=0, draft_s=0.5),
        PassCost(batch=2, width=3, context=100, tokens=5, drafted=2, draft_s=0.25),
        PassCost(batch=1, width=4, context=300, tokens=3, drafted=3, draft_s=0.125),
    )
    step = Step(0, (1,), (Origin.BONUS,), 0, 0)
    done = Replay(((step,),), passes, 1.0, True)
    recording = Recording((Record("a", (1,) * 9, (2,)), Record("b", (1,) * 5, (2,))), 5)
    target, fill = 12 + 17 + 17, 1.0 + line(made().fills, 4)
    live = expect(done, recording, made())
    assert (live.tokens, live.passes, live.row_passes) == (10, 3, 5)
    assert live.fill_s == pytest.approx(fill) and live.draft_s == pytest.approx(0.875)
    assert live.seconds == pytest.approx(target + 0.875 + fill)
    assert live.tokens_per_s == pytest.approx(10 / live.seconds) and live.tokens_per_pass == 2
    assert live.latency_s == pytest.approx((target + 0.875) / 3 / 2)
    known = made().with_drafts("d", [(1, 1, 1.0), (1, 3, 3.0), (2, 1, 2.0), (2, 3, 4.0)], 0.5)
    profiled = expect(done, recording, known, "d")
    assert profiled.draft_s == pytest.approx(0 + 3.0 + 3.0 + 14 * 0.5), "each pass, and reading the prompts"
    assert profiled.seconds == pytest.approx(target + fill + profiled.draft_s)


def loaded(drafter: str = "none", **changes: Any) -> Generator:
    return foresay.load(make("llama", **changes), drafter=drafter, max_batch_size=4)


def test_measuring_a_tiny_model() -> None:
    told: list[tuple[int, int]] = []
    found = measure(
        loaded(), batches=(1, 3), columns=(4, 1, 2), contexts=(12, 40), repeats=3, fills=(4, 16, 999),
        on_progress=lambda done, total: told.append((done, total)),
    )  # fmt: skip
    cells = {(t.batch, t.columns, t.context) for t in found.timings}
    assert cells == {(b, c, 12) for b in (1, 3) for c in (1, 2, 4)} | {(b, c, 40) for b in (1, 3) for c in (1, 4)}
    assert len(cells) == len(found.timings) == 10
    assert all(0 < t.low <= t.seconds <= t.high for t in found.timings)
    assert [n for n, _ in found.fills] == [4, 16] and all(seconds > 0 for _, seconds in found.fills)
    assert found.floor is not None and found.floor.bytes_per_s > 1e6
    assert found.floor.weight_bytes == weight_bytes(make("llama")) and found.floor.kv_bytes == 2 * 3 * 2 * 8 * 4
    assert (found.model, found.dtype) == ("LlamaForCausalLM", "float32") and found.machine["threads"] == 1
    assert told[0] == (0, 5) and told[-1] == (5, 5)
    assert found.clock()(2, 3, 20) > 0


def test_a_profile_holds_what_the_model_says_of_its_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = loaded()
    can = replace(target.target.model.capabilities, ragged=True, column_cost=0.55)
    monkeypatch.setattr(type(target.target.model), "capabilities", property(lambda self: can))
    found = measure(target, batches=(1,), columns=(1,), contexts=(8,), repeats=1, fills=())
    assert found.ragged and found.column_cost == 0.55
    found.save(tmp_path / "p.json")
    assert Profile.load(tmp_path / "p.json") == found == medians([found, found])
    assert found.token_bytes == 2 * 3 * 2 * 8 * 4
    monkeypatch.setenv("FORESAY_CACHE", str(tmp_path))
    older = replace(found, column_cost=None, token_bytes=0.0)  # written before anyone requested
    older.save(profile_path(found.model, found.dtype, found.machine))
    assert profile(target, batches=(1,), columns=(1,), contexts=(8,)) == found


def test_medians_of_profiles_forget_a_slow_moment() -> None:
    slow = made(
        timings=tuple(replace(t, seconds=9 * t.seconds, low=9 * t.low, high=9 * t.high) for t in TIMINGS),
        fills=((8, 0.5), (128, 70.0), (256, 100.0)),
    )
    found = medians([made(), slow, made()])
    assert [t.seconds for t in found.timings] == [t.seconds for t in TIMINGS]
    assert [(t.low, t.high) for t in found.timings] == [(t.low, 9 * t.high) for t in TIMINGS]
    assert found.fills == made().fills and found.model == "tiny"
    assert medians([slow]) == slow
    with pytest.raises(ValueError, match="zip"):
        medians([made(), made(timings=TIMINGS[1:])])


def test_passes_have_the_columns_they_are_timed_for(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, int]] = []
    honest = Engine.step

    def watched(self: Engine) -> list[Step]:
        steps = honest(self)
        if steps:
            seen.append((len(steps), 1 + max(step.num_drafted for step in steps)))
            assert all(step.num_accepted < 4 for step in steps), "noise is nearly always wrong"
        return steps

    monkeypatch.setattr(Engine, "step", watched)
    measure(loaded(), batches=(2,), columns=(1, 5), contexts=(10,), repeats=4, fills=())
    assert seen.count((2, 5)) == 6 and seen.count((2, 1)) >= 6
    wrong: list[tuple[dict[str, Any], str, Any]] = [
        ({"batches": ()}, "batch", []),
        ({"batches": (0,)}, "batch", [0]),
        ({"columns": (0, 1)}, "columns", [0, 1]),
        ({"contexts": (1,)}, "context", [1]),
        ({"repeats": 0}, "repeats", 0),
        ({"contexts": (252,)}, "context", 252),
    ]
    for settings, param, value in wrong:
        with refused(param, value):
            measure(loaded(), **{"batches": (1,), "columns": (1,), "contexts": (8,), "repeats": 1, **settings})


def test_measuring_a_drafter() -> None:
    times, fill = measure_drafting(loaded("self(1)"), batches=(1, 2), lengths=(1, 4), context=16, repeats=9)
    assert [(b, n) for b, n, _ in times] == [(1, 1), (1, 4), (2, 1), (2, 4)] and fill >= 0
    assert all(seconds > 0 for _, _, seconds in times)
    assert times[1][2] > times[0][2], "four tokens take longer than one"
    with refused("drafter", "none"):
        measure_drafting(loaded())
    assert quartiles([3.0]) == (3, 3, 3) and quartiles([5.0, 1.0, 3.0, 2.0, 4.0]) == (3, 2, 4)


def test_a_kept_profile_is_used_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORESAY_CACHE", str(tmp_path))
    count = 0

    def counted(generator: Generator, **settings: Any) -> Profile:
        nonlocal count
        count += 1
        cells = [(b, c) for b in settings["batches"] for c in settings["columns"]]
        return made(timings=tuple(timing(b, c, max(settings["contexts"]), count) for b, c in cells))

    monkeypatch.setattr(lab, "measure", counted)
    small: dict[str, Any] = {"batches": (1,), "columns": (1, 2), "contexts": (100,)}
    generator = loaded()
    assert [profile(generator, **small).timings[0].seconds for _ in range(3)] == [1, 1, 1]
    assert profile(generator, **small, fresh=True).timings[0].seconds == 2
    assert profile(generator, **{**small, "columns": (1,)}).timings[0].seconds == 2, "less is requested"
    for more in ({"columns": (1, 3)}, {"batches": (1, 2)}, {"contexts": (101,)}):
        before = count
        profile(generator, **{**small, **more})
        assert count == before + 1, more
    assert len(list((tmp_path / "profiles").iterdir())) == 1


def small(*, tied: bool) -> nn.ModuleDict:
    """An embedding of 10 x 8, a layer of 8 x 8 with a bias, a norm of 8 and a head."""
    embed, head = nn.Embedding(10, 8), nn.Linear(8, 10, bias=False)
    if tied:
        head.weight = embed.weight
    return nn.ModuleDict({"embed": embed, "q_proj": nn.Linear(8, 8), "norm": nn.LayerNorm(8), "lm_head": head})


def test_bytes_of_weights() -> None:
    layers = (64 + 8) + 16
    assert weight_bytes(small(tied=False)) == 4 * (layers + 80), "a few rows of the embedding are as good as nothing"
    assert weight_bytes(small(tied=True)) == 4 * (layers + 80), "the head is read whole, once"
    assert weight_bytes(small(tied=False).to(torch.bfloat16)) == 2 * (layers + 80)
    shared = nn.ModuleList([nn.Linear(4, 4, bias=False)] * 3)
    assert weight_bytes(shared) == 4 * 16
    assert weight_bytes(nn.Embedding(5, 5)) == 0


def test_packed_weights_count_as_much() -> None:
    if torch.ops.mkldnn._is_mkldnn_bf16_supported():
        plain = make("llama", vocab_size=VOCAB, hidden_size=64, intermediate_size=64).to(torch.bfloat16)
        before = weight_bytes(plain)
        assert freeze_linears(plain) > 0
        assert weight_bytes(plain) == pytest.approx(before, rel=0.15), "padded at most"
