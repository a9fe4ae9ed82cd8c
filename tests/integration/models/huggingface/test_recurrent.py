"""Models whose states cannot be truncated give transformers' greedy output, token for token, in float32.

Ragged rows join while others decode, and drafts are partly rejected, fully accepted and absent. The controls break the rewinding.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from foresay.decoding.protocols import Logits, ModelInput
from foresay.decoding.sampling_params import SamplingParams
from foresay.drafters import PromptLookup
from foresay.errors import UnsupportedModelError
from foresay.models.cache.recurrent_cache import RecurrentCache
from foresay.models.cache.snapshots import MAX_BACKLOG, Snapshot, Snapshots
from foresay.models.huggingface.causal import CausalModel
from foresay.models.huggingface.early_exit import first_layers
from foresay.models.huggingface.recurrent import RecurrentModel
from foresay.models.sources.load_options import LoadOptions
from foresay.models.sources.wrapping import wrap
from helpers.comparing import NEW, assert_same, plain, prompts, reference_of
from helpers.families import RECURRENT, VOCAB, make
from helpers.support import Never, Sometimes, run

SOME = ("mamba", "qwen3_5", "jamba", "zamba2")
"""Families of different kinds, for tests that need no more."""


@pytest.mark.parametrize("family", SOME)
def test_constant_rejection_ends_in_passes_without_a_draft(family: str) -> None:
    reference, wanted = reference_of(family)
    target, params = RecurrentModel(copy.deepcopy(reference)), SamplingParams(max_new_tokens=NEW)
    ours, steps, _ = run(target, prompts(), params, drafter=Never(wanted, VOCAB), gamma=3)
    for prompt, one, theirs in zip(prompts(), ours, wanted, strict=True):
        assert_same(reference, prompt, one, theirs)
    own = [step.num_drafted for step in steps if step.request_id == 0]
    assert own.count(0) >= 2, "a backlog must end"
    assert all(any(own[i : i + MAX_BACKLOG + 2]) for i in range(NEW - MAX_BACKLOG - 2)), "drafts must go on"


PIECES = [(1, 40), (7, 105), (70, 210)]


@pytest.mark.parametrize(
    ("family", "piece", "length"),
    [(one, *piece) for i, one in enumerate(RECURRENT) for j, piece in enumerate(PIECES) if one in SOME or (i + j) % 3],
)
def test_pieces_of_any_size_score_what_the_whole_text_scores(family: str, piece: int, length: int) -> None:
    """A pass continues from the state of the one before, whatever their sizes: the family's own code often does not."""
    target = RecurrentModel(make(family))
    ids = torch.randint(2, VOCAB, (1, length), generator=torch.Generator().manual_seed(1))
    cache = target.new_cache()
    cache.add_rows(1)
    pieces = [ids[:, start : start + piece] for start in range(0, ids.shape[1], piece)]
    scores = [target.forward(ModelInput(one, [one.shape[1]]), cache).scores() for one in pieces]
    with torch.inference_mode():
        expected = target.uncached(ids)
    spread = float(expected.max() - expected.min())
    assert float((torch.cat(scores, 1) - expected).abs().max()) < 1e-3 * spread


@pytest.mark.parametrize(("family", "weights"), [(one, ("auto", "int8")[i % 2]) for i, one in enumerate(RECURRENT)])
def test_a_family_over_weights_arranged_for_the_processor(family: str, weights: str) -> None:
    plain_model, options = make(family), LoadOptions(weights=weights)
    wrapped = wrap(family, copy.deepcopy(plain_model), None, optimise=True, options=options)
    assert isinstance(wrapped.model, RecurrentModel)
    ids = torch.randint(2, VOCAB, (1, 12), generator=torch.Generator().manual_seed(1))
    scores = []
    for model in (RecurrentModel(plain_model), wrapped.model):
        cache = model.new_cache()
        cache.add_rows(1)
        scores.append(model.forward(ModelInput(ids, [12]), cache).scores())
    spread = float(scores[0].max() - scores[0].min())
    assert float((scores[0] - scores[1]).abs().median()) < (1e-4 if weights == "auto" else 5e-2) * spread


def test_states_at_the_ends_of_prefill_passes_are_kept() -> None:
    target = RecurrentModel(make("mamba2"))
    cache = target.new_cache()
    cache.add_rows(1)
    ids = torch.randint(2, VOCAB, (1, 60), generator=torch.Generator().manual_seed(1))
    for start in range(0, 60, 10):
        target.forward(ModelInput(ids[:, start : start + 10], [10], logits=Logits.NONE), cache)
    assert [one.length for one in cache.states.held(0)] == [20, 40, 60]
    assert [cache.prefix_length(0, length) for length in (19, 20, 49, 60)] == [0, 20, 40, 60]


