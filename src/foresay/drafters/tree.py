"""Trees of draft tokens, grown level by level (SpecInfer, Miao et al. 2023; EAGLE-2, Li et al. 2024; DDTree, arXiv 2604.12989).

The most probable nodes of the last level get several children each. Chosen tokens are the likeliest, point masses under any
temperature: the most probable of all nodes so far are kept, until a level has none of them. Drawn tokens are drawn without
replacement, until the budget is used: the number of children is decided before they are drawn, and no child is dropped because of
its token, so that each keeps the distribution it was drawn from. Knows no model: the caller computes the scores.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from foresay.decoding.devices import to_device
from foresay.decoding.distributions import Distributions, build_distributions
from foresay.decoding.draws import inverse_cdf
from foresay.decoding.processors import processes
from foresay.decoding.proposal import Proposal, padded
from foresay.decoding.protocols import ModelInput, ModelOutput
from foresay.decoding.randomness import Purpose, Streams
from foresay.decoding.rows import Row, Rows
from foresay.decoding.stopping import DraftStep, Reads, Stopping
from foresay.drafters.proposal_builder import Interruptible


@dataclass(slots=True)
class Tree:
    """One row's nodes. Slot 0 is the context, slot 1 + j is node j."""

    row: Row
    budget: int
    """Most nodes."""
    depth: int
    """Most nodes of a path."""
    chosen: bool
    """True if tokens are chosen, not drawn, and so may be dropped."""
    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    distributions: list[int] = field(default_factory=list)
    """For each node, the index of the distribution it was drawn from; -1 for a point mass."""
    scored: list[int] = field(default_factory=list)
    """For each node, its index in the last pass that scored the tree; -1 if it was not in it."""
    scores: list[float] = field(default_factory=lambda: [1.0])
    """For each slot, the product of the draft probabilities along its path."""
    depths: list[int] = field(default_factory=lambda: [0])
    """For each slot, the number of draft tokens up to it."""
    num_expanded: int = 0
    """Number of slots that were considered for children."""
    stopped: bool = False
    """No more children, by the length policy."""

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
        """Add a child of a slot."""
        self.tokens.append(token)
        self.parents.append(slot - 1)
        self.distributions.append(distribution)
        self.scored.append(-1)
        self.scores.append(self.scores[slot] * prob)
        self.depths.append(self.depths[slot] + 1)

    def prune(self) -> None:
        """Keep the most probable nodes within the budget; of equal ones the earlier, and so a parent before its children."""
        if not self.chosen or len(self.tokens) <= self.budget:
            return
        kept = sorted(sorted(range(1, len(self.scores)), key=lambda slot: -self.scores[slot])[: self.budget])
        index = {slot: i for i, slot in enumerate(kept)}
        self.tokens = [self.tokens[slot - 1] for slot in kept]
        self.parents = [index.get(self.parents[slot - 1] + 1, -1) for slot in kept]
        self.distributions = [self.distributions[slot - 1] for slot in kept]
        self.scored = [self.scored[slot - 1] for slot in kept]
        self.scores = [1.0, *(self.scores[slot] for slot in kept)]
        self.depths = [0, *(self.depths[slot] for slot in kept)]
        self.num_expanded = 1 + sum(slot < self.num_expanded for slot in kept)

    def next_slots(self, width: int) -> list[int]:
        """Return the `width` most probable slots of the last level that may have children."""
        last = range(self.num_expanded, len(self.scores))
        self.num_expanded = len(self.scores)
        slots = [slot for slot in last if self.depths[slot] < self.depth and not self._ends(slot)]
        return sorted(sorted(slots, key=lambda slot: -self.scores[slot])[:width])

    def _ends(self, slot: int) -> bool:
        return slot > 0 and self.row.ends_with(self.tokens[slot - 1], self.row.num_new + self.depths[slot])


Score = Callable[[ModelInput, torch.Tensor], ModelOutput]
"""Scores all nodes of trees: (token ids and parents [B, K], `Tree.scored` [B, K]) -> logits [B, K, V]."""


