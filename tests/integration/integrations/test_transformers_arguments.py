"""Every argument of transformers' `generate`: honoured by foresay.generate, refused by name, or without effect."""

from __future__ import annotations

import functools
import inspect
import itertools
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import transformers as hf
from transformers import PreTrainedModel
from transformers.generation.streamers import BaseStreamer

import foresay
from foresay import ConfigError
from foresay.integrations import transformers as integration
from foresay.models.sources.generation_settings import TREATMENTS, Kind
from helpers import tiny
from helpers.refusals import refused

ARGUMENTS = (
    "inputs generation_config logits_processor stopping_criteria assistant_model streamer prefix_allowed_tokens_fn "
    "synced_gpus negative_prompt_ids negative_prompt_attention_mask custom_generate kwargs"
)
"""Arguments of `generate`: honoured, from `prefix_allowed_tokens_fn` on refused, and (from negative_prompt_ids on) unused."""
POPPED = {"tokenizer", "assistant_tokenizer", "trust_remote_code"}
"""Keywords that `generate` takes out of kwargs before it calls a callable: honoured, refused, without effect."""
SWITCHES = "use_mtp is_assistant output_scores output_logits output_attentions output_hidden_states token_healing"
SETTINGS: dict[str, Any] = {
    **dict.fromkeys(SWITCHES.split(), True),
    "num_beams": 2,
    "num_beam_groups": 2,
    "penalty_alpha": 0.6,
    "dola_layers": "low",
    "prompt_lookup_num_tokens": 3,
    "assistant_early_exit": 1,
    "encoder_no_repeat_ngram_size": 2,
    "encoder_repetition_penalty": 1.5,
    "guidance_scale": 1.5,
    "watermarking_config": {"greenlist_ratio": 0.5},
    "constraints": ["a"],
    "force_words_ids": [[5]],
}
"""Settings that are refused in a call."""


IDS = torch.tensor([tiny.tokenizer()("hello world, hello").input_ids])


def _generate(model: PreTrainedModel, custom_generate: Any = foresay.generate, **arguments: Any) -> list[list[int]]:
    out: list[list[int]] = model.generate(
        **{"inputs": IDS, "do_sample": False, "custom_generate": custom_generate, **arguments}
    ).tolist()
    return out


def test_the_tables_are_complete() -> None:
    assert set(inspect.signature(hf.GenerationMixin.generate).parameters) - {"self"} == set(ARGUMENTS.split())
    readers = (hf.GenerationMixin._extract_generation_mode_kwargs, hf.GenerationMixin.generate)
    assert set(re.findall(r'(?<!_)kwargs\.pop\("(\w+)"', "".join(map(inspect.getsource, readers)))) == POPPED
    refused = (Kind.METHOD, Kind.ADDED, Kind.UNSUPPORTED)
    assert set(SETTINGS) | {"max_time"} == {name for name, kind in TREATMENTS.items() if kind in refused}


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_are_refused_by_name(model: PreTrainedModel, name: str) -> None:
    more = {"penalty_alpha": {"top_k": 4}, "num_beam_groups": {"num_beams": 2}}.get(name, {})
    named = {"num_beam_groups": "num_beams", "token_healing": "token healing"}  # the latter by transformers
    with pytest.raises((ConfigError, ValueError), match=named.get(name, name)):
        _generate(model, **{name: SETTINGS[name]}, **more)


def test_other_arguments_are_refused_by_name(model: PreTrainedModel) -> None:
    with refused("processors", "PrefixConstrainedLogitsProcessor"):
        _generate(model, prefix_allowed_tokens_fn=lambda _, ids: [40])
    for name, value in {"synced_gpus": True, "assistant_tokenizer": tiny.tokenizer()}.items():
        with refused(name, value):
            _generate(model, **{name: value})
    with refused("assistant_model", "LlamaForCausalLM"):
        _generate(model, assistant_model=tiny.llama(seed=1), draft=tiny.llama(seed=2))


def test_arguments_of_the_models_forward_are_refused_by_name() -> None:
    """GPT-2 adds an embedding for each token type."""
    config = hf.GPT2Config(vocab_size=300, n_embd=32, n_layer=2, n_head=4, bos_token_id=1, eos_token_id=0)
    gpt = hf.GPT2LMHeadModel(config).eval()
    assert _generate(gpt, max_new_tokens=4, pad_token_id=0) == _generate(gpt, None, max_new_tokens=4, pad_token_id=0)
    with refused("token_type_ids"):
        _generate(gpt, max_new_tokens=4, pad_token_id=0, token_type_ids=torch.zeros_like(IDS))


