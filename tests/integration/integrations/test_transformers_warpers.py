"""Inside transformers every processor and warper acts at its index: its distribution, against transformers' own."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    GenerationConfig,
    LogitNormalization,
    LogitsProcessor,
    LogitsProcessorList,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoRepeatNGramLogitsProcessor,
    PreTrainedModel,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)
from transformers.generation.logits_process import TopHLogitsWarper

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


# -- the distribution of one token --------------------------------------------------------------------------------------------

Translation = Callable[[LogitsProcessorList, GenerationConfig], SamplingParams]


def _ours(processors: LogitsProcessorList, config: GenerationConfig) -> SamplingParams:
    eos = frozenset() if config.eos_token_id is None else frozenset([int(config.eos_token_id)])
    return integration._params(config, processors, None, eos, len(PROMPT), False)


def _last_one_wins(processors: LogitsProcessorList, config: GenerationConfig) -> SamplingParams:
    """The translation as it was: a warper overwrites the field that an earlier one set, wherever it stands."""
    names = {TemperatureLogitsWarper: "temperature", TopKLogitsWarper: "top_k"}
    names |= {TopPLogitsWarper: "top_p", MinPLogitsWarper: "min_p"}
    fields: dict[str, Any] = {"temperature": 1.0 if config.do_sample else 0.0}
    others: list[Any] = []
    for processor in processors:
        if type(processor) in names:
            fields[names[type(processor)]] = getattr(processor, names[type(processor)])
        elif type(processor) is RepetitionPenaltyLogitsProcessor and not others:
            fields["repetition_penalty"] = processor.penalty
        else:
            others.append(processor)
    return SamplingParams(max_new_tokens=config.max_length - len(PROMPT), processors=tuple(others), **fields)


def _as_it_was(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(integration, "_params", lambda config, listed, *_: _last_one_wins(listed, config))


def _handed(
    model: PreTrainedModel, own: Sequence[Any], settings: dict[str, Any]
) -> tuple[LogitsProcessorList, GenerationConfig]:
    """The list and the settings that transformers hands to a custom_generate."""
    handed: list[Any] = []

    def look(model: PreTrainedModel, input_ids: torch.Tensor, **given: Any) -> torch.Tensor:
        handed.extend((given["logits_processor"], given["generation_config"]))
        return input_ids

    own = LogitsProcessorList(own)
    model.generate(torch.tensor([PROMPT]), logits_processor=own, **DEFAULTS | settings, custom_generate=look)
    return handed[0], handed[1]


def _theirs(processors: LogitsProcessorList, config: GenerationConfig, logits: torch.Tensor) -> torch.Tensor:
    """The distribution that `_sample` of transformers makes of the list, [V]."""
    scores = processors(torch.tensor([PROMPT]), logits[None].clone())[0]
    return scores.double().softmax(-1) if config.do_sample else _point(int(scores.argmax()), len(logits))


def _distribution(params: SamplingParams, config: GenerationConfig, logits: torch.Tensor) -> torch.Tensor:
    """The distribution that foresay decodes with, [V]."""
    eos = frozenset() if config.eos_token_id is None else frozenset([int(config.eos_token_id)])
    row = make_row(PROMPT, eos=eos, **{name: getattr(params, name) for name in SamplingParams.__slots__})
    distributions = build_distributions(logits[None, None].clone(), Rows([row]), counts=[0])
    if distributions.probs is None:
        return _point(int(distributions.greedy_ids[0, 0]), len(logits))
    return distributions.probs[0].double()


def _point(token: int, size: int) -> torch.Tensor:
    return torch.eye(size, dtype=torch.float64)[token]


def _distance(
    model: PreTrainedModel, own: Sequence[Any], settings: dict[str, Any], translate: Translation = _ours
) -> float:
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


class Odd(LogitsProcessor):
    """Looks at the context and at the order of the scores."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores = scores.clone()
        scores[:, int(input_ids[0, -1]) % 3 :: 3] += 1.5
        scores[:, int(scores.argmax())] -= 1.0
        return scores


