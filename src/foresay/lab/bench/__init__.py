"""Contenders on the same prompts, in turn."""
