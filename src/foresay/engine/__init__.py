"""Continuous batching: admission, scheduling, stops, failures and statistics around the decoding step."""

from foresay.engine.loop import Engine
from foresay.engine.stats import Stats

__all__ = ["Engine", "Stats"]
