"""Candidates of tuning, predicted and measured, and the choice among them."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from foresay.errors import ConfigError
from foresay.generation.method import PLAIN, Method
from foresay.spec.expressions import Call, parse
from foresay.spec.recipes import read_drafter
from foresay_lab.replay.replay import Expected

THRESHOLDS = (0.3, 0.5, 0.7)
MATRICES = ("[[5, 10], [0, 10]]", "[[8, 10], [0, 5]]", "[[13, 10], [0, 10]]")
"""Draft lengths of a cascade of a draft model and Max-Gram: two from CS-Drafting, and one between them."""
PAYS = 1.05
"""Least speed-up that is a gain, and least advantage over the default of another method that is recommended."""
_ROUGH = 0.08
"""Relative difference between prediction and measurement from which on a prediction is rough."""


def with_draft(draft: str) -> list[Method]:
    """Return the candidate methods for a draft model: lengths, confidence thresholds, and cascades with Max-Gram.

    draft: "model(NAME)" or "self(LAYERS)". Raises ConfigError for other expressions.
    """
    call = parse(draft)
    if call.name not in ("model", "self") or not call.values:
        raise ConfigError("must be model(NAME) or self(LAYERS)", param="draft", value=draft)
    member = Call("cascade", ((call.name, call.values[0][1]), (None, "max_gram")))
    cascades = [f"{str(member)[:-1]}; k={matrix})" for matrix in MATRICES]
    lengths = ["2", "4", "6", "8", "heuristic", "throughput", *(f"confidence({t})" for t in THRESHOLDS)]
    return [*(Method(draft, length) for length in lengths), *(Method(cascade) for cascade in cascades)]


@dataclass(frozen=True, slots=True)
class Candidate:
    """A method at a batch size, with its predicted performance."""

    method: Method
    batch_size: int
    expected: Expected | None
    """None for a method that a replay cannot predict."""
    plain: Expected
    is_own: bool = False
    """True for a method that is run live whatever is predicted."""
    is_default: bool = False
    """True for the target's own default."""

    @property
    def speed_up(self) -> float | None:
        """The expected speed-up over plain decoding at the same batch size; None if it is not predicted."""
        return None if self.expected is None else self.expected.tokens_per_s / self.plain.tokens_per_s


@dataclass(frozen=True, slots=True)
class Confirmed:
    """A candidate with the results of its live runs."""

    candidate: Candidate
    tokens_per_s: float
    """Plain decoding's median at the same batch size, times the speed-up: a machine that becomes slower between the runs of two
    methods changes neither."""
    speed_up: float
    """Median over repeats, relative to the plain decoding next to each run; low and high are the extremes."""
    low: float
    high: float
    predicted: float | None = None
    """The speed-up predicted for the prompts and tokens of the live runs; None if the method cannot be replayed."""


@dataclass(slots=True)
class Tuning:
    """The results of tuning."""

    candidates: list[Candidate] = field(default_factory=list)
    """In order of decreasing expected throughput."""
    confirmed: list[Confirmed] = field(default_factory=list)
    """In order of decreasing measured throughput."""
    failed: dict[str, str] = field(default_factory=dict)
    """Method that could not be replayed or run live -> error message."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Part of the search -> its duration in seconds."""
    skipped: int = 0
    """Number of candidates for whose replay no time was left."""
    plain_spread: float = 0.0
    """Median relative difference between two consecutive runs of plain decoding."""

    @property
    def best(self) -> Confirmed | None:
        """The method to use; None for plain decoding.

        The fastest with a gain above the spread of plain decoding; but the default, where that is not faster by PAYS, and where
        nothing gains and the default costs nothing.
        """
        paying = [one for one in self.confirmed if one.speed_up > 1 + self.plain_spread]
        found = max(paying, key=lambda one: one.tokens_per_s, default=None)
        size = None if found is None else found.candidate.batch_size
        same = [one for one in self.confirmed if size in (None, one.candidate.batch_size)]
        default = next((one for one in same if one.candidate.is_default), None)
        if default is None or (found is not None and found.tokens_per_s > PAYS * default.tokens_per_s):
            return found
        return default if found is not None or default.speed_up > 1 / PAYS else None


def rate(candidate: Candidate) -> float:
    """Return the expected tokens per second; 0 if they are not predicted."""
    return 0.0 if candidate.expected is None else candidate.expected.tokens_per_s


def pick(
    candidates: Sequence[Candidate], *, count: int = 3, latency_s: float | None = None
) -> tuple[list[Candidate], Candidate | None]:
    """Return (the `count` best drafting candidates and those that are run in any case, the best plain one).

    latency_s: maximum seconds between two tokens of one request; one without a prediction has plain decoding's. Candidates are
    ranked by tokens per second at any batch size.
    """
    allowed = [c for c in candidates if latency_s is None or (c.expected or c.plain).latency_s <= latency_s]
    ranked = sorted(allowed, key=rate, reverse=True)
    paying = [one for one in ranked if one.method.name != PLAIN and (one.speed_up or 0.0) > 0.97 and not one.is_own]
    plain = next((one for one in ranked if one.method.name == PLAIN), None)
    return paying[:count] + [one for one in ranked if one.is_own], plain


def is_rough(measured: float, predicted: float) -> bool:
    """Return True for a prediction of a speed-up that its measurement does not confirm."""
    return abs(measured / predicted - 1) > _ROUGH


def advice(model: str, speeds: Mapping[Method, float], options: Sequence[str] = ()) -> tuple[str, str]:
    """Return (what to do, the command that serves the model so).

    speeds: speed-up of each method, the default first. options: of loading, for the command; those of draft models are left out
    if none is used.
    """
    default, best = next(iter(speeds)), max(speeds, key=lambda one: speeds[one])
    pays = speeds[best] > max(1.0, speeds[default]) * PAYS
    loads = pays and read_drafter(best.drafter).loads_model
    start = " ".join(["foresay serve", shlex.quote(model), *(one for one in options if loads or "--draft-" not in one)])
    if pays:
        length = f" --length {shlex.quote(best.length)}" if best.length else ""
        return "Use", f"{start} --drafter {shlex.quote(best.drafter)}{length}"
    if speeds[default] < 1 / PAYS:
        return "Turn speculation off", f"{start} --drafter none"
    return "Keep the default", start
