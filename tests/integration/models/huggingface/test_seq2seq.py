"""Encoder-decoder models: greedy output equals transformers' `generate`, and sources stay with their rows."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from transformers import BartConfig, BartForCausalLM, MarianConfig, MarianMTModel, PreTrainedModel

from foresay.decoding.acceptance import make_rule
from foresay.decoding.protocols import Logits, ModelInput
from foresay.decoding.rows import Row, Rows
from foresay.decoding.sampling_params import SamplingParams
from foresay.engine import Engine
from foresay.errors import UnsupportedModelError
from foresay.lengths import ConstantLength
from foresay.models.cache.slot_cache import SlotCache
from foresay.models.hardware import CPU
from foresay.models.huggingface import attention
from foresay.models.huggingface.causal import CausalModel
from foresay.models.huggingface.frozen import FrozenLinear
from foresay.models.huggingface.self_check import check, probe, verified
from foresay.models.huggingface.seq2seq import Seq2SeqModel
from foresay.models.sources.wrapping import wrap
from helpers.comparing import assert_same
from helpers.families import PROBED_SEQ2SEQ, SEQ2SEQ, VOCAB, make, make_seq2seq
from helpers.seq2seq import NEW, greedy, reference_of, some_sources, starts_of, target_of
from helpers.support import PromptLookup, Sometimes, run

FAMILY = pytest.mark.parametrize("family", SEQ2SEQ)


# -- output and cache --------------------------------------------------------------------------------------------------


@FAMILY
def test_greedy_output_and_scores_are_those_of_transformers(family: str) -> None:
    """After every step the cache scores as a fresh pass, while rows join, leave at different times and move.

    The encoder runs once for each request.
    """
    (reference, wanted), target, sources = reference_of(family), target_of(family), some_sources()
    assert len({token for output in wanted for token in output}) > 5, "a model that repeats itself proves little"
    assert len({tuple(output) for output in wanted}) >= len(wanted) - 1, "outputs that ignore the source prove little"
    encoded: list[int] = []
    target.model.get_encoder().register_forward_pre_hook(
        lambda _, args, given: encoded.append(given["input_ids"].shape[1]), with_kwargs=True
    )
    engine = Engine(target, Sometimes(wanted, VOCAB), make_rule("speculative"), ConstantLength(5))
    outputs: dict[int, list[int]] = {}
    counts, start, steps, moved = (NEW, 18, 9, 14, 18, 12), target.decoder_start_token_id, list[Any](), 0
    while engine.has_work or len(outputs) < 6:
        if len(outputs) < (3 if len(steps) < 9 else 6):
            params = SamplingParams(max_new_tokens=counts[len(outputs)])
            outputs[engine.submit([start], params, source=sources[len(outputs)])] = []
            continue
        before = [row.request_id for row in engine._items]
        for step in engine.step():
            steps.append(step)
            outputs[step.request_id] += step.token_ids
        cache, rows = engine._cache, engine._items
        moved += [row.request_id for row in rows] != before[: len(rows)]
        assert isinstance(cache, SlotCache) and cache.sources is not None
        assert cache.lengths == [row.size - 1 for row in rows]
        assert cache.sources.lengths == [len(row.source) for row in rows]  # type: ignore[arg-type]
        if rows:
            assert_coherent(engine, cache, reference)
    assert engine.draft_failures == 0 and moved >= 2 and sorted(encoded) == sorted(map(len, sources))
    assert any(step.num_accepted < step.num_drafted for step in steps)
    assert any(step.num_accepted == step.num_drafted > 2 for step in steps)
    for source, ours, theirs in zip(sources, outputs.values(), wanted, strict=True):
        assert_same(reference, [start], ours, theirs[: len(ours)], source)


def assert_coherent(engine: Engine, cache: SlotCache, reference: PreTrainedModel) -> None:
    rows, before = engine._items, list(cache.lengths)
    last = torch.tensor([[int(row.tokens[-1])] for row in rows])
    cached = engine.target.forward(ModelInput(last, [1] * len(rows)), cache).scores()[:, 0]
    cache.truncate(before)
    for i, row in enumerate(rows):
        source, ids = torch.tensor([row.source.tolist()]), torch.tensor([row.tokens.tolist()])  # type: ignore[union-attr]
        with torch.no_grad():
            fresh = reference(input_ids=source, decoder_input_ids=ids).logits[0, -1]
        assert float((cached[i] - fresh).abs().max()) < 1e-4 * max(1.0, float(fresh.abs().max()))


@pytest.mark.parametrize("family", ["t5", "bart"])
def test_output_past_the_first_slots(family: str) -> None:
    model, source, target = reference_of(family)[0], some_sources()[1], target_of(family)
    ours, _, _ = run(target, starts_of(target, 1), SamplingParams(max_new_tokens=132), gamma=0, sources=[source])
    assert_same(model, [target.decoder_start_token_id], ours[0], greedy(model, source, 132), source)


def admitted(model: Seq2SeqModel, sources: Sequence[Sequence[int]]) -> SlotCache:
    cache = model.new_cache()
    rows = [Row(i, [0], SamplingParams(), limit=99, source=source) for i, source in enumerate(sources)]
    model.admit(Rows(rows), 0, cache)
    return cache


def test_sources_move_with_their_rows() -> None:
    model = target_of("bart")
    cache, other = admitted(model, some_sources((4, 9, 7))), admitted(model, some_sources((4, 9, 7))[2:])
    assert cache.nbytes == cache.sources.nbytes > 0
    model.forward(ModelInput(torch.ones(3, 2, dtype=torch.int64), [2, 1, 2]), cache)
    assert cache.nbytes > cache.sources.nbytes
    cache.rearrange([(2, 0)], 2)
    assert cache.lengths == [2, 1] and cache.sources.lengths == [7, 9]
    for layer in range(3):
        moved, own = cache.sources.read(layer, 0, 1, 7), other.sources.read(layer, 0, 1, 7)
        assert all(torch.equal(a, b) for a, b in zip(moved, own, strict=True))


@FAMILY
def test_hidden_states_of_the_requested_layers(family: str) -> None:
    reference, model, sources = reference_of(family)[0], target_of(family), some_sources()
    tokens = torch.tensor([[5, 6, 7, 8, 9], [11, 12, 13, 0, 0]])
    for logits in (Logits.ALL, Logits.NONE):
        given = ModelInput(tokens, [5, 3], hidden_layers=(1, 3), logits=logits)
        out = model.forward(given, admitted(model, sources[:2]))
        assert (out.logits is None) == (logits is Logits.NONE)
        for row, count in enumerate((5, 3)):
            inputs = {"input_ids": torch.tensor([sources[row]]), "decoder_input_ids": tokens[row : row + 1, :count]}
            with torch.no_grad():
                fresh = reference(**inputs, output_hidden_states=True).decoder_hidden_states
            for layer in (1, 3):
                torch.testing.assert_close(out.hidden[layer][row, :count], fresh[layer][0], atol=1e-4, rtol=1e-4)


# -- the self-check ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", [*SEQ2SEQ, *PROBED_SEQ2SEQ])
def test_the_self_check_passes_and_sees_what_is_wrong(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Controls: T5's bias, and BART's and Marian's embeddings, as the longest row has them; sources that are read too far."""
    model, intact, admit = Seq2SeqModel(make_seq2seq(family)), attention.current_pass, Seq2SeqModel.admit
    assert verified(model) == (family in SEQ2SEQ)
    assert probe(model) < 1e-5

    def of_longest_row() -> Any:
        at = copy.copy(intact())
        if at is not None:
            at.positions = at.positions.max(0, keepdim=True).values.expand_as(at.positions)
        return at

    def too_far(self: Seq2SeqModel, rows: Rows, first: int, cache: Any) -> None:
        admit(self, rows, first, cache)
        cache.sources.lengths = [max(cache.sources.lengths)] * len(rows)

    for owner, name, wrong in ((attention, "current_pass", of_longest_row), (Seq2SeqModel, "admit", too_far)):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, wrong)  # masks do not read the first
            assert probe(Seq2SeqModel(make_seq2seq(family))) > 1e-3
    if family == "t5":  # its bias as transformers computes it, from one past length
        while model._undo:
            model._undo.pop()()
        assert probe(model) > 1e-3


