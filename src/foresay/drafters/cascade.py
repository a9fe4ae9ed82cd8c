"""Cascades: drafters that draft for each other (Chen et al. 2023, Cascade Speculative Drafting).

Vertical: a draft model's own tokens come from speculative decoding with the drafters behind it. Horizontal: within one
proposal the first tokens come from larger drafters and the later ones from smaller. Both are this drafter calling `step`
with a target of its own; the law attached to a token is that of the model that reviewed it last.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Protocol

import torch

from foresay.checks import check_float, check_int
from foresay.decoding.acceptance import Coupled, Lenience, Speculative
from foresay.decoding.distributions import Distributions
from foresay.decoding.outcome import Step
from foresay.decoding.proposal import Proposal, Verification
from foresay.decoding.proposal_checks import checked
from foresay.decoding.protocols import (
    Drafter,
    DraftStep,
    KVCache,
    LengthPolicy,
    ModelOutput,
    Move,
    ProposesTrees,
    Remembers,
    Rule,
    UsesTargetCache,
)
from foresay.decoding.rows import Row, Rows
from foresay.decoding.step import step
from foresay.drafters.model import ModelDrafter
from foresay.drafters.ngram import NgramDrafter
from foresay.drafters.proposal_builder import ProposalBuilder
from foresay.drafters.shortening import Shortening
from foresay.errors import ConfigError
from foresay.lengths import ConstantLength
from foresay.lengths.constant import MAX_DRAFT_TOKENS

Matrix = Sequence[Sequence[int]]


class Cascade(Drafter):
    """Drafters d_1 (largest) to d_n and a control matrix.

    k: [n, n], upper triangular. Row i is a model's plan: the target's for i = 0, d_i's otherwise. k[i][j] is how many tokens
    d_{j+1} adds, j from i on: it works until the proposal has k[i][i] + ... + k[i][j], and what overshoots is kept. A model
    whose row is zero, and the last drafter, guess by themselves. lenience: at least 1, of the inner reviews alone; above
    1 their tokens have no known law and count as point masses, so the output stays exact.
    """

    def __init__(self, drafters: Sequence[Drafter], k: Matrix, *, lenience: float = 1.0) -> None:
        check_matrix(k, len(drafters))
        for one in drafters:
            if isinstance(one, ProposesTrees) and one.branches > 1:
                raise ConfigError(f"a cascade chains its drafters, and {type(one).__name__} proposes trees")
        self.drafters, self.k = tuple(drafters), tuple(tuple(row) for row in k)
        self.lenience = check_float("lenience", lenience, 1.0, 1e6)
        self.hidden_layers = tuple(sorted({layer for d in drafters for layer in d.hidden_layers}))
        self.samples = any(d.samples for d in drafters) or any(map(any, self.k[1:]))  # reviews draw
        workers: list[_Node] = []
        for place in range(len(drafters) - 1, -1, -1):  # the deepest first: those before it draft with it
            workers.insert(0, self._worker(place, workers))
        models = [d.context.model for d in drafters if isinstance(d, ModelDrafter)]
        self._plan = _MatrixRow(self.k[0], workers, models[0].device if models else torch.device("cpu"))

    def _worker(self, place: int, deeper: Sequence[_Node]) -> _Node:
        drafter = self.drafters[place]
        plan = self.k[place + 1][place + 1 :] if place + 1 < len(self.k) else ()
        if not any(plan):
            return _Leaf(drafter)
        if not isinstance(drafter, ModelDrafter) or drafter.hidden_layers:
            raise ConfigError(
                f"k[{place + 1}]={list(self.k[place + 1])} asks drafter {place + 1} ({type(drafter).__name__}) to review "
                "what others draft, which only a model can; make that row zero"
            )
        for j, (count, below) in enumerate(zip(plan, self.drafters[place + 1 :], strict=True), place + 1):
            if count and _reads_source(below) and not _reads_source(drafter):
                raise ConfigError(
                    f"k[{place + 1}][{j}]={count}: drafter {j + 1} has an encoder, and drafter {place + 1}, which would review "
                    "it, reads source and output as one text; make that entry zero"
                )
        model = drafter.context.model
        return _ReviewingNode(drafter, _MatrixRow(plan, deeper, model.device, model.vocab_size), self.lenience)

    def repeats_seeds(self) -> bool:
        """Whether a member keeps requests and another one samples; look-ups alone are judged by what the target writes."""
        if any(isinstance(one, Remembers) and one.repeats_seeds() for one in self.drafters):
            return True
        keeps = any(isinstance(one, NgramDrafter) and one.keeps_requests for one in self.drafters)
        return keeps and any(not isinstance(one, NgramDrafter) for one in self.drafters)

    def use_cache_of_target(self, cache: KVCache) -> None:
        """Pass on to those that draft in the target's cache."""
        for drafter in self.drafters:
            if isinstance(drafter, UsesTargetCache):
                drafter.use_cache_of_target(cache)

    def admit(self, rows: Rows, first: int) -> None:
        """Pass on."""
        for drafter in self.drafters:
            drafter.admit(rows, first)

    def rearrange(self, moves: Sequence[Move], count: int) -> None:
        """Pass on."""
        for drafter in self.drafters:
            drafter.rearrange(moves, count)

    def reset(self) -> None:
        """Pass on."""
        for drafter in self.drafters:
            drafter.reset()

    def observe(self, rows: Rows, verification: Verification | None, target: ModelOutput | None) -> None:
        """Pass on."""
        for drafter in self.drafters:
            drafter.observe(rows, verification, target)

    def propose(self, rows: Rows, budget: Sequence[int], policy: LengthPolicy) -> Proposal:
        """Carry out the target's row of the matrix, never past `budget`."""
        return self._plan.draft(rows, budget, policy)


