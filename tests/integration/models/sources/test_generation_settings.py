"""A model's generation_config.json: constraints as in transformers' `generate`, sampling where it is requested."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GenerationConfig, PreTrainedModel

import foresay
from foresay import SamplingParams
from foresay.errors import UnknownNameError
from foresay.models.sources.generation_settings import TREATMENTS, GenerationSettings, Kind
from helpers import tiny
from helpers.refusals import refused

PROMPT = tiny.tokenizer()("hello world, hello").input_ids
NEW = 24


def constraints(plain: list[int]) -> dict[str, dict[str, Any]]:
    """Settings that change the output `plain`."""
    return {
        "repetition_penalty": {"repetition_penalty": 1.7},
        "no_repeat_ngram_size": {"no_repeat_ngram_size": 2},
        "suppress_tokens": {"suppress_tokens": [43, 39, 20]},
        "begin_suppress_tokens": {"begin_suppress_tokens": [plain[0]]},
        "bad_words_ids": {"bad_words_ids": [[43], [39, 20]]},
        "min_new_tokens": {"min_new_tokens": 20, "eos_token_id": plain[4]},
        "min_length": {"min_length": len(PROMPT) + 17, "eos_token_id": plain[4]},
        "forced_eos_token_id": {"forced_eos_token_id": 0},
        "exponential_decay_length_penalty": {"exponential_decay_length_penalty": [2, 3.0], "eos_token_id": 50},
        "sequence_bias": {"sequence_bias": [[[43], -50.0], [[20, 17], 20.0]]},
        "eos_token_id": {"eos_token_id": [plain[4], 0]},
        "all together": {
            "repetition_penalty": 1.3, "sequence_bias": [[[43], 2.5], [[20, 17], 3.0]], "no_repeat_ngram_size": 3,
            "bad_words_ids": [[39, 20], [41]], "suppress_tokens": [44], "begin_suppress_tokens": [39], "min_new_tokens": 9,
            "forced_eos_token_id": 0,
        },
    }  # fmt: skip


CONSTRAINTS = list(constraints([0] * 5))
DRAFTERS = ("suffix", "prompt_lookup(min_ngram=1)", "max_gram", "self(1)", "model")


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny.llama().eval()


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory, model: PreTrainedModel) -> Path:
    return tiny.save(tmp_path_factory.mktemp("settings") / "model", model)


IDS = {"bos_token_id": 1, "eos_token_id": 0, "pad_token_id": 0}


def _saved(home: Path, **settings: Any) -> Path:
    """The model's folder with these generation settings."""
    (home / "generation_config.json").write_text(json.dumps({**IDS, **settings}), encoding="utf-8")
    return home


def _generated(model: PreTrainedModel, settings: dict[str, Any], prompt: list[int] = PROMPT, **more: Any) -> list[int]:
    """The greedy output of transformers' `generate`."""
    ids, config = torch.tensor([prompt]), GenerationConfig(**{**IDS, **settings, "do_sample": False})
    mask = torch.ones_like(ids)
    out = model.generate(ids, attention_mask=mask, generation_config=config, max_new_tokens=NEW, **more)
    tail: list[int] = out[0, len(prompt) :].tolist()
    return tail


@pytest.fixture(scope="module")
def plain(model: PreTrainedModel) -> list[int]:
    """The output without settings."""
    return _generated(model, {})


def _ours(generator: foresay.Generator, **params: Any) -> list[int]:
    return list(generator.generate(PROMPT, max_new_tokens=NEW, **params).token_ids)


@pytest.mark.parametrize("name", CONSTRAINTS)
def test_constraints_of_the_file_are_those_of_generate(
    name: str, plain: list[int], model: PreTrainedModel, home: Path, tmp_path: Path
) -> None:
    """Greedy outputs equal transformers' `generate` token for token, also with parameters of the caller and with drafts.

    Each drafter meets two constraints at least, and all of them together.
    """
    settings, index = constraints(plain)[name], CONSTRAINTS.index(name)
    wanted = _generated(model, settings)
    assert wanted != plain, "a setting without effect proves nothing"
    loaded = foresay.load(_saved(home, **settings), dtype="fp32")
    for drafter in ("none", *(DRAFTERS if name == "all together" else (DRAFTERS[index % len(DRAFTERS)],))):
        own = f"model({tiny.save(tmp_path, tiny.llama(seed=1))})" if drafter == "model" else drafter
        assert _ours(foresay.change(loaded, drafter=own)) == wanted, drafter
    assert loaded.generate(PROMPT, SamplingParams(max_new_tokens=NEW)).token_ids == wanted
    object.__setattr__(loaded.target, "generation", GenerationSettings())  # the control: a merge that does nothing
    kept = "eos_token_id" in settings and len(settings) == 1
    assert (_ours(loaded) == wanted) is kept