def test_models_that_cannot_be_decoded() -> None:
    unset = make_seq2seq("t5", decoder_start_token_id=None)
    two = MarianMTModel(MarianConfig(**{**SEQ2SEQ["marian"][1], "share_encoder_decoder_embeddings": False}))
    cases: list[tuple[Callable[[Any], Any], Any, str]] = [
        (Seq2SeqModel, make("llama"), "it has no encoder"),
        (Seq2SeqModel, two, "different vocabularies"),
        (Seq2SeqModel, unset, "its decoder_start_token_id is not set"),
        (CausalModel, make_seq2seq("t5"), "use Seq2SeqModel"),
    ]
    for build, weights, reason in cases:
        with pytest.raises(UnsupportedModelError, match=reason):
            build(weights)
    weights = make_seq2seq("led")
    before = weights.config._attn_implementation
    with pytest.raises(UnsupportedModelError, match="scores differently over ragged rows"):
        wrap("led", weights, None, optimise=False)
    assert weights.config._attn_implementation == before
    taken_out = BartForCausalLM(BartConfig(**{**make_seq2seq("bart").config.to_dict(), "is_decoder": True}))
    model = CausalModel(taken_out)
    assert not verified(model)
    with pytest.raises(UnsupportedModelError, match="model_type 'bart'"):
        check(model)


