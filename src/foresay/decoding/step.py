"""The decoding step: propose, score, verify, commit, rewind.

All decoding calls this function: plain decoding is a budget of 0, a single prompt is a batch of one, and a cascade is a drafter
that calls it with its own target. Knows neither requests nor text. On entry the rows' caches lack the last token, and possibly
some before it; on return they lack exactly the last one.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple, cast

import torch
import torch.nn.functional as F

from foresay import threads
from foresay.decoding import ahead
from foresay.decoding.clock import Clock
from foresay.decoding.devices import is_remote, later, moved, to_device
from foresay.decoding.distributions import Distributions
from foresay.decoding.outcome import FinishReason, Origin, Step, TokenLogprob
from foresay.decoding.proposal import Proposal, Verification
from foresay.decoding.protocols import (
    BeginsEarly,
    Drafter,
    FeedsAgain,
    KVCache,
    LanguageModel,
    LengthPolicy,
    ModelInput,
    ModelOutput,
    Observer,
    Rule,
)
from foresay.decoding.rows import Row, Rows


@torch.inference_mode()
def step(
    rows: Rows,
    target: LanguageModel,
    cache: KVCache,
    drafter: Drafter | None,
    rule: Rule,
    policy: LengthPolicy,
    observers: Sequence[Observer] = (),
) -> list[Step]:
    """Run one target pass over all rows and commit its result; return one Step per row, in order.

    A row with no token remaining is not fed, and its Step is empty. A row whose processors fail at a position that verification
    reaches keeps the tokens before it and ends with FinishReason.ERROR; other rows are not affected.
    """
    clock = Clock(target.device)
    proposal = propose(rows, target, cache, drafter, policy, exact=rule.exact)
    clock.mark()
    begin_processors(rows, proposal)
    layers = drafter.hidden_layers if drafter is not None else ()
    found = ahead.ready(rows, cache, layers)
    starts = [min(length, row.size - 1) for row, length in zip(rows, cache.lengths, strict=False)]
    output = score(rows, proposal, target, cache, layers, found)
    output = dataclasses.replace(output, starts=tuple(starts))
    clock.mark()
    with threads.all_threads(0 if output.logits is None else output.logits.numel()):
        distributions = output.distributions(rows, proposal)
        streams = rows.streams(target.device, proposal.width)
        verification = rule.verify(distributions, before_failures(proposal, distributions), streams)
    read = _read(proposal, verification)
    if drafter is None:
        ahead.begin(rows, verification.token_ids, target, cache)
    for observer in observers:
        observer(rows, proposal, distributions, verification, output)
    committed, paths = commit(rows, read(), proposal, output, distributions)
    rewind(rows, proposal, committed, paths, starts, cache)
    if drafter is not None:
        drafter.observe(rows, verification, output)
    (draft_s, target_s), total_s = clock.parts(), clock.total()
    if found and not any(proposal.num_tokens):  # the pass began before this step
        target_s = max(target_s, total_s - draft_s)
    for one in committed:
        one.batch_size, one.draft_s, one.target_s, one.total_s = len(rows), draft_s, target_s, total_s
    policy.observe(rows, committed)
    return committed


def propose(
    rows: Rows, target: LanguageModel, cache: KVCache, drafter: Drafter | None, policy: LengthPolicy, *, exact: bool
) -> Proposal:
    """Return the drafter's proposal; a draft is shorter than the row's remaining tokens, one of which is the target's own.

    A cache that feeds tokens again after a rewind may shorten drafts, in a batch also those of rows whose text does not depend on
    the draft length. exact: False for a lossy rule, whose greedy rows depend on it.
    """
    if drafter is None:
        return Proposal.empty(len(rows), target.device)
    budget = [max(0, min(n, row.remaining - 1)) for n, row in zip(policy.budget(rows), rows, strict=True)]
    if hasattr(cache, "shortened"):  # a FeedsAgain; isinstance would take 15 us
        free = [len(rows) > 1 and (rows.needs.ignores_drafts or (exact and row.params.greedy)) for row in rows]
        budget = cast(FeedsAgain, cache).shortened(budget, [row.size for row in rows], free)
    return drafter.propose(rows, budget, policy) if any(budget) else Proposal.empty(len(rows), target.device)


def begin_processors(rows: Rows, proposal: Proposal) -> None:
    """Let processors begin their work next to the target's pass; for a draft too, if it is a chain that is known by now."""
    known: list[list[int]] | None = None
    for i, row in enumerate(rows):
        for one in row.params.processors:
            if not isinstance(one, BeginsEarly) or not row.remaining:
                continue
            if known is None:
                is_known = proposal.parents is None and not is_remote(proposal.token_ids.device)
                known = proposal.token_ids.tolist() if is_known else [[]] * len(rows)
            draft = known[i][: proposal.num_tokens[i]]
            ends = (k for k, token in enumerate(draft) if row.ends_with(token, row.num_new + k + 1))
            one.begin(row.tokens.tolist(), draft[: next(ends, len(draft))])


