"""Drafters and requests for encoder-decoders: greedy output as without a draft, and what a generation config requests."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import foresay
from foresay.decoding.protocols import Drafter
from foresay.decoding.sampling_params import SamplingParams
from foresay.drafters import Cascade, MaxGram, Memory, ModelDrafter, NgramStoreDrafter, SelfDrafter, SuffixDrafter
from foresay.drafters.cross_tokenizer import CrossTokenizerDrafter
from foresay.errors import ContextLengthError, PromptError
from foresay.lengths import ConfidenceLength
from foresay.models.huggingface.causal import CausalModel
from foresay.models.huggingface.early_exit import first_decoder_layers
from foresay.models.huggingface.seq2seq import Seq2SeqModel
from foresay.models.sources.load_options import LoadOptions
from foresay.models.sources.loading import load_model
from helpers import tiny
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


@pytest.mark.parametrize(
    ("drafter", "family"),
    [
        *((one, "t5") for one in ("cascade of three", "mixed cascade", "other tokens")),
        *(("smaller", one) for one in ("t5_gated", "marian")),
    ],
)
def test_a_row_is_the_same_alone_and_in_a_batch(drafter: str, family: str) -> None:
    """Greedy and sampled with seeds; sources up to beyond the first span of slots."""
    target = target_of(family)
    params = [SamplingParams(max_new_tokens=12, temperature=0.9 * (seed % 3 > 0), seed=seed) for seed in range(4)]

    def outputs(size: int) -> list[list[int]]:
        options: dict[str, Any] = {"policy": ConfidenceLength(0.2, high=6), "sources": some_sources((3, 150, 1, 40))}
        options |= {"drafter": DRAFTERS[drafter](family), "max_batch_size": size, "join_later": 2 * (size > 1)}
        out, steps, engine = run(target, starts_of(target, 4), params, **options)
        assert engine.draft_failures == 0
        assert drafter != "smaller" or any(0 < step.num_accepted < step.num_drafted for step in steps)
        return out

    assert outputs(1) == outputs(4)


def test_an_encoder_decoder_below_a_decoder_only_reviewer_is_refused() -> None:
    with refused("k[1][1]", 2):
        Cascade([decoder_only(), other("t5")], [[3, 0], [0, 2]])
    Cascade([decoder_only(), other("t5")], [[3, 2], [0, 0]])  # one after another they are fine


# -- requests ----------------------------------------------------------------------------------------------------------

SETTINGS: dict[str, dict[str, Any]] = {
    "forced_bos": {"forced_bos_token_id": 40},
    "forced_eos": {"forced_eos_token_id": 1},
    "a banned word": {"bad_words_ids": [["first"], [1]]},
    "least new tokens after a forced one": {"forced_bos_token_id": 40, "min_new_tokens": 12},
    "a decay": {"forced_bos_token_id": 40, "exponential_decay_length_penalty": (4, 2.0)},
    "a bias": {"sequence_bias": [[[7], 5.0], [[9, 11], -5.0]], "repetition_penalty": 1.3},
    "suppressed at the beginning": {"begin_suppress_tokens": ["first", 9]},
    "all together": {
        "forced_bos_token_id": 40,
        "forced_eos_token_id": 1,
        "bad_words_ids": [[7], [9, 11]],
        "suppress_tokens": [13, 17],
        "no_repeat_ngram_size": 2,
        "min_length": 12,
        "repetition_penalty": 1.3,
    },
}


@functools.cache
def plain_of(family: str) -> list[list[int]]:
    return [greedy(reference_of(family)[0], source, 30, eos_token_id=1) for source in some_sources()[:3]]


CASES = [(("t5", "bart")[i % 2], name) for i, name in enumerate(SETTINGS)]
CASES += [(family, name) for family, name in (("bart", "forced_bos"), ("t5", "all together"))]


@pytest.mark.parametrize(("family", "name"), CASES)
def test_what_a_generation_config_asks_is_honoured(family: str, name: str) -> None:
    settings = SETTINGS[name]
    weights = copy.deepcopy(reference_of(family)[0])
    sources, plain = some_sources()[:3], plain_of(family)
    if settings.get("bad_words_ids") == [["first"], [1]]:
        settings = {"bad_words_ids": [[plain[0][0]], [1]]}
    if "begin_suppress_tokens" in settings:
        settings = {"begin_suppress_tokens": [plain[0][0], 9]}
    weights.generation_config.update(**settings)
    wanted = [greedy(weights, source, 30, eos_token_id=1) for source in sources]
    assert wanted != plain, "settings that change nothing prove nothing"
    generator = foresay.load(weights, drafter="prompt_lookup", min_ngram=1, num_draft_tokens=5)
    forced = [settings["forced_bos_token_id"]] if "forced_bos_token_id" in settings else []
    ours = generator.generate(sources, max_new_tokens=30 - len(forced))
    assert [[*forced, *one.token_ids] for one in ours] == wanted
    assert [one.prompt_token_ids for one in ours] == sources
    assert sum(one.stats.num_accepted for one in ours) > 0 or "no_repeat_ngram_size" in settings


def test_what_is_refused() -> None:
    weights = make_seq2seq("bart")
    weights.generation_config.encoder_no_repeat_ngram_size = 3
    with refused("encoder_no_repeat_ngram_size", 3):
        foresay.load(weights).generate(some_sources()[0])
    generator = foresay.load(make_seq2seq("bart"), drafter="none")
    with pytest.raises(ContextLengthError, match="the source has 257 tokens; the encoder reads 256 at most"):
        generator.generate([5] * 257)
    with pytest.raises(PromptError, match="a source token id is not in the vocabulary"):
        generator.generate([VOCAB])
    with pytest.raises(PromptError, match="needs a source"):
        generator.engine().submit([1], SamplingParams())


def test_a_draft_whose_encoder_reads_less_than_the_source() -> None:
    """It drafts from the beginning of the source; without a source it fails as drafters may."""
    target, params = target_of("bart"), SamplingParams(max_new_tokens=12)
    draft = Seq2SeqModel(make_seq2seq("bart", max_position_embeddings=64))
    source = some_sources((100,))[0]
    plain = run(target, starts_of(target, 1), params, sources=[source])[0]
    ours, steps, engine = run(
        target, starts_of(target, 1), params, drafter=ModelDrafter(draft, VOCAB), sources=[source]
    )
    assert ours == plain
    assert engine.draft_failures == 0
    assert any(s.num_drafted for s in steps)
    causal = CausalModel(make("llama"))
    wanted = run(causal, [[5, 6]], params)[0]
    ours, _, engine = run(causal, [[5, 6]], params, drafter=ModelDrafter(draft, VOCAB))
    assert ours == wanted
    assert engine.drafter is not None
    assert "needs a source" in str(engine.drafter.last_error)


def test_a_folder_from_a_text_to_a_text(tmp_path: Path, shell: tiny.Shell) -> None:
    names = tiny.tokenizer()
    weights = make_seq2seq("t5", vocab_size=len(names), eos_token_id=0)
    folder = tiny.save(tmp_path / "t5", weights)
    loaded = load_model(folder, LoadOptions(dtype="fp32"))
    assert isinstance(loaded.model, Seq2SeqModel)
    generator = foresay.load(loaded)
    out = generator.generate("hello there", max_new_tokens=20)
    source = names("hello there").input_ids
    assert out.prompt_token_ids == source
    assert out.token_ids == greedy(weights, source, 20, eos_token_id=0)
    chunks = list(generator.stream("hello there", max_new_tokens=20))
    assert "".join(chunk.text for chunk in chunks) == out.text
    with pytest.raises(PromptError, match="no chat template"):
        generator.generate([{"role": "user", "content": "hello"}])
    shown = shell.out("info", str(folder), "--dtype", "fp32")
    assert "family: t5 (T5ForConditionalGeneration), tested" in shown and "context: unlimited" in shown