def own_hooks(model: PreTrainedModel) -> list[Any]:
    """The hooks that are foresay's; transformers has some too."""
    hooks = [h for m in model.modules() for h in (*m._forward_pre_hooks.values(), *m._forward_hooks.values())]
    return [hook for hook in hooks if hook.__module__.startswith("foresay")]


@FAMILY
def test_release_gives_the_model_back_as_it_was(family: str) -> None:
    reference = reference_of(family)[0]
    weights = copy.deepcopy(reference).train()
    model = Seq2SeqModel(weights)
    assert len(own_hooks(weights)) == (0 if "t5" in family else 2)
    names = {id(m): set(vars(m)) for m in reference.modules()}
    run(model, starts_of(model, 1), SamplingParams(max_new_tokens=4), sources=some_sources()[:1])
    assert model.release() is weights and weights.training and not own_hooks(weights)
    for own, theirs in zip(weights.modules(), reference.modules(), strict=True):
        assert set(vars(own)) == names[id(theirs)]
        if hasattr(theirs, "config"):
            assert own.config._attn_implementation == theirs.config._attn_implementation
    assert greedy(weights.eval(), some_sources()[1]) == reference_of(family)[1][1]


# -- same bits ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["t5_gated", "bart"])
def test_bf16_output_depends_neither_on_speculation_nor_on_the_batch(family: str) -> None:
    """With packed linear layers, where there are any; sources reach into the second span of slots."""
    weights = make_seq2seq(family).to(torch.bfloat16)
    target: Any = wrap(family, weights, None, optimise=True).model
    assert any(isinstance(module, FrozenLinear) for module in weights.modules()) == CPU.packs(torch.bfloat16)
    sources, params = some_sources((5, 140, 30, 11)), SamplingParams(max_new_tokens=24)
    plain = [run(target, starts_of(target, 1), params, gamma=0, sources=[source])[0][0] for source in sources]
    for drafter in (Sometimes(plain, VOCAB), PromptLookup(min_ngram=1)):
        ours, steps, _ = run(target, starts_of(target, 4), params, drafter=drafter, gamma=6, sources=sources)
        assert ours == plain
        assert sum(s.num_accepted for s in steps) > 10


def test_a_position_scores_the_same_bits_in_any_pass() -> None:
    """Alone or next to a row with a longer source, with one column or many."""
    model = Seq2SeqModel(make_seq2seq("t5").to(torch.bfloat16))
    tokens = torch.randint(2, VOCAB, (1, 9), generator=torch.Generator().manual_seed(1))
    scores = []
    for sources in (some_sources((6,)), [*some_sources((6,)), *some_sources((150, 20))]):
        for columns in (1, 3, 8):
            cache, rows = admitted(model, sources), len(sources)
            model.forward(ModelInput(tokens[:, :1].expand(rows, -1), [1] * rows), cache)
            out = model.forward(ModelInput(tokens[:, 1 : 1 + columns].expand(rows, -1), [columns] * rows), cache)
            scores.append(out.scores()[0, 0])
    assert all(torch.equal(one, scores[0]) for one in scores)