def score(
    rows: Rows,
    proposal: Proposal,
    target: LanguageModel,
    cache: KVCache,
    hidden_layers: tuple[int, ...],
    found: Sequence[ahead.Ready | None] = (),
) -> ModelOutput:
    """Return the target's scores after each row's last token and after each draft token, [B, 1 + K, V], in one pass.

    Tokens that the cache lacks are fed in the same pass, so that a model that was inactive for a step needs no extra pass. found:
    [B], scores that are ready after rows' last tokens, which are not fed then; () for none.
    """
    unseen = [row.size - cache.lengths[i] if row.remaining > 0 else 0 for i, row in enumerate(rows)]
    counts = [u + n if row.remaining > 0 else 0 for u, n, row in zip(unseen, proposal.num_tokens, rows, strict=True)]
    if found and not any(counts):
        return ahead.merged(found, None)
    missed, device = max(unseen), target.device
    if missed <= 1 and not found:
        last = to_device([[int(row.tokens[-1])] for row in rows], device)
        token_ids = torch.cat([last, proposal.token_ids], 1) if proposal.width else last
        parents = None if proposal.parents is None else F.pad(proposal.parents + 1, (1, 0), value=-1)
        return target.forward(ModelInput(token_ids, counts, parents=parents, hidden_layers=hidden_layers), cache)
    late = torch.zeros(len(rows), missed, dtype=torch.int64)
    for i, (row, u) in enumerate(zip(rows, unseen, strict=True)):
        late[i, :u] = torch.from_numpy(row.tokens[row.size - u :])
    token_ids = F.pad(moved(late, device), (0, proposal.width))
    seen = to_device(unseen, device)[:, None]
    columns = seen + torch.arange(proposal.width + 1, device=device)
    token_ids.scatter_(1, columns[:, :-1], proposal.token_ids)
    parents = None
    if proposal.parents is not None:
        parents = (torch.arange(token_ids.shape[1], device=device) - 1).repeat(len(rows), 1)
        parents.scatter_(1, columns[:, :-1], proposal.parents + seen)
    output = target.forward(ModelInput(token_ids, counts, parents=parents, hidden_layers=hidden_layers), cache)
    output = output.at((columns - 1).clamp(min=0), [max(0, u - 1) for u in unseen])
    return ahead.merged(found, output) if found else output


def before_failures(proposal: Proposal, distributions: Distributions) -> Proposal:
    """Return the proposal without the draft tokens after a position where no token can be generated.

    The tokens up to that position are kept, so that no token is dropped for its own value. If the rule reaches the position,
    `commit` ends the row there.
    """
    if not distributions.failures:
        return proposal
    counts, parents = list(proposal.num_tokens), proposal.parents
    if parents is None:
        for i, position in distributions.failures:
            counts[i] = min(counts[i], position)
        return dataclasses.replace(proposal, num_tokens=counts)
    parents, itself = parents.clone(), torch.arange(proposal.width, device=parents.device)
    for i, position in distributions.failures:
        parents[i] = torch.where(parents[i] == position - 1, itself, parents[i])  # a node below itself is never visited
    return dataclasses.replace(proposal, parents=parents)


def commit(
    rows: Rows,
    verified: Sequence[RowVerification],
    proposal: Proposal,
    output: ModelOutput,
    distributions: Distributions,
) -> tuple[list[Step], list[list[int]]]:
    """Append the accepted tokens and the extra one, cut at the first stop.

    Returns the rows' Steps, without times, and the indices of the committed draft tokens in the proposal.
    """
    steps: list[Step] = []
    paths: list[list[int]] = []
    for i, (row, one) in enumerate(zip(rows, verified, strict=True)):
        error = distributions.failures.get((i, one.path[-1] + 1 if one.path else 0))
        kept, reason = cut(row, [*one.accepted, *([one.extra] if error is None else [])])
        if error is not None and reason is not None:
            error = None  # the row stopped before the failed position
        row.extend(kept)
        path, num_drafted, tested = one.path, one.num_drafted, one.tested
        if len(kept) <= len(path):  # draft tokens after a stop are not counted
            path, num_drafted, tested = path[: len(kept)], len(kept), tested[: len(kept)]
        last = Origin.RESIDUAL if len(path) < num_drafted else Origin.BONUS
        num_top = row.params.logprobs if rows.level == 0 else None
        positions = [0, *(index + 1 for index in path)][: len(kept)]
        step = Step(
            request_id=row.request_id,
            token_ids=tuple(kept),
            origins=((Origin.DRAFT,) * len(path) + (last,))[: len(kept)],
            num_drafted=num_drafted,
            num_accepted=len(path),
            tested=tested,
            finish_reason=FinishReason.ERROR if error is not None else reason,
            error=error,
            logprobs=None if num_top is None else token_logprobs(output.scores()[i][positions], kept, num_top),
        )
        steps.append(step)
        paths.append(path)
    return steps, paths


