"""Several multi-token-prediction layers: each draft token is that of its own layer in a pass over the whole text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.cache_utils import MtpCache as TransformersMtpCache

from foresay.decoding.proposal import Proposal
from foresay.decoding.protocols import LengthPolicy
from foresay.decoding.rows import Rows
from foresay.decoding.sampling_params import SamplingParams
from foresay.drafters import Cascade, HeadDrafter, Hybrid, SuffixDrafter
from foresay.drafters.draft_cache import MAX_CATCH_UP
from foresay.drafters.target_features import RowFeatures
from foresay.models.drafts import mtp
from foresay.models.drafts.mtp import MtpHead
from foresay.models.huggingface.causal import CausalModel
from helpers.mtp import save_with_mtp
from helpers.refusals import refused
from helpers.support import run

SIZE, LAYERS, DRAFT = 8, 3, 5
PROMPTS = [[5, 6, 1, 2, 3, 4, 5], [2, 7], [1, 2, 1], [6] * 9, [3, 1] * 8, [4]]
PARAMS = SamplingParams(max_new_tokens=14, ignore_eos=True)
SPECIALS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> MtpHead:
    folder = tmp_path_factory.mktemp("layers")
    save_with_mtp(folder, "deepseek_v3", seed=5, vocab_size=SIZE, num_nextn_predict_layers=LAYERS, **SPECIALS)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return MtpHead(CausalModel(model), name="tiny")


class Recorded(HeadDrafter):
    """Keeps the text before each draft, the number of its tokens that are committed, and the draft."""

    def __init__(self, head: MtpHead) -> None:
        super().__init__(head, SIZE)
        self.found: list[tuple[list[int], int, list[int]]] = []

    def propose(self, rows: Rows, budget: Sequence[int], policy: LengthPolicy) -> Proposal:
        out = super().propose(rows, budget, policy)
        for row, ids, count in zip(rows, out.token_ids.tolist(), out.num_tokens, strict=True):
            if count:
                self.found.append((row.tokens.tolist(), row.committed.size, ids[:count]))
        return out


def differences(head: MtpHead, text: list[int], committed: int, draft: Sequence[int]) -> int:
    """The number of draft tokens that transformers' own layers do not predict.

    Each layer runs over the whole text, without a cache. A text may end with draft tokens of other drafters.
    """
    model, layers = head.target.model, head._layers
    layers.config._attn_implementation = model.config._attn_implementation = "eager"
    tokens, wrong = [*text, *draft], 0
    with torch.inference_mode():
        ids = torch.tensor([tokens])
        hidden = model(ids[:, :committed], output_hidden_states=True, use_cache=False).hidden_states[-1][:, :-1]
        first = 1
        for index in range(committed, len(tokens)):
            layer = min(index - committed, LAYERS - 1)
            given = ids[:, first : first + hidden.shape[1]]
            positions = torch.arange(layer + 1, layer + 1 + hidden.shape[1])[None]
            cache = TransformersMtpCache(config=layers.config)
            after = layers.forward_layer(layer, hidden, positions, cache, input_ids=given)
            scores = layers._project_to_logits(after[0, -1])
            wrong += index >= len(text) and bool(scores.max() - scores[tokens[index]] > 1e-4)
            if layer < LAYERS - 1:
                hidden, first = after, first + 1
            else:  # the last layer goes on after its own output
                hidden = torch.cat([hidden, after[:, -1:]], 1)
    head.target.model.config._attn_implementation = "foresay"
    layers.config._attn_implementation = "foresay"
    return wrong


def decoded(head: MtpHead, make: Callable[[Recorded], Any] = lambda one: one, **given: Any) -> tuple[Recorded, Any]:
    """Output and drafts of a batch whose rows accept different numbers of tokens and end at different steps."""
    drafter = Recorded(head)
    outputs, steps, engine = run(
        head.target, PROMPTS, PARAMS, drafter=make(drafter), gamma=DRAFT, join_later=2, max_batch_size=3, **given
    )
    assert engine.draft_failures == 0, engine.drafter and engine.drafter.last_error
    assert {0, 2} <= {step.num_accepted for step in steps if step.num_drafted > 2}
    plain, _, _ = run(head.target, PROMPTS, PARAMS, drafter=None, gamma=0)
    assert outputs == plain
    return drafter, steps


def is_wrong(head: MtpHead, drafter: Recorded) -> bool:
    """True if some draft has a token that transformers' own layers do not predict."""
    assert len(drafter.found) > 20
    return any(differences(head, *one) for one in drafter.found)


