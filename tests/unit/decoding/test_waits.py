"""A step on a device: it waits for it once, and decodes the same tokens as on the host.

PyTorch's "meta" device has shapes and no values: an operation that reads a value back raises. Copies that wait are counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from foresay import ConstantLength, Proposal, Rows, SamplingParams, TableModel
from foresay.decoding import devices, kernels, sampling_kernels
from foresay.decoding import step as step_module
from foresay.decoding.acceptance import make_rule
from foresay.decoding.protocols import LanguageModel, LengthPolicy, ModelInput, ModelOutput
from foresay.decoding.step import step
from foresay.engine.guard import GuardedDrafter
from helpers.making import make_rows
from helpers.simulated_steps import one_accepted
from helpers.support import Always, Sometimes, run

META, VOCAB, DRAFTED = torch.device("meta"), 11, 3
RULES = {name: make_rule(name).trees for name in ("speculative", "block", "match", "lenience", "typical")}
"""Whether each takes trees."""
SETTINGS: dict[str, list[dict[str, Any]]] = {
    "greedy": [{}, {}],
    "sampled": [{"temperature": 1.0, "top_k": 5, "top_p": 0.9}, {"temperature": 0.5, "min_p": 0.1}],
    "mixed": [{}, {"temperature": 1.0}],
    "penalised": [
        {"repetition_penalty": 1.2, "frequency_penalty": 0.5, "logit_bias": {3: 1.0}, "banned_token_ids": (2,)},
        {"temperature": 1.0, "presence_penalty": 0.5, "min_new_tokens": 5},
    ],
}


class Waits(TorchFunctionMode):
    """Counts the copies to a device that wait for it."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        if name in ("tensor", "as_tensor"):
            self.count += out.device != torch.device("cpu")
        elif name in ("to", "copy_"):
            others = [one.device for one in (out, *args) if isinstance(one, torch.Tensor)]
            self.count += len(set(others)) > 1 and not kwargs.get("non_blocking")
        return out


class Remote(LanguageModel):
    """A target on a device."""

    vocab_size, max_length, device = VOCAB, 64, META

    def forward(self, model_input: ModelInput, cache: Any) -> ModelOutput:
        assert model_input.token_ids.device == META
        for i, count in enumerate(model_input.num_tokens):
            cache.lengths[i] += count
        return ModelOutput(torch.empty(*model_input.token_ids.shape, VOCAB, device=META))


class Drafts(Always):
    """Chains that a model on the device has drawn, some rows of them from distributions."""

    samples = True

    def __init__(self, kind: str) -> None:
        super().__init__(0)
        self.kind = kind

    def propose(self, rows: Rows, budget: Sequence[int], policy: LengthPolicy) -> Proposal:
        ids = torch.empty(len(rows), DRAFTED, dtype=torch.int64, device=META)
        if self.kind == "tree":
            return Proposal(ids, list(budget), parents=torch.empty_like(ids))
        if self.kind == "chosen":
            return Proposal(ids, list(budget))
        ends = torch.empty(len(rows), dtype=torch.int64, device=META) if self.kind == "ended" else None
        return Proposal(ids, list(budget), torch.empty(6, VOCAB, device=META), torch.empty_like(ids), ends=ends)


KINDS = ("none", "chosen", "sampled", "ended", "tree")
PAIRS = [(kind, rule) for kind in KINDS for rule in RULES if kind != "tree" or RULES[rule]]


@pytest.mark.parametrize(
    ("drafts", "rule", "setting"), [(*pair, [*SETTINGS][i % len(SETTINGS)]) for i, pair in enumerate(PAIRS)]
)
def test_a_step_waits_for_the_device_once(
    drafts: str, rule: str, setting: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every two of kind, rule and setting but for trees."""
    reads: list[torch.Tensor] = []
    monkeypatch.setattr(step_module, "later", lambda values: reads.append(values) or one_accepted(values))
    monkeypatch.setattr(kernels, "uses_kernels", lambda device: True)
    monkeypatch.setattr(sampling_kernels, "probabilities", lambda scores, *_: scores.float())
    monkeypatch.setattr(sampling_kernels, "inverse_cdf", lambda probs, uniform, rows: torch.empty_like(rows))
    rows = make_rows(*SETTINGS[setting], prompt=[1, 2])
    target, cache = Remote(), TableModel.random(VOCAB, seed=0).new_cache()
    cache.lengths, cache.contexts = [1, 1], [[1], [1]]  # type: ignore[attr-defined]
    monkeypatch.setattr(cache, "keep", lambda starts, paths: None)
    drafter, checked = GuardedDrafter(Drafts(drafts), VOCAB, META, trees=drafts == "tree"), list[bool]()
    for _ in range(2):  # sampling parameters are copied when rows join
        with Waits() as waits:
            length = ConstantLength(0 if drafts == "none" else DRAFTED)
            observers = [lambda rows, proposal, *_: checked.append(proposal.defects is not None)]
            step(rows, target, cache, drafter, make_rule(rule), length, observers)
    assert waits.count == 0 and len(reads) == 2
    assert checked[0] == (drafts != "none"), "drafts were not checked on the device"


def test_a_copy_that_waits_is_counted() -> None:
    """Control."""
    with Waits() as waits:
        torch.tensor([1], device=META)
        torch.zeros(1).to(META)
        torch.zeros(1).to(META, non_blocking=True)
    assert waits.count == 2
    with pytest.raises(NotImplementedError):
        torch.nonzero(torch.zeros(2, device=META))


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("rule", RULES)
def test_tokens_are_those_of_the_host(setting: str, rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The operations of a device, on the host: draws at all positions, numbers from a table, checks without reading."""
    model, prompts, drafts = TableModel.random(VOCAB, seed=3), [[1, 2], [3]], [[5] * 12, [7, 7, 2] * 4]
    params = [SamplingParams(max_new_tokens=12, seed=i, **one) for i, one in enumerate(SETTINGS[setting])]

    def tokens() -> list[list[list[int]]]:
        drafters = (Sometimes(drafts, VOCAB), None)
        return [run(model, prompts, params, drafter=one, gamma=3, rule=make_rule(rule))[0] for one in drafters]

    on_host = tokens()
    monkeypatch.setattr(devices, "is_remote", lambda device: True)
    assert tokens() == on_host
