"""foresay inside transformers: `model.generate(..., custom_generate=foresay.generate)`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as hf
from transformers import PreTrainedModel

import foresay
from foresay import ConfigError
from foresay.models.huggingface.attention import NAME
from helpers import tiny

TEXTS = ["hello world, hello", "a b c a b c a b", "x"]


def _one(text: str = TEXTS[0]) -> dict[str, Any]:
    return dict(tiny.tokenizer()(text, return_tensors="pt", return_token_type_ids=False))


def _batch() -> dict[str, Any]:
    """Left-padded, with a token that is not the end token."""
    tokenizer = tiny.tokenizer()
    tokenizer.pad_token, tokenizer.padding_side = "<bos>", "left"
    out = dict(tokenizer(TEXTS, return_tensors="pt", padding=True, return_token_type_ids=False))
    assert not bool(out["attention_mask"].all())
    return out


def _both(model: PreTrainedModel, inputs: dict[str, Any], **kwargs: Any) -> tuple[list[Any], list[Any]]:
    """Outputs of transformers and of foresay."""
    names = ("draft", "drafter", "num_draft_tokens", "length", "rule")
    ours = {name: kwargs.pop(name) for name in names if name in kwargs}
    plain = model.generate(**inputs, **kwargs)
    fast = model.generate(**inputs, **kwargs, custom_generate=foresay.generate, **ours)
    return plain.tolist(), fast.tolist()


@pytest.mark.parametrize(
    "ours",
    [
        *({}, {"drafter": "none"}, {"num_draft_tokens": 3}, {"rule": "block"}, {"rule": "coupled"}),
        *({"length": "heuristic"}, {"draft": 1}, {"draft": 0}),  # seeds: one that is often wrong, one that is right
    ],
    ids=str,
)
def test_greedy_is_what_generate_writes(model: PreTrainedModel, ours: dict[str, Any]) -> None:
    """One prompt and a batch of left-padded ones."""
    if "draft" in ours:
        ours = {"draft": tiny.llama(seed=ours["draft"])}
    plain, fast = _both(model, _one(), do_sample=False, **ours)
    assert fast == plain and len(fast[0]) == _one()["input_ids"].shape[1] + 24
    plain, fast = _both(model, _batch(), do_sample=False, **ours)
    assert fast == plain and len({tuple(row[-24:]) for row in fast}) == 3, "not one row three times"
    if not ours:
        for text, row in zip(TEXTS, fast, strict=True):
            assert _both(model, _one(text), do_sample=False)[1][0][-24:] == row[-24:]


@pytest.mark.parametrize("first", [0, 1])
def test_end_tokens_and_padding(model: PreTrainedModel, first: int) -> None:
    """Rows end at different lengths, and the shorter ones are padded; by the first of the end tokens if by none."""
    ends = [model.generate(**_one(text), do_sample=False)[0, -24:].tolist() for text in TEXTS]
    eos = [ends[0][5], ends[1][11]]
    plain, fast = _both(model, _batch(), do_sample=False, eos_token_id=eos, pad_token_id=1)
    assert fast == plain and fast[0][-1] == 1
    model.generation_config.pad_token_id = None
    plain, fast = _both(model, _batch(), do_sample=False, eos_token_id=[eos[first], eos[1 - first]])
    assert fast == plain and fast[0][-1] == eos[first]


class Odd(hf.LogitsProcessor):
    """Allows odd tokens after contexts of an even length, and even ones after others."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores = scores.clone()
        scores[:, int(input_ids.shape[1]) % 2 :: 2] = -torch.inf
        return scores


