"""Cascades: drafters that draft for each other (Chen et al. 2023, Cascade Speculative Drafting).

Vertical: a draft model generates its tokens by speculative decoding with the smaller drafters after it. Horizontal: within one
proposal the first tokens come from larger drafters and the later ones from smaller drafters. For both, the cascade calls `step`
with a draft model as the target; the distribution attached to a token is that of the model that verified it last.
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
from foresay.decoding.proposal import INVALID, Proposal, Verification
from foresay.decoding.proposal_checks import checked
from foresay.decoding.protocols import (
    Drafter,
    KVCache,
    LengthPolicy,
    ModelOutput,
    Move,
    ProposesTrees,
    Remembers,
    Rule,
    UsesTargetCache,
    learned_by,
)
from foresay.decoding.rows import Row, Rows
from foresay.decoding.step import step
from foresay.decoding.stopping import DraftStep, Stopping
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

    k: [n, n], upper triangular. Row 0 plans the proposal for the target, row i the one for d_i. Drafter d_{j+1}, j >= i, drafts
    until the proposal has k[i][i] + ... + k[i][j] tokens; excess tokens are kept. A drafter whose row is zero, and the last one,
    draft without another drafter. lenience: at least 1, for the inner verification only; above 1 its tokens have no known
    distribution and count as point masses, so the output stays exact.
    Raises ConfigError for a wrong matrix, a drafter of trees, or a row for a drafter that cannot verify.
    """

    def __init__(self, drafters: Sequence[Drafter], k: Matrix, *, lenience: float = 1.0) -> None:
        check_matrix(k, len(drafters))
        for one in drafters:
            if isinstance(one, ProposesTrees) and one.branches > 1:
                text = "proposes trees, and a cascade takes drafters of chains; set branches=1 or replace it"
                raise ConfigError(text, param="drafters", value=type(one).__name__)
        self.drafters, self.k = tuple(drafters), tuple(tuple(row) for row in k)
        self.lenience = check_float("lenience", lenience, 1.0, 1e6)
        self.hidden_layers = tuple(sorted({layer for d in drafters for layer in d.hidden_layers}))
        self.samples = any(d.samples for d in drafters) or any(map(any, self.k[1:]))  # inner verification samples
        nodes: list[_Node] = []
        for index in range(len(drafters) - 1, -1, -1):  # the last first: larger drafters use the smaller ones
            nodes.insert(0, self._node(index, nodes))
        models = [d.context.model for d in drafters if isinstance(d, ModelDrafter)]
        self._plan = _MatrixRow(self.k[0], nodes, models[0].device if models else torch.device("cpu"))

    def _node(self, index: int, smaller: Sequence[_Node]) -> _Node:
        drafter = self.drafters[index]
        plan = self.k[index + 1][index + 1 :] if index + 1 < len(self.k) else ()
        if not any(plan):
            return _Leaf(drafter)
        if not isinstance(drafter, ModelDrafter) or drafter.hidden_layers:
            text = f"must be zeros: drafter {index + 1} ({type(drafter).__name__}) is no draft model, and cannot verify tokens"
            raise ConfigError(text, param=f"k[{index + 1}]", value=list(self.k[index + 1]))
        for j, (count, other) in enumerate(zip(plan, self.drafters[index + 1 :], strict=True), index + 1):
            if count and _reads_source(other) and not _reads_source(drafter):
                text = f"must be 0: drafter {j + 1} is an encoder-decoder, and drafter {index + 1} is decoder-only"
                raise ConfigError(text, param=f"k[{index + 1}][{j}]", value=count)
        model = drafter.context.model
        return _VerifyingNode(drafter, _MatrixRow(plan, smaller, model.device, model.vocab_size), self.lenience)

    @property
    def learned(self) -> bytes:
        """Digests of all drafters."""
        return learned_by(*self.drafters)

    def repeats_seeds(self) -> bool:
        """Return True if a member keeps requests and another one samples (see `Remembers`).

        The point masses of n-gram drafters alone are verified only by the target.
        """
        if any(isinstance(one, Remembers) and one.repeats_seeds() for one in self.drafters):
            return True
        keeps = any(isinstance(one, NgramDrafter) and one.keeps_requests for one in self.drafters)
        return keeps and any(not isinstance(one, NgramDrafter) for one in self.drafters)

    def use_cache_of_target(self, cache: KVCache) -> None:
        """Give the target's cache to the drafters that draft in it."""
        for drafter in self.drafters:
            if isinstance(drafter, UsesTargetCache):
                drafter.use_cache_of_target(cache)

    def admit(self, rows: Rows, first: int) -> None:
        """Forward to every drafter."""
        for drafter in self.drafters:
            drafter.admit(rows, first)

    def rearrange(self, moves: Sequence[Move], count: int) -> None:
        """Forward to every drafter."""
        for drafter in self.drafters:
            drafter.rearrange(moves, count)

    def reset(self) -> None:
        """Forward to every drafter."""
        for drafter in self.drafters:
            drafter.reset()

    def observe(self, rows: Rows, verification: Verification | None, target: ModelOutput | None) -> None:
        """Forward to every drafter."""
        for drafter in self.drafters:
            drafter.observe(rows, verification, target)

    def propose(self, rows: Rows, budget: Sequence[int], policy: LengthPolicy) -> Proposal:
        """Draft by row 0 of the matrix, at most `budget` tokens for each row."""
        return self._plan.draft(rows, budget, policy)


