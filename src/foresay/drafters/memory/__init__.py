"""Earlier texts that drafters copy from: indexed, bounded, and on disk if a folder is given."""

from foresay.drafters.memory.memory import Memory

__all__ = ["Memory"]
