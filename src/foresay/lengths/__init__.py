"""Length policies: how many tokens to draft in a step, one policy per file."""

from collections.abc import Callable

from foresay.decoding.protocols import LengthPolicy
from foresay.lengths.acceptance import AcceptanceLength
from foresay.lengths.confidence import ConfidenceLength, EntropyLength
from foresay.lengths.constant import ConstantLength
from foresay.lengths.heuristic import HeuristicLength
from foresay.lengths.throughput import ThroughputLength

LENGTHS: dict[str, Callable[..., LengthPolicy]] = {
    "constant": ConstantLength,
    "heuristic": HeuristicLength,
    "confidence": ConfidenceLength,
    "entropy": EntropyLength,
    "acceptance": AcceptanceLength,
    "throughput": ThroughputLength,
}
"""Length policies by name."""

__all__ = [
    "LENGTHS",
    "AcceptanceLength",
    "ConfidenceLength",
    "ConstantLength",
    "EntropyLength",
    "HeuristicLength",
    "ThroughputLength",
]