def _reads_source(drafter: Drafter) -> bool:
    return isinstance(drafter, ModelDrafter) and drafter.context.model.capabilities.reads_source


def drafted_at_most(k: Matrix) -> int:
    """Tokens that the target's row of a matrix asks for."""
    return min(sum(k[0]), MAX_DRAFT_TOKENS)


def check_matrix(k: Matrix, count: int) -> None:
    """Raise ConfigError unless k is an upper-triangular [count, count] matrix whose first row asks for something."""
    if count == 0:
        raise ConfigError("a cascade needs at least one drafter")
    shape = f"{count} drafters need a matrix k of {count} rows of {count} numbers"
    if isinstance(k, str) or not isinstance(k, Sequence) or any(not isinstance(row, list | tuple) for row in k):
        raise ConfigError(f"k={k!r} is not a matrix; {shape}")
    if len(k) != count or any(len(row) != count for row in k):
        raise ConfigError(f"k has rows of {[len(row) for row in k]} numbers; {shape}")
    for i, row in enumerate(k):
        for j, value in enumerate(row):
            check_int(f"k[{i}][{j}]", value, 0, MAX_DRAFT_TOKENS)
            if j < i and value:
                raise ConfigError(
                    f"k[{i}][{j}]={value} must be 0: k is upper triangular, drafter {j + 1} does not draft for drafter {i}"
                )
    if not any(k[0]):
        raise ConfigError("k[0] is all zeros: nobody drafts for the target")


class _Node(Protocol):
    """What carries out one entry of a plan."""

    def work(self, rows: Rows, want: Sequence[int], most: Sequence[int], policy: _PolicyTap) -> Proposal:
        """At least `want` tokens for each row if it can, and no more than `most`. The rows are the worker's to change."""
        ...


class _Leaf:
    """A drafter that guesses by itself."""

    def __init__(self, drafter: Drafter) -> None:
        self.drafter = drafter

    def work(self, rows: Rows, want: Sequence[int], most: Sequence[int], policy: _PolicyTap) -> Proposal:
        return self.drafter.propose(rows, want, policy)


