"""The one step: propose, score, judge, commit, rewind.

Everything that decodes calls this function: plain decoding is a budget of 0, a batch of one is a batch, and a cascade is
a drafter that calls it with a target of its own. It knows neither requests nor texts; it is given rows whose caches lack
their last token, and perhaps a few before it, and leaves caches that lack exactly the last one.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter

import torch
import torch.nn.functional as F

from foresay import threads
from foresay.decoding.distributions import Distributions
from foresay.decoding.outcome import FinishReason, Origin, Step, TokenLogprob
from foresay.decoding.proposal import Proposal, Verification
from foresay.decoding.protocols import (
    Drafter,
    KVCache,
    LanguageModel,
    LengthPolicy,
    ModelInput,
    ModelOutput,
    Observer,
    Rule,
)
from foresay.decoding.rows import Row, Rows
from foresay.errors import RequestError


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
    """One target pass over all rows, and what it commits to each. One Step per row, in order.

    A row with no token remaining takes no part: nothing of it is fed, and its Step is empty. A row whose processors fail at a
    place that the verification reaches keeps the tokens before it and ends with FinishReason.ERROR; nobody else notices.
    """
    began = perf_counter()
    proposal = propose(rows, target, drafter, policy)
    proposed = perf_counter()
    starts = list(cache.lengths[: len(rows)])
    output = score(rows, proposal, target, cache, drafter.hidden_layers if drafter is not None else ())
    scored = perf_counter()
    with threads.all_threads(0 if output.logits is None else output.logits.numel()):
        distributions = output.distributions(rows, proposal)
        verification = rule.verify(distributions, verifiable(proposal, distributions), rows.streams(target.device))
    for observer in observers:
        observer(rows, proposal, distributions, verification, output)
    committed = commit(rows, proposal, verification, output, distributions)
    rewind(rows, proposal, committed, starts, cache)
    if drafter is not None:
        drafter.observe(rows, verification, output)
    total = perf_counter() - began
    steps = [
        Step(
            request_id=row.request_id,
            token_ids=tuple(one.token_ids),
            origins=one.origins,
            num_drafted=one.num_drafted,
            num_accepted=one.num_accepted,
            tested=one.tested,
            finish_reason=one.reason,
            error=one.error,
            logprobs=one.logprobs,
            batch_size=len(rows),
            draft_s=proposed - began,
            target_s=scored - proposed,
            total_s=total,
        )
        for row, one in zip(rows, committed, strict=True)
    ]
    policy.observe(rows, steps)
    return steps


def propose(rows: Rows, target: LanguageModel, drafter: Drafter | None, policy: LengthPolicy) -> Proposal:
    """The drafter's guess, never longer than what the row may still commit besides the target's own token."""
    if drafter is None:
        return Proposal.empty(len(rows), target.device)
    budget = [max(0, min(n, row.remaining - 1)) for n, row in zip(policy.budget(rows), rows, strict=True)]
    return drafter.propose(rows, budget, policy) if any(budget) else Proposal.empty(len(rows), target.device)


def score(
    rows: Rows, proposal: Proposal, target: LanguageModel, cache: KVCache, hidden_layers: tuple[int, ...]
) -> ModelOutput:
    """The target's scores after each row's last token and after each of its draft tokens, [B, 1 + K, V], in one pass.

    What the cache lacks is fed along, so that a model that sat out a step needs no pass of its own.
    """
    unseen = [row.size - cache.lengths[i] if row.remaining > 0 else 0 for i, row in enumerate(rows)]
    counts = [u + n if u else 0 for u, n in zip(unseen, proposal.num_tokens, strict=True)]
    missed, device = max(unseen), target.device
    if missed <= 1:
        last = torch.tensor([[int(row.tokens[-1])] for row in rows], device=device)
        token_ids = torch.cat([last, proposal.token_ids], 1) if proposal.width else last
        parents = None if proposal.parents is None else F.pad(proposal.parents + 1, (1, 0), value=-1)
        return target.forward(ModelInput(token_ids, counts, parents=parents, hidden_layers=hidden_layers), cache)
    late = torch.zeros(len(rows), missed, dtype=torch.int64)
    for i, (row, u) in enumerate(zip(rows, unseen, strict=True)):
        late[i, :u] = torch.from_numpy(row.tokens[row.size - u :])
    token_ids = F.pad(late.to(device), (0, proposal.width))
    seen = torch.tensor(unseen, device=device).clamp(min=1)[:, None]
    columns = seen + torch.arange(proposal.width + 1, device=device)
    token_ids.scatter_(1, columns[:, :-1], proposal.token_ids)
    parents = None
    if proposal.parents is not None:
        parents = (torch.arange(token_ids.shape[1], device=device) - 1).repeat(len(rows), 1)
        parents.scatter_(1, columns[:, :-1], proposal.parents + seen)
    output = target.forward(ModelInput(token_ids, counts, parents=parents, hidden_layers=hidden_layers), cache)
    return output.at(columns - 1, [max(0, u - 1) for u in unseen])


def verifiable(proposal: Proposal, distributions: Distributions) -> Proposal:
    """The proposal without what lies beyond a place where nothing can be written.

    The tokens up to that place stay, so that no token is dropped for its own value; the place itself is then where the
    rule would write the next token, and `commit` ends the row if it does.
    """
    if not distributions.failures:
        return proposal
    counts, parents = list(proposal.num_tokens), proposal.parents
    if parents is None:
        for i, place in distributions.failures:
            counts[i] = min(counts[i], place)
        return dataclasses.replace(proposal, num_tokens=counts)
    parents, own = parents.clone(), torch.arange(proposal.width, device=parents.device)
    for i, place in distributions.failures:
        parents[i] = torch.where(parents[i] == place - 1, own, parents[i])  # no walk stands at its own column
    return dataclasses.replace(proposal, parents=parents)


@dataclass(frozen=True, slots=True)
class Committed:
    """What a step commits to one row. path: columns of the accepted draft tokens that were kept, in order."""

    token_ids: list[int]
    origins: tuple[Origin, ...]
    num_drafted: int
    path: list[int]
    tested: tuple[int, ...]
    reason: FinishReason | None
    error: RequestError | None
    logprobs: tuple[TokenLogprob, ...] | None

    @property
    def num_accepted(self) -> int:
        """Draft tokens that were kept."""
        return len(self.path)


def commit(
    rows: Rows, proposal: Proposal, verification: Verification, output: ModelOutput, distributions: Distributions
) -> list[Committed]:
    """Append the accepted tokens and the extra one, cut at the first stop. The only place that waits for the device."""
    out: list[Committed] = []
    for i, (row, one) in enumerate(zip(rows, _read(proposal, verification), strict=True)):
        drafted = proposal.num_tokens[i]
        place = one.path[-1] + 1 if one.path else 0
        error = distributions.failures.get((i, place))
        kept, reason = cut(row, [*one.accepted, *([one.extra] if error is None else [])])
        if error is not None and reason is not None:
            error = None  # it ended before it got there
        row.extend(kept)
        path, tested = one.path, one.tested
        if len(kept) <= len(path):  # what lies after a stop is not counted either
            path = path[: len(kept)]
            drafted, tested = len(kept), tested[: len(kept)]
        last = Origin.RESIDUAL if len(path) < drafted else Origin.BONUS
        origins = ((Origin.DRAFT,) * len(path) + (last,))[: len(kept)]
        asked = row.params.logprobs if rows.level == 0 else None
        columns = [0, *(column + 1 for column in path)][: len(kept)]
        logprobs = None if asked is None else token_logprobs(output.scores()[i][columns], kept, asked)
        reason = FinishReason.ERROR if error is not None else reason
        out.append(Committed(kept, origins, drafted, path, tested, reason, error, logprobs))
    return out


@dataclass(frozen=True, slots=True)
class _RowVerification:
    """One row's verification, on the host."""

    accepted: list[int]
    extra: int
    path: list[int]
    tested: tuple[int, ...]


