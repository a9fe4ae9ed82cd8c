from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st
from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from foresay.decoding import distributions, residuals, truncation
from foresay.decoding.distributions import Distributions, VocabularySubset, build_distributions, entropy, likeliest
from foresay.decoding.draws import inverse_cdf
from foresay.decoding.protocols import ModelOutput
from foresay.decoding.residuals import residual
from helpers.making import make_rows

Array = np.ndarray[Any, np.dtype[np.float64]]


def reference(
    logits: torch.Tensor, temperature: float, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> Array:
    """One distribution by transformers, in float64."""
    scores = TemperatureLogitsWarper(temperature)(None, logits[None].double())
    if top_k:
        scores = TopKLogitsWarper(top_k)(None, scores)
    if top_p < 1:
        scores = TopPLogitsWarper(top_p)(None, scores)
    if min_p:
        scores = MinPLogitsWarper(min_p)(None, scores)
    return scores[0].softmax(-1).numpy()


def distribution_of(logits: torch.Tensor, **params: Any) -> torch.Tensor:
    """The distribution built for one row at one position, [V]."""
    distributions = build_distributions(logits[None, None], make_rows(params))
    assert distributions.probs is not None
    return distributions.probs[0]


def random_logits(*shape: int, spread: float = 2.0, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * spread


def check(logits: torch.Tensor, params: dict[str, Any]) -> int:
    """Compare a distribution with the reference; return the tokens that it has."""
    expected, found = reference(logits, **params), distribution_of(logits, **params)
    np.testing.assert_array_equal(found.numpy() > 0, expected > 1e-40)
    np.testing.assert_allclose(found.numpy(), expected, atol=2e-6, rtol=2e-4)
    assert abs(float(found.double().sum()) - 1) < 1e-5
    return int((expected > 0).sum())


@pytest.mark.parametrize("vocab", [5, 129, 3000])
def test_distributions_are_those_of_transformers(vocab: int) -> None:
    """Every combination of cuts, each alone and with others."""
    bounds = ((0.3, 0.7, 1.5, 5.0), (0, 1, 30, 600), (1.0, 1e-6, 0.5, 0.95), (0.0, 0.02, 0.3))
    for seed, values in enumerate(itertools.product(*bounds)):
        names = ("temperature", "top_k", "top_p", "min_p")
        check(random_logits(vocab, seed=seed), dict(zip(names, values, strict=True)))


def test_a_nucleus_may_be_wider_than_the_tokens_that_are_sorted_first() -> None:
    logits = random_logits(20_000, spread=0.1)
    for params in ({"top_p": 0.9}, {"top_p": 0.999}, {"top_k": 400, "top_p": 0.9}):
        assert check(logits, {"temperature": 1.0, **params}) > 256
    # 20 likely tokens and a long flat tail: the nucleus of the 1000 likeliest is more than that of the first 256
    tail = torch.full((1980,), -3.2) - torch.arange(1980) * 1e-5
    logits = torch.cat([torch.arange(20) * -1e-3, tail])
    assert check(logits, {"temperature": 1.0, "top_k": 1000, "top_p": 0.5, "min_p": 0.05}) == 20
    check(random_logits(400).bfloat16(), {"temperature": 0.8, "top_p": 0.9})  # which is widened first


def levels(*sizes: int) -> torch.Tensor:
    """1000 scores: `sizes` of 9, 8, ... from token 100 on, and zeros."""
    logits = torch.zeros(1000)
    for i, part in enumerate(logits[100:].split([*sizes, 900 - sum(sizes)])[: len(sizes)]):
        part += 9 - i
    return logits


def masked() -> torch.Tensor:
    logits = torch.full((600,), -torch.inf)
    logits[[3, 500]] = 1.0
    return logits


FEW = torch.tensor([1.0, -torch.inf, 2.0, -4.0])


@pytest.mark.parametrize(
    ("logits", "params", "kept"),
    [
        (levels(4), {"top_k": 2}, range(100, 104)),
        (levels(500), {"top_k": 2}, range(100, 600)),
        (levels(), {"top_p": 0.4995}, range(1000)),  # which of the tied tokens would depend on the order of a sort
        # the ten lighter ones are outside the nucleus
        (levels(500, 10), {"top_k": 505, "top_p": 0.8999}, range(100, 600)),
        *((masked(), one, (3, 500)) for one in ({"top_k": 50}, {"top_k": 400}, {"top_p": 0.999}, {"min_p": 0.01}, {})),
        *((FEW, {"temperature": cold}, (2,)) for cold in (1e-60, 1e-42, 1e-6)),
        *((FEW, {"temperature": hot}, (0, 2, 3)) for hot in (1e6, 1e60)),
    ],
    ids=lambda one: str(one) if isinstance(one, dict) else "",
)
def test_equal_tokens_stay_together_and_masked_ones_out_at_any_temperature(
    logits: torch.Tensor, params: dict[str, Any], kept: Sequence[int]
) -> None:
    distribution = distribution_of(logits, **{"temperature": 1.0, **params})
    assert torch.nonzero(distribution)[:, 0].tolist() == [*kept]
    assert torch.allclose(distribution[[*kept]], torch.tensor(1 / len(kept)))


MIXED: list[dict[str, Any]] = [
    {},
    {"temperature": 0.7},
    {"temperature": 1.0, "top_k": 3},
    {"repetition_penalty": 1.3},
    {"temperature": 1.3, "top_p": 0.6, "min_p": 0.01},
    {"temperature": 1.0, "min_p": 0.3},
    {"temperature": 1.0, "top_k": 400, "top_p": 0.9, "min_p": 0.02},
    {"temperature": 2.0, "top_p": 0.99},
    {"temperature": 1.0, "logit_bias": {3: 5.0}, "presence_penalty": 1.0},
]


@pytest.mark.parametrize("chosen", [range(9), [0, 3], [1, 5], [2, 4, 6], [0, 2], [7, 6], [1, 2, 8]], ids=str)
def test_a_row_in_a_mixed_batch_has_the_distribution_it_has_alone(chosen: Sequence[int]) -> None:
    """None is built for greedy rows, and the raw scores stay as they are."""
    for width in (1, 4):
        logits = random_logits(len(chosen), width, 3000, spread=1.5)
        drafted = torch.randint(0, 3000, (len(chosen), width), generator=torch.Generator().manual_seed(1))
        before, params = logits.clone(), [MIXED[i] for i in chosen]
        together = build_distributions(logits, make_rows(*params), drafted)
        assert torch.equal(logits, before)
        is_sampled = [one.get("temperature", 0) > 0 for one in params]
        assert (together.probs is None) == (not any(is_sampled))
        assert together.probs is None or len(together.probs) == width * sum(is_sampled)
        for i, one in enumerate(params):
            alone = build_distributions(logits[i : i + 1], make_rows(one), drafted[i : i + 1])
            if alone.probs is None:
                assert torch.equal(together.greedy_ids[i], alone.greedy_ids[0])
                assert together.probs_row is None or together.probs_row[i].tolist() == [-1] * width
                assert one or torch.equal(alone.greedy_ids, logits[i : i + 1].argmax(-1))
                continue
            assert together.probs is not None and together.probs_row is not None and alone.probs_row is not None
            distribution, expected = together.probs[together.probs_row[i]], alone.probs[alone.probs_row[0]]
            assert torch.equal(distribution > 0, expected > 0)
            assert torch.allclose(distribution, expected, atol=1e-7, rtol=1e-5)


def first_of_the_greatest(scores: list[float]) -> int:
    """By definition: the first that is not a number, else the first of the greatest."""
    numbers = [i for i, score in enumerate(scores) if score != score]
    return numbers[0] if numbers else scores.index(max(scores))


ODD = (0.0, -0.0, 1.0, 2.0, 2.0, float("inf"), float("-inf"), float("nan"))
Likeliest = Callable[[torch.Tensor, Sequence[int] | None], torch.Tensor]


def differences(data: st.DataObject, function: Likeliest) -> int:
    """Positions where it differs from the definition, of scores that are alike or no numbers, of any type, not side by side."""
    shape = data.draw(st.tuples(st.integers(1, 3), st.integers(1, 4), st.sampled_from([1, 2, 31, 64, 100])))
    dtype = data.draw(st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16]))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**31)))
    few = data.draw(st.lists(st.sampled_from(ODD), min_size=1, max_size=4))
    scores = torch.from_numpy(rng.choice(few, size=shape)).to(dtype)
    if data.draw(st.booleans()):
        scores = torch.cat([scores, scores], -1)[..., : shape[-1]]
    counts = data.draw(st.none() | st.lists(st.integers(0, shape[1] - 1), min_size=shape[0], max_size=shape[0]))
    found = function(scores, counts)
    assert found.shape == shape[:2] and found.dtype == torch.int64
    reals = [row if counts is None else row[: counts[i] + 1] for i, row in enumerate(scores.tolist())]
    return sum(
        found[i, t].item() != first_of_the_greatest(one) for i, row in enumerate(reals) for t, one in enumerate(row)
    )


