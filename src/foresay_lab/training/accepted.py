"""Training data for the acceptance head: a draft's hidden states, and the probability that the target accepts each token.

One file for every few prompts, made in four stages: the target decodes (sampled or greedy), the draft proposes chains after the
committed tokens, the target's forward pass gives the distributions p, and a token x drawn from q gets the label min(1, p(x) /
q(x)). Tokens after a rejected one are labelled too, since the target scored them. Existing files are not made again. Knows no
head.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from foresay.checks import check_int
from foresay.decoding.distributions import Distributions
from foresay.decoding.proposal import Proposal, Verification
from foresay.decoding.protocols import ModelOutput
from foresay.decoding.rows import Rows
from foresay.decoding.sampling_params import SamplingParams
from foresay.decoding.stopping import Reads, StoppingRule
from foresay.errors import ConfigError, ModelLoadError
from foresay.files import atomic_write, unreadable
from foresay.generation.generator import Generator
from foresay.json_files import parse_object, read_limited
from foresay.lengths import ConstantLength
from foresay.tensor_files import check_shapes, load_tensors, stored_tensors

PROMPTS_PER_FILE = 16
"""Prompts per file."""


@dataclass(frozen=True, slots=True)
class Examples:
    """N drafted tokens.

    hidden: [N, H], the draft's hidden state after it consumed the token. labels: [N], acceptance probability. reached: [N],
    probability that all earlier draft tokens of its step were accepted. drafted: [N] int64, number of earlier draft tokens.
    """

    hidden: torch.Tensor
    labels: torch.Tensor
    reached: torch.Tensor
    drafted: torch.Tensor

    @staticmethod
    def joined(parts: Sequence[Examples]) -> Examples:
        """Concatenate examples. Raises ConfigError for an empty list and for different hidden sizes."""
        if not parts:
            text = "has no drafted tokens to train on; collect data with another draft or more prompts"
            raise ConfigError(text, param="examples")
        if len({part.hidden.shape[1] for part in parts}) > 1:
            raise ConfigError("contain hidden states of different drafts", param="examples")
        return Examples(*(torch.cat([getattr(part, name) for part in parts]) for name in Examples.__slots__))

    def __len__(self) -> int:
        return len(self.labels)

    def part(self, chunk: slice) -> Examples:
        """Return a slice of the examples."""
        return Examples(*(getattr(self, name)[chunk] for name in Examples.__slots__))


class _FixedLength(ConstantLength):
    """A policy that drafts chains of a fixed length and records the draft's hidden states. Its rule ends no draft."""

    def __init__(self, length: int) -> None:
        super().__init__(length)
        self.hidden: list[torch.Tensor] = []
        """[B, H] for each draft token of a step but the first: the output of the pass that consumed the token before it."""

    def rule(self, rows: Rows) -> StoppingRule:
        self.hidden.clear()
        return StoppingRule(Reads.HIDDEN, 1.0, network=self._accepted)

    def _accepted(self, hidden: torch.Tensor) -> torch.Tensor:
        self.hidden.append(hidden.clone())
        return torch.ones(len(hidden), device=hidden.device)


def acceptance_chances(proposal: Proposal, distributions: Distributions) -> torch.Tensor:
    """Return min(1, p / q) of each draft token, [B, K]. In a greedy row it is 1 for the target's token and 0 for others."""
    ids = proposal.token_ids
    p = distributions.prob_of(ids)
    if proposal.distributions is None or proposal.distribution_index is None:
        return p.clamp(max=1.0)
    index = proposal.distribution_index
    q = proposal.distributions[index.clamp(min=0), ids]
    return torch.where(index >= 0, (p / q.clamp(min=1e-30)).clamp(max=1.0), p)


