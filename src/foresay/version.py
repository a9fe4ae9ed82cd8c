"""The version of the package, which the lower floors read without its face."""

__version__ = "0.1.0"
