"""Expected throughput from a replay and a profile: each replayed pass takes its measured time.

Owns the sum of prefill, drafting and target passes. Runs no model and does not measure times.
"""

from __future__ import annotations

from dataclasses import dataclass

from foresay.records.profile import Profile
from foresay.records.recording import Recording
from foresay_lab.replay.replay import Replay


@dataclass(frozen=True, slots=True)
class Expected:
    """The predicted counts and times of a live run over the recorded prompts."""

    tokens: int
    passes: int
    """Target passes, each over a batch."""
    row_passes: int
    """Sum of the batch sizes of all target passes."""
    seconds: float
    """Total time, including prompt processing."""
    draft_s: float
    fill_s: float

    @property
    def tokens_per_s(self) -> float:
        """Output tokens per second."""
        return self.tokens / self.seconds

    @property
    def tokens_per_pass(self) -> float:
        """Output tokens per row and pass."""
        return self.tokens / self.row_passes

    @property
    def latency_s(self) -> float:
        """Mean seconds between two tokens of a request while it decodes."""
        return (self.seconds - self.fill_s) / self.passes / self.tokens_per_pass


def expect(replay: Replay, recording: Recording, profile: Profile, drafter: str | None = None) -> Expected:
    """Predict the time of a live run from a replay's passes.

    drafter: the key of the drafter's times in the profile; by default the drafting times of the replay are used, in which the
    drafter runs as it does live. Raises ConfigError for a profile without timings.
    """
    clock = profile.clock()
    fill = sum(profile.fill_seconds(len(record.prompt) - 1) for record in recording.records)
    draft = 0.0
    target = 0.0
    for one in replay.passes:
        target += clock(one.batch, one.width, one.context)
        draft += one.draft_s if drafter is None else profile.draft_seconds(drafter, one.batch, one.drafted)
    if drafter is not None:
        draft += profile.draft_fills.get(drafter, 0.0) * sum(len(record.prompt) for record in recording.records)
    return Expected(
        tokens=sum(one.tokens for one in replay.passes),
        passes=len(replay.passes),
        row_passes=sum(one.batch for one in replay.passes),
        seconds=target + draft + fill,
        draft_s=draft,
        fill_s=fill,
    )
