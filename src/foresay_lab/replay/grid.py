"""Replays of methods on recordings, in one process or distributed over workers, with results as plain data.

Owns the results of a replay and the objects that several replays share. Knows neither the presentation nor the workers.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from foresay.errors import ConfigError
from foresay.files import unreadable
from foresay.generation.load import load
from foresay.generation.method import Method
from foresay.json_files import Schema
from foresay.models.recording import RecordingModel
from foresay.models.sources.wrapping import LoadedModel
from foresay.records.lines import Line, LineWriter
from foresay.records.profile import Profile
from foresay.records.provenance import provenance
from foresay.records.recording import Recording
from foresay.spec.recipe import Resources
from foresay.spec.recipes import read_drafter, read_length, read_rule
from foresay_lab.replay.cost_tables import CostModel, PassCounter, drafter_names, read_costs
from foresay_lab.replay.replay import expect, plain_decoding, replay

Span = tuple[float, float | None, float | None]
"""(value, low, high) from `_finite`."""


def token_only_resources(recorded: Recording) -> Resources:
    """Return the resources of drafters that need only the target's tokens."""
    model = RecordingModel([recorded.records[0].text], recorded.vocab_size)
    return Resources(LoadedModel(recorded.model, model, None, recorded.eos))


def digest_of(path: str | os.PathLike[str]) -> str:
    """Return a digest of a file's contents. Raises ConfigError for a file that cannot be read."""
    try:
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()[:16]
    except OSError as error:
        raise unreadable(path, error) from None


@contextmanager
def open_grid(
    path: str | os.PathLike[str] | None, by: Mapping[str, Any]
) -> Iterator[tuple[Mapping[tuple[str, str], Line], Callable[[Line], None]]]:
    """Open or resume a file of replay results; None stores nothing. Yields (the earlier results, a function that appends one).

    by: settings that must be equal. The results are by digest of the recording and name of the method. Raises ConfigError as
    LineWriter does.
    """
    if path is None:
        yield {}, lambda line: None
        return
    with LineWriter(path, "foresay-replays", 1, {"by": dict(by), "provenance": provenance()}, _REPLAY) as writer:
        yield {(one["digest"], one["method"]): one for one in writer.lines}, writer.append


class _Replay(BaseModel):
    """One line of a file of replay results, from `replay_method`."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)

    recording: str
    digest: str
    method: str
    estimate: bool
    tokens_per_pass: Span
    acceptance_rate: Span | None
    draft_utilization: float | None
    discard_rate: float
    seconds: float
    tokens_per_s: float = 0.0
    speed_up: float = 0.0
    swi: float = 0.0


_REPLAY: Schema[_Replay] = Schema(_Replay, "a replay")


@dataclass(slots=True)
class ReplaySettings:
    """The settings of replays: batch size, profile and cost table."""

    batch_size: int = 1
    profile: Profile | None = None
    costs: CostModel | None = None
    target_cost: str | None = None
    _plain: dict[int, float] = field(default_factory=dict)
    """id() of a recording -> expected tokens per second of plain decoding."""

    def plain(self, recorded: Recording, known: Profile) -> float:
        """Return the expected tokens per second of plain decoding."""
        if id(recorded) not in self._plain:
            self._plain[id(recorded)] = plain_decoding(recorded, self.batch_size, known).tokens_per_s
        return self._plain[id(recorded)]

    @classmethod
    def read(cls, batch_size: int, profile: str | None, costs: str | None, target_cost: str | None) -> ReplaySettings:
        """Load the profile and the cost table by file or table name."""
        known = None if profile is None else Profile.load(profile)
        return cls(batch_size, known, None if costs is None else read_costs(costs), target_cost)


def replay_method(method: Method, recorded: Recording, resources: Resources, by: ReplaySettings) -> dict[str, Any]:
    """Replay a method on a recording and return the results.

    With a cost table, they have the standardised walltime improvement, in which n-gram drafters cost nothing.
    """
    rule, policy, known = read_rule(method.rule), read_length(method.own_length), by.profile
    drafter = read_drafter(method.drafter).prepare(resources)()
    counter = None if by.costs is None else PassCounter(drafter, drafter_names(method.drafter))
    done = replay(recorded, drafter, policy, rule=rule, batch_size=by.batch_size, profile=known)
    stats, rate = done.stats, done.rate()
    out: dict[str, Any] = {
        "method": method.name,
        "estimate": not done.exact,
        "tokens_per_pass": _finite(done.efficiency()),
        "acceptance_rate": None if rate is None else _finite(rate),
        "draft_utilization": stats.draft_utilization,
        "discard_rate": stats.discard_rate,
        "verification_rate": stats.verification_rate,
        "seconds": done.seconds,
        "stats": stats.as_dict(),
    }
    if "doubt" in recorded.settings:
        out["doubt"] = recorded.settings["doubt"]
    if known is not None:
        expected = expect(done, recorded, known)
        out |= {
            "tokens_per_s": expected.tokens_per_s,
            "speed_up": expected.tokens_per_s / by.plain(recorded, known),
            "predicted_with": known.model,
        }
    if by.costs is not None and by.target_cost is not None and counter is not None:
        spent = counter.passes
        spent[by.target_cost] += stats.num_passes  # a draft model may have the same name as the target
        out["swi"] = by.costs.swi(by.target_cost, stats.num_tokens, spent)
    return out


def replayer(setup: Mapping[str, Any]) -> Callable[[Mapping[str, Any]], dict[str, Any]]:
    """Return a function that performs a task {recording: index, method: {drafter, length, rule}}.

    setup: recordings, load, batch_size, profile, costs, target_cost. load: arguments of `foresay.load` for the target, for
    drafters that need it. Recordings and models are loaded once.
    """
    by = ReplaySettings.read(*(setup[name] for name in ("batch_size", "profile", "costs", "target_cost")))
    recordings = cache(lambda number: Recording.load(setup["recordings"][number]))

    @cache
    def resources_of(name: str) -> Resources:
        found = load(**{**setup["load"], "target": name}).resources
        assert found is not None
        return found

    def perform(task: Mapping[str, Any]) -> dict[str, Any]:
        method, recorded = Method(**task["method"]), recordings(task["recording"])
        if not read_drafter(method.drafter).reads_target:
            return replay_method(method, recorded, token_only_resources(recorded), by)
        name = str(setup["load"].get("target", recorded.model) or "")
        if not name:
            text = "does not name the model that generated it; give --model"
            raise ConfigError(text, param="path", value=setup["recordings"][task["recording"]])
        return replay_method(method, recorded, resources_of(name), by)

    return perform


def _finite(values: Sequence[float]) -> list[float | None]:
    """Replace infinite bounds by None for JSON; a single prompt has no finite interval."""
    return [value if math.isfinite(value) else None for value in values]
