"""Data for the acceptance head: what a draft thought when it drew a token, and the chance that the target accepts it.

Four stages for every few prompts, whose result is one file: the target decodes (sampled or greedy), the draft draws chains
behind what is committed, the target's pass over them gives the laws p, and a token x drawn from q is labelled min(1, p(x) /
q(x)). Tokens behind one that was rejected are labelled too: the target scored them. What has a file is not made again. Knows no
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
from foresay.decoding.protocols import DraftStep, LengthPolicy, ModelOutput
from foresay.decoding.rows import Rows
from foresay.decoding.sampling_params import SamplingParams
from foresay.errors import ConfigError, ModelLoadError
from foresay.files import atomic_write
from foresay.generation.generator import Generator
from foresay.json_files import parse_object, read_limited
from foresay.tensor_files import check_shapes, load_tensors, stored_tensors

AT_ONCE = 16
"""Prompts of a file."""


@dataclass(frozen=True, slots=True)
class Examples:
    """N drafted tokens.

    hidden: [N, H], the draft's after it consumed each. labels: [N], the chance of acceptance. reached: [N], the chance that
    all before it were accepted. drafted: [N] int64, tokens drafted before it.
    """

    hidden: torch.Tensor
    labels: torch.Tensor
    reached: torch.Tensor
    drafted: torch.Tensor

    @staticmethod
    def joined(parts: Sequence[Examples]) -> Examples:
        """All of them. Raises ConfigError for none, or of different widths."""
        if not parts:
            raise ConfigError("there are no drafted tokens to learn from")
        if len({part.hidden.shape[1] for part in parts}) > 1:
            raise ConfigError("the files hold hidden states of different drafts")
        return Examples(*(torch.cat([getattr(part, name) for part in parts]) for name in Examples.__slots__))

    def __len__(self) -> int:
        return len(self.labels)

    def part(self, some: slice) -> Examples:
        """Some of them."""
        return Examples(*(getattr(self, name)[some] for name in Examples.__slots__))


class _Watch(LengthPolicy):
    """Drafts chains of one length, and keeps what the draft thought."""

    needs_hidden, remembers = True, False

    def __init__(self, length: int) -> None:
        self._length = length
        self.hidden: list[torch.Tensor] = []
        """[B, H] of each draft token of a step: of the pass that drew it."""

    def budget(self, rows: Rows) -> list[int]:
        self.hidden.clear()
        return [self._length] * len(rows)

    def keep_drafting(self, step: DraftStep) -> torch.Tensor | None:
        assert step.hidden is not None
        self.hidden.append(step.hidden.clone())
        return None


class _Labels:
    """A step observer that pairs hidden states with labels: the pass that drew token j + 1 had consumed token j."""

    def __init__(self, watch: _Watch) -> None:
        self._watch = watch
        self.parts: list[Examples] = []

    def __call__(
        self,
        rows: Rows,
        proposal: Proposal,
        distributions: Distributions,
        verification: Verification,
        output: ModelOutput,
    ) -> None:
        hidden = self._watch.hidden
        if len(hidden) < 2 or proposal.width == 0:
            return
        labels = acceptance_chances(proposal, distributions)
        reached = torch.ones(len(rows), device=labels.device)
        for j in range(min(len(hidden) - 1, proposal.width)):
            # the chain's last token is consumed by no pass of the draft
            there = torch.tensor([n > j + 1 for n in proposal.num_tokens], device=labels.device)
            part = (hidden[j + 1], labels[:, j], reached, torch.full_like(labels[:, j], j, dtype=torch.int64))
            self.parts.append(Examples(*(one[there].cpu() for one in part)))
            reached = reached * labels[:, j]


def acceptance_chances(proposal: Proposal, distributions: Distributions) -> torch.Tensor:
    """[B, K]: min(1, p / q) of each draft token; of a greedy row, whether the target writes it."""
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
    """Make the files of `folder` that are missing, one for every AT_ONCE prompts; returns how many were there.

    generator: with the draft as its drafter. length: tokens of each chain. Raises ConfigError for a drafter without hidden
    states.
    """
    check_int("length", length, 2, 64)
    place = Path(folder)
    place.mkdir(parents=True, exist_ok=True)
    _check_settings(place, generator, prompts, params, length)
    total, found = -(-len(prompts) // AT_ONCE), 0
    for number in range(total):
        path = place / f"{number:06}.safetensors"
        if path.is_file():
            found += 1
        else:
            some = prompts[number * AT_ONCE : (number + 1) * AT_ONCE]
            _write(path, _of_prompts(generator, some, params, length))
        on_progress(number + 1, total)
    return found


def _check_settings(
    folder: Path, generator: Generator, prompts: Sequence[Any], params: SamplingParams, length: int
) -> None:
    """Files that are there must be of the same prompts, draft and parameters."""
    path = folder / "settings.json"
    made_of = sha256(repr([list(prompt) for prompt in prompts]).encode()).hexdigest()[:16]
    settings = {
        "target": generator.target.name,
        "drafter": generator.drafter_name,
        "length": length,
        "prompts": made_of,
        "params": str(params),
    }
    if path.is_file() and (before := _object(path)) != settings:
        name = next((key for key in settings if before.get(key) != settings[key]), "settings")
        raise ConfigError(
            f"the folder {str(folder)!r} was begun with other {name}; give the same, or name another folder"
        )
    with atomic_write(path) as whole:
        whole.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def _object(path: Path) -> dict[str, Any]:
    try:
        return parse_object(read_limited(path), str(path))
    except OSError as error:
        raise ConfigError(f"cannot read {str(path)!r}: {error.strerror}") from None


def _of_prompts(generator: Generator, prompts: Sequence[Any], params: SamplingParams, length: int) -> Examples:
    watch = _Watch(length)
    labels = _Labels(watch)
    session = generator.with_settings(policy=watch).session(observers=[labels])
    for i, prompt in enumerate(prompts):
        session.submit(prompt, params if params.seed is None else SamplingParams.of(params, seed=params.seed + i))
    while session.has_work:
        session.step()
    if not labels.parts:
        raise ConfigError("the drafter drew no chains with hidden states; give it a draft model or a head")
    return Examples.joined(labels.parts)


def _write(path: Path, examples: Examples) -> None:
    with atomic_write(path) as whole:
        save_file({name: getattr(examples, name).contiguous() for name in Examples.__slots__}, whole)


def split_examples(parts: Sequence[Examples], share: float = 0.1) -> tuple[Examples, Examples]:
    """(to learn from, held out): `share` of the tokens, those at the end.

    They are whole files, whose prompts are then in no other, where those come to the share give or take half of it; else a
    file is cut. Raises ConfigError for fewer than two tokens.
    """
    total = sum(map(len, parts))
    if total < 2:
        raise ConfigError(f"{total} drafted tokens cannot be split into some to learn from and some to hold out")
    wanted = max(1, round(share * total))
    learn, held_out = list(parts), list[Examples]()
    held = 0
    while 1.5 * held < wanted:
        last = learn.pop()
        if held + len(last) > 1.5 * wanted or not learn:
            cut = len(last) - (wanted - held)
            learn.append(last.part(slice(None, cut)))
            last = last.part(slice(cut, None))
        held_out.insert(0, last)
        held += len(last)
    return Examples.joined(learn), Examples.joined(held_out)


def load_examples(folder: str | os.PathLike[str]) -> list[Examples]:
    """What `collect` wrote, file by file. Raises ConfigError for a folder without any, and for files that are none."""
    files = sorted(Path(folder).glob("*.safetensors"))
    if not files:
        raise ConfigError(
            f"the folder {os.fspath(folder)!r} holds no data for an acceptance head (foresay acceptance-head data)"
        )
    out = []
    for file in files:
        try:
            stored = {name: one for name, one in stored_tensors([file]).items() if name in Examples.__slots__}
            rows = stored["labels"].shape if "labels" in stored else ()
            hidden = stored["hidden"].shape if "hidden" in stored else ()
            if len(rows) != 1 or len(hidden) != 2 or len(stored) != len(Examples.__slots__):
                raise ModelLoadError("labels [N], hidden [N, H], reached [N] and drafted [N] are needed")
            wanted = {"labels": rows, "reached": rows, "hidden": (rows[0], hidden[1])}
            check_shapes({name: stored[name] for name in wanted}, wanted, "it", "its labels give")
            if (stored["drafted"].shape, stored["drafted"].dtype) != (rows, "I64"):
                raise ModelLoadError(f"drafted must be {rows[0]} integers")
            out.append(Examples(**load_tensors(stored)))
        except ModelLoadError as error:
            raise ConfigError(f"{str(file)!r} holds no data for an acceptance head: {error}") from None
    return out
