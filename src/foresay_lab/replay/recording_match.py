"""A check that the outputs of a log match their prompts, for logs that contain outputs alone.

Owns the comparison of the first tokens. Reads no file and prints no warning.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from foresay.decoding.rows import common_prefix
from foresay.decoding.sampling_params import SamplingParams
from foresay.generation.generator import Generator
from foresay.records.recording import Recording

PROMPTS, TOKENS = 4, 4
"""Number of prompts that are decoded for the comparison, spread over the log, and tokens of each."""


def prompt_mismatch_warning(recording: Recording, generator: Generator) -> str | None:
    """Return a warning in one sentence if outputs and prompts do not seem to match, or None if they match.

    recording: outputs with the prompts of the same index. generator: a model whose outputs are compared with the log. If
    another model generated the log, the outputs differ too.
    """
    records = recording.records
    chosen = [i * len(records) // PROMPTS for i in range(PROMPTS)] if len(records) > PROMPTS else range(len(records))
    params = SamplingParams(max_new_tokens=TOKENS, ignore_eos=True)
    generations = generator.plain().generate([list(records[i].prompt) for i in chosen], params)
    outputs = [record.output for record in records]
    matched = [_shared(one.token_ids, outputs[i]) for i, one in zip(chosen, generations, strict=True)]
    if 2 * sum(count > 0 for count in matched) >= len(matched):
        return None
    for i, one, count in zip(chosen, generations, matched, strict=True):
        best = max(range(len(outputs)), key=lambda j: _shared(one.token_ids, outputs[j]))
        if _shared(one.token_ids, outputs[best]) >= max(2, count + 1):
            return (
                f"the output of {generator.target.name!r} for prompt {i + 1} begins like output {best + 1} of the log: "
                "the prompts are in another order"
            )
    return (
        f"the outputs of {generator.target.name!r} for {len(matched)} prompts differ from the log: another model generated it, "
        "or the prompts are in another order or format (--raw)"
    )


def _shared(first: Sequence[int], second: Sequence[int]) -> int:
    return common_prefix(np.asarray(first), np.asarray(second))
