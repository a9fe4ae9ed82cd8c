"""A draft model's likeliest continuations as a tree (SpecInfer, Miao et al. 2023; EAGLE-2, Li et al. 2024).

Level by level the most probable nodes are given several children each: the likeliest tokens where the row is greedy, tokens
drawn one after the other without replacement where it is sampled. How many children a node gets is decided before they are
drawn, and none is dropped for what it is, so that each sampled token has the law it was drawn from.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from foresay.checks import check_int
from foresay.decoding.distributions import Distributions, build_distributions
from foresay.decoding.draws import inverse_cdf
from foresay.decoding.processors import processes
from foresay.decoding.proposal import Proposal
from foresay.decoding.protocols import DraftStep, LanguageModel, LengthPolicy, ModelInput
from foresay.decoding.randomness import Purpose, Streams
from foresay.decoding.rows import Row, Rows
from foresay.drafters.draft_cache import DraftCache
from foresay.drafters.model import ModelDrafter
from foresay.drafters.proposal_builder import Interruptible
from foresay.errors import UnsupportedModelError


@dataclass(slots=True)
class _Tree:
    """One row's nodes. Places: 0 is the context, 1 + j node j."""

    row: Row
    budget: int
    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    distributions: list[int] = field(default_factory=list)
    """Of each node, which of the drafted laws it was drawn from; -1 for one that was chosen."""
    scores: list[float] = field(default_factory=lambda: [1.0])
    """Of each place, the product of the draft's probabilities on its path."""
    depths: list[int] = field(default_factory=lambda: [0])
    """Of each place, the tokens before it."""
    grown: int = 0
    """Places that had their chance to get children."""

    def first_child(self, place: int) -> int | None:
        """The first node that follows a place; None where the budget left it none."""
        return self.parents.index(place - 1) if place - 1 in self.parents else None

    def add(self, place: int, token: int, prob: float, distribution: int) -> None:
        self.tokens.append(token)
        self.parents.append(place - 1)
        self.distributions.append(distribution)
        self.scores.append(self.scores[place] * prob)
        self.depths.append(self.depths[place] + 1)

    def next_places(self, width: int) -> list[int]:
        """The most probable places of the last level that may go on."""
        last = range(self.grown, len(self.scores))
        self.grown = len(self.scores)
        num_new = self.row.num_new
        going = [p for p in last if p == 0 or not self.row.ends_with(self.tokens[p - 1], num_new + self.depths[p])]
        return sorted(sorted(going, key=lambda place: -self.scores[place])[:width])


