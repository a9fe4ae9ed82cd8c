"""Requests to encoder-decoder models: from a text or token ids, with what the model's generation config requests."""

from __future__ import annotations

import copy
import functools
from pathlib import Path
from typing import Any

import pytest

import foresay
from foresay.decoding.sampling_params import SamplingParams
from foresay.errors import ContextLengthError, PromptError
from foresay.models.huggingface.causal import CausalModel
from foresay.models.huggingface.seq2seq import Seq2SeqModel
from foresay.models.sources.load_options import LoadOptions
from foresay.models.sources.loading import load_model
from helpers import tiny
from helpers.families import VOCAB, make, make_seq2seq
from helpers.refusals import refused
from helpers.seq2seq import greedy, reference_of, some_sources, starts_of, target_of
from helpers.support import ModelDrafter, run

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
