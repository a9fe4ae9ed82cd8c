"""A check that the outputs of a log belong to the prompts they are given, for logs that contain outputs alone.

Owns the comparison of their beginnings. Reads no file, and warns nobody itself.
"""

from __future__ import annotations

from collections.abc import Sequence

from foresay.decoding.sampling_params import SamplingParams
from foresay.generation.generator import Generator
from foresay.records.recording import Recording

PROMPTS, TOKENS = 4, 4
"""How many prompts are decoded for the comparison, spread over the log, and how many tokens of each."""


def doubt(recording: Recording, generator: Generator) -> str | None:
    """Reason to doubt that outputs and prompts belong together, in one sentence; None where they agree.

    recording: outputs with the prompts of the same index. generator: a model whose answers are compared with the log; where
    another model generated the log, their beginnings differ too.
    """
    records = recording.records
    chosen = [i * len(records) // PROMPTS for i in range(PROMPTS)] if len(records) > PROMPTS else range(len(records))
    params = SamplingParams(max_new_tokens=TOKENS, ignore_eos=True)
    begun = generator.plain().generate([list(records[i].prompt) for i in chosen], params)
    outputs = [record.output for record in records]
    own = [_shared(one.token_ids, outputs[i]) for i, one in zip(chosen, begun, strict=True)]
    if 2 * sum(count > 0 for count in own) >= len(own):
        return None
    for i, one, count in zip(chosen, begun, own, strict=True):
        best = max(range(len(outputs)), key=lambda j: _shared(one.token_ids, outputs[j]))
        if _shared(one.token_ids, outputs[best]) >= max(2, count + 1):
            return (
                f"{generator.target.name!r} answers prompt {i + 1} as output {best + 1} of the log begins: "
                "the prompts are in another order"
            )
    return (
        f"{generator.target.name!r} begins its answers to {len(own)} prompts otherwise than the log: another model generated it, "
        "or the prompts are in another order or format (--raw)"
    )


def _shared(first: Sequence[int], second: Sequence[int]) -> int:
    """Length of the common beginning."""
    return next(
        (i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second))
    )