class Grower(Interruptible):
    """The trees of a proposal while they grow. Call `grow` under `keeping`: after an exception the nodes so far are kept."""

    def __init__(self, trees: Sequence[Tree], rows: Rows, device: torch.device, *, branches: int, width: int) -> None:
        """branches: most children of a node. width: most nodes of a level that get children."""
        self._trees, self._rows, self._device = trees, rows, device
        self._branches, self._width = branches, width
        self._streams = rows.streams(device)
        self._drawn: list[torch.Tensor] = []
        """The distributions that tokens were drawn from, [V] each."""

    def grow(self, output: ModelOutput, score: Score, stopping: Stopping) -> None:
        """Grow the trees until none is open. output: scores [B, 1, V] after each row's last token."""
        scores, nodes = output.scores(), None
        while True:
            slots = [tree.next_slots(self._width) if tree.open else [] for tree in self._trees]
            if not any(slots):
                break
            self._expand(slots, self._distributions(scores, nodes, slots), stopping)
            if not any(tree.open for tree in self._trees):
                break
            tokens, parents, scored = (
                padded([getattr(tree, name) for tree in self._trees], self._device, fill=fill)
                for name, fill in (("tokens", 0), ("parents", -1), ("scored", -1))
            )
            nodes, counts = (tokens, parents), [len(tree.tokens) for tree in self._trees]
            scores = score(ModelInput(tokens, counts, parents=parents), scored).scores()
            for tree, count in zip(self._trees, counts, strict=True):
                tree.scored = list(range(count))

    def proposal(self) -> Proposal:
        """Return the trees' nodes with the distributions they were drawn from."""
        return Proposal.of_lists(
            [tree.tokens for tree in self._trees],
            self._device,
            parents=[tree.parents for tree in self._trees],
            distributions=torch.stack(self._drawn) if self._drawn else None,
            index=[tree.distributions for tree in self._trees],
            failure=self.failure,
        )

    def _distributions(
        self, scores: torch.Tensor, nodes: tuple[torch.Tensor, torch.Tensor] | None, slots: Sequence[Sequence[int]]
    ) -> Distributions:
        """Return the distributions of the children of each row's slots, [B, W].

        nodes: token ids and parents [B, K] of the nodes that `scores` [B, K, V] follow; None for the first level, where scores
        [B, 1, V] follow the contexts.
        """
        rows = self._rows
        width = max(map(len, slots))
        lists = [[max(0, slot - 1) for slot in row_slots] for row_slots in slots]
        positions = to_device([one + [0] * (width - len(one)) for one in lists], scores.device)
        batch = torch.arange(len(rows), device=scores.device)[:, None]
        if nodes is None or not any(map(processes, rows)):
            return build_distributions(scores[batch, positions], rows)
        ids, parents = nodes
        whole = torch.nn.functional.pad(scores, (0, 0, 1, 0))  # slot 0 is not read
        distributions = build_distributions(whole, rows, ids, parents=parents)
        at = positions + 1
        index = None if distributions.probs_row is None else distributions.probs_row[batch, at]
        return Distributions(distributions.greedy_ids[batch, at], distributions.probs, index, whole[batch, at])

    def _expand(self, slots: Sequence[Sequence[int]], distributions: Distributions, stopping: Stopping) -> None:
        """Add the children of each slot, and end the trees of rows that the length policy stops."""
        self._add_likeliest(slots, distributions)
        self._add_drawn(slots, distributions)
        reads = not stopping.is_data or stopping.rule.reads is not Reads.NOTHING
        mask = stopping.keep(_best(self._trees, slots, distributions)) if reads else None
        for tree, on in zip(self._trees, [] if mask is None else mask.tolist(), strict=False):
            tree.stopped = tree.stopped or not on
        for tree in self._trees:
            tree.prune()

    def _add_likeliest(self, slots: Sequence[Sequence[int]], distributions: Distributions) -> None:
        """Add the likeliest children of all slots of trees of chosen tokens, in one transfer from the device."""
        trees = zip(self._trees, slots, strict=True)
        at = [(i, w, slot) for i, (tree, own) in enumerate(trees) if tree.chosen for w, slot in enumerate(own)]
        if not at:
            return
        assert distributions.scores is not None
        index = to_device([(i, w) for i, w, _ in at], distributions.scores.device)
        scores = distributions.scores[index[:, 0], index[:, 1]].float()
        likeliest = scores.softmax(-1).topk(min(self._branches, scores.shape[-1]))
        numbers = torch.stack([likeliest.values.double(), likeliest.indices.double()], -1).tolist()
        for (i, _, slot), children in zip(at, numbers, strict=True):
            for prob, token in children[: self._trees[i].num_children]:
                self._trees[i].add(slot, int(token), prob, -1)

    def _add_drawn(self, slots: Sequence[Sequence[int]], distributions: Distributions) -> None:
        """Add the drawn children of all slots of the other trees: the first ones at once, then the second ones, and so on."""
        trees = zip(self._trees, slots, strict=True)
        at = [(i, w, slot) for i, (tree, own) in enumerate(trees) if not tree.chosen for w, slot in enumerate(own)]
        if not at:
            return
        assert distributions.probs is not None and distributions.probs_row is not None
        index = to_device([(i, w) for i, w, _ in at], distributions.probs.device)
        probs = distributions.probs[distributions.probs_row[index[:, 0], index[:, 1]]]
        firsts, counts, ends = list[int](), list[int](), [len(tree.tokens) for tree in self._trees]
        for (i, _, _), possible in zip(at, probs.count_nonzero(-1).tolist(), strict=True):
            firsts.append(ends[i])
            counts.append(min(self._branches, self._trees[i].budget - ends[i], possible))
            ends[i] += counts[-1]
        if self._streams.shares_noise:
            depths = [self._trees[i].depths[slot] for i, _, slot in at]
            chosen = [_noisiest(*one, self._streams) for one in zip(probs, counts, index[:, 0], depths, strict=True)]
        else:
            numbers = self._streams.uniform(Purpose.DRAFT, torch.arange(max(ends), device=probs.device))[index[:, 0]]
            chosen = _without_replacement(probs, counts, numbers, firsts)
        for (i, _, slot), one, tokens in zip(at, probs, chosen, strict=True):
            self._drawn.append(one)
            for token in tokens:
                self._trees[i].add(slot, token, float(one[token]), len(self._drawn) - 1)


