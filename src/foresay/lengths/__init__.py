"""How many tokens to guess in a step."""

from foresay.lengths.constant import ConstantLength

__all__ = ["ConstantLength"]