def _read(proposal: Proposal, verification: Verification) -> list[_RowVerification]:
    """The verification of each row, in one transfer."""
    width = proposal.width
    columns = [
        verification.num_accepted[:, None],
        verification.token_ids[:, None],
        verification.num_tested[:, None],
        proposal.token_ids,
    ]
    tree = verification.path is not None and verification.tried is not None
    if verification.path is not None and verification.tried is not None:
        columns += [verification.path, torch.where(verification.tried, proposal.depths(), -1)]
    out: list[_RowVerification] = []
    for line in torch.cat(columns, 1).tolist():
        count, extra, num_tested, ids, rest = line[0], line[1], line[2], line[3 : 3 + width], line[3 + width :]
        if tree:
            path = rest[:count]
            by_depth = Counter(depth for depth in rest[width:] if depth >= 0)
            tested = tuple(by_depth[depth] for depth in range(len(by_depth)))
            out.append(_RowVerification([ids[column] for column in path], extra, path, tested))
        else:
            out.append(_RowVerification(ids[:count], extra, list(range(count)), (1,) * num_tested))
    return out


def rewind(
    rows: Rows, proposal: Proposal, committed: Sequence[Committed], starts: Sequence[int], cache: KVCache
) -> None:
    """Leave each cache row with all that is committed but its last token. starts: the cache's lengths before the pass."""
    if proposal.parents is not None:
        paths: list[list[int]] = []
        for row, one, start in zip(rows, committed, starts, strict=True):
            if row.remaining <= 0 and not one.token_ids:  # it took no part
                paths.append([])
                continue
            unseen = row.size - len(one.token_ids) - start
            paths.append([*range(unseen), *(unseen + column for column in one.path)])
        cache.keep(starts, paths)
    cache.truncate([row.size - 1 for row in rows])


def cut(row: Row, tokens: Sequence[int]) -> tuple[list[int], FinishReason | None]:
    """The tokens up to the first stop (token, string, length or context), that one included, and why it ended there."""
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
    """Log-probabilities of tokens under the raw logits, and the `top` likeliest. scores: [n, V], row t scores kept[t]."""
    logprobs = scores.float().log_softmax(-1)
    chosen = logprobs.gather(1, torch.tensor(kept, dtype=torch.int64, device=scores.device)[:, None])[:, 0].tolist()
    values, ids = logprobs.topk(min(top, logprobs.shape[-1])) if top else (logprobs[:, :0], logprobs[:, :0].long())
    pairs = [tuple(zip(i, v, strict=True)) for i, v in zip(ids.tolist(), values.tolist(), strict=True)]
    return tuple(TokenLogprob(c, p) for c, p in zip(chosen, pairs, strict=True))