@pytest.fixture(scope="module")
def together(head: MtpHead) -> Recorded:
    return decoded(head)[0]


def test_each_depth_is_drafted_by_its_own_layer(head: MtpHead, together: Recorded) -> None:
    assert {len(draft) for _, _, draft in together.found} >= {DRAFT}
    assert not is_wrong(head, together)


def test_long_prompts_and_short_drafts_are_cached_in_parts(head: MtpHead, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts of one token leave pairs to the later layers, which are cached once they are many."""
    monkeypatch.setattr(mtp, "Capabilities", lambda **given: mtp_capabilities(**given | {"prefill_chunk": 2}))
    drafter = Recorded(head)
    long = [3, 1, 4, 1, 5, 2, 6, 5, 3, 5] * 3
    for gamma in (1, DRAFT):
        run(head.target, [long, long[4:]], PARAMS, drafter=drafter, gamma=gamma)
    assert not is_wrong(head, drafter)


mtp_capabilities = mtp.Capabilities


def test_after_the_tokens_of_another_drafter(head: MtpHead) -> None:
    """Rows of a cascade are at different layers in the same pass."""
    drafter, _ = decoded(head, lambda one: Cascade([SuffixDrafter(), one], [[2, 3], [0, 0]]))
    before = {len(text) - committed for text, committed, _ in drafter.found}
    assert before == {0, 1, 2}
    assert not is_wrong(head, drafter)


def test_where_another_drafter_or_none_drafts_in_between(head: MtpHead) -> None:
    """Pairs of steps without these drafts are cached later."""
    drafter, _ = decoded(head, lambda one: Hybrid(SuffixDrafter(), one, min_match=2, k=DRAFT))
    assert not is_wrong(head, drafter)


@pytest.mark.parametrize("broken", ["pairs of the layer before", "one cache for all layers", "drafts kept"])
def test_other_pairs_and_caches_are_seen(head: MtpHead, broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Controls."""
    if broken == "pairs of the layer before":
        monkeypatch.setattr(torch.Tensor, "roll", lambda self, *given: self.clone())
    elif broken == "one cache for all layers":
        intact = mtp._MtpCache.update
        monkeypatch.setattr(
            mtp._MtpCache, "update", lambda self, keys, values, layer, *more, **given: intact(self, keys, values, 0)
        )
    else:
        mark = RowFeatures.mark_cached

        def all_but_the_last(self: RowFeatures, count: int) -> None:
            is_step = len(self.pending) < MAX_CATCH_UP + LAYERS  # else a part of a prompt
            mark(self, max(count, len(self.pending) - 1) if is_step else count)

        monkeypatch.setattr(RowFeatures, "mark_cached", all_but_the_last)
    drafter = Recorded(head)
    run(head.target, PROMPTS, PARAMS, drafter=drafter, gamma=DRAFT, max_batch_size=3)
    monkeypatch.undo()
    assert is_wrong(head, drafter)


def test_trees_are_refused(head: MtpHead) -> None:
    with refused("nodes", 4):
        HeadDrafter(head, SIZE, nodes=4)
    assert HeadDrafter(head, SIZE).context._num_layers == LAYERS  # type: ignore[attr-defined]


def test_the_drafts_of_a_row_are_those_of_any_batch(head: MtpHead, together: Recorded) -> None:
    alone = Recorded(head)
    for prompt in PROMPTS:
        run(head.target, [prompt], PARAMS, drafter=alone, gamma=DRAFT)
    assert sorted(alone.found) == sorted(together.found)
