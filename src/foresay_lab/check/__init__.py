"""Checks of a user's drafts, models and versions against a recording and an earlier result."""