def collect(
    generator: Generator,
    prompts: Sequence[Any],
    params: SamplingParams,
    folder: str | os.PathLike[str],
    *,
    length: int = 8,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> int:
    """Make the missing files of `folder`, one for every PROMPTS_PER_FILE prompts. Return the number of files that existed.

    generator: its drafter is the draft. length: tokens of each chain. Raises ConfigError for a drafter without hidden states.
    """
    check_int("length", length, 2, 64)
    directory = Path(folder)
    directory.mkdir(parents=True, exist_ok=True)
    _check_settings(directory, generator, prompts, params, length)
    total, found = -(-len(prompts) // PROMPTS_PER_FILE), 0
    for number in range(total):
        path = directory / f"{number:06}.safetensors"
        if path.is_file():
            found += 1
        else:
            chunk = prompts[number * PROMPTS_PER_FILE : (number + 1) * PROMPTS_PER_FILE]
            examples = _collect_chunk(generator, chunk, params, length)
            with atomic_write(path) as temporary:
                save_file({name: getattr(examples, name).contiguous() for name in Examples.__slots__}, temporary)
        on_progress(number + 1, total)
    return found


def _check_settings(
    folder: Path, generator: Generator, prompts: Sequence[Any], params: SamplingParams, length: int
) -> None:
    """Raise ConfigError if the folder's files were made with other prompts, another draft or other parameters."""
    path = folder / "settings.json"
    digest = sha256(repr([list(prompt) for prompt in prompts]).encode()).hexdigest()[:16]
    settings = {
        "target": generator.target.name,
        "drafter": generator.drafter_name,
        "length": length,
        "prompts": digest,
        "params": str(params),
    }
    try:
        existing = parse_object(read_limited(path), str(path)) if path.is_file() else settings
    except OSError as error:
        raise unreadable(path, error) from None
    if existing != settings:
        name = next((key for key in settings if existing.get(key) != settings[key]), "settings")
        text = f"contains data for another value of {name}; use the same or another folder"
        raise ConfigError(text, param="folder", value=folder)
    with atomic_write(path) as temporary:
        temporary.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def _collect_chunk(generator: Generator, prompts: Sequence[Any], params: SamplingParams, length: int) -> Examples:
    policy, parts = _FixedLength(length), list[Examples]()

    def label(
        rows: Rows, proposal: Proposal, distributions: Distributions, verification: Verification, output: ModelOutput
    ) -> None:
        if not proposal.width:
            return
        labels = acceptance_chances(proposal, distributions)
        reached = torch.ones(len(rows), device=labels.device)
        for j, hidden in enumerate(policy.hidden[: proposal.width]):
            # no forward pass of the draft consumes the chain's last token
            consumed = torch.tensor([n > j + 1 for n in proposal.num_tokens], device=labels.device)
            part = (hidden, labels[:, j], reached, torch.full_like(labels[:, j], j, dtype=torch.int64))
            parts.append(Examples(*(one[consumed].cpu() for one in part)))
            reached = reached * labels[:, j]

    session = generator.with_settings(policy=policy).session(observers=[label])
    for i, prompt in enumerate(prompts):
        session.submit(prompt, params if params.seed is None else SamplingParams.of(params, seed=params.seed + i))
    while session.has_work:
        session.step()
    if not parts:
        raise ConfigError("proposed no chains with hidden states; use a draft model or a head", param="drafter")
    return Examples.joined(parts)


def split_examples(parts: Sequence[Examples], share: float = 0.1) -> tuple[Examples, Examples]:
    """Return (training, held out): the last `share` of the tokens is held out.

    Whole files are held out, so that no prompt is on both sides, if that gives the share within a factor of 1.5. Otherwise
    a file is cut. Raises ConfigError for fewer than two tokens.
    """
    total = sum(map(len, parts))
    if total < 2:
        text = "drafted tokens cannot be split into training and held-out data; at least 2 are needed"
        raise ConfigError(text, param="total", value=total)
    target_tokens = max(1, round(share * total))
    training, held_out = list(parts), list[Examples]()
    num_held_out = 0
    while 1.5 * num_held_out < target_tokens:
        last = training.pop()
        if num_held_out + len(last) > 1.5 * target_tokens or not training:
            cut = len(last) - (target_tokens - num_held_out)
            training.append(last.part(slice(None, cut)))
            last = last.part(slice(cut, None))
        held_out.insert(0, last)
        num_held_out += len(last)
    return Examples.joined(training), Examples.joined(held_out)


def load_examples(folder: str | os.PathLike[str]) -> list[Examples]:
    """Load the files written by `collect`. Raises ConfigError for a folder without any, and for invalid files."""
    files = sorted(Path(folder).glob("*.safetensors"))
    if not files:
        text = "has no data for an acceptance head; foresay distill --kind acceptance makes it"
        raise ConfigError(text, param="folder", value=folder)
    out = []
    for file in files:
        try:
            stored = {name: one for name, one in stored_tensors([file]).items() if name in Examples.__slots__}
            rows = stored["labels"].shape if "labels" in stored else ()
            hidden = stored["hidden"].shape if "hidden" in stored else ()
            if len(rows) != 1 or len(hidden) != 2 or len(stored) != len(Examples.__slots__):
                raise ModelLoadError("required are labels [N], hidden [N, H], reached [N] and drafted [N]")
            shapes = {"labels": rows, "reached": rows, "hidden": (rows[0], hidden[1])}
            check_shapes({name: stored[name] for name in shapes}, shapes, "it", "its labels give")
            if (stored["drafted"].shape, stored["drafted"].dtype) != (rows, "I64"):
                raise ModelLoadError(f"drafted must have {rows[0]} integers")
            out.append(Examples(**load_tensors(stored)))
        except ModelLoadError as error:
            raise ConfigError(f"has no valid data for an acceptance head: {error}", param="path", value=file) from None
    return out
