"""The kernels that sample on a GPU against PyTorch's operations, in Triton's interpreter."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from foresay.decoding import draws, kernels, sampling_kernels, sampling_rows, truncation
from foresay.decoding.sampling_kernels import Cuts
from helpers.making import make_rows
from helpers.paged import language_of_the_interpreter

PARAMS: list[dict[str, Any]] = [
    {"temperature": 0.7},
    {"temperature": 1.3, "top_k": 7},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 2.0, "top_k": 40, "top_p": 0.5},
    {"temperature": 0.9, "min_p": 0.05},
    {"temperature": 1.0, "top_k": 3, "top_p": 0.99, "min_p": 0.2},
    {"temperature": 1.5, "top_p": 0.001},
    {"temperature": 1.0, "top_p": 1e-46},
    {"temperature": 1.0, "top_p": 1e-300, "top_k": 9},
]


@pytest.fixture(autouse=True)
def small_spans(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(sampling_kernels, "SPAN", 256)
    with language_of_the_interpreter():
        yield


def compare(vocab: int, spread: float, params: Sequence[dict[str, Any]] = PARAMS, alone: Sequence[int] = ()) -> None:
    """Every combination of cuts in one batch; some scores are equal, and some tokens are excluded. alone: without the others."""
    torch.manual_seed(vocab)
    scores = torch.randn(len(params), vocab) * spread
    scores[:, 5:9] = scores[:, :1]
    scores[:, 11] = -torch.inf
    plan = truncation.plan_of(make_rows(*params), scores.device)
    expected = truncation.probabilities(scores.clone(), plan, 1)
    found = sampling_kernels.probabilities(scores, plan.temperature, Cuts(plan.top_k, plan.top_p, plan.min_p))
    assert torch.equal(found > 0, expected > 0)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)
    for i in alone:  # with what others need left out
        one = params[i]
        single = truncation.plan_of(make_rows(one), scores.device)
        cuts = Cuts(
            single.top_k if one.get("top_k") else None,
            single.top_p if one.get("top_p", 1) < 1 else None,
            single.min_p if one.get("min_p") else None,
        )
        own = sampling_kernels.probabilities(scores[i : i + 1], single.temperature, cuts)
        assert torch.equal(own[0], found[i])


def test_probabilities_are_those_of_the_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: a threshold that one token too many reaches."""
    compare(130, 6.0, alone=range(5))
    compare(700, 1.0)
    known = sampling_kernels.probabilities
    lower = lambda scores, temperature, cuts: known(scores, temperature, replace(cuts, top_k=cuts.top_k + 1))  # noqa: E731
    monkeypatch.setattr(sampling_kernels, "probabilities", lower)
    with pytest.raises(AssertionError):
        compare(700, 1.0, PARAMS[1:4])


def test_tokens_are_those_that_the_operations_draw() -> None:
    """Uniforms near 0 and 1 too, and a distribution whose first and last blocks are empty."""
    torch.manual_seed(0)
    probs = torch.rand(3, 700).softmax(-1)
    probs[1, :300] = probs[1, 500:] = 0
    probs[2] = 0
    probs[2, 389] = 1
    rows = torch.arange(3).repeat_interleave(6)
    uniform = torch.tensor([1e-12, 0.2, 0.4, 0.7, 0.99, 1 - 1e-12], dtype=torch.float64).repeat(3)
    found = sampling_kernels.inverse_cdf(probs, uniform, rows)
    assert torch.equal(found, draws.inverse_cdf(probs, uniform, rows))
    assert (probs[rows, found] > 0).all()


def test_the_likeliest_token_is_the_first_of_equals() -> None:
    torch.manual_seed(1)
    scores = torch.randn(4, 700)
    scores[0, 600] = scores[0, 300] = 9
    scores[1, 699] = torch.nan
    scores[2] = -torch.inf
    tokens, probability = sampling_kernels.likeliest(scores)
    assert tokens.tolist() == [300, 699, 0, int(scores[3].argmax())]
    expected = scores.softmax(-1).amax(-1)
    torch.testing.assert_close(probability[[0, 3]], expected[[0, 3]])


