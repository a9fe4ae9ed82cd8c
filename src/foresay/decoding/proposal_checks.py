"""Checks of a proposal before it is verified: types, ranges, and that each drafted token is in the support of its distribution.

The only module that checks proposals; what it returns has neutral values where no token was drafted. A defect at one token ends
that row's draft there: the tokens before it were drawn, and dropping them because of later ones would change the output
distribution. A defect of the proposal's form (shapes, types) discards all of it. Proposals on a device are checked there, without
waiting for it. Knows no drafter and no rule.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F

from foresay.decoding import devices
from foresay.decoding.proposal import Defects, Proposal

_SUM = 1e-3
"""Largest distance from 1 of a distribution's sum: float32 over any vocabulary stays well within."""


def checked(
    proposal: Proposal, budget: Sequence[int], vocab_size: int, device: torch.device, *, trees: bool
) -> Proposal:
    """Return the well-formed part of the proposal, trimmed to its longest draft and on `device`.

    budget: B ints, maximum tokens of each row. trees: True if rule and target accept proposals with parents; otherwise a draft
    ends at its first branch. The result's `failure` is the drafter's own, or the error that names the first defect.
    """
    try:
        return _normalized(_checked(proposal, budget, vocab_size, device, trees=trees))
    except (Exception, SystemExit) as error:  # a wrong form; objects that pose as tensors may raise anything
        return dataclasses.replace(Proposal.empty(len(budget), device), failure=error)


def _checked(
    proposal: Proposal, budget: Sequence[int], vocab_size: int, device: torch.device, *, trees: bool
) -> Proposal:
    counts = _checked_form(proposal, len(budget), vocab_size, device)
    kept = [max(0, min(n, most, proposal.width)) for n, most in zip(counts, budget, strict=True)]
    problem = None
    if kept != counts:
        problem = f"proposed {counts} tokens with a budget of {list(budget)} and a width of {proposal.width}"
    out = _trimmed(proposal, kept, device)
    if devices.is_remote(device) and (trees or out.parents is None):
        failure = proposal.failure or (None if problem is None else ValueError(problem))
        return dataclasses.replace(_without_defects(out, vocab_size), failure=failure)
    for find in (_bad_tokens, _bad_parents if trees else _branches):
        cut, found = find(out, vocab_size) if out.width else _NONE
        problem = problem or found
        if found is not None:
            out = _trimmed(out, [min(n, end) for n, end in zip(out.num_tokens, cut, strict=True)], device)
    failure = proposal.failure or (None if problem is None else ValueError(problem))
    return dataclasses.replace(out, failure=failure, parents=out.parents if trees else None)


def _checked_form(proposal: Proposal, batch: int, vocab_size: int, device: torch.device) -> list[int]:
    """Return the counts as ints. Raises ValueError, TypeError or AttributeError for wrong types and shapes."""
    if not isinstance(proposal, Proposal):
        raise TypeError(f"a {type(proposal).__name__} was proposed, not a Proposal")
    ids, counts = proposal.token_ids, list(proposal.num_tokens)
    for name in ("token_ids", "distributions", "distribution_index", "confidence", "parents"):
        tensor: torch.Tensor | None = getattr(proposal, name)
        if tensor is not None and (tensor.layout != torch.strided or (tensor.is_meta and tensor.device != device)):
            raise ValueError(f"{name} is {tensor.layout} on {tensor.device}, not a dense tensor")
    if ids.ndim != 2 or ids.dtype != torch.int64 or ids.shape[0] != batch or len(counts) != batch:
        raise ValueError(f"ids of shape {tuple(ids.shape)} and dtype {ids.dtype} for {batch} rows, not [B, K] int64")
    if not all(isinstance(n, int | np.integer) and not isinstance(n, bool) for n in counts):
        raise ValueError(f"num_tokens {counts} are not all integers")
    for name, floating in (("distribution_index", False), ("parents", False), ("confidence", True)):
        column: torch.Tensor | None = getattr(proposal, name)
        if column is None:
            continue
        if column.shape != ids.shape:
            raise ValueError(f"{name} of shape {tuple(column.shape)} for ids of shape {tuple(ids.shape)}")
        if not (column.dtype.is_floating_point if floating else column.dtype == torch.int64):
            raise ValueError(f"{name} of dtype {column.dtype}, not {'float' if floating else 'int64'}")
    distributions, index = proposal.distributions, proposal.distribution_index
    if (distributions is None) != (index is None):
        raise ValueError("distributions without distribution_index, or distribution_index without distributions")
    if distributions is not None and (
        distributions.ndim != 2 or distributions.shape[1] != vocab_size or not distributions.dtype.is_floating_point
    ):
        raise ValueError(
            f"distributions of shape {tuple(distributions.shape)} and dtype {distributions.dtype}, not [N, {vocab_size}] float"
        )
    return [int(n) for n in counts]


def _trimmed(proposal: Proposal, counts: list[int], device: torch.device) -> Proposal:
    """The first counts[i] tokens of each row, without draft positions that no row uses."""
    width = max(counts)
    if width == 0:
        return Proposal.empty(len(counts), device)

    def part(column: torch.Tensor | None) -> torch.Tensor | None:
        return None if column is None else devices.moved(column[:, :width], device)

    distributions = proposal.distributions
    distributions = None if distributions is None else devices.moved(distributions, device).to(torch.float32)
    return dataclasses.replace(
        proposal,
        token_ids=devices.moved(proposal.token_ids[:, :width], device),
        num_tokens=counts,
        distributions=distributions,
        distribution_index=part(proposal.distribution_index),
        confidence=part(proposal.confidence),
        parents=part(proposal.parents),
    )