def test_stop_strings_of_the_file(plain: list[int], model: PreTrainedModel, home: Path) -> None:
    """A minimum of the file delays the end token alone, as in `generate`; one of the request delays both, as in vLLM."""
    tokenizer = tiny.tokenizer()
    stop = tokenizer.decode(plain[2:4])
    for minimum in ({}, {"min_new_tokens": NEW - 1}):
        settings = {"stop_strings": [stop], **minimum}
        wanted = _generated(model, settings, tokenizer=tokenizer)
        generator = foresay.load(_saved(home, **settings), dtype="fp32")
        found = generator.generate(PROMPT, max_new_tokens=NEW)
        assert found.token_ids == wanted and len(wanted) < NEW - 1 and found.stop_string == stop
        assert len(_ours(generator, min_new_tokens=NEW - 1)) >= NEW - 1
        assert generator.generate(PROMPT, max_new_tokens=NEW, stop="\0").stop_string is None


def test_a_forced_first_token(model: PreTrainedModel, home: Path) -> None:
    """transformers forces it after a single token only."""
    settings = {"forced_bos_token_id": 77, "begin_suppress_tokens": [40, 41, 42]}
    ours = foresay.load(_saved(home, **settings), dtype="fp32").generate([40], max_new_tokens=NEW).token_ids
    assert ours[0] == 77 and ours == _generated(model, settings, [40])


def test_parameters_that_are_given_replace_the_files(plain: list[int], home: Path) -> None:
    changes = {"repetition_penalty": 1.7, "min_new_tokens": 20, "eos_token_id": plain[4]}
    generator = foresay.load(_saved(home, **changes), dtype="fp32")
    own: dict[str, Any] = {"repetition_penalty": 1.0, "min_new_tokens": 0}
    assert _ours(generator, **own) == plain[:5]
    assert generator.generate(PROMPT, SamplingParams(max_new_tokens=NEW, **own)).token_ids == plain[:5]


def test_settings_are_described() -> None:
    for settings in ({"bad_words_ids": [[2], [4, 5]]}, {"suppress_tokens": list(range(9))}):
        [text] = GenerationSettings(GenerationConfig(**settings)).described().values()
        assert next(iter(settings)) in text and ("(9 entries)" in text) == ("suppress_tokens" in settings)


# -- sampling --------------------------------------------------------------------------------------------------------

ALL: dict[str, Any] = {"temperature": 0.6, "top_k": 20, "top_p": 0.9, "min_p": 0.01}
SAMPLED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "all fields": ({"do_sample": True, **ALL}, ALL),
    "do_sample alone: temperature 1, and no top_k of 50": ({"do_sample": True}, {"temperature": 1.0, "top_k": 0}),
    "without do_sample": ({"temperature": 0.7, "top_p": 0.8}, {"temperature": 0.7, "top_p": 0.8}),
    "do_sample=false": ({"do_sample": False, "temperature": 0.7}, {"temperature": 0.0}),
    "nothing": ({}, {"temperature": 0.0}),
    "a limit": ({"max_new_tokens": 7}, {"temperature": 0.0, "max_new_tokens": 7}),
}


@pytest.mark.parametrize(("stored", "wanted"), SAMPLED.values(), ids=SAMPLED)
def test_sampling_of_the_file_is_a_default_where_it_is_requested(
    stored: dict[str, Any], wanted: dict[str, Any]
) -> None:
    own = GenerationSettings(GenerationConfig(**stored))
    assert own.sampled(SamplingParams()) == SamplingParams()
    model = own.with_sampling("model")
    assert model.sampled(SamplingParams()) == SamplingParams(**wanted)
    given = SamplingParams(temperature=0.0, top_k=3, top_p=1.0, min_p=0.0, max_new_tokens=256)
    assert model.sampled(given) == given


def test_sampling_model_samples_with_a_seed(home: Path) -> None:
    folder = _saved(home, do_sample=True, temperature=3.0, top_k=20)
    own = foresay.load(folder, dtype="fp32", sampling="model")
    same = foresay.load(folder, dtype="fp32")
    sampled = own.generate(PROMPT, max_new_tokens=NEW, seed=5)
    assert sampled.seed == 5
    assert sampled.token_ids == _ours(same, seed=5, temperature=3.0, top_k=20)
    assert sampled.token_ids != _ours(same) == _ours(own, temperature=0.0)
    for kept in (own.plain(), foresay.change(own, drafter="max_gram"), own.with_settings(max_batch_size=2)):
        assert kept.generate(PROMPT, max_new_tokens=1).seed is not None
    with refused("sampling", "vllm", UnknownNameError):
        foresay.load(folder, sampling="vllm")


