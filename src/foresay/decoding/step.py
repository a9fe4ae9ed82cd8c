"""The one step: propose, score, judge, commit, rewind.

Everything that decodes calls this function: plain decoding is a budget of 0, a batch of one is a batch, and a cascade is
a drafter that calls it with a target of its own. It knows neither requests nor texts; it is given rows whose caches lack
their last token, and perhaps a few before it, and leaves caches that lack exactly the last one.
"""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter

import torch
import torch.nn.functional as F

from foresay.decoding.laws import Laws, build_laws
from foresay.decoding.outcome import FinishReason, Origin, Step, TokenLogprob
from foresay.decoding.proposal import Proposal, Verdict
from foresay.decoding.protocols import Drafter, KVCache, LanguageModel, LengthPolicy, ModelOutput, Rule
from foresay.decoding.rows import Row, Rows


@torch.inference_mode()
def step(
    rows: Rows, target: LanguageModel, cache: KVCache, drafter: Drafter | None, rule: Rule, policy: LengthPolicy
) -> list[Step]:
    """One target pass over all rows, and what it commits to each. One Step per row, in order.

    A row with no token remaining takes no part: nothing of it is fed, and its Step is empty.
    """
    began = perf_counter()
    proposal = propose(rows, target, drafter, policy)
    proposed = perf_counter()
    output = score(rows, proposal, target, cache, drafter.hidden_layers if drafter is not None else ())
    scored = perf_counter()
    laws = _laws(output, rows, proposal)
    verdict = rule.judge(laws, proposal, rows.streams(target.device))
    committed = commit(rows, proposal, verdict, output)
    cache.truncate([row.size - 1 for row in rows])
    if drafter is not None:
        drafter.observe(rows, verdict, output)
    total = perf_counter() - began
    steps = [
        Step(
            request_id=row.request_id,
            token_ids=tuple(kept),
            origins=origins,
            num_drafted=drafted,
            num_accepted=accepted,
            finish_reason=reason,
            logprobs=logprobs,
            batch_size=len(rows),
            draft_s=proposed - began,
            target_s=scored - proposed,
            total_s=total,
        )
        for row, (kept, origins, drafted, accepted, reason, logprobs) in zip(rows, committed, strict=True)
    ]
    policy.observe(rows, steps)
    return steps


def score(
    rows: Rows, proposal: Proposal, target: LanguageModel, cache: KVCache, hidden_layers: Sequence[int]
) -> ModelOutput:
    """The target's scores behind each row's last token and each of its guesses, [B, 1 + K, V], in one pass.

    What the cache lacks is fed along, so that a model that sat out a step needs no pass of its own.
    """
    unseen = [row.size - cache.lengths[i] if row.remaining > 0 else 0 for i, row in enumerate(rows)]
    counts = [u + n if u else 0 for u, n in zip(unseen, proposal.num_tokens, strict=True)]
    if max(unseen) <= 1:
        last = torch.tensor([[int(row.tokens[-1])] for row in rows], device=target.device)
        token_ids = torch.cat([last, proposal.token_ids], 1) if proposal.width else last
        return target.forward(token_ids, counts, cache, hidden_layers=hidden_layers)
    missed = max(unseen)
    ahead = torch.zeros(len(rows), missed, dtype=torch.int64)
    for i, (row, u) in enumerate(zip(rows, unseen, strict=True)):
        ahead[i, :u] = torch.from_numpy(row.tokens[row.size - u :])
    token_ids = F.pad(ahead.to(target.device), (0, proposal.width))
    columns = torch.tensor(unseen, device=target.device).clamp(min=1)[:, None] + torch.arange(
        proposal.width + 1, device=target.device
    )
    token_ids.scatter_(1, columns[:, :-1], proposal.token_ids)
    output = target.forward(token_ids, counts, cache, hidden_layers=hidden_layers)
    batch = torch.arange(len(rows), device=target.device)[:, None]
    hidden = {layer: states[batch, columns - 1] for layer, states in output.hidden.items()}
    if output.token_ids is not None:
        return ModelOutput(None, hidden, output.token_ids[batch, columns - 1])
    return ModelOutput(output.scores()[batch, columns - 1], hidden)


