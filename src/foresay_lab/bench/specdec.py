"""The result record of SpecDec++ (Huang et al. 2024), with the field names and meanings of its source code.

Owns one JSON object per prompt: speculative decoding, the target alone and the draft model alone, each timed separately at batch
size 1, and for each token of the target's output the draft model's token after the same prefix and its acceptance probability.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from foresay.decoding.acceptance import Speculative
from foresay.decoding.distributions import Distributions
from foresay.decoding.proposal import Proposal, Verification
from foresay.decoding.protocols import ModelOutput, Rule
from foresay.decoding.randomness import Streams, derive
from foresay.decoding.rows import Rows
from foresay.decoding.sampling_params import SamplingParams
from foresay.drafters import ModelDrafter, ModelTreeDrafter
from foresay.errors import ConfigError
from foresay.generation.generator import Generator
from foresay.lengths import ConstantLength
from foresay.models.sources.wrapping import LoadedModel
from foresay.text.stream import Detokenizer
from foresay_lab.data.requests import PromptRequest
from foresay_lab.measure.live_run import run_live
from foresay_lab.training.accepted import acceptance_chances


def specdec_records(
    generator: Generator, requests: Sequence[PromptRequest], params: SamplingParams
) -> Iterator[dict[str, Any]]:
    """Yield the record of each prompt, in order, after an untimed warm-up with the first prompt.

    generator: a target with a draft model as drafter. Each sampled prompt has a seed derived from params.seed, which all of its
    runs share. Times are wall-clock seconds, including prompt processing; lengths are output tokens. `tokens` is the output of
    the target alone. `draft` and `p_acc` have the same length: the draft model's token after the same prefix, and min(1, p/q)
    under the sampling parameters (greedy: 1 or 0), None beyond the draft model's context. Raises ConfigError for a drafter that
    is not a draft model, and without a tokenizer.
    """
    one_row = generator.with_settings(max_batch_size=1)
    plain, draft = one_row.plain(), draft_alone(one_row)
    if generator.tokenizer is None:
        text = "is needed for the texts of the record, and the model was loaded without one"
        raise ConfigError(text, param="tokenizer")
    for run in (one_row, plain, draft):
        run_live(run, requests[:1], params)
    for number, request in enumerate(requests):
        request_params = params if params.greedy else dataclasses.replace(params, seed=derive(params.seed or 0, number))
        speculative, alone, drafted = (run_live(run, [request], request_params) for run in (one_row, plain, draft))
        stats, tokens = speculative.stats, alone.outputs[0]
        per_token = draft_tokens(one_row, request.token_ids, tokens, request_params)
        prompt: Any = request.item.prompt
        if request.turn or not isinstance(prompt, str):
            prompt = Detokenizer(generator.tokenizer).all(request.token_ids)
        yield {
            "id": number,
            "prompt": prompt,
            "prefix": list(request.token_ids),
            "continuation": Detokenizer(generator.tokenizer, context=request.token_ids).all(tokens),
            "tokens": tokens,
            "draft": [token for token, _ in per_token],
            "p_acc": [chance for _, chance in per_token],
            "spec_time": speculative.seconds,
            "num_mismatched_tokens": stats.num_drafted - stats.num_accepted,
            "num_LM_call": stats.num_passes,
            "generated_length": stats.num_tokens,
            "target_time": alone.seconds,
            "generated_length_target": len(tokens),
            "draft_time": drafted.seconds,
            "generated_length_draft": drafted.tokens,
        }


def draft_alone(generator: Generator) -> Generator:
    """Return a generator that decodes with the draft model alone. Raises ConfigError for a drafter that is not a draft model."""
    drafter, target = generator.make_drafter(), generator.target
    if not isinstance(drafter, ModelDrafter) or isinstance(drafter, ModelTreeDrafter) or drafter.hidden_layers:
        text = (
            "is no draft model with the target's tokens, which SpecDec++'s record times alone; give --drafter 'model(NAME)' or "
            "'self(LAYERS)'"
        )
        raise ConfigError(text, param="drafter", value=generator.drafter_name)
    loaded = LoadedModel(generator.drafter_name, drafter.context.model.inner, target.tokenizer, target.eos_token_ids)
    return Generator(loaded, lambda: None, Speculative(), ConstantLength(0), max_batch_size=1)


def draft_tokens(
    generator: Generator, prompt: Sequence[int], tokens: Sequence[int], params: SamplingParams
) -> list[tuple[int | None, float | None]]:
    """Return (draft token, acceptance probability) after the prompt and each prefix of `tokens`.

    The engine decodes with one draft token per step, and a rule that commits the given tokens instead of the target's.
    """
    found: list[tuple[int | None, float | None]] = []

    def see(
        rows: Rows, proposal: Proposal, distributions: Distributions, verification: Verification, output: ModelOutput
    ) -> None:
        if proposal.width and proposal.num_tokens[0]:
            chance = float(acceptance_chances(proposal, distributions)[0, 0])
            found.append((int(proposal.token_ids[0, 0]), chance))
        else:
            found.append((None, None))

    one_more = dataclasses.replace(params, max_new_tokens=len(tokens) + 1)  # the last token gets a draft token too
    session = generator.with_settings(rule=_Forced(tokens), policy=ConstantLength(1)).session(observers=[see])
    session.submit(list(prompt), one_more, text=False)
    while session.has_work and len(found) < len(tokens):
        session.step()
    return found


class _Forced(Rule):
    """A rule that commits the given tokens, one per step, for any draft of a single row."""

    name, exact = "forced", True

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens = iter(tokens)

    def verify(self, target: Distributions, proposal: Proposal, streams: Streams) -> Verification:
        none = torch.zeros(1, dtype=torch.int64, device=target.greedy_ids.device)
        return Verification(none, none + next(self._tokens), none)
