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
from foresay.errors import UnsupportedModelError
from foresay.models.cache.recurrent_cache import RecurrentCache
from foresay.models.cache.snapshots import MAX_BACKLOG, Snapshot, Snapshots
from foresay.models.huggingface.causal import CausalModel
from foresay.models.huggingface.early_exit import first_layers
from foresay.models.huggingface.recurrent import RecurrentModel
from foresay.models.sources.load_options import LoadOptions
from foresay.models.sources.wrapping import wrap
from helpers.comparing import NEW, prompts
from helpers.families import RECURRENT, VOCAB, make
from helpers.guarantees import assert_greedy, made, on, outputs_of, reference_of, target_of
from helpers.passes import in_pieces, scores, started
from helpers.support import Never, Sometimes, run

SOME = ("mamba", "qwen3_5", "jamba", "zamba2")
"""Families of different kinds, for tests that need no more."""


@pytest.mark.parametrize("family", SOME)
def test_constant_rejection_ends_in_passes_without_a_draft(family: str) -> None:
    [cell] = on("own code", family)
    wanted, params = outputs_of(cell), SamplingParams(max_new_tokens=NEW)
    ours, steps, _ = run(target_of(cell), prompts(), params, drafter=Never(wanted, VOCAB), gamma=3)
    for prompt, one, theirs in zip(prompts(), ours, wanted, strict=True):
        if one != theirs:
            assert_greedy(reference_of(family), prompt, one)
    own = [step.num_drafted for step in steps if step.request_id == 0]
    assert own.count(0) >= 2, "a backlog must end"
    assert all(any(own[i : i + MAX_BACKLOG + 2]) for i in range(NEW - MAX_BACKLOG - 2)), "drafts must go on"


@pytest.mark.parametrize("family", RECURRENT)
def test_pieces_of_any_size_score_what_the_whole_text_scores(family: str) -> None:
    """A pass continues from the state of the one before, whatever their sizes: the family's own code often does not."""
    target = RecurrentModel(make(family))
    ids = torch.randint(2, VOCAB, (1, 210), generator=torch.Generator().manual_seed(1))
    found = in_pieces(target, ids[0], [70, 1, 7, 7, 70, 1, 54])
    with torch.inference_mode():
        expected = target.uncached(ids)
    spread = float(expected.max() - expected.min())
    assert float((found - expected[0]).abs().max()) < 1e-3 * spread


@pytest.mark.parametrize(("family", "weights"), [(one, ("auto", "int8")[i % 2]) for i, one in enumerate(RECURRENT)])
def test_a_family_over_weights_arranged_for_the_processor(family: str, weights: str) -> None:
    plain_model, options = make(family), LoadOptions(weights=weights)
    wrapped = wrap(family, copy.deepcopy(plain_model), None, optimise=True, options=options)
    assert isinstance(wrapped.model, RecurrentModel)
    ids = torch.randint(2, VOCAB, (1, 12), generator=torch.Generator().manual_seed(1))
    own, arranged = (scores(model, ids) for model in (RecurrentModel(plain_model), wrapped.model))
    spread = float(own.max() - own.min())
    assert float((own - arranged).abs().median()) < (1e-4 if weights == "auto" else 5e-2) * spread


def test_states_at_the_ends_of_prefill_passes_are_kept() -> None:
    target = RecurrentModel(make("mamba2"))
    cache = started(target)
    ids = torch.randint(2, VOCAB, (1, 60), generator=torch.Generator().manual_seed(1))
    for start in range(0, 60, 10):
        target.forward(ModelInput(ids[:, start : start + 10], [10], logits=Logits.NONE), cache)
    assert [one.length for one in cache.states.held(0)] == [20, 40, 60]
    assert [cache.prefix_length(0, length) for length in (19, 20, 49, 60)] == [0, 20, 40, 60]


def test_broken_rewinding_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The length is set back, the state is not; one token off; and accepted tokens that are not fed again."""
    [cell] = on("own code", "mamba2")
    wanted = outputs_of(cell)
    rewind, truncate = Snapshots.rewind, RecurrentCache.truncate

    def not_restored(self: Snapshots[Any], row: int, length: int) -> int:
        history = self._rows[row]
        found, last = history.longest(length), history.undo[-1]
        history.undo = [Snapshot(found.length, last.state)]
        return found.length

    def one_off(self: Snapshots[Any], row: int, length: int) -> int:
        return min(rewind(self, row, length) + 1, length)

    def dropped(self: RecurrentCache, lengths: Sequence[int]) -> None:
        before = list(self.lengths)
        truncate(self, lengths)
        self.lengths[: len(lengths)] = map(min, before, lengths)

    faults: list[tuple[Any, str, Any]] = [(Snapshots, "rewind", not_restored), (Snapshots, "rewind", one_off)]
    for owner, name, wrong in (*faults, (RecurrentCache, "truncate", dropped)):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, wrong)
            target, drafter = made(cell), Sometimes(wanted, VOCAB)
            ours, _, _ = run(target, prompts(), SamplingParams(max_new_tokens=NEW), drafter=drafter, gamma=5)
        assert sum(one != theirs for one, theirs in zip(ours, wanted, strict=True)) >= 4


def test_what_is_refused() -> None:
    """Families whose states are in no common cache, by name."""
    model = RecurrentModel(make("mamba2"))
    with pytest.raises(UnsupportedModelError, match="recurrent"):
        first_layers(model, 1)
    assert not model.capabilities.trees
    with pytest.raises(UnsupportedModelError, match="recurrent layers"):
        CausalModel(make("mamba2"))
    sizes = {"vocab_size": VOCAB, "hidden_size": 64, "num_hidden_layers": 2, "num_heads": 4, "num_attention_heads": 4}
    for kind in ("minimax", "recurrent_gemma", "rwkv", "xlstm"):
        other = AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**sizes))
        with pytest.raises(UnsupportedModelError, match=f"(?i){kind.replace('_', '')}.*no common cache"):
            RecurrentModel(other)


def _held(cache: RecurrentCache) -> int:
    """Bytes of the memory that snapshots keep alive."""
    states = [one.state or {} for row in range(len(cache.states)) for one in cache.states.held(row)]
    stores = [tensor.untyped_storage() for state in states for tensor in state.values()]
    return sum({store.data_ptr(): store.nbytes() for store in stores}.values())


@pytest.mark.parametrize("family", ["mamba", "mamba2", "falcon_h1", "qwen3_5"])
def test_states_keep_no_more_memory_than_is_counted(family: str) -> None:
    """Neither the inputs of a long pass nor the other rows of a ragged one."""
    model = RecurrentModel(make(family))
    cache = started(model, 3)
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
    [cell] = on("own code", "mamba2")
    wanted, target, params = outputs_of(cell), made(cell), SamplingParams(max_new_tokens=NEW, ignore_eos=True)
    passes: list[int] = []
    target.model.register_forward_hook(lambda *_: passes.append(1))  # the body alone is called for no scores

    def passes_of_a_step() -> float:
        passes.clear()
        ours, steps, _ = run(target, prompts(), params, drafter=Sometimes(wanted, VOCAB), gamma=4)
        assert ours == wanted
        return len(passes) / max(sum(step.request_id == i for step in steps) for i in range(len(wanted)))

    assert passes_of_a_step() < 1.7
    monkeypatch.setattr(RecurrentCache, "shortened", lambda self, budget, sizes, free: list(budget))
    assert passes_of_a_step() > 2