@pytest.mark.parametrize("name", ["typical_p", "epsilon_cutoff", "eta_cutoff", "top_h"])
def test_warpers_without_a_parameter_of_their_own(name: str, model: PreTrainedModel, home: Path) -> None:
    """The first token's distribution is that of `generate`; of one in 400 draws, false alarm below 1e-6."""
    stored = {"do_sample": True, "temperature": 2.0, "top_k": 60, name: 0.03 if "cutoff" in name else 0.5}
    config, ids = GenerationConfig(**IDS, **stored), torch.tensor([PROMPT])
    options = {"max_new_tokens": 1, "output_scores": True, "return_dict_in_generate": True}
    out = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config, **options)
    distribution = out.scores[0][0].float().softmax(-1)
    assert 1 < int((distribution > 0).sum()) < 60
    [warpers] = GenerationSettings(config).with_sampling("model").sampled(SamplingParams()).processors
    with torch.inference_mode():
        torch.testing.assert_close(warpers(ids, model(ids).logits[:, -1])[0].softmax(-1), distribution)
    if name != "typical_p":
        return
    generator = foresay.load(_saved(home, **stored), dtype="fp32", drafter="none", sampling="model")
    ours = generator.generate([PROMPT] * 400, max_new_tokens=1, seed=3)
    counts = torch.bincount(torch.tensor([one.token_ids[0] for one in ours]), minlength=len(distribution)).float()
    assert counts[distribution == 0].sum() == 0
    assert float((counts / 400 - distribution).abs().sum() / 2) < 0.25
    assert generator.generate(PROMPT, max_new_tokens=1, temperature=0.0).token_ids == _generated(model, {})[:1]


# -- the whole table -------------------------------------------------------------------------------------------------


def test_every_field_of_generation_config_has_a_treatment() -> None:
    assert set(vars(GenerationConfig())) - set(TREATMENTS) == {"_from_model_config"}
    constrained = {name for name, kind in TREATMENTS.items() if kind is Kind.CONSTRAINT}
    elsewhere = {"forced_bos_token_id", "stop_strings", "decoder_start_token_id"}  # tested on their own
    assert constrained - elsewhere == set(CONSTRAINTS) - {"all together"}


UNSUPPORTED: dict[str, Any] = {
    "encoder_no_repeat_ngram_size": 3, "encoder_repetition_penalty": 1.5, "guidance_scale": 1.5, "token_healing": True,
    "watermarking_config": {"greenlist_ratio": 0.5}, "constraints": ["a"], "force_words_ids": [[5]], "max_time": 1.0,
}  # fmt: skip


def test_fields_that_cannot_be_honoured_are_refused_by_name(home: Path) -> None:
    assert set(UNSUPPORTED) == {name for name, kind in TREATMENTS.items() if kind is Kind.UNSUPPORTED}
    for name, value in UNSUPPORTED.items():
        with refused(name):
            foresay.load(_saved(home, **{name: value}))


def test_other_methods_and_unknown_fields_are_named_once(
    plain: list[int], home: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = _saved(home, num_beams=3, max_window_size=6144, chat_format="chatml", use_cache=True)
    assert _ours(foresay.load(folder, dtype="fp32")) == plain
    lines = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(lines) == 2 and "num_beams=3" in lines[0] and lines[1].endswith("ignored: chat_format, max_window_size")


def test_a_file_without_effect_is_silent(plain: list[int], home: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Every field at a neutral value, or irrelevant."""
    one = "repetition_penalty temperature top_p typical_p guidance_scale encoder_repetition_penalty length_penalty"
    zero = "no_repeat_ngram_size min_length min_new_tokens top_k encoder_no_repeat_ngram_size"
    false = "do_sample use_mtp is_assistant output_scores output_attentions token_healing output_logits early_stopping "
    fractions = "min_p epsilon_cutoff eta_cutoff penalty_alpha"
    values = ((one, 1.0), (zero, 0), (false + "output_hidden_states", False), (fractions, 0.0), ("max_length", 9))
    neutral = {name: value for names, value in values for name in names.split()}
    neutral |= dict.fromkeys(("num_beams", "num_beam_groups", "num_return_sequences"), 1)
    neutral |= {"suppress_tokens": [], "begin_suppress_tokens": []}
    assert _ours(foresay.load(_saved(home, **neutral), dtype="fp32")) == plain
    assert not [one for one in caplog.records if one.name == "foresay" and one.levelno >= logging.WARNING]
