"""Text generation: `load`, the Generator, and sessions over an engine."""