def _reads_source(drafter: Drafter) -> bool:
    return isinstance(drafter, ModelDrafter) and drafter.context.model.capabilities.reads_source


def drafted_at_most(k: Matrix) -> int:
    """Return the number of tokens that row 0 of a matrix plans, capped at MAX_DRAFT_TOKENS."""
    return min(sum(k[0]), MAX_DRAFT_TOKENS)


def check_matrix(k: Matrix, count: int) -> None:
    """Raise ConfigError unless k is an upper-triangular [count, count] matrix with a nonzero first row."""
    if count == 0:
        raise ConfigError("must contain at least one", param="drafters", value=())
    shape = f"{count} drafters need a matrix k of {count} rows of {count} numbers"
    if isinstance(k, str) or not isinstance(k, Sequence) or any(not isinstance(row, list | tuple) for row in k):
        raise ConfigError(f"is not a matrix; {shape}", param="k", value=k)
    if len(k) != count or any(len(row) != count for row in k):
        raise ConfigError(f"has rows of {[len(row) for row in k]} numbers; {shape}", param="k", value=k)
    for i, row in enumerate(k):
        for j, value in enumerate(row):
            check_int(f"k[{i}][{j}]", value, 0, MAX_DRAFT_TOKENS)
            if j < i and value:
                text = f"must be 0: k is upper triangular, drafter {j + 1} does not draft for drafter {i}"
                raise ConfigError(text, param=f"k[{i}][{j}]", value=value)
    if not any(k[0]):
        text = "is all zeros: no drafter drafts for the target; set an entry above zero"
        raise ConfigError(text, param="k[0]", value=k[0])


class _Node(Protocol):
    """A drafter that carries out one entry of a row of the matrix."""

    def draft(self, rows: Rows, wanted: Sequence[int], most: Sequence[int], policy: _PolicyTap) -> Proposal:
        """Draft at least `wanted` tokens for each row if possible, and at most `most`. May modify the rows."""
        ...


class _Leaf:
    """A drafter that drafts without another drafter."""

    def __init__(self, drafter: Drafter) -> None:
        self.drafter = drafter

    def draft(self, rows: Rows, wanted: Sequence[int], most: Sequence[int], policy: _PolicyTap) -> Proposal:
        return self.drafter.propose(rows, wanted, _Tapped(policy))


