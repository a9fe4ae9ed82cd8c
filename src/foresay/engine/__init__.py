"""Requests in, Steps out: scheduling, stops, failures and statistics around the one step."""

from foresay.engine.loop import Engine
from foresay.engine.stats import Stats

__all__ = ["Engine", "Stats"]