class ModelTreeDrafter(ModelDrafter):
    """Drafts a tree with a smaller model that shares the target's token ids; a budget is one of nodes."""

    def __init__(
        self,
        model: LanguageModel,
        target_vocab_size: int,
        *,
        branches: int = 2,
        width: int = 1,
        context: DraftCache | None = None,
    ) -> None:
        """branches: children of a node. width: nodes of a level that get children, one draft pass a level.

        Raises UnsupportedModelError when the draft model does not take trees.
        """
        super().__init__(model, target_vocab_size, context=context)
        self.branches = check_int("branches", branches, 1, 16)
        self.width = check_int("width", width, 1, 16)
        if not model.capabilities.trees:
            raise UnsupportedModelError(f"{type(model).__name__} does not take trees; draft chains with it")

    def propose(self, rows: Rows, budget: Sequence[int], policy: LengthPolicy) -> Proposal:
        """A tree for each row, of `budget` nodes at most."""
        device = self.context.model.device
        seen = self.context.view(rows)
        room = [max(0, n) for n in self.context.room(seen, budget)]
        if not any(room):
            return Proposal.empty(len(rows), device)
        self.context.prepare(seen, [n > 0 for n in room])
        scores = self.context.catch_up(seen, [n > 0 for n in room]).scores()
        trees, drawn = [_Tree(row, n) for row, n in zip(rows, room, strict=True)], _Drawn()
        with drawn.keeping():
            self._draw_trees(trees, scores, rows, drawn, policy)
        return _proposal(trees, drawn, device)

    def _draw_trees(
        self, trees: Sequence[_Tree], scores: torch.Tensor, rows: Rows, drawn: _Drawn, policy: LengthPolicy
    ) -> None:
        """Grow the trees level by level. scores: [B, 1, V], the draft's after each row's last token."""
        starts = list(self.context.cache.lengths)
        streams = rows.streams(self.context.model.device)
        above: tuple[torch.Tensor, torch.Tensor] | None = None
        while True:
            places = [tree.next_places(self.width) if len(tree.tokens) < tree.budget else [] for tree in trees]
            if not any(places):
                break
            distributions = self._distributions(scores, rows, above, places)
            self._grow(trees, places, distributions, streams, drawn, policy)
            if all(len(tree.tokens) >= tree.budget for tree in trees):
                break
            above = _padded(trees, scores.device)
            scores = self._score(trees, starts)

    def _score(self, trees: Sequence[_Tree], starts: Sequence[int]) -> torch.Tensor:
        """The draft's scores after each node, [B, K, V]: the whole trees are fed again, and then rewound."""
        device = self.context.model.device
        ids, parents = _padded(trees, device)
        counts = [len(tree.tokens) for tree in trees]
        out = self.context.forward(ModelInput(ids, counts, parents=parents)).scores()
        self.context.cache.truncate(starts)
        return out

    @staticmethod
    def _distributions(
        scores: torch.Tensor,
        rows: Rows,
        above: tuple[torch.Tensor, torch.Tensor] | None,
        places: Sequence[Sequence[int]],
    ) -> Distributions:
        """Distributions at each row's places, [B, W].

        above: token ids and parents [B, K] of the nodes that `scores` [B, K, V] follow; None for the first level, where scores
        [B, 1, V] follow the contexts.
        """
        width = max(map(len, places))
        columns = torch.zeros(len(rows), width, dtype=torch.int64, device=scores.device)
        for i, some in enumerate(places):
            columns[i, : len(some)] = torch.tensor([max(0, place - 1) for place in some], dtype=torch.int64)
        batch = torch.arange(len(rows), device=scores.device)[:, None]
        if above is None or not any(map(processes, rows)):
            return build_distributions(scores[batch, columns], rows)
        ids, parents = above
        whole = torch.nn.functional.pad(scores, (0, 0, 1, 0))  # place 0 is not looked at again
        distributions = build_distributions(whole, rows, ids, parents=parents)
        at = columns + 1
        index = None if distributions.probs_row is None else distributions.probs_row[batch, at]
        return Distributions(distributions.greedy_ids[batch, at], distributions.probs, index, whole[batch, at])

    def _grow(
        self,
        trees: Sequence[_Tree],
        places: Sequence[Sequence[int]],
        distributions: Distributions,
        streams: Streams,
        drawn: _Drawn,
        policy: LengthPolicy,
    ) -> None:
        """Give each place its children, and let the policy say which rows go on."""
        for i, tree in enumerate(trees):
            for column, place in enumerate(places[i]):
                count = min(self.branches, tree.budget - len(tree.tokens))
                index = (
                    -1
                    if distributions.probs is None or distributions.probs_row is None
                    else int(distributions.probs_row[i, column])
                )
                if index < 0 or distributions.probs is None:
                    assert distributions.scores is not None
                    likeliest = (
                        distributions.scores[i, column]
                        .float()
                        .softmax(-1)
                        .topk(min(count, distributions.scores.shape[-1]))
                    )
                    for token, prob in zip(likeliest.indices.tolist(), likeliest.values.tolist(), strict=True):
                        tree.add(place, token, prob, -1)
                    continue
                probs, depth = distributions.probs[index], tree.depths[place]
                distribution = drawn.keep(probs)
                for token in _without_replacement(probs, count, streams, i, len(tree.tokens), depth):
                    tree.add(place, token, float(probs[token]), distribution)
        step = _best(trees, places, distributions)
        go_on = None if step is None else policy.keep_drafting(step)
        for tree, on in zip(trees, [] if go_on is None else go_on.tolist(), strict=False):
            if not on:
                tree.budget = len(tree.tokens)


