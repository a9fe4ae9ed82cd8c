"""Captured passes: what is recorded once gives what a pass gives for other tokens and lengths, and leaves other slots alone.

A recording of PyTorch's operations stands for a CUDA graph: it holds every number that Python put
into a pass, so that a length which did not come from a buffer is found. tests/gpu has the real ones.
"""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from foresay.decoding.protocols import Logits, ModelInput
from foresay.decoding.sampling_params import SamplingParams
from foresay.drafters.model import ModelDrafter
from foresay.models.cache.slot_cache import SlotCache
from foresay.models.huggingface import family_layers, fused, linears
from foresay.models.huggingface.causal import CausalModel
from foresay.models.huggingface.graphs import COLUMNS, MAX_RECORDINGS, SWITCH, GraphedPasses, Replay, Shape
from helpers.families import FAMILIES, VOCAB, make
from helpers.support import Sometimes, run

READ = sorted(name for name, (kind, _) in FAMILIES.items() if kind in family_layers.FAMILIES - family_layers.BY_KERNELS)
PROMPTS = [[5, 9, 17, 5, 9], [7], [3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13]]
PARAMS = SamplingParams(max_new_tokens=24)


class Tape(TorchDispatchMode):
    """Every operation that runs, with the numbers it was given; tensors are those that were there, or what the tape makes."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.operations.append((func, args, kwargs or {}, out))
        return out

    def again(self, wanted: Any) -> Any:
        """Run all of it once more; what `wanted` then is."""
        made: dict[int, Any] = {}

        def now(one: Any) -> Any:
            return made.get(id(one), one)

        for func, args, kwargs, out in self.operations:
            args, kwargs = tree_map(now, (args, kwargs))
            for old, new in zip(tree_leaves(out), tree_leaves(func(*args, **kwargs)), strict=True):
                made[id(old)] = new
        return tree_map(now, wanted)


def recorded(run: Replay) -> Replay:
    """Stands for a CUDA graph."""
    with Tape() as tape:
        out = run()
    return lambda: tape.again(out)  # type: ignore[no-any-return]


@pytest.fixture(autouse=True)
def _operations(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's alone, as on a GPU: a tape receives nothing else."""

    def none(*_: Any) -> Any:
        raise LookupError("no kernels")

    monkeypatch.setattr(fused.FusedDecoder, "_compiled", lambda *_: None)
    monkeypatch.setattr(linears.NativeProduct, "in_place", none)


def graphed(family: str = "llama", capture: Any = recorded) -> CausalModel:
    model = CausalModel(make(family))
    model.use_fused()
    assert model.fused is not None
    model.graphs = GraphedPasses(model.fused.by_operations, capture, torch.device("cpu"))
    return model


def replays(model: CausalModel) -> int:
    assert model.graphs is not None
    assert model.graphs.off is None
    return model.graphs.replays


@pytest.mark.parametrize("family", READ)
def test_replayed_passes_write_what_passes_write(family: str) -> None:
    """Ragged batches, rejected drafts, rows that end and others that begin, windows."""
    plain, params = CausalModel(make(family)), SamplingParams(max_new_tokens=14)
    plain.use_fused()
    own = run(plain, PROMPTS, params, gamma=0)[0]
    model = graphed(family)
    assert run(model, PROMPTS, params, gamma=0)[0] == own
    assert replays(model) > 8
    ours, steps, engine = run(model, PROMPTS, params, drafter=Sometimes(own, VOCAB), gamma=3, max_batch_size=2)
    assert ours == own
    assert engine.draft_failures == 0
    assert any(0 < step.num_accepted < step.num_drafted for step in steps)


def test_a_draft_model_is_replayed_too() -> None:
    own = run(CausalModel(make("llama")), PROMPTS, PARAMS, gamma=0)[0]
    model, draft = graphed(), graphed()
    assert run(model, PROMPTS, PARAMS, drafter=ModelDrafter(draft, VOCAB), gamma=3)[0] == own
    assert replays(model) > 3
    assert replays(draft) > 10