PENALTY = {"logits_processor": [hf.RepetitionPenaltyLogitsProcessor(1.7)]}
BIAS = {"sequence_bias": {(43,): -5.0}}
LEAST = hf.MinNewTokensLengthLogitsProcessor(_one()["input_ids"].shape[1], 10, 43, device="cpu")
SETTINGS: list[tuple[dict[str, Any], bool]] = [
    *(({"repetition_penalty": 1.7}, False), ({"no_repeat_ngram_size": 2}, False)),
    *(({"min_new_tokens": 20, "eos_token_id": 43}, False), ({"min_length": 30, "eos_token_id": 43}, False)),
    *(({"bad_words_ids": [[43], [39]]}, False), ({"suppress_tokens": [43, 39, 20]}, False)),
    *(({"max_length": 25, "max_new_tokens": None}, False), ({"forced_eos_token_id": 0}, False)),
    ({"repetition_penalty": 1.3, "no_repeat_ngram_size": 3, "bad_words_ids": [[39, 20]]}, False),
    *(({"sequence_bias": {(43,): -50.0, (20, 17): 20.0}}, False), ({"logits_processor": [Odd()]}, False)),
    ({"eos_token_id": 43, "logits_processor": [LEAST]}, False),  # next to a setting that states nothing
    # transformers counts the padding: a processor that looks at the length must see the same length
    ({"begin_suppress_tokens": "first"}, True),
    ({"exponential_decay_length_penalty": (4, 3.0), "eos_token_id": 43}, True),
    *(({"forced_eos_token_id": 0}, True), ({"min_length": 36, "eos_token_id": 43}, True)),
    ({"min_new_tokens": 20, "eos_token_id": 43}, True),
    # the setting leaves each row's padding out, by a tensor with a position for each row; the caller's own does not
    *(({"repetition_penalty": 1.7}, True), ({"repetition_penalty": 1.7, **BIAS}, True)),
    *((PENALTY, True), ({**PENALTY, **BIAS}, True)),
]
"""Settings, and whether they are those of a left-padded batch."""


@pytest.mark.parametrize(("settings", "is_batch"), SETTINGS)
def test_greedy_under_settings(model: PreTrainedModel, settings: dict[str, Any], is_batch: bool) -> None:
    inputs = _batch() if is_batch else _one()
    eos = {"eos_token_id": 43} if LEAST in settings.get("logits_processor", []) else {}
    unset = model.generate(**inputs, do_sample=False, **eos).tolist()
    if settings.get("begin_suppress_tokens") == "first":
        width = inputs["input_ids"].shape[1]
        settings = {"begin_suppress_tokens": sorted({row[width] for row in unset} | {row[width + 9] for row in unset})}
    plain, fast = _both(model, inputs, do_sample=False, **settings)
    assert fast == plain
    assert plain != unset, "the setting must matter, or this tests nothing"


class After(hf.StoppingCriteria):
    def __init__(self, token: int) -> None:
        self.token = token

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return input_ids[:, -1] == self.token


def test_stopping_criteria(model: PreTrainedModel) -> None:
    """The caller's own criteria, stop strings (as an argument: test_transformers_arguments), and a time limit."""
    tokenizer, length = tiny.tokenizer(), _one()["input_ids"].shape[1]
    whole = model.generate(**_one(), do_sample=False)[0, -24:].tolist()
    strings = hf.StopStringCriteria(tokenizer, [tokenizer.decode(whole)[6:9]])
    for inputs, criterion in ((_one(), After(whole[9])), (_batch(), After(whole[9])), (_one(), strings)):
        plain, fast = _both(model, inputs, do_sample=False, stopping_criteria=[criterion])
        assert fast == plain
        assert len(fast) > 1 or len(fast[0]) < length + 24
    timed = {"stopping_criteria": [hf.MaxTimeCriteria(0.0)], "custom_generate": foresay.generate}
    assert model.generate(**_one(), do_sample=False, **timed).shape[1] == length + 1


def test_end_tokens_and_lengths_of_the_callers_own(model: PreTrainedModel) -> None:
    """transformers uses the caller's criterion instead of its own; it may end the output earlier or later."""
    length = _one()["input_ids"].shape[1]
    whole = model.generate(**_one(), do_sample=False)[0, length:].tolist()
    for criteria, settings in [
        ([hf.EosTokenCriteria(whole[2])], {"eos_token_id": whole[9]}),
        ([hf.EosTokenCriteria(whole[9])], {"eos_token_id": whole[2]}),
        ([hf.EosTokenCriteria(torch.tensor(whole[2]))], {"eos_token_id": whole[9], "min_new_tokens": 4}),
        ([hf.MaxLengthCriteria(length + 5)], {}),
        ([hf.MaxLengthCriteria(length + 30)], {}),
        ([hf.MaxLengthCriteria(length - 2)], {}),
        ([hf.MaxLengthCriteria(length + 30), hf.MaxLengthCriteria(length + 7)], {"min_new_tokens": 9}),
    ]:
        unset = model.generate(**_one(), do_sample=False, **settings).tolist()
        plain, fast = _both(model, _one(), do_sample=False, stopping_criteria=criteria, **settings)
        assert fast == plain != unset, (criteria, settings)