def _laws(output: ModelOutput, rows: Rows, proposal: Proposal) -> Laws:
    """The target's laws at each place; the tokens of a recording are point masses, whatever the parameters."""
    if output.token_ids is not None:
        return Laws(output.token_ids)
    return build_laws(output.scores(), rows, proposal.token_ids, counts=proposal.num_tokens)


def propose(rows: Rows, target: LanguageModel, drafter: Drafter | None, policy: LengthPolicy) -> Proposal:
    """The drafter's guess, never longer than what the row may still commit besides the target's own token."""
    if drafter is None:
        return Proposal.empty(len(rows), target.device)
    budget = [max(0, min(n, row.remaining - 1)) for n, row in zip(policy.budget(rows), rows, strict=True)]
    return drafter.propose(rows, budget, policy) if any(budget) else Proposal.empty(len(rows), target.device)


_Committed = tuple[list[int], tuple[Origin, ...], int, int, FinishReason | None, tuple[TokenLogprob, ...] | None]


def commit(rows: Rows, proposal: Proposal, verdict: Verdict, output: ModelOutput) -> list[_Committed]:
    """Append the accepted tokens and the extra one, cut at the first stop. The only place that waits for the device."""
    told = torch.cat([verdict.num_accepted[:, None], verdict.token_ids[:, None], proposal.token_ids], 1).tolist()
    out: list[_Committed] = []
    for i, row in enumerate(rows):
        accepted, extra, drafted = told[i][0], told[i][1], proposal.num_tokens[i]
        tokens = [*told[i][2 : 2 + accepted], extra]
        kept, reason = cut(row, tokens)
        row.extend(kept)
        if len(kept) <= accepted:  # what lies behind a stop is not counted either
            accepted = drafted = len(kept)
        last = Origin.RESIDUAL if accepted < drafted else Origin.BONUS
        origins = ((Origin.DRAFT,) * accepted + (last,))[: len(kept)]
        asked = row.params.logprobs
        logprobs = _logprobs(output.scores()[i], kept, asked) if asked is not None else None
        out.append((kept, origins, drafted, accepted, reason, logprobs))
    return out


def cut(row: Row, tokens: Sequence[int]) -> tuple[list[int], FinishReason | None]:
    """The tokens up to the first stop (token, string, length or context), that one included, and why it ended there."""
    kept = list(tokens[: row.remaining])
    reason = FinishReason.LENGTH if len(kept) == row.remaining else None
    free = row.params.min_new_tokens - row.num_new
    for i, token in enumerate(kept):
        if token in row.eos and i + 1 > free:
            kept, reason = kept[: i + 1], FinishReason.STOP
            break
    if row.stop is not None:
        count = row.stop(kept)
        if count is not None:
            return kept[:count], FinishReason.STOP
    return kept, reason


def _logprobs(scores: torch.Tensor, kept: Sequence[int], top: int) -> tuple[TokenLogprob, ...]:
    """Log-probabilities of the kept tokens under the raw logits. scores: [T, V], column t scores kept[t]."""
    logprobs = scores[: len(kept)].float().log_softmax(-1)
    chosen = logprobs[torch.arange(len(kept)), torch.tensor(kept, device=scores.device)].tolist()
    values, ids = logprobs.topk(min(top, logprobs.shape[-1])) if top else (logprobs[:, :0], logprobs[:, :0].long())
    pairs = [tuple(zip(i, v, strict=True)) for i, v in zip(ids.tolist(), values.tolist(), strict=True)]
    return tuple(TokenLogprob(c, p) for c, p in zip(chosen, pairs, strict=True))