def cached(model: CausalModel, lengths: list[int]) -> SlotCache:
    cache = model.new_cache()
    cache.add_rows(len(lengths))
    tokens = torch.randint(2, VOCAB, (len(lengths), max(lengths)), generator=torch.Generator().manual_seed(1))
    model.forward(ModelInput(tokens, lengths), cache)
    return cache


def passes(model: CausalModel, cache: SlotCache, model_input: ModelInput, count: int) -> list[Any]:
    """The pass `count` times over the same slots, each with other tokens."""
    lengths, out = list(cache.lengths), []
    for i in range(count):
        one = ModelInput(
            (model_input.token_ids + i) % VOCAB,
            model_input.num_tokens,
            model_input.first_row,
            model_input.parents,
            model_input.logits,
            model_input.hidden_layers,
        )
        out.append(model.forward(one, cache))
        cache.truncate(lengths)
    return out


PARENTS = torch.tensor([[-1, 0, 0, 2, 1], [-1, 0, 1, 1, 3]])


@pytest.mark.parametrize("parents", [None, PARENTS])
@pytest.mark.parametrize("rows", [2, 3, 5])
def test_scores_hidden_states_and_slots_are_those_of_a_pass(parents: torch.Tensor | None, rows: int) -> None:
    """Five columns in a recording of eight, three rows in one of four; other rows' slots are untouched."""
    parents = None if parents is None else parents.repeat(3, 1)[:rows]
    model_input = ModelInput(
        torch.randint(2, VOCAB, (rows, 5)), [5, 3, 5, 1, 2][:rows], parents=parents, hidden_layers=(1, 3)
    )
    plain, model = CausalModel(make("llama")), graphed()
    plain.use_fused()
    lengths = [9, 30, 4, 120, 11][:rows]
    wanted, ours = cached(plain, lengths), cached(model, lengths)
    for a, b in zip(passes(plain, wanted, model_input, 5), passes(model, ours, model_input, 5), strict=True):
        for row, count in enumerate(model_input.num_tokens):
            torch.testing.assert_close(a.scores()[row, :count], b.scores()[row, :count], atol=1e-4, rtol=1e-4)
            for layer in (1, 3):
                torch.testing.assert_close(
                    a.hidden[layer][row, :count], b.hidden[layer][row, :count], atol=1e-4, rtol=1e-4
                )
        assert b.scores().shape == a.scores().shape
    assert replays(model) == 4
    for layer in range(3):
        for one, other in zip(wanted.read(layer, 0, rows, 128), ours.read(layer, 0, rows, 128), strict=True):
            for row, length in enumerate(lengths):
                torch.testing.assert_close(one[row, :, :length], other[row, :, :length], atol=1e-5, rtol=1e-5)


def test_outputs_stay_when_the_next_pass_is_replayed() -> None:
    model = graphed()
    cache = cached(model, [5])
    outputs = passes(model, cache, ModelInput(torch.tensor([[3]]), [1]), 5)
    assert not torch.equal(outputs[-1].scores(), outputs[-2].scores())


def test_rows_behind_a_pass_are_not_filled_up_with() -> None:
    """Three rows of five: a recording of four would write into the fourth."""
    model = graphed()
    cache = cached(model, [5, 6, 7, 8, 9])
    before = [x.clone() for x in cache.read(0, 3, 2, 128)]
    passes(model, cache, ModelInput(torch.full((3, 1), 7), [1, 1, 1]), 4)
    assert replays(model) == 3
    assert all(torch.equal(a, b) for a, b in zip(before, cache.read(0, 3, 2, 128), strict=True))
    shape = Shape.of(ModelInput(torch.full((3, 1), 7), [1, 1, 1]), cache)
    assert shape is not None
    assert shape.rows == 3
    last = Shape.of(ModelInput(torch.full((3, 1), 7), [1, 1, 1], first_row=2), cache)
    assert last is not None
    assert last.rows == 4


