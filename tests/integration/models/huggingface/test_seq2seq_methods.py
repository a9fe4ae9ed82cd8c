"""Every kind of drafter for encoder-decoder targets: greedy output as without a draft, sampled output reproducible."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

from foresay.decoding.protocols import Drafter
from foresay.decoding.rows import Row, Rows
from foresay.decoding.sampling_params import SamplingParams
from foresay.drafters import Cascade, MaxGram, Memory, ModelDrafter, NgramStoreDrafter, SelfDrafter, SuffixDrafter
from foresay.drafters.cross_tokenizer import CrossTokenizerDrafter
from foresay.lengths import ConfidenceLength, ConstantLength
from foresay.models.huggingface.causal import CausalModel
from foresay.models.huggingface.early_exit import first_decoder_layers
from foresay.models.huggingface.seq2seq import Seq2SeqModel
from helpers.families import SEQ2SEQ, VOCAB, make, make_seq2seq
from helpers.refusals import refused
from helpers.seq2seq import greedy, reference_of, some_sources, starts_of, target_of
from helpers.support import PromptLookup, Renumbered, run

NEW = 14


def small(family: str) -> ModelDrafter:
    """A draft of the same family: the target's weights, so that it is often right."""
    return ModelDrafter(Seq2SeqModel(copy.deepcopy(reference_of(family)[0])), VOCAB)


def smaller(family: str) -> ModelDrafter:
    layers = {"num_decoder_layers": 1} if "t5" in family else {"decoder_layers": 1}
    draft = make_seq2seq(family, **layers)
    draft.load_state_dict(reference_of(family)[0].state_dict(), strict=False)  # agrees now and then
    return ModelDrafter(Seq2SeqModel(draft), VOCAB)


def other(family: str) -> ModelDrafter:
    return ModelDrafter(Seq2SeqModel(make_seq2seq(family, seed=5)), VOCAB)


def decoder_only() -> ModelDrafter:
    return ModelDrafter(CausalModel(make("llama", seed=3)), VOCAB)


DRAFTERS: dict[str, Callable[[str], Drafter]] = {
    "itself": small,
    "smaller": smaller,
    "prompt_lookup": lambda family: PromptLookup(min_ngram=1),
    "max_gram": lambda family: MaxGram(),
    "ngram_store": lambda family: NgramStoreDrafter(3, filler_top_k=3),
    "suffix": lambda family: SuffixDrafter(Memory(max_tokens=1000)),
    "decoder_only": lambda family: decoder_only(),
    "other tokens": lambda family: CrossTokenizerDrafter(
        CausalModel(make("llama", seed=3)), VOCAB, Renumbered(VOCAB, 9)
    ),
    "cascade of two": lambda family: Cascade([small(family), MaxGram()], [[4, 2], [0, 3]]),
    "cascade of three": lambda family: Cascade(
        [small(family), other(family), MaxGram()], [[3, 3, 2], [0, 2, 2], [0, 0, 3]], lenience=2
    ),
    "mixed cascade": lambda family: Cascade(
        [small(family), decoder_only(), MaxGram()], [[3, 2, 2], [0, 2, 2], [0, 0, 2]]
    ),
}


PAIRS = [(drafter, [*SEQ2SEQ][i % 6]) for i, drafter in enumerate(DRAFTERS)]
PAIRS += [("smaller", "mbart"), ("cascade of two", "t5")]
"""Each drafter with a family, and those with caches with one of relative and one of absolute positions."""


@pytest.mark.parametrize(("drafter", "family"), PAIRS)
def test_greedy_output_does_not_depend_on_the_drafter(drafter: str, family: str) -> None:
    wanted = [output[:NEW] for output in reference_of(family)[1]]
    target = target_of(family)
    options: dict[str, Any] = {"drafter": DRAFTERS[drafter](family), "sources": some_sources(), "join_later": 3}
    ours, steps, engine = run(target, starts_of(target, 6), SamplingParams(max_new_tokens=NEW), gamma=6, **options)
    assert engine.draft_failures == 0, engine.drafter and engine.drafter.last_error
    assert ours == wanted
    assert drafter in ("itself", "cascade of two") or any(step.num_accepted < step.num_drafted for step in steps)
    if "cascade" in drafter or drafter == "itself":  # in cascades, the target's own weights review last
        least = 0.95 if drafter == "itself" else 0.5
        assert sum(s.num_accepted for s in steps) > least * sum(s.num_tested for s in steps)


