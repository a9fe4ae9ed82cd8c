"""Statistics over Steps. Counts are stored and all rates are derived from them, so that nothing is counted twice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from foresay.checks import changed_fields
from foresay.decoding.outcome import Origin, Step


@dataclass(slots=True)
class Stats:
    """Counts over the Steps of one or more requests."""

    num_passes: int = 0
    """Target passes, one per Step."""
    num_tokens: int = 0
    """Committed tokens."""
    num_drafted: int = 0
    """Draft tokens proposed."""
    num_tested: int = 0
    """Draft tokens that the rule tested."""
    num_accepted: int = 0
    """Draft tokens committed."""
    origins: Counter[Origin] = field(default_factory=Counter)
    """Committed tokens by origin."""
    accepted_lengths: Counter[int] = field(default_factory=Counter)
    """Number of Steps by number of accepted draft tokens."""
    tested_at: Counter[int] = field(default_factory=Counter)
    """Draft tokens tested, by position in the draft from 0."""
    accepted_at: Counter[int] = field(default_factory=Counter)
    """Draft tokens accepted, by position in the draft from 0."""
    draft_s: float = 0.0
    """Seconds spent drafting; each row counts its share of its steps' time, here and below."""
    target_s: float = 0.0
    """Seconds spent in the target."""
    total_s: float = 0.0
    """Seconds of the whole steps."""

    def __repr__(self) -> str:
        """Return what was counted."""
        return changed_fields(self, Stats())

    @classmethod
    def of(cls, steps: Iterable[Step]) -> Stats:
        """Return the counts over some Steps.

        Args:
            steps: Steps of one or more requests.
        """
        stats = cls()
        for step in steps:
            stats.add(step)
        return stats

    def add(self, step: Step) -> None:
        """Count one Step.

        Args:
            step: The Step; one without committed and drafted tokens (a cancellation) is not a pass.
        """
        if not step.token_ids and not step.num_drafted:
            return
        self.num_passes += 1
        self.num_tokens += len(step.token_ids)
        self.num_drafted += step.num_drafted
        self.num_tested += step.num_tested
        self.num_accepted += step.num_accepted
        self.origins.update(step.origins)
        self.accepted_lengths[step.num_accepted] += 1
        self.tested_at.update(dict(enumerate(step.tested)))
        self.accepted_at.update(range(step.num_accepted))
        self.draft_s += step.draft_s / step.batch_size
        self.target_s += step.target_s / step.batch_size
        self.total_s += step.total_s / step.batch_size

    def merge(self, other: Stats) -> None:
        """Add the counts of another Stats.

        Args:
            other: Stats of other Steps.
        """
        for name in self.__slots__:
            own, added = getattr(self, name), getattr(other, name)
            if isinstance(own, Counter):
                own.update(added)
            else:
                setattr(self, name, own + added)

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted / tested draft tokens; None if none was tested."""
        return self.num_accepted / self.num_tested if self.num_tested else None

    @property
    def draft_utilization(self) -> float | None:
        """Accepted / drafted tokens; None if none was drafted."""
        return self.num_accepted / self.num_drafted if self.num_drafted else None

    @property
    def block_efficiency(self) -> float | None:
        """Committed tokens per target pass; None without passes."""
        return self.num_tokens / self.num_passes if self.num_passes else None

    @property
    def discard_rate(self) -> float | None:
        """(drafted - accepted) / committed tokens; None without tokens."""
        return (self.num_drafted - self.num_accepted) / self.num_tokens if self.num_tokens else None

    @property
    def verification_rate(self) -> float | None:
        """Target passes / committed tokens; None without tokens."""
        return self.num_passes / self.num_tokens if self.num_tokens else None

    def as_dict(self) -> dict[str, object]:
        """Return counts and rates as plain types, for JSON."""
        return {
            "num_passes": self.num_passes,
            "num_tokens": self.num_tokens,
            "num_drafted": self.num_drafted,
            "num_tested": self.num_tested,
            "num_accepted": self.num_accepted,
            "acceptance_rate": self.acceptance_rate,
            "draft_utilization": self.draft_utilization,
            "block_efficiency": self.block_efficiency,
            "origins": {origin.value: self.origins[origin] for origin in Origin},
            "accepted_lengths": {str(k): v for k, v in sorted(self.accepted_lengths.items())},
            "tested_at": {str(k): v for k, v in sorted(self.tested_at.items())},
            "accepted_at": {str(k): v for k, v in sorted(self.accepted_at.items())},
            "draft_s": self.draft_s,
            "target_s": self.target_s,
            "total_s": self.total_s,
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Stats:
        """Return Stats from plain types.

        Args:
            values: The result of `as_dict`.
        """
        stats = cls(**{name: values[name] for name in cls.__slots__ if name not in _COUNTERS})
        stats.origins = Counter({origin: values["origins"].get(origin.value, 0) for origin in Origin})
        for name in ("accepted_lengths", "tested_at", "accepted_at"):
            setattr(stats, name, Counter({int(k): v for k, v in values[name].items()}))
        return stats


_COUNTERS = frozenset({"origins", "accepted_lengths", "tested_at", "accepted_at"})