def test_the_next_request_finds_what_was_recorded() -> None:
    model = graphed()
    run(model, PROMPTS, PARAMS, gamma=0)
    count, made = replays(model), []
    assert model.graphs is not None
    inner = model.graphs._capture
    model.graphs._capture = lambda run: made.append(1) or inner(run)  # type: ignore[func-returns-value]
    run(model, PROMPTS, PARAMS, gamma=0)
    assert replays(model) > count + 18
    assert not made
    held = cached(model, [5])
    run(model, PROMPTS, PARAMS, gamma=0)  # while someone has the tensors
    assert made
    assert held.lengths == [5]


def test_a_cache_that_grows_is_recorded_anew() -> None:
    model, plain = graphed(), CausalModel(make("llama"))
    plain.use_fused()
    for one in (model, plain):
        cache = cached(one, [100])
        out = [one.forward(ModelInput(torch.tensor([[3 + i]]), [1]), cache).scores() for i in range(60)]
        if one is model:
            ours = out
    torch.testing.assert_close(torch.cat(ours), torch.cat(out), atol=1e-4, rtol=1e-4)
    assert replays(model) > 50


def test_few_recordings_are_held() -> None:
    """Fifty-four shapes in turn: six of them are not captured until they are frequent, and then take the position of others."""
    captured: list[int] = []

    def counting(run: Replay) -> Replay:
        captured.append(1)
        return run

    model = graphed(capture=counting)
    cache = cached(model, [100] * 9)
    assert model.graphs is not None

    def once() -> None:
        for first in range(9):
            for columns in COLUMNS:
                passes(model, cache, ModelInput(torch.full((1, columns), 7), [columns], first_row=first), 1)

    for _ in range(6):
        once()
    (recordings,) = model.graphs._recordings.values()
    assert len(recordings.by_shape) == len(captured) == MAX_RECORDINGS
    every = [ModelInput(torch.full((1, n), 7), [n], first_row=i) for i in range(9) for n in COLUMNS]
    rare = next(one for one in every if Shape.of(one, cache) not in recordings.by_shape)
    passes(model, cache, rare, 16)
    assert (len(recordings.by_shape), len(captured)) == (MAX_RECORDINGS, MAX_RECORDINGS + 1)
    assert Shape.of(rare, cache) in recordings.by_shape


def test_large_passes_are_not_captured() -> None:
    cache = cached(graphed(), [5] * 33)
    large, small = (ModelInput(torch.full((33, n), 7), [n] * 33) for n in (12, 8))
    assert Shape.of(large, cache) is None
    assert Shape.of(small, cache) is not None


def test_outputs_of_recordings_share_their_memory() -> None:
    """Forty recordings over a cache hold the outputs of the largest one; two caches do not write to each other's."""
    model = graphed(capture=lambda run: run)
    one, other = cached(model, [100] * 4), cached(model, [100] * 4)
    for columns in (1, 8, 32, 16):
        for cache in (one, other):
            passes(model, cache, ModelInput(torch.full((4, columns), 7), [columns] * 4, hidden_layers=(1,)), 3)
    assert model.graphs is not None
    results = [recordings.results._memory for recordings in model.graphs._recordings.values()]
    assert [{name: memory.numel() for name, memory in each.items()} for each in results] == [
        {"scores": 4 * 32 * VOCAB, 1: 4 * 32 * 32}
    ] * 2
    assert results[0]["scores"].data_ptr() != results[1]["scores"].data_ptr()


def frozen_lengths(run: Replay) -> Replay:
    """Broken: what the first pass gave."""
    out = run()
    return lambda: out


def refused(run: Replay) -> Replay:
    raise RuntimeError("operation not permitted when stream is capturing")


