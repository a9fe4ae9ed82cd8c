"""Inside transformers every processor and warper acts at its index: its distribution, against transformers' own."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation import logits_process as hf

import foresay
from foresay.decoding.distributions import build_distributions
from foresay.decoding.rows import Rows
from foresay.decoding.sampling_params import SamplingParams
from foresay.integrations import transformers as integration
from helpers import reference
from helpers.families import make
from helpers.making import make_row

VOCAB = 8
PROMPT = [5, 2, 3, 5]
EOS = 6
DEFAULTS: dict[str, Any] = {"top_k": 0, "top_p": 1.0, "temperature": 1.0}
"""Settings that use no warper at all, whatever transformers' defaults are."""


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return _model(0)


def _model(seed: int) -> PreTrainedModel:
    """Eight tokens, and distributions that are neither flat nor certain."""
    model = make("llama", seed, vocab_size=VOCAB)
    model.lm_head.weight.data *= 0.25
    model.generation_config = GenerationConfig(eos_token_id=None, bos_token_id=1, pad_token_id=0, max_new_tokens=4)
    return model


def _eos(config: GenerationConfig) -> frozenset[int]:
    return frozenset() if config.eos_token_id is None else frozenset([int(config.eos_token_id)])


def _ours(processors: hf.LogitsProcessorList, config: GenerationConfig) -> SamplingParams:
    return integration._params(config, processors, None, _eos(config), len(PROMPT), False)


def _last_one_wins(processors: hf.LogitsProcessorList, config: GenerationConfig) -> SamplingParams:
    """The translation as it was: a warper overwrites the field that an earlier one set, wherever it stands."""
    names = integration._WARPERS
    fields: dict[str, Any] = {"temperature": 1.0 if config.do_sample else 0.0}
    others: list[Any] = []
    for processor in processors:
        if type(processor) in names:
            fields[names[type(processor)]] = getattr(processor, names[type(processor)])
        elif type(processor) is hf.RepetitionPenaltyLogitsProcessor and not others:
            fields["repetition_penalty"] = processor.penalty
        else:
            others.append(processor)
    return SamplingParams(max_new_tokens=config.max_length - len(PROMPT), processors=tuple(others), **fields)


def _handed(
    model: PreTrainedModel, own: Sequence[Any], settings: dict[str, Any]
) -> tuple[hf.LogitsProcessorList, GenerationConfig]:
    """The list and the settings that transformers hands to a custom_generate."""
    handed: list[Any] = []

    def look(model: PreTrainedModel, input_ids: torch.Tensor, **given: Any) -> torch.Tensor:
        handed.extend((given["logits_processor"], given["generation_config"]))
        return input_ids

    own = hf.LogitsProcessorList(own)
    model.generate(torch.tensor([PROMPT]), logits_processor=own, **DEFAULTS | settings, custom_generate=look)
    return handed[0], handed[1]


def _theirs(processors: hf.LogitsProcessorList, config: GenerationConfig, logits: torch.Tensor) -> torch.Tensor:
    """The distribution that `_sample` of transformers makes of the list, [V]."""
    scores = processors(torch.tensor([PROMPT]), logits[None].clone())[0]
    return scores.double().softmax(-1) if config.do_sample else _point(int(scores.argmax()), len(logits))


def _distribution(params: SamplingParams, config: GenerationConfig, logits: torch.Tensor) -> torch.Tensor:
    """The distribution that foresay decodes with, [V]."""
    row = make_row(PROMPT, eos=_eos(config), **{name: getattr(params, name) for name in SamplingParams.__slots__})
    distributions = build_distributions(logits[None, None].clone(), Rows([row]), counts=[0])
    if distributions.probs is None:
        return _point(int(distributions.greedy_ids[0, 0]), len(logits))
    return distributions.probs[0].double()


def _point(token: int, size: int) -> torch.Tensor:
    return torch.eye(size, dtype=torch.float64)[token]


def _distance(model: PreTrainedModel, own: Sequence[Any], settings: dict[str, Any], translate: Any = _ours) -> float:
    """The greatest total variation from transformers over some fixed logits; 1 if the sets of tokens differ."""
    processors, config = _handed(model, own, settings)
    params = translate(processors, config)
    worst = 0.0
    for seed in range(4):
        logits = torch.randn(24, generator=torch.Generator().manual_seed(seed)) * 2
        theirs, ours = _theirs(processors, config, logits), _distribution(params, config, logits)
        if not torch.equal(theirs > 1e-30, ours > 1e-30):
            return 1.0
        worst = max(worst, float((theirs - ours).abs().sum() / 2))
    return worst


