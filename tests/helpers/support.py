"""Drafters with known odds, and a way to run an engine over a table."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch

from foresay.decoding.acceptance import make_rule
from foresay.decoding.outcome import Step
from foresay.decoding.proposal import Proposal
from foresay.decoding.protocols import Drafter, LanguageModel, LengthPolicy, Rule
from foresay.decoding.rows import Rows
from foresay.decoding.sampling_params import SamplingParams
from foresay.drafters import ModelDrafter, PromptLookup
from foresay.drafters.stateless import Stateless
from foresay.engine import Engine
from foresay.engine.prefixes import PrefixStore
from foresay.lengths import ConstantLength


class Fake(Stateless):
    """A drafter without state; subclasses define what they draft."""

    def draft_tokens(self, row: int, rows: Rows, budget: int) -> list[int]:
        raise NotImplementedError

    def propose(self, rows: Rows, budget: Sequence[int], policy: LengthPolicy) -> Proposal:
        drafts = [self.draft_tokens(i, rows, n)[:n] for i, n in enumerate(budget)]
        width = max(map(len, drafts))
        padded = [g + [0] * (width - len(g)) for g in drafts]
        return Proposal(torch.tensor(padded, dtype=torch.int64).view(len(rows), width), [len(g) for g in drafts])


class Always(Fake):
    """Drafts what it is given the output will be: always accepted under a greedy target."""

    def __init__(self, outputs: Sequence[Sequence[int]]) -> None:
        self.outputs = outputs

    def draft_tokens(self, row: int, rows: Rows, budget: int) -> list[int]:
        one = rows[row]
        return list(self.outputs[one.request_id][one.num_new : one.num_new + budget])


class Never(Always):
    """Drafts anything but what the output will be: never accepted under a greedy target."""

    def __init__(self, outputs: Sequence[Sequence[int]], vocab_size: int) -> None:
        super().__init__(outputs)
        self.vocab_size = vocab_size

    def draft_tokens(self, row: int, rows: Rows, budget: int) -> list[int]:
        return [(token + 1) % self.vocab_size for token in super().draft_tokens(row, rows, budget)]


class Sometimes(Always):
    """Right for a known number of tokens, then wrong: rejections and full acceptances both happen."""

    def __init__(self, outputs: Sequence[Sequence[int]], vocab_size: int) -> None:
        super().__init__(outputs)
        self.vocab_size = vocab_size

    def draft_tokens(self, row: int, rows: Rows, budget: int) -> list[int]:
        right = super().draft_tokens(row, rows, budget)
        wrong_at = (rows[row].size * 7 + row) % (budget + 2)
        return [(t + 1) % self.vocab_size if i == wrong_at else t for i, t in enumerate(right)]


class Mixed(Fake):
    """Ragged draft tokens: a sampled token, then point masses, of a length that varies by row and step."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def propose(self, rows: Rows, budget: Sequence[int], policy: LengthPolicy) -> Proposal:
        from foresay.decoding.draws import inverse_cdf
        from foresay.decoding.randomness import Purpose

        counts = [min(n, (row.size + i) % 4) for i, (row, n) in enumerate(zip(rows, budget, strict=True))]
        width = max(counts)
        if width == 0:
            return Proposal.empty(len(rows), torch.device("cpu"))
        weights = torch.arange(1, self.vocab_size + 1, dtype=torch.float32)
        distributions = (weights / weights.sum()).expand(len(rows), -1).contiguous()
        uniform = rows.streams(torch.device("cpu")).uniform(Purpose.DRAFT, torch.zeros(1, dtype=torch.int64))[:, 0]
        tokens = torch.zeros(len(rows), width, dtype=torch.int64)
        tokens[:, 0] = inverse_cdf(distributions, uniform)
        for i, row in enumerate(rows):
            for j in range(1, width):
                tokens[i, j] = (row.size * 3 + j) % self.vocab_size
        index = torch.full((len(rows), width), -1)
        index[:, 0] = torch.arange(len(rows))
        return Proposal(tokens, counts, distributions, index)


