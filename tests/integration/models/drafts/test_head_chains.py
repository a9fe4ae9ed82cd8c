"""Drafts of a head on the kernels: a chain in one call has the bits of single passes, a tree the nodes of a search by them."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from foresay.decoding.capabilities import Capabilities
from foresay.decoding.distributions import Distributions
from foresay.decoding.outcome import Step
from foresay.decoding.rows import Row, Rows
from foresay.decoding.sampling_params import SamplingParams
from foresay.decoding.stopping import CONFIDENCES, Reads, Stopping, StoppingRule
from foresay.drafters import HeadDrafter
from foresay.drafters.feature_cache import FeatureCache
from foresay.drafters.hidden_states import BRANCHES
from foresay.lengths import ConfidenceLength, ConstantLength, ThroughputLength
from foresay.models.cache.slot_cache import SlotCache
from foresay.models.cpu.chain import NativeChain
from foresay.models.drafts import head as head_module
from foresay.models.drafts.head import HeadModel
from foresay.models.huggingface.causal import CausalModel
from foresay.models.huggingface.linears import freeze_linears, quantizer, unquantized
from helpers import passes
from helpers.families import VOCAB, make
from helpers.heads import chain, fed, random_head
from helpers.making import By
from helpers.support import run

MOST = 9
PROMPTS = [[5, 6, 1, 2, 3, 4, 5], [2], [1, 2, 1]]
PARAMS = SamplingParams(max_new_tokens=24, ignore_eos=True)


@functools.cache
def target(dtype: torch.dtype = torch.float32, *, frozen: bool = False, vocab: int = VOCAB) -> CausalModel:
    weights = make("llama", 3, vocab_size=vocab, tie_word_embeddings=False).to(dtype)
    if frozen:  # its embedding reads quantized rows
        freeze_linears(weights, quantizer(8), all_dtypes=True)
    model = CausalModel(weights)
    model.use_fused()
    return model


def pairs(head: HeadModel, length: int, known: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens [length + known] and features [length + known, D]."""
    numbers = torch.Generator().manual_seed(length)
    tokens = torch.randint(2, VOCAB, (length + known,), generator=numbers)
    return tokens, torch.randn(length + known, head.width, generator=numbers).to(head.dtype)


def started(head: HeadModel, length: int) -> SlotCache:
    """A cache with `length` random pairs."""
    tokens, features = pairs(head, length, 0)
    cache: SlotCache = passes.started(head)
    fed(head, cache, tokens, features)
    return cache


def stepwise(head: HeadModel, length: int, known: int, most: int) -> tuple[list[int], list[float], torch.Tensor]:
    """Tokens after the known pairs by single passes, their confidences, and the keys and values that they wrote."""
    cache = started(head, length)
    ids: list[int] = []
    confidences = []
    tokens, features = pairs(head, length, known)
    more, after = tokens[length:], features[length:]
    while len(ids) < most:
        scores, after = fed(head, cache, more, after)
        more = scores.argmax(-1, keepdim=True)
        confidences.append(float(Distributions(more[None], scores=scores[None, None]).confidence(more[None])))
        ids.append(int(more))
    return ids, confidences, written(cache, length, known + most - 1)


def at_once(
    head: HeadModel, length: int, known: int, most: int, rule: StoppingRule | None = None, ends: tuple[int, ...] = ()
) -> tuple[list[int], list[float], SlotCache]:
    """The same in one call, and the cache."""
    cache = started(head, length)
    tokens, features = pairs(head, length, known)
    drawn = head.draft_at_once(tokens[length:], features[length:], cache, most, ends, rule or StoppingRule())
    assert drawn is not None
    return *drawn, cache


def written(cache: SlotCache, length: int, most: int) -> torch.Tensor:
    """Keys and values after the first `length` slots."""
    before, cache.lengths[0] = cache.lengths[0], length + most
    keys, values = cache.read(0, 0, 1, length + most)
    cache.lengths[0] = before
    return torch.cat([keys, values], -1)[:, :, length:].clone()