def last(scores: torch.Tensor, counts: Sequence[int] | None) -> torch.Tensor:
    return scores.shape[-1] - 1 - likeliest(scores.flip(-1), counts)


def one_too_few(scores: torch.Tensor, counts: Sequence[int] | None) -> torch.Tensor:
    return likeliest(scores, None if counts is None else [max(0, n - 1) for n in counts])


@pytest.mark.parametrize("function", [likeliest, last, one_too_few])
def test_the_likeliest_is_the_first_of_the_greatest(function: Likeliest) -> None:
    """Controls: the last of equals, and a position forgotten."""

    @given(st.data())
    @settings(max_examples=200, deadline=None, database=None, phases=[Phase.generate])
    def compare(data: st.DataObject) -> None:
        assert differences(data, function) == 0

    if function is likeliest:
        compare()
    else:
        with pytest.raises(AssertionError):
            compare()


# -- draws -------------------------------------------------------------------------------------------------------------


@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=300).filter(any),
    st.lists(st.integers(1, 2**10 - 1), min_size=1, max_size=20),
)
@example([1] * 256, [4, 100, 512, 1020])
@settings(max_examples=150, deadline=None)
def test_inverse_cdf_is_numpys_searchsorted(counts: list[int], numerators: list[int]) -> None:
    """Integer weights and dyadic uniforms, so that every sum is exact: a uniform on an edge belongs to the next token."""
    uniform = np.array(numerators) / 2**10
    probs = torch.tensor([counts] * len(uniform), dtype=torch.float32)
    ends = np.cumsum(counts)
    expected = np.searchsorted(ends, uniform * ends[-1], side="right")
    assert inverse_cdf(probs, torch.from_numpy(uniform)).tolist() == expected.tolist()
    assert inverse_cdf(probs[:0], torch.from_numpy(uniform[:0])).shape == (0,), "no rows"


