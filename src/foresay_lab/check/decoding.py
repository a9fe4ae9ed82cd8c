"""The run of a check: recorded prompts are decoded again so that a second run gives the same tokens per pass.

Owns the conditions of such a run, and of a comparison with the recorded outputs. Loads no model and compares nothing.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import replace

from foresay.checks import check_int
from foresay.decoding.acceptance import RULES
from foresay.decoding.protocols import LengthPolicy
from foresay.engine import Stats
from foresay.errors import ConfigError
from foresay.generation.generator import Generator
from foresay.generation.load import change
from foresay.generation.result import Generation
from foresay.lengths import LENGTHS, ConstantLength, ThroughputLength
from foresay.records.recording import Record, Recording, read_params
from foresay.spec.expressions import Call, parse, to_expression
from foresay.spec.recipes import read_drafter, read_length
from foresay.text.tokenizer import tokenizer_fingerprint
from foresay.version import __version__
from foresay_lab.check.compare import CheckResult, Counts
from foresay_lab.measure import live_run


def read_recording(path: str | os.PathLike[str], limit: int | None = None) -> Recording:
    """Read the first `limit` outputs of a recording (None: all).

    Raises ConfigError as Recording.load does, and for a log of another project, which lacks the sampling parameters.
    """
    recording = Recording.load(path)
    if "read_from" in recording.settings:
        text = f"is a {recording.settings['read_from']}, which lacks sampling parameters; make a recording with foresay record"
        raise ConfigError(text, param="path", value=path)
    return recording if limit is None else replace(recording, records=recording.records[: check_int("limit", limit, 1)])


def check_settings(drafter: str, length: str | None) -> None:
    """Raise ConfigError for a drafter or length whose tokens per pass depend on time or on earlier runs."""
    if _has_memory(parse(drafter)):
        text = "keeps texts in a folder, so a second check has other drafts; drop memory="
        raise ConfigError(text, param="drafter", value=drafter)
    if length is not None and _is_adaptive(read_length(length)):
        text = (
            "adapts to measured time or to other requests, so a second check has other drafts; give a number, or a policy "
            "of the row alone such as heuristic"
        )
        raise ConfigError(text, param="length", value=length)


def repeatable(generator: Generator) -> Generator:
    """Return the Generator with the drafter's default number of draft tokens if its length adapts to measured time.

    Raises ConfigError as `check_settings` does.
    """
    check_settings(generator.drafter_name, None)
    if not _is_adaptive(generator.policy):
        return generator
    return change(generator, length=read_drafter(generator.drafter_name).num_draft_tokens)


def _is_adaptive(policy: LengthPolicy) -> bool:
    return isinstance(policy, ThroughputLength) or policy.remembers


def _has_memory(call: Call) -> bool:
    return any(key == "memory" or (isinstance(value, Call) and _has_memory(value)) for key, value in call.values)


def check_vocabulary(recording: Recording, generator: Generator) -> None:
    """Raise ConfigError, naming both models, if token ids of the recording mean other tokens to the target."""
    target = generator.target
    if recording.vocab_size != target.model.vocab_size:
        text = f"of {recording.model!r} has {recording.vocab_size} tokens, and {target.name!r} has {target.model.vocab_size}"
        raise ConfigError(text, param="recording")
    own = None if target.tokenizer is None else tokenizer_fingerprint(target.tokenizer)
    if None not in (recording.tokenizer, own) and recording.tokenizer != own:
        raise ConfigError(f"of {recording.model!r} has another tokenizer than {target.name!r}", param="recording")


def why_not_compared(recording: Recording, generator: Generator) -> str | None:
    """Return the reason why texts may differ from the recording although nothing is wrong, or None if they must not differ."""
    rule = generator.rule
    if not rule.exact:
        return f"rule {rule.name!r} is lossy"
    if recording.greedy:
        return None
    if any(record.seed is None for record in recording.records):
        return "the recording is sampled and lacks seeds"
    if rule.needs.shares_noise:
        return f"rule {rule.name!r} samples with other random numbers than the recording"
    if not rule.needs.ignores_drafts and read_drafter(generator.drafter_name).samples:
        return f"under rule {rule.name!r} the text of a seed depends on sampled draft tokens; rule 'match' keeps it"
    return None


def decode(
    generator: Generator, recording: Recording, on_progress: Callable[[int, int], None] = lambda done, tokens: None
) -> Sequence[Generation]:
    """Decode the recorded prompts with the recorded parameters and seeds; see `live_run.decode`."""
    asks = [
        (
            one.id,
            one.prompt if one.source is None else one.source,
            read_params(recording.params, seed=one.seed, logprobs=None),
        )
        for one in recording.records
    ]
    return live_run.decode(generator, asks, on_progress).generations


def settings_of(generator: Generator, recording: Recording) -> dict[str, str]:
    """Return the fields of a CheckResult that are known before anything is decoded."""
    policy = generator.policy
    length = str(policy.num_draft_tokens) if isinstance(policy, ConstantLength) else to_expression(policy, LENGTHS)
    return {
        "model": generator.target.name,
        "drafter": generator.drafter_name,
        "length": length,
        "rule": to_expression(generator.rule, RULES),
        "dtype": generator.target.precision,
        "foresay": __version__,
        "prompts": digest(recording.records),
    }


def result_of(generator: Generator, recording: Recording, generations: Sequence[Generation]) -> CheckResult:
    """Return the counts of a run with its settings."""
    runs: dict[str, list[Generation]] = {}
    for record, one in zip(recording.records, generations, strict=True):
        runs.setdefault(record.category, []).append(one)
    stats = {name: Stats.of(step for one in some for step in one.steps) for name, some in runs.items()}
    categories = {name: Counts(len(runs[name]), of.num_tokens, of.num_passes) for name, of in stats.items()}
    return CheckResult(**settings_of(generator, recording), categories=categories)


def digest(records: Sequence[Record]) -> str:
    """Return a fingerprint of the prompts, which must be equal for two results to be compared."""
    text = json.dumps([[one.id, one.category, one.prompt, one.source] for one in records])
    return hashlib.sha256(text.encode()).hexdigest()[:16]