SAMPLE = {"do_sample": True}
GREEDY = {"do_sample": False}
WRONG_BEFORE: list[tuple[list[Any], dict[str, Any]]] = [
    ([TemperatureLogitsWarper(0.7)], GREEDY),
    ([TopKLogitsWarper(2)], {**SAMPLE, "top_k": 50}),
    ([TopKLogitsWarper(2)], {**SAMPLE, "top_k": 5}),
    ([TopPLogitsWarper(0.01)], {**SAMPLE, "top_p": 0.9}),
    ([TemperatureLogitsWarper(0.01)], {**SAMPLE, "temperature": 0.9}),
    ([MinPLogitsWarper(0.9)], {**SAMPLE, "min_p": 0.05}),
    ([TopKLogitsWarper(4), Odd()], SAMPLE),
    ([TemperatureLogitsWarper(0.3), Odd()], SAMPLE),
    ([MinPLogitsWarper(0.3), TemperatureLogitsWarper(3.0)], SAMPLE),
    ([TopPLogitsWarper(0.5), TemperatureLogitsWarper(2.5)], SAMPLE),
    ([TopPLogitsWarper(0.7), TopKLogitsWarper(4), TopPLogitsWarper(0.8)], SAMPLE),
    ([TopPLogitsWarper(0.1, min_tokens_to_keep=5)], SAMPLE),
    ([MinPLogitsWarper(0.9, min_tokens_to_keep=4)], SAMPLE),
    ([TopKLogitsWarper(3, filter_value=-1.0)], SAMPLE),
    ([RepetitionPenaltyLogitsProcessor(3.0), RepetitionPenaltyLogitsProcessor(1.2)], SAMPLE),
]


def _names(value: Any) -> str:
    return "+".join(type(p).__name__ for p in value) if isinstance(value, list) else str(value)


@pytest.mark.parametrize(("own", "settings"), WRONG_BEFORE, ids=_names)
def test_the_law_is_transformers(model: PreTrainedModel, own: list[Any], settings: dict[str, Any]) -> None:
    assert _distance(model, own, settings) < 1e-5
    assert _distance(model, own, settings, _last_one_wins) > 0.02, "the translation as it was must fail the comparison"


PAIRED: list[Any] = [
    TemperatureLogitsWarper(0.4),
    TopKLogitsWarper(3),
    TopPLogitsWarper(0.6),
    MinPLogitsWarper(0.2),
    RepetitionPenaltyLogitsProcessor(2.5),
    TypicalLogitsWarper(0.7),
    Odd(),
]
BESIDE: list[dict[str, Any]] = [
    {},
    {"temperature": 1.7, "top_k": 6, "top_p": 0.9, "min_p": 0.1},
    {"temperature": 0.6, "top_k": 2, "repetition_penalty": 1.4, "renormalize_logits": True},
]


def _some(dice: random.Random) -> Any:
    """A processor or warper; any of them leaves a token."""
    return dice.choice(
        [
            lambda: TemperatureLogitsWarper(dice.uniform(0.2, 3)),
            lambda: TopKLogitsWarper(dice.randint(1, 30), min_tokens_to_keep=dice.randint(1, 3)),
            lambda: TopPLogitsWarper(dice.choice([0.0, 1.0, dice.uniform(0.1, 0.99)]), min_tokens_to_keep=1),
            lambda: TopPLogitsWarper(dice.uniform(0.1, 0.99), min_tokens_to_keep=dice.randint(1, 4)),
            lambda: MinPLogitsWarper(dice.choice([0, 1, dice.uniform(0.0, 0.6)]), min_tokens_to_keep=1),
            lambda: MinPLogitsWarper(dice.uniform(0.0, 0.6), min_tokens_to_keep=dice.randint(1, 4)),
            lambda: TypicalLogitsWarper(dice.uniform(0.3, 0.95)),
            lambda: EpsilonLogitsWarper(dice.uniform(0.01, 0.2)),
            lambda: EtaLogitsWarper(dice.uniform(0.01, 0.2)),
            lambda: TopHLogitsWarper(dice.uniform(0.3, 1)),
            lambda: RepetitionPenaltyLogitsProcessor(dice.uniform(0.5, 3)),
            lambda: RepetitionPenaltyLogitsProcessor(dice.uniform(0.5, 3), prompt_ignore_length=2),
            lambda: SequenceBiasLogitsProcessor({(5, 7): 4.0, (9,): -3.0}),
            lambda: NoRepeatNGramLogitsProcessor(2),
            LogitNormalization,
            Odd,
        ]
    )()


