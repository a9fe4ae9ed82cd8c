from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from foresay.decoding import sums
from foresay.decoding.distributions import Distributions, build_distributions, entropy, likeliest
from foresay.decoding.draws import draw, inverse_cdf
from foresay.decoding.randomness import Purpose, Streams
from foresay.decoding.residuals import residual
from foresay.decoding.rows import Rows
from helpers.making import make_rows

Array = np.ndarray[Any, np.dtype[np.float64]]

PARAMS: list[dict[str, Any]] = [
    {"temperature": 1.0},
    {"temperature": 0.3},
    {"temperature": 5.0},
    {"temperature": 1.0, "top_k": 1},
    {"temperature": 0.7, "top_k": 40},
    {"temperature": 1.0, "top_k": 700},
    {"temperature": 1.0, "top_p": 0.5},
    {"temperature": 1.5, "top_p": 0.95},
    {"temperature": 1.0, "top_p": 1e-6},
    {"temperature": 1.0, "min_p": 0.2},
    {"temperature": 1.0, "min_p": 1.0},
    {"temperature": 1.2, "top_k": 30, "top_p": 0.8},
    {"temperature": 1.2, "top_k": 900, "top_p": 0.6},
    {"temperature": 1.2, "top_p": 0.9, "min_p": 0.05},
    {"temperature": 1.2, "top_k": 20, "min_p": 0.1},
    {"temperature": 1.2, "top_k": 600, "top_p": 0.9, "min_p": 0.3},
]