def _best(trees: Sequence[Tree], slots: Sequence[Sequence[int]], distributions: Distributions) -> DraftStep:
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


def _noisiest(probs: torch.Tensor, count: int, row: torch.Tensor, depth: int, streams: Streams) -> list[int]:
    """Return the `count` largest of log(probs) + noise at `depth`, drawn without replacement (Gumbel top-k). probs: [V]."""
    tokens = torch.nonzero(probs)[:, 0]
    noisy = streams.gumbel(row, torch.tensor(depth, device=probs.device), tokens) + probs[tokens].log()
    chosen: list[int] = tokens[noisy.topk(count).indices].tolist()
    return chosen


def _without_replacement(
    probs: torch.Tensor, counts: Sequence[int], numbers: torch.Tensor, firsts: Sequence[int]
) -> list[list[int]]:
    """Draw counts[n] tokens from each of probs [N, V] by numbers[n] from firsts[n] on."""
    remaining, out = probs.clone(), [list[int]() for _ in counts]
    for k in range(max(counts)):
        drawn = [n for n, count in enumerate(counts) if count > k]
        index, at = to_device([(n, firsts[n] + k) for n in drawn], probs.device).unbind(1)
        tokens = inverse_cdf(remaining[index], numbers[index, at])
        remaining[index, tokens] = 0
        for n, token in zip(drawn, tokens.tolist(), strict=True):
            out[n].append(token)
    return out