def test_arguments_without_effect(model: PreTrainedModel) -> None:
    plain = _generate(model, None)
    without = {"negative_prompt_ids": IDS, "negative_prompt_attention_mask": torch.ones_like(IDS)}
    assert _generate(model, **without, trust_remote_code=False, use_cache=True, num_assistant_tokens=3) == plain


class _Recorded(BaseStreamer):
    def __init__(self) -> None:
        self.puts: list[list[int]] = []
        self.ends = 0

    def put(self, value: torch.Tensor) -> None:
        assert not self.ends
        self.puts.append(value.reshape(-1).tolist())

    def end(self) -> None:
        self.ends += 1


@pytest.mark.parametrize("ours", [{}, {"drafter": "none"}, {"draft": "itself"}], ids=str)
def test_a_streamer_receives_what_transformers_sends(model: PreTrainedModel, ours: dict[str, Any]) -> None:
    ours = {"draft": tiny.llama()} if ours.get("draft") else ours
    wanted, got, bound = _Recorded(), _Recorded(), _Recorded()
    _generate(model, None, streamer=wanted)
    out = _generate(model, streamer=got, **ours)
    _generate(model, functools.partial(foresay.generate, streamer=bound), **ours)
    assert got.puts == bound.puts == wanted.puts
    assert list(itertools.chain(*got.puts)) == out[0]
    assert got.ends == bound.ends == wanted.ends == 1


def test_an_iterator_over_the_text(model: PreTrainedModel) -> None:
    """A consumer waits on another thread, also where the call is refused."""
    tokenizer = tiny.tokenizer()
    for arguments, wanted in (({}, tokenizer.decode(_generate(model)[0][IDS.shape[1] :])), ({"num_beams": 2}, "")):
        streamer = hf.TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=60)
        bound = functools.partial(foresay.generate, streamer=streamer)
        with ThreadPoolExecutor(1) as thread:
            decoding = thread.submit(_generate, model, bound, **arguments)
            assert "".join(streamer) == wanted
        assert isinstance(decoding.exception(), ConfigError) == bool(arguments)


def test_a_stream_has_one_row(model: PreTrainedModel) -> None:
    with pytest.raises(ValueError, match="batch size 1"):
        _generate(model, inputs=IDS.repeat(2, 1), streamer=hf.TextStreamer(tiny.tokenizer()))
    with refused("streamer"):
        _generate(model, inputs=IDS.repeat(2, 1), streamer=_Recorded())


def test_an_assistant_model_is_the_draft_model(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    drafts: list[Any] = []
    load = integration.load
    monkeypatch.setattr(
        integration, "load", lambda target, draft, **kw: drafts.append(draft) or load(target, draft, **kw)
    )
    assistant = tiny.llama(seed=1)
    assert _generate(model, assistant_model=assistant) == _generate(model, None)
    assert drafts[0].model.model is assistant


def test_stop_strings_with_their_tokenizer(model: PreTrainedModel) -> None:
    tokenizer = tiny.tokenizer()
    whole = tokenizer.decode(_generate(model)[0][IDS.shape[1] :])
    for strings in (whole[6:9], [whole[12:14], whole[6:9]]):
        wanted = _generate(model, None, stop_strings=strings, tokenizer=tokenizer)
        assert _generate(model, stop_strings=strings, tokenizer=tokenizer) == wanted != _generate(model)
        bound = functools.partial(foresay.generate, tokenizer=tokenizer)
        assert _generate(model, bound, stop_strings=strings) == wanted
    with refused("stop_strings", "end"):
        _generate(model, stop_strings="end")


def test_what_is_not_passed_on_is_read_from_the_call(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails where a transformers version names or passes these arguments differently."""
    tokenizer, streamer, assistant = tiny.tokenizer(), _Recorded(), tiny.llama(seed=1)
    given: dict[str, Any] = {"streamer": streamer, "assistant_model": assistant, "synced_gpus": True}
    given |= {"tokenizer": tokenizer, "assistant_tokenizer": tokenizer}
    seen: list[dict[str, Any]] = []

    def custom(model: Any, input_ids: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        assert not set(kwargs) & set(given)
        seen.append(integration._unseen())
        return input_ids

    _generate(model, custom, **given)
    assert seen == [given] and set(given) == set(integration._UNSEEN)
    assert integration._unseen() == {}
