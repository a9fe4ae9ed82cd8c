"""Trees of a draft model's continuations (SpecInfer, Miao et al. 2023; EAGLE-2, Li et al. 2024).

Level by level, the most probable nodes get several children each. In greedy rows these are the likeliest tokens, and the most
probable of all nodes so far are kept, until a level has none of them. In sampled rows they are drawn without replacement, until
the budget is used: the number of children is decided before they are drawn, and no child is dropped because of its token, so that
each keeps the distribution it was drawn from.
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
    """One row's nodes. Slot 0 is the context, slot 1 + j is node j."""

    row: Row
    budget: int
    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    distributions: list[int] = field(default_factory=list)
    """For each node, the index of the distribution it was drawn from; -1 for a point mass."""
    scores: list[float] = field(default_factory=lambda: [1.0])
    """For each slot, the product of the draft probabilities along its path."""
    depths: list[int] = field(default_factory=lambda: [0])
    """For each slot, the number of draft tokens up to it."""
    num_expanded: int = 0
    """Number of slots that were considered for children."""
    stopped: bool = False
    """No more children, by the length policy."""

    @property
    def chosen(self) -> bool:
        """True if tokens are chosen, not drawn, and so may be dropped."""
        return self.row.params.greedy

    @property
    def open(self) -> bool:
        """True if nodes may get children."""
        return not self.stopped and self.budget > 0 and (self.chosen or len(self.tokens) < self.budget)

    @property
    def num_children(self) -> int:
        """Most children of a further node."""
        return self.budget if self.chosen else self.budget - len(self.tokens)

    def first_child(self, slot: int) -> int | None:
        """Return the first child of a slot; None if it has none."""
        return self.parents.index(slot - 1) if slot - 1 in self.parents else None

    def add(self, slot: int, token: int, prob: float, distribution: int) -> None:
        self.tokens.append(token)
        self.parents.append(slot - 1)
        self.distributions.append(distribution)
        self.scores.append(self.scores[slot] * prob)
        self.depths.append(self.depths[slot] + 1)

    def prune(self) -> None:
        """Keep the most probable nodes within the budget; of equal ones the earlier, and so a parent before its children."""
        if not self.chosen or len(self.tokens) <= self.budget:
            return
        kept = sorted(sorted(range(1, len(self.scores)), key=lambda slot: -self.scores[slot])[: self.budget])
        place = {slot: i for i, slot in enumerate(kept)}
        self.tokens = [self.tokens[slot - 1] for slot in kept]
        self.parents = [place.get(self.parents[slot - 1] + 1, -1) for slot in kept]
        self.distributions = [self.distributions[slot - 1] for slot in kept]
        self.scores = [1.0, *(self.scores[slot] for slot in kept)]
        self.depths = [0, *(self.depths[slot] for slot in kept)]
        self.num_expanded = 1 + sum(slot < self.num_expanded for slot in kept)

    def next_slots(self, width: int) -> list[int]:
        """Return the `width` most probable slots of the last level, without end tokens."""
        last = range(self.num_expanded, len(self.scores))
        self.num_expanded = len(self.scores)
        num_new = self.row.num_new
        open_slots = [s for s in last if s == 0 or not self.row.ends_with(self.tokens[s - 1], num_new + self.depths[s])]
        return sorted(sorted(open_slots, key=lambda slot: -self.scores[slot])[:width])


