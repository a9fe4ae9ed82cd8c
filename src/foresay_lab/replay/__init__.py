"""Replay of recordings without the target, and predictions from it."""
