"""The kernels that sample on a GPU against PyTorch's operations, in Triton's interpreter."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from foresay.decoding import draws, kernels, sampling_kernels, truncation
from foresay.decoding.rows import Row, Rows
from foresay.decoding.sampling_kernels import Cuts
from foresay.decoding.sampling_params import SamplingParams

SPAN = 256
PARAMS = [
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
def small_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling_kernels, "SPAN", SPAN)


def rows_of(params: list[dict[str, Any]]) -> Rows:
    return Rows([Row(i, [1], SamplingParams(**one), seed=i, limit=9) for i, one in enumerate(params)])


def cuts_of(plan: truncation.Plan) -> Cuts:
    return Cuts(plan.top_k, plan.top_p, plan.min_p)


@pytest.mark.parametrize("vocab", [130, 700])
@pytest.mark.parametrize("spread", [1.0, 6.0])
def test_probabilities_are_those_of_the_operations(vocab: int, spread: float) -> None:
    """Every combination of cuts in one batch; some scores are equal, and some tokens are excluded."""
    torch.manual_seed(vocab)
    scores = torch.randn(len(PARAMS), vocab) * spread
    scores[:, 5:9] = scores[:, :1]
    scores[:, 11] = -torch.inf
    plan = truncation.plan_of(rows_of(PARAMS), scores.device)
    expected = truncation.probabilities(scores.clone(), plan, 1)
    found = sampling_kernels.probabilities(scores, plan.temperature, cuts_of(plan))
    assert torch.equal(found > 0, expected > 0)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)
    for i in range(len(PARAMS)):  # alone, with what others need left out
        one = PARAMS[i]
        single = truncation.plan_of(rows_of([one]), scores.device)
        cuts = Cuts(
            single.top_k if one.get("top_k") else None,
            single.top_p if one.get("top_p", 1) < 1 else None,
            single.min_p if one.get("min_p") else None,
        )
        alone = sampling_kernels.probabilities(scores[i : i + 1], single.temperature, cuts)
        assert torch.equal(alone[0], found[i])


def test_a_broken_search_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: a digit less leaves the threshold too low."""
    monkeypatch.setattr(sampling_kernels, "_LEVELS", 5)
    with pytest.raises(AssertionError):
        test_probabilities_are_those_of_the_operations(700, 1.0)


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


def test_every_kernel_is_compiled_in_advance(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of the module that the host launches."""
    launched: set[str] = set()

    class Recorded:
        def __init__(self, name: str, kernel: Any) -> None:
            self.name, self.kernel = name, kernel

        def __getitem__(self, grid: Any) -> Any:
            launched.add(self.name)
            return self.kernel[grid]

        def __call__(self, *args: Any, **given: Any) -> Any:
            return self.kernel(*args, **given)

    for name, kernel in list(vars(sampling_kernels).items()):
        if name.startswith("_") and hasattr(kernel, "__getitem__") and hasattr(kernel, "fn"):
            monkeypatch.setattr(sampling_kernels, name, Recorded(name, kernel))
    sampling_kernels.warm_up(61, torch.float32, torch.device("cpu"))
    assert launched == {
        "_peaks",
        "_likeliest",
        "_weigh",
        "_search",
        "_threshold",
        "_cut",
        "_divide",
        "_block_sums",
        "_inverse",
    }


def test_kernels_are_tried_before_they_are_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """FORESAY_PAGES=0, an old GPU, wrong results and a compiler that fails turn them off; each but the first is logged once."""
    known, gpu = kernels.check, torch.device("cuda:0")
    monkeypatch.delenv(kernels.SWITCH, raising=False)
    monkeypatch.setattr(kernels, "check", lambda device: known(torch.device("cpu")))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))

    def used() -> bool:
        kernels._works.cache_clear()
        caplog.clear()
        return kernels.uses_kernels(gpu) and kernels.uses_kernels(gpu)

    assert used() and not caplog.records and not kernels.uses_kernels(torch.device("cpu"))
    with monkeypatch.context() as patch:
        patch.setenv(kernels.SWITCH, "0")
        assert not used() and not caplog.records
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
        assert not used() and "compute capability is below 8.0" in caplog.text and len(caplog.records) == 1
    with monkeypatch.context() as patch:
        patch.setattr(sampling_kernels, "_LEVELS", 5)
        assert not used() and "differ from those of PyTorch" in caplog.text
    with monkeypatch.context() as patch:
        patch.setattr(kernels, "check", Raises(RuntimeError("Failed to find C compiler")))
        assert not used() and "RuntimeError: Failed to find C compiler" in caplog.text
    kernels._works.cache_clear()


class Raises:
    """A function that fails."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def __call__(self, *_: object) -> None:
        raise self.error
