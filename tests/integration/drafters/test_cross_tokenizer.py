"""A draft model with another tokenizer: exact output, distributions over shared tokens, full acceptance of one's own twin."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from foresay import ConstantLength, Proposal, Row, Rows, SamplingParams, TableModel, load
from foresay.decoding.distributions import VocabularySubset
from foresay.decoding.protocols import KVCache, ModelInput, ModelOutput
from foresay.drafters import Cascade, ModelDrafter
from foresay.drafters.cross_tokenizer import CrossTokenizerDrafter
from foresay.models.huggingface.causal import CausalModel
from helpers.bilingual import retokenizer, tokenizer
from helpers.families import make
from helpers.support import Renumbered, run


def model(which: str, seed: int = 0) -> CausalModel:
    return CausalModel(make("llama", seed, vocab_size=len(tokenizer(which)), max_position_embeddings=2048))


def prompts() -> list[list[int]]:
    return [tokenizer("target")(text).input_ids for text in ("hello the", "x", "there 日本語 hello" * 9)]


@pytest.mark.parametrize("seed", [0, 1])
def test_greedy_output_is_that_of_plain_decoding(seed: int) -> None:
    target, params = model("target", seed), SamplingParams(max_new_tokens=24)
    drafter = CrossTokenizerDrafter(model("draft", 5), target.vocab_size, retokenizer())
    outputs, steps, engine = run(target, prompts(), params, drafter=drafter, max_batch_size=2, join_later=1)
    assert engine.draft_failures == 0 and any(step.num_drafted for step in steps)
    assert outputs == run(target, prompts(), params, gamma=0)[0]


def renumbered(target: CausalModel) -> CausalModel:
    """The target's weights under the other tokenizer's numbers."""
    ours, theirs = retokenizer("target", "renumbered").shared
    assert sorted(ours.tolist()) == sorted(theirs.tolist()) == list(range(target.vocab_size))
    assert ours.tolist() != theirs.tolist()
    draft = make("llama", 9, vocab_size=target.vocab_size, max_position_embeddings=2048)
    draft.load_state_dict(target.model.state_dict())
    with torch.no_grad():
        for layer in (draft.get_input_embeddings(), draft.get_output_embeddings()):
            layer.weight[ours] = layer.weight[theirs].clone()
    return CausalModel(draft)


def ascii_target() -> CausalModel:
    """A target that writes letters and spaces alone, so that its text reads back as it was written."""
    target = model("target")
    names = tokenizer("target")
    texts = [names.decode([i]) for i in range(len(names))]
    silent = [i for i, text in enumerate(texts) if not all((c.isalpha() and c.isascii()) or c == " " for c in text)]
    target.model.lm_head.weight.data[silent] = 0
    return target


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_the_same_model_in_other_numbers_is_accepted_whole(temperature: float) -> None:
    """Written in letters, so that both read the same text; a merge that the target did not write is read otherwise."""
    target, pair = ascii_target(), retokenizer("target", "renumbered")
    params = [SamplingParams(temperature=temperature, seed=i, max_new_tokens=30) for i in range(3)]
    drafter = CrossTokenizerDrafter(renumbered(target), target.vocab_size, pair)
    _, steps, engine = run(target, prompts(), params, drafter=drafter)
    assert engine.draft_failures == 0
    accepted, drafted = sum(s.num_accepted for s in steps), sum(s.num_drafted for s in steps)
    assert drafted > 60 and accepted > 0.9 * drafted


class Trimmed(TableModel):
    """A table whose scores are those of a subset, which has every token."""

    def forward(self, model_input: ModelInput, cache: KVCache) -> ModelOutput:
        subset = VocabularySubset.of(torch.arange(self.vocab_size), self.vocab_size)
        return dataclasses.replace(super().forward(model_input, cache), subset=subset)


@pytest.mark.parametrize(("private", "kind"), [(0, TableModel), (2, TableModel), (2, Trimmed)])
def test_each_tokens_distribution_is_the_drafts_over_shared_tokens(private: int, kind: type[TableModel]) -> None:
    """Tables whose tokens are numbered from the other end, the first `private` of them unknown to the draft."""
    size, pair = 6, Renumbered(6, private)
    table = kind(TableModel.random(size, seed=2, concentration=0.6).table)
    drafter = CrossTokenizerDrafter(table, size, pair)
    rows = Rows([Row(i, [1 + i, 2], SamplingParams(temperature=0.5 + i), seed=i, limit=99) for i in range(3)])
    drafter.admit(rows, 0)
    seen: set[int] = set()
    for step in range(20):
        proposal = drafter.propose(rows, [4, 0, 3], ConstantLength(4))
        assert list(proposal.num_tokens) == [4, 0, 3]
        assert proposal.distributions is not None and proposal.distribution_index is not None
        for i in (0, 2):
            context = [size - 1 - t for t in rows[i].tokens.tolist()]
            for j in range(proposal.num_tokens[i]):
                weights = table.distribution(context) ** (1 / (0.5 + i))
                weights[size - private :] = 0
                wanted = (weights / weights.sum()).flip(0).float()
                torch.testing.assert_close(
                    proposal.distributions[proposal.distribution_index[i, j]], wanted, atol=1e-5, rtol=1e-4
                )
                token = int(proposal.token_ids[i, j])
                assert float(wanted[token]) > 0
                seen.add(token)
                context.append(size - 1 - token)
        for row in rows:
            row.extend([step % size])
    assert seen == set(range(private, size))


def test_without_a_shared_token_a_sampled_row_is_drafted_for_greedily() -> None:
    pair = Renumbered(5)
    pair.shared = (torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.int64))
    drafter = CrossTokenizerDrafter(TableModel.random(5, seed=2), 5, pair)
    rows = Rows([Row(0, [1], SamplingParams(temperature=1.0), limit=99)])
    drafter.admit(rows, 0)
    proposal = drafter.propose(rows, [3], ConstantLength(3))
    assert proposal.num_tokens == [3] and (
        proposal.distribution_index is None or proposal.distribution_index.tolist() == [[-1] * 3]
    )


class Jealous(Renumbered):
    """Its readers belong to one row each, and what they are given is committed never changes."""

    def reader(self) -> Jealous:
        out = Jealous(self.size)
        out.known = []
        return out

    def read(self, tokens: Sequence[int], committed: int) -> list[int]:
        assert list(tokens[: len(self.known)]) == self.known, "another row's text, or a draft token that was taken back"
        self.known = list(tokens[:committed])
        return super().read(tokens, committed)


def test_each_row_has_its_reader_and_guesses_are_not_committed() -> None:
    size = 6
    target, draft = TableModel.random(size, seed=1), TableModel.random(size, seed=2)
    cascade = Cascade([ModelDrafter(draft, size), CrossTokenizerDrafter(draft, size, Jealous(size))], [[2, 3], [0, 2]])
    for drafter in (CrossTokenizerDrafter(draft, size, Jealous(size)), cascade):
        params = [SamplingParams(temperature=1.0, seed=i, max_new_tokens=4 + 5 * (i % 3)) for i in range(7)]
        texts = [[i % size, 1 + i % 3] for i in range(7)]
        *_, engine = run(target, texts, params, drafter=drafter, gamma=5, max_batch_size=3, join_later=2)
        assert engine.draft_failures == 0


def test_a_proposal_names_the_targets_tokens_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a retokenizer returns: tokens that the target's logits lack end a draft."""
    pair = Renumbered(6)
    monkeypatch.setattr(pair, "to_target", lambda context, drafted: [1, 2, 9, 3])
    drafter = CrossTokenizerDrafter(TableModel.random(6, seed=1), 6, pair)
    rows = Rows([Row(0, [1], SamplingParams(), limit=99)])
    drafter.admit(rows, 0)
    proposal: Proposal = drafter.propose(rows, [4], ConstantLength(4))
    assert proposal.token_ids.tolist() == [[1, 2]]
    assert drafter.propose(rows, [1], ConstantLength(4)).token_ids.tolist() == [[1]], "and never more than requested"


def test_by_name_other_tokens_are_found_out(tmp_path: Any) -> None:
    for which in ("target", "draft"):
        model(which, 3).release().save_pretrained(tmp_path / which)
        tokenizer(which).save_pretrained(tmp_path / which)
    one = load(tmp_path / "target", tmp_path / "draft", dtype="fp32")
    assert isinstance(one.engine().drafter.inner, CrossTokenizerDrafter)  # type: ignore[union-attr]
    written = one.generate("hello there", max_new_tokens=12)
    assert written.token_ids == one.plain().generate("hello there", max_new_tokens=12).token_ids
    assert written.draft_error is None and written.stats.num_drafted > 0