KINDS: dict[str, tuple[torch.dtype, Any, dict[str, Any]]] = {
    "float32": (torch.float32, unquantized, {}),
    "bf16": (torch.bfloat16, unquantized, {"ids": range(1, 80, 3)}),
    "8 bits": (torch.bfloat16, quantizer(8), {"ids": range(1, 80, 3)}),
    "4 bits": (torch.bfloat16, quantizer(4), {"before": True}),
    "normalized": (torch.float32, unquantized, {"before": True, "ids": range(1, 80, 3)}),
    "fed normalized": (torch.bfloat16, unquantized, {"before": True, "parts": {"norm_output": True, "window": 6}}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_chain_has_the_bits_of_single_passes(kind: str) -> None:
    dtype, quantized, more = KINDS[kind]
    for length, known, frozen in ((1, 1, True), (40, 1, False), (40, 4, True), (3, 9, False)):
        model = target(dtype, frozen=frozen)
        for seed in range(20):
            head = HeadModel(random_head(model, seed=seed, **more), model, make=quantized)
            wanted, confidences, states = stepwise(head, length, known, MOST)
            if len(set(wanted)) > 2:  # random heads often repeat a token
                break
        assert len(set(wanted)) > 2
        found, certain, cache = at_once(head, length, known, MOST)
        assert found == wanted and cache.lengths == [length + known]
        assert torch.equal(written(cache, length, known + MOST - 1), states)
        assert certain == pytest.approx(confidences, rel=1e-5)


def test_other_bits_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Controls: in bf16 the next pass reads rounded numbers; every known pair is read, not the last one alone."""
    model = target()
    head = HeadModel(random_head(model), model)
    _, _, states = stepwise(head, 20, 3, MOST)
    cache, (tokens, features) = started(head, 20), pairs(head, 20, 3)
    known = tokens[20:].clone()
    known[0] += 1
    head.draft_at_once(known, features[20:], cache, MOST, (), StoppingRule())
    assert not torch.equal(written(cache, 20, MOST + 2)[:, :, 3:], states[:, :, 3:])
    model = target(torch.bfloat16)
    _, _, states = stepwise(HeadModel(random_head(model), model, make=quantizer(8)), 20, 2, MOST)
    make = NativeChain
    monkeypatch.setattr(head_module, "NativeChain", lambda *parts, **how: make(*parts[:4], torch.float32, **how))
    head = HeadModel(random_head(model), model, make=quantizer(8))
    assert not torch.equal(written(at_once(head, 20, 2, MOST)[2], 20, MOST + 1), states)


def test_a_chain_ends_by_its_rule_at_its_limit_and_at_an_end_token() -> None:
    model = target()
    head = HeadModel(random_head(model, gain=1.0), model)
    ids, confidences, _ = stepwise(head, 12, 2, MOST)
    weights, ends = tuple(0.4 + 0.05 * i for i in range(10)), set()
    for threshold in (0.9, 0.6, 0.4, 0.3, 0.2, 0.05, 0.0):
        so_far, count = 0.95, 0
        for confidence in confidences:
            so_far, count = so_far * weights[min(int(10 * confidence), 9)], count + 1
            if not so_far > threshold:
                break
        rule = StoppingRule(Reads.CONFIDENCE, threshold, 0, (0.95,), weights)
        assert at_once(head, 12, 2, MOST, rule)[0] == ids[:count]
        ends.add(count)
    assert len(ends) > 3
    assert at_once(head, 12, 2, 4)[0] == ids[:4]
    assert at_once(head, 12, 2, MOST, None, (VOCAB - 1, ids[2]))[0] == ids[: ids.index(ids[2]) + 1]
    with pytest.raises(ValueError, match="needs 10"):
        StoppingRule(weights=(1.0,))


@pytest.mark.parametrize("length", [ConstantLength(5), ThroughputLength(), ConfidenceLength(0.2, high=5)])
def test_who_drafts_in_one_call(length: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Single greedy rows, under a policy whose rule has the form; the output is plain decoding's, and drafts are the same."""
    model = target(vocab=7)
    head = HeadModel(random_head(model, seed=8), model)
    calls = []
    original = NativeChain.draft
    monkeypatch.setattr(NativeChain, "draft", lambda self, *args: calls.append(1) or original(self, *args))

    def decoded(batch: int, **more: Any) -> tuple[list[list[int]], list[tuple[int, int]]]:
        calls.clear()
        params = SamplingParams(max_new_tokens=20, ignore_eos=True, **more)
        drafter = HeadDrafter(head, 7)
        out, steps, engine = run(model, PROMPTS, params, drafter=drafter, policy=length, max_batch_size=batch)
        assert engine.draft_failures == 0
        return out, [(step.num_drafted, step.num_accepted) for step in steps]

    plain = run(model, PROMPTS, SamplingParams(max_new_tokens=20, ignore_eos=True), gamma=0)[0]
    whole = decoded(1)
    assert whole[0] == plain and bool(calls) == (not isinstance(length, ConfidenceLength))
    if isinstance(length, ConstantLength):
        with monkeypatch.context() as patch:
            patch.setattr(HeadModel, "drafts_at_once", False)
            assert decoded(1) == whole, "token by token"
        assert not calls
        decoded(1, temperature=1.0, seed=3)
        assert not calls, "sampled drafts are drawn one by one"
        decoded(1, repetition_penalty=1.2)
        assert not calls, "as those whose scores are processed"
        assert decoded(3)[0] == plain


class Weighted(ConstantLength):
    """Ends drafts by their confidences, and keeps those that were read in each step."""

    def __init__(self) -> None:
        super().__init__(6)
        self.read: list[list[float]] = []

    def budget(self, rows: Rows) -> list[int]:
        CONFIDENCES.drop(rows)
        return super().budget(rows)

    def rule(self, rows: Rows) -> StoppingRule:
        weights = tuple(0.3 + 0.06 * i for i in range(10))
        return StoppingRule(Reads.CONFIDENCE, 0.3, 0, (0.9,), weights, 0.05)

    def observe(self, rows: Rows, steps: Sequence[Step]) -> None:
        self.read += CONFIDENCES.of(rows)


def test_one_call_evaluates_the_rule_and_notes_confidences_as_single_passes_do(monkeypatch: pytest.MonkeyPatch) -> None:
    model = target(vocab=7)
    head = HeadModel(random_head(model, seed=8, gain=0.8), model)

    def decoded() -> tuple[list[int], list[list[float]]]:
        policy = Weighted()
        _, steps, engine = run(model, PROMPTS, PARAMS, drafter=HeadDrafter(head, 7), policy=policy, max_batch_size=1)
        assert engine.draft_failures == 0
        return [step.num_drafted for step in steps], policy.read

    counts, read = decoded()
    assert {1, 2, 3} <= set(counts) and any(len(one) > 1 for one in read)
    with monkeypatch.context() as patch:
        patch.setattr(HeadModel, "drafts_at_once", False)
        single = decoded()
        patch.setattr(Weighted, "rule", lambda self, rows: StoppingRule(Reads.CONFIDENCE, 0.3, 0, (0.9,)))
        other = decoded()
    assert single[0] == counts and [pytest.approx(one, rel=1e-5) for one in single[1]] == read
    assert other[0] != counts, "control: another rule"


class Two(ConstantLength):
    """Drafts end after two tokens, by a rule that no numbers state."""

    def stopping(self, rows: Rows) -> Stopping:
        return By(lambda step: step.index + 1 < 2, rows)


class TwoMeasured(ThroughputLength):
    """The same over measured lengths."""

    stopping = Two.stopping  # type: ignore[assignment]


@pytest.mark.parametrize("length", [lambda: Two(5), TwoMeasured], ids=["constant", "measured"])
def test_a_policy_with_a_rule_of_its_own_is_called_for_each_token(length: Any) -> None:
    model = target(vocab=7)
    drafter = HeadDrafter(HeadModel(random_head(model, seed=8), model), 7)
    _, steps, engine = run(model, PROMPTS, PARAMS, drafter=drafter, policy=length(), max_batch_size=1)
    assert engine.draft_failures == 0 and max(step.num_drafted for step in steps) == 2


def test_a_failure_in_the_call_ends_the_draft_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    model = target(vocab=7)
    drafter = HeadDrafter(HeadModel(random_head(model, seed=8), model), 7)

    def failing(self: NativeChain, *args: Any) -> Any:
        raise RuntimeError("no more")

    monkeypatch.setattr(NativeChain, "draft", failing)
    out, steps, engine = run(model, PROMPTS, PARAMS, drafter=drafter, gamma=4, max_batch_size=1)
    assert engine.draft_failures > 0 and {step.num_drafted for step in steps} == {0}
    assert out == run(model, PROMPTS, PARAMS, gamma=0)[0]


def test_scores_of_more_tokens_than_the_target_has_are_cut_elsewhere() -> None:
    """The kernels would draft tokens without an embedding."""
    model = target()
    made = random_head(model)
    wide = torch.nn.Linear(made.module.norm.weight.shape[0], VOCAB + 30, bias=False)
    made.module.lm_head = wide
    assert HeadModel(made, model)._chain is None


# -- trees -------------------------------------------------------------------------------------------------------------

NODES, WIDTH = 13, HeadDrafter.width
Path = tuple[int, ...]


def row_of(head: HeadModel, length: int) -> Row:
    """A row of random tokens and hidden states, greedy."""
    numbers = torch.Generator().manual_seed(length)
    tokens = torch.randint(2, VOCAB, (length + 1,), generator=numbers).tolist()
    row = Row(0, tokens, SamplingParams(max_new_tokens=60), limit=length + 60)
    width = head.target.model.config.hidden_size
    row.prompt_hidden = {
        layer: torch.randn(length, width, generator=numbers).to(head.dtype) for layer in head.hidden_layers
    }
    return row


def probabilities(head: HeadModel, row: Row, path: Path) -> torch.Tensor:
    """The head's distribution after the row and a path, by single passes over a cache of its own."""
    tokens, features = torch.from_numpy(row.tokens[1:]), head.features(head.joined(row.prompt_hidden))
    return chain(head, tokens, features, path)[-1].float().softmax(-1)


def searched(head: HeadModel, row: Row) -> set[Path]:
    """Level by level, the children of the most probable new nodes among the best of all."""
    nodes: dict[Path, float] = {}
    level: list[Path] = [()]
    while level:
        newest = {}
        for path in level:
            top = probabilities(head, row, path).topk(BRANCHES)
            for p, token in zip(top.values.tolist(), top.indices.tolist(), strict=True):
                newest[(*path, token)] = nodes.get(path, 1.0) * p
        nodes |= newest
        best = sorted(nodes, key=lambda path: -nodes[path])[:NODES]
        level = sorted((path for path in newest if path in best), key=lambda path: -nodes[path])[:WIDTH]
    return set(best)


def grown(head: HeadModel, row: Row) -> set[Path]:
    rows = Rows([row], capabilities=Capabilities(trees=True))
    drafter = HeadDrafter(head, VOCAB, nodes=NODES)
    drafter.admit(rows, 0)
    proposal = drafter.propose(rows, [NODES], ConstantLength(NODES))
    assert proposal.failure is None and proposal.parents is not None
    nodes: list[Path] = []
    for token, parent in zip(proposal.token_ids[0].tolist(), proposal.parents[0].tolist(), strict=True):
        nodes.append((*(nodes[parent] if parent >= 0 else ()), token))
    return set(nodes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_tree_has_the_nodes_of_a_search_by_single_passes(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    model = CausalModel(make("llama", 3, vocab_size=VOCAB, tie_word_embeddings=False).to(dtype))
    model.use_fused()
    heads = [HeadModel(random_head(model, gain=1.2, seed=seed), model) for seed in range(12)]
    rows = [row_of(head, 4 + i) for i, head in enumerate(heads)]
    wanted = [searched(head, row) for head, row in zip(heads, rows, strict=True)]
    assert sum(max(map(len, nodes)) > 3 for nodes in wanted) > 3, "no tree is deep"
    assert [grown(head, row) for head, row in zip(heads, rows, strict=True)] == wanted
    monkeypatch.setattr(FeatureCache, "keep_nodes", lambda self, index: None)
    assert [grown(head, row) for head, row in zip(heads, rows, strict=True)] != wanted, "control: nodes were dropped"
