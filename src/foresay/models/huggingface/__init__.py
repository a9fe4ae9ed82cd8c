"""Transformers models over the slot cache."""