class Odd(hf.LogitsProcessor):
    """Looks at the context and at the order of the scores."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores = scores.clone()
        scores[:, int(input_ids[0, -1]) % 3 :: 3] += 1.5
        scores[:, int(scores.argmax())] -= 1.0
        return scores


SAMPLE = {"do_sample": True}
GREEDY = {"do_sample": False}
WRONG_BEFORE: list[tuple[list[Any], dict[str, Any]]] = [
    ([hf.TemperatureLogitsWarper(0.7)], GREEDY),
    ([hf.TopKLogitsWarper(2)], {**SAMPLE, "top_k": 50}),
    ([hf.TopKLogitsWarper(2)], {**SAMPLE, "top_k": 5}),
    ([hf.TopPLogitsWarper(0.01)], {**SAMPLE, "top_p": 0.9}),
    ([hf.TemperatureLogitsWarper(0.01)], {**SAMPLE, "temperature": 0.9}),
    ([hf.MinPLogitsWarper(0.9)], {**SAMPLE, "min_p": 0.05}),
    ([hf.TopKLogitsWarper(4), Odd()], SAMPLE),
    ([hf.TemperatureLogitsWarper(0.3), Odd()], SAMPLE),
    ([hf.MinPLogitsWarper(0.3), hf.TemperatureLogitsWarper(3.0)], SAMPLE),
    ([hf.TopPLogitsWarper(0.5), hf.TemperatureLogitsWarper(2.5)], SAMPLE),
    ([hf.TopPLogitsWarper(0.7), hf.TopKLogitsWarper(4), hf.TopPLogitsWarper(0.8)], SAMPLE),
    ([hf.TopPLogitsWarper(0.1, min_tokens_to_keep=5)], SAMPLE),
    ([hf.MinPLogitsWarper(0.9, min_tokens_to_keep=4)], SAMPLE),
    ([hf.TopKLogitsWarper(3, filter_value=-1.0)], SAMPLE),
    ([hf.RepetitionPenaltyLogitsProcessor(3.0), hf.RepetitionPenaltyLogitsProcessor(1.2)], SAMPLE),
]


def _names(value: Any) -> str:
    return "+".join(type(p).__name__ for p in value) if isinstance(value, list) else str(value)


@pytest.mark.parametrize(("own", "settings"), WRONG_BEFORE, ids=_names)
def test_the_distribution_is_transformers(model: PreTrainedModel, own: list[Any], settings: dict[str, Any]) -> None:
    assert _distance(model, own, settings) < 1e-5
    assert _distance(model, own, settings, _last_one_wins) > 0.02, "the translation as it was must fail the comparison"


BESIDE: list[dict[str, Any]] = [
    *[dict[str, Any]()] * 4,
    {"temperature": 1.7, "top_k": 6, "top_p": 0.9, "min_p": 0.1},
    {"temperature": 0.6, "top_k": 2, "repetition_penalty": 1.4, "renormalize_logits": True},
    *({"temperature": 1.3, "top_k": 20, **one} for one in ({"typical_p": 0.5}, {"epsilon_cutoff": 0.05})),
    *({"temperature": 1.3, "top_k": 20, **one} for one in ({"eta_cutoff": 0.1}, {"top_h": 0.5})),
]


def _some(dice: random.Random) -> Any:
    """A processor or warper; any of them leaves a token."""
    return dice.choice(
        [
            lambda: hf.TemperatureLogitsWarper(dice.uniform(0.2, 3)),
            lambda: hf.TopKLogitsWarper(dice.randint(1, 30), min_tokens_to_keep=dice.randint(1, 3)),
            lambda: hf.TopPLogitsWarper(dice.choice([0.0, 1.0, dice.uniform(0.1, 0.99)]), min_tokens_to_keep=1),
            lambda: hf.TopPLogitsWarper(dice.uniform(0.1, 0.99), min_tokens_to_keep=dice.randint(1, 4)),
            lambda: hf.MinPLogitsWarper(dice.choice([0, 1, dice.uniform(0.0, 0.6)]), min_tokens_to_keep=1),
            lambda: hf.MinPLogitsWarper(dice.uniform(0.0, 0.6), min_tokens_to_keep=dice.randint(1, 4)),
            lambda: hf.TypicalLogitsWarper(dice.uniform(0.3, 0.95)),
            lambda: hf.EpsilonLogitsWarper(dice.uniform(0.01, 0.2)),
            lambda: hf.EtaLogitsWarper(dice.uniform(0.01, 0.2)),
            lambda: hf.TopHLogitsWarper(dice.uniform(0.3, 1)),
            lambda: hf.RepetitionPenaltyLogitsProcessor(dice.uniform(0.5, 3)),
            lambda: hf.RepetitionPenaltyLogitsProcessor(dice.uniform(0.5, 3), prompt_ignore_length=2),
            lambda: hf.SequenceBiasLogitsProcessor({(5, 7): 4.0, (9,): -3.0}),
            lambda: hf.NoRepeatNGramLogitsProcessor(2),
            hf.LogitNormalization,
            Odd,
        ]
    )()


def test_any_list(model: PreTrainedModel) -> None:
    """200 lists of up to five, next to settings of the caller, some of which only transformers has."""
    dice = random.Random(5)
    for _ in range(200):
        own = [_some(dice) for _ in range(dice.randint(1, 5))]
        settings = {"do_sample": dice.random() < 0.8, **dice.choice(BESIDE)}
        if dice.random() < 0.3:
            settings |= {"min_new_tokens": 2, "eos_token_id": EOS}
        assert _distance(model, own, settings) < 1e-5, (_names(own), [vars(p) for p in own], settings)


@pytest.mark.parametrize("sample", [SAMPLE, GREEDY], ids=str)
def test_a_least_length_acts_in_its_place(model: PreTrainedModel, sample: dict[str, Any]) -> None:
    """After a top-k the end token has taken the position of another one."""
    logits = torch.linspace(0, 3, 24)
    logits[EOS] = 9.0
    for eos, step in itertools.product((EOS, 7), (1, -1)):
        for least in (
            hf.MinNewTokensLengthLogitsProcessor(len(PROMPT), 2, eos),
            hf.MinLengthLogitsProcessor(len(PROMPT) + 2, eos),
            hf.MinNewTokensLengthLogitsProcessor(len(PROMPT) - 2, 2, eos),  # over already
        ):
            processors, config = _handed(
                model, [least, hf.TopKLogitsWarper(3)][::step], {**sample, "eos_token_id": EOS}
            )
            theirs = _theirs(processors, config, logits)
            assert torch.allclose(_distribution(_ours(processors, config), config, logits), theirs, atol=1e-5)


def test_what_foresay_has_itself_is_not_called(model: PreTrainedModel) -> None:
    """Settings alone, and warpers of the caller's own in the usual order, become fields: no processor, at no cost."""
    settings = {"temperature": 0.8, "top_k": 5, "top_p": 0.9, "min_p": 0.1, "repetition_penalty": 1.3}
    settings |= {"min_new_tokens": 2, "eos_token_id": EOS, "renormalize_logits": True}
    params = _ours(*_handed(model, [], {**SAMPLE, **settings}))
    assert params.processors == ()
    for name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "min_new_tokens"):
        assert getattr(params, name) == settings[name]
    params = _ours(*_handed(model, [hf.TemperatureLogitsWarper(0.8), hf.TopPLogitsWarper(0.9)], SAMPLE))
    assert (params.temperature, params.top_p, params.processors) == (0.8, 0.9, ())
    params = _ours(*_handed(model, [hf.TopKLogitsWarper(2)], {**SAMPLE, **settings}))
    assert [type(p) for p in params.processors] == [hf.TopKLogitsWarper]  # only what comes before what foresay has
    assert (params.temperature, params.top_k, params.top_p) == (0.8, 5, 0.9)