EXTREMES = [2.0**-53, 1e-300, 1e-12, 0.5, 1 - 1e-12, 1 - 2.0**-53]


@given(st.integers(0, 2**31), st.sampled_from([5, 127, 128, 129, 1000]), st.floats(0.01, 0.99))
@settings(max_examples=100, deadline=None)
def test_a_token_of_probability_zero_is_never_drawn(seed: int, vocab: int, share: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    probs = torch.rand(vocab, generator=generator) ** 8 * (torch.rand(vocab, generator=generator) < share)
    probs[torch.randint(vocab, (1,), generator=generator)] = 0.25
    edges = (probs.double().cumsum(0) / probs.double().sum()).clamp(2.0**-53, 1 - 2.0**-53)
    uniform = torch.cat([torch.tensor(EXTREMES, dtype=torch.float64), edges])
    tokens = inverse_cdf(probs.expand(len(uniform), -1), uniform)
    assert bool((probs[tokens] > 0).all())


WIDE = [
    {"temperature": 1.5, "top_p": 0.999, "min_p": 1e-4},
    {"temperature": 1.0, "min_p": 1e-4},
    {"temperature": 1.3, "top_k": 5000, "top_p": 0.99},
]


def bits_in_batches(params: dict[str, Any]) -> bool:
    """True if the distributions, confidences, entropies and residuals of a row are those that it has alone, in every batch."""
    before = torch.get_num_threads()
    torch.set_num_threads(max(2, before))
    try:
        scores = random_logits(4, 1, 151_936, spread=3.0)
        other = random_logits(4, 151_936, seed=1).softmax(-1)

        def of(first: int, last: int) -> list[torch.Tensor]:
            found = build_distributions(scores[first:last].clone(), make_rows(*[params] * (last - first)))
            assert found.probs is not None
            tokens = torch.full((last - first, 1), 7)
            confidence = Distributions(found.greedy_ids, scores=scores[first:last]).confidence(tokens)
            return [found.probs, confidence, entropy(found.probs), residual(found.probs, other[first:last])]

        alone = [torch.cat(parts) for parts in zip(*(of(i, i + 1) for i in range(4)), strict=True)]
        return all(
            torch.equal(found, one[:count])
            for count in range(2, 5)
            for found, one in zip(of(0, count), alone, strict=True)
        )
    finally:
        torch.set_num_threads(before)


def test_bits_depend_on_neither_the_batch_nor_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several threads divide the sum of a single row of a large vocabulary. Control: PyTorch's own sums."""
    assert all(map(bits_in_batches, WIDE))
    for module in (distributions, residuals, truncation):
        monkeypatch.setattr(module, "row_sums", lambda values: values.sum(-1))
    assert not all(map(bits_in_batches, WIDE))


# -- scores of a draft that writes some of the tokens only, never written out where no distribution needs it --------------

TOKENS = torch.tensor([7, 2, 11, 5])
SUBSET = VocabularySubset.of(TOKENS, 13)


def narrow(places: int) -> ModelOutput:
    scores = torch.randn(3, places, len(TOKENS), generator=torch.Generator().manual_seed(5))
    return ModelOutput(scores, subset=SUBSET)


def test_widened_scores_stand_at_their_tokens_and_nothing_stands_elsewhere() -> None:
    out = narrow(3)
    wide = out.scores()
    assert wide.shape == (3, 3, 13) and torch.equal(wide[..., TOKENS], out.logits)
    others = [token for token in range(13) if token not in TOKENS.tolist()]
    assert bool((wide[..., others] == -torch.inf).all())
    part = out.at(torch.tensor([[1, 2], [0, 1], [2, 0]]), [0, 0, 0])
    assert part.scores().shape == (3, 2, 13) and torch.equal(part.scores()[0, 0], wide[0, 1])


@pytest.mark.parametrize(
    ("params", "greedy", "stays_narrow"),
    [
        ([{}, {}, {}], False, True),
        ([{"temperature": 1.0}, {}, {}], True, True),
        ([{"temperature": 1.0}, {}, {}], False, False),
        ([{"logit_bias": {2: 4.0}}, {}, {}], True, False),
    ],
    ids=["greedy", "sampled, likeliest tokens", "sampled", "processed"],
)
def test_distributions_of_narrow_scores_are_those_of_wide_ones(
    params: list[dict[str, Any]], greedy: bool, stays_narrow: bool
) -> None:
    """And so is the confidence in tokens, also in those that the draft cannot write."""
    out, rows = narrow(1), make_rows(*params)
    drafted = torch.empty(3, 0, dtype=torch.int64)
    found = out.draft_distributions(rows, drafted, greedy=greedy)
    expected = build_distributions(out.scores(), rows, drafted, greedy=greedy)
    assert torch.equal(found.greedy_ids, expected.greedy_ids)
    assert (found.subset is not None) == stays_narrow
    if expected.probs is not None:
        assert found.probs is not None and torch.equal(found.probs, expected.probs)
    for ids in (found.greedy_ids, torch.tensor([[2], [11], [7]]), torch.tensor([[0], [12], [4]])):
        torch.testing.assert_close(found.confidence(ids), expected.confidence(ids))
    assert float(found.confidence(torch.tensor([[0]] * 3)).sum()) == 0.0