def chosen(scores: torch.Tensor, params: Sequence[dict[str, Any]], greedy: Sequence[int] = ()) -> torch.Tensor:
    """Tokens that a launch chooses for each of nine uniforms, [9, R]; its distributions are those of the other kernels."""
    plan = truncation.plan_of(make_rows(*params), scores.device)
    cuts = Cuts(plan.top_k, plan.top_p, plan.min_p)
    expected = sampling_kernels.probabilities(scores, plan.temperature, cuts)
    nothing = (torch.zeros(len(params)), torch.ones(len(params)), torch.zeros(len(params)))
    limits = [
        other if own is None else own for own, other in zip((cuts.top_k, cuts.top_p, cuts.min_p), nothing, strict=True)
    ]
    takes = torch.tensor([float(i in greedy) for i in range(len(params))])
    numbers = torch.stack([one.float() for one in (plan.temperature, *limits, takes)])
    uniforms = torch.tensor([1e-12, 0.1, 0.2, 0.4, 0.5, 0.7, 0.9, 0.99, 1 - 1e-12], dtype=torch.float64)
    steps, found = torch.zeros(len(params), dtype=torch.int32), []
    for step in range(len(uniforms)):
        probs = torch.full_like(expected, torch.nan)
        kinds = (cuts.top_k is not None, cuts.top_p is not None, cuts.min_p is not None)
        drawn = sampling_rows.choose(scores, numbers, uniforms.repeat(len(params), 1), steps + step, probs, kinds)
        assert torch.equal(probs > 0, expected > 0)
        torch.testing.assert_close(probs, expected, rtol=1e-5, atol=1e-7)
        rows = torch.arange(len(params))
        wanted = draws.inverse_cdf(probs, uniforms[step].repeat(len(params)), rows)
        likeliest, _ = sampling_kernels.likeliest(scores)
        assert torch.equal(drawn, torch.where(takes > 0, likeliest, wanted))
        found.append(drawn)
    nowhere, scores = torch.empty(0), scores.where(scores < 9, torch.nan)
    likeliest, _ = sampling_kernels.likeliest(scores)
    assert torch.equal(sampling_rows.choose(scores, numbers, uniforms[None], steps, nowhere, None), likeliest)
    return torch.stack(found)


@pytest.mark.parametrize("vocab", [61, 700])
def test_a_launch_draws_what_several_draw(vocab: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows together, with equal and excluded scores, and alone. Control: a threshold that one token too many reaches."""
    torch.manual_seed(vocab)
    scores = torch.randn(len(PARAMS), vocab) * 4
    scores[:, 5:9] = scores[:, :1]
    scores[:, 11] = -torch.inf
    found = chosen(scores, PARAMS, greedy=[0, 3])
    assert torch.equal(chosen(scores[1:2], PARAMS[1:2])[:, 0], found[:, 1])
    assert len(set(found[:, 2].tolist())) > 3
    known = sampling_rows.choose

    def wrong(scores: torch.Tensor, numbers: torch.Tensor, *given: Any) -> torch.Tensor:
        return known(scores, numbers + torch.tensor([0.0, 1, 0, 0, 0])[:, None], *given)

    monkeypatch.setattr(sampling_rows, "choose", wrong)
    with pytest.raises(AssertionError):
        chosen(scores[1:2], PARAMS[1:2])


def test_every_kernel_is_compiled_in_advance(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of the module that the host launches."""
    launched: set[str] = set()
    kernel = type(sampling_kernels.block_of)
    known = kernel.__getitem__
    monkeypatch.setattr(kernel, "__getitem__", lambda self, grid: launched.add(self.fn.__name__) or known(self, grid))
    sampling_kernels.warm_up(61, torch.float32, torch.device("cpu"))
    names = "peaks likeliest weigh search threshold cut divide block_sums inverse"
    assert launched == {f"_{name}" for name in names.split()}


def test_kernels_are_tried_before_they_are_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """FORESAY_PAGES=0, an old GPU, wrong results and a compiler that fails turn them off; each but the first is logged once."""
    known, gpus = kernels.check, itertools.count(100)  # each is tried once

    def raises(device: torch.device) -> None:
        raise RuntimeError("Failed to find C compiler")

    def used(**changes: Any) -> bool:
        with monkeypatch.context() as patch:
            patch.setattr(sampling_kernels, "SPAN", 1024)
            patch.setenv(kernels.SWITCH, changes.get("switch", "1"))
            patch.setattr(kernels, "check", changes.get("check", lambda device: known(torch.device("cpu"))))
            patch.setattr(torch.cuda, "get_device_capability", lambda device: changes.get("capability", (8, 6)))
            patch.setattr(sampling_kernels, "probabilities", changes.get("cut", sampling_kernels.probabilities))
            caplog.clear()
            gpu = torch.device("cuda", next(gpus))
            found = [kernels.uses_kernels(gpu) for _ in range(2)]
        assert found[0] == found[1] and len(caplog.records) == (0 if found[0] or "switch" in changes else 1)
        return found[0]

    assert used() and not kernels.uses_kernels(torch.device("cpu"))
    assert not used(switch="0")
    assert not used(capability=(7, 5)) and "compute capability is below 8.0" in caplog.text
    assert not used(cut=lambda scores, *_: scores.softmax(-1)) and "differ from those of PyTorch" in caplog.text
    assert not used(check=raises) and "RuntimeError: Failed to find C compiler" in caplog.text
