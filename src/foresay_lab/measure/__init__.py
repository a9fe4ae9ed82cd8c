"""Measurement of forward passes and runs on this machine."""