class _MatrixRow(Drafter):
    """One row of the matrix: drafters that extend a proposal one after the other."""

    def __init__(
        self, counts: Sequence[int], nodes: Sequence[_Node], device: torch.device, vocab_size: int = 0
    ) -> None:
        """device, vocab_size: of the model that verifies the proposals."""
        self._parts, self._device = list(zip(counts, nodes, strict=True)), device
        self._vocab_size = vocab_size

    def draft(self, rows: Rows, most: Sequence[int], policy: LengthPolicy) -> Proposal:
        """Draft at most `most` tokens for each row."""
        builder = ProposalBuilder(len(rows), self._device)
        with builder.keeping():
            self._extend(builder, rows, most, policy)
        return builder.proposal(confidence=rows.needs.confidence)

    def _extend(self, builder: ProposalBuilder, rows: Rows, most: Sequence[int], policy: LengthPolicy) -> None:
        ended, stopping = [False] * len(rows), policy.stopping(rows)
        goal = 0
        for tag, (count, node) in enumerate(self._parts):
            goal += count
            sizes = [len(tokens) for tokens in builder.tokens]
            each = zip(sizes, most, ended, strict=True)
            wanted = [0 if done else max(0, min(goal, limit) - size) for size, limit, done in each]
            if builder.failure is not None:
                break
            if count == 0 or not any(wanted):
                continue
            room = [limit - size if n else 0 for n, limit, size in zip(wanted, most, sizes, strict=True)]
            tap = _PolicyTap(stopping, rows, sizes)
            proposal = node.draft(rows.with_draft(builder.tokens, tag), wanted, room, tap)
            builder.add(proposal)
            ended = [done or tap.stopped(i, proposal.num_tokens[i]) for i, done in enumerate(ended)]
            ended = [
                done or _has_end(row, builder.tokens[i]) for i, (row, done) in enumerate(zip(rows, ended, strict=True))
            ]

    # the drafter of an inner step: it keeps no state of its rows

    def propose(self, rows: Rows, budget: Sequence[int], policy: LengthPolicy) -> Proposal:
        return checked(self.draft(rows, budget, policy), budget, self._vocab_size, self._device, trees=False)

    def admit(self, rows: Rows, first: int) -> None: ...

    def rearrange(self, moves: Sequence[Move], count: int) -> None: ...

    def reset(self) -> None: ...

    def observe(self, rows: Rows, verification: Verification | None, target: ModelOutput | None) -> None: ...


def _has_end(row: Row, tokens: Sequence[int]) -> bool:
    """Return True if a draft contains a token that ends the output, so that later tokens would be discarded."""
    return not row.eos.isdisjoint(tokens)


class _Tapped(LengthPolicy):
    """A policy whose rule is evaluated by a tap."""

    def __init__(self, tap: _PolicyTap) -> None:
        self._tap = tap

    def budget(self, rows: Rows) -> list[int]:
        raise NotImplementedError

    def stopping(self, rows: Rows) -> Stopping:
        return self._tap


class _PolicyTap(Stopping):
    """An evaluation of the policy's rule for a node that continues drafts; records the rows that it stopped."""

    def __init__(self, inner: Stopping, rows: Rows, before: Sequence[int]) -> None:
        """before: [B], number of tokens that each row's draft already has."""
        super().__init__(inner.rule, rows)
        self._inner, self._before = inner, before
        self._masks: list[list[bool] | None] = []
        self.failure: BaseException | None = None
        """The exception that the rule raised in `kept`; None if there is none."""
        self._stopped: set[int] = set()

    def _mask(self, step: DraftStep) -> torch.Tensor | None:
        before = torch.tensor(self._before, device=step.index.device)
        return self._inner.keep(dataclasses.replace(step, index=step.index + before))

    def keep(self, step: DraftStep) -> torch.Tensor | None:
        mask = self._mask(step)
        self._masks.append(None if mask is None else mask.tolist())
        return mask

    def kept(self, proposal: Proposal, distributions: Distributions, before: Sequence[int]) -> list[int]:
        """Return how many verified tokens each row keeps: those up to the one after which the policy stops or raises.

        before: [B], tokens that this node drafted before them. distributions: [B, T], the t-th is that of token t.
        """
        counts = list(proposal.num_tokens)
        num_before = torch.tensor(before, device=proposal.token_ids.device)
        for t in range(proposal.width):
            active = [i for i, n in enumerate(counts) if n > t]
            if not active:
                break
            at = slice(t, t + 1)
            index = None if distributions.probs_row is None else distributions.probs_row[:, at]
            scores = None if distributions.scores is None else distributions.scores[:, at]
            at_t = Distributions(distributions.greedy_ids[:, at], distributions.probs, index, scores)
            continuing = self._continuing(DraftStep(num_before + t, proposal.token_ids[:, t], at_t))
            for i in (i for i in active if not continuing[i]):
                counts[i] = t + 1
                self._stopped.add(i)
        return counts

    def _continuing(self, step: DraftStep) -> list[bool]:
        try:
            mask = self._mask(step)
            return [True] * len(step.index) if mask is None else mask.tolist()
        except (Exception, SystemExit) as error:  # keep the tokens drawn so far
            self.failure = error
            return [False] * len(step.index)

    def stopped(self, index: int, count: int) -> bool:
        """Return True if the policy stopped a row after one of its first `count` tokens."""
        return index in self._stopped or any(mask is not None and not mask[index] for mask in self._masks[:count])