def test_greedy_writes_the_same_under_every_warper(model: PreTrainedModel) -> None:
    greedy = {"inputs": torch.tensor([PROMPT]), "do_sample": False, "max_new_tokens": 20}
    every = [
        hf.TemperatureLogitsWarper(0.4),
        hf.TopKLogitsWarper(3),
        hf.TopPLogitsWarper(0.6),
        hf.MinPLogitsWarper(0.2),
    ]
    every += [hf.RepetitionPenaltyLogitsProcessor(2.5), hf.TypicalLogitsWarper(0.7), Odd()]
    every += [hf.EpsilonLogitsWarper(0.1), hf.EtaLogitsWarper(0.1), hf.TopHLogitsWarper(0.5)]
    for own in (every, every[::-1]):
        plain = model.generate(**greedy, logits_processor=own)
        for drafter in ("none", "auto"):
            ours = {"custom_generate": foresay.generate, "drafter": drafter}
            assert model.generate(**greedy, logits_processor=own, **ours).tolist() == plain.tolist(), drafter


LENGTH = 2
USUAL = {"temperature": 0.8, "top_k": 6, "top_p": 0.97}
SAMPLED: list[tuple[list[Any], dict[str, Any], str]] = [
    ([hf.TopPLogitsWarper(0.95), hf.TemperatureLogitsWarper(2.0), hf.TopKLogitsWarper(5)], USUAL, "speculative"),
    (
        [hf.TemperatureLogitsWarper(3.0), hf.MinPLogitsWarper(0.1), hf.RepetitionPenaltyLogitsProcessor(1.5)],
        USUAL,
        "speculative",
    ),
    ([hf.TopPLogitsWarper(0.95), hf.TemperatureLogitsWarper(2.0), hf.TopKLogitsWarper(5)], USUAL, "block"),
    *(([], {"temperature": 1.5, "top_k": 4}, "speculative"), ([], {"temperature": 2.0, "top_p": 0.7}, "block")),
    ([], {"temperature": 2.0, "min_p": 0.3}, "coupled"),
]
"""Warpers of the caller's own, settings, rule."""