class _MatrixRow(Drafter):
    """One row of the matrix: who adds how much, one after the other."""

    def __init__(
        self, counts: Sequence[int], workers: Sequence[_Node], device: torch.device, vocab_size: int = 0
    ) -> None:
        """device, vocab_size: where the model that reviews the proposals scores them, and its tokens."""
        self._parts, self._device = list(zip(counts, workers, strict=True)), device
        self._vocab_size = vocab_size

    def draft(self, rows: Rows, most: Sequence[int], policy: LengthPolicy) -> Proposal:
        """A proposal of up to `most` tokens for each row."""
        grown = ProposalBuilder(len(rows), self._device)
        with grown.keeping():
            self._grow(grown, rows, most, policy)
        return grown.proposal(confidence=rows.needs.confidence)

    def _grow(self, grown: ProposalBuilder, rows: Rows, most: Sequence[int], policy: LengthPolicy) -> None:
        closed = [False] * len(rows)
        goal = 0
        for tag, (count, worker) in enumerate(self._parts):
            goal += count
            sizes = [len(tokens) for tokens in grown.tokens]
            each = zip(sizes, most, closed, strict=True)
            want = [0 if shut else max(0, min(goal, limit) - size) for size, limit, shut in each]
            if grown.failure is not None:
                break
            if count == 0 or not any(want):
                continue
            room = [limit - size if n else 0 for n, limit, size in zip(want, most, sizes, strict=True)]
            watched = _PolicyTap(policy, sizes)
            proposal = worker.work(rows.with_draft(grown.tokens, tag), want, room, watched)
            grown.add(proposal)
            closed = [shut or watched.stopped(i, proposal.num_tokens[i]) for i, shut in enumerate(closed)]
            closed = [
                shut or _ended(row, grown.tokens[i]) for i, (row, shut) in enumerate(zip(rows, closed, strict=True))
            ]

    # a plan is also the drafter of an inner step, whose rows come and go with the outer ones

    def propose(self, rows: Rows, budget: Sequence[int], policy: LengthPolicy) -> Proposal:
        return checked(self.draft(rows, budget, policy), budget, self._vocab_size, self._device, trees=False)

    def admit(self, rows: Rows, first: int) -> None: ...

    def rearrange(self, moves: Sequence[Move], count: int) -> None: ...

    def reset(self) -> None: ...

    def observe(self, rows: Rows, verification: Verification | None, target: ModelOutput | None) -> None: ...


def _ended(row: Row, tokens: Sequence[int]) -> bool:
    """Whether a draft holds a token that ends the output, so that nothing behind it could be kept."""
    return not row.eos.isdisjoint(tokens)


class _PolicyTap(LengthPolicy):
    """A policy that remembers which rows it stopped, for a node that begins after some tokens of each row's draft."""

    def __init__(self, policy: LengthPolicy, before: Sequence[int]) -> None:
        """before: B, the tokens that each row's draft has already."""
        self._policy, self._before = policy, before
        self.needs_hidden = policy.needs_hidden
        self._masks: list[list[bool] | None] = []
        self.failure: BaseException | None = None
        """The exception that the policy raised in `kept`; None if there is none."""
        self._closed: set[int] = set()

    def budget(self, rows: Rows) -> list[int]:
        return self._policy.budget(rows)

    def _asked(self, step: DraftStep) -> torch.Tensor | None:
        before = torch.tensor(self._before, device=step.index.device)
        return self._policy.keep_drafting(dataclasses.replace(step, index=step.index + before))

    def keep_drafting(self, step: DraftStep) -> torch.Tensor | None:
        mask = self._asked(step)
        self._masks.append(None if mask is None else mask.tolist())
        return mask

    def kept(self, proposal: Proposal, distributions: Distributions, before: Sequence[int]) -> list[int]:
        """How many tokens of a review stay: a row's up to the one that stops it, or at which the policy raised.

        before: B, tokens of this node ahead of them. laws: those of the review, column t the one that token t came from.
        """
        counts = list(proposal.num_tokens)
        written = torch.tensor(before, device=proposal.token_ids.device)
        for t in range(proposal.width):
            live = [i for i, n in enumerate(counts) if n > t]
            if not live:
                break
            column = slice(t, t + 1)
            index = None if distributions.probs_row is None else distributions.probs_row[:, column]
            scores = None if distributions.scores is None else distributions.scores[:, column]
            here = Distributions(distributions.greedy_ids[:, column], distributions.probs, index, scores)
            going = self._going_on(DraftStep(written + t, proposal.token_ids[:, t], here))
            for i in (i for i in live if not going[i]):
                counts[i] = t + 1
                self._closed.add(i)
        return counts

    def _going_on(self, step: DraftStep) -> list[bool]:
        try:
            mask = self._asked(step)
            return [True] * len(step.index) if mask is None else mask.tolist()
        except (Exception, SystemExit) as error:  # the tokens up to here were drawn, and stay
            self.failure = error
            return [False] * len(step.index)

    def stopped(self, place: int, count: int) -> bool:
        """Whether a row was stopped by one of its first `count` tokens."""
        return place in self._closed or any(mask is not None and not mask[place] for mask in self._masks[:count])