class _VerifyingNode:
    """A draft model that drafts by speculative decoding with the smaller drafters after it.

    Whether verification continues to a token depends on the tokens before it and never on the token itself, so that each token,
    given those before it, has the model's own distribution.
    """

    def __init__(self, drafter: ModelDrafter, plan: _MatrixRow, lenience: float) -> None:
        self._context, self._plan, self._lenience = drafter.context, plan, lenience
        self._length = ConstantLength(MAX_DRAFT_TOKENS)

    def draft(self, rows: Rows, wanted: Sequence[int], most: Sequence[int], policy: _PolicyTap) -> Proposal:
        context, model = self._context, self._context.model
        device = model.device
        shared = rows.needs.shares_noise
        lenient = self._lenience > 1 and not shared
        rule: Rule = Coupled() if shared else Lenience(self._lenience) if lenient else Speculative()
        viewed = context.view(rows)
        room = [
            max(0, min(m, model.max_length - row.size)) if n else 0
            for n, m, row in zip(wanted, most, viewed, strict=True)
        ]
        builder = ProposalBuilder(len(rows), device)
        if not any(room):
            return builder.proposal()
        context.prepare(viewed, [m > 0 for m in room])
        viewed = viewed.like(viewed.rows, confidence=lenient)
        for row, m in zip(viewed, room, strict=True):
            row.limit = row.size + m
        with builder.keeping():
            while builder.failure is None and any(row.remaining for row in viewed):
                self._step(builder, viewed, wanted, rule, policy, lenient=lenient, confidence=rows.needs.confidence)
            context.remember(viewed, [[]] * len(viewed))
        return builder.proposal(confidence=rows.needs.confidence)

    def _step(
        self,
        builder: ProposalBuilder,
        viewed: Rows,
        wanted: Sequence[int],
        rule: Rule,
        policy: _PolicyTap,
        *,
        lenient: bool,
        confidence: bool,
    ) -> None:
        """Run one step of the model on its own rows, and add the committed tokens and any failure of the drafters for it."""
        verified: list[tuple[Proposal, Distributions]] = []

        def record(
            rows: Rows,
            proposal: Proposal,
            distributions: Distributions,
            verification: Verification,
            output: ModelOutput,
        ) -> None:
            verified.append((proposal, distributions))

        model = Shortening(self._context.model)
        steps = step(viewed, model, self._context.cache, self._plan, rule, self._length, [record])
        ((proposal, distributions),) = verified
        committed = _as_proposal(steps, distributions, lenient=lenient, confidence=confidence)
        kept = policy.kept(committed, distributions, [len(tokens) for tokens in builder.tokens])
        builder.add(committed, kept)
        builder.failure = proposal.failure or policy.failure or model.failure
        if builder.failure is None and proposal.defects is not None and proposal.defects.found:
            builder.failure = ValueError(INVALID)
        for i, (row, one) in enumerate(zip(viewed, steps, strict=True)):
            stopped = kept[i] < len(one.token_ids) or policy.stopped(i, 0)
            if stopped or one.finish_reason is not None or len(builder.tokens[i]) >= wanted[i]:
                row.limit = row.size


def _as_proposal(steps: Sequence[Step], distributions: Distributions, *, lenient: bool, confidence: bool) -> Proposal:
    """Return the tokens committed by an inner step as a proposal with the verifying model's distributions."""
    out = Proposal.of_lists([one.token_ids for one in steps], distributions.greedy_ids.device)
    if confidence and out.width:
        out = dataclasses.replace(out, confidence=distributions.confidence(out.token_ids))
    if lenient or distributions.probs is None or distributions.probs_row is None:
        return out
    index = distributions.probs_row[:, : out.width]
    return dataclasses.replace(out, distributions=distributions.probs, distribution_index=index)
