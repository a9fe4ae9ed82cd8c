"""Benchmarks: methods and other engines take turns on the same prompts."""