def test_any_list(model: PreTrainedModel) -> None:
    """Pairs in both orders, and lists of up to five, next to settings of the caller; the translation as it was fails many."""
    dice = random.Random(5)
    failed = 0
    some = [[_some(dice) for _ in range(dice.randint(1, 5))] for _ in range(150)]
    for own in [*map(list, itertools.permutations(PAIRED, 2)), *some]:
        settings = {"do_sample": dice.random() < 0.8, **dice.choice(BESIDE)}
        if dice.random() < 0.3:
            settings |= {"min_new_tokens": 2, "eos_token_id": EOS}
        assert _distance(model, own, settings) < 1e-5, (_names(own), [vars(p) for p in own], settings)
        try:
            failed += _distance(model, own, settings, _last_one_wins) > 0.02
        except foresay.ConfigError:
            failed += 1
    assert failed > 40


@pytest.mark.parametrize(
    "setting", [{"typical_p": 0.5}, {"epsilon_cutoff": 0.05}, {"eta_cutoff": 0.1}, {"top_h": 0.5}], ids=str
)
def test_settings_that_only_transformers_has(model: PreTrainedModel, setting: dict[str, Any]) -> None:
    assert len(_handed(model, [], {**SAMPLE, **setting})[0]) == 1
    assert _distance(model, [], {**SAMPLE, **setting, "temperature": 1.3, "top_k": 20}) < 1e-5
    assert _distance(model, [], {**SAMPLE, **setting}, lambda *_: SamplingParams(temperature=1.0)) > 0.02


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("eos", [EOS, 7])
@pytest.mark.parametrize("sample", [SAMPLE, GREEDY], ids=str)
def test_a_least_length_acts_in_its_place(
    model: PreTrainedModel, first: bool, eos: int, sample: dict[str, Any]
) -> None:
    """After a top-k the end token has taken the position of another one."""
    logits = torch.linspace(0, 3, 24)
    logits[EOS] = 9.0
    for least in (
        MinNewTokensLengthLogitsProcessor(len(PROMPT), 2, eos),
        MinLengthLogitsProcessor(len(PROMPT) + 2, eos),
        MinNewTokensLengthLogitsProcessor(len(PROMPT) - 2, 2, eos),  # over already
    ):
        own = [least, TopKLogitsWarper(3)] if first else [TopKLogitsWarper(3), least]
        processors, config = _handed(model, own, {**sample, "eos_token_id": EOS})
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
    params = _ours(*_handed(model, [TemperatureLogitsWarper(0.8), TopPLogitsWarper(0.9)], SAMPLE))
    assert (params.temperature, params.top_p, params.processors) == (0.8, 0.9, ())
    params = _ours(*_handed(model, [RepetitionPenaltyLogitsProcessor(2.0, prompt_ignore_length=2)], SAMPLE))
    assert len(params.processors) == 1, "a penalty that leaves out a part of the prompt is none of foresay's"
    params = _ours(*_handed(model, [TopKLogitsWarper(2)], {**SAMPLE, **settings}))
    assert [type(p) for p in params.processors] == [TopKLogitsWarper]  # only what comes before what foresay has
    assert (params.temperature, params.top_k, params.top_p) == (0.8, 5, 0.9)


# -- what is written -------------------------------------------------------------------------------------------------

ALL: list[Any] = [*PAIRED, EpsilonLogitsWarper(0.1), EtaLogitsWarper(0.1), TopHLogitsWarper(0.5)]


