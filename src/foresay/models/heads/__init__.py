"""Heads: drafts of one layer that read the target's hidden states."""