def _broken(monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    if how == "not restored":  # the length is set back, the state is not

        def rewind(self: Snapshots[Any], row: int, length: int) -> int:
            history = self._rows[row]
            found, last = history.longest(length), history.undo[-1]
            history.undo = [Snapshot(found.length, last.state)]
            return found.length

        monkeypatch.setattr(Snapshots, "rewind", rewind)
    elif how == "one token off":
        intact = Snapshots.rewind
        monkeypatch.setattr(Snapshots, "rewind", lambda self, row, length: min(intact(self, row, length) + 1, length))
    else:  # the backlog is dropped: the cache pretends to have the accepted tokens
        truncate = RecurrentCache.truncate

        def dropped(self: RecurrentCache, lengths: Sequence[int]) -> None:
            before = list(self.lengths)
            truncate(self, lengths)
            for i, length in enumerate(lengths):
                self.lengths[i] = min(before[i], length)

        monkeypatch.setattr(RecurrentCache, "truncate", dropped)


@pytest.mark.parametrize("how", ["not restored", "one token off", "the backlog dropped"])
def test_broken_rewinding_is_seen(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    reference, wanted = reference_of("mamba2")
    target = RecurrentModel(copy.deepcopy(reference))
    _broken(monkeypatch, how)
    drafter, params = Sometimes(wanted, VOCAB), SamplingParams(max_new_tokens=NEW)
    ours, _, _ = run(target, prompts(), params, drafter=drafter, gamma=5)
    assert sum(one != theirs for one, theirs in zip(ours, wanted, strict=True)) >= 4


def test_what_is_refused() -> None:
    model = RecurrentModel(make("mamba2"))
    with pytest.raises(UnsupportedModelError, match="recurrent"):
        first_layers(model, 1)
    assert not model.capabilities.trees
    with pytest.raises(UnsupportedModelError, match="recurrent layers"):
        CausalModel(make("mamba2"))


def test_prompt_lookup_over_a_hybrid_in_a_batch() -> None:
    reference, _ = reference_of("falcon_h1")
    repeated = [(prompt * 12)[:24] for prompt in prompts()]
    target, params = RecurrentModel(copy.deepcopy(reference)), SamplingParams(max_new_tokens=NEW)
    ours, steps, _ = run(target, repeated, params, drafter=PromptLookup(), gamma=4)
    for prompt, one in zip(repeated, ours, strict=True):
        assert_same(reference, prompt, one, plain(reference, prompt, NEW))
    assert any(step.num_accepted for step in steps)


def _held(cache: RecurrentCache) -> int:
    """Bytes of the memory that snapshots keep alive."""
    states = [one.state or {} for row in range(len(cache.states)) for one in cache.states.held(row)]
    stores = [tensor.untyped_storage() for state in states for tensor in state.values()]
    return sum({store.data_ptr(): store.nbytes() for store in stores}.values())


@pytest.mark.parametrize("family", ["mamba", "mamba2", "falcon_h1", "qwen3_5"])
def test_states_keep_no_more_memory_than_is_counted(family: str) -> None:
    """Neither the inputs of a long pass nor the other rows of a ragged one."""
    model = RecurrentModel(make(family))
    cache = model.new_cache()
    cache.add_rows(3)
    ids = torch.randint(2, VOCAB, (3, 4), generator=torch.Generator().manual_seed(1))
    chunk = model.capabilities.prefill_chunk
    for row in range(3):
        for _ in range(5):
            model.forward(ModelInput(ids[:1, :1].expand(1, chunk), [chunk], row, logits=Logits.NONE), cache)
    lengths = [5 * chunk + 64] * 3
    for counts in ([1, 2, 4], [4, 1, 1], [2, 2, 2], [3, 1, 4]):
        model.forward(ModelInput(ids, counts), cache)
        cache.truncate(cache.lengths)
        reported = cache.nbytes - super(RecurrentCache, cache).nbytes
        assert 0 < _held(cache) <= 1.05 * reported
        assert reported <= model.cache_bytes(lengths) - 3 * max(lengths) * model._slot_bytes


def test_rows_of_a_batch_share_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row that feeds tokens again drafts fewer, so that passes are of one length. Control: with full drafts they are not."""
    reference, wanted = reference_of("mamba2")
    target, params = RecurrentModel(copy.deepcopy(reference)), SamplingParams(max_new_tokens=NEW, ignore_eos=True)
    original, passes = RecurrentModel._run, [0]

    def counted(self: Any, model_input: ModelInput, *given: Any, **more: Any) -> Any:
        passes[0] += model_input.logits is not Logits.NONE
        return original(self, model_input, *given, **more)

    monkeypatch.setattr(RecurrentModel, "_run", counted)

    def passes_of_a_step() -> float:
        passes[0] = 0
        ours, steps, _ = run(target, prompts(), params, drafter=Sometimes(wanted, VOCAB), gamma=4)
        assert ours == wanted
        return passes[0] / max(sum(step.request_id == i for step in steps) for i in range(len(wanted)))

    assert passes_of_a_step() < 1.7
    monkeypatch.setattr(RecurrentCache, "shortened", lambda self, budget, sizes, free: list(budget))
    assert passes_of_a_step() > 2


@pytest.mark.parametrize("kind", ["minimax", "recurrent_gemma", "rwkv", "xlstm"])
def test_families_whose_states_are_in_no_common_cache_are_refused_by_name(kind: str) -> None:
    sizes = {"vocab_size": VOCAB, "hidden_size": 64, "num_hidden_layers": 2, "num_heads": 4, "num_attention_heads": 4}
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**sizes))
    with pytest.raises(UnsupportedModelError, match=f"(?i){kind.replace('_', '')}.*no common cache"):
        RecurrentModel(model)