def test_greedy_writes_the_same_under_every_warper(model: PreTrainedModel) -> None:
    greedy = {"inputs": torch.tensor([PROMPT]), "do_sample": False, "max_new_tokens": 20}
    for own in [[one] for one in ALL] + [ALL, ALL[::-1]]:
        plain = model.generate(**greedy, logits_processor=own)
        for drafter in ("none", "auto"):
            ours = {"custom_generate": foresay.generate, "drafter": drafter}
            assert model.generate(**greedy, logits_processor=own, **ours).tolist() == plain.tolist(), (own, drafter)


# -- a draft at work -------------------------------------------------------------------------------------------------

LENGTH = 2
OWN: list[list[Any]] = [
    [TopPLogitsWarper(0.95), TemperatureLogitsWarper(2.0), TopKLogitsWarper(5)],
    [TemperatureLogitsWarper(3.0), MinPLogitsWarper(0.1), RepetitionPenaltyLogitsProcessor(1.5)],
]
BESIDE_OWN = {"do_sample": True, "temperature": 0.8, "top_k": 6, "top_p": 0.97}


def _joint(model: PreTrainedModel, own: list[Any]) -> np.ndarray:
    """The distribution of two tokens, by enumeration of transformers' own processing, [V ** 2]."""
    processors, _ = _handed(model, own, BESIDE_OWN)
    out = np.ones((VOCAB,) * LENGTH)
    for length in range(LENGTH):
        prefixes = list(itertools.product(range(VOCAB), repeat=length))
        ids = torch.tensor([[*PROMPT, *prefix] for prefix in prefixes])
        with torch.no_grad():
            scores = model(ids).logits[:, -1].float()
        distributions = processors(ids, scores).double().softmax(-1)
        out *= distributions.numpy().reshape((VOCAB,) * (length + 1) + (1,) * (LENGTH - 1 - length))
    return out.reshape(-1)


def _written(model: PreTrainedModel, own: list[Any], rule: str) -> list[list[int]]:
    ours = {"custom_generate": foresay.generate, "draft": _model(1), "num_draft_tokens": 2, "rule": rule, "seed": 17}
    settings = {**DEFAULTS, **BESIDE_OWN, "max_new_tokens": LENGTH + 1}
    out = model.generate(torch.tensor([PROMPT] * 300), logits_processor=own, **settings, **ours)
    return [row[len(PROMPT) : len(PROMPT) + LENGTH] for row in out.tolist()]


@pytest.mark.parametrize(
    ("own", "rule"), [(OWN[0], "speculative"), (OWN[1], "speculative"), (OWN[0], "block")], ids=_names
)
def test_the_law_with_a_draft(
    model: PreTrainedModel, own: list[Any], rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two tokens against the enumerated distribution; false alarm 1e-5. The translation as it was must be found out."""
    steps: list[Any] = []
    engine_step = foresay.Engine.step

    def watched(engine: foresay.Engine) -> Any:
        steps.extend(found := engine_step(engine))
        return found

    monkeypatch.setattr(foresay.Engine, "step", watched)
    distribution = _joint(model, own)
    assert reference.p_value(_written(model, own, rule), distribution, VOCAB) > 1e-5
    accepted, drafted = sum(s.num_accepted for s in steps), sum(s.num_drafted for s in steps)
    assert 60 < accepted < drafted - 60, "the draft must be both right and wrong, or this tests nothing"
    _as_it_was(monkeypatch)
    assert reference.p_value(_written(model, own, rule), distribution, VOCAB) < 1e-5


# -- errors ----------------------------------------------------------------------------------------------------------


class OwnError(Exception):
    """A foreign one."""


@pytest.mark.parametrize("sample", [SAMPLE, GREEDY], ids=str)
@pytest.mark.parametrize("later", [[], [TopKLogitsWarper(3)], [TypicalLogitsWarper(0.9)]], ids=_names)
@pytest.mark.parametrize("drafted", [False, True])
@pytest.mark.parametrize("start", [0, 3])
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
    own = [TemperatureLogitsWarper(0.5), broken, *later]
    with pytest.raises(OwnError) as raised:
        model.generate(torch.tensor([PROMPT] * 2), logits_processor=own, **ours)
    assert raised.value is error