def changed(drafter: Any, change: Callable[[Proposal], dict[str, Any]]) -> Any:
    """The drafter, whose proposals of sampled tokens have the fields that a function of them returns."""
    propose = drafter.propose

    def other(rows: Rows, budget: Sequence[int], policy: LengthPolicy) -> Proposal:
        found = propose(rows, budget, policy)
        return found if found.distributions is None else dataclasses.replace(found, **change(found))

    drafter.propose = other
    return drafter


class Renumbered:
    """A Retokenizer between ids and the same ids counted from the other end; the last `private` are not shared."""

    def __init__(self, size: int, private: int = 0) -> None:
        self.size = size
        ours = torch.arange(size - private)
        self.shared = (ours, size - 1 - ours)

    def reader(self) -> Renumbered:
        return self

    def read(self, tokens: Sequence[int], committed: int) -> list[int]:
        return [self.size - 1 - token for token in tokens]

    def to_target(self, context: Sequence[int], drafted: Sequence[int]) -> list[int]:
        return [self.size - 1 - token for token in drafted]


class Loop:
    """An engine whose requests come in parts; what its drafter remembers lasts.

    Prefill has no clock, so that rows join at the same steps however busy the machine is.
    """

    def __init__(
        self,
        target: LanguageModel,
        *,
        drafter: Drafter | None = None,
        rule: str | Rule = "speculative",
        gamma: int = 4,
        policy: LengthPolicy | None = None,
        max_batch_size: int = 32,
        prefixes: PrefixStore | None = None,
        **options: Any,
    ) -> None:
        """options: of Engine."""
        self.engine = Engine(
            target,
            drafter,
            make_rule(rule) if isinstance(rule, str) else rule,
            policy or ConstantLength(gamma),
            max_batch_size=max_batch_size,
            prefixes=prefixes,
            prefill_clock=None,
            **options,
        )
        self.steps: list[Step] = []

    def outputs(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams],
        *,
        eos: frozenset[int] = frozenset(),
        join_later: int = 0,
        sources: Sequence[Sequence[int]] | None = None,
        enough: int | None = None,
    ) -> list[list[int]]:
        """Decode prompts; the last `join_later` of them are submitted one by one while others decode.

        sources: input of an encoder-decoder's encoder, for each prompt. enough: tokens after which a request is cancelled,
        though its drafts may reach further.
        """
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
        outputs: dict[int, list[int]] = {}
        waiting = list(zip(prompts, each, sources or [None] * len(prompts), strict=True))
        for prompt, one, source in waiting[: len(waiting) - join_later]:
            outputs[self.engine.submit(prompt, one, eos=eos, source=source)] = []
        late, begun = waiting[len(waiting) - join_later :], len(self.steps)
        while self.engine.has_work or late:
            if late and ((len(self.steps) - begun) % 3 == 0 or not self.engine.has_work):
                prompt, one, source = late.pop(0)
                outputs[self.engine.submit(prompt, one, eos=eos, source=source)] = []
            for step in self.engine.step():
                self.steps.append(step)
                outputs[step.request_id] += step.token_ids
                if enough is not None and len(outputs[step.request_id]) >= enough:
                    self.engine.cancel(step.request_id)
        return [outputs[i] for i in sorted(outputs)]


def run(
    target: LanguageModel,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams | Sequence[SamplingParams],
    *,
    eos: frozenset[int] = frozenset(),
    join_later: int = 0,
    sources: Sequence[Sequence[int]] | None = None,
    enough: int | None = None,
    **options: Any,
) -> tuple[list[list[int]], list[Step], Engine]:
    """Decode prompts by a Loop with these options. Returns the outputs, the steps and the engine."""
    loop = Loop(target, **options)
    outputs = loop.outputs(prompts, params, eos=eos, join_later=join_later, sources=sources, enough=enough)
    return outputs, loop.steps, loop.engine


__all__ = ["Always", "Fake", "Loop", "Mixed", "ModelDrafter", "Never", "PromptLookup", "Sometimes", "changed", "run"]