@pytest.mark.parametrize("broken", [frozen_lengths, refused])
def test_recordings_that_are_wrong_or_cannot_be_made_are_not_used(
    broken: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Control for the comparison, too: no one sees a score of the broken one."""
    own = run(CausalModel(make("llama")), PROMPTS, PARAMS, gamma=0)[0]
    model = graphed(capture=broken)
    with caplog.at_level(logging.WARNING, logger="foresay"):
        assert run(model, PROMPTS, PARAMS, gamma=0)[0] == own
    assert model.graphs is not None
    assert model.graphs.off is not None
    assert sum("not captured" in record.getMessage() for record in caplog.records) == 1


def test_prompts_are_not_captured() -> None:
    model = graphed(capture=refused)
    cache = cached(model, [40])
    passes(model, cache, ModelInput(torch.full((1, 40), 7), [40]), 3)
    assert model.graphs is not None
    assert model.graphs.off is None


def test_passes_without_scores_are_not_captured() -> None:
    """Prefills: nothing of them could be compared."""
    cache = cached(graphed(), [5])
    given = ModelInput(torch.full((1, 8), 7), [8])
    assert Shape.of(given, cache) is not None
    assert Shape.of(dataclasses.replace(given, logits=Logits.NONE), cache) is None


def wrong_states(run: Replay) -> Replay:
    """Broken: hidden states that the pass does not give."""
    taped = recorded(run)

    def replay() -> Any:
        scores, states = taped()
        return scores, {layer: state + 1 for layer, state in states.items()}

    return replay


def test_hidden_states_are_compared_too() -> None:
    model = graphed(capture=wrong_states)
    cache = cached(model, [5])
    passes(model, cache, ModelInput(torch.full((1, 2), 7), [2]), 4)
    assert replays(model) == 3
    passes(model, cache, ModelInput(torch.full((1, 2), 7), [2], hidden_layers=(2,)), 4)
    assert model.graphs is not None
    assert model.graphs.off is not None and "hidden states of layer 2" in model.graphs.off


def differences_near_the_limit(model: CausalModel, counts: tuple[int, int]) -> list[float]:
    """Largest difference of each row's scores from those of its text alone; the first row ends one token before the limit."""
    limit = model.max_length
    lengths = [limit - counts[0] - 1, 5]
    ids = torch.randint(2, VOCAB, (2, limit), generator=torch.Generator().manual_seed(2))
    cache = model.new_cache()
    cache.add_rows(2)
    model.forward(ModelInput(ids[:, : lengths[0]], lengths), cache)
    fed = torch.stack([row[n : n + max(counts)] for row, n in zip(torch.cat([ids, ids], 1), lengths, strict=True)])
    scores = model.forward(ModelInput(fed, counts), cache).scores()
    wanted = [
        model.uncached(ids[i : i + 1, : n + k])[0, -k:] for i, (n, k) in enumerate(zip(lengths, counts, strict=True))
    ]
    return [float((scores[i, :k] - wanted[i]).detach().abs().max()) for i, k in enumerate(counts)]


@pytest.mark.parametrize("counts", [(9, 30), (3, 9)])
def test_padding_after_the_last_position_changes_no_rotation(counts: tuple[int, int]) -> None:
    """Frequencies depend on the highest position of a pass, which padding may raise above the model's limit."""
    model = CausalModel(make("phi3_longrope"))
    model.use_fused()
    assert max(differences_near_the_limit(model, counts)) < 1e-4
    assert model.fused is not None
    model.fused._position_limit = None
    assert max(differences_near_the_limit(model, counts)) > 1e-2, "control"


def test_only_rotations_that_read_no_value_are_captured() -> None:
    for family, static in (("llama", True), ("gemma2", True), ("phi3_longrope", False)):
        model = CausalModel(make(family))
        model.use_fused()
        assert model.fused is not None
        assert model.fused.static_rotary == static


def test_nothing_is_captured_if_the_user_asks_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SWITCH, "0")
    model = graphed(capture=refused)
    run(model, PROMPTS, PARAMS, gamma=0)
    assert model.graphs is not None
    assert (model.graphs.off, model.graphs.replays) == ("FORESAY_GRAPHS=0 is set", 0)