def _sampled(model: PreTrainedModel, **kwargs: Any) -> list[list[int]]:
    out = model.generate(**_batch(), do_sample=True, custom_generate=foresay.generate, **kwargs)
    return [row[-24:] for row in out.tolist()]


def test_sampling_repeats_with_its_seed_or_pytorchs(model: PreTrainedModel) -> None:
    first = _sampled(model, seed=7)
    assert _sampled(model, seed=7) == first != _sampled(model, seed=8)
    torch.manual_seed(3)
    first, second = _sampled(model), _sampled(model)
    torch.manual_seed(3)
    assert _sampled(model) == first != second
    torch.manual_seed(4)
    assert _sampled(model) != first


def test_returned_sequences_differ_and_a_dictionary_may_be_asked_for(model: PreTrainedModel) -> None:
    asked = model.generate(**_one(), do_sample=False, return_dict_in_generate=True, custom_generate=foresay.generate)
    assert asked.sequences.tolist() == model.generate(**_one(), do_sample=False).tolist()
    out = model.generate(
        **_one(), do_sample=True, temperature=2.0, num_return_sequences=3, seed=1, custom_generate=foresay.generate
    )
    assert out.shape[0] == 3
    assert len({tuple(row) for row in out.tolist()}) == 3


def test_arguments_and_inputs_are_refused_by_name(model: PreTrainedModel) -> None:
    """Settings and other arguments: test_transformers_arguments."""
    padded = _one()
    padded["attention_mask"][0, -1] = 0
    embeddings = model.get_input_embeddings()(_one()["input_ids"])
    for given, error, message in (
        ({**_one(), "num_draft_token": 3}, (ValueError, ConfigError), "num_draft_token"),
        ({**_one(), "drafter": "lookup"}, foresay.errors.UnknownNameError, "drafter='lookup'"),
        (padded, ConfigError, "pad on the left"),
        ({"inputs_embeds": embeddings}, ConfigError, "inputs_embeds|empty"),
        ({**_one(), "length": "heuristic", "num_draft_tokens": 3}, ConfigError, "num_draft_tokens=3"),
    ):
        with pytest.raises(error, match=message):  # type: ignore[call-overload]
            model.generate(**given, do_sample=False, custom_generate=foresay.generate)


def _attention(model: PreTrainedModel) -> set[str]:
    return {m.config._attn_implementation for m in model.modules() if hasattr(m, "config")}


def _broken(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("broken processor")


@pytest.mark.parametrize("training", [False, True])
def test_models_are_restored(model: PreTrainedModel, training: bool) -> None:
    """Attention and training mode, as after transformers' own `generate`."""
    draft = tiny.llama(seed=1)
    before, logits = (_attention(model), _attention(draft)), model(**_one()).logits
    assert NAME not in before[0]
    model.train(training)
    model.generate(**_one(), do_sample=False, custom_generate=foresay.generate, draft=draft)
    assert (_attention(model), _attention(draft), model.training) == (*before, training)
    assert torch.equal(model(**_one()).logits, logits)


@pytest.mark.parametrize(
    ("ours", "error"),
    [
        ({"draft": "./no-such-folder"}, foresay.ModelNotFoundError),
        ({"drafter": "nothing"}, foresay.errors.UnknownNameError),
        ({"num_draft_tokens": -1}, ConfigError),
        ({"rule": "nothing"}, foresay.errors.UnknownNameError),
        ({"drafter": lambda: 1 / 0}, ZeroDivisionError),
        ({"logits_processor": [_broken]}, RuntimeError),
        ({}, foresay.UnsupportedModelError),
    ],
    ids=["draft", "drafter", "num_draft_tokens", "rule", "builder", "decoding", "self_check"],
)
def test_it_is_restored_after_an_error(
    model: PreTrainedModel, ours: dict[str, Any], error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    if not ours:
        monkeypatch.setattr("foresay.models.huggingface.self_check.VERIFIED", frozenset())
        monkeypatch.setattr("foresay.models.huggingface.self_check.probe", lambda _: 1.0)
    before = _attention(model)
    with pytest.raises(error):
        model.generate(**_one(), do_sample=False, custom_generate=foresay.generate, **ours)
    assert _attention(model) == before
