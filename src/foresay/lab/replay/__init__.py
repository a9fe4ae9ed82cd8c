"""Recordings decoded again without the target, and what they predict."""