class RowVerification(NamedTuple):
    """Verification result of one row, on the host."""

    accepted: list[int]
    extra: int
    path: list[int]
    tested: tuple[int, ...]
    num_drafted: int


def _read(proposal: Proposal, verification: Verification) -> Callable[[], list[RowVerification]]:
    """Begin to copy the verification results to the host, in one transfer; return a function that waits for them."""
    columns = [
        verification.num_accepted[:, None],
        verification.token_ids[:, None],
        verification.num_tested[:, None],
        proposal.token_ids,
    ]
    tree = verification.path is not None and verification.tried is not None
    if verification.path is not None and verification.tried is not None:
        columns += [verification.path, torch.where(verification.tried, proposal.depths(), -1)]
    if proposal.ends is not None:
        columns.append(proposal.counts[:, None])
    if proposal.defects is not None:
        columns.append(proposal.defects.rows[:, None])
    lines = later(torch.cat(columns, 1))
    return lambda: _rows_of(lines(), proposal, is_tree=tree)


def _rows_of(lines: list[list[int]], proposal: Proposal, *, is_tree: bool) -> list[RowVerification]:
    """Return the verification of each row. lines: [B], the numbers that `_read` copied."""
    width, out = proposal.width, list[RowVerification]()
    if proposal.defects is not None:
        proposal.defects.found = any(line.pop() for line in lines)
    drafted = list(proposal.num_tokens) if proposal.ends is None else [line.pop() for line in lines]
    for line, num_drafted in zip(lines, drafted, strict=True):
        count, extra, num_tested, ids, rest = line[0], line[1], line[2], line[3 : 3 + width], line[3 + width :]
        if is_tree:
            path = rest[:count]
            by_depth = Counter(depth for depth in rest[width:] if depth >= 0)
            tested = tuple(by_depth[depth] for depth in range(len(by_depth)))
            out.append(RowVerification([ids[column] for column in path], extra, path, tested, num_drafted))
        else:
            out.append(RowVerification(ids[:count], extra, list(range(count)), (1,) * num_tested, num_drafted))
    return out


def rewind(
    rows: Rows,
    proposal: Proposal,
    steps: Sequence[Step],
    paths: Sequence[Sequence[int]],
    starts: Sequence[int],
    cache: KVCache,
) -> None:
    """Truncate each cache row to the committed tokens but the last, unless the scores after it are ready.

    steps, paths: result of `commit`. starts: the cache's lengths before the pass.
    """
    if proposal.parents is not None:
        kept: list[list[int]] = []
        for row, step, path, start in zip(rows, steps, paths, starts, strict=True):
            fed = row.remaining > 0 or bool(step.token_ids)
            unseen = row.size - len(step.token_ids) - start
            kept.append([*range(unseen), *(unseen + node for node in path)] if fed else [])
        cache.keep(starts, kept)
    cache.truncate([ahead.cached(row) for row in rows])


def cut(row: Row, tokens: Sequence[int]) -> tuple[list[int], FinishReason | None]:
    """Return the tokens up to and including the first stop (token, string, length or context), and the finish reason."""
    kept = list(tokens[: row.remaining])
    reason = FinishReason.LENGTH if len(kept) == row.remaining else None
    for i, token in enumerate(kept):
        if row.ends_with(token, row.num_new + i + 1):
            kept, reason = kept[: i + 1], FinishReason.STOP
            break
    if row.stop is not None:
        count = row.stop(kept)
        if count is not None:
            return kept[:count], FinishReason.STOP
    return kept, reason


def token_logprobs(scores: torch.Tensor, kept: Sequence[int], top: int) -> tuple[TokenLogprob, ...]:
    """Log-probabilities of tokens under the raw logits, and the `top` likeliest. scores: [n, V], row t of token kept[t]."""
    logprobs = scores.float().log_softmax(-1)
    chosen = logprobs.gather(1, torch.tensor(kept, dtype=torch.int64, device=scores.device)[:, None])[:, 0].tolist()
    values, ids = logprobs.topk(min(top, logprobs.shape[-1])) if top else (logprobs[:, :0], logprobs[:, :0].long())
    pairs = [tuple(zip(i, v, strict=True)) for i, v in zip(ids.tolist(), values.tolist(), strict=True)]
    return tuple(TokenLogprob(c, p) for c, p in zip(chosen, pairs, strict=True))