def _normalized(proposal: Proposal) -> Proposal:
    """Return a checked proposal with neutral values in its padding, and without distributions that no token was drawn from."""
    if not proposal.width:
        return proposal
    distributions = proposal.distributions
    if distributions is not None and not len(distributions):
        proposal = dataclasses.replace(proposal, distributions=None, distribution_index=None)
    if min(proposal.num_tokens) == proposal.width:
        return proposal
    padding = ~_drafted(proposal)
    neutral = {"token_ids": 0, "parents": -1, "distribution_index": -1, "confidence": 0}
    columns = {name: getattr(proposal, name) for name in neutral}
    return dataclasses.replace(
        proposal, **{name: one.masked_fill(padding, neutral[name]) for name, one in columns.items() if one is not None}
    )


Found = tuple[list[int], str | None]
"""Number of tokens of each row before its first defect, and a description of one defect; None if there is none."""
_NONE: Found = ([], None)


def _without_defects(proposal: Proposal, vocab_size: int) -> Proposal:
    """Replace the tokens of each row from its first defect on by a token that was not sampled, which is exact whatever it is.

    In a tree these are nodes below themselves, which verification does not reach.
    """
    if not proposal.width:
        return proposal
    defects = _token_defects(proposal, vocab_size)
    if proposal.parents is not None:
        defects += _parent_defects(proposal)
    bad = torch.stack([mask for mask, _ in defects]).any(0) & _drafted(proposal)
    after, index, parents = bad.long().cumsum(1) > 0, proposal.distribution_index, proposal.parents
    itself = torch.arange(proposal.width, device=after.device)
    return dataclasses.replace(
        proposal,
        token_ids=proposal.token_ids.masked_fill(after, 0),
        distribution_index=None if index is None else index.masked_fill(after, -1),
        parents=None if parents is None else torch.where(after, itself, parents),
        defects=Defects(bad.any(1)),
    )


def _drafted(proposal: Proposal) -> torch.Tensor:
    """[B, K] bool: True for draft tokens, False for padding."""
    counts = devices.to_device(proposal.num_tokens, proposal.token_ids.device)
    return torch.arange(proposal.width, device=counts.device) < counts[:, None]


def _first(proposal: Proposal, defects: Sequence[tuple[torch.Tensor, str]]) -> Found:
    """First of several kinds of defects, [B, K] bool each, in every row. Waits for the device once if there is none."""
    bad = torch.stack([mask for mask, _ in defects]) & _drafted(proposal)
    if not bool(bad.any()):
        return _NONE
    ends: list[int] = F.pad(bad.any(0), (0, 1), value=True).to(torch.int8).argmax(-1).tolist()
    return ends, next(why for (_, why), found in zip(defects, bad.flatten(1).any(-1).tolist(), strict=True) if found)


def _bad_tokens(proposal: Proposal, vocab_size: int) -> Found:
    return _first(proposal, _token_defects(proposal, vocab_size))


def _token_defects(proposal: Proposal, vocab_size: int) -> list[tuple[torch.Tensor, str]]:
    """Ids outside the vocabulary, and sampled tokens whose distribution is invalid or gives them no probability.

    A NaN would pass every acceptance test.
    """
    ids, distributions, index = proposal.token_ids, proposal.distributions, proposal.distribution_index
    outside = (ids < 0) | (ids >= vocab_size)
    defects = [(outside, f"a proposed token id is not in [0, {vocab_size})")]
    if distributions is not None and index is not None:
        missing = (index < -1) | (index >= len(distributions))
        defects.append((missing, f"distribution_index is not in [-1, {len(distributions)})"))
        if len(distributions):
            # the minimum and the sum of a row that contains a NaN or an infinity are not finite either
            good = (distributions.amin(-1) >= 0) & ((distributions.sum(-1) - 1).abs() <= _SUM)
            row, drawn = index.clamp(min=0, max=len(distributions) - 1), index >= 0
            defects.append(
                (drawn & ~good[row], "a drafted token's distribution is not finite, negative, or does not sum to 1")
            )
            nothing = ~(distributions[row, ids.clamp(min=0, max=vocab_size - 1)] > 0)
            defects.append((drawn & nothing, "a drafted token has probability 0 in the distribution it was drawn from"))
    return defects


def _branches(proposal: Proposal, vocab_size: int) -> Found:
    """Tokens that do not follow the token before them, for rules and models that accept chains only."""
    if proposal.parents is None:
        return _NONE
    other = proposal.parents != torch.arange(-1, proposal.width - 1, device=proposal.parents.device)
    return _first(proposal, [(other, "a tree of draft tokens, which the rule or the target does not take")])


def _bad_parents(proposal: Proposal, vocab_size: int) -> Found:
    return _NONE if proposal.parents is None else _first(proposal, _parent_defects(proposal))


def _parent_defects(proposal: Proposal) -> list[tuple[torch.Tensor, str]]:
    """Nodes whose parent is not an earlier node, repeated siblings, and sampled siblings after others."""
    parents, ids, index = proposal.parents, proposal.token_ids, proposal.distribution_index
    assert parents is not None
    nodes = torch.arange(proposal.width, device=ids.device)
    siblings = (parents[:, :, None] == parents[:, None, :]) & (nodes < nodes[:, None])  # the earlier ones of each node
    defects = [
        ((parents < -1) | (parents >= nodes), "a node of a tree does not follow an earlier one"),
        ((siblings & (ids[:, :, None] == ids[:, None, :])).any(-1), "a token follows a node of a tree twice"),
    ]
    if index is not None:
        late = (siblings & (index < 0)[:, None]).any(-1) & (index >= 0)
        defects.append((late, "a node of a tree was sampled, and a sibling before it was not"))
    return defects
