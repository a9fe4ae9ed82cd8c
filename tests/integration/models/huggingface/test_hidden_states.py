"""Hidden states reach a drafter after prefill, each pass and a catch-up; a length policy may request the draft's."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from foresay.decoding.proposal import Proposal
from foresay.decoding.rows import Row, Rows
from foresay.decoding.sampling_params import SamplingParams
from foresay.decoding.step import score
from foresay.decoding.stopping import DraftStep, Reads, Stopping
from foresay.drafters import ModelDrafter
from foresay.drafters.stateless import Stateless
from foresay.engine.prefixes import PrefixStore
from foresay.lengths import ConstantLength
from foresay.models.huggingface.causal import CausalModel
from foresay.models.table import TableModel
from helpers.families import VOCAB, make
from helpers.making import By
from helpers.support import run

LAYERS = (0, 2)
PROMPTS = [[5, 6, 7, 8, 9], [3], [11, 12, 13, 14, 15, 16, 17, 18, 19], list(range(2, 90)) * 4]


class Sees(Stateless):
    """Draws nothing, and keeps all hidden states it is shown, by request."""

    hidden_layers = LAYERS

    def __init__(self) -> None:
        self.seen: dict[int, dict[int, list[torch.Tensor]]] = {}

    def admit(self, rows: Rows, first: int) -> None:
        for i in range(first, len(rows)):
            held = rows[i].prompt_hidden
            self.seen[rows[i].request_id] = {n: [held[n]] if n in held else [] for n in LAYERS}
            assert all(len(held[n]) == rows[i].size - 1 for n in held)

    def observe(self, rows: Rows, verification: Any, target: Any) -> None:
        for i, row in enumerate(rows):
            kept = 1 + int(verification.num_accepted[i])
            for layer in LAYERS:
                self.seen[row.request_id][layer].append(target.hidden[layer][i, :kept])

    def propose(self, rows: Rows, budget: Any, policy: Any) -> Proposal:
        drafts = torch.tensor([[(row.size * 3 + j) % VOCAB for j in range(2)] for row in rows])
        return Proposal(drafts, [min(2, n) for n in budget])


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2"])
def test_a_drafter_sees_every_token_once(family: str) -> None:
    """The observed states, put together, are those that one pass over the whole text computes; layer 0 is the embeddings."""
    model = CausalModel(make(family, **({} if family == "gpt2" else {"max_position_embeddings": 1024})))
    drafter, prompts = Sees(), PROMPTS[:3] if family == "gpt2" else PROMPTS
    params = SamplingParams(max_new_tokens=12)
    outputs, _, engine = run(model, prompts, params, drafter=drafter, max_batch_size=3, join_later=1)
    assert engine.draft_failures == 0, engine.drafter and engine.drafter.last_error
    for i, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
        text = torch.tensor([[*prompt, *output[:-1]]])
        model.release()
        with torch.no_grad():
            states = model.model(text, output_hidden_states=True, use_cache=False).hidden_states
        for layer in LAYERS:
            shown = torch.cat(drafter.seen[i][layer])
            assert shown.shape == states[layer][0].shape and torch.allclose(shown, states[layer][0], atol=1e-3)


def test_a_drafter_that_reads_hidden_states_sees_all_of_a_shared_beginning() -> None:
    drafter, params = Sees(), SamplingParams(max_new_tokens=4)
    store = PrefixStore(1 << 20)
    _, _, engine = run(CausalModel(make("llama")), [[*range(2, 60)]] * 2, params, drafter=drafter, prefixes=store)
    assert engine.draft_failures == 0 and [len(drafter.seen[i][2][0]) for i in (0, 1)] == [57, 57]
    assert torch.equal(drafter.seen[0][2][0], drafter.seen[1][2][0])


def test_a_catch_up_keeps_the_hidden_states_of_all_its_columns() -> None:
    model = CausalModel(make("llama"))
    rows = Rows([Row(i, prompt, SamplingParams(), limit=64) for i, prompt in enumerate(([4, 5, 6, 7, 8], [9, 3]))])
    cache, text = model.new_cache(), torch.tensor([[4, 5, 6, 7, 8, 1, 2]])
    model.admit(rows, 0, cache)
    output = score(rows, Proposal(torch.tensor([[1, 2], [3, 0]]), [2, 1]), model, cache, LAYERS)
    assert output.num_before == (4, 1) and output.scores().shape == (2, 3, VOCAB)
    assert torch.allclose(output.scores()[0], model.uncached(text)[0][4:], atol=1e-4)
    with torch.no_grad():
        states = make("llama")(text, output_hidden_states=True).hidden_states
    assert torch.allclose(output.hidden[2][0], states[2][0], atol=1e-4)


class Norms(ConstantLength):
    """Stops where the draft's hidden state is small, and keeps what it saw."""

    def __init__(self) -> None:
        super().__init__(4)
        self.seen: list[torch.Tensor] = []

    def stopping(self, rows: Rows) -> Stopping:
        return By(self._keep, rows, Reads.HIDDEN)

    def _keep(self, step: DraftStep) -> torch.Tensor:
        assert step.hidden is not None
        self.seen.append(step.hidden.clone())
        return step.hidden.norm(dim=-1) > 0


def test_a_policy_sees_the_state_that_each_token_was_drawn_from() -> None:
    target, draft = CausalModel(make("llama")), CausalModel(make("llama", seed=3))
    head = draft.model.get_output_embeddings()
    policy = Norms()
    _, _, engine = run(
        target, PROMPTS[:3], SamplingParams(max_new_tokens=9), drafter=ModelDrafter(draft, VOCAB), policy=policy
    )
    assert engine.draft_failures == 0, engine.drafter and engine.drafter.last_error
    assert len(policy.seen) > 4 and all(states.shape == (len(states), 32) for states in policy.seen)
    with torch.inference_mode():
        first = head(policy.seen[0]).argmax(-1).tolist()  # transformers' last hidden state lies after the final norm
        wanted = [int(draft.uncached(torch.tensor([prompt]))[0, -1].argmax()) for prompt in PROMPTS[:3]]
    assert set(first) <= set(wanted), "the state that the first draft token was drawn from"


def test_a_model_without_hidden_states_is_named() -> None:
    table, drafter = TableModel.random(6, seed=1), ModelDrafter(TableModel.random(6, seed=2), 6)
    _, _, engine = run(table, [[1]], SamplingParams(max_new_tokens=4), drafter=drafter, policy=Norms())
    assert "length policy reads the draft model's hidden states, which TableModel does not output" in str(
        engine.drafter and engine.drafter.last_error
    )