@pytest.mark.parametrize(
    ("family", "temperature", "cascaded"),
    [("t5_gated", 0.8, False), ("bart", 0.0, False), ("t5", 0.0, True), ("mbart", 0.0, True)],
)
def test_the_first_layers_of_the_decoder_draft_in_the_targets_cache(
    family: str, temperature: float, cascaded: bool
) -> None:
    """Alone and as reviewers; proposals in the target's slots, with its encoded sources, are those in a cache of their own."""
    target = target_of(family)
    short, found = first_decoder_layers(target, 2), []
    params = [SamplingParams(max_new_tokens=NEW, temperature=temperature, seed=seed) for seed in range(6)]
    options: dict[str, Any] = {"sources": some_sources(), "join_later": 3, "max_batch_size": 4}
    for kind in (SelfDrafter, ModelDrafter):
        drafter: Any = kind(short, VOCAB)
        if cascaded:
            drafter = Cascade([drafter, PromptLookup(min_ngram=1)], [[4, 2], [0, 3]])
        out, steps, engine = run(
            target, starts_of(target, 6), params, drafter=drafter, gamma=4 + 2 * cascaded, **options
        )
        assert engine.draft_failures == 0, engine.drafter and engine.drafter.last_error
        assert temperature or out == [output[:NEW] for output in reference_of(family)[1]]
        found.append((out, [(step.request_id, step.num_drafted, step.num_accepted) for step in steps]))
    assert found[0] == found[1]
    assert 0 < sum(a for _, _, a in found[0][1]) < sum(d for _, d, _ in found[0][1])


def test_the_first_layers_leave_a_released_model_as_it_was() -> None:
    """Its patches are the target's, and end with it."""
    target = target_of("t5")
    first_decoder_layers(target, 1)
    released = target.release()
    assert not any("compute_bias" in vars(module) for module in released.modules())
    source = some_sources()[3]
    assert greedy(released, source) == reference_of("t5")[1][3]


def test_how_many_first_layers() -> None:
    """Also of a decoder with fewer layers than its encoder."""
    for family, changes, total in (
        ("bart", {}, 3),
        ("bart", {"decoder_layers": 2}, 2),
        ("t5", {"num_decoder_layers": 2}, 2),
    ):
        target = Seq2SeqModel(make_seq2seq(family, **changes))
        assert target.capabilities.num_layers == total
        assert first_decoder_layers(target, total - 1).capabilities.num_layers == total - 1
        for count in (0, total, True):
            with refused("layers", count):
                first_decoder_layers(target, count)


@pytest.mark.parametrize("drafter", ["cascade of three", "mixed cascade", "other tokens"])
def test_a_sampled_row_is_the_same_alone_and_in_a_batch(drafter: str) -> None:
    target = target_of("t5")
    params = [SamplingParams(max_new_tokens=12, temperature=0.9, seed=seed) for seed in range(4)]

    def outputs(size: int) -> list[list[int]]:
        options: dict[str, Any] = {"policy": ConfidenceLength(0.2, high=6), "sources": some_sources()[:4]}
        options |= {"drafter": DRAFTERS[drafter]("t5"), "max_batch_size": size}
        out, _, engine = run(target, starts_of(target, 4), params, **options)
        assert engine.draft_failures == 0
        return out

    assert outputs(1) == outputs(4)


def test_a_copy_may_come_from_the_source() -> None:
    """A drafter without weights copies what the encoder read."""
    drafter = MaxGram()
    row = Row(0, [0], SamplingParams(), limit=40, source=[5, 6, 7, 8, 9])
    row.extend([6, 7])
    drafter.admit(Rows([row]), 0)
    proposal = drafter.propose(Rows([row]), [3], ConstantLength(3))
    assert proposal.token_ids.tolist() == [[8, 9]]


def test_an_encoder_decoder_below_a_decoder_only_reviewer_is_refused() -> None:
    with refused("k[1][1]", 2):
        Cascade([decoder_only(), other("t5")], [[3, 0], [0, 2]])
    Cascade([decoder_only(), other("t5")], [[3, 2], [0, 0]])  # one after another they are fine