def _best(trees: Sequence[_Tree], places: Sequence[Sequence[int]], distributions: Distributions) -> DraftStep | None:
    """The token that each row's most probable place was just given first, for a policy to look at."""
    device = distributions.greedy_ids.device
    batch = torch.arange(len(trees), device=device)
    column = torch.zeros(len(trees), dtype=torch.int64, device=device)
    tokens = torch.zeros_like(column)
    depths = torch.zeros_like(column)
    for i, (tree, some) in enumerate(zip(trees, places, strict=True)):
        grown = [
            (tree.scores[place], -c, first)
            for c, place in enumerate(some)
            if (first := tree.first_child(place)) is not None
        ]
        if grown:
            _, c, first = max(grown)
            column[i], tokens[i], depths[i] = -c, tree.tokens[first], tree.depths[some[-c]]
    index = None if distributions.probs_row is None else distributions.probs_row[batch, column][:, None]
    scores = None if distributions.scores is None else distributions.scores[batch, column][:, None]
    return DraftStep(
        depths,
        tokens,
        Distributions(distributions.greedy_ids[batch, column][:, None], distributions.probs, index, scores),
    )


class _Drawn(Interruptible):
    """The distributions that tokens were drawn from."""

    def __init__(self) -> None:
        self.distributions: list[torch.Tensor] = []

    def keep(self, distribution: torch.Tensor) -> int:
        self.distributions.append(distribution)
        return len(self.distributions) - 1


def _without_replacement(
    distribution: torch.Tensor, count: int, streams: Streams, row: int, first: int, depth: int
) -> list[int]:
    """Tokens drawn one after the other, each from what is left of the law. law: [V]. first: columns before the first one.

    Under shared noise the first `count` of log law + noise at their position, which are drawn the same way (Gumbel top-k).
    """
    tokens = torch.nonzero(distribution)[:, 0]
    if streams.shares_noise:
        place = torch.tensor(row, device=distribution.device), torch.tensor(depth, device=distribution.device)
        noisy = streams.gumbel(*place, tokens) + distribution[tokens].log()
        chosen: list[int] = tokens[noisy.topk(min(count, len(tokens))).indices].tolist()
        return chosen
    numbers = streams.uniform(Purpose.DRAFT, torch.arange(first, first + count, device=distribution.device))[row]
    left, out = distribution[None].clone(), []
    for number in numbers[: len(tokens)]:
        token = int(inverse_cdf(left, number[None])[0])
        out.append(token)
        left[0, token] = 0
    return out


def _padded(trees: Sequence[_Tree], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and parents, [B, K] each."""
    width = max(1, *(len(tree.tokens) for tree in trees))
    ids = [[*tree.tokens, *[0] * (width - len(tree.tokens))] for tree in trees]
    parents = [[*tree.parents, *[-1] * (width - len(tree.parents))] for tree in trees]
    return torch.tensor(ids, device=device), torch.tensor(parents, device=device)


def _proposal(trees: Sequence[_Tree], drawn: _Drawn, device: torch.device) -> Proposal:
    counts = [len(tree.tokens) for tree in trees]
    if not any(counts):
        return dataclasses.replace(Proposal.empty(len(trees), device), failure=drawn.failure)
    ids, above = _padded(trees, device)
    chains = all(tree.parents == list(range(-1, len(tree.parents) - 1)) for tree in trees)
    parents = None if chains else above
    if not drawn.distributions:
        return Proposal(ids, counts, parents=parents, failure=drawn.failure)
    width = ids.shape[1]
    index = torch.tensor(
        [[*tree.distributions, *[-1] * (width - len(tree.distributions))] for tree in trees], device=device
    )
    return Proposal(ids, counts, torch.stack(drawn.distributions), index, parents=parents, failure=drawn.failure)