def _joint(model: PreTrainedModel, own: list[Any], settings: dict[str, Any]) -> np.ndarray:
    """The distribution of two tokens, by enumeration of transformers' own processing, [V ** 2]."""
    processors, _ = _handed(model, own, settings)
    out = np.ones((VOCAB,) * LENGTH)
    for length in range(LENGTH):
        prefixes = list(itertools.product(range(VOCAB), repeat=length))
        ids = torch.tensor([[*PROMPT, *prefix] for prefix in prefixes])
        with torch.no_grad():
            scores = model(ids).logits[:, -1].float()
        distributions = processors(ids, scores).double().softmax(-1)
        out *= distributions.numpy().reshape((VOCAB,) * (length + 1) + (1,) * (LENGTH - 1 - length))
    return out.reshape(-1)


def _written(model: PreTrainedModel, own: list[Any], settings: dict[str, Any], rule: str) -> list[list[int]]:
    ours = {"custom_generate": foresay.generate, "draft": _model(1), "num_draft_tokens": 2, "rule": rule, "seed": 17}
    settings = {**DEFAULTS, **settings, "max_new_tokens": LENGTH + 1}
    out = model.generate(torch.tensor([PROMPT] * 300), logits_processor=own, **settings, **ours)
    return [row[len(PROMPT) : len(PROMPT) + LENGTH] for row in out.tolist()]


@pytest.mark.parametrize(("own", "settings", "rule"), SAMPLED, ids=_names)
def test_the_distribution_with_a_draft(
    model: PreTrainedModel, own: list[Any], settings: dict[str, Any], rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two tokens against the enumerated distribution; false alarm 1e-5. The translation as it was must be found out."""
    steps, engine_step, settings = list[Any](), foresay.Engine.step, {**SAMPLE, **settings}

    def watched(engine: foresay.Engine) -> Any:
        steps.extend(found := engine_step(engine))
        return found

    monkeypatch.setattr(foresay.Engine, "step", watched)
    distribution = _joint(model, own, settings)
    assert reference.p_value(_written(model, own, settings, rule), distribution, VOCAB) > 1e-5
    accepted, drafted = sum(s.num_accepted for s in steps), sum(s.num_drafted for s in steps)
    assert 60 < accepted < drafted - 60, "the draft must be both right and wrong, or this tests nothing"
    if own:
        monkeypatch.setattr(integration, "_params", lambda config, listed, *_: _last_one_wins(listed, config))
        assert reference.p_value(_written(model, own, settings, rule), distribution, VOCAB) < 1e-5


class OwnError(Exception):
    """A foreign one."""


@pytest.mark.parametrize(
    ("sample", "later", "drafted", "start"),
    [
        *((SAMPLE, [], False, 0), (GREEDY, [], True, 3), (SAMPLE, [hf.TopKLogitsWarper(3)], True, 0)),
        *((GREEDY, [hf.TopKLogitsWarper(3)], False, 3), (SAMPLE, [hf.TypicalLogitsWarper(0.9)], True, 3)),
    ],
    ids=_names,
)
def test_an_error_of_the_callers_own_surfaces_as_it_was_raised(
    model: PreTrainedModel, sample: dict[str, Any], later: list[Any], drafted: bool, start: int
) -> None:
    error = OwnError("mine")

    def broken(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if ids.shape[1] >= len(PROMPT) + start:
            raise error
        return scores

    ours: dict[str, Any] = {"draft": _model(1), "num_draft_tokens": 3} if drafted else {"drafter": "none"}
    ours |= {"custom_generate": foresay.generate, "max_new_tokens": 8, **sample}
    own = [hf.TemperatureLogitsWarper(0.5), broken, *later]
    with pytest.raises(OwnError) as raised:
        model.generate(torch.tensor([PROMPT] * 2), logits_processor=own, **ours)
    assert raised.value is error