class _ReviewingNode:
    """A draft model that decodes speculatively with the drafters behind it.

    Whether a review goes on to a token depends on what came before it and never on the token itself, so that the law of
    each token it writes, given those before it, is the model's own law.
    """

    def __init__(self, drafter: ModelDrafter, plan: _MatrixRow, lenience: float) -> None:
        self._context, self._plan, self._lenience = drafter.context, plan, lenience
        self._length = ConstantLength(MAX_DRAFT_TOKENS)

    def work(self, rows: Rows, want: Sequence[int], most: Sequence[int], policy: _PolicyTap) -> Proposal:
        context, model = self._context, self._context.model
        device = model.device
        shared = rows.needs.shares_noise
        lenient = self._lenience > 1 and not shared
        rule: Rule = Coupled() if shared else Lenience(self._lenience) if lenient else Speculative()
        seen = context.view(rows)
        room = [
            max(0, min(m, model.max_length - row.size)) if n else 0 for n, m, row in zip(want, most, seen, strict=True)
        ]
        grown = ProposalBuilder(len(rows), device)
        if not any(room):
            return grown.proposal()
        context.prepare(seen, [m > 0 for m in room])
        seen = seen.like(seen.rows, confidence=lenient)
        for row, m in zip(seen, room, strict=True):
            row.limit = row.size + m
        with grown.keeping():
            while grown.failure is None and any(row.remaining for row in seen):
                self._review(grown, seen, want, rule, policy, lenient=lenient, confidence=rows.needs.confidence)
            context.remember(seen, [[]] * len(seen))
        return grown.proposal(confidence=rows.needs.confidence)

    def _review(
        self,
        grown: ProposalBuilder,
        seen: Rows,
        want: Sequence[int],
        rule: Rule,
        policy: _PolicyTap,
        *,
        lenient: bool,
        confidence: bool,
    ) -> None:
        """Add what one step of the model commits to its own rows, and the failure of those that draft for it."""
        reviews: list[tuple[Proposal, Distributions]] = []

        def see(
            rows: Rows,
            proposal: Proposal,
            distributions: Distributions,
            verification: Verification,
            output: ModelOutput,
        ) -> None:
            reviews.append((proposal, distributions))

        model = Shortening(self._context.model)
        steps = step(seen, model, self._context.cache, self._plan, rule, self._length, [see])
        ((proposal, distributions),) = reviews
        reviewed = _reviewed(steps, distributions, lenient=lenient, confidence=confidence)
        kept = policy.kept(reviewed, distributions, [len(tokens) for tokens in grown.tokens])
        grown.add(reviewed, kept)
        grown.failure = proposal.failure or policy.failure or model.failure
        for i, (row, one) in enumerate(zip(seen, steps, strict=True)):
            stopped = kept[i] < len(one.token_ids) or policy.stopped(i, 0)
            if stopped or one.finish_reason is not None or len(grown.tokens[i]) >= want[i]:
                row.limit = row.size


def _reviewed(steps: Sequence[Step], distributions: Distributions, *, lenient: bool, confidence: bool) -> Proposal:
    """What an inner step committed, as a proposal with the reviewer's laws."""
    counts = [len(one.token_ids) for one in steps]
    width = max(counts)
    device = distributions.greedy_ids.device
    ids = torch.tensor(
        [[*one.token_ids, *[0] * (width - n)] for one, n in zip(steps, counts, strict=True)],
        dtype=torch.int64,
        device=device,
    )
    sure = distributions.confidence(ids) if confidence and width else None
    if lenient or distributions.probs is None or distributions.probs_row is None:
        return Proposal(ids, counts, confidence=sure)
    return Proposal(ids, counts, distributions.probs, distributions.probs_row[:, :width], sure)