class ModelTreeDrafter(ModelDrafter):
    """Draft trees with a smaller model that has the target's token ids; budgets count nodes."""

    def __init__(
        self,
        model: LanguageModel,
        target_vocab_size: int,
        *,
        branches: int = 2,
        width: int = 1,
        context: DraftCache | None = None,
    ) -> None:
        """branches: children per node. width: nodes per level that get children; each level takes one draft pass.

        Raises UnsupportedModelError if the draft model does not support tree attention.
        """
        super().__init__(model, target_vocab_size, context=context)
        self.branches = check_int("branches", branches, 1, 16)
        self.width = check_int("width", width, 1, 16)
        if not model.capabilities.trees:
            raise UnsupportedModelError(
                f"{type(model).__name__} does not take trees; draft chains with it (drafter model)"
            )

    def propose(self, rows: Rows, budget: Sequence[int], policy: LengthPolicy) -> Proposal:
        """Draft a tree of at most `budget` nodes for each row."""
        device = self.context.model.device
        viewed = self.context.view(rows)
        room = [max(0, n) for n in self.context.room(viewed, budget)]
        if not any(room):
            return Proposal.empty(len(rows), device)
        self.context.prepare(viewed, [n > 0 for n in room])
        scores = self.context.catch_up(viewed, [n > 0 for n in room]).scores()
        trees, drawn = [_Tree(row, n) for row, n in zip(rows, room, strict=True)], _Drawn()
        with drawn.keeping():
            self._draw_trees(trees, scores, rows, drawn, policy)
        return _proposal(trees, drawn, device)

    def _draw_trees(
        self, trees: Sequence[_Tree], scores: torch.Tensor, rows: Rows, drawn: _Drawn, policy: LengthPolicy
    ) -> None:
        """Grow the trees level by level. scores: [B, 1, V], the draft model's after each row's last token."""
        starts = list(self.context.cache.lengths)
        streams = rows.streams(self.context.model.device)
        nodes: tuple[torch.Tensor, torch.Tensor] | None = None
        while True:
            slots = [tree.next_slots(self.width) if tree.open else [] for tree in trees]
            if not any(slots):
                break
            distributions = self._distributions(scores, rows, nodes, slots)
            self._expand(trees, slots, distributions, streams, drawn, policy)
            if not any(tree.open for tree in trees):
                break
            nodes = _padded(trees, scores.device)
            scores = self._score(trees, starts)

    def _score(self, trees: Sequence[_Tree], starts: Sequence[int]) -> torch.Tensor:
        """Return the draft model's scores after each node, [B, K, V]. Feeds the whole trees, then rewinds the cache."""
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
        nodes: tuple[torch.Tensor, torch.Tensor] | None,
        slots: Sequence[Sequence[int]],
    ) -> Distributions:
        """Return the distributions of the children of each row's slots, [B, W].

        nodes: token ids and parents [B, K] of the nodes that `scores` [B, K, V] follow; None for the first level, where scores
        [B, 1, V] follow the contexts.
        """
        width = max(map(len, slots))
        positions = torch.zeros(len(rows), width, dtype=torch.int64, device=scores.device)
        for i, row_slots in enumerate(slots):
            positions[i, : len(row_slots)] = torch.tensor([max(0, slot - 1) for slot in row_slots], dtype=torch.int64)
        batch = torch.arange(len(rows), device=scores.device)[:, None]
        if nodes is None or not any(map(processes, rows)):
            return build_distributions(scores[batch, positions], rows)
        ids, parents = nodes
        whole = torch.nn.functional.pad(scores, (0, 0, 1, 0))  # slot 0 is not read
        distributions = build_distributions(whole, rows, ids, parents=parents)
        at = positions + 1
        index = None if distributions.probs_row is None else distributions.probs_row[batch, at]
        return Distributions(distributions.greedy_ids[batch, at], distributions.probs, index, whole[batch, at])

    def _expand(
        self,
        trees: Sequence[_Tree],
        slots: Sequence[Sequence[int]],
        distributions: Distributions,
        streams: Streams,
        drawn: _Drawn,
        policy: LengthPolicy,
    ) -> None:
        """Add the children of each slot, and end the trees of rows that the length policy stops."""
        for i, tree in enumerate(trees):
            for w, slot in enumerate(slots[i]):
                count = min(self.branches, tree.num_children)
                index = (
                    -1
                    if distributions.probs is None or distributions.probs_row is None
                    else int(distributions.probs_row[i, w])
                )
                if index < 0 or distributions.probs is None:
                    assert distributions.scores is not None
                    likeliest = (
                        distributions.scores[i, w].float().softmax(-1).topk(min(count, distributions.scores.shape[-1]))
                    )
                    for token, prob in zip(likeliest.indices.tolist(), likeliest.values.tolist(), strict=True):
                        tree.add(slot, token, prob, -1)
                    continue
                probs, depth = distributions.probs[index], tree.depths[slot]
                distribution = drawn.keep(probs)
                for token in _without_replacement(probs, count, streams, i, len(tree.tokens), depth):
                    tree.add(slot, token, float(probs[token]), distribution)
        step = _best(trees, slots, distributions)
        mask = None if step is None else policy.keep_drafting(step)
        for tree, on in zip(trees, [] if mask is None else mask.tolist(), strict=False):
            tree.stopped = tree.stopped or not on
        for tree in trees:
            tree.prune()