def reference(logits: Array, *, temperature: float, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> Array:
    """One distribution in float64, with full sorts; ties at the nucleus' edge go to the lower token."""
    scores = logits / temperature
    if top_k:
        scores = np.where(scores >= np.sort(scores)[::-1][min(top_k, len(scores)) - 1], scores, -np.inf)
    probs = _softmax(scores)
    if top_p < 1:
        order = np.argsort(-probs, kind="stable")
        before = np.cumsum(probs[order]) - probs[order]
        scores = scores.copy()
        scores[order[before >= top_p]] = -np.inf
        probs = _softmax(scores)
    return _softmax(np.where(probs >= min_p * probs.max(), scores, -np.inf))


def _softmax(scores: Array) -> Array:
    weights = np.exp(scores - scores.max())
    return weights / weights.sum()


def distribution_of(logits: torch.Tensor, **params: Any) -> torch.Tensor:
    """The distribution built for one row at one position, [V]."""
    distributions = build_distributions(logits[None, None], make_rows(params))
    assert distributions.probs is not None
    return distributions.probs[0]


def random_logits(*shape: int, spread: float = 2.0, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * spread


def assert_distribution(distribution: torch.Tensor, expected: Array) -> None:
    np.testing.assert_array_equal(distribution.numpy() > 0, expected > 1e-40)
    np.testing.assert_allclose(distribution.numpy(), expected, atol=2e-6, rtol=2e-4)
    assert abs(float(distribution.double().sum()) - 1) < 1e-5


@pytest.mark.parametrize("params", PARAMS, ids=str)
@pytest.mark.parametrize("vocab", [5, 128, 129, 3000, 50_000])
def test_laws_are_those_of_full_sorts(vocab: int, params: dict[str, Any]) -> None:
    logits = random_logits(vocab)
    assert_distribution(distribution_of(logits, **params), reference(logits.double().numpy(), **params))


@pytest.mark.parametrize("params", [p for p in PARAMS if p["temperature"] != 5.0], ids=str)
@pytest.mark.parametrize("vocab", [12, 2000])
def test_laws_are_those_of_transformers(vocab: int, params: dict[str, Any]) -> None:
    logits = random_logits(vocab, seed=vocab)
    scores = TemperatureLogitsWarper(params["temperature"])(None, logits[None])
    if params.get("top_k"):
        scores = TopKLogitsWarper(params["top_k"])(None, scores)
    if params.get("top_p", 1.0) < 1:
        scores = TopPLogitsWarper(params["top_p"])(None, scores)
    if params.get("min_p"):
        scores = MinPLogitsWarper(params["min_p"])(None, scores)
    assert_distribution(distribution_of(logits, **params), scores[0].double().softmax(-1).numpy())


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_laws_of_random_parameters(data: st.DataObject) -> None:
    params = {
        "temperature": data.draw(st.floats(0.1, 4)),
        "top_k": data.draw(st.one_of(st.just(0), st.integers(1, 1200))),
        "top_p": data.draw(st.one_of(st.just(1.0), st.floats(0.01, 0.999))),
        "min_p": data.draw(st.one_of(st.just(0.0), st.floats(0.001, 0.9))),
    }
    logits = random_logits(data.draw(st.sampled_from([7, 300, 1000])), seed=data.draw(st.integers(0, 999)))
    expected = reference(logits.double().numpy(), **params)
    distribution = distribution_of(logits, **params).double().numpy()
    # a token at the very edge may fall either way in float32
    assert np.abs(distribution - expected).sum() < 2e-5 + 2 * expected[expected > 0].min()


@pytest.mark.parametrize("params", [{"top_p": 0.9}, {"top_p": 0.999}, {"top_k": 400, "top_p": 0.9}], ids=str)
def test_a_nucleus_may_be_wider_than_what_is_looked_at_first(params: dict[str, Any]) -> None:
    logits = random_logits(20_000, spread=0.1)
    expected = reference(logits.double().numpy(), temperature=1.0, **params)
    assert (expected > 0).sum() > 256
    assert_distribution(distribution_of(logits, temperature=1.0, **params), expected)


def test_top_p_counts_all_of_a_wide_top_k_when_min_p_ends_the_search() -> None:
    """20 likely tokens and a long flat tail: the nucleus of the 1000 likeliest is more than that of the first 256."""
    logits = torch.cat(
        [torch.zeros(20) + torch.arange(20) * -1e-3, torch.full((1980,), -3.2) - torch.arange(1980) * 1e-5]
    )
    params = {"temperature": 1.0, "top_k": 1000, "top_p": 0.5, "min_p": 0.05}
    expected = reference(logits.double().numpy(), **params)
    assert (expected > 0).sum() == 20
    assert_distribution(distribution_of(logits, **params), expected)


@pytest.mark.parametrize("tied", [4, 500])
def test_ties_with_the_kth_stay(tied: int) -> None:
    logits = torch.zeros(1000)
    logits[100 : 100 + tied] = 3.0
    distribution = distribution_of(logits, temperature=1.0, top_k=2)
    assert torch.nonzero(distribution)[:, 0].tolist() == list(range(100, 100 + tied))
    assert torch.allclose(distribution[100 : 100 + tied], torch.tensor(1 / tied))


def test_ties_with_the_last_of_the_nucleus_stay() -> None:
    """Which of the tied tokens a distribution holds would otherwise depend on the order of a sort."""
    distribution = distribution_of(torch.zeros(1000), temperature=1.0, top_p=0.4995)
    assert int((distribution > 0).sum()) == 1000
    assert torch.allclose(distribution, torch.tensor(1 / 1000))


def test_ties_with_the_kth_count_for_the_nucleus() -> None:
    logits = torch.zeros(1000)
    logits[100:600] = 9.0
    logits[600:610] = 8.0
    distribution = distribution_of(logits, temperature=1.0, top_k=505, top_p=0.8999)
    assert torch.nonzero(distribution)[:, 0].tolist() == list(range(100, 600)), (
        "the ten lighter ones are outside the nucleus"
    )


def test_masked_tokens_stay_out_however_wide_top_k_is() -> None:
    logits = torch.full((600,), -torch.inf)
    logits[[3, 500]] = torch.tensor([1.0, 0.0])
    for params in ({"top_k": 50}, {"top_k": 400}, {"top_p": 0.999}, {"min_p": 0.01}, {}):
        distribution = distribution_of(logits, temperature=1.0, **params)
        assert torch.nonzero(distribution)[:, 0].tolist() == [3, 500]
        assert torch.allclose(distribution[3], torch.tensor(1.0).sigmoid())


@pytest.mark.parametrize("temperature", [1e-6, 1e-30, 1e-42, 1e-60])
def test_a_tiny_temperature_is_nearly_greedy(temperature: float) -> None:
    distribution = distribution_of(torch.tensor([1.0, 3.0, 2.0, -4.0]), temperature=temperature)
    assert distribution.tolist() == [0.0, 1.0, 0.0, 0.0]


@pytest.mark.parametrize("temperature", [1e6, 1e60])
def test_a_huge_temperature_is_nearly_uniform_over_what_is_allowed(temperature: float) -> None:
    distribution = distribution_of(torch.tensor([1.0, -torch.inf, 2.0, -4.0]), temperature=temperature)
    assert torch.allclose(distribution, torch.tensor([1 / 3, 0.0, 1 / 3, 1 / 3]), atol=1e-5)


def test_low_precision_logits_are_widened_first() -> None:
    logits = random_logits(400).bfloat16()
    params = {"temperature": 0.8, "top_p": 0.9}
    assert_distribution(distribution_of(logits, **params), reference(logits.double().numpy(), **params))


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
@pytest.mark.parametrize("width", [1, 4])
def test_a_row_in_a_mixed_batch_has_the_law_it_has_alone(chosen: list[int], width: int) -> None:
    params = [MIXED[i] for i in chosen]
    logits = random_logits(len(params), width, 3000, spread=1.5)
    drafted = torch.randint(0, 3000, (len(params), width), generator=torch.Generator().manual_seed(1))
    together = build_distributions(logits, make_rows(*params), drafted)
    for i, one in enumerate(params):
        alone = build_distributions(logits[i : i + 1], make_rows(one), drafted[i : i + 1])
        assert_same_distributions(together, i, alone, width)


def assert_same_distributions(together: Distributions, row: int, alone: Distributions, width: int) -> None:
    if alone.probs is None:
        assert torch.equal(together.greedy_ids[row], alone.greedy_ids[0])
        assert together.probs_row is None or together.probs_row[row].tolist() == [-1] * width
        return
    assert together.probs is not None and together.probs_row is not None and alone.probs_row is not None
    distribution, expected = together.probs[together.probs_row[row]], alone.probs[alone.probs_row[0]]
    assert torch.equal(distribution > 0, expected > 0)
    assert torch.allclose(distribution, expected, atol=1e-7, rtol=1e-5)


def test_greedy_rows_never_build_a_law() -> None:
    logits = random_logits(3, 2, 50)
    rows = make_rows({}, {"top_k": 3}, {"repetition_penalty": 2.0})
    distributions = build_distributions(logits, rows, torch.zeros(3, 1, dtype=torch.int64))
    assert distributions.probs is None and distributions.probs_row is None
    assert torch.equal(distributions.greedy_ids[:2], logits[:2].argmax(-1))


def first_of_the_greatest(scores: list[float]) -> int:
    """By definition: the first that is not a number, else the first of the greatest."""
    best = 0
    for i, score in enumerate(scores):
        if score != score:
            return i
        best = i if score > scores[best] else best
    return best


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
    pairs = (
        (found[i, t].item(), first_of_the_greatest(one)) for i, row in enumerate(reals) for t, one in enumerate(row)
    )
    return sum(a != b for a, b in pairs)


@given(st.data())
@settings(max_examples=200, deadline=None)
def test_the_likeliest_is_the_first_of_the_greatest(data: st.DataObject) -> None:
    assert differences(data, likeliest) == 0


def last(scores: torch.Tensor, counts: Sequence[int] | None) -> torch.Tensor:
    return scores.shape[-1] - 1 - likeliest(scores.flip(-1), counts)


def one_too_few(scores: torch.Tensor, counts: Sequence[int] | None) -> torch.Tensor:
    return likeliest(scores, None if counts is None else [max(0, n - 1) for n in counts])


@pytest.mark.parametrize("broken", [last, one_too_few])
def test_broken_ones_would_be_noticed(broken: Likeliest) -> None:
    """The negative control: the last of equals, and a position forgotten."""

    @given(st.data())
    @settings(max_examples=200, deadline=None, database=None, phases=[Phase.generate])
    def check(data: st.DataObject) -> None:
        assert differences(data, broken) == 0

    with pytest.raises(AssertionError):
        check()


def test_only_sampled_rows_build_laws_in_a_mixed_batch() -> None:
    logits = random_logits(3, 2, 50)
    distributions = build_distributions(logits, make_rows({}, {"temperature": 1.0}, {}))
    assert distributions.probs is not None and distributions.probs_row is not None
    assert distributions.probs.shape == (2, 50)
    assert distributions.probs_row.tolist() == [[-1, -1], [0, 1], [-1, -1]]
    assert torch.equal(distributions.greedy_ids[[0, 2]], logits[[0, 2]].argmax(-1))


def test_building_laws_leaves_the_logits_alone() -> None:
    logits = random_logits(2, 1, 50)
    before = logits.clone()
    build_distributions(
        logits, make_rows({"banned_token_ids": (3,)}, {"temperature": 1.0, "top_k": 2}), torch.zeros(2, 0).long()
    )
    assert torch.equal(logits, before)


def test_each_place_is_processed_after_the_tokens_guessed_before_it() -> None:
    rows = make_rows({"frequency_penalty": 1.0})
    drafted = torch.tensor([[2, 3, 2, 4]])
    points = torch.zeros(1, 3, 5)
    points[..., 2] = 1.5
    for first, expected in ((0, [2, 2, 2]), (1, [2, 2, 0])):
        assert build_distributions(points, rows, drafted, first).greedy_ids.tolist() == [expected]


def test_prob_of_reads_points_and_laws() -> None:
    probs = torch.tensor([[0.1, 0.2, 0.7], [0.5, 0.5, 0.0]])
    distributions = Distributions(torch.tensor([[2, 1, 0], [0, 0, 0]]), probs, torch.tensor([[-1, -1, -1], [0, 1, 1]]))
    assert distributions.prob_of(torch.tensor([[2, 0], [2, 1]])).tolist() == pytest.approx(
        torch.tensor([[1.0, 0.0], [0.7, 0.5]])
    )
    greedy = Distributions(torch.tensor([[2, 1]]))
    assert greedy.prob_of(torch.tensor([[2, 2]])).tolist() == [[1.0, 0.0]]


weights = st.lists(st.integers(0, 9), min_size=1, max_size=300).filter(any)


@given(weights, st.lists(st.integers(1, 2**10 - 1), min_size=1, max_size=20))
@settings(max_examples=200, deadline=None)
def test_inverse_cdf_is_numpys_searchsorted(counts: list[int], numerators: list[int]) -> None:
    """Integer weights and dyadic uniforms, so that every sum is exact and ties at an edge are decided alike."""
    uniform = np.array(numerators) / 2**10
    probs = torch.tensor([counts] * len(uniform), dtype=torch.float32)
    ends = np.cumsum(counts)
    expected = np.searchsorted(ends, uniform * ends[-1], side="right")
    assert inverse_cdf(probs, torch.from_numpy(uniform)).tolist() == expected.tolist()


def test_a_uniform_on_an_edge_belongs_to_the_next_token() -> None:
    probs = torch.tensor([[1.0, 0.0, 1.0, 2.0]] * 4)
    assert inverse_cdf(probs, torch.tensor([0.2499, 0.25, 0.4999, 0.5], dtype=torch.float64)).tolist() == [0, 2, 2, 3]
    edges = torch.arange(1, 512, dtype=torch.float64) / 512
    assert inverse_cdf(torch.ones(511, 512), edges).tolist() == list(range(1, 512))


@pytest.mark.parametrize("vocab", [5, 128, 300])
def test_no_rows_draw_nothing(vocab: int) -> None:
    assert inverse_cdf(torch.zeros(0, vocab), torch.zeros(0, dtype=torch.float64)).shape == (0,)


EXTREMES = [2.0**-53, 1e-300, 1e-12, 0.5, 1 - 1e-12, 1 - 2.0**-53]


@given(st.integers(0, 2**31), st.sampled_from([5, 127, 128, 129, 1000]), st.floats(0.01, 0.99))
@settings(max_examples=150, deadline=None)
def test_a_token_of_probability_zero_is_never_drawn(seed: int, vocab: int, share: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    probs = torch.rand(vocab, generator=generator) ** 8 * (torch.rand(vocab, generator=generator) < share)
    probs[torch.randint(vocab, (1,), generator=generator)] = 0.25
    edges = (probs.double().cumsum(0) / probs.double().sum()).clamp(2.0**-53, 1 - 2.0**-53)
    uniform = torch.cat([torch.tensor(EXTREMES, dtype=torch.float64), edges])
    tokens = inverse_cdf(probs.expand(len(uniform), -1), uniform)
    assert bool((probs[tokens] > 0).all())


@pytest.mark.parametrize("vocab", [5, 128, 50_000])
def test_extreme_uniforms_draw_the_first_and_last_possible_token(vocab: int) -> None:
    probs = torch.full((2, vocab), 1.0 / vocab)
    probs[:, :2] = 0
    probs[:, -2:] = 0
    uniform = torch.tensor([2.0**-53, 1 - 2.0**-53], dtype=torch.float64)
    assert inverse_cdf(probs, uniform).tolist() == [2, vocab - 3]


def test_draws_are_uniform_over_a_wide_flat_law() -> None:
    uniform = (torch.arange(50_000, dtype=torch.float64) + 0.5) / 50_000
    tokens = torch.cat([inverse_cdf(torch.ones(len(u), 500), u) for u in uniform.split(5000)])
    assert torch.bincount(tokens, minlength=500).tolist() == [100] * 500


def _sampled_rows() -> tuple[Rows, Distributions]:
    rows = make_rows({}, {"temperature": 1.0}, {"temperature": 2.0})
    return rows, build_distributions(random_logits(3, 4, 20), rows)


def test_draw_uses_each_rows_own_number_at_its_offset() -> None:
    rows, distributions = _sampled_rows()
    assert distributions.probs is not None and distributions.probs_row is not None
    streams = rows.streams(torch.device("cpu"))
    tokens = draw(distributions, streams, Purpose.TARGET, first=2)
    assert torch.equal(tokens[0], distributions.greedy_ids[0])
    for numbers, drawn in (
        (streams.position_uniform(torch.arange(10)), tokens),
        (streams.uniform(Purpose.DRAFT, torch.arange(10)), draw(distributions, streams, Purpose.DRAFT, first=2)),
    ):
        for row in (1, 2):
            assert torch.equal(
                drawn[row], inverse_cdf(distributions.probs[distributions.probs_row[row]], numbers[row, 2:6])
            )


def test_draw_takes_the_depths_of_a_trees_places() -> None:
    rows, distributions = _sampled_rows()
    streams = rows.streams(torch.device("cpu"))
    depths = torch.tensor([0, 1, 1, 2]).repeat(3, 1)
    tokens = draw(distributions, streams, Purpose.TARGET, depths=depths)
    numbers = streams.position_uniform(torch.arange(3))
    assert distributions.probs is not None and distributions.probs_row is not None
    for row in (1, 2):
        expected = inverse_cdf(distributions.probs[distributions.probs_row[row]], numbers[row, [0, 1, 1, 2]])
        assert torch.equal(tokens[row], expected)


def test_coupled_draws_add_the_noise_of_the_position() -> None:
    _, distributions = _sampled_rows()
    assert distributions.probs is not None and distributions.probs_row is not None
    streams = Streams(torch.tensor([7, 8, 9]), torch.tensor([4, 5, 6]), shares_noise=True)
    tokens = draw(distributions, streams, Purpose.DRAFT, first=1)
    assert torch.equal(tokens, draw(distributions, streams, Purpose.TARGET, first=1)), "drafter and target share it"
    for row in (1, 2):
        for column in range(4):
            noise = streams.gumbel(torch.tensor(row), torch.tensor(column + 1), torch.arange(20))
            assert int(tokens[row, column]) == int(
                (distributions.probs[distributions.probs_row[row, column]].log() + noise).argmax()
            )


def test_coupled_draws_leave_out_the_places_that_are_not_asked_for() -> None:
    _, distributions = _sampled_rows()
    streams = Streams(torch.tensor([7, 8, 9]), torch.tensor([4, 5, 6]), shares_noise=True)
    whole = draw(distributions, streams, Purpose.TARGET)
    some = draw(distributions, streams, Purpose.TARGET, wanted=torch.arange(4) <= torch.tensor([3, 1, 0])[:, None])
    assert torch.equal(some[1, :2], whole[1, :2])
    assert torch.equal(some[2, :1], whole[2, :1])


def test_coupled_draws_follow_the_law() -> None:
    probs = torch.tensor([0.5, 0.25, 0.125, 0.125, 0.0]).expand(8000, -1)
    distributions = Distributions(torch.zeros(8000, 1, dtype=torch.int64), probs, torch.arange(8000)[:, None])
    streams = Streams(torch.arange(8000), torch.full((8000,), 3), shares_noise=True)
    counts = torch.bincount(draw(distributions, streams, Purpose.DRAFT)[:, 0], minlength=5)
    assert counts[4] == 0
    # 5 standard deviations
    assert torch.allclose(counts[:4] / 8000, probs[0, :4], atol=5 * (0.25 / 8000) ** 0.5)


WIDE = [
    {"temperature": 1.5, "top_p": 0.999},
    {"temperature": 1.5, "top_p": 0.999, "min_p": 1e-4},
    {"temperature": 1.0, "min_p": 1e-4},
    {"temperature": 1.3, "top_k": 5000, "top_p": 0.99},
]


def bits_in_batches(params: dict[str, Any]) -> bool:
    """True if the distributions, confidences, entropies and residuals of a row are those that it has alone, in every batch."""
    before = torch.get_num_threads()
    torch.set_num_threads(max(2, before))
    try:
        scores = 3 * torch.randn(6, 1, 151_936, generator=torch.Generator().manual_seed(0))
        other = torch.randn(6, 151_936, generator=torch.Generator().manual_seed(1)).softmax(-1)

        def of(first: int, last: int) -> list[torch.Tensor]:
            found = build_distributions(scores[first:last].clone(), make_rows(*[params] * (last - first)))
            assert found.probs is not None
            tokens = torch.full((last - first, 1), 7)
            confidence = Distributions(found.greedy_ids, scores=scores[first:last]).confidence(tokens)
            return [found.probs, confidence, entropy(found.probs), residual(found.probs, other[first:last])]

        alone = [torch.cat(parts) for parts in zip(*(of(i, i + 1) for i in range(6)), strict=True)]
        return all(
            torch.equal(found, one[:count])
            for count in range(2, 7)
            for found, one in zip(of(0, count), alone, strict=True)
        )
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("params", WIDE, ids=str)
def test_bits_depend_on_neither_the_batch_nor_threads(params: dict[str, Any]) -> None:
    """Several threads divide the sum of a single row of a large vocabulary."""
    assert bits_in_batches(params)


def test_sums_in_one_go_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: PyTorch's own sums."""
    monkeypatch.setattr(sums, "_BLOCK", 1 << 30)
    assert not all(bits_in_batches(params) for params in WIDE)