def _best(trees: Sequence[_Tree], slots: Sequence[Sequence[int]], distributions: Distributions) -> DraftStep | None:
    """Return the first new child of each row's most probable slot, for the length policy."""
    device = distributions.greedy_ids.device
    batch = torch.arange(len(trees), device=device)
    best = torch.zeros(len(trees), dtype=torch.int64, device=device)
    tokens = torch.zeros_like(best)
    depths = torch.zeros_like(best)
    for i, (tree, row_slots) in enumerate(zip(trees, slots, strict=True)):
        expanded = [
            (tree.scores[slot], -w, first)
            for w, slot in enumerate(row_slots)
            if (first := tree.first_child(slot)) is not None
        ]
        if expanded:
            _, w, first = max(expanded)
            best[i], tokens[i], depths[i] = -w, tree.tokens[first], tree.depths[row_slots[-w]]
    index = None if distributions.probs_row is None else distributions.probs_row[batch, best][:, None]
    scores = None if distributions.scores is None else distributions.scores[batch, best][:, None]
    return DraftStep(
        depths,
        tokens,
        Distributions(distributions.greedy_ids[batch, best][:, None], distributions.probs, index, scores),
    )


class _Drawn(Interruptible):
    """The distributions that the trees' tokens were drawn from."""

    def __init__(self) -> None:
        self.distributions: list[torch.Tensor] = []

    def keep(self, distribution: torch.Tensor) -> int:
        self.distributions.append(distribution)
        return len(self.distributions) - 1


def _without_replacement(
    distribution: torch.Tensor, count: int, streams: Streams, row: int, first: int, depth: int
) -> list[int]:
    """Draw up to `count` tokens without replacement. distribution: [V]. first: number of nodes before the first new one.

    With shared noise, return the `count` largest of log(distribution) + noise at `depth`: the same distribution (Gumbel top-k).
    """
    tokens = torch.nonzero(distribution)[:, 0]
    if streams.shares_noise:
        at = torch.tensor(row, device=distribution.device), torch.tensor(depth, device=distribution.device)
        noisy = streams.gumbel(*at, tokens) + distribution[tokens].log()
        chosen: list[int] = tokens[noisy.topk(min(count, len(tokens))).indices].tolist()
        return chosen
    numbers = streams.uniform(Purpose.DRAFT, torch.arange(first, first + count, device=distribution.device))[row]
    remaining, out = distribution[None].clone(), []
    for number in numbers[: len(tokens)]:
        token = int(inverse_cdf(remaining, number[None])[0])
        out.append(token)
        remaining[0, token] = 0
    return out


def _padded(trees: Sequence[_Tree], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return token ids and parents, [B, K] int64 each."""
    width = max(1, *(len(tree.tokens) for tree in trees))
    ids = [[*tree.tokens, *[0] * (width - len(tree.tokens))] for tree in trees]
    parents = [[*tree.parents, *[-1] * (width - len(tree.parents))] for tree in trees]
    return torch.tensor(ids, device=device), torch.tensor(parents, device=device)


def _proposal(trees: Sequence[_Tree], drawn: _Drawn, device: torch.device) -> Proposal:
    counts = [len(tree.tokens) for tree in trees]
    if not any(counts):
        return dataclasses.replace(Proposal.empty(len(trees), device), failure=drawn.failure)
    ids, padded_parents = _padded(trees, device)
    chains = all(tree.parents == list(range(-1, len(tree.parents) - 1)) for tree in trees)
    parents = None if chains else padded_parents
    if not drawn.distributions:
        return Proposal(ids, counts, parents=parents, failure=drawn.failure)
    width = ids.shape[1]
    index = torch.tensor(
        [[*tree.distributions, *[-1] * (width - len(tree.distributions))] for tree in trees], device=device
    )
    return Proposal(ids, counts, torch.stack(drawn.distributions), index, parents=parents, failure=drawn.failure)
